"""`python -m django run_worker`: executes the shop's runs until SIGTERM or SIGINT.

`replaykit db migrate` has made replaykit's tables before. Django is set up by then, so bodies may use its ORM.
`replaykit worker MODULE` does the same with child processes, for a module that calls `django.setup()` before it imports
`django_shop.workflows`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_shop.workflows import fulfil
from replaykit import Worker


class Command(BaseCommand):
    """The command."""

    help = "Execute runs of this project's workflows."

    def add_arguments(self, parser: CommandParser) -> None:
        """`--queue` may be repeated."""
        parser.add_argument("--queue", action="append", default=[])

    def handle(self, *args: Any, **options: Any) -> None:
        """Work until a signal comes, then drain."""
        queues = options["queue"] or ["default"]
        asyncio.run(Worker(workflows=[fulfil], queues=queues).run())

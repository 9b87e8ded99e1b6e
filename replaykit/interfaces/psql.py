"""`replaykit db psql`: finds a psql and waits for it, so that an embedded Postgres stays up as long as it is open."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from replaykit.errors import ConfigurationError
from replaykit.runtime.embedded import find_binaries
from replaykit.runtime.target import Target

__all__ = ["run_psql"]


def run_psql(target: Target, arguments: Sequence[str]) -> int:
    """Run psql on the target with these arguments and return its exit code."""
    program = _find()
    if program is None:
        raise click.ClickException(
            "there is no psql here: install Postgres's client programs, or `replaykit[embedded]`"
        )
    environment = dict(os.environ)
    if target.given is None:  # a pooler would refuse this option; the embedded server has none before it
        environment.setdefault("PGOPTIONS", f'-c search_path="{target.schema}",public')
    with subprocess.Popen([program, target.open(), *arguments], env=environment) as child:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for psql
        try:
            return child.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def _find() -> str | None:
    found = shutil.which("psql")
    if found is None:
        try:
            beside = Path(find_binaries()) / "psql"
        except ConfigurationError:
            return None
        found = str(beside) if beside.is_file() else None
    return found

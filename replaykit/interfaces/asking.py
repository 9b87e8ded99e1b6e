"""What a person asks of runs: `replaykit cancel` and `retry`, the same of one after another, and `replaykit resolve`."""

from __future__ import annotations

import asyncio
import getpass
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, Literal

import click

from replaykit.errors import InDoubt, NotLanded, NotRetryable, RunNotFound
from replaykit.interfaces.output import say
from replaykit.runtime.client import Client, Handle
from replaykit.runtime.inspect import Inspector
from replaykit.runtime.target import Target
from replaykit.runtime.words import landed_json

__all__ = ["cancel_runs", "resolve_call", "retry_runs"]

STDIN: Final = "-"

Verb = Callable[[Handle[Any]], Awaitable[str]]


def cancel_runs(target: Target, references: Iterable[str], *, by: str | None, as_json: bool) -> int:
    """Ask runs to end. Returns the exit code."""
    who = by or _login()
    return _ask_each(target, references, lambda handle: handle.cancel(by=who), as_json=as_json)


def retry_runs(
    target: Target, references: Iterable[str], *, accept: Literal["inputs"] | None, by: str | None, as_json: bool
) -> int:
    """Take failed and held runs on. Returns the exit code."""
    who = by or _login()
    return _ask_each(target, references, lambda handle: handle.retry(accept=accept, by=who), as_json=as_json)


def resolve_call(
    target: Target,
    reference: str,
    key: str,
    *,
    landed: str | None,
    not_landed: bool,
    by: str | None,
    comment: str | None,
    as_json: bool,
) -> int:
    """Give a person's word on one call: it has landed with this JSON, it has not, or (neither) the step fails.

    Raises:
        click.UsageError: `landed` is not JSON. The sentence does not name the value: it may be a secret.
    """
    answer = landed_json(landed) if landed is not None else NotLanded() if not_landed else InDoubt()
    if answer is None:
        raise click.UsageError("--landed is not JSON; text is written --landed '\"...\"'")
    who = by or _login()

    async def ask() -> str:
        async with Client(target.open(), target.schema) as client:
            return await client.handle(run_id).resolve(key, answer, by=who, comment=comment)

    with Inspector(target) as inspector:
        run_id = inspector.find(reference)
    _print(str(run_id), asyncio.run(ask()), as_json)
    return 0


def _ask_each(target: Target, references: Iterable[str], verb: Verb, *, as_json: bool) -> int:
    """One refusal is one sentence and exit code 1; the others are asked all the same."""

    async def ask() -> int:
        code = 0
        async with Client(target.open(), target.schema) as client:
            for reference in _expanded(references):
                try:
                    run_id = inspector.find(reference.replace("\0", "\\0"))
                    state = await verb(client.handle(run_id))
                except (RunNotFound, NotRetryable) as error:
                    say(str(error))
                    code = 1
                    continue
                _print(str(run_id), state, as_json)
        return code

    with Inspector(target) as inspector:
        inspector.check()
        return asyncio.run(ask())


def _expanded(references: Iterable[str]) -> Iterator[str]:
    """`-` stands for what stdin says, one run a line; it is read as it comes."""
    for reference in references:
        if reference != STDIN:
            yield reference
            continue
        for line in sys.stdin.buffer:
            if named := line.decode(errors="backslashreplace").strip():
                yield named


def _print(run_id: str, state: str, as_json: bool) -> None:
    # One object a line, also on a terminal: there may be thousands.
    click.echo(f'{{"id": "{run_id}", "state": "{state}"}}' if as_json else f"{run_id} {state}")


def _login() -> str | None:
    """Who sits here, as the system knows; a container may not."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None

"""Plays a workflow as users do: a client, a worker, a real Postgres. And once more from its journal alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from replaykit import Client, RunFailed, Worker, Workflow
from replaykit.limits import Settings
from replaykit.replay.entries import Entry
from replaykit.replay.failures import decode_error
from tests.crash.rows import Rows, replay_in_process

__all__ = ["ROOT", "Played", "Said", "lines", "outcome_of", "play", "python", "replayed", "replaykit"]

ROOT = Path(__file__).resolve().parents[2]


class Played(NamedTuple):
    """What became of a run: its outcome in the first run, and when only its journal is read."""

    run_id: uuid.UUID
    first: Any
    again: Any
    entries: list[Entry]


class Said(NamedTuple):
    """What a process left."""

    code: int
    out: str
    err: str


def lines(said: Path) -> list[str]:
    """What bodies have said in that file, in order."""
    return said.read_text().splitlines()


async def play(
    dsn: str, workflow: Workflow[..., Any], *args: Any, more: Sequence[Workflow[..., Any]] = (), **options: Any
) -> Played:
    """Start it, wait for its end, replay its journal. An error stands for itself, as the outcome.

    Args:
        dsn: the database.
        workflow: what to start.
        args: its arguments.
        more: what else the worker has.
        options: settings of the worker.
    """
    async with (
        Client(dsn) as client,
        Worker(client, workflows=[workflow, *more], settings=Settings(**options)),
    ):
        handle = await client.start(workflow, *args)
        first = await outcome_of(handle)
    again, entries = await asyncio.to_thread(replayed, dsn, workflow, handle.id)
    return Played(handle.id, first, again, entries)


async def outcome_of(handle: Any) -> Any:
    """The result, or the error that the run failed with."""
    try:
        return await handle.result(timeout=30)
    except RunFailed as failed:
        return failed.__cause__


def replayed(dsn: str, workflow: Workflow[..., Any], run_id: uuid.UUID) -> tuple[Any, list[Entry]]:
    """The outcome of the journal alone, with no body running, and that journal."""
    rows = Rows(dsn)
    try:
        entries = rows.entries(run_id)
        execution = replay_in_process(rows, workflow, run_id)
    finally:
        rows.close()
    try:
        assert execution.hold_reason is None, execution.hold_reason
        ended = execution.ended
        assert ended is not None, f"it waits for {list(execution.open)}"
        if ended.error is not None:
            return decode_error(ended.error), entries
        assert ended.output is not None
        return execution.info.decode_result(ended.output), entries
    finally:
        execution.leave()


def replaykit(dsn: str, *arguments: str) -> Said:
    """The command line as a process of its own, which has none of the test's modules."""
    code = "import sys; from replaykit.interfaces.cli import main; sys.argv[0] = 'replaykit'; main()"
    return python("-c", code, *arguments, REPLAYKIT_DATABASE_URL=dsn)


def python(*arguments: str, **variables: str) -> Said:
    """A fresh process of this Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYKIT_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)

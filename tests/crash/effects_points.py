"""Points at which a worker's process can be made to stop, around the call of a step with an effect.

A test arms one point for one step (`Points.arm`): the next process that gets there writes a file and goes no further, with the
whole of its event loop, or with the thread that a sync body runs in. Then the test kills it, or lets it go on. In the worker's
process `install` puts the points into the writer and the executor; bodies call `reach` themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from replaykit.postgres.database import Database
from replaykit.replay.entries import Unit, Verdict
from tests.runtime.facts import eventually

__all__ = ["FOLDER", "Point", "Points", "install", "reach"]

FOLDER: Final = "REPLAYKIT_TEST_POINTS"
"""The variable that holds the folder through which a test and its workers speak."""


class Point(StrEnum):
    """Where a process stops; for a step without an intent the first two are one: its body is about to be started."""

    BEFORE_INTENT = "before the intent"
    INTENT_COMMITTED = "intent committed, body not begun"
    BEFORE_REQUEST = "body begun, request not sent"
    HELD = "request received, nothing done"  # by the server, not here
    DONE = "done, not answered"  # by the server, not here
    BEFORE_RECORD = "answered, not recorded"
    RECORDED = "recorded"
    COMMIT_LOST = (
        "the commit's request is lost"  # not a stop: the database's connection is cut before the commit is sent
    )
    COMMIT_UNANSWERED = "the commit's answer is lost"  # after it


class Points:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arm(self, point: Point, step: str) -> None:
        """The next process that gets there with that step stops, once."""
        for name in ("go", "stop", "reached"):
            (self.folder / name).unlink(missing_ok=True)
        _write(self.folder / "stop", f"{point}\n{step}")

    def wait_reached(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The pid of the process that has stopped there; `meanwhile` is called until one has."""
        reached = self.folder / "reached"

        def is_there() -> bool:
            if reached.exists():
                return True
            meanwhile()
            return False

        eventually(is_there, f"{self.folder / 'stop'} is reached")
        return int(reached.read_text())

    def go(self) -> None:
        """What has stopped goes on."""
        _write(self.folder / "go", "")


def reach(point: Point, step: str) -> None:
    """Stop here, if a test wants that. In the process of a worker."""
    if _wanted(point, step):
        go = Path(os.environ[FOLDER]) / "go"
        while not go.exists():
            with contextlib.suppress(OSError):  # libfaketime, when the clock is moved meanwhile
                time.sleep(0.005)


def _wanted(point: Point, step: str) -> bool:
    if FOLDER not in os.environ:
        return False
    folder = Path(os.environ[FOLDER])
    stop, mine = folder / "stop", folder / f"taken-{os.getpid()}"
    try:
        if stop.read_text() != f"{point}\n{step}":
            return False
        stop.rename(mine)  # only one process can
    except FileNotFoundError:
        return False
    _write(folder / "reached", str(os.getpid()))
    return True


def _write(path: Path, text: str) -> None:
    """At once: nobody reads half of it."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.write_text(text)
    made.rename(path)


def install() -> None:
    """Put the points into this process's writer and executor."""
    from replaykit.postgres.transaction import Transaction, _say
    from replaykit.runtime import writer
    from replaykit.runtime.executor import Executor

    send, start_body, commit = writer._send, Executor._start_body, Transaction.commit

    async def _send(connection: Any, units: list[Unit]) -> dict[Any, Verdict]:
        for unit in units:
            _each(Point.BEFORE_INTENT, (intent.key for intent in unit.intents))
            _each(Point.BEFORE_RECORD, (entry.key for entry in unit.entries))
        verdicts = await send(connection, units)
        for unit in units:
            if verdicts[unit.run_id] is Verdict.OK:
                _each(Point.INTENT_COMMITTED, (intent.key for intent in unit.intents))
                _each(Point.RECORDED, (entry.key for entry in unit.entries))
        return verdicts

    def _start_body(self: Executor, action: Any, started_at: int) -> None:
        if not action.call.has_intent:
            _each(Point.BEFORE_INTENT, [action.call.key])
            _each(Point.INTENT_COMMITTED, [action.call.key])
        start_body(self, action, started_at)

    async def _commit(self: Transaction, unit: Unit) -> Any:
        key = str(unit.within)
        reach(Point.BEFORE_RECORD, key)
        lost, unanswered = _wanted(Point.COMMIT_LOST, key), _wanted(Point.COMMIT_UNANSWERED, key)
        pid = began = None
        if lost or unanswered:
            # Behind a pooler the connection's own pid is nobody's, and the process goes on to serve others.
            here = (await _say(self._owner, "select pg_backend_pid(), now()"))[-1]
            pid, began = here.get_value(0, 0), here.get_value(0, 1)
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as wire:
                wire.shutdown(socket.SHUT_RDWR if lost else socket.SHUT_RD)
        outcome = await commit(self, unit)
        if unanswered:  # a worker that looks before the server has got to the commit rightly runs the body again
            await _over(self._connections.database, pid, began)
        if outcome.verdict is Verdict.OK:
            reach(Point.RECORDED, key)
        return outcome

    writer._send = _send
    Executor._start_body = _start_body  # type: ignore[method-assign]
    Transaction.commit = _commit  # type: ignore[method-assign]


async def _over(database: Database, pid: bytes | None, began: bytes | None) -> None:
    """Wait until that process of the server's is done with the transaction that began then."""
    assert pid is not None and began is not None
    there = "select from pg_stat_activity where pid = %s::int and xact_start = %s::timestamptz"
    looker, _ = await database.connect_plain()
    async with looker:
        while await (await looker.execute(there, [pid.decode(), began.decode()])).fetchone() is not None:
            await looker.rollback()  # what a transaction has seen of it once, it sees again


def _each(point: Point, steps: Iterable[str]) -> None:
    for step in steps:
        reach(point, step)

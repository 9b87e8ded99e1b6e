"""Starts that share a commit: a self-clocking group, as the journal's writer has one.

What arrives while a statement is under way goes into the next; one start alone waits for nobody. Ids are made before
the first sending, so a start whose acknowledgement was lost is sent again and recognises its own row.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replaykit.errors import DatabaseUnreachable
from replaykit.limits import BATCH_BYTES_MAX, START_RUNS_MAX
from replaykit.postgres.runs import Started, StartRow, notify, parse_started, start_runs
from replaykit.postgres.schema import work_channel
from replaykit.runtime.line import Line

__all__ = ["Starts"]

_HINT_SECONDS = 0.02  # hints take a lock that all commits with a NOTIFY share: under load one tells of many starts


@dataclass(slots=True)
class _Waiting:
    row: StartRow
    answer: asyncio.Future[Started]


class Starts:
    """The starts of one client on one event loop."""

    def __init__(self, line: Line, schema: str) -> None:
        self._line = line
        self._channel = work_channel(schema)
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._hinted_at = 0.0

    async def start(self, row: StartRow) -> Started:
        """Durable when this returns: a new run, or the one that holds the row's key."""
        waiting = _Waiting(row, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="replaykit starts")
        return await waiting.answer

    async def _work(self) -> None:
        """Send what is there until nothing is."""
        hint_owed = False
        batch: list[_Waiting] = []
        try:
            while self._waiting or hint_owed:
                if self._waiting:
                    batch = self._take()
                    await self._send(batch)
                    hint_owed = True
                if not self._waiting or time.monotonic() - self._hinted_at > _HINT_SECONDS:
                    await self._hint()
                    hint_owed = False
        finally:
            self._task = None
            for waiting in (*batch, *self._waiting):  # nobody is left here unless this task was cancelled
                waiting.answer.cancel()
            self._waiting.clear()

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < START_RUNS_MAX and size < BATCH_BYTES_MAX:
            waiting = self._waiting.popleft()
            if not waiting.answer.cancelled():  # its caller has left before it was ever sent
                batch.append(waiting)
                size += len(waiting.row.input)
        return batch

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        """One statement for all; if the database refuses a row, each goes alone, and it fails only its own start."""
        if not batch:
            return
        try:
            found = parse_started(await self._line.run_all(start_runs([waiting.row for waiting in batch])))
        except DatabaseUnreachable as error:
            for waiting in batch:
                _fail(waiting, DatabaseUnreachable(str(error)))
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
            else:
                for waiting in batch:
                    await self._send([waiting])
        else:
            for waiting in batch:
                answer = found.get(waiting.row.id)
                if answer is None:
                    _fail(
                        waiting,
                        RuntimeError(f"run {waiting.row.id} was started and is not there: was it deleted meanwhile?"),
                    )
                elif not waiting.answer.done():
                    waiting.answer.set_result(answer)

    async def _hint(self) -> None:
        """Tell workers to look now. They also look by themselves, so a hint that fails is no error."""
        self._hinted_at = time.monotonic()
        with contextlib.suppress(Exception):
            await self._line.run(notify(self._channel))

    async def close(self) -> None:
        """Wait until what was asked for is sent."""
        if self._task is not None:
            await asyncio.wait([self._task])


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)

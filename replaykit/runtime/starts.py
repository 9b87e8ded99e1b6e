"""Starts that share a commit: a self-clocking group, as the journal's writer has one.

What arrives while a statement is under way goes into the next; one start alone waits for nobody. Ids are made before
the first sending, so a start whose acknowledgement was lost is sent again and recognises its own row.

A start whose key stands in a transaction that somebody has left open (`replaykit.start` in SQL) leaves the group for a
lane apart: it waits there until that transaction ends, its neighbours do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from replaykit.errors import DatabaseUnreachable
from replaykit.events import log
from replaykit.limits import BATCH_BYTES_MAX, CLIENT_RETRY_SECONDS, START_RUNS_MAX
from replaykit.postgres.database import Database, is_lock_timeout
from replaykit.postgres.runs import Started, StartRow, notify, parse_started, start_runs
from replaykit.postgres.schema import work_channel
from replaykit.runtime.line import Line

__all__ = ["START_LOCK_SECONDS", "Starts"]

START_LOCK_SECONDS: Final = 0.1
"""How long a group waits for a key that another transaction holds: a commit takes less, all starts wait as long."""

_LANE_LOCK_SECONDS: Final = 0.005  # the same for a look of the lane, which comes again
_LANE_SECONDS: Final = 0.1  # between two looks of the lane
_HINT_SECONDS: Final = 0.02  # hints take a lock that all commits with a NOTIFY share: one tells of many starts


@dataclass(slots=True)
class _Waiting:
    row: StartRow
    answer: asyncio.Future[Started]
    told: bool = False  # of the lock that it waits for


class Starts:
    """The starts of one client on one event loop."""

    def __init__(self, line: Line, database: Database) -> None:
        self._line = line
        self._channel = work_channel(database.schema)
        self._waiting: deque[_Waiting] = deque()
        self._lane = _Lane(database, self._take_back)
        self._task: asyncio.Task[None] | None = None
        self._hint_owed = False
        self._hinted_at = 0.0

    async def start(self, row: StartRow) -> Started:
        """Durable when this returns: a new run, or the one that holds the row's key."""
        waiting = _Waiting(row, asyncio.get_running_loop().create_future())
        if row.key is not None and self._lane.holds(row.key):
            self._lane.put([waiting])
        else:
            self._waiting.append(waiting)
            self._go()
        return await waiting.answer

    def _go(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="replaykit starts")

    async def _work(self) -> None:
        """Send what is there until nothing is."""
        batch: list[_Waiting] = []
        try:
            while self._waiting or self._hint_owed:
                if self._waiting:
                    batch = self._take()
                    await self._send_group(batch)
                    batch = []
                    self._hint_owed = True
                if not self._waiting or time.monotonic() - self._hinted_at > _HINT_SECONDS:
                    self._hint_owed = False
                    await self._hint()
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

    async def _send_group(self, batch: list[_Waiting]) -> None:
        """Send a group; if a key of it is held, all of its keys leave for the lane, which finds out whose it is."""
        kept = await _send(self._line, batch)
        keyed = [waiting for waiting in kept if waiting.row.key is not None]
        if keyed:
            self._lane.put(keyed)
            kept = await _send(self._line, [waiting for waiting in kept if waiting.row.key is None])
        self._lane.put(kept)  # without keys: the whole table is locked

    def _take_back(self, freed: Iterable[_Waiting]) -> None:
        """The lane has started some; those of the same keys that came later need it no more."""
        self._waiting.extend(freed)
        self._hint_owed = True
        self._go()

    async def _hint(self) -> None:
        """Tell workers to look now. They also look by themselves, so a hint that fails is no error."""
        self._hinted_at = time.monotonic()
        with contextlib.suppress(Exception):
            await self._line.run(notify(self._channel))

    async def close(self) -> None:
        """Wait until what was asked for is sent; not for ever for a key that somebody holds."""
        give_up_at = time.monotonic() + CLIENT_RETRY_SECONDS
        while tasks := [task for task in (self._task, self._lane.task) if task is not None]:
            left = give_up_at - time.monotonic()
            if left <= 0:
                self._lane.give_up()
            await asyncio.wait(tasks, timeout=left if left > 0 else None, return_when=asyncio.FIRST_COMPLETED)

    def abandon(self) -> None:
        """Drop the lane's connection, of an event loop that is closed."""
        self._lane.abandon()


class _Lane:
    """Where starts wait whose keys are held by transactions of somebody outside. One start of each key looks again.

    Args:
        database: for a connection of its own, which is open while somebody waits.
        take_back: gets the others of a key that is free.
    """

    def __init__(self, database: Database, take_back: Callable[[Iterable[_Waiting]], None]) -> None:
        self._line = Line(database, lock_timeout_seconds=_LANE_LOCK_SECONDS)
        self._take_back = take_back
        self._by_key: dict[str | None, list[_Waiting]] = {}
        self.task: asyncio.Task[None] | None = None

    def holds(self, key: str) -> bool:
        """Whether starts of that key wait here: another one would only wait, too."""
        return key in self._by_key

    def put(self, some: Iterable[_Waiting]) -> None:
        for waiting in some:
            self._by_key.setdefault(waiting.row.key, []).append(waiting)
        if self._by_key and self.task is None:
            self.task = asyncio.create_task(self._work(), name="replaykit starts apart")

    async def _work(self) -> None:
        try:
            while self._by_key:
                await self._look([some[0] for some in self._by_key.values()])
                self._let_go()
                if self._by_key:
                    await asyncio.sleep(_LANE_SECONDS)
                    self._let_go()
        finally:
            self.task = None
            self.abandon()
            for waiting in [waiting for some in self._by_key.values() for waiting in some]:  # this task was cancelled
                waiting.answer.cancel()
            self._by_key.clear()

    async def _look(self, batch: Sequence[_Waiting]) -> None:
        """Start those whose keys are free, found by halving."""
        size = sum(len(waiting.row.input) for waiting in batch)
        if len(batch) == 1 or (len(batch) <= START_RUNS_MAX and size <= BATCH_BYTES_MAX):
            kept = await _send(self._line, batch)
            if len(batch) == 1 and kept and not batch[0].told:
                log.warning("start_locked_by_someone_else", run_id=str(batch[0].row.id))
                batch[0].told = True
            if len(batch) == 1 or not kept:
                return
            batch = kept
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if half:
                await self._look(half)

    def _let_go(self) -> None:
        """What is started, or whose caller has left, is no longer here; a key that was free is free for all."""
        for key, some in list(self._by_key.items()):
            first, *others = some
            if not first.answer.done():
                continue
            if first.answer.cancelled():
                others = [waiting for waiting in others if not waiting.answer.cancelled()]
                if others:
                    self._by_key[key] = others
                    continue
            del self._by_key[key]
            self._take_back(others)

    def give_up(self) -> None:
        """The client closes."""
        for waiting in [waiting for some in self._by_key.values() for waiting in some]:
            _fail(waiting, DatabaseUnreachable("the client was closed while another transaction held the run's key"))
        if self.task is not None:
            self.task.cancel()

    def abandon(self) -> None:
        self._line.abandon()


async def _send(line: Line, batch: Sequence[_Waiting]) -> list[_Waiting]:
    """One statement for all; if the database refuses a row, each goes alone, and it fails only its own start.

    Returns:
        Those that somebody's lock kept back: they have no answer yet.
    """
    if not batch:
        return []
    try:
        bounds = start_runs([waiting.row for waiting in batch])
        found = parse_started(await line.run_all(bounds, through_locks=False))
    except DatabaseUnreachable as error:
        for waiting in batch:
            _fail(waiting, DatabaseUnreachable(str(error)))
    except Exception as error:
        if is_lock_timeout(error):
            return [waiting for waiting in batch if not waiting.answer.done()]
        if len(batch) > 1:
            return [kept for waiting in batch for kept in await _send(line, [waiting])]
        _fail(batch[0], error)
    else:
        for waiting in batch:
            _answer(waiting, found.get(waiting.row.id))
    return []


def _answer(waiting: _Waiting, found: Started | None) -> None:
    if found is None:
        _fail(
            waiting,
            RuntimeError(f"run {waiting.row.id} was started and is not there: was it deleted meanwhile?"),
        )
    elif not waiting.answer.done():
        waiting.answer.set_result(found)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)

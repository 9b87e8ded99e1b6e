"""The self-clocking group commit: what arrives while one commit is in flight goes into the next.

No timer, no latency when idle. Each connection has its own queue, sharded by run, so that a run's units stay in order and
two statements never lock the same row. A unit that was sent is retried, unchanged, under its `write_id`, until its fate is
known: an acknowledgement that was lost is recognised.

A run whose row somebody outside has locked leaves its queue for a lane apart: it waits there, its neighbours do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Final
from uuid import UUID

from replaykit.events import log
from replaykit.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, WRITERS
from replaykit.postgres import journal
from replaykit.postgres.database import Connection, Database, first_line, is_lock_timeout, is_refusal, is_transient
from replaykit.replay.entries import Unit, Verdict

__all__ = ["MAY_NEST", "OnVerdict", "Writer"]


OnVerdict = Callable[[Verdict, str | None], None]
"""Called with a unit's verdict, and the database's words where it refused."""

MAY_NEST: Final = sys.version_info < (3, 14)
"""Whether a run's tasks may be entered while one of the host loop's is running: up to 3.13 each loop knows its own current
task. It saves two turns of the host loop a step; later Pythons go through a plain callback."""

_TELL_EVERY: Final = 30  # tries between two words about a write that fails for no passing reason
_BACKOFF_SECONDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
_LANE_SECONDS: Final = 0.2  # between two looks at rows that somebody outside has locked


class Writer:
    """Writes the units of one process.

    Args:
        database: where the journal lives.
        connections: how many commits may be in flight.
    """

    def __init__(self, database: Database, *, connections: int = WRITERS) -> None:
        self._lane = _Lane(database)
        self._shards = [_Shard(database, self._lane) for _ in range(connections)]
        self._all: tuple[_Shard | _Lane, ...] = (*self._shards, self._lane)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the connections.

        Raises:
            DatabaseUnreachable: one could not be made.
        """
        await asyncio.gather(*(shard.open() for shard in self._shards))
        self._tasks = [asyncio.create_task(one.run(), name=f"replaykit-writer-{n}") for n, one in enumerate(self._all)]

    def put(self, unit: Unit, on_verdict: OnVerdict) -> None:
        """Send a unit; `on_verdict` is called on the event loop once its fate is known. At most one unit of a run at a time."""
        self._shards[_shard_of(unit.run_id) % len(self._shards)].put(unit, on_verdict)

    @property
    def backlog_bytes(self) -> int:
        """Bytes of payloads that wait for their commit: the measure of back-pressure."""
        total = 0
        for shard in self._shards:  # asked before each body: a generator costs three times as much
            total += shard.backlog_bytes
        return total

    async def drained(self) -> None:
        """Wait until every unit has its verdict."""
        for one in self._all:
            await one.idle.wait()

    def cut_off(self) -> None:
        """End the statements that have no answer."""
        for one in self._all:
            one.cut_off()

    async def close(self) -> None:
        """Stop at once; units without a verdict get none."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._all:
            await one.close()


def _shard_of(run_id: UUID) -> int:
    return run_id.int & 0xFFFF  # the low bits of a UUIDv7 are random


_Item = tuple[Unit, OnVerdict, int]
_Answered = tuple[_Item, Verdict, str | None]


class _Connected:
    """Has a connection of its own, when it needs one.

    Attributes:
        idle: set while nothing waits for a verdict.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._arrived = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def cut_off(self) -> None:
        if self._connection is not None:
            self._connection.cut()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Shard(_Connected):
    """One connection and its queue."""

    def __init__(self, database: Database, lane: _Lane) -> None:
        super().__init__(database)
        self._lane = lane
        self._queue: deque[_Item] = deque()
        self.backlog_bytes = 0

    def put(self, unit: Unit, on_verdict: OnVerdict) -> None:
        size = unit.size
        self.backlog_bytes += size
        if not self._queue:  # else the first of them has said so
            self.idle.clear()
            self._arrived.set()
        self._queue.append((unit, on_verdict, size))

    async def open(self) -> None:
        self._connection = await self._database.connect()

    async def run(self) -> None:
        while True:
            if not self._queue:
                self.idle.set()
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take()
            await self._write(batch)

    def _take(self) -> list[_Item]:
        queue = self._queue
        batch = [queue.popleft()]
        entries, size = len(batch[0][0].entries), batch[0][2]
        while queue and entries < BATCH_ENTRIES_MAX and size + queue[0][2] <= BATCH_BYTES_MAX:
            item = queue.popleft()
            entries += len(item[0].entries)
            size += item[2]
            batch.append(item)
        return batch

    async def _write(self, batch: list[_Item]) -> None:
        """Send a batch until every unit of it has a verdict. Bisecting cuts between runs, never within one."""
        failures = 0
        while True:
            units = [unit for unit, _, _ in batch]
            for unit in units:
                unit.tries += 1
            try:
                if self._connection is None:
                    await self.open()
                assert self._connection is not None
                verdicts = await _send(self._connection, units)
            except Exception as error:
                if not is_refusal(error):
                    await self._recover(error, failures)
                    failures += 1
                    if is_lock_timeout(error):
                        batch = await self._without_locked(batch)
                        if not batch:
                            return
                    continue
                if len(batch) == 1:
                    self._answer([(batch[0], Verdict.REFUSED, first_line(error))])
                    return
                break
            self._answer([(item, verdicts[item[0].run_id], None) for item in batch])
            return
        middle = len(batch) // 2
        await self._write(batch[:middle])
        await self._write(batch[middle:])

    async def _without_locked(self, batch: list[_Item]) -> list[_Item]:
        """The rest of a batch after what somebody outside has locked has gone to the lane."""
        try:
            assert self._connection is not None
            rows = await self._connection.run(*journal.unlocked([unit for unit, _, _ in batch]))
        except Exception:  # the connection: the next try of the whole batch says so
            return batch
        free = journal.parse_unlocked(rows)
        for item in batch:
            if item[0].run_id not in free:
                self._lane.put(item, self._answer)
        return [item for item in batch if item[0].run_id in free]

    async def _recover(self, error: Exception, failures: int) -> None:
        if is_transient(error):
            if failures == 0 and not is_lock_timeout(error):
                log.warning("journal_write_failed", error=error, retrying=True)
        elif failures % _TELL_EVERY == 0:  # a right that is missing, a table, a defect: it may be mended while we try
            log.error("journal_write_failed", error=error, retrying=True, exc_info=error)
        if self._connection is not None and self._connection.closed:
            with contextlib.suppress(Exception):
                await self.close()
        await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])

    def _answer(self, answers: list[_Answered]) -> None:
        if MAY_NEST:
            self._answer_all(answers)
        else:
            asyncio.get_running_loop().call_soon(self._answer_all, answers)

    def _answer_all(self, answers: list[_Answered]) -> None:
        for (_, on_verdict, size), verdict, words in answers:
            self.backlog_bytes -= size
            try:
                on_verdict(verdict, words)
            except Exception:  # one run's trouble is not its neighbours'
                log.exception("answer_failed")


class _Lane(_Connected):
    """Where units wait whose run's row somebody outside has locked. They are written one by one once it is free."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._waiting: list[tuple[_Item, Callable[[list[_Answered]], None]]] = []

    def put(self, item: _Item, answer: Callable[[list[_Answered]], None]) -> None:
        log.warning("run_locked_by_someone_else", run_id=str(item[0].run_id))
        self._waiting.append((item, answer))
        self.idle.clear()
        self._arrived.set()

    async def run(self) -> None:
        while True:
            if not self._waiting:
                self.idle.set()
                await self.close()
                self._arrived.clear()
                await self._arrived.wait()
            try:
                await self._turn()
            except Exception as error:
                if not is_lock_timeout(error):
                    log.warning("journal_write_failed", error=error, retrying=True)
                    await self.close()
            if self._waiting:
                await asyncio.sleep(_LANE_SECONDS)

    async def _turn(self) -> None:
        """Writes what is free now. A lock taken meanwhile ends the turn."""
        if self._connection is None:
            self._connection = await self._database.connect()
        connection = self._connection
        rows = await connection.run(*journal.unlocked([item[0] for item, _ in self._waiting]))
        free = journal.parse_unlocked(rows)
        for waiting in [waiting for waiting in self._waiting if waiting[0][0].run_id in free]:
            item, answer = waiting
            unit = item[0]
            unit.tries += 1
            try:
                verdicts = await _send(connection, [unit])
            except Exception as error:
                if not is_refusal(error):
                    raise
                answered: _Answered = (item, Verdict.REFUSED, first_line(error))
            else:
                answered = (item, verdicts[unit.run_id], None)
            self._waiting.remove(waiting)
            answer([answered])


async def _send(connection: Connection, units: list[Unit]) -> dict[UUID, Verdict]:
    """One statement for the batch; a second one for units that an earlier, unacknowledged try may have written."""
    if len(units) == 1:
        lone = journal.write_lone(units[0])
        if lone is not None and await connection.wrote(*lone):
            return {units[0].run_id: Verdict.OK}
    verdicts = journal.parse_verdicts(await connection.run(*journal.write_units(units)))
    doubtful = [unit for unit in units if unit.tries > 1 and verdicts[unit.run_id] is not Verdict.OK]
    if doubtful:
        # A second statement, because the first one's snapshot may be older than the commit it waited for.
        for run_id in journal.parse_recheck(await connection.run(*journal.recheck(doubtful))):
            verdicts[run_id] = Verdict.OK
    return verdicts

"""The watcher: one query for all runs whose end is awaited in this client, however many there are.

It exists while somebody waits. A hint (NOTIFY) makes it look at once; without hints, or behind a pooler, it looks again
after a pause that grows. No connection is held for a handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from uuid import UUID

from replaykit.errors import DatabaseUnreachable
from replaykit.limits import CLIENT_BACKOFF_SECONDS_MAX, WATCH_PAUSE_SECONDS_MAX, WATCH_RUNS_MAX
from replaykit.postgres.database import Connection, Database, is_transient
from replaykit.postgres.onlookers import unlisten
from replaykit.postgres.runs import RunResult, parse_results, run_results
from replaykit.postgres.schema import done_channel
from replaykit.replay.entries import State
from replaykit.runtime.line import drop

__all__ = ["ENDED", "Watcher"]

ENDED = frozenset({State.HELD, State.SUCCEEDED, State.FAILED, State.CANCELLED})
"""States that answer one who waits for a result."""

_PAUSE_SECONDS_MIN = 0.01


class Watcher:
    """Waits for the ends of runs of one database, on one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channel = done_channel(database.schema)
        self._connection: Connection | None = None
        self._listens = False
        self._waiting: dict[UUID, list[asyncio.Future[RunResult | None]]] = {}
        self._fresh: set[UUID] = set()  # registered since the last look
        self._changed = asyncio.Event()  # somebody came, or the last one left
        self._task: asyncio.Task[None] | None = None

    async def end_of(self, run_id: UUID) -> RunResult | None:
        """The end of a run, or that it is held, as soon as it is so; None: no such run."""
        future: asyncio.Future[RunResult | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        self._fresh.add(run_id)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="replaykit watcher")
        try:
            return await future
        finally:
            self._leave(run_id, future)

    def _leave(self, run_id: UUID, future: asyncio.Future[RunResult | None]) -> None:
        futures = self._waiting.get(run_id)
        if futures is None or future not in futures:
            return
        futures.remove(future)
        if not futures:
            del self._waiting[run_id]
            self._fresh.discard(run_id)
            if not self._waiting:
                self._changed.set()

    async def _watch(self) -> None:
        """Look, rest, look again, until nobody waits; an error that no retry cures goes to all who wait."""
        try:
            while self._waiting:
                await self._look_until_nobody_waits()
                await self._stop_listening()
        except asyncio.CancelledError:
            self.abandon()
            for future in self._take_all():
                future.cancel()
            raise
        except Exception as error:
            self.abandon()
            for future in self._take_all():
                future.set_exception(error)
        finally:
            self._task = None

    async def _look_until_nobody_waits(self) -> None:
        pause = _PAUSE_SECONDS_MIN
        only_fresh = False
        while self._waiting:
            try:
                connection = await self._listening()
                began = time.monotonic()
                if await self._look(connection, [*(self._fresh if only_fresh else self._waiting)]):
                    pause = _PAUSE_SECONDS_MIN
                # A look at many runs costs the server something: it gets at most a fifth of the time.
                pause = max(pause, 4 * (time.monotonic() - began))
                only_fresh = bool(self._waiting) and await self._rest(connection, pause)
                pause = min(pause * 1.5, WATCH_PAUSE_SECONDS_MAX)
            except Exception as error:
                if not is_transient(error) and not isinstance(error, DatabaseUnreachable):
                    raise
                # An outage is no end: whoever waits has said by `timeout=` how long.
                self.abandon()
                only_fresh = False
                await asyncio.sleep(pause)
                pause = min(pause * 2, CLIENT_BACKOFF_SECONDS_MAX)

    async def _listening(self) -> Connection:
        """The connection, listening unless a pooler stands between. Listen first, then look: nothing is missed."""
        if self._connection is None:
            self._connection = await self._database.connect()
        if not self._listens and not self._connection.pooled:
            await self._connection.listen(self._channel)
            self._listens = True
        return self._connection

    async def _stop_listening(self) -> None:
        """Hints that nobody reads would fill the server's queue."""
        if self._connection is not None and self._listens:
            self._listens = False
            try:
                await self._connection.run(*unlisten())
            except Exception as error:
                if not is_transient(error):
                    raise
                self.abandon()

    async def _look(self, connection: Connection, ids: Sequence[UUID]) -> int:
        """Answer those whose run has ended, is held, or is not there. Returns how many runs that were."""
        self._fresh.clear()
        self._changed.clear()
        found = 0
        for first in range(0, len(ids), WATCH_RUNS_MAX):
            some = ids[first : first + WATCH_RUNS_MAX]
            results = parse_results(await connection.run(*run_results(some)))
            for run_id in some:
                result = results.get(run_id)
                if result is None or result.state in ENDED:
                    found += 1
                    for future in self._waiting.pop(run_id, ()):
                        if not future.done():
                            future.set_result(result)
        return found

    async def _rest(self, connection: Connection, pause: float) -> bool:
        """Wait for a hint, for somebody new, or `pause` seconds. Returns True if only the new ones need a look."""
        if connection.pooled:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    return True
            return False
        hint = asyncio.create_task(connection.wait_notify(pause))
        new = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((hint, new), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (hint, new):
                task.cancel()
            results = await asyncio.gather(hint, new, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        return isinstance(results[0], asyncio.CancelledError)

    def _take_all(self) -> list[asyncio.Future[RunResult | None]]:
        futures = [future for futures in self._waiting.values() for future in futures if not future.done()]
        self._waiting.clear()
        self._fresh.clear()
        return futures

    async def close(self) -> None:
        """Stop; whoever still waits is cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.abandon()

    def abandon(self) -> None:
        """Drop the connection at once; needs no event loop, for its own may be closed."""
        connection, self._connection, self._listens = self._connection, None, False
        if connection is not None:
            drop(connection)

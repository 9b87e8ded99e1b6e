"""A line: one connection of one event loop, opened at first use and again after it was lost.

For statements that may be sent twice: reads, hints, and starts (whose ids are made before they are first sent).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from replaykit.errors import DatabaseUnreachable
from replaykit.events import brief
from replaykit.limits import CLIENT_BACKOFF_SECONDS_MAX, CLIENT_RETRY_SECONDS, LOCK_TIMEOUT_SECONDS
from replaykit.postgres.database import Connection, Database, is_lock_timeout, is_transient
from replaykit.postgres.schema import Bound

__all__ = ["Line", "drop"]

Rows = list[tuple[Any, ...]]


class Line:
    """One statement, or one pipeline of them, at a time; what is sent is sent again after a lost connection.

    Args:
        database: where to.
        lock_timeout_seconds: how long a statement waits for somebody else's lock before it is given up or sent again.
    """

    def __init__(self, database: Database, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        self._database = database
        self._lock_timeout_seconds = lock_timeout_seconds
        self._connection: Connection | None = None
        self._opened = False  # ever: a first connection that fails is a mistake to report, not an outage to sit out
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[list[Rows]]] = set()

    async def run(self, bound: Bound) -> Rows:
        """The rows of one statement."""
        return (await self.run_all([bound]))[0]

    async def run_all(self, bounds: Sequence[Bound], *, through_locks: bool = True) -> list[Rows]:
        """The rows of each statement; together they are one transaction and one round trip.

        A cancelled caller leaves; the statement ends by itself, so the connection is never left in the middle of one.

        Args:
            bounds: the statements.
            through_locks: send them again while somebody else's lock is in their way; else its time-out is raised.

        Raises:
            DatabaseUnreachable: no connection at the first try, or none for `CLIENT_RETRY_SECONDS` after one was lost.
        """
        task = asyncio.create_task(self._send(bounds, through_locks))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[list[Rows]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left

    async def _send(self, bounds: Sequence[Bound], through_locks: bool) -> list[Rows]:
        async with self._turn:
            give_up_at: float | None = None
            pause = 0.02
            while True:
                try:
                    return await self._attempt(bounds)
                except Exception as error:
                    unreachable = isinstance(error, DatabaseUnreachable)
                    if not is_transient(error) or (unreachable and not self._opened):
                        raise
                    if is_lock_timeout(error) and not through_locks:
                        raise
                    give_up_at = give_up_at or time.monotonic() + CLIENT_RETRY_SECONDS
                    if time.monotonic() + pause > give_up_at:
                        if unreachable:
                            raise
                        raise DatabaseUnreachable(f"the database does not answer: {brief(error)}") from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, CLIENT_BACKOFF_SECONDS_MAX)

    async def _attempt(self, bounds: Sequence[Bound]) -> list[Rows]:
        if self._connection is None:
            self._connection = await self._database.connect(lock_timeout_seconds=self._lock_timeout_seconds)
            self._opened = True
        try:
            if len(bounds) == 1:
                return [await self._connection.run(*bounds[0])]
            return await self._connection.run_all(list(bounds))
        except BaseException as error:
            if not isinstance(error, Exception) or (is_transient(error) and not is_lock_timeout(error)):
                self.abandon()
            raise

    async def close(self) -> None:
        """End what is being sent, close the connection; the next use opens another."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLIENT_BACKOFF_SECONDS_MAX)
        for task in [*self._tasks]:
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
        self.abandon()

    def abandon(self) -> None:
        """Drop the connection at once; needs no event loop, for its own may be closed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            drop(connection)


def drop(connection: Connection) -> None:
    """Close a connection without an event loop: closing sends one message and waits for nothing."""
    closing = connection.close()
    try:
        closing.send(None)
    except StopIteration:
        return
    closing.close()

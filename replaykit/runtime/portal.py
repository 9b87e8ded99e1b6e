"""A portal: a thread with an event loop, through which code without one waits for coroutines.

The thread is started at first use and never keeps the interpreter alive. After a fork the child, where it is not, starts
its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from replaykit.errors import DatabaseUnreachable
from replaykit.runtime.forks import leave_to_parent, renew_after_fork

__all__ = ["Portal"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Serving:
    """A thread that serves."""

    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    process: int

    def end(self) -> None:
        if self.process == os.getpid():
            with contextlib.suppress(RuntimeError):  # closed already
                self.loop.call_soon_threadsafe(self.stop.set)


class Portal:
    """Any number of threads may wait in it at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._serving: _Serving | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a child: neither the thread is there, nor whoever holds the lock."""
        leave_to_parent(self._serving)
        self._lock = threading.RLock()
        self._serving = None

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises. A caller that is interrupted (Ctrl-C) cancels it.

        Raises:
            DatabaseUnreachable: the portal was closed meanwhile, or the interpreter is ending.
        """
        if sys.is_finalizing():  # threads stand still, for ever: nobody would answer
            raise DatabaseUnreachable("the interpreter is ending: a SyncClient can be asked nothing any more")
        with self._lock:  # `close` must not end the loop between a look at it and the sending
            serving = self._serving or self._open()
            if threading.current_thread() is serving.thread:
                raise RuntimeError("a SyncClient was called from its own event loop, which would have to answer")
            future = asyncio.run_coroutine_threadsafe(make(), serving.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise DatabaseUnreachable("the client was closed while this call waited for the database") from None
        except BaseException:
            future.cancel()
            raise

    def _open(self) -> _Serving:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = (
            concurrent.futures.Future()
        )
        thread = threading.Thread(target=_serve, args=(started,), name="replaykit-portal", daemon=True)
        thread.start()
        serving = self._serving = _Serving(thread, *started.result(), os.getpid())
        # A client that nobody closed takes its thread along.
        weakref.finalize(self, serving.end).atexit = False
        return serving

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, cancel what still waits, end the thread. The next use starts another.

        Without a thread nothing was opened, and nothing is closed.
        """
        with self._lock:
            serving, self._serving = self._serving, None
        if serving is None or sys.is_finalizing():
            return
        try:
            asyncio.run_coroutine_threadsafe(last(), serving.loop).result()
        finally:
            serving.end()
            serving.thread.join()


def _serve(started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    stop = asyncio.Event()

    async def serve() -> None:
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    try:
        asyncio.run(serve())
    except RuntimeError:  # from 3.12 on an interpreter that is ending starts no thread, which closing a loop may take
        if not stop.is_set():
            raise

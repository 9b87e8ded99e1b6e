"""The threads of sync bodies: a bounded number that works, and more for those whose bodies are waited for no longer.

A body whose time is up keeps its thread until it ends by itself. Threads that are lost so to a service that hangs must not
keep all other steps waiting: each is made up for, up to a bound, and told of.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from replaykit.events import log
from replaykit.limits import THREADS_LEFT_BEHIND_MAX

__all__ = ["BodyThreads"]


class BodyThreads:
    """Runs functions in threads, in the order they came.

    Args:
        threads: how many work at once.
        left_behind_max: how many more there may be for those that were left behind.
    """

    def __init__(self, threads: int, left_behind_max: int = THREADS_LEFT_BEHIND_MAX) -> None:
        self._threads = threads
        self._left_behind_max = left_behind_max
        self._left_behind = 0
        self._working = 0
        self._queue: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        # It makes threads, keeps idle ones for the next, and ends them with the interpreter; how many work is decided here.
        self._pool = ThreadPoolExecutor(threads + left_behind_max, thread_name_prefix="replaykit-step")

    @property
    def left_behind(self) -> int:
        """Threads whose bodies nobody waits for."""
        return self._left_behind

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run it as soon as a thread is free. The future can be cancelled until then."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads were shut down")
            self._queue.append((future, function, args))
            self._staff()
        return future

    def leave_behind(self) -> None:
        """A thread's body is waited for no longer: another thread takes its place."""
        with self._lock:
            self._left_behind += 1
            self._staff()
        log.warning("threads_left_behind", threads=self._left_behind)
        if self._left_behind == self._left_behind_max + 1:
            log.warning("sync_steps_wait", threads_left_behind=self._left_behind, threads=self._threads)

    def take_back(self) -> None:
        """Such a thread has ended its body."""
        with self._lock:
            self._left_behind -= 1
        log.info("threads_left_behind", threads=self._left_behind)

    def shutdown(self) -> None:
        """Begin nothing more, and wait for nothing."""
        with self._lock:
            self._closed = True
            waiting, self._queue = self._queue, deque()
        for future, _, _ in waiting:
            future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _limit(self) -> int:
        return self._threads + min(self._left_behind, self._left_behind_max)

    def _staff(self) -> None:
        """Under the lock: one more thread, if one is needed and may be had."""
        if self._queue and self._working < self._limit and not self._closed:
            self._working += 1
            self._pool.submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._working > self._limit:
                    self._working -= 1
                    return
                future, function, args = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, function, args  # an idle thread keeps nothing alive

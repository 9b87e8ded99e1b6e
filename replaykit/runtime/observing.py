"""What `step.current().observe(...)` gives back: the commit of an observation, to wait for from a loop or from a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from replaykit.errors import OutsideRun

__all__ = ["Observing"]


class Observing:
    """An observation on its way into the journal: `await` it, or call `result()` in a thread; nobody has to.

    Made in the body's thread; `committed` and `failed` are called on the worker's loop.
    """

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def committed(self) -> None:
        """It is in the journal."""
        if not self._future.done():
            self._future.set_result(None)

    def failed(self, error: BaseException) -> None:
        """It will not be: the run is another worker's. Those who wait get the error."""
        if not self._future.done():
            self._future.set_exception(error)

    def __await__(self) -> Generator[Any, Any, None]:
        # A cancelled wait must not cancel the observation, which others may wait for.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit, in a thread.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: the time is over; the observation is still on its way.
            OutsideRun: on an event loop, which would wait for itself.
        """
        if asyncio._get_running_loop() is not None and not self._future.done():
            raise OutsideRun("observe(...).result() on an event loop would block it: write `await ...observe(...)`")
        self._future.result(timeout)

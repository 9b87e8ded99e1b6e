"""Tells of an event loop that does not turn, while it does not: which run, which step, and where in the code.

A body or a workflow that calls something blocking on the loop stops all runs of its process, with their time-outs and, in
the end, the lease. Whoever reads the log must find the line: only another thread can still look, and only at what the
loop's thread is doing at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final
from uuid import UUID

from replaykit.events import log
from replaykit.limits import LOOP_BLOCKED_FRAMES_MAX, LOOP_BLOCKED_SECONDS

__all__ = ["Culprit", "Watchdog", "stack_of"]


Culprit = tuple[UUID | None, str | None]
"""The run that is executed at this moment, and its step's key; None where it cannot be known."""

_PAUSE_SECONDS: Final = LOOP_BLOCKED_SECONDS / 4
_STOP_SECONDS: Final = 0.5  # for a thread that may hang in a log whose lock the blocking code holds


class Watchdog:
    """A thread that watches one event loop, from `start` (called on it) to `stop`.

    Args:
        find: who blocks, given the host's task that runs now and the innermost frame of the loop's thread. Called in the
            watchdog's thread.
        blocked_seconds: from when on it is told.
    """

    def __init__(
        self,
        find: Callable[[asyncio.Task[Any] | None, FrameType], Culprit],
        blocked_seconds: float = LOOP_BLOCKED_SECONDS,
    ) -> None:
        self._find = find
        self._blocked_seconds = blocked_seconds
        self._ticked_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replaykit-watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0

    def start(self) -> None:
        """Called by the loop that is watched."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.tick()
        self._thread.start()

    def tick(self) -> None:
        """Called by the loop, several times a second: it turns."""
        self._ticked_at = time.monotonic()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _watch(self) -> None:
        told_of = 0.0  # the tick after which the loop stopped turning, once that is told
        looked_at = time.monotonic()
        while not self._stopping.wait(_PAUSE_SECONDS):
            now, ticked_at = time.monotonic(), self._ticked_at
            # A process that was stopped, or had no turn, has not seen its loop stand still.
            awake = now - looked_at < 4 * _PAUSE_SECONDS
            looked_at = now
            if told_of and ticked_at != told_of:
                over, told_of = ticked_at - told_of, 0.0
                with contextlib.suppress(Exception):  # a log that fails must not end the watch
                    self._tell_over(over)
            if awake and not told_of and now - ticked_at >= self._blocked_seconds:
                told_of = ticked_at
                with contextlib.suppress(Exception):
                    self._tell(now - ticked_at)
        if told_of:  # the loop itself has stopped us
            with contextlib.suppress(Exception):
                self._tell_over(time.monotonic() - told_of)

    def _tell(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return
        run_id: UUID | None = None
        key: str | None = None
        with contextlib.suppress(Exception):  # the stack alone says a lot
            run_id, key = self._find(self._current_task(), frame)
        log.warning(
            "loop_blocked",
            run_id=str(run_id) if run_id is not None else None,
            step=key,
            seconds=round(seconds, 3),
            frames=stack_of(frame),
        )

    def _tell_over(self, seconds: float) -> None:
        log.warning("loop_unblocked", seconds=round(seconds, 3))

    def _current_task(self) -> asyncio.Task[Any] | None:
        with contextlib.suppress(Exception):  # from 3.14 on, a loop may tell its own thread only
            return asyncio.current_task(self._loop)
        return None


def stack_of(frame: FrameType) -> list[str]:
    """Where an event loop's thread is, from the callback that the loop has called, innermost call last: file, line and
    function, without values."""
    lines: list[str] = []
    at: FrameType | None = frame
    while at is not None and at.f_code is not asyncio.Handle._run.__code__ and len(lines) < LOOP_BLOCKED_FRAMES_MAX:
        lines.append(f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_qualname}")
        at = at.f_back
    return lines[::-1]

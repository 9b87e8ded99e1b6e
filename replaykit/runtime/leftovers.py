"""What still acts in this process of steps that nobody waits for any more, and what of it must end before what begins.

A body that was given up goes on: its thread cannot be ended, a coroutine may have a long `finally` or swallow its
cancellation. And a body that is gone may have left work in a thread (`asyncio.to_thread`). Until all of it has ended, no other
try of the step begins here, and a process that can be ended hands its run to nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final
from uuid import UUID

from replaykit.replay.calls import CURRENT_STEP

__all__ = ["DefaultThreads", "Leftovers", "Step"]

Step = tuple[UUID, str]
"""A run's id and a step's key."""

_HARMLESS: Final = (socket.getaddrinfo, socket.getnameinfo)  # an event loop's own; they act on nothing


class Leftovers:
    """By step. All but `steps` and `things` is for plain callbacks of the event loop."""

    def __init__(self) -> None:
        self._things: dict[Step, dict[int, object]] = {}
        self._waiting: dict[Step, dict[Callable[[], object], None]] = {}

    def add(self, step: Step, thing: object) -> None:
        """A body, or work of one, that goes on."""
        self._things.setdefault(step, {})[id(thing)] = thing

    def remove(self, step: Step, thing: object) -> None:
        """It has ended. Whoever waits for the step's last one is called."""
        things = self._things.get(step)
        if things is None or things.pop(id(thing), None) is None or things:
            return
        del self._things[step]
        for call in self._waiting.pop(step, ()):
            call()

    def __contains__(self, step: object) -> bool:
        return step in self._things

    def __len__(self) -> int:
        return len(self._things)

    def when_over(self, step: Step, call: Callable[[], object]) -> bool:
        """Call it once nothing of this step goes on; something does now. False: this call was asked for already."""
        calls = self._waiting.setdefault(step, {})
        asked = call in calls
        calls[call] = None
        return not asked

    def steps(self) -> set[Step]:
        """Those of which something goes on. From any thread."""
        return set(self._things)

    def things(self) -> list[tuple[Step, object]]:
        """What goes on, with whose it is. From any thread."""
        return [(step, thing) for step, things in list(self._things.items()) for thing in list(things.values())]


class DefaultThreads(ThreadPoolExecutor):
    """An event loop's default executor, where `asyncio.to_thread` works: knows whose work it does.

    Args:
        leftovers: is told of work that a step's body has begun, from its beginning to its end.
    """

    def __init__(self, leftovers: Leftovers) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._leftovers = leftovers
        self._loop = asyncio.get_running_loop()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the base class; called in the context of whoever awaits the work."""
        work = super().submit(fn, *args, **kwargs)
        info = CURRENT_STEP.get()
        if info is not None and fn not in _HARMLESS:
            step = info.run_id, info.key
            self._leftovers.add(step, work)
            work.add_done_callback(functools.partial(self._ended, step))
        return work

    def _ended(self, step: Step, work: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # it has outlived the loop
            self._loop.call_soon_threadsafe(self._leftovers.remove, step, work)

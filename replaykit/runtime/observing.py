"""What bodies observe of the world outside, on its way into the journal: from a loop or from a thread, to be waited for there.

observe() in a body     `Observations.add`, in any thread
the executor's turn     `take`: the driver puts them into its next unit
the unit is committed   `committed`: those who wait go on
the run leaves memory   `close`: those who still wait get an error, and nobody hangs
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from replaykit.errors import OutsideRun
from replaykit.events import log
from replaykit.replay.entries import Observation

__all__ = ["BodySide", "Observations", "Observing"]


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


def _nobody() -> None:
    """Looks after a run that has left."""


def _nothing(_: str) -> Sequence[tuple[str, str]]:
    return ()


class Observations:
    """Those of one run that are not committed yet. `add` is for any thread, the rest for the worker's loop.

    Args:
        run_id: whose.
        host: the worker's loop.
        now: the database's time, in microseconds.
        wake: called on the loop when there is something to `take`.
        observed: what a step has observed before, as `(kind, id)`.
    """

    def __init__(
        self,
        run_id: UUID,
        host: asyncio.AbstractEventLoop,
        now: Callable[[], int],
        wake: Callable[[], None],
        observed: Callable[[str], Sequence[tuple[str, str]]],
    ) -> None:
        self.untold: deque[Observation] = deque()
        self._run_id = run_id
        self._host = host
        self._now = now
        self._wake = wake
        self._observed = observed
        self._waiting: dict[int, tuple[Observation, Observing]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def add(self, key: str, attempt: int, kind: str, identifier: str) -> Observing:
        """A body has observed this.

        Raises:
            OutsideRun: the run has left this worker.
        """
        observation, observing = Observation(key, attempt, kind, identifier, self._now()), Observing()
        with self._lock:  # else it could come between the last look of `close` and the end
            if self._closed:
                raise OutsideRun(
                    f"observe({kind!r}, ...) in step {key}: its run has left this worker, and so its observations cannot be "
                    "written any more"
                )
            self.untold.append(observation)
            self._waiting[id(observation)] = observation, observing  # by the object: two equal ones are two
        self._host.call_soon_threadsafe(self._wake)
        return observing

    def side(
        self,
        key: str,
        attempt: int,
        written_at: int | None = None,
        connect: Callable[[type[Any] | None], Any] | None = None,
    ) -> BodySide:
        """What one try of a step may ask for."""
        return BodySide(self, key, attempt, written_at, tuple(self._observed(key)), connect)

    def take(self) -> list[Observation]:
        """What nobody has told the driver yet, oldest first."""
        taken = []
        while self.untold:
            taken.append(self.untold.popleft())
        return taken

    def committed(self, observations: Sequence[Observation]) -> None:
        """The unit that held these is in the journal."""
        for observation in observations:
            with self._lock:
                waiting = self._waiting.pop(id(observation), None)
            if waiting is not None:
                waiting[1].committed()

    def close(self) -> None:
        """The run leaves memory: what is not committed will not be, by this worker."""
        self._wake, self._observed = _nobody, _nothing  # nothing holds the run that has left: no work for the collector
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self.untold.clear()
        for observation, observing in waiting:
            log.warning(
                "observation_lost",
                run_id=str(self._run_id),
                step=observation.key,
                attempt=observation.attempt,
                kind=observation.kind,
            )
            observing.failed(
                OutsideRun(
                    f"observe({observation.kind!r}, {observation.id!r}) in step {observation.key}: the run has left this "
                    "worker before it was committed"
                )
            )


@dataclass(slots=True)
class BodySide:
    """What one try of a step may ask the runtime for, behind its `StepInfo` (calls.EffectSide).

    Attributes:
        attempt: which try.
        written_at: of its intent; None without one.
        earlier: what was observed before it began.
        connect: gives a transactional body its connection.
    """

    observations: Observations
    key: str
    attempt: int
    written_at: int | None
    earlier: Sequence[tuple[str, str]]
    connect: Callable[[type[Any] | None], Any] | None = None
    _own: tuple[tuple[str, str], ...] = ()

    def observed(self) -> Sequence[tuple[str, str]]:
        """(kind, id), oldest first: before this try began, and in it."""
        return *self.earlier, *self._own

    def observe(self, kind: str, id: str) -> Observing:
        """Send it with the next commit.

        Raises:
            OutsideRun: the run has left this worker.
        """
        observing = self.observations.add(self.key, self.attempt, kind, id)
        self._own = *self._own, (kind, id)
        return observing

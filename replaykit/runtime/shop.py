"""What all executors of a worker share: the clock, the writer, threads, and what the worker says of its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from replaykit.limits import Settings
from replaykit.replay.entries import ClaimedRun, Entry, Unit
from replaykit.replay.requests import CallStep
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.leftovers import Leftovers
from replaykit.runtime.threads import BodyThreads
from replaykit.runtime.transactions import Lent
from replaykit.runtime.writer import OnVerdict

__all__ = ["Journals", "Shop"]


class Journals(Protocol):
    """What an executor asks of the database by itself."""

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        """The next entries of a long journal; empty at its end, None if the lease is another's."""

    async def renew_token(self, run: ClaimedRun) -> ClaimedRun | None:
        """A new token for the run, by a statement of its own, and what stands under it; None: the lease is another's."""

    async def hold(self, run: ClaimedRun, reason: str) -> None:
        """Hold the run at once; pending instead if others have written to it since its `wakes` was read."""

    async def cancel(self, run: ClaimedRun) -> None:
        """End the run as cancelled at once."""


@dataclass(slots=True)
class Shop:
    """What all executors of a worker share."""

    settings: Settings
    clock: DatabaseClock
    put: Callable[[Unit, OnVerdict], None]
    journals: Journals
    threads: BodyThreads
    new_id: Callable[[], UUID]
    valid: Callable[[], bool]  # whether the lease is ours beyond doubt: no body begins otherwise
    congested: Callable[[], bool]  # whether too much waits to be written: no body begins meanwhile
    lend: Callable[[CallStep], Lent]  # to the body of a transactional step
    # Of what does not go through `put`: its verdict is heard by the worker, too.
    attentive: Callable[[Unit, OnVerdict], OnVerdict]
    resources: Any = None
    client: Any = None
    ended_runs: int = 0
    threads_alive: dict[int, object] = field(default_factory=dict)  # by id: bodies whose threads run
    leftovers: Leftovers = field(default_factory=Leftovers)

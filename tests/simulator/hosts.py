"""Workers and the runs in their memory, as a schedule has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from replaykit.replay.actions import Reconcile, StartBody
from replaykit.replay.driver import Driver
from replaykit.replay.entries import ClaimedRun, Observation, Unit, Verdict
from replaykit.replay.requests import CallStep
from tests.simulator.database import Row
from tests.simulator.programs import Watched
from tests.simulator.world import Call

__all__ = ["Body", "Chances", "Host", "Worker"]


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely each fault is, an event or a try."""

    crash: float = 0.012
    zombie: float = 0.012
    drain: float = 0.008
    wake: float = 0.03
    cancel: float = 0.004
    retry: float = 0.8  # of a run that has failed, once
    again: float = 0.3  # of a body that failed: its retry= says to try again
    wrong: float = 0.03  # of a claim: a deploy of other code, and the way back
    linger: float = 0.2  # of such a body: its time ran out, and its thread lives on
    stale: float = 0.03
    lost: float = 0.06
    late: float = 0.05
    refused: float = 0.002
    postponed: float = 0.1  # of a body with an effect: it is put off
    word: float = 0.01  # a person's, on a call that nobody has asked about
    chaos_events: int = 250  # after so many nothing goes wrong any more, and every run must end


@dataclass(slots=True)
class Body:
    """A body in flight."""

    call: CallStep
    started_at: int
    attempt: int = 1
    made: Call | None = None  # of a step with an effect
    seen: int = 0  # what it has observed


@dataclass(eq=False, slots=True)
class Host:
    """A claimed run in a worker's memory: what `runtime/executor.py` is."""

    worker: Worker
    run: ClaimedRun
    row: Row
    driver: Driver
    watched: Watched
    bodies: dict[str, Body] = field(default_factory=dict)
    outbox: Unit | None = None
    tries: int = 0
    doubt: Verdict | None = None  # came back to a retried unit: is it standing all the same?
    answer: tuple[Verdict, str | None] | None = None
    fresh: ClaimedRun | None = None  # a rebuild has its new token
    rebuilt: tuple[Driver, Watched] | None = None
    stands: int = 0  # entries known to stand
    outcomes: set[str] = field(default_factory=set)  # keys whose bodies ended here: never begun here again
    threads: set[str] = field(default_factory=set)  # keys whose last try's thread lives on
    postponed: dict[str, StartBody] = field(default_factory=dict)  # put off
    unbegun: set[str] = field(default_factory=set)  # keys of bodies that will not begin; the driver is told soon
    asking: dict[str, Reconcile] = field(default_factory=dict)
    wrote: set[tuple[str, int]] = field(default_factory=set)  # attempts whose intents are this claim's
    begun: set[tuple[str, int]] = field(default_factory=set)  # attempts whose bodies began here
    told: dict[str, list[Observation]] = field(default_factory=dict)  # by step, what its bodies here have observed
    transactions: set[str] = field(default_factory=set)  # keys of bodies that have ended and are to be committed


@dataclass(eq=False, slots=True)
class Worker:
    """A worker process. Its clock is wrong, and never goes back."""

    name: str
    skew: int
    hosts: dict[UUID, Host] = field(default_factory=dict)
    draining: bool = False
    latest: int = 0

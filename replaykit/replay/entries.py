"""The values that the replay, the runtime and the database exchange: entries, units of them, verdicts.

Times are whole microseconds since 1970 UTC (int); JSON travels as text, exactly as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from uuid import UUID

__all__ = [
    "FOREVER_US",
    "PROTOCOL",
    "Attempt",
    "Change",
    "ClaimedRun",
    "Closing",
    "Effect",
    "Entry",
    "Finish",
    "Hold",
    "Intent",
    "IntentState",
    "Kind",
    "Mail",
    "MailKind",
    "Observation",
    "Outcome",
    "Park",
    "Release",
    "State",
    "Unit",
    "Verdict",
]

PROTOCOL: Final = 1
"""Names the replay rules, codec tags and digest rules of this release (`runs.protocol`)."""


FOREVER_US: Final = 253_402_300_799_000_000
"""The end of the year 9999: nothing that waits until then or longer has an end."""


class State(StrEnum):
    """Where a run is (`runs.state`)."""

    PENDING = "pending"  # wants a worker
    RUNNING = "running"  # a worker holds its lease
    WAITING = "waiting"  # for a timer or something outside; no process holds it
    HELD = "held"  # for a person, with a reason
    SUCCEEDED = "succeeded"  # ended with a result
    FAILED = "failed"  # ended with an error
    CANCELLED = "cancelled"  # ended by request
    CONTINUED = "continued"  # ended by continue_as_new


class Kind(StrEnum):
    """What an entry records (`journal.kind`)."""

    STEP = "step"  # a body's outcome
    TIMER = "timer"  # a deadline of the run's clock came
    CANCEL = "cancel"  # a request to end reached the code
    REWIND = "rewind"  # a failed run goes on from before its failure: entries from `to_seq` on are set aside


class Outcome(StrEnum):
    """How it ended (`journal.outcome`)."""

    OK = "ok"  # with a result
    ERROR = "error"  # with an exception
    CANCELLED = "cancelled"  # given up before it had an outcome
    TIMEOUT = "timeout"  # its time ran out


class MailKind(StrEnum):
    """What a mailbox row asks (`mailbox.kind`). Kinds of later releases are left alone."""

    CANCEL = "cancel"  # to end
    RETRY = "retry"  # to go on, of a run that had failed or was held
    RESOLVE = "resolve"  # a person's word on an intent in doubt


class Effect(StrEnum):
    """What a step's body does to the world (`effect=`, `intents.effect`)."""

    REPEATABLE = "repeatable"  # nothing that a second time would spoil: no intent
    IDEMPOTENT = "idempotent"  # the other side recognises a second call by its key
    IRREVERSIBLE = "irreversible"  # a second call would be a second deed
    TRANSACTIONAL = "transactional"  # rows of the journal's database, committed with the step's entry: no intent


class IntentState(StrEnum):
    """What is known of a call (`intents.state`)."""

    OPEN = "open"  # it may have begun: its worker has not said what became of it
    LANDED = "landed"  # it happened
    NOT_LANDED = "not_landed"  # it did not happen
    UNKNOWN = "unknown"  # nobody could say; while it is not resolved, a person is asked
    COMPENSATED = "compensated"  # it happened, and was undone


@dataclass(slots=True)
class Entry:
    """One line of a journal. `seq` (from 1, without gaps) is its place in the order of delivery."""

    seq: int
    key: str
    name: str
    kind: str
    outcome: str
    at: int
    attempt: int = 1
    input: str | None = None
    output: str | None = None
    error: str | None = None
    digest: str | None = None
    idempotency_key: str | None = None
    started_at: int | None = None
    due_at: int | None = None  # a timer's deadline
    mailbox_id: int | None = None  # of the request that it answers
    to_seq: int | None = None  # a rewind's: entries from there up to it are set aside
    reuses: int | None = None  # seq of an entry that a rewind had set aside and whose result it repeats


@dataclass(slots=True)
class Attempt:
    """A try of a step that failed and is retried: the decision of `retry=` as a row of `attempts`.

    `attempt` counts for the whole life of the run; `tries`, `first_at` and `idle_seconds` since the step's budget began
    (retry of a failed run gives it a new one).
    """

    key: str
    attempt: int
    started_at: int
    ended_at: int
    next_at: int
    tries: int
    first_at: int
    idle_seconds: float = 0.0
    error: str = ""  # JSON text; not read back
    digest: str | None = None  # of the try's input
    first_digest: str | None = None  # of the first try's: read back only

    @property
    def idle_before_next(self) -> float:
        """Seconds that the step will have waited between its tries when the next one begins."""
        return self.idle_seconds + (self.next_at - self.ended_at) / 1_000_000


@dataclass(slots=True)
class Intent:
    """A row of `intents`: from its commit on, this attempt's call may land.

    `evidence` is JSON text, an object: what is known of the call, such as `{"error": ...}` of an attempt that failed, as
    `encode_error` writes it.
    """

    key: str
    attempt: int
    name: str
    effect: str
    idempotency_key: str
    input: str  # JSON text, in full
    written_at: int
    state: str = "open"
    resolved: bool = False  # nobody is asked about it any more
    evidence: str | None = None


@dataclass(slots=True)
class Closing:
    """What becomes of the intent of one attempt, in the unit of what says so.

    Attributes:
        resolved: False with UNKNOWN: a person is to be asked.
        by: who said so, where it was not the body: "reconcile", or a person.
        evidence: JSON text, an object; added to the row's.
    """

    key: str
    attempt: int
    state: str
    resolved: bool = True
    by: str | None = None
    evidence: str | None = None


@dataclass(slots=True)
class Observation:
    """An identifier of the world outside that a body told: `step.current().observe("ticket", "123")`."""

    key: str
    attempt: int
    kind: str
    id: str
    observed_at: int


@dataclass(frozen=True, slots=True)
class Mail:
    """A row that others left for a run (`mailbox`)."""

    id: int
    kind: str
    body: str | None  # JSON text
    sent_at: int
    sent_by: str | None = None


@dataclass(slots=True)
class Finish:
    """The run ends."""

    state: State  # SUCCEEDED, FAILED, CANCELLED
    output: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Park:
    """The run leaves memory until `available_at` (None: until something outside raises `wakes`)."""

    waiting_for: str
    available_at: int | None
    wakes: int


@dataclass(slots=True)
class Hold:
    """The run stops for a person."""

    reason: str
    wakes: int


@dataclass(slots=True)
class Release:
    """The run goes back to be claimed at once by anyone (a shutdown); no recovery."""


Change = Finish | Park | Hold | Release
"""What a unit makes of the run's state."""


@dataclass(slots=True)
class Unit:
    """One run's rows in one batch: they stand or fall together, neighbours do not.

    `wakes` is set when a timer's entry is among them: if the row has moved on, the unit is refused as stale.
    `note` is a reason written at once while the run still holds its lease.
    """

    run_id: UUID
    token: UUID
    write_id: UUID
    entries: list[Entry] = field(default_factory=list)
    change: Change | None = None
    attempts: list[Attempt] = field(default_factory=list)
    wakes: int | None = None
    note: str | None = None
    tries: int = 0  # how often it was sent: above 1, an earlier commit of it may already stand
    intents: Sequence[Intent] = ()  # new ones
    closings: Sequence[Closing] = ()  # of older ones, or of those
    observations: Sequence[Observation] = ()
    within: str | None = None  # key of the transactional step in whose transaction it is written

    @property
    def size(self) -> int:
        """Bytes of its payloads, roughly."""
        n = 200
        for e in self.entries:
            n += 200 + len(e.input or "") + len(e.output or "") + len(e.error or "")
        for a in self.attempts:
            n += 200 + len(a.error)
        for i in self.intents:
            n += 200 + len(i.input)
        for c in self.closings:
            n += 100 + len(c.evidence or "")
        for o in self.observations:
            n += 100 + len(o.id)
        if isinstance(self.change, Finish):
            n += len(self.change.output or "") + len(self.change.error or "")
        return n


class Verdict(StrEnum):
    """What became of a unit."""

    OK = "ok"  # committed, now or by an earlier try of the same write_id
    FENCED = "fenced"  # the lease is another's: drop the run
    STALE = "stale"  # the mailbox moved on before a timer's entry: read, decide again
    CONFLICT = "conflict"  # an entry of another write stands at that seq under our own token: our defect
    REFUSED = "refused"  # the database does not take one of its rows; comes with the database's words


@dataclass(slots=True)
class ClaimedRun:
    """A run as a claim hands it over. `entries` may be only the head of the journal: `last_seq` says how long it is
    (None: read on until its end). `rewinds` are those of the whole journal, `(seq, to_seq)`; `attempts` the last one of
    each step; `mail` all that others left for it."""

    id: UUID
    token: UUID
    workflow: str
    input: str
    seed: int
    protocol: int
    started_at: int
    wakes: int
    floor: int  # the run's clock is never below this: the due time it was claimed for
    last_seq: int | None = 0
    recoveries: int = 0
    key: str | None = None
    queue: str = "default"
    claims: int = 1  # how often a worker has taken it, this time included
    entries: list[Entry] = field(default_factory=list)
    rewinds: list[tuple[int, int]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    mail: list[Mail] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)  # all that are open, unknown or not_landed, by key and attempt
    observations: list[Observation] = field(default_factory=list)  # the latest

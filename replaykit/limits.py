"""Every limit and setting: name with its unit, default, and the reason for the default.

`Settings` are what a user may change (flags, then `REPLAYKIT_*` variables); the constants below them are limits that
protect the process and the database and have no flag.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

__all__ = ["Settings"]


class Settings(BaseModel):
    """What a worker may be told. Durations are seconds, sizes bytes, unless the name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_seconds: Annotated[float, Field(ge=0.5, le=86_400)] = 30.0
    """How long a silent worker keeps its runs. Long enough for a pause of the host, short enough to wait for."""

    heartbeat_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time between two heartbeats; None: a fifth of the lease, so that four may be lost in a row."""

    grace_seconds: Annotated[float, Field(ge=0)] = 10.0
    """How long bodies may finish after SIGTERM. Below the 30 s that most supervisors wait before SIGKILL."""

    evict_after_seconds: Annotated[float, Field(ge=0)] = 5.0
    """A run that waits longer than this leaves memory. Shorter waits cost less in memory than as a claim."""

    poll_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Time between two looks for work when no hint (NOTIFY) comes."""

    recoveries_max: Annotated[int, Field(ge=1)] = 5
    """How often a run that ends its process is tried again, apart from others and in the end alone, before it is held."""

    payload_bytes_max: Annotated[int, Field(ge=1024, le=256 * 1024 * 1024)] = 16 * 1024 * 1024
    """The largest single value in the journal. Larger ones belong in object storage, by reference. More than 256 MiB would not
    fit into a statement, which Postgres takes up to 1 GB, escapes included."""

    input_bytes_max: Annotated[int, Field(ge=256)] = 16 * 1024
    """A plain step's input above this is kept as digest, size and head: 200 turns of a 1 MB chat would store 94 MB."""

    drain_callbacks_max: Annotated[int, Field(ge=100)] = 100_000
    """Callbacks that a run may need between two entries. A `sleep(0)` spin would otherwise stop the whole worker."""

    concurrency: Annotated[int, Field(ge=1)] = 1_000
    """Runs in memory at once, for each process."""

    threads: Annotated[int, Field(ge=1)] = 32
    """Threads for sync step bodies, for each process: the default of `asyncio.to_thread` on 28 cores and more."""

    connections: Annotated[int, Field(ge=1)] = 10
    """Connections for bodies of transactional steps, for each process, made when they are needed. Enough to keep a disk busy,
    few beside the 100 that a database takes by default."""

    @field_validator("heartbeat_seconds")
    @classmethod
    def _two_heartbeats_a_lease(cls, heartbeat: float | None, info: ValidationInfo) -> float | None:
        lease = info.data.get("lease_seconds")  # missing: it was refused itself
        if heartbeat is not None and lease is not None and heartbeat > lease / 2:
            raise PydanticCustomError(
                "heartbeat_too_rare",
                "heartbeat_seconds ({heartbeat}) must be at most half of lease_seconds ({lease}), so that one lost"
                " heartbeat does not lose the lease",
                {"heartbeat": f"{heartbeat:g}", "lease": f"{lease:g}"},
            )
        return heartbeat

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats."""
        return self.heartbeat_seconds if self.heartbeat_seconds is not None else self.lease_seconds / 5

    @property
    def effect_grace(self) -> float:
        """Seconds that the body of a step with an effect may go on after SIGTERM: cut off it would leave its call in doubt, so
        each deploy would hold runs."""
        return max(self.grace_seconds, self.lease_seconds)


SLICE_SECONDS: Final = 0.005
"""Length of a slice of a long replay: the worker's loop breathes between two."""

CLAIM_RUNS_MAX: Final = 100
"""Runs taken by one claim: large enough to share a round trip, small enough to leave work for other workers."""

CLAIM_BYTES_MAX: Final = 8 * 1024 * 1024
"""Journal read by one claim; the rest of a longer journal is read in pages by that run's own task."""

PAGE_ENTRIES: Final = 2_000
"""Entries in one page of a long journal."""

BATCH_ENTRIES_MAX: Final = 1_000
"""Entries in one commit: beyond a few hundred a larger batch no longer lowers the cost of an entry."""

BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes in one commit, so that one large value does not make its neighbours wait long."""

BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of entries that wait for a commit; above it no new body starts and no run is claimed (back-pressure)."""

WRITERS: Final = 2
"""Connections that write journals, sharded by run: one commits while the other's batch is put together."""

ERROR_BYTES_MAX: Final = 1024 * 1024
"""One error with its causes and members: for people and `except` clauses, and read by each replay; a payload is neither."""

ERROR_PARTS_MAX: Final = 100
"""Arguments of one exception that are recorded, and attributes: more are data, and belong in a result."""

KEY_BYTES_MAX: Final = 1_024
"""A whole step key."""

NAME_BYTES_MAX: Final = 200
"""A name of a workflow, step, signal or child."""

REAP_RUNS_MAX: Final = 500
"""Runs that one statement hands back or promotes."""

RETRY_WAIT_SECONDS_MAX: Final = 100 * 365 * 86_400.0
"""The longest wait before a step's next try: a strategy's infinity must stay a moment that Postgres and Python can write."""

RECONCILE_SECONDS_MAX: Final = 30.0
"""How long a reconciler may take for one try: as long as patient HTTP clients wait for an answer."""

RECONCILE_REASON_CHARS_MAX: Final = 2_000
"""Of what a reconciler says in its own words: a sentence for a person, not a page of HTML."""

RECONCILE_PAUSES_SECONDS: Final = (0.2, 1.0)
"""Between a reconciler's tries: two more bridge a lost connection; what lasts longer is for a person, or their `retry`."""

FRUITLESS_MAX: Final = 3
"""Recoveries in a row without progress after which a run is a suspect: its neighbours' bad luck seldom lasts that long."""

SUSPECT_PROCESSES_MAX: Final = 2
"""Processes of one worker that run suspects, apart from all others: enough to go on, too few to starve the others."""

SUSPECT_GROUPS: Final = (100, 10)
"""Suspects tried together at their first and second recovery as suspects: whoever is innocent need not queue up alone."""

SUSPECT_ALONE_MIN: Final = 3
"""Deaths of a process that had nothing but this one run in it, before the run is held (or `recoveries_max`, if less)."""

THREADS_LEFT_BEHIND_MAX: Final = 64
"""Threads that make up for those whose bodies outlive their time-out: each such body holds memory and connections too."""

LOOP_BLOCKED_SECONDS: Final = 1.0
"""From when on an event loop that does not turn is told of: a heartbeat bears it, the neighbours' time-outs do not."""

LOOP_BLOCKED_FRAMES_MAX: Final = 40
"""Lines of the stack that tells where: the innermost, where the cause is."""

LOCK_TIMEOUT_SECONDS: Final = 2.0
"""How long a batch waits for a run row that someone outside holds, before its units are sent one by one."""

WORKER_ROWS_KEEP_SECONDS: Final = 86_400.0
"""Rows of workers that have stopped are kept this long, to be read by people."""

CLIENT_RETRY_SECONDS: Final = 60.0
"""How long a client sends a start or a question again after its connection was lost: longer than a failover takes."""

CLIENT_BACKOFF_SECONDS_MAX: Final = 1.0
"""The longest pause of a client between two tries to reconnect."""

START_RUNS_MAX: Final = 1_000
"""Starts that share one commit."""

WATCH_RUNS_MAX: Final = 1_000
"""Awaited runs that one query looks at; more take turns, so that a look stays a few milliseconds."""

WATCH_PAUSE_SECONDS_MAX: Final = 1.0
"""Time between two looks at awaited runs when no hint (NOTIFY) comes."""

NAMED_SECONDS: Final = 2.0
"""How long a client trusts what it read of the live workers' workflows when it starts a run by name."""

"""The statements on workers and the leases of their runs: register, beat, release, reap, prune.

Only the database's clock decides. A worker is one incarnation of a process; all its runs are leased by its one row.
Lock order everywhere: workers, then runs by id. Whoever takes runs from a worker marks its row stopped in the same
statement; runs that a claim in flight adds after that are handed back by the next sweep, which looks at stopped workers
too.

A recovery is a run taken back from a worker that died, or whose lease ran out. `runs.fruitless` counts those in a row
in which the run got no further: no entry of that worker is the journal's last. At FRUITLESS_MAX the run is a suspect: no
normal claim takes it. After `recoveries_max` more, as a suspect, it is held (DESIGN 5, Poison runs). Both is decided
in the statement that takes the run back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from replaykit.limits import (
    FRUITLESS_MAX,
    REAP_RUNS_MAX,
    SUSPECT_ALONE_MIN,
    SUSPECT_GROUPS,
    WORKER_ROWS_KEEP_SECONDS,
    Settings,
)
from replaykit.postgres.schema import Bound, Statement, us

__all__ = [
    "Reaped",
    "Released",
    "heartbeat",
    "insert_worker",
    "live_workflows",
    "lock_runs",
    "parse_clock",
    "parse_reaped",
    "parse_released",
    "parse_workflows",
    "prune_workers",
    "reap_expired",
    "release_worker",
    "stop_worker",
    "suspect_groups",
]


RECOVERIES_MAX: Final = Settings().recoveries_max
"""The setting's default."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """A sweep over dead workers. `runs` at its limit means that there may be more; `held` are those among them that will
    not be tried again."""

    workers: int
    runs: int
    held: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """A worker's runs taken back: how many, and which of them are held from now on."""

    runs: int
    held: tuple[UUID, ...] = ()


INSERT = Statement(
    "workers-insert",
    f"""
insert into {{schema}}.workers (id, hostname, pid, expires_at, lease_seconds, queues, workflows, version, python)
values (%(id)s, %(hostname)s, %(pid)s, clock_timestamp() + %(lease)s::float8 * interval '1 second', %(lease)s::float8,
    %(queues)s, %(workflows)s::json, %(version)s, %(python)s)
on conflict (id) do update set heartbeat_at = clock_timestamp(), expires_at = excluded.expires_at
    where workers.stopped_at is null
returning {us("clock_timestamp()")}
""",
)

# A row that was marked stopped stays so: the process must drop all its runs.
HEARTBEAT = Statement(
    "workers-beat-if-live",
    f"""
update {{schema}}.workers set heartbeat_at = clock_timestamp(),
    expires_at = clock_timestamp() + lease_seconds * interval '1 second',
    in_flight = %(in_flight)s::json, health = %(health)s::json
where id = %(id)s and stopped_at is null
returning {us("clock_timestamp()")}
""",
)

# What becomes of the runs `lost(id, worker, fruitless, recovered)`, whose rows are locked: judged by the locked row and
# by the journal's last entry.
_GIVE_BACK = """
judged as materialized (
    select l.id, l.recovered, case
        when (select j.worker from {schema}.journal j where j.run_id = l.id order by j.seq desc limit 1) = l.worker then 0
        when l.recovered then l.fruitless + 1
        else l.fruitless end as fruitless
    from lost l
), back as (
    update {schema}.runs r set lease_token = null, worker = null,
        state = case when j.recovered and j.fruitless >= %(held_at)s::int then 'held' else 'pending' end,
        reason = case when j.recovered and j.fruitless >= %(held_at)s::int then j.fruitless || %(why)s::text || r.id end,
        recoveries = r.recoveries + j.recovered::int,
        fruitless = j.fruitless, suspect = j.fruitless >= %(suspect_at)s::int
    from judged j where r.id = any(array(select id from judged)) and r.id = j.id
    returning r.id, r.state
)"""

_COUNTED = "count(*), array_remove(array_agg(case state when 'held' then id end), null)"

# Hand back all runs of one worker that is known to be gone or done, and mark its row. Waits for a write in flight, so
# that none is left out: a worker killed under load has a batch of a hundred runs on its way. To judge by what such a
# write brings, `LOCK_RUNS` waits first.
_RELEASE = f"""
with gone as (
    update {{schema}}.workers set stopped_at = coalesce(stopped_at, clock_timestamp()), in_flight = '[]'
    where id = %(id)s
), lost as materialized (
    select id, worker, fruitless, %(recovered)s::bool as recovered from {{schema}}.runs
    where worker = %(id)s and state = 'running' order by id for no key update {{patience}}
), {_GIVE_BACK}
select {_COUNTED} from back
"""

RELEASE = Statement("workers-release-runs", _RELEASE.replace("{patience}", ""))

# The same without the wait, when a transaction that somebody outside leaves open on one run would keep all others: that
# one is left to the next sweep.
RELEASE_UNLOCKED = Statement("workers-release-unlocked", _RELEASE.replace("{patience}", "skip locked"))

# Mark a dead worker and lock its runs, in the transaction of the release: that statement's snapshot is then younger than
# the commit of a write that was in flight, and sees the entry that it brought.
LOCK_RUNS = Statement(
    "workers-lock-runs",
    """
with gone as (
    update {schema}.workers set stopped_at = coalesce(stopped_at, clock_timestamp()), in_flight = '[]'
    where id = %(id)s
)
select id from {schema}.runs where worker = %(id)s and state = 'running' order by id for no key update
""",
)

STOP = Statement(
    "workers-stop",
    """
update {schema}.workers set stopped_at = coalesce(stopped_at, clock_timestamp()), in_flight = '[]' where id = %(id)s
returning id
""",
)

# Mark workers that are silent past their lease, and hand back runs of theirs and of workers that stopped before. Runs
# that a write in flight has locked are left to the next sweep. A worker that stopped before its lease ended was released,
# and what it still has came by a claim that was on its way: no recovery.
REAP = Statement(
    "workers-reap-expired",
    f"""
with dead as materialized (
    select id from {{schema}}.workers where stopped_at is null and expires_at < clock_timestamp()
    order by id for update skip locked
), gone as (
    update {{schema}}.workers set stopped_at = clock_timestamp(), in_flight = '[]'
    where id = any(array(select id from dead))
), lost as materialized (
    select r.id, r.worker, r.fruitless, d.recovered
    from (select id, true as recovered from dead union all
        select id, expires_at < stopped_at from {{schema}}.workers where stopped_at is not null) d
    cross join lateral (select id, worker, fruitless from {{schema}}.runs where worker = d.id and state = 'running'
        order by id for no key update skip locked) r
    limit %(limit)s
), {_GIVE_BACK}
select (select count(*) from dead), {_COUNTED} from back
""",
)

# Rows of stopped workers are kept a while for people; never while a run still names one.
PRUNE = Statement(
    "workers-prune-stopped",
    """
delete from {schema}.workers w
where w.stopped_at < clock_timestamp() - %(keep)s::float8 * interval '1 second'
    and not exists (select from {schema}.runs r where r.worker = w.id and r.state = 'running')
returning w.id
""",
)

LIVE_WORKFLOWS = Statement(
    "workers-read-workflows",
    """
select f.key, f.value::text from {schema}.workers w cross join lateral json_each(w.workflows) f
where w.stopped_at is null and w.expires_at > clock_timestamp()
order by w.started_at
""",
)


def insert_worker(
    worker_id: UUID,
    *,
    hostname: str,
    pid: int,
    lease_seconds: float,
    queues: Sequence[str],
    workflows: Mapping[str, Any],
    version: str,
    python: str,
) -> Bound:
    """Register an incarnation; `parse_clock` reads the database's time. Repeatable.

    Args:
        worker_id: new with each start of a process.
        workflows: name to input schema.
    """
    return INSERT, {
        "id": worker_id,
        "hostname": hostname,
        "pid": pid,
        "lease": lease_seconds,
        "queues": list(queues),
        "workflows": json.dumps(dict(workflows)),
        "version": version,
        "python": python,
    }


def heartbeat(worker_id: UUID, in_flight: Sequence[Any] = (), health: Any = None) -> Bound:
    """Renew the lease of all runs of the worker; `parse_clock` reads it: None means that the row was reaped.

    Args:
        in_flight: `{"run_id", "key", "attempt", "since"}` of each body, `since` in microseconds: view in_flight.
        health: a JSON value for people.
    """
    return HEARTBEAT, {"id": worker_id, "in_flight": json.dumps(list(in_flight)), "health": json.dumps(health)}


def parse_clock(rows: Sequence[tuple[Any, ...]]) -> int | None:
    """The database's time in microseconds, or None without a row."""
    return rows[0][0] if rows else None


def suspect_groups(recoveries_max: int) -> tuple[int, ...]:
    """How many suspects are tried together at their first recoveries as suspects; at all later ones each runs alone.

    Trying each alone from the start would let a thousand innocent neighbours of one poison run wait for each other. At
    least SUSPECT_ALONE_MIN deaths alone come before `held`, so that no run is held for another's deeds.
    """
    return SUSPECT_GROUPS[: max(0, recoveries_max - SUSPECT_ALONE_MIN)]


def release_worker(
    worker_id: UUID,
    recovered: bool,
    *,
    wait: bool = True,
    how: str = "ended",
    recoveries_max: int = RECOVERIES_MAX,
) -> Bound:
    """Hand back all runs of a worker that has ended; `parse_released` reads it. Repeatable.

    Args:
        recovered: it died: counts as a recovery of each run.
        wait: for runs that others have locked; False: leave them to the next sweep.
        how: it ended, for the reason of a run that is held: "was killed by SIGKILL".
        recoveries_max: the setting.
    """
    alone = recoveries_max - len(suspect_groups(recoveries_max))
    words = f", {'the last of them' if alone == 1 else f'the last {alone} of them'} with no other run beside it"
    params = {"id": worker_id, "recovered": recovered}
    return RELEASE if wait else RELEASE_UNLOCKED, params | _judging(recoveries_max, words, how)


def lock_runs(worker_id: UUID) -> Bound:
    """Wait for the writes of a dead worker that are on their way; to be sent before `release_worker`, in its
    transaction."""
    return LOCK_RUNS, {"id": worker_id}


def _judging(recoveries_max: int, beside: str, how: str) -> dict[str, Any]:
    why = (
        f" worker processes in a row have ended while they executed this run and before it got any further{beside};"
        f" the last one {how}; once the code is right: replaykit retry "
    )
    return {"suspect_at": FRUITLESS_MAX, "held_at": FRUITLESS_MAX + recoveries_max, "why": why}


def parse_released(rows: Sequence[tuple[Any, ...]]) -> Released:
    """How many were taken back, and which are held."""
    ((count, held),) = rows
    return Released(count, tuple(held or ()))


def stop_worker(worker_id: UUID) -> Bound:
    """Mark a worker done, its runs handed back. Not for one that leaves bodies alive: its lease must run out."""
    return STOP, {"id": worker_id}


def reap_expired(limit: int = REAP_RUNS_MAX, *, recoveries_max: int = RECOVERIES_MAX) -> Bound:
    """Hand back runs of dead workers, at most `limit`; `parse_reaped` reads it.

    Only for a worker whose own heartbeats have succeeded for one whole lease without a gap: after an outage of the
    database all leases look expired (DESIGN 5).
    """
    return REAP, {"limit": limit, **_judging(recoveries_max, "", "fell silent, and its lease ran out")}


def parse_reaped(rows: Sequence[tuple[Any, ...]]) -> Reaped:
    """How many workers were found dead, how many runs taken back, and which are held."""
    ((workers, count, held),) = rows
    return Reaped(workers, count, tuple(held or ()))


def prune_workers(keep_seconds: float = WORKER_ROWS_KEEP_SECONDS) -> Bound:
    """Delete rows of workers that stopped so long ago; returns their ids."""
    return PRUNE, {"keep": keep_seconds}


def live_workflows() -> Bound:
    """Names and input schemas that live workers have; `parse_workflows` reads it."""
    return LIVE_WORKFLOWS, {}


def parse_workflows(rows: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """Name to input schema; of several workers with the name, the one that started last."""
    return {name: json.loads(schema) for name, schema in rows}

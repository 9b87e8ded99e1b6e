"""The statements on workers and the leases of their runs: register, beat, release, reap, prune.

Only the database's clock decides. A worker is one incarnation of a process; all its runs are leased by its one row.
Lock order everywhere: workers, then runs by id. Whoever takes runs from a worker marks its row stopped in the same
statement; runs that a claim in flight adds after that are handed back by the next sweep, which looks at stopped workers
too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from replaykit.limits import REAP_RUNS_MAX, WORKER_ROWS_KEEP_SECONDS
from replaykit.postgres.schema import Bound, Statement, us

__all__ = [
    "Reaped",
    "Released",
    "heartbeat",
    "insert_worker",
    "live_workflows",
    "parse_clock",
    "parse_reaped",
    "parse_released",
    "parse_workflows",
    "prune_workers",
    "reap_expired",
    "release_worker",
    "stop_worker",
]


@dataclass(frozen=True, slots=True)
class Reaped:
    """A sweep over dead workers. `runs` at its limit means that there may be more."""

    workers: int
    runs: int


@dataclass(frozen=True, slots=True)
class Released:
    """A worker's runs handed back."""

    runs: int


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

_GIVE_BACK = "state = 'pending', lease_token = null, worker = null, reason = null"

# Hand back all runs of one worker that is known to be gone or done, and mark its row. Waits for a write in flight, so
# that none is left out: a worker killed under load has a batch of a hundred runs on its way.
_RELEASE = f"""
with gone as (
    update {{schema}}.workers set stopped_at = coalesce(stopped_at, clock_timestamp()), in_flight = '[]'
    where id = %(id)s
), lost as materialized (
    select id from {{schema}}.runs where worker = %(id)s and state = 'running' order by id for no key update {{patience}}
), back as (
    update {{schema}}.runs set {_GIVE_BACK}, recoveries = recoveries + %(recovery)s::int
    where id = any(array(select id from lost)) returning 1
)
select count(*) from back
"""

RELEASE = Statement("workers-release-runs", _RELEASE.replace("{patience}", ""))

# The same without the wait, when a transaction that somebody outside leaves open on one run would keep all others: that
# one is left to the next sweep.
RELEASE_UNLOCKED = Statement("workers-release-unlocked", _RELEASE.replace("{patience}", "skip locked"))

STOP = Statement(
    "workers-stop",
    """
update {schema}.workers set stopped_at = coalesce(stopped_at, clock_timestamp()), in_flight = '[]' where id = %(id)s
returning id
""",
)

# Mark workers that are silent past their lease, and hand back runs of theirs and of workers that stopped before. Runs
# that a write in flight has locked are left to the next sweep.
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
    select r.id
    from (select id from dead union all select id from {{schema}}.workers where stopped_at is not null) d
    cross join lateral (select id from {{schema}}.runs where worker = d.id and state = 'running'
        order by id for no key update skip locked) r
    limit %(limit)s
), back as (
    update {{schema}}.runs set {_GIVE_BACK}, recoveries = recoveries + 1
    where id = any(array(select id from lost)) returning 1
)
select (select count(*) from dead), (select count(*) from back)
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


def release_worker(worker_id: UUID, recovered: bool, *, wait: bool = True) -> Bound:
    """Hand back all runs of a worker that has ended; `parse_released` reads it. Repeatable.

    Args:
        recovered: it died: counts as a recovery of each run.
        wait: for runs that others have locked; False: leave them to the next sweep.
    """
    return RELEASE if wait else RELEASE_UNLOCKED, {"id": worker_id, "recovery": int(recovered)}


def parse_released(rows: Sequence[tuple[Any, ...]]) -> Released:
    """How many were handed back."""
    return Released(*rows[0])


def stop_worker(worker_id: UUID) -> Bound:
    """Mark a worker done, its runs handed back. Not for one that leaves bodies alive: its lease must run out."""
    return STOP, {"id": worker_id}


def reap_expired(limit: int = REAP_RUNS_MAX) -> Bound:
    """Hand back runs of dead workers, at most `limit`; `parse_reaped` reads it.

    Only for a worker whose own heartbeats have succeeded for one whole lease without a gap: after an outage of the
    database all leases look expired (DESIGN 5).
    """
    return REAP, {"limit": limit}


def parse_reaped(rows: Sequence[tuple[Any, ...]]) -> Reaped:
    """How many workers were found dead, how many runs handed back."""
    return Reaped(*rows[0])


def prune_workers(keep_seconds: float = WORKER_ROWS_KEEP_SECONDS) -> Bound:
    """Delete rows of workers that stopped so long ago; returns their ids."""
    return PRUNE, {"keep": keep_seconds}


def live_workflows() -> Bound:
    """Names and input schemas that live workers have; `parse_workflows` reads it."""
    return LIVE_WORKFLOWS, {}


def parse_workflows(rows: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """Name to input schema; of several workers with the name, the one that started last."""
    return {name: json.loads(schema) for name, schema in rows}

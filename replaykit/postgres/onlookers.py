"""The statements of those who look on and write nothing: the command line's lists, and clients that wait.

Rows come as JSON objects made by the server, so that `--json` has the SQL names, payloads are copied and never parsed,
and times are ISO 8601 in UTC.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID

from replaykit.postgres.schema import Bound, Statement
from replaykit.replay.jsontext import unescape

__all__ = [
    "find_observations",
    "parse_rows",
    "run_intents",
    "shown_attempts",
    "shown_in_doubt",
    "shown_in_flight",
    "shown_journal",
    "shown_journal_ends",
    "shown_observations",
    "shown_open_attempts",
    "shown_requests",
    "shown_run",
    "shown_runs",
    "shown_tried",
    "shown_undone",
    "shown_workers",
    "unlisten",
]

# The contract's columns, and what follows from the run's other tables. The lease's token and the counters are not news.
_RUN: Final = (
    "r.id, r.workflow, r.key, r.state, r.queue, r.priority, r.waiting_for, r.reason, r.created_at,"
    " nullif(r.available_at, 'infinity') as available_at, r.started_at, r.finished_at, r.parent_id, r.forked_from,"
    " r.recoveries, r.worker, r.protocol, r.seed,"
    " coalesce((select j.seq from {schema}.journal j where j.run_id = r.id order by j.seq desc limit 1), 0) as entries"
)

# Newest first: ids begin with their time.
RUNS = Statement(
    "runs-list-shown",
    f"""
select row_to_json(s)::text from (
    select {_RUN}
    from {{schema}}.runs r
    where (%(state)s::text is null or r.state = %(state)s) and (%(workflow)s::text is null or r.workflow = %(workflow)s)
    order by r.id desc limit %(limit)s::bigint
) s
""",
)

# The error of a run that failed and was retried stays in its row until the next end: it is news no more.
RUN = Statement(
    "runs-read-shown",
    f"""
select row_to_json(s)::text from (
    select {_RUN}, p.input, p.output, case when r.state = 'failed' then p.error end as error
    from {{schema}}.runs r left join {{schema}}.payloads p on p.run_id = r.id
    where r.id = %(run_id)s
) s
""",
)

# Without the columns that only the engine reads.
_ENTRY: Final = (
    "j.run_id, j.seq, j.key, j.name, j.kind, j.outcome, j.attempt, j.input, j.output, j.error, j.idempotency_key,"
    " j.started_at, j.at, j.due_at, j.recorded_at, j.worker, j.mailbox_id, j.to_seq, j.reuses"
)

# In the order of delivery.
JOURNAL = Statement(
    "journal-list-shown",
    f"""
select row_to_json(s)::text from (
    select {_ENTRY} from {{schema}}.journal j where j.run_id = %(run_id)s order by j.seq
) s
""",
)

# Its two ends: two ranges of the primary key, so that nothing between them is read.
JOURNAL_ENDS = Statement(
    "journal-list-shown-ends",
    f"""
select row_to_json(s)::text from (
    select {_ENTRY} from {{schema}}.journal j where j.run_id = %(run_id)s and j.seq <= %(first)s
    union all
    select {_ENTRY} from {{schema}}.journal j where j.run_id = %(run_id)s and j.seq > greatest(%(first)s,
        (select max(l.seq) from {{schema}}.journal l where l.run_id = %(run_id)s) - %(last)s)
) s order by s.seq
""",
)

ATTEMPTS = Statement(
    "attempts-list-shown",
    """
select row_to_json(s)::text from (
    select a.* from {schema}.attempts a where a.run_id = %(run_id)s order by a.started_at, a.key, a.attempt
) s
""",
)

# Those of steps that have no entry yet; an entry that a rewind has set aside is of an earlier attempt.
OPEN_ATTEMPTS = Statement(
    "attempts-list-shown-open",
    """
select row_to_json(s)::text from (
    select a.* from {schema}.attempts a where a.run_id = %(run_id)s
        and not exists (select from {schema}.journal j where j.run_id = a.run_id and j.key = a.key
            and j.attempt >= a.attempt)
    order by a.started_at, a.key, a.attempt
) s
""",
)

# The last tries of some of its steps.
TRIED = Statement(
    "attempts-list-shown-tried",
    """
select row_to_json(s)::text from (
    select * from (select a.* from {schema}.attempts a where a.run_id = %(run_id)s and a.key = any(%(keys)s)
        order by a.started_at desc, a.key, a.attempt desc limit %(limit)s) l
    order by l.started_at, l.key, l.attempt
) s
""",
)

# The calls of its steps with an effect, in the order in which they were about to be made.
INTENTS = Statement(
    "intents-list-shown",
    """
select row_to_json(s)::text from (
    select i.run_id, i.key, i.attempt, i.name, i.effect, i.idempotency_key, i.input, i.state, i.written_at, i.doubt_at,
        i.resolved_at, i.resolved_by, i.evidence, i.worker
    from {schema}.intents i where i.run_id = %(run_id)s order by i.written_at, i.key, i.attempt
) s
""",
)

# The calls of which a person is asked, as the view has them.
IN_DOUBT = Statement(
    "in_doubt-list-shown",
    """
select row_to_json(s)::text from (
    select d.* from {schema}.in_doubt d where d.run_id = %(run_id)s order by d.written_at, d.key, d.attempt limit %(limit)s
) s
""",
)

# What its sagas have undone. The keys of undoings begin so, and no other's do.
UNDONE = Statement(
    "journal-list-shown-undone",
    f"""
select row_to_json(s)::text from (
    select {_ENTRY} from {{schema}}.journal j where j.run_id = %(run_id)s and j.key like '~undo:%%' order by j.seq
    limit %(limit)s
) s
""",
)

# What the bodies of one run have observed.
OBSERVATIONS = Statement(
    "observations-list-shown",
    """
select row_to_json(s)::text from (
    select o.* from {schema}.observations o where o.run_id = %(run_id)s order by o.id
) s
""",
)

# Who told an identifier of the world outside, the first first. The run may be gone, what it observed is not.
OBSERVED = Statement(
    "observations-list-found",
    """
select row_to_json(s)::text from (
    select o.*, r.workflow, r.key as run_key, r.state
    from {schema}.observations o left join {schema}.runs r on r.id = o.run_id
    where (o.value = %(value)s and o.kind = %(kind)s) or o.value = %(whole)s order by o.id
) s
""",
)

# What people asked of it: the last so many (null: all), in their order, each with the seq of the entry that answers it.
# Those entries have an index of their own: nothing else of the journal is read.
REQUESTS = Statement(
    "mailbox-list-shown",
    """
select row_to_json(s)::text from (
    select m.run_id, m.id, m.kind, m.name, m.body, m.sent_at, m.sent_by, a.seq as entry, a.to_seq
    from (select * from {schema}.mailbox where run_id = %(run_id)s and kind in ('cancel', 'retry', 'resolve')
        order by id desc limit %(limit)s::bigint) m
    left join lateral (select j.seq, j.to_seq from {schema}.journal j
        where j.run_id = m.run_id and j.kind in ('cancel', 'rewind') and j.mailbox_id = m.id order by j.seq limit 1) a
        on true
    order by m.id
) s
""",
)

# Bodies that run now, of some runs. The rows of live workers are few.
IN_FLIGHT = Statement(
    "in_flight-list-shown",
    """
select row_to_json(s)::text from (
    select f.* from {schema}.in_flight f where f.run_id = any(%(run_ids)s) order by f.since, f.key
) s
""",
)

WORKERS = Statement(
    "workers-list-shown",
    """
select row_to_json(s)::text from (
    select w.id, case when w.stopped_at is not null then 'stopped' when w.expires_at < clock_timestamp() then 'expired'
            else 'live' end as state,
        w.hostname, w.pid, w.started_at, w.heartbeat_at, w.expires_at, w.stopped_at, w.lease_seconds, w.queues,
        w.workflows, w.version, w.python, w.health, w.in_flight,
        (select count(*) from {schema}.runs r where r.worker = w.id and r.state = 'running') as running
    from {schema}.workers w
    where %(stopped)s or w.stopped_at is null
    order by w.started_at, w.id
) s
""",
)


UNLISTEN = Statement("unlisten", "unlisten *")


def shown_runs(*, state: str | None = None, workflow: str | None = None, limit: int | None = 50) -> Bound:
    """Runs, newest first; all of them if `limit` is None."""
    return RUNS, {"state": state, "workflow": workflow, "limit": limit}


def shown_run(run_id: UUID) -> Bound:
    """One run with its payloads."""
    return RUN, {"run_id": run_id}


def shown_journal(run_id: UUID) -> Bound:
    """Its whole journal."""
    return JOURNAL, {"run_id": run_id}


def shown_journal_ends(run_id: UUID, *, first: int, last: int) -> Bound:
    """So many entries of its journal's beginning and of its end; all of a shorter one."""
    return JOURNAL_ENDS, {"run_id": run_id, "first": first, "last": last}


def shown_attempts(run_id: UUID) -> Bound:
    """Its tries that failed and were retried."""
    return ATTEMPTS, {"run_id": run_id}


def shown_open_attempts(run_id: UUID) -> Bound:
    """Those whose steps have not ended."""
    return OPEN_ATTEMPTS, {"run_id": run_id}


def shown_tried(run_id: UUID, keys: Iterable[str], limit: int) -> Bound:
    """The last `limit` tries of these steps."""
    return TRIED, {"run_id": run_id, "keys": list(keys), "limit": limit}


def shown_requests(run_id: UUID, limit: int | None = None) -> Bound:
    """What people asked of it, the last `limit`, each with the `entry` that answers it."""
    return REQUESTS, {"run_id": run_id, "limit": limit}


def run_intents(run_id: UUID) -> Bound:
    """Its intents, all of them, by when they were written."""
    return INTENTS, {"run_id": run_id}


def shown_in_doubt(run_id: UUID, limit: int) -> Bound:
    """Its calls in doubt, the first `limit`, each with the time in which it may have landed: `written_at` to `until`."""
    return IN_DOUBT, {"run_id": run_id, "limit": limit}


def shown_undone(run_id: UUID, limit: int) -> Bound:
    """The entries of its undoings, the first `limit`."""
    return UNDONE, {"run_id": run_id, "limit": limit}


def shown_observations(run_id: UUID) -> Bound:
    """All that its bodies have observed."""
    return OBSERVATIONS, {"run_id": run_id}


def find_observations(what: str) -> Bound:
    """Observations of `KIND:VALUE`, or of a value under any kind, in all runs, each with its run's `workflow`, `run_key` and
    `state`."""
    kind, _, value = what.partition(":")
    return OBSERVED, {"kind": kind, "value": value, "whole": what}


def shown_in_flight(run_ids: Iterable[UUID]) -> Bound:
    """Bodies of these runs that run now."""
    return IN_FLIGHT, {"run_ids": list(run_ids)}


def shown_workers(*, stopped: bool = False) -> Bound:
    """Workers, oldest first; with `stopped` those that have ended too."""
    return WORKERS, {"stopped": stopped}


def unlisten() -> Bound:
    """No more hints on this connection: those that nobody reads would fill the server's queue."""
    return UNLISTEN, {}


def parse_rows(rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The rows as dicts by SQL name, with the texts that were recorded: NUL and lone surrogates, which stand escaped in
    the database, are themselves again."""
    return [json.loads(unescape(row[0])) for row in rows]

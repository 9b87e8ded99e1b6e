"""The statements on runs: start, claim, promote, renew, hold, find, list, list.

A claim takes rows in one statement and reads what belongs to them in others of the same transaction, whose snapshots
are younger: fused into one it would hand over a journal from before the previous owner's last commit (POSTGRES.md 3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from replaykit.limits import CLAIM_BYTES_MAX, CLAIM_RUNS_MAX, FRUITLESS_MAX, REAP_RUNS_MAX
from replaykit.postgres.journal import ENTRY_COLUMNS, parse_entry
from replaykit.postgres.schema import Bound, Statement, moment, storable, us
from replaykit.replay.entries import PROTOCOL, Attempt, ClaimedRun, Intent, Mail, Observation, State

__all__ = [
    "Promoted",
    "RunResult",
    "RunRow",
    "StartRow",
    "Started",
    "cancel_run",
    "claim",
    "clear_suspect",
    "find_run",
    "hold_run",
    "notify",
    "parse_claim",
    "parse_claimed",
    "parse_mail",
    "parse_promoted",
    "parse_results",
    "parse_runs",
    "parse_started",
    "promote_due",
    "read_claimed",
    "read_mail",
    "read_strays",
    "renew_token",
    "run_results",
    "start_runs",
]

HEAD_ENTRIES: Final = 200
"""Entries of one run that a claim hands over; the rest of a longer journal is read in pages by that run's own task."""

OBSERVATIONS_READ_MAX: Final = 1_000
"""Observations of one run that a claim hands over, the latest: more are a log, and are found with `find`."""


@dataclass(slots=True)
class StartRow:
    """A run to be. `input` is JSON text; `delay` and `available_at` (microseconds) put its first moment off."""

    id: UUID
    workflow: str
    input: str
    key: str | None = None
    queue: str = "default"
    priority: int = 0
    delay: int | None = None  # from now on, by the database's clock
    available_at: int | None = None  # a moment


@dataclass(frozen=True, slots=True)
class Started:
    """What a start found or made. `workflow` differs from the one asked for when the key is another workflow's."""

    asked: UUID
    id: UUID
    workflow: str
    created: bool
    state: State


@dataclass(frozen=True, slots=True)
class Promoted:
    """A turn of waiting runs whose time had come."""

    count: int
    next_due_at: int | None  # microseconds; of those still waiting
    now: int  # microseconds, the database's
    suspects: bool = False  # pending runs of these queues and workflows that no normal claim takes


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run's row, as people see it."""

    id: UUID
    workflow: str
    key: str | None
    state: State
    queue: str
    priority: int
    waiting_for: str | None
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    available_at: datetime | None  # None: until something outside comes
    parent_id: UUID | None
    forked_from: UUID | None
    recoveries: int
    worker: UUID | None
    protocol: int | None
    entries: int  # the journal's length


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run stands, with what it ended with (JSON text)."""

    id: UUID
    workflow: str
    state: State
    reason: str | None
    output: str | None
    error: str | None


# Insert many runs: one commit for all starts that came together. A row whose id or key is taken is left out; START_READ
# says what stands there.
START = Statement(
    "runs-insert-if-new",
    f"""
with asked as materialized (
    select * from json_to_recordset(%(rows)s::json) as a(id uuid, workflow text, key text, queue text, priority int,
        input text, delay bigint, until bigint)
), timed as (
    select a.*, coalesce({moment("a.until")}, statement_timestamp() + a.delay * interval '1 microsecond',
        statement_timestamp()) as first_at    -- now() would be when a caller's transaction began
    from asked a
), ins as (
    insert into {{schema}}.runs (id, workflow, key, queue, priority, state, waiting_for, available_at)
    select id, workflow, key, queue, priority,
        case when first_at > statement_timestamp() then 'waiting' else 'pending' end,
        case when first_at > statement_timestamp() then 'start' end,
        first_at
    from timed order by key, id
    on conflict do nothing returning id
)
insert into {{schema}}.payloads (run_id, input) select a.id, a.input::json from asked a join ins on ins.id = a.id
on conflict do nothing
""",
)

# What stands under the id or key of each start. A statement of its own: younger than the commit of another's start of
# the same key, which the insert waited for.
START_READ = Statement(
    "runs-read-started",
    """
select a.id, r.id, r.workflow, r.id = a.id, r.state
from json_to_recordset(%(rows)s::json) as a(id uuid, key text)
cross join lateral (
    select id, workflow, state from {schema}.runs where a.key is null and id = a.id
    union all
    select id, workflow, state from {schema}.runs where key = a.key
) r
""",
)

# The same of one run in a transaction of its caller's; returns a row if it was made. What a caller's connection sends and
# gets is ASCII: it may speak any encoding.
START_BORROWED = Statement("runs-insert-one-if-new", f"{START.text}returning run_id::text\n")

# What stands under its key, if it was not.
START_BORROWED_READ = Statement(
    "runs-read-by-key-borrowed",
    """
select id::text, encode(convert_to(workflow, 'UTF8'), 'hex'), state
from {schema}.runs where key = (%(rows)s::json -> 0 ->> 'key')
""",
)

# Take pending runs of one queue, in order, past those that other claims are taking. Only for a worker whose row is
# alive: a process that was stopped past its lease must not take more.
CLAIM = Statement(
    "runs-claim-pending",
    """
with cand as materialized (
    select id from {schema}.runs
    where queue = %(queue)s and state = 'pending' and not suspect and workflow = any(%(workflows)s)
        and (protocol is null or protocol = %(protocol)s)
        and exists (select from {schema}.workers w
            where w.id = %(worker)s and w.stopped_at is null and w.expires_at > clock_timestamp())
    order by priority, available_at, id limit %(limit)s for update skip locked
)
update {schema}.runs set state = 'running', lease_token = %(token)s, worker = %(worker)s, reason = null,
    started_at = coalesce(started_at, clock_timestamp()), protocol = coalesce(protocol, %(protocol)s),
    claims = claims + 1
where id = any(array(select id from cand))
""",
)

# Take pending suspects of one queue, of those that have died least often as suspects, the oldest first: as many together
# as `groups` has for their number of recoveries so far, in the end one.
CLAIM_SUSPECTS = Statement(
    "runs-claim-suspects",
    """
with level as materialized (
    select fruitless from {schema}.runs
    where queue = %(queue)s and state = 'pending' and suspect and workflow = any(%(workflows)s)
        and (protocol is null or protocol = %(protocol)s)
    order by fruitless limit 1
), cand as materialized (
    select id from {schema}.runs
    where queue = %(queue)s and state = 'pending' and suspect and workflow = any(%(workflows)s)
        and (protocol is null or protocol = %(protocol)s) and fruitless = (select fruitless from level)
        and exists (select from {schema}.workers w
            where w.id = %(worker)s and w.stopped_at is null and w.expires_at > clock_timestamp())
    order by created_at, id
    limit (select coalesce((%(groups)s::int[])[fruitless - %(suspect_at)s::int + 1], 1) from level)
    for update skip locked
)
update {schema}.runs set state = 'running', lease_token = %(token)s, worker = %(worker)s, reason = null,
    started_at = coalesce(started_at, clock_timestamp()), protocol = coalesce(protocol, %(protocol)s),
    claims = claims + 1
where id = any(array(select id from cand))
""",
)

# It got further, in a process with few neighbours or none: it is no suspect any more.
CLEAR = Statement(
    "runs-clear-suspect-fenced",
    """
update {schema}.runs set suspect = false, fruitless = 0 where id = %(run_id)s and lease_token = %(token)s returning id
""",
)

# What was claimed, by the token; columns in the order of ClaimedRun's fields, the token apart.
CLAIM_RUNS = Statement(
    "runs-read-claimed",
    f"""
select r.id, r.workflow, p.input, r.seed, r.protocol, {us("r.started_at")}, r.wakes, {us("r.available_at")},
    coalesce(l.seq, 0), r.recoveries, r.key, r.queue, r.claims,
    array(select array[j.seq, j.to_seq] from {{schema}}.journal j
        where j.run_id = r.id and j.kind = 'rewind' order by j.seq)
from {{schema}}.runs r
cross join lateral (select input::text from {{schema}}.payloads where run_id = r.id limit 1) p
left join lateral (select seq from {{schema}}.journal where run_id = r.id order by seq desc limit 1) l on true
where r.worker = %(worker)s and r.lease_token = %(token)s and r.state = 'running'
order by r.priority, r.available_at, r.id
""",
)

# The heads of their journals: so many entries a run, so many bytes together (as stored: nothing is unpacked to be
# measured).
CLAIM_JOURNAL = Statement(
    "journal-read-claimed",
    f"""
select j.run_id, {ENTRY_COLUMNS}
from (
    select h.*, sum(coalesce(pg_column_size(h.input), 0) + coalesce(pg_column_size(h.output), 0)
        + coalesce(pg_column_size(h.error), 0)) over (order by h.run_id, h.seq) as bytes
    from {{schema}}.runs r
    cross join lateral (select * from {{schema}}.journal where run_id = r.id order by seq limit %(head)s) h
    where r.worker = %(worker)s and r.lease_token = %(token)s and r.state = 'running'
) j
where j.bytes <= %(bytes)s
order by j.run_id, j.seq
""",
)

# Where the retries of their steps stand: the last try of each step that failed and was tried again.
CLAIM_ATTEMPTS = Statement(
    "attempts-read-claimed",
    f"""
select r.id, a.key, a.attempt, {us("a.started_at")}, {us("a.ended_at")}, {us("a.next_at")}, a.tries,
    {us("coalesce(a.first_at, a.started_at)")}, a.idle_seconds, '', a.digest,
    (select f.digest from {{schema}}.attempts f where f.run_id = r.id and f.key = a.key and f.attempt = 1)
from {{schema}}.runs r
cross join lateral (select distinct on (key) * from {{schema}}.attempts where run_id = r.id
    order by key, attempt desc) a
where r.worker = %(worker)s and r.lease_token = %(token)s and r.state = 'running'
""",
)

# What is not settled of their calls, in the order of Intent's fields. A call that landed is in the journal. Of a step that was
# tried a hundred times the first input and the last one say all.
CLAIM_INTENTS = Statement(
    "intents-read-claimed",
    f"""
select r.id, i.key, i.attempt, i.name, i.effect, i.idempotency_key,
    case when i.attempt = 1 or lead(i.attempt) over (partition by r.id, i.key order by i.attempt) is null
        then i.input::text else '' end,
    {us("i.written_at")}, i.state, i.resolved_at is not null,
    case when lead(i.attempt) over (partition by r.id, i.key order by i.attempt) is null then i.evidence::text end
from {{schema}}.runs r
cross join lateral (select * from {{schema}}.intents where run_id = r.id and state in ('open', 'unknown', 'not_landed')
    offset 0) i
where r.worker = %(worker)s and r.lease_token = %(token)s and r.state = 'running'
order by r.id, i.key, i.attempt
""",
)

# What their bodies have observed: the latest of each run, the oldest first.
CLAIM_OBSERVATIONS = Statement(
    "observations-read-claimed",
    f"""
select r.id, o.key, o.attempt, o.kind, o.value, {us("o.observed_at")}
from {{schema}}.runs r
cross join lateral (select * from {{schema}}.observations where run_id = r.id order by id desc limit %(observed)s) o
where r.worker = %(worker)s and r.lease_token = %(token)s and r.state = 'running'
order by r.id, o.id
""",
)

# What others have left for them, all of it: what of it was answered, the journal says. Only the run's `wakes` that is read
# with it (or before it) may be compared with: a row that comes later raises it again.
_MAIL: Final = f"""
select r.id, r.wakes, m.id, m.kind, m.body::text, {us("m.sent_at")}, m.sent_by
from {{schema}}.runs r left join {{schema}}.mailbox m on m.run_id = r.id
where r.worker = %(worker)s and r.state = 'running' and r.wakes > 0{{under}}
order by r.id, m.id
"""

CLAIM_MAIL = Statement("mailbox-read-claimed", _MAIL.replace("{under}", " and r.lease_token = %(token)s"))

# The same of runs that this worker has in memory and that others have written to.
READ_MAIL = Statement("mailbox-read-woken", _MAIL.replace("{under}", ""))

# Runs that this worker leases and does not know of: of a claim whose connection was lost, and whose commit came only after it
# had been repeated and answered (it waited for a standby, for one). Its rows were locked then: the repetition passed them by.
READ_STRAYS = Statement(
    "runs-read-strays",
    """
select id, lease_token, suspect from {schema}.runs
where worker = %(worker)s and state = 'running' and id <> all(%(known)s::uuid[])
""",
)

# A request to end that the run's code cannot be told of, because it cannot be replayed: it ends as asked. No worker will
# ever say what became of calls that were open: they are in doubt.
CANCEL_HELD = Statement(
    "runs-cancel-fenced",
    """
with ended as (
    update {schema}.runs set state = 'cancelled', finished_at = clock_timestamp(), reason = null, waiting_for = null,
        lease_token = null, worker = null
    where id = %(run_id)s and lease_token = %(token)s returning id
), doubted as (
    update {schema}.intents i set state = 'unknown', doubt_at = clock_timestamp()
    from ended e where i.run_id = %(run_id)s and i.run_id = e.id and i.state = 'open'
)
select id from ended
""",
)

# Waiting runs whose time has come want a worker. Their own index, apart from the claim's; any worker may do it.
PROMOTE = Statement(
    "runs-promote-due",
    f"""
with due as materialized (
    select id from {{schema}}.runs where state = 'waiting' and available_at <= now()
    order by available_at limit %(limit)s for update skip locked
), up as (
    update {{schema}}.runs set state = 'pending', waiting_for = null
    where id = any(array(select id from due)) returning 1
)
select (select count(*) from up),
    (select {us("available_at")} from {{schema}}.runs
     where state = 'waiting' and available_at > now() and available_at < 'infinity' order by available_at limit 1),
    {us("clock_timestamp()")},
    exists (select from {{schema}}.runs where state = 'pending' and suspect and queue = any(%(queues)s::text[])
        and workflow = any(%(workflows)s::text[]) and (protocol is null or protocol = %(protocol)s))
""",
)

# A new token under the same lease: waits for a write in flight and fences any later one of the old token. Repeatable.
RENEW = Statement(
    "runs-renew-token-fenced",
    """
update {schema}.runs set lease_token = %(new)s where id = %(run_id)s and lease_token in (%(old)s, %(new)s)
returning wakes
""",
)

# Stop for a person: a defect or a refusal that no message mends. One that has come meanwhile must still be read: it may be
# a request to end.
HOLD = Statement(
    "runs-hold-fenced",
    """
update {schema}.runs set state = case when wakes = coalesce(%(wakes)s::bigint, wakes) then 'held' else 'pending' end,
    reason = case when wakes = coalesce(%(wakes)s::bigint, wakes) then %(reason)s end, lease_token = null, worker = null
where id = %(run_id)s and lease_token = %(token)s returning id
""",
)

_RUN_COLUMNS: Final = (
    "r.id, r.workflow, r.key, r.state, r.queue, r.priority, r.waiting_for, r.reason, r.created_at, r.started_at,"
    " r.finished_at, nullif(r.available_at, 'infinity'), r.parent_id, r.forked_from, r.recoveries, r.worker,"
    " r.protocol,"
    " coalesce((select j.seq from {schema}.journal j where j.run_id = r.id order by j.seq desc limit 1), 0)"
)

# By id, else by key: people use UUIDs as keys, too.
FIND_ID = Statement(
    "runs-read-id-or-key",
    f"""
select {_RUN_COLUMNS} from {{schema}}.runs r
where r.id = coalesce((select id from {{schema}}.runs where id = %(id)s),
    (select id from {{schema}}.runs where key = %(ref)s))
""",
)

# By key, else by the last characters of the id (a scan: for people). Two rows mean that more of the id is needed.
FIND_KEY = Statement(
    "runs-read-key-or-suffix",
    f"""
with keyed as materialized (select id from {{schema}}.runs where key = %(ref)s)
select {_RUN_COLUMNS} from {{schema}}.runs r
where r.id = any(array(
    select id from keyed union all
    (select id from {{schema}}.runs
     where %(suffix)s and not exists (select from keyed) and right(id::text, length(%(ref)s)) = lower(%(ref)s)
     limit 2)
))
order by r.id
""",
)

# For clients that wait. Output and error only of runs that have ended.
RESULTS = Statement(
    "runs-read-results",
    """
select r.id, r.workflow, r.state, r.reason, p.output::text, p.error::text
from unnest(%(ids)s::uuid[]) as i(id)
join {schema}.runs r on r.id = i.id
left join {schema}.payloads p on p.run_id = r.id and r.finished_at is not null
""",
)

# A hint on a channel; outside the journal's transactions, because all commits with a NOTIFY queue up behind one lock.
NOTIFY = Statement("notify", "select pg_notify(%(channel)s, '')")


def start_runs(rows: Sequence[StartRow]) -> list[Bound]:
    """Start `rows` in one commit. For `run_all`; `parse_started` reads the last result.

    Repeatable: a retry after a lost acknowledgement finds its own rows and reports them as created.
    """
    asked = [
        {
            "id": str(r.id),
            "workflow": r.workflow,
            "key": r.key,
            "queue": r.queue,
            "priority": r.priority,
            "input": r.input,
            "delay": r.delay,
            "until": r.available_at,
        }
        for r in rows
    ]
    document = {"rows": json.dumps(asked)}
    return [(START, document), (START_READ, document)]


def parse_started(results: Sequence[Iterable[tuple[Any, ...]]]) -> dict[UUID, Started]:
    """By the id asked for. One is missing if its id is taken by a run of another key."""
    return {row[0]: Started(row[0], row[1], row[2], row[3], State(row[4])) for row in results[-1]}


def claim(
    *,
    queue: str,
    workflows: Sequence[str],
    worker: UUID,
    token: UUID,
    limit: int = CLAIM_RUNS_MAX,
    protocol: int = PROTOCOL,
    suspects: Sequence[int] | None = None,
) -> list[Bound]:
    """Take up to `limit` runs under a fresh `token`. For `run_all`; `parse_claim` reads the results.

    Repeatable: a retry with the same token also hands over what its first try had taken.

    Args:
        suspects: take suspects instead, so many together as `leases.suspect_groups` says; empty: one. `limit` does not
            count then.
    """
    held = {"worker": worker, "token": token}
    wanted: dict[str, Any] = {"queue": queue, "workflows": list(workflows), "protocol": protocol}
    if suspects is None:
        take = (CLAIM, held | wanted | {"limit": limit})
    else:
        take = (CLAIM_SUSPECTS, held | wanted | {"groups": list(suspects), "suspect_at": FRUITLESS_MAX})
    return [
        take,
        (CLAIM_RUNS, held),
        (CLAIM_JOURNAL, held | {"head": HEAD_ENTRIES, "bytes": CLAIM_BYTES_MAX}),
        (CLAIM_ATTEMPTS, held),
        (CLAIM_MAIL, held),
        (CLAIM_INTENTS, held),
        (CLAIM_OBSERVATIONS, held | {"observed": OBSERVATIONS_READ_MAX}),
    ]


def parse_claim(results: Sequence[Sequence[tuple[Any, ...]]], token: UUID) -> list[ClaimedRun]:
    """The runs with the heads of their journals, their attempts, mail, intents and observations, in the order of the
    queue."""
    _, runs, entries, attempts, mail, intents, observations = results
    claimed = {}
    for row in runs:
        run = claimed[row[0]] = ClaimedRun(row[0], token, *row[1:-1])
        run.rewinds = _pairs(row[-1])
    for row in entries:
        claimed[row[0]].entries.append(parse_entry(row[1:]))
    for row in attempts:
        claimed[row[0]].attempts.append(Attempt(*row[1:]))
    for run_id, (wakes, letters) in parse_mail(mail).items():
        claimed[run_id].wakes = wakes
        claimed[run_id].mail = letters
    for row in intents:
        claimed[row[0]].intents.append(Intent(*row[1:]))
    for row in observations:
        claimed[row[0]].observations.append(Observation(*row[1:]))
    return list(claimed.values())


def read_claimed(worker: UUID, token: UUID) -> list[Bound]:
    """What stands under a token that this worker has, without journals. For `run_all`; `parse_claimed`."""
    held = {"worker": worker, "token": token}
    return [
        (CLAIM_RUNS, held),
        (CLAIM_ATTEMPTS, held),
        (CLAIM_MAIL, held),
        (CLAIM_INTENTS, held),
        (CLAIM_OBSERVATIONS, held | {"observed": OBSERVATIONS_READ_MAX}),
    ]


def parse_claimed(results: Sequence[Sequence[tuple[Any, ...]]], token: UUID) -> list[ClaimedRun]:
    """Those runs, their journals yet to be read from the beginning."""
    runs, *others = results
    found = parse_claim(((), runs, (), *others), token)
    for run in found:
        run.last_seq = None
    return found


def read_strays(worker: UUID, known: Sequence[UUID]) -> Bound:
    """Which runs a worker leases besides those that it has in memory: rows of id, token, and whether it is a suspect."""
    return READ_STRAYS, {"worker": worker, "known": list(known)}


def read_mail(worker: UUID) -> Bound:
    """What others have left for the runs that a worker holds; `parse_mail` reads it."""
    return READ_MAIL, {"worker": worker}


def parse_mail(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, tuple[int, list[Mail]]]:
    """By run: its `wakes`, and the letters that were there when it had that value."""
    found: dict[UUID, tuple[int, list[Mail]]] = {}
    for run_id, wakes, *letter in rows:
        letters = found.setdefault(run_id, (wakes, []))[1]
        if letter[0] is not None:
            letters.append(Mail(*letter))
    return found


def cancel_run(run_id: UUID, token: UUID) -> Bound:
    """End a run that was asked to end and whose code cannot be told; returns a row, or none if the lease is another's."""
    return CANCEL_HELD, {"run_id": run_id, "token": token}


def promote_due(
    limit: int = REAP_RUNS_MAX,
    queues: Sequence[str] = (),
    workflows: Sequence[str] = (),
    protocol: int = PROTOCOL,
) -> Bound:
    """Make due runs pending, at most `limit`; `parse_promoted` reads it. A full turn means that there may be more.

    It also looks whether suspects of these queues and workflows want a worker.
    """
    return PROMOTE, {"limit": limit, "queues": list(queues), "workflows": list(workflows), "protocol": protocol}


def parse_promoted(rows: Sequence[tuple[Any, ...]]) -> Promoted:
    """How many, and when the next is due."""
    return Promoted(*rows[0])


def renew_token(run_id: UUID, old: UUID, new: UUID) -> Bound:
    """A new token under the same lease; returns a row (wakes), or none if the lease is another's. Repeatable.

    The journal is to be read after it, by a statement of its own: this one waits for a write in flight.
    """
    return RENEW, {"run_id": run_id, "old": old, "new": new}


def clear_suspect(run_id: UUID, token: UUID) -> Bound:
    """The run got further: normal claims take it from now on. Returns a row, or none if the lease is another's."""
    return CLEAR, {"run_id": run_id, "token": token}


def hold_run(run_id: UUID, token: UUID, reason: str, wakes: int | None = None) -> Bound:
    """Returns a row, or none if the lease is another's. If the run's `wakes` has moved on from this one, it is pending."""
    return HOLD, {"run_id": run_id, "token": token, "reason": storable(reason), "wakes": wakes}


def find_run(ref: str) -> Bound:
    """The run of an id, a key, or the last 6 and more characters of an id; `parse_runs` reads none, one or two rows."""
    try:
        return FIND_ID, {"id": UUID(ref), "ref": ref}
    except ValueError:
        return FIND_KEY, {"ref": ref, "suffix": re.fullmatch(r"[0-9a-fA-F-]{6,36}", ref) is not None}


def parse_runs(rows: Iterable[tuple[Any, ...]]) -> list[RunRow]:
    """Runs as rows, times in UTC."""
    return [
        RunRow(
            id=row[0],
            workflow=row[1],
            key=row[2],
            state=State(row[3]),
            queue=row[4],
            priority=row[5],
            waiting_for=row[6],
            reason=row[7],
            created_at=row[8].astimezone(UTC),
            started_at=_utc(row[9]),
            finished_at=_utc(row[10]),
            available_at=_utc(row[11]),
            parent_id=row[12],
            forked_from=row[13],
            recoveries=row[14],
            worker=row[15],
            protocol=row[16],
            entries=row[17],
        )
        for row in rows
    ]


def run_results(ids: Sequence[UUID]) -> Bound:
    """Where runs stand; `parse_results` reads it. A run that does not exist is missing."""
    return RESULTS, {"ids": list(ids)}


def parse_results(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, RunResult]:
    """By run."""
    return {row[0]: RunResult(row[0], row[1], State(row[2]), *row[3:]) for row in rows}


def notify(channel: str) -> Bound:
    """A hint on `work_channel(schema)` or `done_channel(schema)`."""
    return NOTIFY, {"channel": channel}


def _pairs(found: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(seq, to_seq) for seq, to_seq in found]


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)

"""Runs, payloads, journal, attempts, workers, mailbox; what people read (views); start from SQL.

Rules: unqualified DDL, one statement an `op.execute`; columns are only ever added; a change that older releases cannot
live with comes one release after the code that no longer needs the old form.

No foreign keys: each check would lock the parent row and, with many writers, fill the multixact space; and a schema
stays a cell that a distributed Postgres can place. Every unique key of a per-run table begins with the run's id.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


RUNS = """
create table runs (
    id           uuid        not null primary key,
    workflow     text        not null check (workflow <> ''),
    key          text        check (key <> ''),
    state        text        not null default 'pending'
        check (state in (
            'pending',    -- wants a worker
            'running',    -- a worker holds its lease
            'waiting',    -- for a timer or something outside; no process holds it
            'held',       -- for a person, with a reason
            'succeeded',  -- ended with a result
            'failed',     -- ended with an error
            'cancelled',  -- ended by request
            'continued'   -- ended by continue_as_new
        )),
    queue        text        not null default 'default' check (queue <> ''),
    priority     integer     not null default 0,
    waiting_for  text
        check (waiting_for in (
            'start',      -- its first moment: started with a delay
            'timer',      -- a sleep or a time-out
            'retry',      -- the next attempt of a step
            'signal',     -- a receive
            'approval',   -- a person's answer
            'child'       -- another run's end
        )),
    reason       text,
    created_at   timestamptz not null default clock_timestamp(),
    started_at   timestamptz,
    finished_at  timestamptz,
    available_at timestamptz not null default clock_timestamp(),
    parent_id    uuid,
    parent_key   text,
    forked_from  uuid,
    recoveries   integer     not null default 0 check (recoveries >= 0),
    suspect      boolean     not null default false,
    worker       uuid,
    lease_token  uuid,
    write_id     uuid,
    wakes        bigint      not null default 0,
    protocol     integer,
    seed         bigint      not null default ('x' || right(md5(gen_random_uuid()::text), 15))::bit(60)::bigint,
    constraint runs_running_has_lease check ((state = 'running') = (lease_token is not null)),
    constraint runs_running_has_worker check ((state = 'running') = (worker is not null)),
    constraint runs_waiting_says_for_what check ((state = 'waiting') = (waiting_for is not null)),
    constraint runs_held_has_reason check (state <> 'held' or reason is not null),
    constraint runs_reason_is_of_held check (reason is null or state in ('held', 'running')),
    constraint runs_end_has_time
        check ((state in ('succeeded', 'failed', 'cancelled', 'continued')) = (finished_at is not null)),
    constraint runs_work_was_started
        check (started_at is not null or state not in ('running', 'succeeded', 'failed', 'continued')),
    constraint runs_start_has_protocol check ((started_at is null) = (protocol is null)),
    constraint runs_parent_has_key check ((parent_id is null) = (parent_key is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02,
        autovacuum_vacuum_cost_delay = 1)
"""

RUNS_WORDS = {
    "state": "pending: wants a worker; running: a worker holds its lease; waiting: for waiting_for, no process holds "
    "it; held: for a person, see reason; succeeded, failed, cancelled, continued: ended",
    "waiting_for": "start: its first moment; timer: a sleep or time-out; retry: a step''s next attempt; signal: a "
    "receive; approval: a person''s answer; child: another run''s end",
    "available_at": "pending: since when; waiting: until when (infinity: until something outside raises wakes)",
    "priority": "smaller runs first; may be updated by hand while pending, as queue may",
    "reason": "held: why, in one sentence; running: why it will be held once its bodies have ended",
    "recoveries": "claims after a death that a parent saw or a lease that was reaped",
    "suspect": "recovered too often without progress: no normal claim takes it",
    "worker": "workers.id of the holder",
    "lease_token": "what every write on behalf of the holder must match; new with each claim",
    "write_id": "of the write that last changed the state, so that a retry recognises its own",
    "wakes": "raised with every mailbox row; parking and holding compare it with what they had read",
    "protocol": "replay rules, codec tags and digest rules of this run; set with started_at by the first claim",
    "seed": "feeds rng(), uuid4() and hashes",
}

# One unique index for start by key; the others are partial, so that a state costs only what its readers need. A claim
# reads pending rows alone, in their order: sleepers are in another index and cost it nothing (POSTGRES.md 4.2).
RUNS_INDEXES = (
    "create unique index runs_key on runs (key) where key is not null",
    "create index runs_ready on runs (queue, priority, available_at, id) where state = 'pending' and not suspect",
    "create index runs_due on runs (available_at) where state = 'waiting'",
    "create index runs_leased on runs (worker, lease_token) where state = 'running'",
    "create index runs_held on runs (id) where state = 'held'",
)

PAYLOADS = """
create table payloads (
    run_id uuid not null primary key,
    input  json not null,
    output json,
    error  json,
    constraint payloads_one_end check (output is null or error is null)
) with (fillfactor = 80)
"""

JOURNAL = """
create table journal (
    run_id          uuid        not null,
    seq             integer     not null check (seq >= 1),
    key             text        collate "C" not null,
    name            text        not null,
    kind            text        not null
        check (kind in (
            'step',   -- a body's outcome
            'timer'   -- a deadline of the run's clock came
        )),
    outcome         text        not null
        check (outcome in (
            'ok',         -- with a result
            'error',      -- with an exception
            'cancelled',  -- given up before it had an outcome
            'timeout'     -- its time ran out
        )),
    attempt         integer     not null default 1 check (attempt >= 1),
    input           json,
    output          json,
    error           json,
    digest          text,
    idempotency_key text,
    started_at      timestamptz,
    at              timestamptz not null,
    due_at          timestamptz,
    recorded_at     timestamptz not null default clock_timestamp(),
    worker          uuid,
    write_id        uuid        not null,
    primary key (run_id, seq),
    constraint journal_error_has_error check (outcome <> 'error' or error is not null),
    constraint journal_ok_has_no_error check (outcome <> 'ok' or error is null),
    constraint journal_timer_has_deadline check ((kind = 'timer') = (due_at is not null))
) with (autovacuum_vacuum_insert_scale_factor = 0.05)
"""

JOURNAL_WORDS = {
    "seq": "place in the order of delivery, from 1 without gaps",
    "key": "the step''s identity in its run: scope, name, #n; =K for key=K; ~timer#n for timers",
    "kind": "step: a body''s outcome; timer: a deadline of the run''s clock came",
    "outcome": "ok: with a result; error: with an exception; cancelled: given up; timeout: its time ran out",
    "at": "the run''s clock from this entry on, set by the worker that made it",
    "due_at": "a timer''s deadline",
    "recorded_at": "when the row was written, by the database''s clock",
    "worker": "workers.id of the writer",
    "digest": "sha-256 of the canonical input: replay compares it",
}

ATTEMPTS = """
create table attempts (
    run_id     uuid        not null,
    key        text        collate "C" not null,
    attempt    integer     not null check (attempt >= 1),
    error      json        not null,
    started_at timestamptz not null,
    ended_at   timestamptz not null,
    next_at    timestamptz not null,
    primary key (run_id, key, attempt),
    constraint attempts_in_order check (started_at <= ended_at)
)
"""

WORKERS = """
create table workers (
    id            uuid             not null primary key,
    hostname      text             not null,
    pid           integer          not null,
    started_at    timestamptz      not null default clock_timestamp(),
    heartbeat_at  timestamptz      not null default clock_timestamp(),
    expires_at    timestamptz      not null,
    stopped_at    timestamptz,
    lease_seconds double precision not null check (lease_seconds > 0),
    queues        text[]           not null default '{}',
    workflows     json             not null default '{}',
    version       text,
    python        text,
    health        json,
    in_flight     json             not null default '[]'
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1)
"""

WORKERS_WORDS = {
    "id": "new with each start of a process, never a host name",
    "expires_at": "the lease of all its runs: past it, any worker hands them back",
    "stopped_at": "when it said that it was done, or was found dead; its heartbeats count no more",
    "workflows": "name to input schema of what it can run",
    "in_flight": "bodies that run now: an array of {run_id, key, attempt, since (microseconds since 1970)}",
}

MAILBOX = """
create table mailbox (
    run_id  uuid        not null,
    id      bigint      not null generated always as identity,
    kind    text        not null
        check (kind in (
            'signal',    -- a message for a receive
            'approval',  -- a person's answer to a question
            'resolve',   -- a person's word on an intent in doubt
            'cancel',    -- a request to end
            'child'      -- another run's end
        )),
    name    text        not null,
    body    json,
    sent_at timestamptz not null default clock_timestamp(),
    sent_by text,
    raised  boolean     not null default false,
    primary key (run_id, id)
)
"""

MAILBOX_WORDS = {
    "kind": "signal: a message for a receive; approval: a person''s answer; resolve: a person''s word on an intent "
    "in doubt; cancel: a request to end; child: another run''s end",
    "raised": "false: its sender''s transaction did not raise runs.wakes; the sweep does",
}

TABLE_WORDS = {
    "runs": "one row a run: the hot, narrow part",
    "payloads": "what a run was given and what it ended with, apart so that claims never rewrite it",
    "journal": "one row an entry, written by the lease holder, never updated or deleted",
    "attempts": "tries of steps that failed and are retried",
    "workers": "one row a worker process incarnation; the heartbeat",
    "mailbox": "rows that others leave for a run; only the lease holder turns them into entries",
}

WAITING = """
create view waiting as
select r.id as run_id, r.workflow, r.key, r.queue, r.waiting_for,
       nullif(r.available_at, 'infinity') as until,   -- null: until something outside comes
       r.created_at, r.started_at, r.parent_id
from runs r
where r.state = 'waiting'
"""

TIMELINE = """
create view timeline as
select j.run_id, r.workflow, j.seq, j.at, j.kind, j.key, j.name, j.outcome, j.attempt, j.started_at,
       j.at - j.started_at as duration,
       j.due_at, j.input, j.output, j.error, j.recorded_at, j.worker, w.hostname, w.pid
from journal j
join runs r on r.id = j.run_id
left join workers w on w.id = j.worker
"""

# Bodies older than one heartbeat, as the worker's last one told. Only what the database agrees on: the run is leased by
# that very worker. A row that holds anything but an array must not break the view for all others.
IN_FLIGHT = """
create view in_flight as
select f.run_id, f.key, f.attempt, timestamptz 'epoch' + f.since * interval '1 microsecond' as since,
       w.id as worker, w.hostname, w.pid
from workers w
cross join lateral json_to_recordset(case json_typeof(w.in_flight) when 'array' then w.in_flight else '[]' end)
    as f(run_id uuid, key text, attempt integer, since bigint)
join runs r on r.id = f.run_id and r.worker = w.id and r.state = 'running'
where w.stopped_at is null
"""

# The input of a start from SQL names positions, not parameters: it is stored under `~call` (no parameter can have that
# name), and the worker that claims the run binds it. The text is kept as it came: a json operator would fail on \u0000.
START = """
create function start(workflow text, input json, key text default null) returns uuid
language plpgsql
set search_path from current
as $function$
declare
    -- version 7: 48 bits of milliseconds, so that new rows land at the right edge of their indexes
    new_id uuid := encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        placing substring(int8send(floor(extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6),
        52, 1), 53, 1), 'hex')::uuid;
    there record;
    odd text;
begin
    if start.workflow is null or start.workflow = '' then
        raise exception 'start: the workflow''s name is empty' using errcode = 'invalid_parameter_value';
    end if;
    if start.input is null or json_typeof(start.input) not in ('array', 'object') then
        raise exception 'start: input is an array of positional arguments or {"args": [...], "kwargs": {...}}'
            using errcode = 'invalid_parameter_value';
    end if;
    if json_typeof(start.input) = 'object' then
        begin
            select string_agg(k, ', ') into odd from json_object_keys(start.input) k where k not in ('args', 'kwargs');
        exception when untranslatable_character then
            odd := null;    -- a \\u0000 in a value: the worker looks at the names
        end;
        if odd is not null then
            raise exception 'start: input has %, and only args and kwargs are known', odd
                using errcode = 'invalid_parameter_value';
        end if;
    end if;
    loop
        insert into runs (id, workflow, key) values (new_id, start.workflow, start.key) on conflict do nothing;
        if found then
            insert into payloads (run_id, input) values (new_id, ('{"~call":' || start.input::text || '}')::json);
            return new_id;
        end if;
        -- a statement of its own: its snapshot is younger than the commit that the insert waited for
        select r.id, r.workflow into there from runs r where r.key = start.key;
        if found then
            if there.workflow <> start.workflow then
                raise exception 'start: key % belongs to run % of workflow %, not of %', quote_literal(start.key),
                    there.id, there.workflow, start.workflow using errcode = 'unique_violation';
            end if;
            return there.id;
        end if;
        if current_setting('transaction_isolation') <> 'read committed' then
            raise exception 'start: key % was taken after this transaction''s snapshot', quote_literal(start.key)
                using errcode = 'serialization_failure';
        end if;
    end loop;
end
$function$
"""


def upgrade() -> None:
    """Create everything a first run needs."""
    for table in (RUNS, PAYLOADS, JOURNAL, ATTEMPTS, WORKERS, MAILBOX):
        op.execute(table)
    for index in RUNS_INDEXES:
        op.execute(index)
    for table, words in TABLE_WORDS.items():
        op.execute(f"comment on table {table} is '{words}'")
    for table, columns in (
        ("runs", RUNS_WORDS),
        ("journal", JOURNAL_WORDS),
        ("workers", WORKERS_WORDS),
        ("mailbox", MAILBOX_WORDS),
    ):
        for column, words in columns.items():
            op.execute(f"comment on column {table}.{column} is '{words}'")
    for view in (WAITING, TIMELINE, IN_FLIGHT):
        op.execute(view)
    op.execute(START)

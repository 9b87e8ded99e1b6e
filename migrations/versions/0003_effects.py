"""What steps with an effect need: intents, observations, what is in doubt, a person's word.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# New tables and functions: nothing that stands is locked against workers, nothing is read. All of it is one transaction, and
# each statement may be repeated.

# `written_at` is the worker's clock as all moments of its run are, what the database says of it is the database's.
INTENTS = """
create table if not exists intents (
    run_id          uuid        not null,
    key             text        collate "C" not null,
    attempt         integer     not null check (attempt >= 1),
    name            text        not null,
    effect          text        not null
        check (effect in (
            'repeatable',    -- only of an undo that failed: a person is to know
            'idempotent',    -- the other side recognises a second call by its key
            'irreversible',  -- a second call would be a second deed
            'transactional'  -- only of an undo that failed
        )),
    idempotency_key text        not null,
    input           json        not null,
    state           text        not null default 'open'
        check (state in (
            'open',        -- the call may have begun: its worker has not said what became of it
            'landed',      -- it happened
            'not_landed',  -- it did not happen
            'unknown',     -- nobody could say; until it is resolved, a person is asked
            'compensated'  -- it happened, and was undone
        )),
    written_at      timestamptz not null,
    doubt_at        timestamptz,
    resolved_at     timestamptz,
    resolved_by     text,
    evidence        json,
    worker          uuid,
    write_id        uuid        not null,
    primary key (run_id, key, attempt),
    constraint intents_open_is_unresolved check (state <> 'open' or (resolved_at is null and doubt_at is null)),
    constraint intents_known_is_resolved
        check (state not in ('landed', 'not_landed', 'compensated') or resolved_at is not null),
    constraint intents_asked_since check (state <> 'unknown' or resolved_at is not null or doubt_at is not null),
    constraint intents_resolved_by_when check (resolved_by is null or resolved_at is not null),
    constraint intents_evidence_is_object check (evidence is null or json_typeof(evidence) = 'object')
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05)
"""

INTENTS_WORDS = {
    "key": "the step''s identity in its run; ~undo:KEY: of the compensation of step KEY",
    "attempt": "which attempt of the step this call is",
    "effect": "idempotent: the other side recognises a second call by its key; irreversible: a second call would be a "
    "second deed; repeatable, transactional: only of an undo that failed",
    "idempotency_key": "what the body sent along, the same on every attempt",
    "input": "what the step was given, in full",
    "state": "open: the call may have begun, its worker has not said what became of it; landed: it happened; not_landed: it "
    "did not happen; unknown: nobody could say, a person is asked until resolved_at is set; compensated: it happened "
    "and was undone",
    "written_at": "no earlier can the call have landed: its body began after this row was committed",
    "doubt_at": "when nobody could say whether it happened: no later can the call have landed, unless its process goes on",
    "resolved_at": "since when nobody is asked about it",
    "resolved_by": "who said so, where it was not the body: reconcile, or a person",
    "evidence": "an object: what is known of the call, as error, reason, comment",
    "worker": "workers.id of who wrote it first",
    "write_id": "of the write that opened it",
}

OBSERVATIONS = """
create table if not exists observations (
    id          bigint      not null generated always as identity,
    run_id      uuid        not null,
    key         text        collate "C" not null,
    attempt     integer     not null check (attempt >= 1),
    kind        text        not null check (kind <> ''),
    value       text        not null check (value <> ''),
    observed_at timestamptz not null,
    worker      uuid,
    primary key (run_id, id)
) with (autovacuum_vacuum_insert_scale_factor = 0.05)
"""

OBSERVATIONS_WORDS = {
    "key": "of the step whose body told it",
    "kind": "what the identifier names, as ticket",
    "value": "the identifier, as the world outside knows it",
    "observed_at": "when the body told it, by the run''s clock",
    "worker": "workers.id of the writer",
}

# Two in part: what a claim hands over, and what a person is asked about; a call that landed is in neither. A text may be
# longer than an index takes, hence the md5.
INDEXES = {
    "intents_unsettled": "index {} on intents (run_id) where state in ('open', 'unknown', 'not_landed')",
    "intents_in_doubt": "index {} on intents (run_id) where state = 'unknown' and resolved_at is null",
    "observations_once": "unique index {} on observations (run_id, key, attempt, md5(kind), md5(value))",
    "observations_found": "index {} on observations (value, kind)",
}

TABLE_WORDS = {
    "intents": "one row an attempt of a step with an effect, committed before its body begins: from then on the call may "
    "have landed",
    "observations": "identifiers of the world outside that bodies told with observe(kind, id); never pruned: without them "
    "nobody finds what a run did there",
}

MAILBOX_WORDS = {
    "body": "retry: {from: failed or held, accept: inputs or null, seq: the journal''s length at that moment}; resolve: "
    "{key, attempt, word: landed, not_landed or fail, value, error, comment}",
}

# Its two halves have an index each: the rows of the first, the runs of the second. `until` null: the moment is not known.
IN_DOUBT = """
create or replace view in_doubt as
select i.run_id, i.key, i.name, i.attempt, i.effect, i.idempotency_key, i.input, i.written_at, i.doubt_at as until,
       i.evidence, r.workflow, r.key as run_key, r.state as run_state, r.reason, i.worker
from (
    select * from intents where state = 'unknown' and resolved_at is null
    union all
    select o.* from runs h join intents o on o.run_id = h.id where h.state = 'held' and o.state = 'open'
) i
join runs r on r.id = i.run_id
"""


def hint(kind: str) -> str:
    """PL/pgSQL that tells those who listen on a channel of `replaykit.postgres.schema` to look; it goes out at commit."""
    return f"""
    perform pg_notify(case when octet_length('{kind}:' || current_schema()) < 64
        then '{kind}:' || current_schema()
        else '{kind}:' || left(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 32) end, '');"""


# A word counts for one attempt: the one in doubt, else the last. It stands until the worker finds that its value does not
# fit (`misfit`), or until a call that was closed by it is in doubt again (`mailbox_id` of an unresolved intent). The row in
# the mailbox is who, when and why, also of a run that has ended, whose intent is closed here because no worker will.
RESOLVE = f"""
create or replace function resolve(run uuid, key text, landed json default null, not_landed boolean default false,
    fail boolean default false, by text default null, comment text default null, error json default null) returns text
language plpgsql
set search_path from current
as $function$
declare
    r record;
    i record;
    said record;
    what text := quote_nullable(resolve.key) || ' of run ' || coalesce(resolve.run::text, 'null');
    word text := case when resolve.landed is not null then 'landed' when resolve.not_landed then 'not_landed' else 'fail' end;
    unsettled boolean;
begin
    if (resolve.landed is not null)::integer + coalesce(resolve.not_landed, false)::integer
        + coalesce(resolve.fail, false)::integer <> 1
    then
        raise exception 'resolve: say exactly one of landed => ''JSON'', not_landed => true and fail => true'
            using errcode = 'invalid_parameter_value';
    end if;
    if resolve.error is not null and word <> 'fail' then
        raise exception 'resolve: error goes with fail => true' using errcode = 'invalid_parameter_value';
    end if;
    begin
        perform resolve.landed::jsonb, resolve.error::jsonb;
    exception when data_exception then
        raise exception 'resolve: the value of % holds what Postgres cannot read (%): give one without that', what, sqlerrm
            using errcode = 'invalid_parameter_value';
    end;
    select id, state, finished_at, worker into r from runs where id = resolve.run for no key update;
    if not found then
        raise exception 'resolve: no run has the id %', resolve.run using errcode = 'no_data_found';
    end if;
    select n.* into i from intents n where n.run_id = r.id and n.key = resolve.key
    order by n.state in ('open', 'unknown') and n.resolved_at is null desc, n.attempt desc limit 1;
    if not found then
        raise exception 'resolve: % has written no intent: the view in_doubt lists what is in doubt', what
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    unsettled := i.state in ('open', 'unknown') and i.resolved_at is null;
    select m.sent_by, m.sent_at, m.body into said from mailbox m
    where m.run_id = r.id and m.kind = 'resolve' and m.name = resolve.key and m.body ->> 'attempt' = i.attempt::text
        and m.id > greatest((i.evidence ->> 'misfit')::bigint, 0,
            case when unsettled then (i.evidence ->> 'mailbox_id')::bigint end)
    order by m.id limit 1;
    if found then
        if said.body ->> 'word' = word
            and (said.body -> 'value')::jsonb = coalesce(resolve.landed, 'null')::jsonb
            and (said.body -> 'error')::jsonb = coalesce(resolve.error, 'null')::jsonb
        then
            return r.state;
        end if;
        raise exception 'resolve: % has a word already: % said % at %', what, coalesce(said.sent_by, 'somebody'),
            case when said.body ->> 'word' = 'landed' then 'landed with ' || left((said.body -> 'value')::text, 200)
                else said.body ->> 'word' end, to_char(said.sent_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if not unsettled then
        raise exception 'resolve: % is not in doubt: its attempt % % since %', what, i.attempt,
            case i.state when 'landed' then 'has landed' when 'not_landed' then 'has not landed'
                when 'compensated' then 'has landed and was undone' else 'has failed and nobody was to be asked' end
            || coalesce(', says ' || i.resolved_by || ',', ''),
            to_char(i.resolved_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if r.state = 'running' then
        raise exception 'resolve: % may still be at work: worker % has the run; wait until it is held', what, r.worker
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    insert into mailbox (run_id, kind, name, body, sent_by, raised) values (r.id, 'resolve', resolve.key,
        json_build_object('key', resolve.key, 'attempt', i.attempt, 'word', word, 'value', resolve.landed,
            'error', resolve.error, 'comment', resolve.comment),
        resolve.by, true);
    if r.finished_at is not null then
        update intents n set state = case word when 'fail' then 'unknown' else word end,
            doubt_at = coalesce(n.doubt_at, clock_timestamp()), resolved_at = clock_timestamp(), resolved_by = resolve.by,
            evidence = (
                select json_object_agg(e.k, e.v) from (
                    select o.key as k, o.value as v from json_each(n.evidence) o where o.key <> 'comment'
                    union all select 'comment', to_json(resolve.comment) where resolve.comment is not null
                ) e)
        where n.run_id = r.id and n.key = i.key and n.attempt = i.attempt;
        return r.state;
    end if;
    update runs set wakes = wakes + 1,
        state = case when state in ('waiting', 'held') then 'pending' else state end,
        available_at = case when state in ('waiting', 'held') then clock_timestamp() else available_at end,
        waiting_for = null,
        reason = case when state = 'held' then null else reason end
    where id = r.id returning state into r.state;
    {hint("replaykit_work").strip()}
    return r.state;
end
$function$
"""

# As in 0002; and a run that has undone something does not go on from before that, as if it stood.
RETRY = f"""
create or replace function retry(run uuid, accept text default null, by text default null) returns text
language plpgsql
set search_path from current
as $function$
declare
    r record;
    asked record;
    undone text;
begin
    if retry.accept is not null and retry.accept <> 'inputs' then
        raise exception 'retry: accept is ''inputs'' or null, not %', quote_literal(retry.accept)
            using errcode = 'invalid_parameter_value';
    end if;
    select id, state into r from runs where id = retry.run for no key update;
    if not found then
        raise exception 'retry: no run has the id %', retry.run using errcode = 'no_data_found';
    end if;
    select kind, body into asked from mailbox where run_id = r.id order by id desc limit 1;
    if r.state = 'pending' and asked.kind = 'retry' and asked.body ->> 'accept' is not distinct from retry.accept
        and not exists (select from journal where run_id = r.id and seq > (asked.body ->> 'seq')::integer)
    then
        return r.state;
    end if;
    if r.state not in ('failed', 'held') then
        raise exception 'retry: run % is %, and only failed and held runs are retried', r.id, r.state
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if r.state = 'failed' then
        select string_agg(case when u.n <= 20 then substr(u.key, 7) else '... (' || u.n || ' in all)' end, ', ' order by u.seq)
        into undone from (
            select j.key, j.seq, row_number() over (order by j.seq) as n, count(*) over () as last
            from journal j where j.run_id = r.id and j.key like '~undo:%'
        ) u where u.n <= 20 or u.n = u.last;
        if undone is not null then
            raise exception 'retry: run % has undone %, and would go on as if that stood: fork it, or start another',
                r.id, undone using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    insert into mailbox (run_id, kind, name, body, sent_by, raised) values (r.id, 'retry', 'retry',
        json_build_object('from', r.state, 'accept', retry.accept,
            'seq', coalesce((select max(j.seq) from journal j where j.run_id = r.id), 0)),
        retry.by, true);
    update runs set state = 'pending', wakes = wakes + 1, reason = null, finished_at = null, suspect = false,
        fruitless = 0, available_at = clock_timestamp()
    where id = r.id;
    {hint("replaykit_work").strip()}
    return 'pending';
end
$function$
"""


def upgrade() -> None:
    """Create them; nothing that stands is changed but the function `retry`."""
    for table in (INTENTS, OBSERVATIONS):
        op.execute(table)
    for index, what in INDEXES.items():
        op.execute(f"create {what.format('if not exists ' + index)}")
    for table, words in TABLE_WORDS.items():
        op.execute(f"comment on table {table} is '{words}'")
    for table, columns in (
        ("intents", INTENTS_WORDS),
        ("observations", OBSERVATIONS_WORDS),
        ("mailbox", MAILBOX_WORDS),
    ):
        for column, words in columns.items():
            op.execute(f"comment on column {table}.{column} is '{words}'")
    op.execute(IN_DOUBT)
    for function in (RESOLVE, RETRY):
        op.execute(function)

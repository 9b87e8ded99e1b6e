"""What cancelling, retrying and runs that end their process need.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Columns are only ever added. Constraints are replaced without a scan under an exclusive lock: `not valid` first.
JOURNAL = (
    "alter table journal add column mailbox_id bigint, add column to_seq integer, add column reuses integer",
    """
alter table journal drop constraint journal_kind_check, add constraint journal_kind_check check (kind in (
    'step',    -- a body's outcome
    'timer',   -- a deadline of the run's clock came
    'cancel',  -- a request to end reached the code
    'rewind'   -- a failed run goes on from before its failure: entries from to_seq on are set aside
)) not valid
""",
    "alter table journal validate constraint journal_kind_check",
    "alter table journal add constraint journal_rewind_says_to_where check ((kind = 'rewind') = (to_seq is not null)) not valid",
    "alter table journal validate constraint journal_rewind_says_to_where",
    "create index journal_rewinds on journal (run_id, seq) where kind = 'rewind'",
)

JOURNAL_WORDS = {
    "kind": "step: a body''s outcome; timer: a deadline of the run''s clock came; cancel: a request to end reached the "
    "code; rewind: a failed run goes on from before its failure",
    "mailbox_id": "mailbox.id of the request that this entry answers",
    "to_seq": "rewind: entries from this seq up to this one are set aside; results among them are used again",
    "reuses": "seq of an entry that a rewind had set aside and whose result this one repeats: no body ran",
}

RUNS = (
    "alter table runs add column claims integer not null default 0, add column fruitless integer not null default 0",
    "create index runs_suspects on runs (queue, priority, available_at, id) where state = 'pending' and suspect",
    "create index runs_woken on runs (worker) where state = 'running' and wakes > 0",
)

RUNS_WORDS = {
    "claims": "how often a worker has taken it",
    "fruitless": "recoveries in a row without an entry, park or end between them; three make the run a suspect",
    "suspect": "recovered too often without progress: it is run alone, in a process of its own",
}

MAILBOX = (
    """
alter table mailbox drop constraint mailbox_kind_check, add constraint mailbox_kind_check check (kind in (
    'signal',    -- a message for a receive
    'approval',  -- a person's answer to a question
    'resolve',   -- a person's word on an intent in doubt
    'cancel',    -- a request to end
    'retry',     -- a request to go on, of a run that had failed or is held
    'child'      -- another run's end
)) not valid
""",
    "alter table mailbox validate constraint mailbox_kind_check",
)

MAILBOX_WORDS = {
    "kind": "signal: a message for a receive; approval: a person''s answer; resolve: a person''s word on an intent in "
    "doubt; cancel: a request to end; retry: a request to go on; child: another run''s end",
    "body": "retry: {from: failed or held, accept: inputs or null, seq: the journal''s length at that moment}",
}

ATTEMPTS = (
    "alter table attempts add column tries integer not null default 1, add column first_at timestamptz,"
    " add column idle_seconds double precision not null default 0",
)

ATTEMPTS_WORDS = {
    "attempt": "which try of this step, from 1, for the whole life of the run",
    "next_at": "when the next one may begin: the decision of retry=",
    "tries": "the same since the step''s budget began: retry of a failed run gives it a new one",
    "first_at": "when the first of those began",
    "idle_seconds": "how long was waited between those",
}

HINT = """
    perform pg_notify(case when octet_length('replaykit_work:' || current_schema()) < 64
        then 'replaykit_work:' || current_schema()
        else 'replaykit_work:' || left(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 32) end, '');
"""

# A run that nobody has begun is cancelled at once. Any other is told by a row in its mailbox, which its code gets as an
# entry; a second request says nothing new, unless the run is held, where it ends what cannot go on.
CANCEL = f"""
create function cancel(run uuid, by text default null) returns text
language plpgsql
set search_path from current
as $function$
declare
    r record;
begin
    select id, state, started_at, finished_at into r from runs where id = cancel.run for no key update;
    if not found then
        raise exception 'cancel: no run has the id %', cancel.run using errcode = 'no_data_found';
    end if;
    if r.finished_at is not null then
        return r.state;
    end if;
    if r.started_at is null then
        update runs set state = 'cancelled', waiting_for = null, reason = null, finished_at = clock_timestamp()
        where id = r.id;
        return 'cancelled';
    end if;
    if r.state = 'held' or not exists (select from mailbox m where m.run_id = r.id and m.kind = 'cancel' and m.id > coalesce(
        (select max(w.id) from mailbox w where w.run_id = r.id and w.kind = 'retry'), 0)) then
        insert into mailbox (run_id, kind, name, sent_by, raised) values (r.id, 'cancel', 'cancel', cancel.by, true);
        update runs set wakes = wakes + 1,
            state = case when state in ('waiting', 'held') then 'pending' else state end,
            available_at = case when state in ('waiting', 'held') then clock_timestamp() else available_at end,
            waiting_for = null,
            reason = case when state = 'held' then null else reason end
        where id = r.id returning state into r.state;
    {HINT}
    end if;
    return r.state;
end
$function$
"""

# `accept` says what a held run's code may ask differently from its journal; it holds for what is recorded by now.
RETRY = f"""
create function retry(run uuid, accept text default null, by text default null) returns text
language plpgsql
set search_path from current
as $function$
declare
    r record;
begin
    if retry.accept is not null and retry.accept <> 'inputs' then
        raise exception 'retry: accept is ''inputs'' or null, not %', quote_literal(retry.accept)
            using errcode = 'invalid_parameter_value';
    end if;
    select id, state into r from runs where id = retry.run for no key update;
    if not found then
        raise exception 'retry: no run has the id %', retry.run using errcode = 'no_data_found';
    end if;
    if r.state not in ('failed', 'held') then
        raise exception 'retry: run % is %, and only failed and held runs are retried', r.id, r.state
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    insert into mailbox (run_id, kind, name, body, sent_by, raised) values (r.id, 'retry', 'retry',
        json_build_object('from', r.state, 'accept', retry.accept,
            'seq', coalesce((select max(j.seq) from journal j where j.run_id = r.id), 0)),
        retry.by, true);
    update runs set state = 'pending', wakes = wakes + 1, reason = null, finished_at = null, suspect = false,
        fruitless = 0, available_at = clock_timestamp()
    where id = r.id;
    {HINT}
    return 'pending';
end
$function$
"""


def upgrade() -> None:
    """Add columns, indexes and the two requests."""
    for change in (*JOURNAL, *RUNS, *MAILBOX, *ATTEMPTS):
        op.execute(change)
    for table, words in (
        ("journal", JOURNAL_WORDS),
        ("runs", RUNS_WORDS),
        ("mailbox", MAILBOX_WORDS),
        ("attempts", ATTEMPTS_WORDS),
    ):
        for column, text in words.items():
            op.execute(f"comment on column {table}.{column} is '{text}'")
    for function in (CANCEL, RETRY):
        op.execute(function)

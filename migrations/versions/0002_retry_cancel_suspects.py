"""What cancelling, retrying and runs that end their process need.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import contextlib

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Columns are only ever added. What locks a table against everybody comes first, in one short transaction that reads no
# rows, and takes its locks in the order in which a worker's statements do: runs, journal, the rest. Each statement may
# be repeated: if a scan below is interrupted, the revision is the old one and all of it runs again.
RUNS = (
    "alter table runs add column if not exists claims integer not null default 0,"
    " add column if not exists fruitless integer not null default 0",
)

JOURNAL = (
    "alter table journal add column if not exists mailbox_id bigint, add column if not exists to_seq integer,"
    " add column if not exists reuses integer",
    """
alter table journal drop constraint journal_kind_check, add constraint journal_kind_check check (kind in (
    'step',    -- a body's outcome
    'timer',   -- a deadline of the run's clock came
    'cancel',  -- a request to end reached the code
    'rewind'   -- a failed run goes on from before its failure: entries from to_seq on are set aside
)) not valid
""",
    """
alter table journal drop constraint if exists journal_rewind_says_to_where, add constraint journal_rewind_says_to_where
    check ((kind = 'rewind') = (to_seq is not null) and (to_seq is null or to_seq between 1 and seq)) not valid
""",
    """
alter table journal drop constraint if exists journal_reuses_a_result, add constraint journal_reuses_a_result
    check (reuses is null or (kind = 'step' and outcome = 'ok' and reuses between 1 and seq - 1)) not valid
""",
)

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
)

ATTEMPTS = (
    "alter table attempts add column if not exists tries integer not null default 1,"
    " add column if not exists first_at timestamptz,"
    " add column if not exists idle_seconds double precision not null default 0,"
    " add column if not exists digest text",
)

# What reads whole tables comes after that transaction, and lets others write meanwhile.
VALIDATED = (
    ("journal", "journal_kind_check"),
    ("journal", "journal_rewind_says_to_where"),
    ("journal", "journal_reuses_a_result"),
    ("mailbox", "mailbox_kind_check"),
)

INDEXES = {
    "journal_asked": "on journal (run_id, seq) where kind in ('cancel', 'rewind')",
    "runs_suspects": "on runs (queue, priority, available_at, id) where state = 'pending' and suspect",
    "runs_woken": "on runs (worker) where state = 'running' and wakes > 0",
}

JOURNAL_WORDS = {
    "kind": "step: a body''s outcome; timer: a deadline of the run''s clock came; cancel: a request to end reached the "
    "code; rewind: a failed run goes on from before its failure",
    "mailbox_id": "mailbox.id of the request that this entry answers",
    "to_seq": "rewind: entries from this seq up to this one are set aside; results among them are used again",
    "reuses": "seq of an entry that a rewind had set aside and whose result this one repeats: no body ran",
}

RUNS_WORDS = {
    "claims": "how often a worker has taken it",
    "fruitless": "recoveries in a row without an entry, park or end between them; three make the run a suspect",
    "suspect": "recovered too often without progress: it is run apart from others, in the end alone in a process of its own",
}

MAILBOX_WORDS = {
    "kind": "signal: a message for a receive; approval: a person''s answer; resolve: a person''s word on an intent in "
    "doubt; cancel: a request to end; retry: a request to go on; child: another run''s end",
    "body": "retry: {from: failed or held, accept: inputs or null, seq: the journal''s length at that moment}",
}

ATTEMPTS_WORDS = {
    "attempt": "which try of this step, from 1, for the whole life of the run",
    "next_at": "when the next one may begin: the decision of retry=",
    "tries": "the same since the step''s budget began: retry of a failed run gives it a new one",
    "first_at": "when the first of those began",
    "idle_seconds": "how long was waited between those",
    "digest": "sha-256 of the try''s canonical input",
}

PAYLOADS_WORDS = {
    "output": "what it ended with, if it succeeded",
    "error": "what it failed with last: how it ended only as long as runs.state is failed",
}

# The journal's new columns at the end: a view's columns, too, are only ever added.
TIMELINE = """
create or replace view timeline as
select j.run_id, r.workflow, j.seq, j.at, j.kind, j.key, j.name, j.outcome, j.attempt, j.started_at,
       j.at - j.started_at as duration,
       j.due_at, j.input, j.output, j.error, j.recorded_at, j.worker, w.hostname, w.pid,
       j.mailbox_id, j.to_seq, j.reuses
from journal j
join runs r on r.id = j.run_id
left join workers w on w.id = j.worker
"""


def hint(kind: str) -> str:
    """PL/pgSQL that tells those who listen on a channel of `replaykit.postgres.schema` to look; it goes out at commit."""
    return f"""
    perform pg_notify(case when octet_length('{kind}:' || current_schema()) < 64
        then '{kind}:' || current_schema()
        else '{kind}:' || left(encode(sha256(convert_to(current_schema(), 'UTF8')), 'hex'), 32) end, '');"""


# A run that nobody has begun is cancelled at once. Any other is told by a row in its mailbox, which its code gets as an
# entry; a second request says nothing new, unless the run is held, where it ends what cannot go on. All is decided after
# the lock wait, by the locked row and by statements that begin after it: whoever held the row has had their say.
CANCEL = f"""
create or replace function cancel(run uuid, by text default null) returns text
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
        insert into mailbox (run_id, kind, name, sent_by, raised) values (r.id, 'cancel', 'cancel', cancel.by, true);
        {hint("replaykit_done").strip()}
        return 'cancelled';
    end if;
    if r.state = 'held' or not exists (select from mailbox m where m.run_id = r.id and m.kind = 'cancel'
        and m.id > coalesce((select max(w.id) from mailbox w where w.run_id = r.id and w.kind = 'retry'), 0))
    then
        insert into mailbox (run_id, kind, name, sent_by, raised) values (r.id, 'cancel', 'cancel', cancel.by, true);
        update runs set wakes = wakes + 1,
            state = case when state in ('waiting', 'held') then 'pending' else state end,
            available_at = case when state in ('waiting', 'held') then clock_timestamp() else available_at end,
            waiting_for = null,
            reason = case when state = 'held' then null else reason end
        where id = r.id returning state into r.state;
        {hint("replaykit_work").strip()}
    end if;
    return r.state;
end
$function$
"""

# `accept` says what a held run's code may ask differently from its journal; it holds for what is recorded by now. The
# same request again, while the first one waits for a worker, is that request: whoever lost the answer may ask again.
RETRY = f"""
create or replace function retry(run uuid, accept text default null, by text default null) returns text
language plpgsql
set search_path from current
as $function$
declare
    r record;
    asked record;
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
    """Add columns and the two requests; then, with others at work, check what is there and build the indexes."""
    for change in (*RUNS, *JOURNAL, *MAILBOX, *ATTEMPTS):
        op.execute(change)
    for table, words in (
        ("runs", RUNS_WORDS),
        ("payloads", PAYLOADS_WORDS),
        ("journal", JOURNAL_WORDS),
        ("mailbox", MAILBOX_WORDS),
        ("attempts", ATTEMPTS_WORDS),
    ):
        for column, text in words.items():
            op.execute(f"comment on column {table}.{column} is '{text}'")
    op.execute(TIMELINE)
    for function in (CANCEL, RETRY):
        op.execute(function)
    apart = _there_is_much()
    concurrently = "concurrently " if apart else ""
    with op.get_context().autocommit_block() if apart else contextlib.nullcontext():
        for table, constraint in VALIDATED:
            op.execute(f"alter table {table} validate constraint {constraint}")
        for index, what in INDEXES.items():
            op.execute(f"drop index {concurrently}if exists {index}")  # of a build that was interrupted
            op.execute(f"create index {concurrently}{index} {what}")


def _there_is_much() -> bool:
    """Whether scans would keep workers waiting. A script for a person to run is one transaction."""
    context = op.get_context()
    if context.as_sql:
        return False
    return bool(op.get_bind().exec_driver_sql("select exists (select from runs)").scalar())

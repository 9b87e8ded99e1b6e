"""The journal's statements: the fenced write of many runs, of one entry, what became of a write, a page.

Every write locks the run rows whose token matches (`for no key update`) and writes only under that lock, in the same
statement: a worker that lost its lease cannot write (POSTGRES.md 3). What it decides after the lock wait it decides by
the locked row, never by a subselect, which would see the statement's older snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from replaykit.limits import CLAIM_BYTES_MAX, PAGE_ENTRIES
from replaykit.postgres.schema import Bound, Statement, moment, us
from replaykit.replay.entries import FOREVER_US, Attempt, Change, Entry, Finish, Hold, Park, Unit, Verdict

__all__ = [
    "ENTRY_COLUMNS",
    "parse_entry",
    "parse_page",
    "parse_recheck",
    "parse_unlocked",
    "parse_verdicts",
    "read_journal",
    "recheck",
    "unlocked",
    "write_entry",
    "write_units",
]

_COLUMNS: Final = (
    "run_id, seq, key, name, kind, outcome, attempt, input, output, error, digest, idempotency_key,"
    " started_at, at, due_at, worker, write_id"
)
_RARE_COLUMNS: Final = "mailbox_id, to_seq, reuses"

# Units of many runs. `held` are all of them in the order in which every writer locks (by run), with what the locked
# row says; `done` are those that stand: leased, with the right wakes, every entry in. Only their changes are made. A
# unit of which a part stands already can only be our defect: the cast fails, the whole statement is rolled back, and
# the writer finds the unit by sending each alone. now() and not clock_timestamp(): the columns of one row must agree
# on what is due. Payloads travel as text inside the document: json_to_recordset would unescape a \u0000.
_WRITE_UNITS: Final = f"""
with held as materialized (
    select u.*, r.id is not null as leased, coalesce(r.wakes = u.wakes, r.id is not null) as fresh, r.worker
    from (select * from json_to_recordset(%(units)s::json) as d(run_id uuid, token uuid, write_id uuid, n int,
        wakes bigint, state text, seen bigint, waiting_for text, until bigint, reason text, output text, error text)
        order by run_id) u
    left join lateral (select r.id, r.worker, r.wakes from {{schema}}.runs r
        where r.id = u.run_id and r.lease_token = u.token for no key update of r) r on true
), ins as (
    insert into {{schema}}.journal ({_COLUMNS}, {_RARE_COLUMNS})
    select e.run_id, e.seq, e.key, e.name, e.kind, e.outcome, e.attempt, e.input::json, e.output::json, e.error::json,
        e.digest, e.ikey, {moment("e.started_at")}, {moment("e.at")}, {moment("e.due_at")}, h.worker, h.write_id,
        {_RARE_COLUMNS}
    from json_to_recordset(%(entries)s::json) as e(run_id uuid, seq int, key text, name text, kind text, outcome text,
        attempt int, input text, output text, error text, digest text, ikey text, started_at bigint, at bigint,
        due_at bigint, mailbox_id bigint, to_seq int, reuses int)
    join held h on h.run_id = e.run_id
    where h.fresh
    on conflict (run_id, seq) do nothing returning run_id
), counted as materialized (
    select run_id, count(*) as n from ins group by run_id{{tried}}
), done as materialized (
    select h.* from held h left join counted c on c.run_id = h.run_id
    where h.fresh and coalesce(c.n, 0) = h.n and (h.state is not null or h.reason is not null)
), changed as (
    update {{schema}}.runs r set
        state = case when d.state is null then r.state
            when d.state in ('waiting', 'held') and d.seen <> r.wakes then 'pending'
            when d.state = 'waiting' and {moment("d.until")} <= now() then 'pending'
            else d.state end,
        waiting_for = case when d.state = 'waiting' and d.seen = r.wakes
            and coalesce({moment("d.until")} > now(), true) then d.waiting_for end,
        reason = case when d.state is null or d.state = 'held' and d.seen = r.wakes then d.reason end,
        available_at = case when d.state in ('waiting', 'held') and d.seen <> r.wakes then now()
            when d.state = 'waiting' then coalesce({moment("d.until")}, 'infinity') else r.available_at end,
        finished_at = case when d.state not in ('pending', 'waiting', 'held') then now() end,
        lease_token = case when d.state is null then r.lease_token end,
        worker = case when d.state is null then r.worker end,
        fruitless = case when d.state is null or d.state = 'pending' then r.fruitless else 0 end,
        suspect = r.suspect and (d.state is null or d.state = 'pending'),
        write_id = case when d.state is null then r.write_id else d.write_id end
    from done d where r.id = any(array(select run_id from done)) and r.id = d.run_id
), paid as (
    update {{schema}}.payloads p set output = d.output::json, error = d.error::json
    from done d where p.run_id = any(array(select run_id from done where output is not null or error is not null))
        and p.run_id = d.run_id
)
select h.run_id, case when not h.leased then 'fenced' when not h.fresh then 'stale'
    when coalesce(c.n, 0) = h.n then 'ok' when c.n is null then 'conflict'
    else (c.n::text || ' of ' || h.n || ' entries went in: others stand at their seq')::int::text end
from held h left join counted c on c.run_id = h.run_id
"""

WRITE_UNITS = Statement("journal-write-fenced", _WRITE_UNITS.replace("{tried}", ""))

# The same with tries that failed and are retried: rows that stand already are an earlier, unacknowledged try's.
WRITE_UNITS_TRIED = Statement(
    "journal-write-tried-fenced",
    _WRITE_UNITS.replace(
        "{tried}",
        f"""
), tried as (
    insert into {{schema}}.attempts (run_id, key, attempt, error, started_at, ended_at, next_at, tries, first_at,
        idle_seconds, digest)
    select a.run_id, a.key, a.attempt, a.error::json, {moment("a.started_at")}, {moment("a.ended_at")},
        {moment("a.next_at")}, a.tries, {moment("a.first_at")}, a.idle, a.digest
    from json_to_recordset(%(attempts)s::json) as a(run_id uuid, key text, attempt int, error text, started_at bigint,
        ended_at bigint, next_at bigint, tries int, first_at bigint, idle float8, digest text)
    join held h on h.run_id = a.run_id left join counted c on c.run_id = h.run_id
    where h.fresh and coalesce(c.n, 0) = h.n
    on conflict do nothing""",
    ),
)

# One entry of one run: the commonest batch of a quiet worker, at little more than a bare insert costs. It says nothing where
# nothing was written; `WRITE_UNITS`, sent then, says why.
WRITE_ENTRY = Statement(
    "journal-write-one-fenced",
    f"""
insert into {{schema}}.journal ({_COLUMNS})
select h.id, %(seq)s::int, %(key)s, %(name)s, %(kind)s, %(outcome)s, %(attempt)s::int,
    %(input)s::json, %(output)s::json, %(error)s::json, %(digest)s, %(ikey)s,
    {moment("%(started_at)s::bigint")}, {moment("%(at)s::bigint")}, {moment("%(due_at)s::bigint")},
    h.worker, %(write_id)s::uuid
from (
    select id, worker, wakes from {{schema}}.runs where id = %(run_id)s::uuid and lease_token = %(token)s::uuid for no key update
) h
where %(wakes)s::bigint is null or h.wakes = %(wakes)s::bigint
on conflict (run_id, seq) do nothing returning run_id, 'ok'
""",
)

# Whether units that came back refused stand all the same, by an earlier try whose acknowledgement was lost: all their
# entries, or (a unit of only a change) the run's last change, bear their write_id. A statement of its own, sent after
# the verdict: a retry that raced its own first attempt was judged by a snapshot from before that attempt's commit.
RECHECK = Statement(
    "journal-read-own",
    """
select u.run_id,
    case when u.n > 0 then
        (select count(*) from {schema}.journal j
         where j.run_id = u.run_id and j.seq between u.first and u.last and j.write_id = u.write_id) = u.n
    else exists (select from {schema}.runs r where r.id = u.run_id and r.write_id = u.write_id) end
from json_to_recordset(%(units)s::json) as u(run_id uuid, write_id uuid, n int, first int, last int)
""",
)

# Which of these runs nobody has locked. After a lock timeout: the others are written apart, so that a transaction that
# somebody outside leaves open on one run delays only that run.
UNLOCKED = Statement(
    "runs-read-unlocked",
    "select id from {schema}.runs where id = any(%(ids)s) for no key update skip locked",
)

ENTRY_COLUMNS: Final = (
    "j.seq, j.key, j.name, j.kind, j.outcome, j.attempt, j.input::text, j.output::text, j.error::text, j.digest,"
    f" j.idempotency_key, {us('j.started_at')}, {us('j.at')}, {us('j.due_at')}, j.mailbox_id, j.to_seq, j.reuses"
)
"""What `parse_entry` takes, of a `journal j`."""

# A page of one run's journal, for its lease holder: no row without the lease, a row of nulls without entries. Cut by
# bytes as stored (compressed, so that nothing is unpacked to be measured), never to nothing.
READ_JOURNAL = Statement(
    "journal-read-page-fenced",
    f"""
select {ENTRY_COLUMNS}
from {{schema}}.runs r
left join lateral (
    select c.* from (
        select p.*, sum(coalesce(pg_column_size(p.input), 0) + coalesce(pg_column_size(p.output), 0)
            + coalesce(pg_column_size(p.error), 0)) over (order by p.seq) as bytes,
            row_number() over (order by p.seq) as line
        from (select * from {{schema}}.journal where run_id = r.id and seq > %(after)s order by seq limit %(limit)s) p
    ) c where c.line = 1 or c.bytes <= %(bytes)s
) j on true
where r.id = %(run_id)s and r.lease_token = %(token)s
order by j.seq
""",
)


def write_units(units: Sequence[Unit]) -> Bound:
    """The statement that writes `units` (of different runs) in one commit; `parse_verdicts` reads what it returns."""
    rows: list[str] = []
    entries: list[str] = []
    for unit in units:
        run = _hex(unit.run_id)
        rows.append(_unit_row(run, unit))
        entries += [_entry_row(run, e) for e in unit.entries]
    documents = {"units": f"[{','.join(rows)}]", "entries": f"[{','.join(entries)}]"}
    tried = [_attempt_row(unit.run_id, a) for unit in units if unit.attempts for a in unit.attempts]
    if tried:
        return WRITE_UNITS_TRIED, {**documents, "attempts": json.dumps(tried)}
    return WRITE_UNITS, documents


def write_entry(unit: Unit) -> Bound:
    """The same for a unit of exactly one entry of a step or timer and nothing else. No row: it was not written;
    `write_units` of the same unit says why."""
    (e,) = unit.entries
    # Numbers go as text: psycopg would choose the parameter's type by the value, and a plan by each combination.
    return WRITE_ENTRY, {
        "run_id": unit.run_id,
        "token": unit.token,
        "write_id": unit.write_id,
        "wakes": _text(unit.wakes),
        "seq": str(e.seq),
        "key": e.key,
        "name": e.name,
        "kind": str(e.kind),
        "outcome": str(e.outcome),
        "attempt": str(e.attempt),
        "input": e.input,
        "output": e.output,
        "error": e.error,
        "digest": e.digest,
        "ikey": e.idempotency_key,
        "started_at": _text(e.started_at),
        "at": str(e.at),
        "due_at": _text(e.due_at),
    }


def parse_verdicts(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, Verdict]:
    """What `write_units` and `write_entry` return, by run."""
    return {run_id: Verdict(verdict) for run_id, verdict in rows}


def recheck(units: Sequence[Unit]) -> Bound:
    """Whether `units` stand by an earlier try. Ask for each that was tried before and came back anything but OK.

    FENCED, CONFLICT and STALE alike: after a lost acknowledgement the lease may be gone, the seq taken, the mailbox
    moved.
    """
    rows = [
        {
            "run_id": str(u.run_id),
            "write_id": str(u.write_id),
            "n": len(u.entries),
            "first": u.entries[0].seq if u.entries else None,
            "last": u.entries[-1].seq if u.entries else None,
        }
        for u in units
    ]
    return RECHECK, {"units": json.dumps(rows)}


def parse_recheck(rows: Iterable[tuple[Any, ...]]) -> set[UUID]:
    """The runs whose units stand."""
    return {run_id for run_id, stands in rows if stands}


def unlocked(units: Sequence[Unit]) -> Bound:
    """The runs of these units that could be written to now; `parse_unlocked` reads it."""
    return UNLOCKED, {"ids": [unit.run_id for unit in units]}


def parse_unlocked(rows: Iterable[tuple[Any, ...]]) -> set[UUID]:
    """Their ids."""
    return {run_id for (run_id,) in rows}


def read_journal(run_id: UUID, token: UUID, after: int, limit: int = PAGE_ENTRIES) -> Bound:
    """The entries after seq `after`, at most `limit` and CLAIM_BYTES_MAX bytes of them; `parse_page` reads it."""
    return READ_JOURNAL, {"run_id": run_id, "token": token, "after": after, "limit": limit, "bytes": CLAIM_BYTES_MAX}


def parse_page(rows: Sequence[tuple[Any, ...]]) -> list[Entry] | None:
    """The page; empty at the journal's end; None if the lease is another's."""
    if not rows:
        return None
    return [parse_entry(row) for row in rows if row[0] is not None]


def parse_entry(row: Sequence[Any]) -> Entry:
    """An entry from ENTRY_COLUMNS."""
    seq, key, name, kind, outcome, attempt, input, output, error, digest, ikey, started_at, at, *rest = row
    return Entry(seq, key, name, kind, outcome, at, attempt, input, output, error, digest, ikey, started_at, *rest)


def _entry_row(run: str, e: Entry) -> str:
    """One line of the document, written by hand: a dict and `json.dumps` take three times as long."""
    row = (
        f'{{"run_id":"{run}","seq":{e.seq},"key":{_quoted(e.key)},"name":{_quoted(e.name)},"kind":"{e.kind}",'
        f'"outcome":"{e.outcome}","attempt":{e.attempt},"at":{e.at}'
    )
    if e.input is not None:
        row += f',"input":{_quoted(e.input)}'
    if e.output is not None:
        row += f',"output":{_quoted(e.output)}'
    if e.error is not None:
        row += f',"error":{_quoted(e.error)}'
    if e.digest is not None:
        row += f',"digest":{_quoted(e.digest)}'
    if e.idempotency_key is not None:
        row += f',"ikey":{_quoted(e.idempotency_key)}'
    if e.started_at is not None:
        row += f',"started_at":{e.started_at}'
    if e.due_at is not None:
        row += f',"due_at":{e.due_at}'
    if e.mailbox_id is not None:
        row += f',"mailbox_id":{e.mailbox_id}'
    if e.to_seq is not None:
        row += f',"to_seq":{e.to_seq}'
    if e.reuses is not None:
        row += f',"reuses":{e.reuses}'
    return row + "}"


def _attempt_row(run_id: UUID, a: Attempt) -> dict[str, Any]:
    return {
        "run_id": str(run_id),
        "key": a.key,
        "attempt": a.attempt,
        "error": a.error,
        "started_at": a.started_at,
        "ended_at": a.ended_at,
        "next_at": min(a.next_at, FOREVER_US),
        "tries": a.tries,
        "first_at": a.first_at,
        "idle": a.idle_seconds,
        "digest": a.digest,
    }


def _unit_row(run: str, u: Unit) -> str:
    row = f'{{"run_id":"{run}","token":"{_hex(u.token)}","write_id":"{_hex(u.write_id)}","n":{len(u.entries)}'
    if u.wakes is not None:
        row += f',"wakes":{u.wakes}'
    if u.change is not None:
        row += "," + json.dumps(_change(u.change))[1:-1]
    elif u.note is not None:
        row += f',"reason":{_quoted(u.note)}'
    return row + "}"


def _change(change: Change) -> dict[str, Any]:
    if isinstance(change, Finish):
        return {"state": change.state, "output": change.output, "error": change.error}
    if isinstance(change, Park):
        until = change.available_at
        if until is not None and until > FOREVER_US:
            until = None
        return {"state": "waiting", "seen": change.wakes, "waiting_for": change.waiting_for, "until": until}
    if isinstance(change, Hold):
        return {"state": "held", "seen": change.wakes, "reason": change.reason}
    return {"state": "pending"}


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _hex(id: UUID) -> str:
    return f"{id.int:032x}"  # a fifth of the time that str() takes; Postgres reads both


_quoted = json.encoder.encode_basestring_ascii

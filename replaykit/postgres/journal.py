"""The journal's statements: the fenced write of many runs, of one entry, what became of a write, a page.

Every write locks the run rows whose token matches (`for no key update`) and writes only under that lock, in the same
statement: a worker that lost its lease cannot write (POSTGRES.md 3). What it decides after the lock wait it decides by
the locked row, never by a subselect, which would see the statement's older snapshot.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from replaykit.limits import CLAIM_BYTES_MAX, PAGE_ENTRIES
from replaykit.postgres.schema import Bound, Statement, moment, storable, us
from replaykit.replay.entries import (
    FOREVER_US,
    Attempt,
    Change,
    Closing,
    Entry,
    Finish,
    Hold,
    Intent,
    Observation,
    Park,
    Unit,
    Verdict,
)
from replaykit.replay.jsontext import compact, escape, merged, unescape

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
    "write_lone",
    "write_units",
    "write_within",
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
    select run_id, count(*) as n from ins group by run_id{{more}}
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

WRITE_UNITS = Statement("journal-write-fenced", _WRITE_UNITS.replace("{more}", ""))

# Tries that failed and are retried: rows that stand already are an earlier, unacknowledged try's.
_TRIED: Final = f"""
), tried as (
    insert into {{schema}}.attempts (run_id, key, attempt, error, started_at, ended_at, next_at, tries, first_at,
        idle_seconds, digest)
    select a.run_id, a.key, a.attempt, a.error::json, {moment("a.started_at")}, {moment("a.ended_at")},
        {moment("a.next_at")}, a.tries, {moment("a.first_at")}, a.idle, a.digest
    from json_to_recordset(%(attempts)s::json) as a(run_id uuid, key text, attempt int, error text, started_at bigint,
        ended_at bigint, next_at bigint, tries int, first_at bigint, idle float8, digest text)
    join held h on h.run_id = a.run_id left join counted c on c.run_id = h.run_id
    where h.fresh and coalesce(c.n, 0) = h.n
    on conflict do nothing"""

# The same with tries.
WRITE_UNITS_TRIED = Statement("journal-write-tried-fenced", _WRITE_UNITS.replace("{more}", _TRIED))

# A new intent. One whose body never began was closed and may be opened again; any other that stands is this unit's own, of
# an unacknowledged try. `write_id` tells the two apart where a copy of the unit comes late, after that closing.
_OPEN: Final = """
    on conflict (run_id, key, attempt) do update set name = excluded.name, effect = excluded.effect,
        idempotency_key = excluded.idempotency_key, input = excluded.input, state = excluded.state,
        written_at = excluded.written_at, doubt_at = excluded.doubt_at, resolved_at = excluded.resolved_at,
        resolved_by = excluded.resolved_by, evidence = excluded.evidence, worker = excluded.worker,
        write_id = excluded.write_id
    where o.state = 'not_landed' and o.write_id <> excluded.write_id"""

_INTENT_COLUMNS: Final = (
    "run_id, key, attempt, name, effect, idempotency_key, input, state, written_at, doubt_at, resolved_at, resolved_by,"
    " evidence, worker, write_id"
)


def _resolved(state: str, resolved: str) -> str:
    """SQL for whether nobody is asked about a call any more."""
    return f"({resolved} and {state} <> 'open' or {state} in ('landed', 'not_landed', 'compensated'))"


def _told(state: str, resolved: str, by: str) -> str:
    """SQL for doubt_at, resolved_at, resolved_by of a new intent."""
    return (
        f"case when {state} = 'unknown' and not {resolved} then clock_timestamp() end,"
        f" case when {_resolved(state, resolved)} then now() end, case when {_resolved(state, resolved)} then {by} end"
    )


def _closing(of: str, state: str, resolved: str, by: str, evidence: str) -> str:
    """SQL for what a closing sets in a row `of` intents. The first moment of doubt stays; evidence is added to."""
    return f"""state = {state},
        resolved_at = case when {_resolved(state, resolved)} then now() end,
        resolved_by = case when {_resolved(state, resolved)} then {by} end,
        doubt_at = case when {state} = 'unknown' and not {resolved}
            then coalesce({of}.doubt_at, {of}.resolved_at, clock_timestamp()) else {of}.doubt_at end,
        evidence = case when {evidence} is null then {of}.evidence when {of}.evidence is null then {evidence}::json else (
            select json_object_agg(e.key, e.value) from (
                select b.key, b.value from json_each({of}.evidence) b
                where not exists (select from json_each({evidence}::json) a where a.key = b.key)
                union all select a.key, a.value from json_each({evidence}::json) a
            ) e) end"""


def _closes(of: str, state: str) -> str:
    """SQL for the rows that a closing may change: a repeated one finds none."""
    return f"({of}.state in ('open', 'unknown') or ({of}.state = 'landed' and {state} = 'compensated'))"


# Intents, what became of older ones, observations. `whole` are the units all of whose entries are in. A closing finds its
# row by the key, one at a time: joined as a set, a plan may read all intents of its run. What it may change is asked of the
# row itself, which the database looks at again after a wait.
_EFFECTS: Final = f"""
), whole as materialized (
    select h.run_id, h.worker, h.write_id from held h left join counted c on c.run_id = h.run_id
    where h.fresh and coalesce(c.n, 0) = h.n
), opened as (
    insert into {{schema}}.intents as o ({_INTENT_COLUMNS})
    select i.run_id, i.key, i.attempt, i.name, i.effect, i.ikey, i.input::json, i.state, {moment("i.written_at")},
        {_told("i.state", "i.resolved", "i.by")}, i.evidence::json, w.worker, w.write_id
    from json_to_recordset(%(intents)s::json) as i(run_id uuid, key text, attempt int, name text, effect text, ikey text,
        input text, state text, written_at bigint, resolved bool, by text, evidence text)
    join whole w on w.run_id = i.run_id{_OPEN}
), closed as (
    update {{schema}}.intents t set {_closing("t", "f.state", "f.resolved", "f.by", "f.evidence")}
    from (
        select c.state, c.resolved, c.by, c.evidence, x.row
        from json_to_recordset(%(closings)s::json) as c(run_id uuid, key text, attempt int, state text, resolved bool,
            by text, evidence text)
        join whole w on w.run_id = c.run_id
        cross join lateral (select o.ctid as row from {{schema}}.intents o
            where o.run_id = c.run_id and o.key = c.key and o.attempt = c.attempt limit 1) x
    ) f
    where t.ctid = f.row and {_closes("t", "f.state")}
), observed as (
    insert into {{schema}}.observations (run_id, key, attempt, kind, value, observed_at, worker)
    select o.run_id, o.key, o.attempt, o.kind, o.value, {moment("o.observed_at")}, w.worker
    from json_to_recordset(%(observations)s::json) as o(run_id uuid, key text, attempt int, kind text, value text,
        observed_at bigint)
    join whole w on w.run_id = o.run_id
    on conflict do nothing"""

# The same with effects (and tries): sent only when a batch has any.
WRITE_UNITS_EFFECTS = Statement("journal-write-effects-fenced", _WRITE_UNITS.replace("{more}", _TRIED + _EFFECTS))

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

# At most one entry, one intent and one closing of one run: what a run that makes one call after the other sends. Like
# `WRITE_ENTRY` it says nothing where nothing was written.
WRITE_ONE_WITH_INTENT = Statement(
    "journal-write-one-intent-fenced",
    f"""
with h as materialized (
    select id, worker from (
        select id, worker, wakes from {{schema}}.runs where id = %(run_id)s::uuid and lease_token = %(token)s::uuid
        for no key update
    ) l where %(wakes)s::bigint is null or wakes = %(wakes)s::bigint
), e as (
    insert into {{schema}}.journal ({_COLUMNS})
    select h.id, %(seq)s::int, %(key)s, %(name)s, %(kind)s, %(outcome)s, %(attempt)s::int,
        %(input)s::json, %(output)s::json, %(error)s::json, %(digest)s, %(ikey)s,
        {moment("%(started_at)s::bigint")}, {moment("%(at)s::bigint")}, {moment("%(due_at)s::bigint")},
        h.worker, %(write_id)s::uuid
    from h where %(seq)s::int is not null
    on conflict (run_id, seq) do nothing returning run_id
), whole as materialized (
    select id, worker from h where %(seq)s::int is null or exists (select from e)
), opened as (
    insert into {{schema}}.intents as o ({_INTENT_COLUMNS})
    select w.id, %(i_key)s::text, %(i_attempt)s::int, %(i_name)s, %(i_effect)s, %(i_ikey)s, %(i_input)s::json, %(i_state)s::text,
        {moment("%(i_written_at)s::bigint")}, {_told("%(i_state)s::text", "%(i_resolved)s::bool", "%(i_by)s::text")},
        %(i_evidence)s::json, w.worker, %(write_id)s::uuid
    from whole w where %(i_key)s::text is not null{_OPEN}
), closed as (
    update {{schema}}.intents t set
    {_closing("t", "%(c_state)s::text", "%(c_resolved)s::bool", "%(c_by)s::text", "%(c_evidence)s::text")}
    from whole w
    where t.run_id = %(run_id)s::uuid and t.key = %(c_key)s::text and t.attempt = %(c_attempt)s::int
        and {_closes("t", "%(c_state)s::text")}
)
select id, 'ok' from whole
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
    if any(unit.intents or unit.closings or unit.observations for unit in units):
        return WRITE_UNITS_EFFECTS, {**documents, "attempts": json.dumps(tried), **_effects(units)}
    if tried:
        return WRITE_UNITS_TRIED, {**documents, "attempts": json.dumps(tried)}
    return WRITE_UNITS, documents


def write_within(unit: Unit) -> Bound:
    """`write_units` for a unit that goes into a transaction of its own step's: it fails with a division by zero unless the
    verdict is OK, so that a COMMIT sent along with it is not reached. The transaction may have begun long ago."""
    statement, documents = write_units([unit])
    return _within(statement), documents


@functools.cache
def _within(statement: Statement) -> Statement:
    writes, verdict = statement.text.replace("now()", "statement_timestamp()").rsplit("\nselect h.run_id, ", 1)
    text = (
        f"{writes}, told(run_id, verdict) as (select h.run_id, {verdict})\nselect 1 / (verdict = 'ok')::int from told"
    )
    return Statement(f"{statement.name}-within", text)


def write_lone(unit: Unit) -> Bound | None:
    """The same for a unit of little more than one entry or one intent, as fast as can be. No row: it was not written;
    `write_units` of the same unit says why. None: the unit holds more than such a statement takes."""
    if unit.attempts or unit.observations or unit.change is not None or unit.note is not None or len(unit.entries) > 1:
        return None
    for entry in unit.entries:
        if entry.mailbox_id is not None or entry.to_seq is not None or entry.reuses is not None:
            return None
    if unit.intents or unit.closings:
        return _write_one_with_intent(unit)
    return write_entry(unit) if unit.entries else None


def write_entry(unit: Unit) -> Bound:
    """The same for a unit of exactly one entry of a step or timer and nothing else. No row: it was not written;
    `write_units` of the same unit says why."""
    (e,) = unit.entries
    return WRITE_ENTRY, _one(unit) | _one_entry(e)


def _write_one_with_intent(unit: Unit) -> Bound | None:
    intents, closings = _settled(unit)
    if len(intents) > 1 or len(closings) > 1:
        return None
    params = _one(unit) | (_one_entry(unit.entries[0]) if unit.entries else _NO_ENTRY)
    return WRITE_ONE_WITH_INTENT, params | (_one_intent(*intents[0]) if intents else _NO_INTENT) | (
        _one_closing(closings[0]) if closings else _NO_CLOSING
    )


def _one(unit: Unit) -> dict[str, Any]:
    # Numbers go as text: psycopg would choose the parameter's type by the value, and a plan by each combination.
    return {
        "run_id": _hex(unit.run_id),
        "token": _hex(unit.token),
        "write_id": _hex(unit.write_id),
        "wakes": _text(unit.wakes),
    }


def _one_entry(e: Entry) -> dict[str, Any]:
    return {
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


def _one_intent(i: Intent, by: str | None) -> dict[str, Any]:
    return {
        "i_key": i.key,
        "i_attempt": str(i.attempt),
        "i_name": i.name,
        "i_effect": str(i.effect),
        "i_ikey": i.idempotency_key,
        "i_input": i.input,
        "i_state": str(i.state),
        "i_written_at": str(i.written_at),
        "i_resolved": _bool(i.resolved),
        "i_by": by,
        "i_evidence": _evidence(i.evidence),
    }


def _one_closing(c: Closing) -> dict[str, Any]:
    return {
        "c_key": c.key,
        "c_attempt": str(c.attempt),
        "c_state": str(c.state),
        "c_resolved": _bool(c.resolved),
        "c_by": c.by,
        "c_evidence": _evidence(c.evidence),
    }


def parse_verdicts(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, Verdict]:
    """What `write_units` and `write_entry` return, by run."""
    return {run_id: _VERDICTS[verdict] for run_id, verdict in rows}


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
    """One line of the document, written by hand and at once: a dict and `json.dumps` take four times as long."""
    input = _quoted(e.input) if e.input is not None else "null"
    output = _quoted(e.output) if e.output is not None else "null"
    error = _quoted(e.error) if e.error is not None else "null"
    digest = _quoted(e.digest) if e.digest is not None else "null"
    ikey = _quoted(e.idempotency_key) if e.idempotency_key is not None else "null"
    started_at = e.started_at if e.started_at is not None else "null"
    row = (
        f'{{"run_id":"{run}","seq":{e.seq},"key":{_quoted(e.key)},"name":{_quoted(e.name)},"kind":"{e.kind}",'
        f'"outcome":"{e.outcome}","attempt":{e.attempt},"input":{input},"output":{output},"error":{error},'
        f'"digest":{digest},"ikey":{ikey},"started_at":{started_at},"at":{e.at}'
    )
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


def _effects(units: Sequence[Unit]) -> dict[str, str]:
    """The documents of a batch's effects."""
    opened: list[str] = []
    closed: list[str] = []
    observed: list[dict[str, Any]] = []
    for unit in units:
        run = _hex(unit.run_id)
        intents, closings = _settled(unit)
        opened += [_intent_row(run, i, by) for i, by in intents]
        closed += [_closing_row(run, c) for c in closings]
        observed += [_observation_row(run, o) for o in unit.observations]
    return {
        "intents": f"[{','.join(opened)}]",
        "closings": f"[{','.join(closed)}]",
        "observations": json.dumps(observed),
    }


def _settled(unit: Unit) -> tuple[list[tuple[Intent, str | None]], list[Closing]]:
    """A unit's new intents, with who closed them, and its closings of older ones, at most one of each.

    A statement does not see the rows that it writes, nor does it change a row twice.
    """
    if not unit.closings:
        return [(i, None) for i in unit.intents], []
    last: dict[tuple[str, int], Closing] = {}
    for c in unit.closings:
        before = last.get((c.key, c.attempt))
        last[c.key, c.attempt] = c if before is None else replace(c, evidence=merged(before.evidence, c.evidence))
    intents: list[tuple[Intent, str | None]] = []
    for i in unit.intents:
        own = last.pop((i.key, i.attempt), None)
        if own is None:
            intents.append((i, None))
        else:
            evidence = merged(i.evidence, own.evidence)
            intents.append((replace(i, state=own.state, resolved=own.resolved, evidence=evidence), own.by))
    return intents, list(last.values())


def _evidence(text: str | None) -> str | None:
    """Evidence as Postgres takes it apart: its operators fail on NUL and half a surrogate pair, however they are written."""
    if text is None or "\\u" not in text:
        return text
    return escape(compact(json.loads(unescape(text))))


def _intent_row(run: str, i: Intent, by: str | None) -> str:
    row = (
        f'{{"run_id":"{run}","key":{_quoted(i.key)},"attempt":{i.attempt},"name":{_quoted(i.name)},'
        f'"effect":"{i.effect}","ikey":{_quoted(i.idempotency_key)},"input":{_quoted(i.input)},"state":"{i.state}",'
        f'"written_at":{i.written_at},"resolved":{_bool(i.resolved)}'
    )
    if by is not None:
        row += f',"by":{_quoted(by)}'
    if (evidence := _evidence(i.evidence)) is not None:
        row += f',"evidence":{_quoted(evidence)}'
    return row + "}"


def _closing_row(run: str, c: Closing) -> str:
    row = (
        f'{{"run_id":"{run}","key":{_quoted(c.key)},"attempt":{c.attempt},"state":"{c.state}",'
        f'"resolved":{_bool(c.resolved)}'
    )
    if c.by is not None:
        row += f',"by":{_quoted(c.by)}'
    if (evidence := _evidence(c.evidence)) is not None:
        row += f',"evidence":{_quoted(evidence)}'
    return row + "}"


def _observation_row(run: str, o: Observation) -> dict[str, Any]:
    return {
        "run_id": run,
        "key": o.key,
        "attempt": o.attempt,
        "kind": o.kind,
        "value": o.id,
        "observed_at": o.observed_at,
    }


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _unit_row(run: str, u: Unit) -> str:
    row = f'{{"run_id":"{run}","token":"{_hex(u.token)}","write_id":"{_hex(u.write_id)}","n":{len(u.entries)}'
    if u.wakes is not None:
        row += f',"wakes":{u.wakes}'
    if u.change is not None:
        row += "," + json.dumps(_change(u.change))[1:-1]
    elif u.note is not None:
        row += f',"reason":{_quoted(storable(u.note))}'
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
        return {"state": "held", "seen": change.wakes, "reason": storable(change.reason)}
    return {"state": "pending"}


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _hex(id: UUID) -> str:
    return f"{id.int:032x}"  # a fifth of the time that str() takes; Postgres reads both


_quoted = json.encoder.encode_basestring_ascii
_VERDICTS: Final = {str(verdict): verdict for verdict in Verdict}  # a sixth of the time that calling the class takes

# Parameters of what a unit does not hold.
_NO_ENTRY: Final[dict[str, Any]] = dict.fromkeys(_one_entry(Entry(0, "", "", "", "", 0)))
_NO_INTENT: Final[dict[str, Any]] = dict.fromkeys(_one_intent(Intent("", 0, "", "", "", "", 0), None))
_NO_CLOSING: Final[dict[str, Any]] = dict.fromkeys(_one_closing(Closing("", 0, "")))

"""All rows of all runs, side by side, once: what a check of the whole journal reads.

One cursor a table, each in the order of run ids, in one snapshot: of a journal that does not fit into memory only a page
is there at a time. Payloads are not read, only whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

from replaykit.postgres.database import Snapshot
from replaykit.postgres.schema import Statement, us

__all__ = ["EntryRow", "IntentRow", "LetterRow", "Orphan", "RunRecord", "TryRow", "read_runs"]


@dataclass(slots=True)
class EntryRow:
    """A row of the journal; moments are microseconds since 1970. `repeats`: its output is that of the entry it `reuses`."""

    seq: int
    key: str
    name: str
    kind: str
    outcome: str
    attempt: int
    idempotency_key: str | None
    digest: str | None
    started_at: int | None
    at: int
    due_at: int | None
    recorded_at: int
    worker: UUID | None
    write_id: UUID
    mailbox_id: int | None
    to_seq: int | None
    reuses: int | None
    repeats: bool


@dataclass(slots=True)
class IntentRow:
    """A row of `intents`. `word`: mailbox id of the person's word that its evidence names."""

    key: str
    attempt: int
    effect: str
    idempotency_key: str
    state: str
    written_at: int
    resolved_at: int | None
    resolved_by: str | None
    word: str | None


@dataclass(slots=True)
class LetterRow:
    """A row of `mailbox`. `of_failed`: a request to go on that came to a failed run."""

    id: int
    kind: str
    name: str
    sent_at: int
    of_failed: bool


@dataclass(slots=True)
class TryRow:
    """A row of `attempts`."""

    key: str
    attempt: int
    started_at: int
    ended_at: int


@dataclass(slots=True)
class RunRecord:
    """A run with what belongs to it. `entries` are read while they are iterated over, once. `asleep`: no time wakes it."""

    id: UUID
    workflow: str
    state: str
    waiting_for: str | None
    asleep: bool
    started_at: int | None
    finished_at: int | None
    claims: int
    worker: UUID | None
    worker_known: bool
    write_id: UUID | None
    payloads: bool
    output: bool
    error: bool
    intents: list[IntentRow] = field(default_factory=list)
    letters: list[LetterRow] = field(default_factory=list)
    tries: list[TryRow] = field(default_factory=list)
    entries: Iterator[EntryRow] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True, slots=True)
class Orphan:
    """Rows of a table that belong to no run."""

    table: str
    run_id: UUID


Row: TypeAlias = tuple[Any, ...]

_RUNS: Final = Statement(
    "audit-read-runs",
    f"""
select r.id, r.workflow, r.state, r.waiting_for, r.available_at = 'infinity', {us("r.started_at")}, {us("r.finished_at")},
    r.claims, r.worker, r.worker is null or exists (select from {{schema}}.workers w where w.id = r.worker), r.write_id,
    p.run_id is not null, p.output is not null, p.error is not null
from {{schema}}.runs r left join {{schema}}.payloads p on p.run_id = r.id
order by r.id
""",
)

_JOURNAL: Final = Statement(
    "audit-read-journal",
    f"""
select run_id, seq, key, name, kind, outcome, attempt, idempotency_key, digest, {us("started_at")}, {us("at")},
    {us("due_at")}, {us("recorded_at")}, worker, write_id, mailbox_id, to_seq, reuses,
    reuses is null or exists (select from {{schema}}.journal o where o.run_id = j.run_id and o.seq = j.reuses
        and o.output::text is not distinct from j.output::text)
from {{schema}}.journal j order by run_id, seq
""",
)

_INTENTS: Final = Statement(
    "audit-read-intents",
    f"""
select run_id, key, attempt, effect, idempotency_key, state, {us("written_at")}, {us("resolved_at")}, resolved_by,
    evidence ->> 'mailbox_id'
from {{schema}}.intents order by run_id, key, attempt
""",
)

_LETTERS: Final = Statement(
    "audit-read-mailbox",
    f"""
select run_id, id, kind, name, {us("sent_at")},
    case when kind = 'retry' then coalesce(body ->> 'from' = 'failed', false) else false end
from {{schema}}.mailbox order by run_id, id
""",
)

_TRIES: Final = Statement(
    "audit-read-attempts",
    f"select run_id, key, attempt, {us('started_at')}, {us('ended_at')} from {{schema}}.attempts"
    " order by run_id, key, attempt",
)

_OTHERS: Final = {
    table: Statement(
        f"audit-read-{table}-without-run",
        f"select distinct run_id from {{schema}}.{table} t"
        " where not exists (select from {schema}.runs r where r.id = t.run_id)",
    )
    for table in ("payloads", "observations")
}


class _Stream:
    """Rows in the order of their runs."""

    def __init__(self, table: str, rows: Iterator[Row]) -> None:
        self.table = table
        self._rows = rows
        self._next: Row | None = next(rows, None)

    def of(self, run_id: UUID) -> Iterator[Row]:
        """Those of this run, without its id."""
        while self._next is not None and self._next[0] == run_id:
            row = self._next
            yield row[1:]
            if self._next is row:
                self._next = next(self._rows, None)

    def before(self, run_id: UUID | None) -> Iterator[Orphan]:
        """Runs that would come before this one (None: all) and are none."""
        while self._next is not None and (run_id is None or self._next[0].bytes < run_id.bytes):
            orphan = self._next[0]
            yield Orphan(self.table, orphan)
            for _ in self.of(orphan):
                pass

    def rest(self, run_id: UUID) -> None:
        """Pass over what is left of a run."""
        for _ in self.of(run_id):
            pass


def read_runs(snapshot: Snapshot) -> Iterator[RunRecord | Orphan]:
    """All runs by id, each with what belongs to it, and what belongs to none. The entries of a run are there until the next
    run is asked for."""
    journal = _Stream("journal", snapshot.stream(_JOURNAL))
    intents = _Stream("intents", snapshot.stream(_INTENTS))
    letters = _Stream("mailbox", snapshot.stream(_LETTERS))
    tries = _Stream("attempts", snapshot.stream(_TRIES))
    streams = (journal, intents, letters, tries)
    for row in snapshot.stream(_RUNS):
        run = RunRecord(*row)
        for stream in streams:
            yield from stream.before(run.id)
        run.intents = [IntentRow(*found) for found in intents.of(run.id)]
        run.letters = [LetterRow(*found) for found in letters.of(run.id)]
        run.tries = [TryRow(*found) for found in tries.of(run.id)]
        run.entries = (EntryRow(*found) for found in journal.of(run.id))
        yield run
        journal.rest(run.id)
    for stream in streams:
        yield from stream.before(None)
    for table, statement in _OTHERS.items():
        for (run_id,) in snapshot.stream(statement):
            yield Orphan(table, run_id)

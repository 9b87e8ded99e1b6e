"""The statements of `postgres/` on plain rows, each as one step that nothing comes between.

What a statement writes is copied, and what it reads is a copy: two workers share nothing but rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import UUID

from replaykit.replay.entries import (
    PROTOCOL,
    Attempt,
    ClaimedRun,
    Closing,
    Entry,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    Mail,
    MailKind,
    Observation,
    Park,
    State,
    Unit,
    Verdict,
)

__all__ = ["ENDED", "Database", "Mismatch", "Row"]

ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
_NEVER = 1 << 62
_UNSETTLED = frozenset({IntentState.OPEN, IntentState.UNKNOWN, IntentState.NOT_LANDED})
_KNOWN = frozenset({IntentState.LANDED, IntentState.NOT_LANDED, IntentState.COMPENSATED})


class Mismatch(Exception):
    """An invariant is broken."""


@dataclass(slots=True)
class Row:
    """A run's row, its payloads and its journal."""

    id: UUID
    number: int  # which program it runs
    input: str
    seed: int
    available_at: int
    state: State = State.PENDING
    token: UUID | None = None
    wakes: int = 0
    started_at: int | None = None
    write_id: UUID | None = None
    output: str | None = None
    error: str | None = None
    reason: str | None = None
    claims: int = 0
    journal: dict[int, tuple[Entry, UUID]] = field(default_factory=dict)  # by seq, with its write_id
    attempts: list[Attempt] = field(default_factory=list)
    mailbox: list[Mail] = field(default_factory=list)
    ends: list[tuple[State, str | None, str | None]] = field(default_factory=list)  # one more with each retry
    intents: dict[tuple[str, int], Intent] = field(default_factory=dict)  # by step and attempt
    openers: dict[tuple[str, int], UUID] = field(default_factory=dict)  # write_id of each
    observations: list[Observation] = field(default_factory=list)

    @property
    def rewinds(self) -> list[tuple[int, int]]:
        """`(seq, to_seq)` of each rewind."""
        rewinds = [e for e, _ in self.journal.values() if e.kind == Kind.REWIND]
        return [(e.seq, e.to_seq or 0) for e in sorted(rewinds, key=lambda e: e.seq)]

    def delivered(self, until: int, rewinds: list[tuple[int, int]]) -> list[Entry]:
        """Copies of the entries up to that seq which those rewinds have not set aside."""
        return [e for e in self.entries if e.seq <= until and not any(to <= e.seq < at for at, to in rewinds)]

    @property
    def undone(self) -> list[str]:
        """Keys of steps that were undone, in that order."""
        return [e.key.removeprefix("~undo:") for e in self.entries if e.key.startswith("~undo:")]

    @property
    def entries(self) -> list[Entry]:
        """Copies of the journal's entries, in order."""
        return [replace(self.journal[seq][0]) for seq in sorted(self.journal)]


class Database:
    """Rows, and the statements on them.

    Attributes:
        on_commit: told of each unit that is committed, by whatever try.
    """

    def __init__(self, on_commit: Callable[[Row, Unit], None]) -> None:
        self.rows: dict[UUID, Row] = {}
        self.on_commit = on_commit

    # ------------------------------------------------------------------ a worker's statements

    def claim(self, row: Row, token: UUID, now: int) -> ClaimedRun:
        """Take a pending run (`runs-claim-pending`, then its journal by a younger snapshot)."""
        assert row.state is State.PENDING
        row.state, row.token, row.reason = State.RUNNING, token, None
        row.claims += 1
        if row.started_at is None:
            row.started_at = now
        return self._claimed(row, token)

    def renew(self, row: Row, old: UUID, new: UUID) -> ClaimedRun | None:
        """A new token for the run's holder (`runs-renew-token-fenced`)."""
        if row.token != old:
            return None
        row.token = new
        return self._claimed(row, new)

    def hold(self, row: Row, token: UUID, reason: str) -> None:
        """Hold it whatever the mailbox says (`runs-hold-fenced`)."""
        if row.token == token:
            row.state, row.reason, row.token = State.HELD, reason, None

    def write(self, unit: Unit) -> Verdict:
        """Write a unit (`journal-write-fenced`)."""
        row = self.rows[unit.run_id]
        if row.token != unit.token:
            return Verdict.FENCED
        if unit.wakes is not None and unit.wakes != row.wakes:
            return Verdict.STALE
        taken = sum(entry.seq in row.journal for entry in unit.entries)
        if taken:  # a part of them: the real statement fails a cast, and all of it is rolled back
            return Verdict.CONFLICT if taken == len(unit.entries) else Verdict.REFUSED
        self.insert(row, unit)
        there = {(a.key, a.attempt) for a in row.attempts}
        row.attempts += [replace(a) for a in unit.attempts if (a.key, a.attempt) not in there]
        self._act(row, unit)
        self._change(row, unit)
        self.on_commit(row, unit)
        return Verdict.OK

    def _act(self, row: Row, unit: Unit) -> None:
        """Intents, what becomes of older ones, observations: of several closings of one the last counts."""
        closings: dict[tuple[str, int], Closing] = {}
        for closing in unit.closings:
            at = closing.key, closing.attempt
            before = closings[at].evidence if at in closings else None
            closings[at] = replace(closing, evidence=_merged(before, closing.evidence))
        for intent in unit.intents:
            at = intent.key, intent.attempt
            new, own, stands = replace(intent), closings.pop(at, None), row.intents.get(at)
            if own is not None:
                self._settle(new, own)
            if stands is None or (stands.state == IntentState.NOT_LANDED and row.openers[at] != unit.write_id):
                row.intents[at], row.openers[at] = new, unit.write_id
        for at, closing in closings.items():
            stands = row.intents.get(at)
            if stands is not None:
                self.close(stands, closing)
        row.observations += [replace(seen) for seen in unit.observations if seen not in row.observations]

    def close(self, intent: Intent, closing: Closing) -> None:
        """What becomes of an intent; of one that is known already, nothing but that it was undone."""
        undone = intent.state == IntentState.LANDED and closing.state == IntentState.COMPENSATED
        if intent.state not in (IntentState.OPEN, IntentState.UNKNOWN) and not undone:
            return
        self._settle(intent, closing)

    def _settle(self, intent: Intent, closing: Closing) -> None:
        intent.state = closing.state
        intent.resolved = closing.state in _KNOWN or (closing.resolved and closing.state != IntentState.OPEN)
        intent.evidence = _merged(intent.evidence, closing.evidence)

    def insert(self, row: Row, unit: Unit) -> None:
        """All entries of a unit, or none."""
        for entry in unit.entries:
            row.journal[entry.seq] = (replace(entry), unit.write_id)

    def recheck(self, unit: Unit) -> bool:
        """Whether a unit stands by an earlier try (`journal-read-own`)."""
        row = self.rows[unit.run_id]
        if not unit.entries:
            return row.write_id == unit.write_id
        return all(e.seq in row.journal and row.journal[e.seq][1] == unit.write_id for e in unit.entries)

    def _change(self, row: Row, unit: Unit) -> None:
        change = unit.change
        if change is None:
            if unit.note is not None:
                row.reason = unit.note
            return
        row.token, row.write_id = None, unit.write_id
        if isinstance(change, Finish):
            row.state, row.output, row.error = change.state, change.output, change.error
            row.ends.append((change.state, change.output, change.error))
        elif isinstance(change, Park | Hold):
            moved = change.wakes != row.wakes
            row.state = State.PENDING if moved else State.WAITING if isinstance(change, Park) else State.HELD
            if isinstance(change, Hold):
                row.reason = None if moved else change.reason
            elif not moved:
                row.available_at = _NEVER if change.available_at is None else change.available_at
        else:
            row.state = State.PENDING

    def _claimed(self, row: Row, token: UUID) -> ClaimedRun:
        entries = row.entries
        return ClaimedRun(
            row.id,
            token,
            "program",
            row.input,
            row.seed,
            PROTOCOL,
            row.started_at or 0,
            row.wakes,
            row.available_at,
            last_seq=len(entries),
            claims=row.claims,
            entries=entries,
            rewinds=row.rewinds,
            attempts=[
                replace(
                    a, first_digest=next((f.digest for f in row.attempts if f.key == a.key and f.attempt == 1), None)
                )
                for a in {a.key: a for a in row.attempts}.values()
            ],
            mail=list(row.mailbox),
            intents=[replace(row.intents[at]) for at in sorted(row.intents) if row.intents[at].state in _UNSETTLED],
            observations=[replace(seen) for seen in row.observations],
        )

    # ------------------------------------------------------------------ everyone else's

    def wake(self, row: Row, now: int) -> None:
        """Something for the run came into its mailbox."""
        row.wakes += 1
        if row.state is State.WAITING:
            row.state, row.available_at = State.PENDING, now

    def cancel(self, row: Row, now: int) -> None:
        """`replaykit.cancel`."""
        if row.state in ENDED:
            return
        if row.started_at is None:
            row.state = State.CANCELLED
            return
        last_retry = max((m.id for m in row.mailbox if m.kind == MailKind.RETRY), default=0)
        asked = any(m.kind == MailKind.CANCEL and m.id > last_retry for m in row.mailbox)
        if row.state is State.HELD or not asked:
            row.mailbox.append(Mail(len(row.mailbox) + 1, MailKind.CANCEL, None, now))
            row.wakes += 1
            if row.state in (State.WAITING, State.HELD):
                row.state, row.available_at = State.PENDING, now

    def retry(self, row: Row, now: int, accept: str | None = None) -> None:
        """`replaykit.retry`."""
        assert row.state in (State.FAILED, State.HELD)
        assert row.state is State.HELD or not row.undone, "refused: it would go on as if what was undone stood"
        body = json.dumps({"from": row.state, "accept": accept, "seq": len(row.journal)})
        row.mailbox.append(Mail(len(row.mailbox) + 1, MailKind.RETRY, body, now))
        row.wakes += 1
        row.state, row.reason, row.available_at = State.PENDING, None, now

    def resolve(self, row: Row, intent: Intent, word: str, value: str, now: int) -> bool:
        """`replaykit.resolve`, of an attempt in doubt. False: it is refused, the attempt has a word already."""
        assert row.state not in ENDED and row.state is not State.RUNNING
        evidence = json.loads(intent.evidence or "{}")
        after = max(evidence.get("misfit", 0), evidence.get("mailbox_id", 0))
        for letter in row.mailbox:
            said = json.loads(letter.body or "{}")
            of = said.get("key"), said.get("attempt")
            if letter.kind == MailKind.RESOLVE and letter.id > after and of == (intent.key, intent.attempt):
                return False
        body = {"key": intent.key, "attempt": intent.attempt, "word": word, "value": json.loads(value), "error": None}
        body["comment"] = "seen" if word == "fail" else None
        row.mailbox.append(Mail(len(row.mailbox) + 1, MailKind.RESOLVE, json.dumps(body), now, "a person"))
        row.wakes += 1
        if row.state in (State.WAITING, State.HELD):
            row.state, row.available_at, row.reason = State.PENDING, now, None
        return True

    def promote(self, row: Row) -> None:
        """Its time has come."""
        assert row.state is State.WAITING
        row.state = State.PENDING

    def reap(self, row: Row) -> None:
        """Hand back a run whose worker is taken for dead."""
        if row.state is State.RUNNING:
            row.state, row.token = State.PENDING, None


def _merged(old: str | None, new: str | None) -> str | None:
    """Evidence with more of it, as JSON text."""
    if old is None or new is None:
        return old if new is None else new
    return json.dumps({**json.loads(old), **json.loads(new)})

"""The rows of runs that execute in memory, and the changes that Postgres makes of them in production.

Each method does what one statement of `postgres/` does, under the same guards: who does not hold the run's token writes
nothing. All of it is plain and immediate; times are microseconds since 1970.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID, uuid4

from replaykit.errors import NotResolvable, NotRetryable
from replaykit.postgres.runs import RunResult, RunRow, Started, StartRow
from replaykit.replay.entries import (
    PROTOCOL,
    Attempt,
    Change,
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
from replaykit.replay.jsontext import merged
from replaykit.runtime.words import Word
from replaykit.testing.clock import moment_of

__all__ = ["Memory", "Row", "as_people_see_it"]

_UNSETTLED: Final = frozenset({IntentState.OPEN, IntentState.UNKNOWN, IntentState.NOT_LANDED})
_BECAME: Final = {
    IntentState.LANDED: "has landed",
    IntentState.NOT_LANDED: "has not landed",
    IntentState.COMPENSATED: "has landed and was undone",
    IntentState.UNKNOWN: "has failed and nobody was to be asked",
}
_FINISHED: Final = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.CONTINUED})


@dataclass(slots=True)
class Row:
    """A run: its row, and the rows of other tables that belong to it."""

    id: UUID
    workflow: str
    input: str
    key: str | None
    queue: str
    priority: int
    seed: int
    created_at: int
    available_at: int | None  # None: until something outside comes
    state: State = State.PENDING
    waiting_for: str | None = None
    reason: str | None = None
    started_at: int | None = None
    finished_at: int | None = None
    token: UUID | None = None
    claims: int = 0
    wakes: int = 0
    output: str | None = None
    error: str | None = None
    journal: list[Entry] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    mailbox: list[Mail] = field(default_factory=list)
    intents: dict[tuple[str, int], Intent] = field(default_factory=dict)  # by step and attempt
    settled: dict[tuple[str, int], tuple[int, str | None]] = field(default_factory=dict)  # since when, and who said so
    observations: list[Observation] = field(default_factory=list)

    @property
    def rewinds(self) -> list[tuple[int, int]]:
        """`(seq, to_seq)` of each rewind."""
        return [(e.seq, e.to_seq or 0) for e in self.journal if e.kind == Kind.REWIND]

    @property
    def standing(self) -> Iterator[Entry]:
        """The entries that no rewind has set aside."""
        rewinds = self.rewinds
        return (e for e in self.journal if not any(to_seq <= e.seq < seq for seq, to_seq in rewinds))

    def close(self, closing: Closing, now: int) -> None:
        """What becomes of an intent; what is known of it grows."""
        at = closing.key, closing.attempt
        intent = self.intents[at]
        intent.state, intent.resolved = closing.state, closing.resolved
        if closing.resolved:
            self.settled[at] = now, closing.by
        intent.evidence = merged(intent.evidence, closing.evidence)


class Memory:
    """Runs by id."""

    def __init__(self) -> None:
        self.rows: dict[UUID, Row] = {}

    # ------------------------------------------------------------------ clients

    def start(self, asked: StartRow, now: int) -> Started:
        """A new run, or the one that holds the key."""
        there = self.rows.get(asked.id) if asked.key is None else self.keyed(asked.key)
        if there is not None:
            return Started(asked.id, there.id, there.workflow, there.id == asked.id, there.state)
        first_at = asked.available_at if asked.available_at is not None else now + (asked.delay or 0)
        row = Row(
            id=asked.id,
            workflow=asked.workflow,
            input=asked.input,
            key=asked.key,
            queue=asked.queue,
            priority=asked.priority,
            seed=random.getrandbits(63),
            created_at=now,
            available_at=first_at,
        )
        if first_at > now:
            row.state, row.waiting_for = State.WAITING, "start"
        self.rows[row.id] = row
        return Started(asked.id, row.id, row.workflow, True, row.state)

    def keyed(self, key: str) -> Row | None:
        """The run of a key."""
        return next((row for row in self.rows.values() if row.key == key), None)

    def find(self, reference: UUID | str) -> Row | None:
        """The run of an id, else of a key: people use UUIDs as keys, too."""
        try:
            by_id = self.rows.get(UUID(str(reference)))
        except ValueError:
            by_id = None
        return by_id or self.keyed(str(reference))

    def result(self, run_id: UUID) -> RunResult | None:
        """Where a run stands, with what it ended with."""
        row = self.rows.get(run_id)
        if row is None:
            return None
        return RunResult(row.id, row.workflow, row.state, row.reason, row.output, row.error)

    def cancel(self, run_id: UUID, by: str | None, now: int) -> State:
        """Ask a run to end; one that has not begun ends at once. Returns its state after it."""
        row = self.rows[run_id]
        if row.state in _FINISHED:
            return row.state
        if row.started_at is None:
            self._post(row, MailKind.CANCEL, None, by, now)
            self._end(row, State.CANCELLED, now)
            return row.state
        last_retry = max((m.id for m in row.mailbox if m.kind == MailKind.RETRY), default=0)
        asked = any(m.kind == MailKind.CANCEL and m.id > last_retry for m in row.mailbox)
        if row.state == State.HELD or not asked:
            self._post(row, MailKind.CANCEL, None, by, now)
            if row.state in (State.WAITING, State.HELD):
                self._free(row, now)
            row.waiting_for = None
        return row.state

    def retry(self, run_id: UUID, accept: str | None, by: str | None, now: int) -> State:
        """Tell a run that has failed or is held to go on. Returns its state after it.

        Raises:
            NotRetryable: it is in another state, or it has failed and has undone something.
        """
        row = self.rows[run_id]
        if row.state == State.PENDING and row.mailbox and row.mailbox[-1].kind == MailKind.RETRY:
            asked = json.loads(row.mailbox[-1].body or "{}")
            if asked == {**asked, "accept": accept, "seq": len(row.journal)}:
                return row.state  # the same request again
        if row.state not in (State.FAILED, State.HELD):
            raise NotRetryable(f"run {row.id} is {row.state}, and only failed and held runs are retried")
        undone = [entry.key.removeprefix("~undo:") for entry in row.journal if entry.key.startswith("~undo:")]
        if undone and row.state == State.FAILED:
            raise NotRetryable(
                f"run {row.id} has undone {', '.join(undone)}, and would go on as if that stood: fork it, or start another"
            )
        body = json.dumps({"from": row.state, "accept": accept, "seq": len(row.journal)})
        self._post(row, MailKind.RETRY, body, by, now)
        self._free(row, now)
        return row.state

    def resolve(self, run_id: UUID, key: str, word: Word, by: str | None, now: int) -> State:
        """Take a person's word on the step's call that is in doubt. Returns the run's state after it.

        Raises:
            NotResolvable: no call of the step is in doubt, it may still be at work, or another word was given.
        """
        row = self.rows[run_id]
        what = f"'{key}' of run {row.id}"
        intents = [intent for intent in row.intents.values() if intent.key == key]
        if not intents:
            raise NotResolvable(f"{what} has written no intent: the view in_doubt lists what is in doubt")
        intent = max(intents, key=lambda one: (_asks(one), one.attempt))
        body = {"key": key, "attempt": intent.attempt, "word": word.said, "comment": word.comment}
        body |= {"value": json.loads(word.landed or "null"), "error": json.loads(word.error or "null")}
        said = _word_on(row, intent)
        if said is not None:
            before = json.loads(said.body or "{}")
            if all(before[part] == body[part] for part in ("word", "value", "error")):
                return row.state  # the same word again
            raise NotResolvable(
                f"{what} has a word already: {said.sent_by or 'somebody'} said {_told(before)} at {_utc(said.sent_at)}"
            )
        if not _asks(intent):
            since, who = row.settled[intent.key, intent.attempt]
            says = f", says {who}," if who else ""
            became = f"{_BECAME[IntentState(intent.state)]}{says} since {_utc(since)}"
            raise NotResolvable(f"{what} is not in doubt: its attempt {intent.attempt} {became}")
        if row.state == State.RUNNING:
            raise NotResolvable(f"{what} may still be at work: a worker has the run; wait until it is held")
        self._post(row, MailKind.RESOLVE, json.dumps(body, ensure_ascii=False), by, now)
        if row.state in _FINISHED:
            evidence = None if word.comment is None else json.dumps({"comment": word.comment})
            state = IntentState.UNKNOWN if word.fail else IntentState(word.said)
            row.close(Closing(intent.key, intent.attempt, state, by=by, evidence=evidence), now)
        elif row.state in (State.WAITING, State.HELD):
            self._free(row, now)
        return row.state

    def _post(self, row: Row, kind: MailKind, body: str | None, by: str | None, now: int) -> None:
        number = 1 + max((m.id for r in self.rows.values() for m in r.mailbox), default=0)
        row.mailbox.append(Mail(number, kind, body, now, by))
        row.wakes += 1

    # ------------------------------------------------------------------ workers

    def promote(self, now: int) -> None:
        """Waiting runs whose time has come want a worker."""
        for row in self.rows.values():
            if row.state == State.WAITING and row.available_at is not None and row.available_at <= now:
                row.state, row.waiting_for = State.PENDING, None

    def next_due(self) -> int | None:
        """When the next waiting run is due."""
        due = [row.available_at for row in self.rows.values() if row.state == State.WAITING]
        return min((at for at in due if at is not None), default=None)

    def claim(self, now: int) -> list[ClaimedRun]:
        """Take every pending run, in the order of the queue."""
        pending = [row for row in self.rows.values() if row.state == State.PENDING]
        pending.sort(key=lambda row: (row.priority, row.available_at or 0, row.id))
        for row in pending:
            row.state, row.token, row.reason = State.RUNNING, uuid4(), None
            row.started_at = now if row.started_at is None else row.started_at
            row.claims += 1
        return [self._claimed(row) for row in pending]

    def renew(self, run_id: UUID, token: UUID) -> ClaimedRun | None:
        """The run again, under a new token that fences the old one; None if the lease is another's."""
        row = self._leased(run_id, token)
        if row is None:
            return None
        row.token = uuid4()
        return self._claimed(row)

    def _claimed(self, row: Row) -> ClaimedRun:
        assert row.token is not None and row.started_at is not None
        last = {attempt.key: attempt for attempt in sorted(row.attempts, key=lambda a: a.attempt)}
        return ClaimedRun(
            id=row.id,
            token=row.token,
            workflow=row.workflow,
            input=row.input,
            seed=row.seed,
            protocol=PROTOCOL,
            started_at=row.started_at,
            wakes=row.wakes,
            floor=row.available_at or 0,
            last_seq=len(row.journal),
            key=row.key,
            queue=row.queue,
            claims=row.claims,
            entries=list(row.journal),
            rewinds=row.rewinds,
            attempts=list(last.values()),
            mail=list(row.mailbox),
            intents=[replace(row.intents[at]) for at in sorted(row.intents) if row.intents[at].state in _UNSETTLED],
            observations=list(row.observations),
        )

    def write(self, unit: Unit, now: int) -> tuple[Verdict, str | None]:
        """Append a unit's rows and change the run's state, or say why not: all of it or nothing."""
        row = self._leased(unit.run_id, unit.token)
        if row is None:
            return Verdict.FENCED, None
        if unit.wakes is not None and unit.wakes != row.wakes:
            return Verdict.STALE, None
        if [e.seq for e in unit.entries] != list(range(len(row.journal) + 1, len(row.journal) + 1 + len(unit.entries))):
            return Verdict.CONFLICT, None
        row.journal += unit.entries
        row.attempts += unit.attempts
        for intent in unit.intents:
            row.intents[intent.key, intent.attempt] = replace(intent)
        for closing in unit.closings:
            row.close(closing, now)
        told = {(seen.key, seen.attempt, seen.kind, seen.id): seen for seen in row.observations}
        for seen in unit.observations:
            told.setdefault((seen.key, seen.attempt, seen.kind, seen.id), seen)
        row.observations = list(told.values())
        if unit.change is not None:
            self._change(row, unit.change, now)
        elif unit.note is not None:
            row.reason = unit.note
        return Verdict.OK, None

    def _change(self, row: Row, change: Change, now: int) -> None:
        row.token = None
        if isinstance(change, Finish):
            row.output, row.error = change.output, change.error
            self._end(row, change.state, now)
        elif isinstance(change, Park | Hold) and change.wakes != row.wakes:
            self._free(row, now)  # something came meanwhile
        elif isinstance(change, Park):
            row.available_at = change.available_at
            if change.available_at is not None and change.available_at <= now:
                row.state = State.PENDING
            else:
                row.state, row.waiting_for = State.WAITING, change.waiting_for
        elif isinstance(change, Hold):
            row.state, row.reason = State.HELD, change.reason
        else:
            row.state = State.PENDING

    def hold(self, run: ClaimedRun, reason: str, now: int) -> None:
        """Hold the run at once, under its token; pending instead if something came since its `wakes` was read."""
        row = self._leased(run.id, run.token)
        if row is not None:
            row.token = None
            self._change(row, Hold(reason, run.wakes), now)

    def end_cancelled(self, run: ClaimedRun, now: int) -> None:
        """End a run that was asked to end and whose code cannot be told, under its token."""
        row = self._leased(run.id, run.token)
        if row is not None:
            row.token = None
            self._end(row, State.CANCELLED, now)
            for intent in row.intents.values():
                if intent.state == IntentState.OPEN:  # no worker will ever say what became of it
                    intent.state = IntentState.UNKNOWN

    def release(self, run_id: UUID, now: int) -> None:
        """Hand a run back, whoever holds it."""
        row = self.rows[run_id]
        if row.state == State.RUNNING:
            row.token = None
            self._free(row, now)

    def _leased(self, run_id: UUID, token: UUID) -> Row | None:
        row = self.rows.get(run_id)
        return row if row is not None and row.state == State.RUNNING and row.token == token else None

    def _free(self, row: Row, now: int) -> None:
        row.state, row.waiting_for, row.reason, row.available_at, row.finished_at = State.PENDING, None, None, now, None

    def _end(self, row: Row, state: State, now: int) -> None:
        row.state, row.waiting_for, row.reason, row.finished_at = state, None, None, now


def _asks(intent: Intent) -> bool:
    """Whether a person may have a word on it."""
    return intent.state in (IntentState.OPEN, IntentState.UNKNOWN) and not intent.resolved


def _word_on(row: Row, intent: Intent) -> Mail | None:
    """The word that stands on this attempt: none that did not fit, nor one by which a call was closed that is in doubt again."""
    evidence = json.loads(intent.evidence or "{}")
    after = max(evidence.get("misfit", 0), evidence.get("mailbox_id", 0) if _asks(intent) else 0)
    for letter in row.mailbox:
        if letter.kind == MailKind.RESOLVE and letter.id > after:
            body = json.loads(letter.body or "{}")
            if (body["key"], body["attempt"]) == (intent.key, intent.attempt):
                return letter
    return None


def _told(body: dict[str, Any]) -> str:
    word = str(body["word"])
    return f"landed with {json.dumps(body['value'], ensure_ascii=False)[:200]}" if word == "landed" else word


def _utc(us: int) -> str:
    return moment_of(us).strftime("%Y-%m-%d %H:%M:%S UTC")


def as_people_see_it(row: Row) -> RunRow:
    """The row of `runs` that the database would show."""
    return RunRow(
        id=row.id,
        workflow=row.workflow,
        key=row.key,
        state=row.state,
        queue=row.queue,
        priority=row.priority,
        waiting_for=row.waiting_for,
        reason=row.reason,
        created_at=moment_of(row.created_at),
        started_at=None if row.started_at is None else moment_of(row.started_at),
        finished_at=None if row.finished_at is None else moment_of(row.finished_at),
        available_at=None if row.available_at is None else moment_of(row.available_at),
        parent_id=None,
        forked_from=None,
        recoveries=0,
        worker=None,
        protocol=PROTOCOL if row.claims else None,
        entries=len(row.journal),
    )

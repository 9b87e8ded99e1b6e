"""Looks at a whole database after the fact: do its journals keep what replaykit promises?

    python -m replaykit.testing.checker DSN [--schema S] [--acknowledged FILE] [--calls FILE]

Prints one line for each rule that a run breaks and exits with 1; with 0 if there is none, with 2 if it cannot look. It only
reads, one moment of the database, and a page of it at a time. Rules, by the promise that each guards:

1. A completed step runs once.
    key-once            no key has two entries that stand (what a rewind set aside does not)
    reuse               an entry that repeats a result names an entry of the same step, which a rewind had set aside, and says
                        the same; a result that was set aside is repeated, not made anew, when its input is the same
    call-after-entry    no body is called after its step's entry was written (calls), except after a rewind set it aside, a
                        time-out that left a thread running, and for steps that are `durability="async"`
    too-many-calls      no step is called more often than its tries and its run's claims explain (calls); transactional steps
                        apart, whose bodies run again whenever their transaction is lost
2. An interrupted step's fate is declared, never guessed.
    open-intent         a run that has ended leaves no intent open; one that succeeded or failed asks nobody any more
    entry-of-intent     a step's entry and its intent say the same: `landed` and `ok` together, nothing open beside an entry
    second-intent       an irreversible call is tried again only after it was known not to have happened
    call-without-intent a step with an effect is called only under an intent, and after it was written (calls)
    two-calls           no attempt of an irreversible step is called twice, none of its calls lands twice (calls)
    landed-unsaid       what an intent says of a call is what happened outside (calls)
    one-key             all calls of a step carry the idempotency key of its intent or entry (calls), which is the same in both;
                        no two steps share one
    undo                an undoing has its step's result before it, and the step's intent says so
3. First run = replay.
    linear              a journal counts 1, 2, 3, ..., and its clock never goes back
    timer               no timer fires before its deadline, nothing happens before the run's start
4. One writer a run.
    writers             the writer changes no more often than the run was claimed
    after-the-end       nothing is written after the run's end, nothing before its start
    leased              a running run's worker is known
5. What cannot go on stops where a person sees it.
    letter              what an entry answers is a letter of its run, of the right kind, from before it, answered once
    unheard             a run does not end well or badly with a request to go on unheard; it is cancelled only if asked
    asleep              a run that waits for a moment has one that wakes it
6. Every fact is a row.
    state               a run's state and what it ended with agree
    try-order           no try comes after its step's entry
    orphan              nothing belongs to a run that is not there
    lost-start          a start that was acknowledged is there (acknowledged)
    lost-entry          an entry that was seen committed is there (acknowledged)
    lost-end            a run that was seen ended has ended so (acknowledged), unless it was retried
    lost-letter         a request that was acknowledged is there (acknowledged)
    call-of-nobody      no body is called for a run that is not there (calls)

FILE holds JSON lines. `--acknowledged`: `{"run": ID}`, a start; `{"run": ID, "seq": 3, "key": "charge"}`, an entry;
`{"run": ID, "state": "succeeded"}`, an end; `{"run": ID, "letter": "cancel", "number": 1}`, so many requests. `--calls`: what
the other side saw, `{"run": ID, "key": "charge", "attempt": 1, "idempotency_key": "...", "effect": "irreversible", "did": true,
"at": 1767225600.0}`: all but `run` and `key` may be left out; `at` by a clock that agrees with the database's; `did`: the call
did something; `excused`: true for a call of a process that was stopped past its lease and continued, which nothing can prevent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from replaykit.errors import ReplaykitError
from replaykit.postgres.audit import EntryRow, IntentRow, LetterRow, Orphan, RunRecord, TryRow, read_runs
from replaykit.postgres.database import Database, SyncConnection
from replaykit.replay.entries import Effect, IntentState, Kind, MailKind, Outcome, State

__all__ = [
    "RULES",
    "Acknowledged",
    "Broken",
    "Call",
    "Checked",
    "check",
    "check_run",
    "main",
    "read_acknowledged",
    "read_calls",
]

RULES: Final = (
    *("key-once", "reuse", "call-after-entry", "too-many-calls"),
    *(
        "open-intent",
        "entry-of-intent",
        "second-intent",
        "call-without-intent",
        "two-calls",
        "landed-unsaid",
        "one-key",
        "undo",
    ),
    *("linear", "timer"),
    *("writers", "after-the-end", "leased"),
    *("letter", "unheard", "asleep"),
    *("state", "try-order", "orphan", "lost-start", "lost-entry", "lost-end", "lost-letter", "call-of-nobody"),
)
"""Their names, in the order of this page."""

_ENDED: Final = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.CONTINUED})
_LETTER_OF: Final[dict[str, str]] = {Kind.STEP: MailKind.RESOLVE, Kind.REWIND: MailKind.RETRY}
_MOMENTS: Final = frozenset({"start", "timer", "retry"})
_CALLED: Final = frozenset({Effect.IDEMPOTENT, Effect.IRREVERSIBLE})
_UNDO: Final = "~undo:"


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold. `run` None: it is of no run that is there."""

    rule: str
    run: UUID | None
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule}: {f'run {self.run}: ' if self.run is not None else ''}{self.sentence}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a step's body, as the other side saw it; `at` in microseconds since 1970."""

    key: str
    attempt: int | None = None
    idempotency_key: str | None = None
    effect: str | None = None
    did: bool | None = None
    at: int | None = None
    excused: bool = False


@dataclass(slots=True)
class Acknowledged:
    """What somebody was told about a run: entries `(seq, key)`, how it ended, how many requests by kind."""

    entries: list[tuple[int, str]] = field(default_factory=list)
    state: str | None = None
    letters: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Checked:
    """What was looked at."""

    runs: int = 0
    entries: int = 0
    intents: int = 0
    letters: int = 0
    calls: int = 0
    broken: int = 0


@dataclass(slots=True)
class _Ended:
    """An entry of a step, or what is left of it."""

    seq: int
    attempt: int
    outcome: str
    digest: str | None
    recorded_at: int
    idempotency_key: str | None
    aside_at: int | None = None  # when a rewind set it aside


@dataclass(slots=True)
class _Journal:
    """What is remembered of a run's entries."""

    live: dict[str, int] = field(default_factory=dict)  # seq of the entry that stands, by key
    aside: dict[int, str] = field(default_factory=dict)  # key by seq of entries that are set aside
    ended: dict[str, list[_Ended]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # step by idempotency key
    answered: dict[int, int] = field(default_factory=dict)  # seq by mailbox id
    seen: set[tuple[int, str]] = field(default_factory=set)  # of the entries that were acknowledged
    heard: int = 0  # the last request to go on that has its rewind
    rewinds: int = 0
    writers: int = 0
    length: int = 0


def check(
    connection: SyncConnection, calls: dict[UUID, list[Call]], acknowledged: dict[UUID, Acknowledged], checked: Checked
) -> Iterator[Broken]:
    """Everything that does not hold in a database; `checked` counts what was looked at.

    Args:
        connection: to the database.
        calls: what the other side saw, by run; read before, so that the database is the younger of the two.
        acknowledged: what somebody was told, by run; likewise.
        checked: is added to.
    """
    calls, acknowledged = dict(calls), dict(acknowledged)
    with connection.snapshot() as snapshot:
        for found in read_runs(snapshot):
            if isinstance(found, Orphan):
                yield Broken("orphan", None, f"{found.table} has rows of run {found.run_id}, which is not there")
                continue
            yield from check_run(found, calls.pop(found.id, ()), acknowledged.pop(found.id, Acknowledged()), checked)
    for run in acknowledged:
        yield Broken("lost-start", None, f"run {run} was acknowledged and is not there")
    for run, made in calls.items():
        yield Broken("call-of-nobody", None, f"step {made[0].key} of run {run} was called, and that run is not there")


def check_run(run: RunRecord, calls: Sequence[Call], acknowledged: Acknowledged, checked: Checked) -> Iterator[Broken]:
    """Everything that does not hold in one run."""
    checked.runs += 1
    checked.intents += len(run.intents)
    checked.letters += len(run.letters)
    checked.calls += len(calls)
    journal = _Journal()
    letters = {letter.id: letter for letter in run.letters}
    asked = set(acknowledged.entries)
    for rule, sentence in _all_of(run, journal, letters, calls, acknowledged, asked):
        yield Broken(rule, run.id, sentence)
    checked.entries += journal.length


_Said = Iterator[tuple[str, str]]


def _all_of(
    run: RunRecord,
    journal: _Journal,
    letters: dict[int, LetterRow],
    calls: Sequence[Call],
    acknowledged: Acknowledged,
    asked: set[tuple[int, str]],
) -> _Said:
    yield from _entries(run, journal, letters, asked)
    yield from _state(run, journal)
    yield from _heard(run, journal)
    yield from _tries(run.tries, journal)
    yield from _intents(run, journal, letters)
    yield from _told(run, journal, acknowledged)
    yield from _calls(run, journal, calls)


# ---------------------------------------------------------------------- entry by entry


def _entries(run: RunRecord, journal: _Journal, letters: dict[int, LetterRow], asked: set[tuple[int, str]]) -> _Said:
    at, worker = run.started_at or 0, None
    for entry in run.entries:
        journal.length += 1
        here = f"entry {entry.seq} ({entry.key})"
        if entry.seq != journal.length:
            yield "linear", f"{here} stands where entry {journal.length} should"
            journal.length = entry.seq
        if entry.at < at:
            what = "the run's start" if entry.seq == 1 else "the entry before it"
            yield ("timer" if entry.seq == 1 else "linear"), f"{here} is of {_ago(at - entry.at)} before {what}"
        at = max(at, entry.at)
        if entry.due_at is not None and entry.at < entry.due_at:
            yield "timer", f"{here} fired {_ago(entry.due_at - entry.at)} before its deadline"
        yield from _written(run, entry, here)
        if entry.worker != worker:
            journal.writers, worker = journal.writers + 1, entry.worker
        if (entry.seq, entry.key) in asked:
            journal.seen.add((entry.seq, entry.key))
        yield from _answers(entry, here, journal, letters)
        yield from _takes_place(entry, here, journal)
    if journal.writers > run.claims > 0:
        yield (
            "writers",
            f"the journal's writer changes {journal.writers - 1} times, and the run was claimed {run.claims} times",
        )


def _written(run: RunRecord, entry: EntryRow, here: str) -> _Said:
    if run.started_at is None:
        yield "after-the-end", f"{here} was written, and the run was never started"
    elif entry.recorded_at < run.started_at:
        yield "after-the-end", f"{here} was written {_ago(run.started_at - entry.recorded_at)} before the run's start"
    # What is of the same write as the end is written after the moment that the end bears.
    if run.finished_at is not None and entry.recorded_at > run.finished_at and entry.write_id != run.write_id:
        yield "after-the-end", f"{here} was written {_ago(entry.recorded_at - run.finished_at)} after the run's end"


def _answers(entry: EntryRow, here: str, journal: _Journal, letters: dict[int, LetterRow]) -> _Said:
    if entry.mailbox_id is None or entry.reuses is not None:
        return
    letter = letters.get(entry.mailbox_id)
    wanted = _LETTER_OF.get(entry.kind, entry.kind)
    if letter is None:
        yield "letter", f"{here} answers letter {entry.mailbox_id}, and the run has none of that number"
        return
    if letter.kind != wanted:
        yield "letter", f"{here} answers letter {letter.id}, which is a {letter.kind} and no {wanted}"
    if letter.sent_at > entry.recorded_at:
        yield (
            "letter",
            f"{here} answers letter {letter.id}, which came {_ago(letter.sent_at - entry.recorded_at)} later",
        )
    before = journal.answered.get(letter.id)
    if before is not None and before not in journal.aside:
        yield "letter", f"{here} answers letter {letter.id}, which entry {before} had answered"
    journal.answered[letter.id] = entry.seq
    if entry.kind == Kind.REWIND:
        journal.heard = max(journal.heard, letter.id)


def _takes_place(entry: EntryRow, here: str, journal: _Journal) -> _Said:
    if entry.to_seq is not None:
        journal.rewinds += 1
        for key in [key for key, seq in journal.live.items() if seq >= entry.to_seq]:
            journal.aside[journal.live.pop(key)] = key
        for ended in (one for many in journal.ended.values() for one in many):
            if ended.seq >= entry.to_seq and ended.aside_at is None:
                ended.aside_at = entry.recorded_at
    before = journal.live.get(entry.key)
    if before is not None:
        yield "key-once", f"{here} stands beside entry {before}, which has the same key"
    journal.live[entry.key] = entry.seq
    if entry.reuses is not None and journal.aside.get(entry.reuses) != entry.key:
        yield (
            "reuse",
            f"{here} repeats the result of entry {entry.reuses}, which no rewind set aside, or which is another step's",
        )
    if not entry.repeats:
        yield "reuse", f"{here} is said to repeat the result of entry {entry.reuses}, and has another one"
    if entry.kind != Kind.STEP:
        return
    if entry.key.startswith(_UNDO):
        done = [e for e in journal.ended.get(entry.key.removeprefix(_UNDO), ()) if e.outcome == Outcome.OK]
        if not done:
            yield "undo", f"{here} undoes a step that has no result"
    if entry.reuses is None:
        yield from _anew(entry, here, journal)
    if entry.idempotency_key is not None:
        other = journal.keys.setdefault(entry.idempotency_key, entry.key)
        if other != entry.key:
            yield "one-key", f"{here} has the idempotency key of step {other}"


def _anew(entry: EntryRow, here: str, journal: _Journal) -> _Said:
    known = journal.ended.setdefault(entry.key, [])
    last = known[-1] if known else None
    aside = last is not None and last.aside_at is not None and last.outcome == Outcome.OK and entry.mailbox_id is None
    if last is not None and aside and entry.digest is not None and entry.digest == last.digest:
        yield "reuse", f"{here} has run again, with the input with which entry {last.seq} has its result"
    known.append(
        _Ended(entry.seq, entry.attempt, entry.outcome, entry.digest, entry.recorded_at, entry.idempotency_key)
    )


# ---------------------------------------------------------------------- the run


def _state(run: RunRecord, journal: _Journal) -> _Said:
    if not run.payloads:
        yield "state", "it has no row in payloads"
    elif run.state == State.SUCCEEDED and (run.error or not run.output):
        yield "state", f"it succeeded with {'an error' if run.error else 'no output'}"
    elif run.state == State.FAILED and (run.output or not run.error):
        yield "state", f"it failed with {'an output' if run.output else 'no error'}"
    elif run.state not in (State.SUCCEEDED, State.CONTINUED) and run.output:
        yield "state", f"it is {run.state}, and has an output"
    if run.started_at is None and (run.intents or run.tries):
        yield "state", "it was never started, and has intents or tries"
    if run.asleep and run.waiting_for in _MOMENTS:
        yield "asleep", f"it waits for {run.waiting_for}, and no moment is set at which it goes on"
    if not run.worker_known:
        yield "leased", f"its worker {run.worker} is not among the workers"


def _heard(run: RunRecord, journal: _Journal) -> _Said:
    if run.state in (State.SUCCEEDED, State.FAILED):
        for letter in run.letters:
            if letter.of_failed and letter.id > journal.heard:
                yield "unheard", f"it {run.state}, and the request to go on (letter {letter.id}) has no rewind"
    if run.state == State.CANCELLED and not any(letter.kind == MailKind.CANCEL for letter in run.letters):
        yield "unheard", "it is cancelled, and nobody asked for that"


def _tries(tries: Iterable[TryRow], journal: _Journal) -> _Said:
    for tried in tries:
        standing = [e for e in journal.ended.get(tried.key, ()) if e.aside_at is None]
        if standing and standing[-1].attempt <= tried.attempt:
            entry = standing[-1]
            yield (
                "try-order",
                f"try {tried.attempt} of step {tried.key} is not before entry {entry.seq}, of try {entry.attempt}",
            )


def _told(run: RunRecord, journal: _Journal, acknowledged: Acknowledged) -> _Said:
    for seq, key in acknowledged.entries:
        if (seq, key) not in journal.seen:
            yield "lost-entry", f"entry {seq} ({key}) was seen committed and is not there"
    retried = any(letter.kind == MailKind.RETRY for letter in run.letters)
    if acknowledged.state is not None and acknowledged.state != run.state and not retried:
        yield "lost-end", f"it was seen to be {acknowledged.state}, and is {run.state}"
    there = Counter(letter.kind for letter in run.letters)
    for kind, number in acknowledged.letters.items():
        if there[kind] < number:
            yield "lost-letter", f"{number} letters of kind {kind} were acknowledged, and {there[kind]} are there"


# ---------------------------------------------------------------------- intents


def _intents(run: RunRecord, journal: _Journal, letters: dict[int, LetterRow]) -> _Said:
    before: IntentRow | None = None
    for intent in run.intents:
        here = f"the intent of attempt {intent.attempt} of step {intent.key}"
        doubted = intent.state == IntentState.UNKNOWN and intent.resolved_at is None
        if intent.state == IntentState.OPEN and run.state in _ENDED:
            yield "open-intent", f"it is {run.state}, and {here} is open"
        elif doubted and run.state in (State.SUCCEEDED, State.FAILED):
            yield "open-intent", f"it {run.state}, and a person is still asked about {here}"
        yield from _entry_of(run, journal, intent, here)
        yield from _key_of(journal, intent, here)
        if intent.word is not None and (not intent.word.isdigit() or letters.get(int(intent.word)) is None):
            yield "letter", f"{here} names letter {intent.word}, and the run has none of that number"
        again = before is not None and before.key == intent.key and before.state != IntentState.NOT_LANDED
        if again and before is not None and before.effect == intent.effect == Effect.IRREVERSIBLE:
            yield "second-intent", f"{here} follows attempt {before.attempt}, which is {before.state}"
        before = intent


def _entry_of(run: RunRecord, journal: _Journal, intent: IntentRow, here: str) -> _Said:
    ended = journal.ended.get(intent.key, [])
    mine = [e for e in ended if e.attempt == intent.attempt]
    if intent.state == IntentState.OPEN and mine:
        yield "entry-of-intent", f"{here} is open, and entry {mine[-1].seq} says {mine[-1].outcome}"
    if intent.state == IntentState.NOT_LANDED and any(e.outcome == Outcome.OK for e in mine):
        yield "entry-of-intent", f"{here} did not land, and entry {mine[-1].seq} has its result"
    if intent.state in (IntentState.LANDED, IntentState.COMPENSATED):
        after_the_end = run.finished_at is not None and (intent.resolved_at or 0) > run.finished_at
        # A failed undoing's row is of no attempt that a body counted.
        results = ended if intent.key.startswith(_UNDO) else mine
        if not after_the_end and not any(e.outcome == Outcome.OK for e in results):
            yield "entry-of-intent", f"{here} is {intent.state}, and no entry has its result"
    undone = any(e.outcome == Outcome.OK for e in journal.ended.get(_UNDO + intent.key, ()))
    if (intent.state == IntentState.COMPENSATED) != undone and intent.state in (
        IntentState.COMPENSATED,
        IntentState.LANDED,
    ):
        yield "undo", f"{here} is {intent.state}, and {'an' if undone else 'no'} entry undoes it"


def _key_of(journal: _Journal, intent: IntentRow, here: str) -> _Said:
    other = journal.keys.setdefault(intent.idempotency_key, intent.key)
    if other != intent.key:
        yield "one-key", f"{here} has the idempotency key of step {other}"
    for entry in journal.ended.get(intent.key, ()):
        theirs = entry.attempt == intent.attempt and entry.aside_at is None and intent.effect in _CALLED
        if theirs and entry.recorded_at < intent.written_at:
            yield (
                "entry-of-intent",
                f"{here} was written {_ago(intent.written_at - entry.recorded_at)} after entry {entry.seq}",
            )
        if theirs and entry.idempotency_key not in (None, intent.idempotency_key):
            yield "one-key", f"{here} has one idempotency key, and entry {entry.seq} of the same attempt another"


# ---------------------------------------------------------------------- calls


def _calls(run: RunRecord, journal: _Journal, calls: Sequence[Call]) -> _Said:
    intents = {(intent.key, intent.attempt): intent for intent in run.intents}
    tries = Counter(tried.key for tried in run.tries)
    attempts = Counter(intent.key for intent in run.intents)
    keys = _keys_by_step(run, journal) if calls else {}
    by_key: dict[str, list[Call]] = {}
    for call in calls:
        if not call.excused:
            by_key.setdefault(call.key, []).append(call)
    for key, made in by_key.items():
        allowed = max(tries[key], attempts[key]) + max(run.claims, 1) + journal.rewinds
        if len(made) > allowed and not any(call.effect == Effect.TRANSACTIONAL for call in made):
            yield (
                "too-many-calls",
                f"step {key} was called {len(made)} times; its tries and the run's claims explain {allowed}",
            )
        for call in made:
            yield from _in_time(run, journal, call)
        if any(call.effect in _CALLED for call in made):
            yield from _called(journal, key, made, intents)
        yield from _keyed(key, made, keys.get(key, set()))


def _in_time(run: RunRecord, journal: _Journal, call: Call) -> _Said:
    if call.at is None:
        return
    if run.started_at is None or call.at < run.started_at:
        before = (
            "and the run was never"
            if run.started_at is None
            else f"{_ago(run.started_at - call.at)} before the run was"
        )
        yield "timer", f"step {call.key} was called {before} started"
    for entry in journal.ended.get(call.key, ()):
        late = call.at > entry.recorded_at and entry.idempotency_key is not None and entry.outcome != Outcome.TIMEOUT
        if late and (entry.aside_at is None or call.at < entry.aside_at):
            yield (
                "call-after-entry",
                f"step {call.key} was called {_ago(call.at - entry.recorded_at)} after entry {entry.seq} was written",
            )


def _called(journal: _Journal, key: str, made: Sequence[Call], intents: dict[tuple[str, int], IntentRow]) -> _Said:
    for attempt, number in Counter(call.attempt for call in made).items():
        if attempt is None:
            continue
        here = f"attempt {attempt} of step {key}"
        intent = intents.get((key, attempt))
        these = [call for call in made if call.attempt == attempt]
        if intent is None:
            yield "call-without-intent", f"{here} was called, and has no intent"
            continue
        for effect in {call.effect for call in these if call.effect is not None} - {intent.effect}:
            yield "call-without-intent", f"{here} was called as {effect}, and its intent says {intent.effect}"
        early = [intent.written_at - call.at for call in these if call.at is not None and call.at < intent.written_at]
        if early:
            yield "call-without-intent", f"{here} was called {_ago(max(early))} before its intent was written"
        if number > 1 and intent.effect == Effect.IRREVERSIBLE:
            yield "two-calls", f"{here} is irreversible, and was called {number} times"
        known = [call.did for call in these if call.did is not None]
        if intent.state == IntentState.NOT_LANDED and any(known):
            yield "landed-unsaid", f"the intent of {here} says that it did not happen, and it did"
        by_another = any(call.did and call.idempotency_key == intent.idempotency_key for call in made)
        landed = intent.state in (IntentState.LANDED, IntentState.COMPENSATED)
        if landed and known and not any(known) and not by_another:
            yield "landed-unsaid", f"the intent of {here} is {intent.state}, and it did not happen"
    times = Counter(call.idempotency_key for call in made if call.did and call.effect == Effect.IRREVERSIBLE)
    for idempotency_key, number in times.items():
        if number > 1:
            yield (
                "two-calls",
                f"step {key} is irreversible, and {number} of its calls landed (idempotency key {idempotency_key})",
            )


def _keys_by_step(run: RunRecord, journal: _Journal) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for idempotency_key, step in journal.keys.items():
        found.setdefault(step, set()).add(idempotency_key)
    for intent in run.intents:
        found.setdefault(intent.key, set()).add(intent.idempotency_key)
    return found


def _keyed(key: str, made: Sequence[Call], allowed: set[str]) -> _Said:
    used = {call.idempotency_key for call in made if call.idempotency_key}
    if allowed and used - allowed:
        yield "one-key", f"step {key} was called with idempotency key {min(used - allowed)}, which is not its own"
    if not allowed and len(used) > 1:
        yield "one-key", f"step {key} was called with {len(used)} idempotency keys"


def _ago(microseconds: int) -> str:
    return f"{microseconds / 1_000_000:.3f} s"


# ---------------------------------------------------------------------- the command


_OF_CALL: Final[dict[str, Any]] = {
    "run": UUID,
    "key": str,
    "attempt": int,
    "idempotency_key": str,
    "effect": Effect,
    "did": bool,
    "at": float,
    "excused": bool,
}
_OF_ACKNOWLEDGED: Final[dict[str, Any]] = {
    "run": UUID,
    "seq": int,
    "key": str,
    "state": State,
    "letter": MailKind,
    "number": int,
}


def read_calls(lines: Iterable[str]) -> dict[UUID, list[Call]]:
    """Calls by run, from JSON lines.

    Raises:
        ValueError: a line is none.
    """
    found: dict[UUID, list[Call]] = {}
    for number, line in enumerate(lines, 1):
        told = _line(number, line, _OF_CALL)
        if "key" not in told:
            raise ValueError(f"line {number} has no key: it is of no step")
        run, at = told.pop("run"), told.pop("at", None)
        call = Call(**told, at=None if at is None else int(at * 1_000_000))
        found.setdefault(run, []).append(call)
    return found


def read_acknowledged(lines: Iterable[str]) -> dict[UUID, Acknowledged]:
    """What was acknowledged, by run, from JSON lines.

    Raises:
        ValueError: a line is none.
    """
    found: dict[UUID, Acknowledged] = {}
    for number, line in enumerate(lines, 1):
        told = _line(number, line, _OF_ACKNOWLEDGED)
        if ("seq" in told) != ("key" in told):
            raise ValueError(f"line {number}: an entry has both, seq and key")
        if "number" in told and "letter" not in told:
            raise ValueError(f"line {number}: number is of a letter, and it names none")
        run = found.setdefault(told["run"], Acknowledged())
        if "seq" in told:
            run.entries.append((told["seq"], told["key"]))
        run.state = told.get("state", run.state)
        if "letter" in told:
            kind = told["letter"]
            run.letters[kind] = max(run.letters[kind], told.get("number", 1))
    return found


def _line(number: int, line: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says; what is null is left out."""
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise ValueError(f"line {number} is no JSON object: {line.strip()[:80]!r}")
    if unknown := sorted(told.keys() - fields):
        raise ValueError(f"line {number}: {unknown[0]!r} is none of {', '.join(fields)}")
    if told.get("run") is None:
        raise ValueError(f"line {number} has no run")
    return {name: _value(number, name, value, fields[name]) for name, value in told.items() if value is not None}


def _value(number: int, name: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    if kind in (UUID, Effect, State, MailKind) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return kind(value)
    raise ValueError(f"line {number}: {name} is {json.dumps(value)[:80]}, and no {_KINDS[kind]}")


_KINDS: Final[dict[Any, str]] = {
    UUID: "run's id",
    str: "text",
    int: "whole number",
    float: "moment in seconds",
    bool: "true or false",
    Effect: "effect=",
    State: "state of a run",
    MailKind: "kind of a letter",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        "python -m replaykit.testing.checker",
        description=__doc__,  # with the rules, and what the files hold
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dsn", metavar="DSN", help="URL of the database")
    parser.add_argument("--schema", default="replaykit", help="the schema that holds replaykit's tables")
    parser.add_argument("--acknowledged", type=Path, metavar="FILE", help="what somebody was told, as JSON lines")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="what the other side saw, as JSON lines")
    given = parser.parse_args(arguments)
    checked = Checked()
    try:
        calls = _read(given.calls, read_calls)
        acknowledged = _read(given.acknowledged, read_acknowledged)
        database = Database(given.dsn, given.schema, name="checker")
        asyncio.run(database.check())
        connection = database.connect_sync()
        try:
            for broken in check(connection, calls, acknowledged, checked):
                checked.broken += 1
                sys.stdout.write(f"{broken}\n")
        finally:
            connection.close()
    except (ReplaykitError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    looked = f"{checked.runs} runs, {checked.entries} entries, {checked.intents} intents, {checked.letters} letters"
    told = f"{looked}, {checked.calls} calls: "
    sys.stdout.write(told + (f"{checked.broken} times a rule is broken\n" if checked.broken else "no rule is broken\n"))
    return 1 if checked.broken else 0


def _read(path: Path | None, read: Any) -> Any:
    if path is None:
        return {}
    with path.open(encoding="utf-8") as lines:
        try:
            return read(line for line in lines if line.strip())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())

"""The world outside: what has become of the calls that bodies of steps with an effect made.

A call lands, or never does, at a moment of its own, whether its worker lives or not: a request may be on its way for long.
Who asks what became of it is told the truth, and what is said not to have landed will never land: that the old worker is
dead, and nothing of it on the way, is what `NotLanded` assumes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from replaykit.replay.entries import Closing, Effect, Entry, Intent, IntentState, Kind, MailKind, Outcome, State, Unit
from replaykit.replay.requests import CallStep
from tests.simulator.database import Mismatch, Row

__all__ = ["Call", "World", "in_doubt"]


@dataclass(eq=False, slots=True)
class Call:
    """What one body asked of the world. `landed` None: it is on its way."""

    run: UUID
    key: str
    attempt: int
    idempotency_key: str
    effect: Effect
    value: int
    landed: bool | None = None


@dataclass(slots=True)
class World:
    """All receivers of all calls.

    Attributes:
        calls: by run and step, in the order in which they were begun.
        by_hand: what a person did instead of a step: run and step.
        rows: what bodies of transactional steps wrote: how often, by run and step.
        unsaid: calls of which a reconciler could say nothing, by run, step and attempt.
    """

    calls: dict[tuple[UUID, str], list[Call]] = field(default_factory=dict)
    by_hand: set[tuple[UUID, str]] = field(default_factory=set)
    rows: Counter[tuple[UUID, str]] = field(default_factory=Counter)
    unsaid: set[tuple[UUID, str, int]] = field(default_factory=set)
    _known: dict[tuple[UUID, str], int] = field(
        default_factory=dict
    )  # what receivers that recognise keys have answered
    _keys: dict[tuple[UUID, str, str], str] = field(default_factory=dict)  # by run, step and digest
    _digests: dict[tuple[UUID, str], tuple[str, str]] = field(default_factory=dict)  # by run and key

    def of(self, run: UUID, key: str) -> list[Call]:
        """The calls of a step."""
        return self.calls.get((run, key), [])

    def begin(self, run: UUID, asked: CallStep, attempt: int, value: int) -> Call:
        """A body makes its call.

        Raises:
            Mismatch: an earlier call of an irreversible step landed or may yet; one call has two keys, or one key two calls.
        """
        assert asked.effect is not None
        key, digest, sent = asked.key, asked.input.digest, asked.idempotency_key
        if not sent or self._keys.setdefault((run, key, digest), sent) != sent:
            raise Mismatch(f"the receiver sees {key} with one input under two keys, now {sent!r}")
        if self._digests.setdefault((run, sent), (key, digest)) != (key, digest):
            raise Mismatch(f"the receiver sees two calls under one key: {key} and {self._digests[run, sent]}")
        call = Call(run, key, attempt, sent, asked.effect, value)
        for earlier in self.of(run, key):
            if call.effect is Effect.IRREVERSIBLE and earlier.landed is not False:
                how = "on its way" if earlier.landed is None else "landed"
                raise Mismatch(
                    f"attempt {attempt} of {key}, which is irreversible, is made while {earlier.attempt} is {how}"
                )
        if (run, key) in self.by_hand:
            raise Mismatch(f"{key} is made after a person has done it by hand")
        self.calls.setdefault((run, key), []).append(call)
        return call

    def floating(self) -> list[Call]:
        """Calls on their way."""
        calls = (c for made in self.calls.values() for c in made)
        return [c for c in calls if c.landed is None and c.effect is not Effect.TRANSACTIONAL]

    def answer(self, call: Call) -> int:
        """What the receiver of a call that landed answered."""
        return self._known.get((call.run, call.idempotency_key), call.value)

    def land(self, call: Call) -> None:
        """It reaches its receiver."""
        assert call.landed is None
        call.landed = True
        if call.effect is Effect.IDEMPOTENT:
            call.value = self._known.setdefault((call.run, call.idempotency_key), call.value)
        elif sum(c.landed is True for c in self.of(call.run, call.key)) > 1:
            raise Mismatch(f"the irreversible call of {call.key} landed twice")

    def has_landed(self, call: Call) -> bool:
        """Whether it did, or another one that its receiver takes for the same."""
        return bool(call.landed) or (
            call.effect is Effect.IDEMPOTENT and (call.run, call.idempotency_key) in self._known
        )

    def never(self, run: UUID, key: str, idempotency_key: str | None = None) -> None:
        """What is on its way of a step, or of one call of it, will not arrive."""
        for call in self.of(run, key):
            if call.landed is None and idempotency_key in (None, call.idempotency_key):
                call.landed = False

    def ask(self, run: UUID, intent: Intent) -> int | None:
        """The truth about the call of an attempt: what its receiver answered; None: it did not land, and never will."""
        if intent.effect == Effect.IDEMPOTENT:
            if (run, intent.idempotency_key) in self._known:
                return self._known[run, intent.idempotency_key]
            self.never(run, intent.key, intent.idempotency_key)
            return None
        for call in self.of(run, intent.key):
            if call.landed and call.attempt == intent.attempt:
                return call.value
        self.never(run, intent.key)
        return None

    # ------------------------------------------------------------------ what must hold

    def check_commit(self, row: Row, unit: Unit) -> None:
        """What a unit says of calls is what the world says; a person's word is about its own attempt."""
        if unit.within is not None:
            self.rows[row.id, unit.within] += 1
        for closing in unit.closings:
            self._check_closing(row, closing)
        for entry in unit.entries:
            if entry.kind == Kind.STEP and entry.mailbox_id is not None:
                letter = next(m for m in row.mailbox if m.id == entry.mailbox_id)
                body = json.loads(letter.body or "{}")
                if (
                    letter.kind != MailKind.RESOLVE
                    or body["key"] != entry.key
                    or (body["attempt"] != entry.attempt and entry.outcome != Outcome.CANCELLED)
                ):
                    raise Mismatch(f"a word on attempt {body.get('attempt')} of {body.get('key')} answered {entry.key}")

    def _check_closing(self, row: Row, closing: Closing) -> None:
        intent = row.intents.get((closing.key, closing.attempt))
        if intent is None:
            raise Mismatch(f"attempt {closing.attempt} of {closing.key} is closed, it has no intent")
        calls = [c for c in self.of(row.id, closing.key) if c.attempt == closing.attempt]
        known = (row.id, intent.idempotency_key) in self._known
        landed = known or any(map(self.has_landed, calls)) or (row.id, closing.key) in self.by_hand
        what = f"attempt {closing.attempt} of {closing.key} is closed {closing.state} by {closing.by}"
        if closing.state == IntentState.LANDED:
            self._check_with(row, what, closing.key)
        if closing.state == IntentState.COMPENSATED:
            self._check_with(row, what, f"~undo:{closing.key}")
        if closing.state in (IntentState.LANDED, IntentState.COMPENSATED) and not landed:
            raise Mismatch(f"{what}, and did not land")
        if closing.state == IntentState.NOT_LANDED and intent.effect in (Effect.IDEMPOTENT, Effect.IRREVERSIBLE):
            if any(c.landed for c in calls):
                raise Mismatch(f"{what}, and did land")
            if any(c.landed is None for c in calls):
                raise Mismatch(f"{what}, and is on its way")

    def _check_with(self, row: Row, what: str, key: str) -> None:
        """What says so is committed with it, or before."""
        if not any(e.key == key and e.outcome == Outcome.OK for e in row.entries):
            raise Mismatch(f"{what}, and the entry of {key} is not committed")

    def check_end(self, row: Row) -> None:
        """Of a run that has ended: no call is left open, and rows and entries agree with the world."""
        untold = any(e.kind == Kind.CANCEL and e.output is not None for e in row.entries)
        for intent in row.intents.values():
            settled = intent.resolved and intent.state != IntentState.OPEN
            if not settled and not (untold and intent.state == IntentState.UNKNOWN):
                raise Mismatch(f"the run ended {row.state}, attempt {intent.attempt} of {intent.key} is {intent.state}")
            calls = [c for c in self.of(row.id, intent.key) if c.attempt == intent.attempt]
            if intent.state == IntentState.NOT_LANDED and any(c.landed for c in calls):
                raise Mismatch(f"attempt {intent.attempt} of {intent.key} is not_landed, and landed")
        for entry in row.entries:
            if entry.key.startswith("~undo:") and entry.outcome == Outcome.OK:
                self._check_undone(row, entry.key.removeprefix("~undo:"))
        written: Counter[str] = Counter()
        for entry in row.entries:
            failed = entry.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
            if failed and entry.key.startswith("~undo:") and entry.mailbox_id is None:
                raise Mismatch(f"entry {entry.seq} says that {entry.key} failed, and no person let it fail")
            if entry.kind == Kind.STEP and entry.outcome == Outcome.OK and entry.reuses is None:
                written[entry.key] += entry.mailbox_id is None
                self._check_entry(row, entry)
        for (run, key), calls in self.calls.items():
            rows = self.rows[run, key]
            if run == row.id and calls[-1].effect is Effect.TRANSACTIONAL and rows != written[key]:
                raise Mismatch(f"{rows} rows of {key} are committed, the journal has {written[key]} entries")
        if row.state is State.SUCCEEDED and untold:
            raise Mismatch("a run that could not be told to end succeeded")

    def _check_undone(self, row: Row, key: str) -> None:
        """The call that was undone says so."""
        made = [i for (of, _), i in row.intents.items() if of == key]
        if made and max(made, key=lambda i: i.attempt).state != IntentState.COMPENSATED:
            raise Mismatch(f"{key} is undone, and its intent is {max(made, key=lambda i: i.attempt)}")
        calls = self.of(row.id, f"~undo:{key}")
        by_hand = (row.id, f"~undo:{key}") in self.by_hand
        acting = [c for c in calls if c.effect is not Effect.TRANSACTIONAL]
        if acting and not by_hand and not any(map(self.has_landed, acting)):
            raise Mismatch(f"{key} is undone, and the world does not know of it")

    def _check_entry(self, row: Row, entry: Entry) -> None:
        """A result is what the world answered."""
        calls = self.of(row.id, entry.key)
        if not calls or entry.mailbox_id is not None or calls[-1].effect is Effect.TRANSACTIONAL:
            return
        values = [json.dumps(c.value) for c in calls if self.has_landed(c)]
        if entry.output not in (*values, "null"):
            raise Mismatch(f"entry {entry.seq} ({entry.key}) says {entry.output}, the world {values}")


def in_doubt(row: Row) -> list[Intent]:
    """What the view of that name has of a run."""
    return [
        i
        for i in row.intents.values()
        if (i.state == IntentState.UNKNOWN and not i.resolved)
        or (i.state == IntentState.OPEN and row.state is State.HELD)
    ]

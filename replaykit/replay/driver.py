"""One claimed run: events go in, actions come out. Decides; never acts.

    driver.replay(entries)        recorded entries, as many times as there are pages
    driver.begin(now)             the journal is read: what is still asked for is carried out
    driver.body_ended(...)        a body has an outcome
    driver.body_failed(...)       a body failed and is to be tried again
    driver.thread_ended(...)      what a try had left running has ended
    driver.body_stopped(...)      a body was stopped from here, without an outcome
    driver.mail(...)              others have written to the run
    driver.tick(now)              time went on: timers may be due
    driver.verdict(...)           what became of the unit that was sent
    driver.body_unbegun(...)      a body of a step with an effect that was to start never began
    driver.reconciled(...)        somebody has said whether a call in doubt landed
    driver.reconcile_stopped(...) the question was given up
    driver.observe(...)           a body told an identifier of the world outside
    driver.drain(now)             stop: start nothing new, hand the run back
    driver.adopt(old)             after STALE: what the dropped driver had in flight and had not committed

    driver.take_actions()         StartBody, CancelBody, Withdraw, Reconcile
    driver.may_begin(key)         whether a body whose start was put off is still wanted
    driver.next_unit()            the unit to send now, if none is in flight
    driver.phase                  whether the run is still this worker's to drive

The rules (DESIGN 4 and 5): the execution is advanced while its last entries are still in the batch, and no command is carried
out before the entries delivered before it was requested are committed, but calls of steps that are `durability="async"`. A
unit once sent is not re-cut. What is due is delivered before newly requested commands are carried out.

The body of a step with an effect begins once its intent is committed; the intent may share the unit of the entries that led to
it. A call that may have landed is asked about before anything else is made of it (`effects.py`).
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from replaykit.errors import InDoubt
from replaykit.limits import BATCH_ENTRIES_MAX, RETRY_WAIT_SECONDS_MAX, Settings
from replaykit.replay.codec import misfit as unfit
from replaykit.replay.effects import Answer, Doubt, Effects, failure, misfit
from replaykit.replay.entries import (
    FOREVER_US,
    Attempt,
    Change,
    ClaimedRun,
    Closing,
    Effect,
    Entry,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    Mail,
    Observation,
    Outcome,
    Park,
    Release,
    State,
    Unit,
    Verdict,
)
from replaykit.replay.execution import Execution
from replaykit.replay.failures import decode_error, encode_error, error_summary
from replaykit.replay.jsontext import head, merged
from replaykit.replay.keys import IdempotencyKeys
from replaykit.replay.letters import Letters
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome, timeout_outcome
from replaykit.replay.requests import CallStep, CancelStep, Command
from replaykit.replay.rewinds import Rewinds
from replaykit.replay.signature import GROWN_CHARS_MIN, GrowingInputs, same_input
from replaykit.replay.tries import Tries

__all__ = [
    "Action",
    "Answer",
    "BodyOutcome",
    "CancelBody",
    "Driver",
    "Letters",
    "Phase",
    "Reconcile",
    "StartBody",
    "Withdraw",
    "error_outcome",
    "result_outcome",
    "timeout_outcome",
]

_TIMERS_PER_TURN: Final = 1_000  # a callback that re-arms itself in the past must not keep the writer from its turn
_UNDECODED: Final = object()
_INPUT_CHARS_LITTLE: Final = 250  # nothing shorter is the record of an input that grew, nor what one grew from


class Phase(StrEnum):
    """Whose the run is."""

    ACTIVE = "active"  # this worker's
    OVER = "over"  # its unit with a change of state is committed: nobody's, or the next claim's
    LOST = "lost"  # the lease is another's
    STALE = "stale"  # this worker's, but the journal must be read again under a new token
    BROKEN = "broken"  # this worker's, to be held at once: the journal or the database refused a unit for good


@dataclass(slots=True)  # not frozen, as CancelBody is: one is made for each step, and that takes four times as long
class StartBody:
    """Run the body of this call.

    `attempt` counts for the whole life of the run; `tries`, `first_at` and `idle_seconds` are what `retry=` is asked with:
    since the step's budget began, this try included (`first_at` None: with this one). `written_at` is its intent's.
    """

    call: CallStep
    attempt: int = 1
    tries: int = 1
    first_at: int | None = None
    idle_seconds: float = 0.0
    written_at: int | None = None


@dataclass(frozen=True, slots=True)
class CancelBody:
    """The code has given up this call: stop its body if that can be done; its outcome no longer counts."""

    key: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The code has given up a call with an effect. If its body has not begun, say so (`body_unbegun`); else it goes on."""

    key: str


@dataclass(frozen=True, slots=True)
class Reconcile:
    """Ask the step's `reconcile=` whether the call of that attempt landed.

    `error` is what the attempt ended with; None: its worker died.
    """

    call: CallStep
    attempt: int
    written_at: int
    error: BaseException | None = None


Action = StartBody | CancelBody | Withdraw | Reconcile
"""What the executor is asked to do."""


class Driver:
    """Drives one claimed run.

    Args:
        run: as claimed.
        execution: of its workflow, not started yet.
        new_id: makes write ids (chance is an argument).
        settings: `evict_after_seconds`, `input_bytes_max`.
        again: the run's journal is read again within one claim: its code has run up to here before.
    """

    def __init__(
        self,
        run: ClaimedRun,
        execution: Execution,
        *,
        new_id: Callable[[], UUID],
        settings: Settings,
        again: bool = False,
    ) -> None:
        self.run = run
        self.execution = execution
        self.phase = Phase.ACTIVE
        self.words: str | None = None  # why it is BROKEN
        self.change: Change | None = None  # what made it OVER
        self.in_flight: dict[str, CallStep] = {}
        self.unit: Unit | None = None
        self._kept: dict[str, tuple[str, BodyOutcome]] = {}
        self._letters = Letters(run.mail)
        self._rewinds = Rewinds(run.rewinds, self._letters.accept_inputs_to)
        self._rewound = bool(run.rewinds)
        self._rewound_at = 0
        self._tries = Tries(run.attempts)
        self._effects = Effects.of(run.intents, run.observations) if run.intents or run.observations else Effects()
        self._given_up: list[CallStep] = []  # calls with an effect whose bodies have not begun
        self._within: set[str] = set()  # steps whose entries, not sent yet, their bodies' transactions are to commit
        self._unknown: list[str] = []  # sentences for a person
        self._doubt_wakes = 0
        self._settings = settings
        self._in_doubt = False  # held because of a call that may have landed, or of an undoing that failed
        self._rewinding = False
        self._untold = False
        self._last_error_seq = 0
        execution.replaying = again or run.claims > 1
        execution.accept_inputs_to = self._letters.accept_inputs_to
        self._new_id = new_id
        self._keys = IdempotencyKeys(run.id)
        self._evict_after = int(settings.evict_after_seconds * 1_000_000)
        self._inputs = GrowingInputs(settings.input_bytes_max)
        self._input_chars_short = min(GROWN_CHARS_MIN - 1, settings.input_bytes_max // 4)  # recorded as they are
        self._actions: list[Action] = []
        self._waiting: deque[tuple[Command, int]] = deque()
        self._asked: dict[str, CallStep] = {}  # calls in it that were not taken back
        self._entries: list[Entry] = []
        self._timer_wakes: int | None = None
        self._last_seq = 0
        self._committed = 0
        self._last_at = max(run.started_at, 0)
        self._now = max(run.started_at, run.floor)
        self._draining = False
        self._noted = False
        self._started = False

    # ------------------------------------------------------------------ events

    def replay(self, entries: Iterable[Entry]) -> None:
        """Deliver recorded entries, in order. Commands are not carried out: what stays asked for is, by `begin`."""
        execution = self.execution
        if not self._started:
            self._started = True
            execution.start()
        checked = self._checked(entries)
        execution.replay(checked)
        for _ in checked:  # of a run that is held on the way: its journal's end is still needed
            pass

    def _checked(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            if entry.seq != self._last_seq + 1:
                self.execution.hold(f"the journal has a hole: entry {entry.seq} comes after entry {self._last_seq}")
                return
            self._last_seq = entry.seq
            if entry.at > self._last_at:
                self._last_at = entry.at
            if entry.input is not None and len(entry.input) > _INPUT_CHARS_LITTLE:
                whole = self._inputs.whole(entry.name, entry.digest, entry.input)
                entry = entry if whole is entry.input else replace(entry, input=whole)
            if entry.mailbox_id is not None:
                self._letters.answered(entry)
            if self._rewound and self._rewinds.take(entry):
                continue
            if entry.kind == Kind.REWIND:
                self._rewound_at = entry.at
            if entry.error is not None:
                self._last_error_seq = entry.seq
            yield entry

    def begin(self, now: int, *, draining: bool = False) -> None:
        """The whole journal has been replayed: go on from here, or (`draining`) start nothing and hand the run back."""
        self._draining = self._draining or draining
        if not self._started:
            self.replay(())
        self._committed = self._last_seq
        self._see(now)
        if self._letters.retry_of_failed is not None:
            self._rewind(self._letters.retry_of_failed)
            return
        for command in self.execution.net_commands():
            self._wait(command, self._last_seq)
        if self._effects.known and self.execution.hold_reason is None:
            self._look_for_orphans()
        self._go_on(now)

    def _look_for_orphans(self) -> None:
        """Calls that may have landed and that the code, having got as far as it was, does not ask for any more: renamed, moved or
        dropped by a deploy. Nothing goes on before somebody has said what became of them: under another key they would be
        made again."""
        asked = self.execution.open
        for intent in self._effects.unsettled_by_others:
            if intent.key in asked:
                continue
            word = self._letters.word(intent.key, intent.attempt, misfit(intent))
            if word is not None:
                letter, body = word
                state = _STATES.get(str(body.get("word")), IntentState.UNKNOWN)
                said = Answer(state, None, "", letter.sent_by or "a person", body.get("comment"), letter.id)
                self._effects.close(
                    Closing(intent.key, intent.attempt, state, by=said.by, evidence=said.evidence), self._last_seq
                )
                continue
            if intent.state == IntentState.OPEN:
                unknown = Closing(intent.key, intent.attempt, IntentState.UNKNOWN, resolved=False)
                self._effects.close(unknown, self._last_seq)
            now_asks = ", ".join(f"{c.key} at {c.where}" for c in list(asked.values())[:3]) or "nothing"
            self._unknown.append(
                f"step {intent.key}: its call may have landed (attempt {intent.attempt}), and the code no longer asks for it "
                f"but for {now_asks}; let the code ask as it did, or {self._find_out(intent.key)}"
            )

    def _rewind(self, letter: Mail) -> None:
        """Set aside what follows the error that the run died of, by an entry of its own; then the journal is read again."""
        self._rewinding = True
        self._last_seq += 1
        self._last_at = max(self._last_at, self._now)
        self._entries.append(
            Entry(
                self._last_seq,
                f"~rewind#{self._letters.rewinds + 1}" if self._letters.rewinds else "~rewind",
                "rewind",
                Kind.REWIND,
                Outcome.OK,
                self._last_at,
                mailbox_id=letter.id,
                to_seq=self._died_of() or self._last_seq,  # its own: nothing is set aside
            )
        )

    def _died_of(self) -> int | None:
        """The seq of the error that the run died of; None if it was not a step's.

        Of a run that its code does not replay any more nobody can tell: the last error of its journal.
        """
        if self.execution.hold_reason is not None:
            return self._last_error_seq or None
        ended = self.execution.ended
        return ended.died_of if ended is not None else None

    def body_ended(self, key: str, outcome: BodyOutcome, now: int) -> None:
        """A body that was started has an outcome."""
        call = self.in_flight.pop(key, None)
        if call is None:
            return  # given up earlier: its outcome no longer counts
        if self.phase is Phase.STALE and not outcome.within:
            self._kept[key] = (call.input.digest, outcome)
        if self.phase is not Phase.ACTIVE:
            return
        self._see(now)
        if self.execution.loop.timers or self._letters.open:
            self._deliver_due()
        if self.execution.ended is None:
            self._record(call, outcome)
        elif not outcome.within:  # its end may yet be refused as stale, and the rebuilt run ask for this call again
            self._kept[key] = (call.input.digest, outcome)
        self._go_on(now)

    def body_failed(
        self, key: str, outcome: BodyOutcome, wait_seconds: float, now: int, *, lingering: bool = False
    ) -> None:
        """A body failed, and its `retry=` decided to try again after so long.

        Args:
            key: the step's.
            outcome: its error; recorded as a row of `attempts`.
            wait_seconds: the decision; at least 0.
            now: when it was made.
            lingering: the body's thread still runs (its time ran out): no new try before `thread_ended`.
        """
        call = self.in_flight.pop(key, None)
        if call is None:
            return  # given up earlier
        if self.phase not in (Phase.ACTIVE, Phase.STALE):
            return
        self._see(now)
        row = self._attempt(call, outcome, wait_seconds)
        self._close_try(call, outcome)
        self._tries.record(row)
        if call.abandoned and call.effect is not None:
            self._given_up.append(call)  # nobody waits for another try
        else:
            self._tries.wait(call, row, committed=False, lingering=lingering)
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def _attempt(self, call: CallStep, outcome: BodyOutcome, wait_seconds: float) -> Attempt:
        last = self._last_try(call.key)
        ended_at = max(self._now, outcome.started_at)
        return Attempt(
            call.key,
            self._attempt_of(call),
            outcome.started_at,
            ended_at,
            min(ended_at + math.ceil(min(wait_seconds, RETRY_WAIT_SECONDS_MAX) * 1_000_000), FOREVER_US),
            last.tries + 1 if last is not None else 1,
            last.first_at if last is not None else outcome.started_at,
            last.idle_before_next if last is not None else 0.0,
            outcome.error or "{}",
            call.input.digest,
        )

    def thread_ended(self, key: str, now: int) -> None:
        """The thread of a try whose time had run out has ended: the next try may begin."""
        waits = self._tries.waiting.get(key)
        if waits is not None and waits.lingering:
            waits.lingering = False
            if self.phase is Phase.ACTIVE:
                self._go_on(now)

    def mail(self, wakes: int, letters: list[Mail], now: int) -> None:
        """Others have written to the run: all of its mailbox, and the `wakes` it had then.

        No request to go on is among what is new: those come to runs that nobody has.
        """
        if wakes < self.run.wakes:
            return  # read before what is known already
        self.run.wakes = wakes
        self._letters.read(letters)
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    @property
    def asked_to_end(self) -> bool:
        """Whether a request to end was neither delivered nor answered."""
        return self._letters.cancel is not None

    def body_stopped(self, key: str, now: int) -> None:
        """A body was stopped by this worker (a drain) and has no outcome: it will run again elsewhere.

        From then on the run can only be handed back: to this execution the call looks as if it had been answered for. An
        intent stays open: whoever claims the run next asks what became of the call.
        """
        self.in_flight.pop(key, None)
        self._draining = True
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def body_unbegun(self, key: str, now: int) -> None:
        """A body that was to start never began, and nobody will begin it here."""
        call = self.in_flight.pop(key, None)
        if call is None:
            return
        self._unbegin(call)
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def _unbegin(self, call: CallStep) -> None:
        intent = self._effects.current(call.key) if call.has_intent else None
        if intent is not None:
            self._effects.close_unbegun(intent)
        if call.effect is not None and call.abandoned:
            self._given_up.append(call)

    def may_begin(self, key: str) -> bool:
        """Whether a body whose start was put off is still wanted. If not, it is forgotten here."""
        execution = self.execution
        wanted = (
            key in self.in_flight
            and self.phase is Phase.ACTIVE
            and not self._draining
            and execution.hold_reason is None
            and execution.ended is None
            and (not self.in_flight[key].abandoned or self._effects.began_before(key))
        )
        if not wanted:
            call = self.in_flight.pop(key, None)
            if call is not None:
                self._unbegin(call)
        return wanted

    def reconciled(self, key: str, attempt: int, answer: Answer, now: int) -> None:
        """A reconciler has answered. Its answer counts only for the attempt that it was asked about."""
        doubt = self._effects.asking.get(key)
        if doubt is None or doubt.intent.attempt != attempt or self.phase is not Phase.ACTIVE:
            return
        del self._effects.asking[key]
        self._see(now)
        if self.execution.loop.timers or self._letters.open:
            self._deliver_due()
        self._take_answer(doubt, answer)
        self._go_on(now)

    def reconcile_stopped(self, key: str, now: int) -> None:
        """A reconciler was stopped by this worker (a drain): the call stays in doubt, and is asked about elsewhere."""
        doubt = self._effects.asking.pop(key, None)
        if doubt is not None and doubt.outcome is not None:
            self._keep_error(doubt, doubt.outcome)
        self._draining = True
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def _keep_error(self, doubt: Doubt, outcome: BodyOutcome) -> None:
        """Whoever asks next is to know that the attempt has ended, and with what: else its worker would be taken for dead."""
        intent = doubt.intent
        state = intent.state if intent.state == IntentState.UNKNOWN else IntentState.OPEN
        seen = Closing(intent.key, intent.attempt, state, resolved=False, evidence=failure(outcome))
        self._effects.close(seen, self._last_seq)

    def observe(self, seen: Observation, now: int) -> None:
        """A body told an identifier: it goes into the next unit."""
        self._see(now)
        self._effects.observe(seen)

    def observed(self, key: str) -> list[tuple[str, str]]:
        """`(kind, id)` of what the step's bodies have observed, earlier attempts included, oldest first."""
        return self._effects.observed(key)

    def tick(self, now: int) -> None:
        """Time went on."""
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def drain(self, now: int) -> None:
        """Start nothing new; once no body is in flight the run is handed back."""
        self._draining = True
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

    def verdict(self, verdict: Verdict, words: str | None, now: int) -> None:
        """The fate of the unit that was sent."""
        unit = self.unit
        assert unit is not None, "a verdict without a unit"
        if verdict is Verdict.STALE:
            self.phase = Phase.STALE
            return
        self.unit = None
        if verdict is Verdict.OK:
            if unit.entries:
                self._committed = unit.entries[-1].seq
            if unit.attempts:
                self._tries.committed(unit.attempts)
            if unit.intents:
                self._effects.committed(unit.intents)
            if self._rewinding:
                self.phase = Phase.STALE
            elif unit.change is not None:
                self.phase = Phase.OVER
                self.change = unit.change
            else:
                self._go_on(now)
        elif verdict is Verdict.FENCED:
            self.phase = Phase.LOST
        else:
            self.phase = Phase.BROKEN
            self.words = (
                f"the database refused an entry: {words}"
                if verdict is Verdict.REFUSED
                else f"rows of another write stand in the place of entry {unit.entries[0].seq if unit.entries else '-'}: "
                "a defect of replaykit, please report it"
            )

    def adopt(self, old: Driver) -> None:
        """Take over, after a refusal, what the dropped driver had in flight and what it had not committed.

        By key and input digest, so that no body runs twice; called after `replay`, before `begin`.
        """
        kept = dict(old._kept)
        kept.update((entry.key, (entry.digest or "", outcome)) for entry, outcome in old._uncommitted())
        asked = self.execution.open
        unseen = old.unit.observations if old.unit is not None else ()
        if old._effects.known or old._effects.outgoing or unseen:
            self._effects.adopt(old._effects, unseen, asked)
        self._tries.adopt((*(old.unit.attempts if old.unit is not None else ()), *old._tries.rows))
        failed = {(row.key, row.attempt) for row in self._tries.rows}
        for closing in old._closing_by:
            if (closing.key, closing.attempt) in failed and closing.by is None:  # an answer is asked for again
                self._effects.close(closing, 0)
        for key, waits in old._tries.waiting.items():
            row, call = self._tries.last(key), asked.get(key)
            if waits.lingering and row is not None and call is not None and not call.abandoned:
                self._tries.wait(call, row, committed=row not in self._tries.rows, lingering=True)
        for key, (digest, outcome) in kept.items():
            call = asked.get(key)
            if call is not None and call.input.digest == digest:
                self._kept[key] = (digest, outcome)
        for key, before in old.in_flight.items():
            call = asked.get(key)
            wanted = call is not None and (not call.abandoned or call.effect is not None)
            if call is not None and wanted and call.input.digest == before.input.digest:
                self.in_flight[key] = call
            else:
                self._actions.append(CancelBody(key))
        self._draining = old._draining

    def unrecorded(self) -> list[str]:
        """Keys of steps that have ended here and whose entries do not stand."""
        return [entry.key for entry in self._standing_by if entry.kind == Kind.STEP]

    @property
    def _standing_by(self) -> list[Entry]:
        """Entries that were made and are not known to stand: on their way, or not sent."""
        return [*(self.unit.entries if self.unit is not None else ()), *self._entries]

    @property
    def _closing_by(self) -> list[Closing]:
        """The same of closings."""
        return [*(self.unit.closings if self.unit is not None else ()), *self._effects.closings]

    def _uncommitted(self) -> Iterator[tuple[Entry, BodyOutcome]]:
        """Entries of bodies that this driver made and that do not stand, with the outcomes they were made of.

        What is used again, answered by somebody or written by its body's own transaction is found again.
        """
        unit = self.unit
        within = self._within | ({unit.within} if unit is not None and unit.within is not None else set())
        closings = {(c.key, c.attempt): c for c in self._closing_by}
        for entry in self._standing_by:
            if entry.kind != Kind.STEP or entry.reuses is not None or entry.mailbox_id is not None:
                continue
            closing = closings.get((entry.key, entry.attempt))
            if entry.key in within or entry.outcome == Outcome.CANCELLED or (closing is not None and closing.by):
                continue
            landed = IntentState(closing.state) if closing is not None else None
            at = entry.started_at or 0
            yield entry, BodyOutcome(Outcome(entry.outcome), entry.output, entry.error, _UNDECODED, at, landed)

    # ------------------------------------------------------------------ what to do

    def take_actions(self) -> list[Action]:
        """What to start and to stop now."""
        actions, self._actions = self._actions, []
        execution = self.execution
        if execution.hold_reason is None and execution.ended is None:
            return actions
        # What came later in the same turn has held or ended the run: what was to begin in it does not.
        return [a for a in actions if type(a) is not StartBody or self.may_begin(a.call.key)]

    @property
    def next_wake(self) -> int | None:
        """Microseconds since 1970 at which `tick` is due, or None."""
        execution = self.execution
        if not execution.loop.timers and not self._tries.waiting:
            return None
        if (
            self.phase is not Phase.ACTIVE
            or execution.hold_reason is not None
            or execution.ended is not None
            or self._draining
        ):
            return None
        return _earliest(execution.next_deadline, self._tries.next_due)

    def next_unit(self) -> Unit | None:
        """The unit to send now; it is in flight until its verdict."""
        if self.unit is not None or self.phase is not Phase.ACTIVE:
            return None
        effects = self._effects
        if effects.known and (self._draining or self.execution.hold_reason is not None):
            self._withdraw_written()
        if not self._entries and self.in_flight and not effects.outgoing and self._may_wait():
            return None
        entries, self._entries = self._entries, []
        within = None
        if self._within or len(entries) > BATCH_ENTRIES_MAX:
            entries, within = self._cut(entries)
        change = self._change() if not self._entries else None
        note = None
        if self.execution.hold_reason is not None and not self._noted and change is None:
            note = self.execution.hold_reason
            self._noted = True
        attempts = self._tries.sent() if self._tries.rows else []
        if not entries and not attempts and change is None and note is None and not effects.outgoing:
            return None
        wakes = None
        if self._timer_wakes is not None:
            wakes = self._timer_wakes if any(e.kind == Kind.TIMER for e in entries) else None
            if not self._entries:
                self._timer_wakes = None
        self.unit = unit = Unit(self.run.id, self.run.token, self._new_id(), entries, change, attempts, wakes, note)
        if effects.outgoing:
            unit.intents, unit.closings, unit.observations = effects.take(entries[-1].seq if self._entries else None)
        unit.within = within
        return unit

    def _cut(self, entries: list[Entry]) -> tuple[list[Entry], str | None]:
        """What goes into the next unit, the rest put back, and the step in whose transaction it is written: one a unit."""
        end, within = min(len(entries), BATCH_ENTRIES_MAX), None
        for n, entry in enumerate(entries[:end]):
            if entry.key in self._within:
                if within is not None:
                    end = n
                    break
                within = entry.key
        if within is not None:
            self._within.discard(within)
        self._entries = entries[end:]
        return entries[:end], within

    def _withdraw_written(self) -> None:
        """Bodies that were to begin do not begin in a run that is held or handed back."""
        for key in list(self._effects.written):
            self._effects.withdraw(key)
        for intent in self._effects.lapsed:
            self._effects.close_unbegun(intent)

    def _may_wait(self) -> bool:
        """Whether there is nothing to say before a body ends."""
        execution = self.execution
        return execution.hold_reason is None and execution.ended is None and not self._tries.rows

    # ------------------------------------------------------------------ decisions

    def _change(self) -> Change | None:
        execution = self.execution
        if self._rewinding:
            return None
        if execution.hold_reason is not None:
            if self.in_flight or self._effects.asking:
                return None
            if self._untold:
                return Finish(State.CANCELLED)
            return Hold(execution.hold_reason, self._doubt_wakes if self._in_doubt else self.run.wakes)
        ended = execution.ended
        if ended is not None:
            if ended.cancelled:
                return Finish(State.CANCELLED)
            state = State.SUCCEEDED if ended.error is None else State.FAILED
            return Finish(state, ended.output, ended.error)
        if self.in_flight or self._effects.asking or (self._tries.waiting and self._tries.lingering):
            return None
        if self._draining:
            return Release()
        if self._asked or self._waiting or self._effects.written or self._kept_asked():
            return None
        return self._park()

    def _park(self) -> Park | None:
        """Leave memory, if all that is left to do is a while away."""
        deadline, next_try = self.execution.next_deadline, self._tries.next_at
        until = _earliest(deadline, next_try)
        if until is None or until - self._now <= self._evict_after:
            return None
        return Park("retry" if until == next_try else "timer", until, self.run.wakes)

    def _kept_asked(self) -> bool:
        asked = self.execution.open  # a plain call given up is never asked for again, though its body had an outcome
        return any(key in asked and (not asked[key].abandoned or asked[key].effect) for key in self._kept)

    def _see(self, now: int) -> None:
        """Time as this run sees it: never back, never below the due time it was claimed for."""
        if now > self._now:
            self._now = now
        if self._last_at > self._now:
            self._now = self._last_at

    def _go_on(self, now: int) -> None:
        self._see(now)
        if self._rewinding:
            return
        asked = self._letters.open
        if asked or self.execution.loop.timers:
            self._deliver_due()
        if self._waiting:
            self._carry_out()
        if self._tries.waiting:
            self._try_again()
        if self._effects.written or self._given_up or self._unknown:
            self._go_on_with_effects()
        if asked and self.execution.hold_reason is not None:
            self._end_untold()

    def _end_untold(self) -> None:
        """A request to end, of a run that is held: its code cannot be told, so it ends as asked, once no body runs."""
        letter = self._letters.cancel
        if self._in_doubt or self._effects.asking:
            return  # the next claim tells it
        if letter is not None and not self.in_flight and not self.execution.may_be_cancelled:
            for intent in self._effects.open:
                self._effects.close(Closing(intent.key, intent.attempt, IntentState.UNKNOWN, resolved=False), 0)
            reason = json.dumps({"untold": self.execution.hold_reason})
            self._untold = True
            self._deliver(self._cancel_entry(letter, reason), _UNDECODED)

    def _deliver_due(self) -> None:
        """Timers and a request to end, in the order of their own times; a tie goes to the request."""
        if self._draining:
            return
        execution = self.execution
        for _ in range(_TIMERS_PER_TURN):
            letter = self._letters.cancel if self._letters.open and execution.may_be_cancelled else None
            deadline = execution.next_deadline if execution.hold_reason is None and execution.ended is None else None
            due = deadline is not None and deadline <= self._now
            if letter is not None and not (due and deadline is not None and deadline < letter.sent_at):
                self._deliver_cancel(letter)
            elif due and deadline is not None:
                self._deliver_timer(deadline)
            else:
                return

    def _deliver_timer(self, deadline: int) -> None:
        n = self.execution.timers_fired + 1
        if self._timer_wakes is None:
            self._timer_wakes = self.run.wakes
        self._deliver(
            Entry(0, f"~timer#{n}", "timer", Kind.TIMER, Outcome.OK, max(self._now, deadline), due_at=deadline),
            _UNDECODED,
        )

    def _deliver_cancel(self, letter: Mail) -> None:
        self._deliver(self._cancel_entry(letter, None), _UNDECODED)

    def _cancel_entry(self, letter: Mail, output: str | None) -> Entry:
        n = self._letters.cancels + 1
        key = "~cancel" if n == 1 else f"~cancel#{n}"
        entry = Entry(0, key, "cancel", Kind.CANCEL, Outcome.OK, self._now, output=output, mailbox_id=letter.id)
        self._letters.answered(entry)
        return entry

    def _record(self, call: CallStep, outcome: BodyOutcome) -> None:
        """A body has ended: what it came to, and what that says of its call."""
        if call.effect is None and call.compensates is None:
            self._record_step(call, outcome)
        else:
            self._record_effect(call, outcome)

    def _record_step(
        self, call: CallStep, outcome: BodyOutcome, mailbox_id: int | None = None, attempt: int | None = None
    ) -> None:
        text = call.input.text
        if len(text) > self._input_chars_short:
            whole = self._inputs.record_whole if call.effect is not None else self._inputs.record
            text = whole(call.name, call.input)
        if attempt is None:
            told = self._tries.known or self._rewound or self._effects.known
            attempt = self._attempts_before(call.key) + 1 if told else 1
        entry = Entry(
            0,
            call.key,
            call.name,
            Kind.STEP,
            outcome.outcome,
            self._now,
            attempt,
            text,
            outcome.output,
            outcome.error,
            call.input.digest,
            call.idempotency_key or self._idempotency_key(call),
            outcome.started_at,
            mailbox_id=mailbox_id,
        )
        if outcome.within:
            self._within.add(call.key)
        self._deliver(entry, outcome.value)

    def _reuse(self, call: CallStep, aside: Entry) -> None:
        """A result that a rewind had set aside: the same call gets it again, and no body runs."""
        entry = replace(
            aside,
            at=self._now,
            input=self._inputs.record(call.name, call.input),
            digest=call.input.digest,
            reuses=aside.reuses or aside.seq,
        )
        self._deliver(entry, _UNDECODED)

    def _idempotency_key(self, call: CallStep) -> str | None:
        if call.idempotency_key or call.runs_ahead:
            return call.idempotency_key or None
        if not self._rewound and not self._tries.known and not self._effects.known:
            return self._keys.of(call.key)
        first = self._effects.first(call.key)
        if first is not None:
            return self._keys.of(call.key if not _is_another(call, first) else f"{call.key}\0{call.input.digest}")
        return self._rewinds.idempotency_key(call, self._keys, self._tries.first_digest(call.key))

    def _last_try(self, key: str) -> Attempt | None:
        """The step's last failed try within its budget, which begins anew with each rewind."""
        return self._tries.last(key, self._rewinds.attempts_before(key), self._rewound_at)

    def _attempts_before(self, key: str) -> int:
        """How many attempts of the step there were, in the whole life of the run."""
        before = max(self._tries.count(key), self._rewinds.attempts_before(key))
        return max(before, self._effects.attempts_before(key)) if self._effects.known else before

    def _attempt_of(self, call: CallStep) -> int:
        """Which attempt of the step is the one that runs or is to run now."""
        intent = self._effects.current(call.key) if call.has_intent else None
        return intent.attempt if intent is not None else self._attempts_before(call.key) + 1

    def _deliver(self, entry: Entry, value: Any) -> None:
        self._last_seq += 1
        entry.seq = self._last_seq
        if entry.at < self._last_at:
            entry.at = self._last_at
        self._last_at = entry.at
        self._entries.append(entry)
        if self._rewound:
            self._rewinds.redone(entry.key)
        execution = self.execution
        if execution.hold_reason is not None and not execution.may_be_cancelled:
            return  # recorded; the next replay delivers it
        execution.replaying = False
        commands = execution.deliver(entry) if value is _UNDECODED else execution.deliver(entry, value)
        for command in commands:
            if type(command) is CancelStep:
                if not self._withdraw(command.key):
                    self._wait(command, entry.seq)
            elif type(command) is CallStep and command.runs_ahead and self._is_new(command):
                self._start(command)
            elif (
                type(command) is CallStep
                and command.effect is not None
                and command.has_intent
                and self._is_new(command)
            ):
                self._write_intent(command)  # with the entries that led to it, in one commit
            else:
                self._wait(command, entry.seq)

    def _is_new(self, call: CallStep) -> bool:
        """Whether a call may be carried out before the entries that led to it are committed: nothing of it is known yet."""
        execution = self.execution
        return (
            not self._draining
            and execution.hold_reason is None
            and execution.ended is None
            and call.key not in self._kept
            and call.key not in self.in_flight
            and not self._tries.count(call.key)
            and not self._rewound
            and self._effects.current(call.key) is None
        )

    def _wait(self, command: Command, seq: int) -> None:
        """Carry it out once the entry of that seq is committed."""
        self._waiting.append((command, seq))
        if type(command) is CallStep:
            self._asked[command.key] = command

    def _withdraw(self, key: str) -> bool:
        """Take back a call that has not been carried out; it is passed over when its turn comes. A step with an effect gets
        an entry all the same: whoever waits for what became of it goes by the journal alone."""
        call = self._asked.pop(key, None)
        if call is None and key in self._effects.written:
            call = self._effects.written[key].call
            self._effects.withdraw(key)
        if call is None and key in self._tries.waiting and self._tries.waiting[key].call.effect is not None:
            call = self._tries.waiting.pop(key).call
        if call is not None and call.effect is not None:
            self._given_up.append(call)
        return call is not None

    def _carry_out(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][1] <= self._committed:
            execution = self.execution
            if execution.hold_reason is not None or execution.ended is not None:
                self._asked.clear()
                waiting.clear()  # bodies that an ended function gave up are stopped once its end is committed
                return
            if self._draining:
                return
            command, _ = waiting.popleft()
            if type(command) is CancelStep:
                waits = self._tries.waiting.pop(command.key, None)
                call = self.in_flight.get(command.key)
                if waits is not None and waits.call.effect is not None:
                    self._given_up.append(waits.call)
                elif call is not None and call.effect is not None:
                    self._actions.append(Withdraw(command.key))
                elif self.in_flight.pop(command.key, None) is not None:
                    self._actions.append(CancelBody(command.key))
                continue
            assert type(command) is CallStep
            if self._asked.pop(command.key, None) is None:
                continue  # withdrawn
            self._answer_or_start(command)

    def _answer_or_start(self, call: CallStep) -> None:
        nothing_known = not self._kept and not self._rewound and not self._tries.known and not self._effects.known
        if nothing_known and call.effect is None:
            if call.key not in self.in_flight:
                self._start(call)
            return
        kept = self._kept.pop(call.key, None)
        aside = self._rewinds.result_for(call)
        if kept is not None and kept[0] == call.input.digest:
            self._record(call, kept[1])
            self._deliver_due()
        elif aside is not None:
            self._reuse(call, aside)
            self._deliver_due()
        elif call.key not in self.in_flight and call.key not in self._tries.waiting and not self._is_answered(call):
            self._begin_in_time(call)

    def _begin_in_time(self, call: CallStep) -> None:
        """Begin it, once the try before has its row and the next one's time has come."""
        last = self._last_try(call.key)
        stands = last not in self._tries.rows
        if last is not None and (last.next_at > self._now or not stands):
            self._tries.wait(call, last, committed=stands)
        else:
            self._begin(call)

    def _try_again(self) -> None:
        execution = self.execution
        if self._draining or execution.hold_reason is not None or execution.ended is not None:
            return
        for waits in self._tries.due(self._now):
            doubt = self._effects.doubt(waits.call, self._now) if waits.call.effect is not None else None
            if doubt is not None:  # the other side has forgotten its key meanwhile
                self._ask(doubt)
            else:
                self._begin(waits.call)

    def _start(self, call: CallStep) -> None:
        if not call.runs_ahead:
            call.idempotency_key = self._idempotency_key(call) or ""
        self.in_flight[call.key] = call
        if not self._tries.known and not self._rewound and not self._effects.known:
            self._actions.append(StartBody(call))
            return
        call.shift = max(0, self._rewound_at - call.asked_at)
        intent = self._effects.current(call.key) if call.has_intent else None
        written_at = intent.written_at if intent is not None else None
        attempt = self._attempt_of(call)
        last = self._last_try(call.key)
        if last is None:
            self._actions.append(StartBody(call, attempt, written_at=written_at))
        else:
            tried = last.tries + 1, last.first_at, last.idle_before_next
            self._actions.append(StartBody(call, attempt, *tried, written_at))

    # ------------------------------------------------------------------ effects

    def _begin(self, call: CallStep) -> None:
        """Its body is to run: at once, or once its intent is committed."""
        before = self._effects.unsettled(call.key) if self._effects.known else None
        if before is not None and before.state == IntentState.OPEN and call.has_intent:
            self._start(call)  # an idempotent call whose worker died: again, under its intent, with its key
            return
        if before is not None:  # a person said that it may go on
            self._effects.close(Closing(before.key, before.attempt, IntentState.UNKNOWN, by="retry"), self._last_seq)
        if call.has_intent:
            self._write_intent(call)
        else:
            self._start(call)

    def _write_intent(self, call: CallStep) -> None:
        assert call.effect is not None
        call.idempotency_key = self._idempotency_key(call) or ""
        attempt = self._attempts_before(call.key) + 1
        key, text = call.idempotency_key, call.input.text
        self._effects.write(
            call, Intent(call.key, attempt, call.name, call.effect, key, text, self._now), self._last_seq
        )

    def _is_answered(self, call: CallStep) -> bool:
        """Whether something else is to be made of a call than to run its body."""
        effects, key = self._effects, call.key
        if key in effects.written or key in effects.asking:
            return True
        unsettled = effects.unsettled(key) if effects.known else None
        if unsettled is not None:
            word = self._letters.word(key, unsettled.attempt, misfit(unsettled))
            if word is not None:
                doubt = Doubt(call, unsettled, effects.outcome_of(unsettled))
                self._take_answer(doubt, self._answer(doubt, *word))
                return True
        doubtful = effects.doubt(call, self._now) if effects.known else None
        before = doubtful.intent if doubtful is not None else unsettled
        if before is not None and _is_another(call, before):
            asked = f"it was {before.name} with {head(before.input)}, the code now asks for {call.name} with "
            asked += f"{head(call.input.text)} at {call.where}"
            self._say_unknown(Doubt(call, before, effects.outcome_of(before)), asked)
        elif doubtful is not None:
            self._ask(doubtful)
        elif call.abandoned and unsettled is None:
            for intent in effects.lapsed:
                if intent.key == key:
                    effects.close_unbegun(intent)
            self._record_cancelled(call, None)
        elif call.effect is not None and (landed := self._rewinds.landed(call)) is not None:
            self.execution.hold(
                f"step {key}: before the retry its call landed with input {head(landed.input)}, the code now asks "
                f"for it with {head(call.input.text)} at {call.where}: it is not made twice; let the code ask as it did, "
                "or start a new run"
            )
        else:
            return False
        return True

    def _go_on_with_effects(self) -> None:
        execution = self.execution
        while self._given_up:
            calls, self._given_up = self._given_up, []
            if self._draining or execution.hold_reason is not None:
                break  # the next claim finds them given up
            for call in calls:
                self._answer_or_start(call)
            self._carry_out()
        if not self._draining and execution.hold_reason is None:
            for written in self._effects.to_begin:
                del self._effects.written[written.call.key]
                self._start(written.call)
        if self._unknown:
            sentences, self._unknown = self._unknown, []
            if execution.hold_reason is None:
                self._in_doubt = True
                self._doubt_wakes = self.run.wakes
                execution.hold("; ".join(sentences))

    def _record_effect(self, call: CallStep, outcome: BodyOutcome) -> None:
        """An attempt of a step with an effect, or of an undoing, has ended."""
        intent = self._effects.current(call.key) if call.has_intent else None
        if call.compensates is not None and outcome.landed is IntentState.LANDED and outcome.outcome != Outcome.OK:
            # Nobody gets what an undoing returns.
            outcome = BodyOutcome(Outcome.OK, "null", None, None, outcome.started_at)
        if call.compensates is not None and outcome.outcome != Outcome.OK:
            self._undoing_failed(call, intent, outcome)
        elif intent is None:
            self._settle(call, outcome, None)
        elif outcome.outcome == Outcome.OK:
            self._settle(call, outcome, Closing(call.key, intent.attempt, IntentState.LANDED))
        elif outcome.landed is IntentState.NOT_LANDED:
            not_landed = Closing(call.key, intent.attempt, IntentState.NOT_LANDED, evidence=failure(outcome))
            self._settle(call, outcome, not_landed)
        elif call.effect is Effect.IRREVERSIBLE or outcome.landed is IntentState.LANDED:
            self._ask(Doubt(call, intent, outcome))
        else:
            unknown = Closing(call.key, intent.attempt, IntentState.UNKNOWN, evidence=failure(outcome))
            self._settle(call, outcome, unknown)

    def _close_try(self, call: CallStep, outcome: BodyOutcome) -> None:
        """A try has failed, and another one was decided: its own intent is closed."""
        intent = self._effects.current(call.key) if call.has_intent else None
        if intent is not None:
            declared = outcome.landed is IntentState.NOT_LANDED
            state = IntentState.NOT_LANDED if declared else IntentState.UNKNOWN
            self._effects.close(Closing(call.key, intent.attempt, state, evidence=failure(outcome)), self._last_seq)

    def _settle(
        self, call: CallStep, outcome: BodyOutcome, closing: Closing | None, mailbox_id: int | None = None
    ) -> None:
        """The step's entry, and what it says of its intent, in one unit."""
        seq, number = self._last_seq + 1, closing.attempt if closing is not None else self._attempt_of(call)
        if call.compensates is not None and outcome.outcome == Outcome.OK:
            undone, landed = call.compensates
            if landed:
                self._effects.close(Closing(undone, landed, IntentState.COMPENSATED), seq)
        if closing is not None:
            self._effects.close(closing, seq)
        else:
            self._forget_failure(call, seq)
        self._record_step(call, outcome, mailbox_id, number)

    def _forget_failure(self, call: CallStep, seq: int) -> None:
        """An undoing without an intent was run again after it had failed: nobody is asked about that any more."""
        left = self._effects.unsettled(call.key) if call.compensates is not None and not call.has_intent else None
        if left is not None:
            self._effects.close(Closing(left.key, left.attempt, IntentState.UNKNOWN, by="retry"), seq)

    def _record_cancelled(self, call: CallStep, closing: Closing | None, mailbox_id: int | None = None) -> None:
        self._settle(call, BodyOutcome(Outcome.CANCELLED, None, None, None, self._now), closing, mailbox_id)

    def _ask(self, doubt: Doubt) -> None:
        """Somebody must say whether a call landed: the step's reconciler, if it has one, else a person."""
        call, intent, outcome = doubt.call, doubt.intent, doubt.outcome
        if outcome is not None:
            self._effects.ended[call.key] = intent.attempt, outcome
        if outcome is not None and outcome.landed is IntentState.LANDED:
            self._say_unknown(doubt, "the call landed, but what it returned cannot be journaled")
        elif call.reconcile is None:
            self._say_unknown(doubt, "")
        elif self._draining or self.execution.hold_reason is not None:
            if outcome is not None:
                self._keep_error(doubt, outcome)
        else:
            self._effects.asking[call.key] = doubt
            call.idempotency_key = intent.idempotency_key
            error = outcome.value if outcome is not None else None
            if error is _UNDECODED and outcome is not None:
                error = decode_error(outcome.error or "{}")
            self._actions.append(Reconcile(call, intent.attempt, intent.written_at, error))

    def _take_answer(self, doubt: Doubt, answer: Answer) -> None:
        call, intent = doubt.call, doubt.intent
        closing = Closing(call.key, intent.attempt, answer.state, by=answer.by, evidence=answer.evidence)
        if answer.state is IntentState.UNKNOWN and answer.outcome is None:
            self._say_unknown(doubt, answer.reason, answer.evidence)
        elif answer.state is not IntentState.NOT_LANDED:
            assert answer.outcome is not None
            self._settle(call, answer.outcome, closing, answer.mailbox_id)
        elif call.abandoned:
            self._record_cancelled(call, closing, answer.mailbox_id)
        elif (
            doubt.outcome is not None and call.compensates is None and not self._goes_on_after(call.key, intent.attempt)
        ):
            self._settle(call, doubt.outcome, closing, answer.mailbox_id)
        else:
            self._effects.close(closing, self._last_seq)
            in_time = call.key not in self._tries.waiting and self.execution.hold_reason is None
            if in_time and not self._draining:
                self._begin_in_time(call)

    def _goes_on_after(self, key: str, attempt: int) -> bool:
        """Whether another try was decided on, by the step's `retry=` or by a person who let the failed run go on."""
        return max(self._tries.count(key), self._rewinds.attempts_before(key)) >= attempt

    def _say_unknown(self, doubt: Doubt, reason: str, evidence: str | None = None) -> None:
        """Nobody here can say: the run is held, and a person is asked."""
        call, intent = doubt.call, doubt.intent
        if doubt.outcome is not None:
            evidence = merged(failure(doubt.outcome), evidence)
        if intent.state == IntentState.OPEN or evidence is not None or intent.resolved:
            unknown = Closing(call.key, intent.attempt, IntentState.UNKNOWN, resolved=False, evidence=evidence)
            self._effects.close(unknown, self._last_seq)
        how = "its worker died"
        if doubt.outcome is not None:
            how = f"it ended with {_error_of(doubt.outcome)}"
        self._unknown.append(
            f"step {call.key}: nobody knows whether its call landed (attempt {intent.attempt}, {how})"
            f"{': ' if reason else ''}{reason}; {self._find_out(call.key)}"
        )

    def _find_out(self, key: str) -> str:
        """The way out of a doubt, for a person."""
        return (
            f"find out, and say so: replaykit resolve {self.run.id} {key}, with --landed JSON, --not-landed or --fail"
        )

    def _undoing_failed(self, call: CallStep, intent: Intent | None, outcome: BodyOutcome) -> None:
        """Nothing is recorded of it, so that it can be run again; a person sees what was and what was not undone."""
        evidence = failure(outcome)
        if intent is not None:
            closing = Closing(call.key, intent.attempt, IntentState.UNKNOWN, resolved=False, evidence=evidence)
            self._effects.close(closing, self._last_seq)
        else:
            self._forget_failure(call, self._last_seq)
            key, effect = call.idempotency_key, call.effect or Effect.REPEATABLE
            attempt, text = self._attempt_of(call), call.input.text
            state = IntentState.UNKNOWN
            row = Intent(call.key, attempt, call.name, effect, key, text, self._now, state, evidence=evidence)
            self._effects.insert(row, self._last_seq)
        self._kept[call.key] = call.input.digest, outcome  # should the unit that says so be refused
        undone, owed = call.saga.undone, call.saga.keys_owed
        again = f"once it can succeed: replaykit retry {self.run.id}"
        resolve = f"replaykit resolve {self.run.id} {call.key}"
        if (
            call.effect is Effect.IRREVERSIBLE and call.reconcile is None
        ):  # only a person may say that it did not happen
            again = f"if it did not happen, run it again: {resolve} --not-landed"
        self._unknown.append(
            f"{call.key}: an undoing failed with {_error_of(outcome)}; undone: "
            f"{', '.join(undone) or 'nothing'}; not undone: {', '.join([call.key.partition(':')[2], *owed])}; {again}; if it was "
            f"done, also by hand: {resolve} --landed null"
        )

    def _answer(self, doubt: Doubt, letter: Mail, body: dict[str, Any]) -> Answer:
        """A person's word, for the attempt that it was given for."""
        call, by, comment = doubt.call, letter.sent_by or "a person", body.get("comment")
        if body.get("word") == "not_landed":
            return Answer(IntentState.NOT_LANDED, None, "", by, comment, letter.id)
        if body.get("word") == "landed":
            try:
                value = call.info.decode_result(json.dumps(body.get("value"), ensure_ascii=False))
                outcome = result_outcome(call.info, value, doubt.intent.written_at, self._settings)
                if outcome.outcome is Outcome.OK:
                    return Answer(IntentState.LANDED, outcome, "", by, comment, letter.id)
                why = _error_of(outcome)
            except Exception as refused:
                why = unfit(refused)  # its own words would quote the value
            reason = f"what {by} said it returned does not fit {call.name} ({why})"
            return Answer(IntentState.UNKNOWN, None, reason, by, misfit=letter.id)
        error = body.get("error")
        if error is None:
            words = f"step {call.key}: nobody knows whether its call landed; {by} let it fail"
            error = json.loads(encode_error(InDoubt(f"{words}: {comment}" if comment else words)))
        # NUL and the like are written behind a mark, which has to stay one.
        text = json.dumps(error, ensure_ascii=False)
        at = doubt.intent.written_at
        failed = BodyOutcome(Outcome.ERROR, None, text, decode_error(text), at, IntentState.UNKNOWN)
        return Answer(IntentState.UNKNOWN, failed, "", by, comment, letter.id)


def _is_another(call: CallStep, intent: Intent) -> bool:
    """Whether the code asks for something else than the call that was made: then neither its key nor its reconciler is right."""
    try:
        same = intent.input == call.input.text or same_input(call.info, intent.input, call.input)
    except Exception:
        return True
    return not same or intent.name != call.name


_STATES: Final = {"landed": IntentState.LANDED, "not_landed": IntentState.NOT_LANDED}
"""What a person's word makes of an intent; any other leaves it unknown."""


def _error_of(outcome: BodyOutcome) -> str:
    kind, message, _ = error_summary(outcome.error or "{}")
    return f"{kind.removeprefix('builtins.')}: {head(message)}"


def _earliest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)

"""The entries of one claimed run: those of its journal are read, new ones are made; the code is told of them, and asks for more.

Here is told which attempt of its step a call is and under which idempotency key it is made: both follow from what the run has
recorded. What is not asked here: whether a call may be made at all after what became of an earlier one (`settler.py`), and when
(`driver.py`). Those two build on this one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from replaykit.limits import RETRY_WAIT_SECONDS_MAX, Settings
from replaykit.replay.actions import Action, StartBody
from replaykit.replay.doubts import is_another
from replaykit.replay.effects import Effects
from replaykit.replay.entries import (
    FOREVER_US,
    Attempt,
    ClaimedRun,
    Closing,
    Entry,
    Intent,
    IntentState,
    Kind,
    Mail,
    Outcome,
    Unit,
)
from replaykit.replay.execution import Execution
from replaykit.replay.keys import IdempotencyKeys
from replaykit.replay.letters import Letters
from replaykit.replay.outcomes import UNDECODED, BodyOutcome
from replaykit.replay.requests import CallStep, CancelStep, Command
from replaykit.replay.rewinds import Rewinds
from replaykit.replay.signature import GROWN_CHARS_MIN, GrowingInputs
from replaykit.replay.tries import Tries

__all__ = ["Recorder"]

_INPUT_CHARS_LITTLE: Final = 250  # nothing shorter is the record of an input that grew, nor what one grew from


class Recorder:
    """The record of one claimed run, as it grows here.

    Args:
        run: as claimed.
        execution: of its workflow, not started yet.
        settings: `input_bytes_max`.
        again: the run's journal is read again within one claim: its code has run up to here before.
    """

    def __init__(self, run: ClaimedRun, execution: Execution, settings: Settings, *, again: bool) -> None:
        self.run = run
        self.execution = execution
        self.in_flight: dict[str, CallStep] = {}
        self.unit: Unit | None = None  # on its way
        self._timer_wakes: int | None = None  # what `unit.wakes` is to be
        self._letters = Letters(run.mail)
        self._rewinds = Rewinds(run.rewinds, self._letters.accept_inputs_to)
        self._rewound = bool(run.rewinds)
        self._rewound_at = 0
        self._tries = Tries(run.attempts)
        self._effects = Effects.of(run.intents, run.observations) if run.intents or run.observations else Effects()
        self._settings = settings
        self._keys = IdempotencyKeys(run.id)
        self._inputs = GrowingInputs(settings.input_bytes_max)
        self._input_chars_short = min(GROWN_CHARS_MIN - 1, settings.input_bytes_max // 4)  # recorded as they are
        self._kept: dict[
            str, tuple[str, BodyOutcome]
        ] = {}  # outcomes without an entry, with the digests of their inputs
        self._given_up: list[CallStep] = []  # calls with an effect whose bodies have not begun
        self._in_transactions: set[str] = (
            set()
        )  # steps whose entries, not sent yet, their bodies' transactions are to commit
        self._actions: list[Action] = []
        self._waiting: deque[tuple[Command, int]] = deque()
        self._asked: dict[str, CallStep] = {}  # calls in it that were not taken back
        self._entries: list[Entry] = []  # not sent yet
        self._last_seq = 0
        self._last_error_seq = 0
        self._last_at = max(run.started_at, 0)
        self._now = max(run.started_at, run.floor)
        self._draining = False
        self._started = False
        execution.replaying = again or run.claims > 1
        execution.accept_inputs_to = self._letters.accept_inputs_to

    # ------------------------------------------------------------------ entries of the journal

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

    def _died_of(self) -> int | None:
        """The seq of the error that the run died of; None if it was not a step's.

        Of a run that its code does not replay any more nobody can tell: the last error of its journal.
        """
        if self.execution.hold_reason is not None:
            return self._last_error_seq or None
        ended = self.execution.ended
        return ended.died_of if ended is not None else None

    # ------------------------------------------------------------------ entries that are made here

    def _see(self, now: int) -> None:
        """Time as this run sees it: never back, never below the due time it was claimed for."""
        if now > self._now:
            self._now = now
        if self._last_at > self._now:
            self._now = self._last_at

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
        if outcome.in_transaction:
            self._in_transactions.add(call.key)
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
        self._deliver(entry, UNDECODED)

    def _deliver_timer(self, deadline: int) -> None:
        n = self.execution.timers_fired + 1
        if self._timer_wakes is None:
            self._timer_wakes = self.run.wakes
        self._deliver(
            Entry(0, f"~timer#{n}", "timer", Kind.TIMER, Outcome.OK, max(self._now, deadline), due_at=deadline),
            UNDECODED,
        )

    def _deliver_cancel(self, letter: Mail, output: str | None = None) -> None:
        n = self._letters.cancels + 1
        key = "~cancel" if n == 1 else f"~cancel#{n}"
        entry = Entry(0, key, "cancel", Kind.CANCEL, Outcome.OK, self._now, output=output, mailbox_id=letter.id)
        self._letters.answered(entry)
        self._deliver(entry, UNDECODED)

    def _record_rewind(self, letter: Mail) -> None:
        """Set aside what follows the error that the run died of; what this entry says counts once the journal is read again."""
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

    def _deliver(self, entry: Entry, value: Any) -> None:
        """The journal's next entry, told to the code at once; what that asks for waits until the entry is committed."""
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
        commands = execution.deliver(entry) if value is UNDECODED else execution.deliver(entry, value)
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

    # ------------------------------------------------------------------ what the code asks for

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

    def _start(self, call: CallStep) -> None:
        """Its body is to begin."""
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

    def _write_intent(self, call: CallStep) -> None:
        """Its body is to begin once the intent is committed."""
        assert call.effect is not None
        call.idempotency_key = self._idempotency_key(call) or ""
        attempt = self._attempts_before(call.key) + 1
        key, text = call.idempotency_key, call.input.text
        self._effects.write(
            call, Intent(call.key, attempt, call.name, call.effect, key, text, self._now), self._last_seq
        )

    # ------------------------------------------------------------------ attempts and keys

    def _idempotency_key(self, call: CallStep) -> str | None:
        """The step's key, as long as it asks with the input of its very first try; with another one it is another call."""
        if call.idempotency_key or call.runs_ahead:
            return call.idempotency_key or None
        if not self._rewound and not self._tries.known and not self._effects.known:
            return self._keys.of(call.key)
        first = self._effects.first(call.key)
        if first is not None:
            return self._keys.of(f"{call.key}\0{call.input.digest}" if is_another(call, first) else call.key)
        return self._rewinds.idempotency_key(call, self._keys, self._tries.first_digest(call.key))

    def _attempt_of(self, call: CallStep) -> int:
        """Which attempt of the step is the one that runs or is to run now."""
        intent = self._effects.current(call.key) if call.has_intent else None
        return intent.attempt if intent is not None else self._attempts_before(call.key) + 1

    def _attempts_before(self, key: str) -> int:
        """How many attempts of the step there were, in the whole life of the run."""
        before = max(self._tries.count(key), self._rewinds.attempts_before(key))
        return max(before, self._effects.attempts_before(key)) if self._effects.known else before

    def _last_try(self, key: str) -> Attempt | None:
        """The step's last failed try within its budget, which begins anew with each rewind."""
        return self._tries.last(key, self._rewinds.attempts_before(key), self._rewound_at)

    def _attempt_row(self, call: CallStep, outcome: BodyOutcome, wait_seconds: float) -> Attempt:
        """Of a try that failed, and after which so long is to be waited."""
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

    # ------------------------------------------------------------------ what is not known to stand

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
        within = self._in_transactions | ({unit.within} if unit is not None and unit.within is not None else set())
        closings = {(c.key, c.attempt): c for c in self._closing_by}
        for entry in self._standing_by:
            if entry.kind != Kind.STEP or entry.reuses is not None or entry.mailbox_id is not None:
                continue
            closing = closings.get((entry.key, entry.attempt))
            if entry.key in within or entry.outcome == Outcome.CANCELLED or (closing is not None and closing.by):
                continue
            call_state = IntentState(closing.state) if closing is not None else None
            at = entry.started_at or 0
            yield entry, BodyOutcome(Outcome(entry.outcome), entry.output, entry.error, UNDECODED, at, call_state)

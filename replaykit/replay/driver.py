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
it. A call that may have landed is asked about before anything else is made of it.

A driver is built in three floors, a file each. `recorder.py`: the entries, and what the code asks for when it is told of them;
`settler.py`: what is made of calls that may have landed; here: what happens when, and what is sent. Each knows those below.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Final
from uuid import UUID

from replaykit.limits import BATCH_ENTRIES_MAX, Settings
from replaykit.replay.actions import Action, CancelBody, StartBody, Withdraw
from replaykit.replay.doubts import Answer
from replaykit.replay.entries import (
    Change,
    ClaimedRun,
    Closing,
    Entry,
    Finish,
    Hold,
    IntentState,
    Kind,
    Mail,
    Observation,
    Park,
    Release,
    State,
    Unit,
    Verdict,
)
from replaykit.replay.execution import Execution
from replaykit.replay.outcomes import BodyOutcome
from replaykit.replay.requests import CallStep, CancelStep
from replaykit.replay.settler import Settler

__all__ = ["Driver", "Phase"]

_TIMERS_PER_TURN: Final = 1_000  # a callback that re-arms itself in the past must not keep the writer from its turn


class Phase(StrEnum):
    """Whose the run is."""

    ACTIVE = "active"  # this worker's
    OVER = "over"  # its unit with a change of state is committed: nobody's, or the next claim's
    LOST = "lost"  # the lease is another's
    STALE = "stale"  # this worker's, but the journal must be read again under a new token
    BROKEN = "broken"  # this worker's, to be held at once: the journal or the database refused a unit for good


class Driver(Settler):
    """Drives one claimed run.

    Args:
        run: as claimed.
        execution: of its workflow, not started yet.
        new_id: makes write ids (chance is an argument).
        settings: `evict_after_seconds`, `input_bytes_max`, `payload_bytes_max`.
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
        super().__init__(run, execution, settings, again=again)
        self.phase = Phase.ACTIVE
        self.words: str | None = None  # why it is BROKEN
        self.change: Change | None = None  # what made it OVER
        self._new_id = new_id
        self._evict_after = int(settings.evict_after_seconds * 1_000_000)
        self._committed = 0
        self._noted = False
        self._rewinding = False
        self._untold = False
        self._in_doubt = False  # held because of a call that may have landed, or of an undoing that failed
        self._doubt_wakes = 0

    # ------------------------------------------------------------------ events

    def begin(self, now: int, *, draining: bool = False) -> None:
        """The whole journal has been replayed: go on from here, or (`draining`) start nothing and hand the run back."""
        self._draining = self._draining or draining
        if not self._started:
            self.replay(())
        self._committed = self._last_seq
        self._see(now)
        if self._letters.retry_of_failed is not None:
            self._rewinding = True  # then the journal is read again
            self._record_rewind(self._letters.retry_of_failed)
            return
        for command in self.execution.net_commands():
            self._wait(command, self._last_seq)
        if self._effects.known and self.execution.hold_reason is None:
            self._look_for_orphans()
        self._go_on(now)

    def body_ended(self, key: str, outcome: BodyOutcome, now: int) -> None:
        """A body that was started has an outcome."""
        call = self.in_flight.pop(key, None)
        if call is None:
            return  # given up earlier: its outcome no longer counts
        if self.phase is Phase.STALE and not outcome.in_transaction:
            self._kept[key] = (call.input.digest, outcome)
        if self.phase is not Phase.ACTIVE:
            return
        self._see(now)
        if self.execution.loop.timers or self._letters.open:
            self._deliver_due()
        if self.execution.ended is None:
            self._record(call, outcome)
        elif (
            not outcome.in_transaction
        ):  # its end may yet be refused as stale, and the rebuilt run ask for this call again
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
        row = self._attempt_row(call, outcome, wait_seconds)
        self._close_try(call, outcome)
        self._tries.record(row)
        if call.abandoned and call.effect is not None:
            self._given_up.append(call)  # nobody waits for another try
        else:
            self._tries.wait(call, row, committed=False, lingering=lingering)
        if self.phase is Phase.ACTIVE:
            self._go_on(now)

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
        if self._in_transactions or len(entries) > BATCH_ENTRIES_MAX:
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
            if entry.key in self._in_transactions:
                if within is not None:
                    end = n
                    break
                within = entry.key
        if within is not None:
            self._in_transactions.discard(within)
        self._entries = entries[end:]
        return entries[:end], within

    def _may_wait(self) -> bool:
        """Whether there is nothing to say before a body ends."""
        execution = self.execution
        return execution.hold_reason is None and execution.ended is None and not self._tries.rows

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

    # ------------------------------------------------------------------ what follows from an event

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

    def _record(self, call: CallStep, outcome: BodyOutcome) -> None:
        """A body has ended: what it came to, and what that says of its call."""
        if call.effect is None and call.compensates is None:
            self._record_step(call, outcome)
        else:
            self._record_effect(call, outcome)

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
            self._deliver_cancel(letter, reason)


def _earliest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)

"""What is made of calls that may have landed: who is asked, what becomes of the intent, whether the body runs.

    _is_answered       a call is asked for: perhaps it needs no body
    _begin             its body is to run: under which intent
    _record_effect     its body has ended
    _ask               somebody must say whether it landed: the reconciler, else a person
    _take_answer       somebody has said it

A run whose calls nobody here can say anything of is held, with the sentences in `_unknown`.
"""

from __future__ import annotations

from replaykit.limits import Settings
from replaykit.replay import sentences
from replaykit.replay.actions import Reconcile
from replaykit.replay.doubts import Answer, Doubt, answer_of, failure, heard_to, is_another, word_alone
from replaykit.replay.entries import ClaimedRun, Closing, Effect, Intent, IntentState, Outcome
from replaykit.replay.execution import Execution
from replaykit.replay.failures import decode_error
from replaykit.replay.jsontext import merged
from replaykit.replay.outcomes import UNDECODED, BodyOutcome
from replaykit.replay.recorder import Recorder
from replaykit.replay.requests import CallStep

__all__ = ["Settler"]


class Settler(Recorder):
    """A recorder that settles the calls of steps with an effect, and of undoings.

    Args:
        run: as claimed.
        execution: of its workflow, not started yet.
        settings: `input_bytes_max`, `payload_bytes_max`.
        again: the run's journal is read again within one claim.
    """

    def __init__(self, run: ClaimedRun, execution: Execution, settings: Settings, *, again: bool) -> None:
        super().__init__(run, execution, settings, again=again)
        self._unknown: list[str] = []  # sentences for a person

    # ------------------------------------------------------------------ a call is asked for

    def _is_answered(self, call: CallStep) -> bool:
        """Whether something else is to be made of a call than to run its body."""
        effects, key = self._effects, call.key
        if key in effects.written or key in effects.asking:
            return True
        unsettled = effects.unsettled(key) if effects.known else None
        if unsettled is not None:
            word = self._letters.word(key, unsettled.attempt, heard_to(unsettled))
            if word is not None:
                doubt = Doubt(call, unsettled, effects.outcome_of(unsettled))
                self._take_answer(doubt, answer_of(doubt, *word, self._settings))
                return True
        doubtful = effects.doubt(call, self._now) if effects.known else None
        before = doubtful.intent if doubtful is not None else unsettled
        if before is not None and is_another(call, before):
            self._say_unknown(Doubt(call, before, effects.outcome_of(before)), sentences.asked_otherwise(call, before))
        elif doubtful is not None:
            self._ask(doubtful)
        elif call.abandoned and unsettled is None:
            for intent in effects.lapsed:
                if intent.key == key:
                    effects.close_unbegun(intent)
            self._record_cancelled(call, None)
        elif call.effect is not None and (landed := self._rewinds.landed_otherwise(call)) is not None:
            self.execution.hold(sentences.landed_otherwise(call, landed))
        else:
            return False
        return True

    def _begin_in_time(self, call: CallStep) -> None:
        """Begin it, once the try before has its row and the next one's time has come."""
        last = self._last_try(call.key)
        stands = last not in self._tries.rows
        if last is not None and (last.next_at > self._now or not stands):
            self._tries.wait(call, last, committed=stands)
        else:
            self._begin(call)

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

    def _look_for_orphans(self) -> None:
        """Calls that may have landed and that the code, having got as far as it was, does not ask for any more: renamed, moved or
        dropped by a deploy. Nothing goes on before somebody has said what became of them: under another key they would be
        made again."""
        asked = self.execution.open
        for intent in self._effects.unsettled_by_others:
            if intent.key in asked:
                continue
            word = self._letters.word(intent.key, intent.attempt, heard_to(intent))
            if word is not None:
                answer = word_alone(*word)
                closing = Closing(intent.key, intent.attempt, answer.state, by=answer.by, evidence=answer.evidence)
                self._effects.close(closing, self._last_seq)
                continue
            if intent.state == IntentState.OPEN:
                self._leave_to_a_person(intent)
            self._unknown.append(sentences.no_longer_asked(self.run.id, intent, asked.values()))

    # ------------------------------------------------------------------ its body has ended, or will not begin

    def _record_effect(self, call: CallStep, outcome: BodyOutcome) -> None:
        """An attempt of a step with an effect, or of an undoing, has ended."""
        intent = self._effects.current(call.key) if call.has_intent else None
        if call.compensates is not None and outcome.call_state is IntentState.LANDED and outcome.outcome != Outcome.OK:
            # Nobody gets what an undoing returns.
            outcome = BodyOutcome(Outcome.OK, "null", None, None, outcome.started_at)
        if call.compensates is not None and outcome.outcome != Outcome.OK:
            self._undoing_failed(call, intent, outcome)
        elif intent is None:
            self._settle(call, outcome, None)
        elif outcome.outcome == Outcome.OK:
            self._settle(call, outcome, Closing(call.key, intent.attempt, IntentState.LANDED))
        elif outcome.call_state is IntentState.NOT_LANDED:
            not_landed = Closing(call.key, intent.attempt, IntentState.NOT_LANDED, evidence=failure(outcome))
            self._settle(call, outcome, not_landed)
        elif call.effect is Effect.IRREVERSIBLE or outcome.call_state is IntentState.LANDED:
            self._ask(Doubt(call, intent, outcome))
        else:
            unknown = Closing(call.key, intent.attempt, IntentState.UNKNOWN, evidence=failure(outcome))
            self._settle(call, outcome, unknown)

    def _undoing_failed(self, call: CallStep, intent: Intent | None, outcome: BodyOutcome) -> None:
        """Nothing is recorded of it, so that it can be run again; a person sees what was and what was not undone."""
        evidence = failure(outcome)
        if intent is not None:
            self._leave_to_a_person(intent, evidence)
        else:
            self._forget_failure(call, self._last_seq)
            key, effect = call.idempotency_key, call.effect or Effect.REPEATABLE
            attempt, text = self._attempt_of(call), call.input.text
            state = IntentState.UNKNOWN
            row = Intent(call.key, attempt, call.name, effect, key, text, self._now, state, evidence=evidence)
            self._effects.insert(row, self._last_seq)
        self._kept[call.key] = call.input.digest, outcome  # should the unit that says so be refused
        self._unknown.append(sentences.undoing_failed(self.run.id, call, outcome))

    def _close_try(self, call: CallStep, outcome: BodyOutcome) -> None:
        """A try has failed, and another one was decided: its own intent is closed."""
        intent = self._effects.current(call.key) if call.has_intent else None
        if intent is not None:
            declared = outcome.call_state is IntentState.NOT_LANDED
            state = IntentState.NOT_LANDED if declared else IntentState.UNKNOWN
            self._effects.close(Closing(call.key, intent.attempt, state, evidence=failure(outcome)), self._last_seq)

    def _unbegin(self, call: CallStep) -> None:
        intent = self._effects.current(call.key) if call.has_intent else None
        if intent is not None:
            self._effects.close_unbegun(intent)
        if call.effect is not None and call.abandoned:
            self._given_up.append(call)

    def _withdraw_written(self) -> None:
        """Bodies that were to begin do not begin in a run that is held or handed back."""
        for key in list(self._effects.written):
            self._effects.withdraw(key)
        for intent in self._effects.lapsed:
            self._effects.close_unbegun(intent)

    def _keep_error(self, doubt: Doubt, outcome: BodyOutcome) -> None:
        """Whoever asks next is to know that the attempt has ended, and with what: else its worker would be taken for dead."""
        intent = doubt.intent
        state = intent.state if intent.state == IntentState.UNKNOWN else IntentState.OPEN
        seen = Closing(intent.key, intent.attempt, state, resolved=False, evidence=failure(outcome))
        self._effects.close(seen, self._last_seq)

    # ------------------------------------------------------------------ who says what became of it

    def _ask(self, doubt: Doubt) -> None:
        """Somebody must say whether a call landed: the step's reconciler, if it has one, else a person."""
        call, intent, outcome = doubt.call, doubt.intent, doubt.outcome
        if outcome is not None:
            self._effects.ended[call.key] = intent.attempt, outcome
        if outcome is not None and outcome.call_state is IntentState.LANDED:
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
            if error is UNDECODED and outcome is not None:
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
        intent, outcome = doubt.intent, doubt.outcome
        if outcome is not None:
            evidence = merged(failure(outcome), evidence)
        if intent.state == IntentState.OPEN or evidence is not None or intent.resolved:
            self._leave_to_a_person(intent, evidence)
        self._unknown.append(sentences.nobody_knows(self.run.id, intent, outcome, reason))

    def _leave_to_a_person(self, intent: Intent, evidence: str | None = None) -> None:
        unknown = Closing(intent.key, intent.attempt, IntentState.UNKNOWN, resolved=False, evidence=evidence)
        self._effects.close(unknown, self._last_seq)

    # ------------------------------------------------------------------ its entry

    def _settle(
        self, call: CallStep, outcome: BodyOutcome, closing: Closing | None, mailbox_id: int | None = None
    ) -> None:
        """The step's entry, and what it says of its intent, in one unit."""
        seq, number = self._last_seq + 1, closing.attempt if closing is not None else self._attempt_of(call)
        if call.compensates is not None and outcome.outcome == Outcome.OK:
            undone, attempt = call.compensates
            if attempt:
                self._effects.close(Closing(undone, attempt, IntentState.COMPENSATED), seq)
        if closing is not None:
            self._effects.close(closing, seq)
        else:
            self._forget_failure(call, seq)
        self._record_step(call, outcome, mailbox_id, number)

    def _record_cancelled(self, call: CallStep, closing: Closing | None, mailbox_id: int | None = None) -> None:
        self._settle(call, BodyOutcome(Outcome.CANCELLED, None, None, None, self._now), closing, mailbox_id)

    def _forget_failure(self, call: CallStep, seq: int) -> None:
        """An undoing without an intent was run again after it had failed: nobody is asked about that any more."""
        left = self._effects.unsettled(call.key) if call.compensates is not None and not call.has_intent else None
        if left is not None:
            self._effects.close(Closing(left.key, left.attempt, IntentState.UNKNOWN, by="retry"), seq)

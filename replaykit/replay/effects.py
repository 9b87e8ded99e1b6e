"""Where the calls of a run's steps with an effect stand: intents that are on their way, calls in doubt, what is to be written.

An intent is committed before its body begins; from then on its call may have landed. Who finds one open that is not its
own asks (`Doubt`): the step's reconciler, or a person (DESIGN 5; issue "Effects").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from replaykit.replay.doubts import Doubt, evidence_of
from replaykit.replay.entries import Closing, Effect, Intent, IntentState, Observation, Outcome
from replaykit.replay.failures import decode_error
from replaykit.replay.outcomes import BodyOutcome
from replaykit.replay.requests import CallStep

__all__ = ["Effects", "Written"]

_UNBEGUN = "unbegun"


@dataclass(slots=True)
class Written:
    """An intent of this worker's whose body has not begun. `before`: what was known of the step's calls."""

    call: CallStep
    intent: Intent
    before: Intent | None = None
    sent: bool = False
    committed: bool = False


@dataclass(slots=True)
class Effects:
    """The calls of one run.

    Attributes:
        written: intents whose bodies are to begin once they are committed, by step.
        asking: calls in doubt that are being asked about, by step.
        ended: attempts of this worker's that ended in doubt, by step: what they ended with.
        known: whether the run has any intent that is not settled, or had one here.
        outgoing: whether there is something to be written.
    """

    written: dict[str, Written] = field(default_factory=dict)
    asking: dict[str, Doubt] = field(default_factory=dict)
    ended: dict[str, tuple[int, BodyOutcome]] = field(default_factory=dict)
    known: bool = False
    outgoing: bool = False
    _last: dict[str, Intent] = field(default_factory=dict)
    _first_at: dict[str, int] = field(default_factory=dict)  # by idempotency key: since when the other side knows it
    _first: dict[str, Intent] = field(default_factory=dict)  # by step: its first attempt of all
    _unbegun: set[tuple[str, int]] = field(default_factory=set)
    _ours: set[tuple[str, int]] = field(default_factory=set)  # attempts that nobody can have begun before this claim
    _intents: list[tuple[int, Intent]] = field(default_factory=list)  # with the seq that they must not come before
    _closings: list[tuple[int, Closing]] = field(default_factory=list)
    _observations: list[Observation] = field(default_factory=list)
    _observed: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @staticmethod
    def of(intents: Iterable[Intent], observations: Iterable[Observation]) -> Effects:
        """As a claim hands them over: intents by step and attempt."""
        effects = Effects()
        for intent in intents:
            effects._note(intent)
            if intent.state == IntentState.NOT_LANDED and evidence_of(intent).get(_UNBEGUN):
                effects._unbegun.add((intent.key, intent.attempt))
        for seen in observations:
            effects._observed.setdefault(seen.key, []).append((seen.kind, seen.id))
        return effects

    def _note(self, intent: Intent) -> None:
        self.known = True
        if intent.attempt == 1:
            self._first.setdefault(intent.key, intent)
        self._last[intent.key] = intent
        if intent.state != IntentState.NOT_LANDED:
            self._first_at.setdefault(intent.idempotency_key, intent.written_at)

    # ------------------------------------------------------------------ what is known

    def first(self, key: str) -> Intent | None:
        """The intent of the step's very first attempt: its input is the one that the plain idempotency key stands for."""
        return self._first.get(key)

    @property
    def unsettled_by_others(self) -> list[Intent]:
        """Intents that earlier claims have left open, or that a person is asked about."""
        return [intent for key in self._last if (intent := self.unsettled(key)) is not None]

    def current(self, key: str) -> Intent | None:
        """The step's last intent that is not known to have landed; None if it has none."""
        return self._last.get(key)

    def attempts_before(self, key: str) -> int:
        """How many attempts of the step have begun, by its intents."""
        last = self._last.get(key)
        if last is None:
            return 0
        return last.attempt - ((key, last.attempt) in self._unbegun)

    def unsettled(self, key: str) -> Intent | None:
        """The step's intent that somebody may have a word on: handed over, and neither closed nor known not to have begun."""
        last = self._last.get(key)
        if last is None or key in self.written or (key, last.attempt) in self._unbegun:
            return None
        if last.state == IntentState.OPEN or (last.state == IntentState.UNKNOWN and not last.resolved):
            return last
        return None

    def doubt(self, call: CallStep, now: int) -> Doubt | None:
        """Whether the call may have landed, and must not be made again before somebody has said.

        An idempotent one is made again with the same key, as long as the other side recognises that. A call that a person
        let fail without knowing stays in doubt: a rewind asks for it again.
        """
        last = self._last.get(call.key)
        if last is None or call.key in self.written or (call.key, last.attempt) in self._unbegun:
            return None
        if last.state not in (IntentState.OPEN, IntentState.UNKNOWN):
            return None
        if last.effect != Effect.IRREVERSIBLE and call.effect is not Effect.IRREVERSIBLE:
            valid = call.key_valid_us
            if valid is None or now - self._first_at.get(last.idempotency_key, last.written_at) <= valid:
                return None
        return Doubt(call, last, self.outcome_of(last))

    def outcome_of(self, intent: Intent) -> BodyOutcome | None:
        """What the attempt ended with, if it did: recorded with its intent, or by this worker."""
        ended = self.ended.get(intent.key)
        if ended is not None and ended[0] == intent.attempt:
            return ended[1]
        error = evidence_of(intent).get("error")
        if error is None:
            return None
        text = json.dumps(error, ensure_ascii=False)
        outcome = Outcome.TIMEOUT if evidence_of(intent).get("outcome") == Outcome.TIMEOUT else Outcome.ERROR
        return BodyOutcome(outcome, None, text, decode_error(text), intent.written_at, IntentState.UNKNOWN)

    @property
    def open(self) -> list[Intent]:
        """Intents that somebody else left open."""
        return [i for i in self._last.values() if i.state == IntentState.OPEN and i.key not in self.written]

    @property
    def closings(self) -> list[Closing]:
        """Those that are not sent yet."""
        return [closing for _, closing in self._closings]

    def observed(self, key: str) -> list[tuple[str, str]]:
        """What the step's bodies have observed, as `(kind, id)`, oldest first."""
        return self._observed.get(key, [])

    # ------------------------------------------------------------------ what happens

    def write(self, call: CallStep, intent: Intent, seq: int) -> None:
        """An intent for the next unit; its body begins once it is committed. Not before the entry of that seq."""
        before = self._last.get(call.key)
        self._note(intent)
        self._unbegun.discard((intent.key, intent.attempt))
        self._ours.add((intent.key, intent.attempt))
        self._intents.append((seq, intent))
        self.written[call.key] = Written(call, intent, before)
        self.outgoing = True

    def insert(self, intent: Intent, seq: int) -> None:
        """An intent's row whose body has run."""
        self._note(intent)
        self._intents.append((seq, intent))
        self.outgoing = True

    def withdraw(self, key: str) -> bool:
        """The body of an intent that was written does not begin. True if there was one."""
        written = self.written.pop(key, None)
        if written is None:
            return False
        if written.sent:
            self.close_unbegun(written.intent)
        else:  # it goes as if it had never been
            self._intents = [(seq, i) for seq, i in self._intents if i is not written.intent]
            del self._last[key]
            if written.before is not None:
                self._last[key] = written.before
                if written.before.attempt == written.intent.attempt:
                    self._unbegun.add((key, written.intent.attempt))
        return True

    def began_before(self, key: str) -> bool:
        """Whether the step's intent is open since an earlier claim: a call of it may have landed, whatever is not begun here."""
        last = self._last.get(key)
        return last is not None and last.state == IntentState.OPEN and (key, last.attempt) not in self._ours

    @property
    def lapsed(self) -> list[Intent]:
        """Intents whose bodies have not begun, and that an earlier driver of this claim left open."""
        last = self._last
        return [
            i for key, n in self._unbegun if (i := last.get(key)) and i.attempt == n and i.state == IntentState.OPEN
        ]

    def close_unbegun(self, intent: Intent) -> None:
        """An intent whose body has not begun and will not begin here: it did not happen, unless it began before."""
        if self.began_before(intent.key):
            return
        self._unbegun.add((intent.key, intent.attempt))
        evidence = json.dumps({_UNBEGUN: True})
        self.close(Closing(intent.key, intent.attempt, IntentState.NOT_LANDED, evidence=evidence), 0)

    def close(self, closing: Closing, seq: int) -> None:
        """What becomes of an intent, for the next unit, not before the entry of that seq."""
        last = self._last.get(closing.key)
        if last is not None and last.attempt == closing.attempt:
            self._last[closing.key] = replace(last, state=closing.state, resolved=closing.resolved)
            if closing.state in (IntentState.LANDED, IntentState.COMPENSATED):
                del self._last[closing.key]
                self._first.pop(closing.key, None)
        self._closings.append((seq, closing))
        self.outgoing = True

    def observe(self, seen: Observation) -> None:
        """A body told an identifier."""
        pair = (seen.kind, seen.id)
        known = self._observed.setdefault(seen.key, [])
        if pair not in known:
            known.append(pair)
        self._observations.append(seen)
        self.outgoing = True

    def take(self, seq_max: int | None) -> tuple[list[Intent], list[Closing], list[Observation]]:
        """What goes into the unit that is made now, which ends with the entry of that seq (None: with all there is)."""
        now = [i for seq, i in self._intents if seq_max is None or seq <= seq_max]
        closed = [c for seq, c in self._closings if seq_max is None or seq <= seq_max]
        self._intents = [] if seq_max is None else [(seq, i) for seq, i in self._intents if seq > seq_max]
        self._closings = [] if seq_max is None else [(seq, c) for seq, c in self._closings if seq > seq_max]
        seen, self._observations = self._observations, []
        self.outgoing = bool(self._intents or self._closings)
        for intent in now:
            written = self.written.get(intent.key)
            if written is not None and written.intent is intent:
                written.sent = True
        return now, closed, seen

    def committed(self, intents: Iterable[Intent]) -> None:
        """These intents stand."""
        for intent in intents:
            written = self.written.get(intent.key)
            if written is not None and written.intent is intent:
                written.committed = True

    @property
    def to_begin(self) -> list[Written]:
        """Those whose intent stands: their bodies may begin."""
        return [w for w in self.written.values() if w.committed]

    def adopt(self, old: Effects, unwritten: Iterable[Observation], asked: dict[str, CallStep]) -> None:
        """Take over from a dropped driver: what had not begun, what ended in doubt, what is being asked about, and what was
        observed and not committed."""
        for written in old.written.values():
            self._unbegun.add((written.intent.key, written.intent.attempt))
        for key, attempt in old._unbegun:
            self._unbegun.add((key, attempt))
        self._ours |= old._ours
        self.ended = {key: (attempt, _afresh(ended)) for key, (attempt, ended) in old.ended.items()}
        for key, doubt in old.asking.items():
            call, last = asked.get(key), self._last.get(key)
            if call is not None and last is not None and last.attempt == doubt.intent.attempt:
                self.asking[key] = replace(doubt, call=call, intent=last)
        for seen in (*unwritten, *old._observations):
            self.observe(seen)


def _afresh(ended: BodyOutcome) -> BodyOutcome:
    """The same with an error of its own: one that was raised in a dropped execution bears its traceback."""
    return replace(ended, value=decode_error(ended.error)) if ended.error is not None else ended

"""A call that may have landed, and what is said of it: by its reconciler, or by a person.

Nothing is decided here about the run: `settler.py` makes entries and closings of these answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from replaykit.errors import InDoubt
from replaykit.limits import Settings
from replaykit.replay import sentences
from replaykit.replay.codec import misfit
from replaykit.replay.entries import Intent, IntentState, Mail, Outcome
from replaykit.replay.failures import decode_error, encode_error
from replaykit.replay.jsontext import compact, escape
from replaykit.replay.outcomes import BodyOutcome, error_line, result_outcome
from replaykit.replay.requests import CallStep
from replaykit.replay.signature import same_input

__all__ = ["Answer", "Doubt", "answer_of", "evidence_of", "failure", "heard_to", "is_another", "word_alone"]

_STATES: Final = {"landed": IntentState.LANDED, "not_landed": IntentState.NOT_LANDED}
"""What a person's word makes of an intent; any other leaves it unknown."""


@dataclass(slots=True)
class Doubt:
    """A call that may have landed.

    Attributes:
        call: the step's.
        intent: of the attempt in question.
        outcome: the error that the attempt ended with; None: its worker died.
    """

    call: CallStep
    intent: Intent
    outcome: BodyOutcome | None = None


@dataclass(slots=True)
class Answer:
    """What is known of a call in doubt, and by whom.

    Attributes:
        state: LANDED, NOT_LANDED or UNKNOWN.
        outcome: LANDED: what the step returns; UNKNOWN of a person's "let it fail": the step's error.
        reason: UNKNOWN: why, for a person.
        by: "reconcile", or the person's name.
        comment: the person's.
        mailbox_id: of the person's word.
        misfit: the mailbox id of a word that does not fit: it counts no more.
    """

    state: IntentState
    outcome: BodyOutcome | None = None
    reason: str = ""
    by: str = "reconcile"
    comment: str | None = None
    mailbox_id: int | None = None
    misfit: int | None = None

    @property
    def evidence(self) -> str | None:
        """For the intent's row."""
        found: dict[str, Any] = {}
        if self.reason:
            found["reason"] = self.reason
        if self.comment is not None:
            found["comment"] = self.comment
        if self.mailbox_id is not None:
            found["mailbox_id"] = self.mailbox_id
        if self.misfit is not None:
            found["misfit"] = self.misfit
        return escape(compact(found)) if found else None


def word_alone(letter: Mail, body: dict[str, Any]) -> Answer:
    """A person's word, as far as the intent goes: of a call that the code does not ask for any more."""
    state = _STATES.get(str(body.get("word")), IntentState.UNKNOWN)
    return Answer(state, None, "", letter.sent_by or "a person", body.get("comment"), letter.id)


def answer_of(doubt: Doubt, letter: Mail, body: dict[str, Any], settings: Settings) -> Answer:
    """A person's word, with what the step then comes to; UNKNOWN with a reason if the value does not fit the step.

    Args:
        doubt: of the attempt that it was given for.
        letter: that brought it.
        body: what it says.
        settings: `payload_bytes_max`.
    """
    answer, call = word_alone(letter, body), doubt.call
    if answer.state is IntentState.NOT_LANDED:
        return answer
    if answer.state is IntentState.LANDED:
        try:
            value = call.info.decode_result(json.dumps(body.get("value"), ensure_ascii=False))
            outcome = result_outcome(call.info, value, doubt.intent.written_at, settings)
            if outcome.outcome is Outcome.OK:
                answer.outcome = outcome
                return answer
            why = error_line(outcome)
        except Exception as refused:
            why = misfit(refused)  # its own words would quote the value
        reason = f"what {answer.by} said it returned does not fit {call.name} ({why})"
        return Answer(IntentState.UNKNOWN, None, reason, answer.by, misfit=letter.id)
    error = body.get("error")
    if error is None:
        error = json.loads(encode_error(InDoubt(sentences.let_fail(call.key, answer.by, answer.comment))))
    # NUL and the like are written behind a mark, which has to stay one.
    text = json.dumps(error, ensure_ascii=False)
    at = doubt.intent.written_at
    answer.outcome = BodyOutcome(Outcome.ERROR, None, text, decode_error(text), at, IntentState.UNKNOWN)
    return answer


def is_another(call: CallStep, intent: Intent) -> bool:
    """Whether the code asks for something else than the call that was made: then neither its key nor its reconciler is right."""
    try:
        same = intent.input == call.input.text or same_input(call.info, intent.input, call.input)
    except Exception:
        return True
    return not same or intent.name != call.name


def failure(outcome: BodyOutcome) -> str:
    """The evidence of an attempt that failed."""
    return f'{{"outcome":"{outcome.outcome}","error":{outcome.error or "{}"}}}'


def evidence_of(intent: Intent) -> dict[str, Any]:
    """What is known of an intent's call."""
    found = json.loads(intent.evidence) if intent.evidence else {}
    return found if isinstance(found, dict) else {}


def heard_to(intent: Intent) -> int:
    """Up to which mailbox id words on it count no more: they did not fit, or let it fail before a retry."""
    found = evidence_of(intent)
    return max(int(found.get("misfit") or 0), int(found.get("mailbox_id") or 0))

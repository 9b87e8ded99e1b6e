"""What became of a body, as the journal will have it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Final

from replaykit.errors import NotJournalable
from replaykit.limits import Settings
from replaykit.replay.entries import IntentState, Outcome
from replaykit.replay.failures import decode_error, encode_error, error_summary
from replaykit.replay.jsontext import check_size, head
from replaykit.replay.requests import CallStep
from replaykit.replay.signature import FunctionInfo

__all__ = ["UNDECODED", "BodyOutcome", "error_line", "error_outcome", "result_outcome", "timeout_outcome"]

UNDECODED: Final = object()
"""In place of a value that is only known as JSON text."""


@dataclass(slots=True)
class BodyOutcome:
    """What became of a body: JSON text, and the object that the code is given."""

    outcome: Outcome
    output: str | None
    error: str | None
    value: Any
    started_at: int
    call_state: IntentState | None = None  # what it says of the call, where the step has an effect
    in_transaction: bool = False  # of a transactional step: it is to be committed with what its body wrote


def result_outcome(info: FunctionInfo, value: Any, started_at: int, settings: Settings) -> BodyOutcome:
    """A body returned: its result encoded and decoded again, or the `NotJournalable` that says why it can't be."""
    try:
        text, decoded = info.encode_result(value)
        check_size(text, settings.payload_bytes_max, "the result")
    except NotJournalable as refused:
        return error_outcome(info.refused_result(refused), started_at, info.line)
    return BodyOutcome(Outcome.OK, text, None, decoded, started_at)


def error_outcome(error: BaseException, started_at: int, line: str = "") -> BodyOutcome:
    """A body raised: the error as the journal rebuilds it, so that the first run sees what a replay sees. `line` is to blame
    where the body's code did not raise it."""
    text = encode_error(error, line)
    return BodyOutcome(Outcome.ERROR, None, text, decode_error(text), started_at)


def timeout_outcome(call: CallStep, attempt: int, limit: float | dt.datetime, started_at: int) -> BodyOutcome:
    """A body's time ran out: so many seconds, or the moment at which it had to have ended."""
    when = f"by {limit.isoformat()}" if isinstance(limit, dt.datetime) else f"within {limit:g} s"
    error = TimeoutError(f"step {call.key}: attempt {attempt} did not end {when}")
    outcome = error_outcome(error, started_at)
    outcome.outcome = Outcome.TIMEOUT
    return outcome


def error_line(outcome: BodyOutcome) -> str:
    """The error of one that has failed, for people."""
    kind, message, _ = error_summary(outcome.error or "{}")
    return f"{kind.removeprefix('builtins.')}: {head(message)}"

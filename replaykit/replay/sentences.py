"""What people are told of calls that may have landed: why their run is held, and the way out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from uuid import UUID

from replaykit.replay.entries import Effect, Entry, Intent
from replaykit.replay.jsontext import head
from replaykit.replay.outcomes import BodyOutcome, error_line
from replaykit.replay.requests import CallStep

__all__ = ["asked_otherwise", "landed_otherwise", "let_fail", "no_longer_asked", "nobody_knows", "undoing_failed"]


def nobody_knows(run_id: UUID, intent: Intent, outcome: BodyOutcome | None, reason: str) -> str:
    """Of a call in doubt.

    Args:
        run_id: whose.
        intent: of the attempt in question.
        outcome: what the attempt ended with; None: its worker died.
        reason: why nobody here can say; may be empty.
    """
    how = "its worker died" if outcome is None else f"it ended with {error_line(outcome)}"
    return (
        f"step {intent.key}: nobody knows whether its call landed (attempt {intent.attempt}, {how})"
        f"{': ' if reason else ''}{reason}; {_find_out(run_id, intent.key)}"
    )


def asked_otherwise(call: CallStep, intent: Intent) -> str:
    """The reason of a doubt: what was asked for then, and what is now."""
    return (
        f"it was {intent.name} with {head(intent.input)}, the code now asks for {call.name} with "
        f"{head(call.input.text)} at {call.where}"
    )


def no_longer_asked(run_id: UUID, intent: Intent, calls: Iterable[CallStep]) -> str:
    """Of a call in doubt that the code does not ask for any more; `calls` are what it asks for now."""
    now_asks = ", ".join(f"{c.key} at {c.where}" for c in itertools.islice(calls, 3)) or "nothing"
    return (
        f"step {intent.key}: its call may have landed (attempt {intent.attempt}), and the code no longer asks for it "
        f"but for {now_asks}; let the code ask as it did, or {_find_out(run_id, intent.key)}"
    )


def landed_otherwise(call: CallStep, landed: Entry) -> str:
    """Of a call that succeeded before a rewind, and that the code asks for with another input after it."""
    return (
        f"step {call.key}: before the retry its call landed with input {head(landed.input)}, the code now asks "
        f"for it with {head(call.input.text)} at {call.where}: it is not made twice; let the code ask as it did, "
        "or start a new run"
    )


def undoing_failed(run_id: UUID, call: CallStep, outcome: BodyOutcome) -> str:
    """Of a compensation: what was undone, what was not, and how it goes on."""
    undone, owed = call.saga.undone, call.saga.keys_owed
    again = f"once it can succeed: replaykit retry {run_id}"
    resolve = f"replaykit resolve {run_id} {call.key}"
    if call.effect is Effect.IRREVERSIBLE and call.reconcile is None:  # only a person may say that it did not happen
        again = f"if it did not happen, run it again: {resolve} --not-landed"
    return (
        f"{call.key}: an undoing failed with {error_line(outcome)}; undone: "
        f"{', '.join(undone) or 'nothing'}; not undone: {', '.join([call.key.partition(':')[2], *owed])}; {again}; if it was "
        f"done, also by hand: {resolve} --landed null"
    )


def let_fail(key: str, by: str, comment: str | None) -> str:
    """The error of a step that a person let fail without knowing."""
    words = f"step {key}: nobody knows whether its call landed; {by} let it fail"
    return f"{words}: {comment}" if comment else words


def _find_out(run_id: UUID, key: str) -> str:
    return f"find out, and say so: replaykit resolve {run_id} {key}, with --landed JSON, --not-landed or --fail"

"""What a driver asks its executor to do: start a body, stop one, take a start back, ask a reconciler."""

from __future__ import annotations

from dataclasses import dataclass

from replaykit.replay.requests import CallStep

__all__ = ["Action", "CancelBody", "Reconcile", "StartBody", "Withdraw"]


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

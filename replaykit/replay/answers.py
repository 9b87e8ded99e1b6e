"""What a reconciler answers: whether a call landed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from replaykit.errors import NotLanded

__all__ = ["Landed", "NotLanded", "Unknown"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Landed(Generic[T_co]):
    """The call happened, and this is what the step returns: its body does not run again."""

    value: T_co


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say: a person is asked, and is told this reason."""

    reason: str = ""

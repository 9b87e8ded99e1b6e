"""Classes whose values travel through the journal: in a module that other processes can import as well."""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, field
from typing import Any, NewType

from pydantic import BaseModel

__all__ = [
    "ApiError",
    "Computed",
    "Foo",
    "Frozen",
    "Job",
    "KeywordOnly",
    "OrderId",
    "PaymentError",
    "Seeded",
    "Slotted",
    "TicketId",
]


class PaymentError(Exception):
    """An error with an attribute."""

    def __init__(self, code: int) -> None:
        super().__init__(f"payment refused: {code}")
        self.code = code


class ApiError(Exception):
    """An error whose `__init__` does not take `args`."""

    def __init__(self, status: int, *, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class Job(BaseModel):
    """A model with a class in it."""

    class Phase(enum.Enum):
        """Nested."""

        READY = "ready"
        DONE = ("done", 1)

    phase: Phase
    before: list[Phase] = []


@dataclass
class Computed:
    """A field that `__init__` does not take."""

    a: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.a


@dataclass(frozen=True)
class Frozen:
    """Frozen, with a computed field."""

    a: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.a)


@dataclass(slots=True)
class Slotted:
    """Without a `__dict__`."""

    a: int
    b: str = "b"


@dataclass(kw_only=True)
class KeywordOnly:
    """By keyword only."""

    a: int
    b: list[int] = field(default_factory=list)


@dataclass
class Seeded:
    """Made from something that is not kept."""

    a: int
    seed: InitVar[int] = 1
    sum: int = field(init=False)

    def __post_init__(self, seed: int) -> None:
        self.sum = self.a + seed


@dataclass
class Foo:
    """With a method."""

    n: int

    def double(self) -> int:
        """Twice."""
        return 2 * self.n


class OrderId(str):
    """A str of its own class."""


TicketId = NewType("TicketId", str)


class Knot:
    """Holds itself."""

    def __init__(self) -> None:
        self.me: Any = self

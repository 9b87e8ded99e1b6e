"""What simulated workflows call as steps, and the world outside that these bodies touch.

A body's outcome is the world's: another try of the same call may end otherwise, so that an outcome which was never
committed and yet reached the code shows.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import decimal
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from replaykit.replay.calls import CURRENT_STEP, StepInfo, step
from replaykit.replay.driver import BodyOutcome, error_outcome, result_outcome
from replaykit.replay.requests import CallStep, Pending

__all__ = ["CALLS", "Boom", "breach", "breaches", "call_of", "roll", "run_body", "visitor"]

visitor: Final[contextvars.ContextVar[int]] = contextvars.ContextVar("visitor", default=-1)
"""Set by tasks of a program: a body must see its caller's."""

breaches: Final[list[str]] = []
"""Rules that user code saw broken; a list and not an exception, which user code would catch."""

_chance = random.Random(0)


def breach(rule: str) -> None:
    """A rule of the core is broken, as seen from user code."""
    breaches.append(rule)


def roll(sides: int) -> int:
    """A throw of the world's dice."""
    return _chance.randrange(sides)


class Boom(Exception):
    """An error of the author's own, with an attribute."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


@dataclass
class Order:
    """A value with typed fields."""

    id: int
    total: decimal.Decimal
    at: dt.datetime


async def add(n: int) -> int:
    return n + roll(10)


def add_in_thread(n: int) -> int:
    return n + roll(10)


async def flaky(n: int) -> int:
    if roll(3) == 0:
        raise Boom(f"flaky at {n}", roll(5))
    return roll(100)


async def ship(order: Order, *, express: bool = False) -> Order:
    return Order(order.id + roll(3), order.total * 2, order.at + dt.timedelta(hours=1 if express else 24))


async def bag(words: set[str]) -> set[str]:
    return words | {f"word{roll(5)}"}


async def anything(n: int) -> Any:
    """Of any kind; one can't be journaled."""
    kinds: list[Any] = [None, n, (n, "é\0\ud800"), {n: b"\xff"}, [float("nan"), 1e300], {"~a": {1, 2}}, object()]
    return kinds[roll(len(kinds))]


async def odd_end(n: int) -> int:
    """Ends in one of the ways that end programs and tasks."""
    ends: list[BaseException] = [
        SystemExit(n),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopAsyncIteration(n),
        asyncio.CancelledError("by the body"),
        ExceptionGroup("both", [Boom("one", n), ValueError(n)]),
        FileNotFoundError(2, "none", f"file{n}"),
        TimeoutError("of the body's own"),
    ]
    raise ends[roll(len(ends))]


async def whose(n: int) -> int:
    """The caller's context variable."""
    return visitor.get()


async def nested(n: int) -> int:
    """A step inside a body is a plain call."""
    return await step(add, n) + await step(flaky_not, n)


async def flaky_not(n: int) -> int:
    return n


async def own_key(n: int) -> str:
    return step.current().idempotency_key


class Shop:
    """Steps may be methods."""

    @staticmethod
    async def charge(cents: int, *parts: int, currency: str = "EUR") -> str:
        return f"{cents + sum(parts)} {currency} {roll(1000)}"


async def record(*numbers: int, **named: int) -> dict[str, int]:
    return {"sum": sum(numbers), **named}


CALLS: Final[dict[str, Callable[[int], Pending[Any]]]] = {
    "add": lambda n: step(add, n),
    "thread": lambda n: step(add_in_thread, n),
    "flaky": lambda n: step(flaky, n),
    "ship": lambda n: step(
        ship, Order(n, decimal.Decimal(n) / 7, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)), express=n % 2 == 0
    ),
    "bag": lambda n: step(bag, {f"word{n % 4}", "a", "b"}),
    "anything": lambda n: step(anything, n),
    "odd": lambda n: step(odd_end, n),
    "nested": lambda n: step(nested, n),
    "charge": lambda n: step(Shop.charge, n, 1, 2, currency="USD"),
    "record": lambda n: step(record, n, 2, third=3),
    "named": lambda n: step.options(name=f"named-{n % 3}")(add, n),
    "lambda": lambda n: step.options(name="nameless")(lambda: n),
    "cheap": lambda n: step.options(name="cheap", durability="async")(add, n),
    "cheap flaky": lambda n: step.options(name="cheap-flaky", durability="async")(flaky, n),
}
"""How each kind of step is called."""


def call_of(kind: str, n: int) -> Pending[Any]:
    """The call of a step of that kind."""
    return CALLS[kind](n)


def run_body(call: CallStep, info: StepInfo, started_at: int, dice: random.Random, settings: Any) -> BodyOutcome:
    """Run a body to its end, in a copy of its caller's context, as an executor does."""
    global _chance
    _chance = dice
    assert call.context is not None
    context = call.context.copy()
    context.run(CURRENT_STEP.set, info)
    try:
        args, kwargs = call.info.fresh_arguments(call.input)
        value = context.run(_to_end, call, args, kwargs)
    except BaseException as error:
        return error_outcome(error, started_at)
    return result_outcome(call.info, value, started_at, settings)


def _to_end(call: CallStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = call.function(*args, **kwargs)
    if not call.info.is_async:
        return value
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"the body of {call.name} waits for something")

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

from replaykit.errors import NotLanded
from replaykit.replay.calls import CURRENT_STEP, StepInfo, step
from replaykit.replay.entries import Effect, IntentState
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome, timeout_outcome
from replaykit.replay.requests import CallStep, Pending
from tests.simulator.world import Call, World

__all__ = [
    "ACTING",
    "CALLS",
    "OWING",
    "Boom",
    "breach",
    "breaches",
    "call_of",
    "roll",
    "run_acting_body",
    "run_body",
    "visitor",
]

visitor: Final[contextvars.ContextVar[int]] = contextvars.ContextVar("visitor", default=-1)
"""Set by tasks of a program: a body must see its caller's."""

breaches: Final[list[str]] = []
"""Rules that user code saw broken; a list and not an exception, which user code would catch."""

_chance = random.Random(0)

_acting: list[tuple[World, Call]] = []
"""The call of the body that runs, if its step has an effect."""


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


# ---------------------------------------------------------------------- steps with an effect


class Refused(Exception):
    """The other side says that it did not happen."""


def act() -> int:
    """Call the world outside: what it answered, or one of the ways in which that goes wrong."""
    world, call = _acting[-1]
    if call.effect is Effect.TRANSACTIONAL:
        if roll(8) == 0:
            raise Boom("rolled back", roll(5))
        return call.value
    if call.landed is None and roll(4):
        world.land(call)
    if world.has_landed(call):
        if roll(8) == 0:
            raise Boom("the connection is cut after the request", roll(5))
        return world.answer(call)
    if call.landed is None and roll(3) == 0:
        raise Boom("the connection is cut, the request is on its way", roll(5))
    world.never(call.run, call.key, call.idempotency_key)
    if roll(4) == 0:
        raise Boom("something went wrong before", roll(5))
    raise Refused("no") if roll(2) else NotLanded("busy")


async def ask_world(info: StepInfo) -> Any:
    """Declared, and never called: the simulator answers in its place, when it is its turn."""
    raise AssertionError(info)


@step.policy(effect="idempotent", not_landed=Refused)
async def put(n: int) -> int:
    return act()


@step.policy(effect="idempotent", not_landed=Refused, key_valid_for=20, reconcile=ask_world)
async def put_asked(n: int) -> int:
    return act()


@step.policy(effect="idempotent", key_valid_for=dt.timedelta(seconds=5))
def put_soon(n: int) -> int:
    return act()


@step.policy(effect="irreversible", not_landed=Refused)
async def send(n: int) -> int:
    return act()


@step.policy(effect="irreversible", not_landed=Refused, reconcile=ask_world)
def send_asked(n: int) -> int:
    return act()


@step.policy(effect="irreversible", reconcile=ask_world)
async def send_odd(n: int) -> Any:
    """Its result can't be journaled, now and then."""
    number = act()
    return object() if roll(4) == 0 else number


@step.policy(effect="transactional")
async def insert(n: int) -> int:
    return act()


async def undo_plain(result: int) -> None:
    if roll(6) == 0:
        raise Boom("not undone", result)


def undo_in_thread(result: int, n: int) -> None:
    if roll(9) == 0:
        raise Boom("not undone", n)


@step.policy(effect="idempotent", not_landed=Refused)
async def undo_put(result: int) -> None:
    act()


@step.policy(effect="irreversible", not_landed=Refused)
async def undo_send(result: int) -> None:
    act()


@step.policy(effect="irreversible", reconcile=ask_world)
async def undo_asked(result: int) -> None:
    act()


@step.policy(effect="transactional")
async def undo_insert(result: int) -> None:
    act()


@step.policy(compensate=undo_plain)
async def seat(n: int) -> int:
    if roll(5) == 0:
        raise Boom("no seat", n)
    return roll(100)


@step.policy(effect="idempotent", not_landed=Refused, compensate=undo_put)
async def room(n: int) -> int:
    return act()


@step.policy(effect="irreversible", not_landed=Refused, reconcile=ask_world, compensate=undo_send)
async def ticket(n: int) -> int:
    return act()


@step.policy(effect="irreversible", reconcile=ask_world, compensate=undo_asked)
async def order(n: int) -> int:
    return act()


@step.policy(effect="irreversible", not_landed=Refused, compensate=undo_plain)
async def order_unasked(n: int) -> int:
    return act()


@step.policy(effect="transactional", compensate=undo_insert)
async def reserve(n: int) -> int:
    return act()


ACTING: Final[dict[str, Callable[[int], Pending[Any]]]] = {
    "put": lambda n: step(put, n),
    "put asked": lambda n: step(put_asked, n % 3),
    "put soon": lambda n: step(put_soon, n % 2),
    "send": lambda n: step(send, n % 3),
    "send asked": lambda n: step(send_asked, n),
    "send odd": lambda n: step(send_odd, n % 2),
    "insert": lambda n: step(insert, n),
}
"""How steps with an effect are called. A rewind that asks with another input is held: not too often."""

OWING: Final[dict[str, Callable[[int], Pending[Any]]]] = {
    "seat": lambda n: step(seat, n),
    "room": lambda n: step(room, n),
    "ticket": lambda n: step(ticket, n % 3),
    "order": lambda n: step(order, n % 2),
    "order unasked": lambda n: step(order_unasked, n % 3),
    "reserve": lambda n: step(reserve, n % 5),
    "lent": lambda n: step.options(compensate=lambda got: undo_in_thread(got, n))(put, n % 3),
}
"""How steps are called that a saga undoes."""

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
    return (CALLS.get(kind) or ACTING.get(kind) or OWING[kind])(n)


def run_acting_body(
    call: CallStep, info: StepInfo, started_at: int, dice: random.Random, settings: Any, world: World, made: Call
) -> BodyOutcome:
    """Run the body of a step with an effect, whose call is this one."""
    global _chance
    _chance = dice
    if roll(12) == 0:
        if made.landed is None and made.effect is not Effect.TRANSACTIONAL and roll(3) == 0:
            world.land(made)
        outcome = timeout_outcome(call, info.attempt, 5.0, started_at)
        outcome.call_state = IntentState.UNKNOWN if call.has_intent else None
        return outcome
    _acting.append((world, made))
    try:
        outcome = run_body(call, info, started_at, dice, settings)
    finally:
        _acting.pop()
    if call.effect is Effect.TRANSACTIONAL:
        outcome.in_transaction = outcome.error is None
    return outcome


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
        outcome = error_outcome(error, started_at)
        if call.has_intent:
            outcome.call_state = IntentState.NOT_LANDED if call.says_not_landed(error) else IntentState.UNKNOWN
        return outcome
    outcome = result_outcome(call.info, value, started_at, settings)
    if call.has_intent:
        outcome.call_state = IntentState.LANDED
    return outcome


def _to_end(call: CallStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = call.function(*args, **kwargs)
    if not call.info.is_async:
        return value
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"the body of {call.name} waits for something")

"""One planted bug of each kind that `crash_everywhere` is to find, each beside its clean twin."""

from __future__ import annotations

import random

from replaykit import rng, step, workflow
from replaykit.testing import count_effect

# ------------------------------------------------------------------ a step that keeps something in its process

taken: list[int] = []
"""Of this process."""


async def next_number() -> int:
    """As many as this process has given before."""
    taken.append(len(taken) + 1)
    return taken[-1]


async def number_after(last: int) -> int:
    """What it needs to know, it is told."""
    return last + 1


@workflow
async def keeps_state() -> list[int]:
    """Numbers its parts, it thinks."""
    return [await step(next_number) for _ in range(3)]


@workflow
async def tells_state() -> list[int]:
    """Numbers its parts."""
    numbers = [0]
    for _ in range(3):
        numbers.append(await step(number_after, numbers[-1]))
    return numbers[1:]


# ------------------------------------------------------------------ a workflow that keeps something in its process

remembered: dict[str, int] = {}
"""Of this process."""


async def look_up(name: str) -> int:
    """Takes a while."""
    return len(name)


@workflow
async def remembers(name: str) -> int:
    """Looks up what no other run has."""
    if name not in remembered:
        remembered[name] = await step(look_up, name)
    return await step(number_after, remembered[name])


@workflow
async def looks_up(name: str) -> int:
    """Looks up what it needs."""
    return await step(number_after, await step(look_up, name))


# ------------------------------------------------------------------ an effect outside of a step


async def add(a: int, b: int) -> int:
    """Harmless."""
    return a + b


async def send_mail() -> None:
    """Harmless, for somebody who does not mind a second one: the other side knows its key."""
    count_effect("mail", once=True)


@workflow
async def acts_itself() -> int:
    """Sends from its own code."""
    total = await step(add, 1, 2)
    count_effect("mail")
    return await step(add, total, 3)


@workflow
async def acts_in_step() -> int:
    """Sends in a step."""
    total = await step(add, 1, 2)
    await step.options(effect="idempotent")(send_mail)
    return await step(add, total, 3)


# ------------------------------------------------------------------ a random number that is not in the journal


@workflow
async def draws() -> int:
    """Draws from the process."""
    total = await step(add, 1, 2)
    number = random.randrange(10**9)
    return await step(add, total, number) - number


@workflow
async def draws_from_run() -> int:
    """Draws from the run."""
    total = await step(add, 1, 2)
    number = rng().randrange(10**9)
    return await step(add, total, number) - number


@workflow
async def decides_by_chance() -> int:
    """Draws which way to go."""
    total = await step.options(name=f"way-{random.randrange(16)}")(add, 1, 2)
    return await step(add, total, 3)


@workflow
async def decides_by_run() -> int:
    """Draws it from the run."""
    total = await step.options(name=f"way-{rng().randrange(16)}")(add, 1, 2)
    return await step(add, total, 3)


# ------------------------------------------------------------------ a step that isn't idempotent


async def charge(cents: int) -> int:
    """Twice is twice."""
    count_effect("charge")
    return cents


async def charge_by_key(cents: int) -> int:
    """Twice under one key is once."""
    count_effect("charge", once=True)
    return cents


@workflow
async def charges() -> int:
    """Nothing is declared, and nobody looks at the key."""
    return await step(add, await step(charge, 300), 1)


@workflow
async def charges_by_key() -> int:
    """What was meant."""
    return await step(add, await step.options(effect="idempotent")(charge_by_key, 300), 1)


# ------------------------------------------------------------------ an order that the process decides


@workflow
async def walks_a_set() -> int:
    """The order of a set of texts is another in each process."""
    total = 0
    for word in {"one", "two", "three", "four", "five", "six"}:
        total = await step(add, total, len(word))
    return total


@workflow
async def walks_in_order() -> int:
    """The same, sorted."""
    total = 0
    for word in sorted({"one", "two", "three", "four", "five", "six"}):
        total = await step(add, total, len(word))
    return total

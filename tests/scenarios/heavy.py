"""Workflows of the kind scale, for worker processes."""

from __future__ import annotations

from replaykit import step, workflow

__all__ = ["MEGABYTE", "careful", "light", "weighs"]

MEGABYTE = 1_000_000


async def weigh(megabytes: int) -> list[str]:
    """A list that encodes to so much."""
    return ["x" * MEGABYTE for _ in range(megabytes)]


@step.policy(effect="irreversible")
async def print_weight(megabytes: int) -> list[str]:
    """The same, and it cannot be done again."""
    return await weigh(megabytes)


@workflow
async def weighs(megabytes: int) -> int:
    """How much came of it."""
    return len(await step(weigh, megabytes))


@workflow
async def careful(megabytes: int) -> int:
    """The same of what happened for good."""
    return len(await step(print_weight, megabytes))


async def add(number: int) -> int:
    """Light."""
    return number + 1


@workflow
async def light(steps: int) -> int:
    """Somebody else's."""
    total = 0
    for _ in range(steps):
        total = await step(add, total)
    return total

"""The workflows that the benchmarks run."""

from __future__ import annotations

import asyncio

from replaykit import step, workflow


async def echo(i: int) -> dict[str, int]:
    """A step without a body worth the name, as the peers' benchmarks have it."""
    return {"i": i}


async def pause(i: int) -> int:
    """A step that takes a while, so that many are in flight at once."""
    await asyncio.sleep(0.2)
    return i


@workflow
async def echoes(steps: int) -> int:
    """That many steps, one after the other."""
    for i in range(steps):
        await step(echo, i)
    return steps


@workflow
async def pauses(steps: int) -> int:
    """That many steps that take a while."""
    for i in range(steps):
        await step(pause, i)
    return steps


@workflow
async def nap(seconds: float) -> None:
    """Waits, out of memory."""
    await asyncio.sleep(seconds)

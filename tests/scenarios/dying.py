"""Workflows of the kind crash-window: their processes are killed between what they do and what is written of it."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator
from typing import Any

from tenacity import AsyncRetrying, stop_after_attempt

from replaykit import step, workflow
from tests.crash.effects_points import install
from tests.crash.workflows import note, pass_gate

__all__ = ["careful", "deadly", "lifespan", "retried", "three_steps"]


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    """The worker's process can be stopped at marked points."""
    install()
    yield


async def first(path: str) -> None:
    """Leaves a line."""
    note(path, "first")


async def second(path: str) -> None:
    """Leaves a line."""
    note(path, "second")


async def third(path: str) -> None:
    """Leaves a line."""
    note(path, "third")


@workflow
async def three_steps(path: str) -> str:
    """One after another."""
    await step(first, path)
    await step(second, path)
    await step(third, path)
    return "done"


async def crash() -> None:
    """Ends the process."""
    os._exit(9)


@workflow
async def deadly(path: str) -> None:
    """Gets to its third step and no further."""
    await step(first, path)
    await step(second, path)
    await step(crash)


@workflow
async def retried(gate: str) -> str:
    """Three retries are allowed."""
    return await step.options(retry=AsyncRetrying(stop=stop_after_attempt(4)))(pass_gate, gate)


async def draw(path: str, size: int) -> dict[str, Any]:
    """Another number at each call, in a large value."""
    number = random.randrange(10**9)
    note(path, "draw", number)
    return {"number": number, "ballast": "x" * size}


async def spend(path: str, number: int) -> int:
    """Acts on what was drawn."""
    note(path, "spend", number)
    return number


@workflow
async def careful(path: str, size: int) -> int:
    """What it spends is what it drew."""
    drawn = await step(draw, path, size)
    return await step(spend, path, drawn["number"])

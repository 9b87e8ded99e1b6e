"""Workflows of the kind duplicate-effect: each body leaves a line in the file that it is given."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tenacity import AsyncRetrying, stop_after_attempt

from replaykit import step, workflow


def say(path: str, what: str) -> None:
    """One line, whole."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(handle, f"{what}\n".encode())
    os.close(handle)


async def act(path: str, what: str) -> None:
    """Acts on the world."""
    say(path, what)


async def wait_for(path: str, door: str) -> None:
    """Until the test opens the door."""
    say(path, "waits")
    while not Path(door).exists():
        await asyncio.sleep(0.01)


@workflow
async def long_one(path: str, door: str) -> str:
    """A step, a wait, a step."""
    await step(act, path, "A")
    await step(wait_for, path, door)
    await step(act, path, "B")
    return "done"


@workflow
async def another(path: str) -> str:
    """Not the same."""
    await step(act, path, "another")
    return "another"


def slow(path: str, door: str) -> int:
    """A sync body that no time-out can stop: it ends when the test opens the door."""
    attempt = step.current().attempt
    say(path, f"begin {attempt}")
    if attempt == 1:
        while not Path(door).exists():
            time.sleep(0.01)
    say(path, f"end {attempt}")
    return attempt


@workflow
async def impatient(path: str, door: str) -> int:
    """Its time is up long before the body's end."""
    return await step.options(timeout=0.05, retry=AsyncRetrying(stop=stop_after_attempt(3)))(slow, path, door)


@workflow
async def once(path: str, n: int) -> int:
    """One body a run."""
    await step(act, path, str(n))
    return n

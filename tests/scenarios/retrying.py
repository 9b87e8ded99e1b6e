"""Steps that fail, or end their process, again and again: a module that worker processes import."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tenacity import AsyncRetrying, stop_after_attempt, wait_fixed

from replaykit import step, workflow

__all__ = ["crashes", "interrupted", "raises"]

FIVE = AsyncRetrying(stop=stop_after_attempt(5), wait=wait_fixed(1.0))


def say(path: str) -> None:
    """Tell the world outside which try this is."""
    with Path(path).open("a") as file:
        file.write(f"{step.current().attempt}\n")


async def crash(path: str) -> None:
    """Ends the process in its middle."""
    say(path)
    os._exit(9)


async def refuse(path: str) -> None:
    """Raises."""
    say(path)
    raise ConnectionError("refused")


async def wait_for(path: str) -> str:
    """Ends once there is a file beside."""
    say(path)
    while not Path(f"{path}.open").exists():
        await asyncio.sleep(0.01)
    return "done"


@workflow
async def crashes(path: str) -> None:
    """Five tries are allowed."""
    await step.options(retry=FIVE)(crash, path)


@workflow
async def raises(path: str) -> None:
    """Five tries are allowed."""
    await step.options(retry=FIVE)(refuse, path)


@workflow
async def interrupted(path: str) -> str:
    """One try is allowed."""
    return await step.options(retry=AsyncRetrying(stop=stop_after_attempt(1)))(wait_for, path)

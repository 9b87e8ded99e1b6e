"""Workflows whose bodies tell, through files, that they have begun, and end when they are told to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from replaykit import step, workflow


def begin(folder: str) -> Path:
    """Leaves a file named by this process; returns the file that ends the body."""
    Path(folder, f"begun-{os.getpid()}").touch()
    return Path(folder, "go")


async def patient(folder: str) -> int:
    """An async body."""
    go = begin(folder)
    while not go.exists():
        await asyncio.sleep(0.01)
    return os.getpid()


def deaf(folder: str) -> int:
    """A sync body: nothing can cancel it."""
    go = begin(folder)
    while not go.exists():
        time.sleep(0.01)
    return os.getpid()


@workflow
async def waits(folder: str) -> int:
    """The process that ended the body."""
    return await step(patient, folder)


@workflow
async def blocks(folder: str) -> int:
    """The same with a sync body."""
    return await step(deaf, folder)


@asynccontextmanager
async def broken_lifespan() -> AsyncIterator[None]:
    """A pool that cannot be opened."""
    raise ConnectionRefusedError("no redis here")
    yield

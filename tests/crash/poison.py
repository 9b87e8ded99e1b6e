"""Runs that end or block their process, and the healthy ones beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from replaykit import step, workflow


async def exits(code: int) -> None:
    """Ends the process as a C library does."""
    os._exit(code)


async def kills() -> None:
    """Ends the process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.Event().wait()


async def never_yields() -> None:
    """Keeps the event loop for itself."""
    while True:
        time.sleep(0.01)


def exits_in_a_thread(code: int) -> None:
    """The same from a sync body."""
    os._exit(code)


async def healthy(number: int) -> int:
    """What everybody else does."""
    await asyncio.sleep(0)
    return number


async def waits_for(path: str) -> int:
    """A long call: ends when the test says."""
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return os.getpid()


@workflow
async def poisonous(code: int) -> None:
    """One good step, then the end of the process."""
    await step(healthy, 0)
    await step(exits, code)


@workflow
async def poisonous_thread(code: int) -> None:
    """The same from a thread."""
    await step(exits_in_a_thread, code)


@workflow
async def poisonous_signal() -> None:
    """The same by a signal."""
    await step(kills)


@workflow
async def poisonous_block() -> None:
    """A body that never lets go of the loop."""
    await step(never_yields)


@workflow
async def poisonous_code() -> None:
    """The workflow's own code never lets go of the loop."""
    await step(healthy, 0)
    while True:
        time.sleep(0.01)


@workflow
async def sound(number: int) -> int:
    """Two steps."""
    first = await step(healthy, number)
    return first + await step(healthy, number)


@workflow
async def patient(first: str, second: str, steps: int) -> list[int]:
    """Two long steps and so many short ones: in which processes."""
    pids = [await step(waits_for, first), await step(waits_for, second)]
    pids += [await step(waits_for, second) for _ in range(steps)]
    return pids

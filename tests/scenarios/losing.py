"""Workflows of the kind zombie-lease, and a process of one's own that executes them: `python -m tests.scenarios.losing DSN`.

Its `Worker` is nobody's child: nothing ends it with its lease, so it lives to see that it has lost it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from replaykit import Worker, step, workflow
from replaykit.limits import Settings
from tests.crash.workflows import calling, gated

__all__ = ["ASLEEP", "LEASE_SECONDS", "hung", "lingering", "sleepless"]

ASLEEP = "REPLAYKIT_TEST_ASLEEP"
"""Set in a process whose bodies are about to lose their lease: `blocked` or `stopped`."""

LEASE_SECONDS = 1.5


async def linger(door: str, other_door: str) -> int:
    """Ends when its door is there: one door is for the worker that is asleep, the other for everybody else."""
    how = os.environ.get(ASLEEP)
    async with calling():
        while not Path(door if how else other_door).exists():
            if how == "blocked":
                time.sleep(0.01)  # the mistake that the scenario is about
            else:
                await asyncio.sleep(0.01)
    return os.getpid()


@workflow
async def lingering(door: str, other_door: str) -> int:
    """One step."""
    return await step(linger, door, other_door)


async def never_end() -> None:
    """Waits for what never comes."""
    async with calling():
        await asyncio.get_running_loop().create_future()


@workflow
async def hung(seconds: float) -> None:
    """A step that hangs, with a time-out."""
    await step.options(timeout=seconds)(never_end)


@workflow
async def sleepless() -> None:
    """A step that hangs, without one."""
    await step(never_end)


async def main(dsn: str) -> None:
    """Work until SIGTERM."""
    worker = Worker(dsn, workflows=[lingering, gated], settings=Settings(lease_seconds=LEASE_SECONDS))
    working = asyncio.create_task(worker.run())
    print(worker.worker_id, flush=True)
    await working


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

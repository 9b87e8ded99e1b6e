"""Scenarios of the kind memory: what is recorded leaves memory, and so does a run that has ended."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from replaykit import Client, Worker, step, workflow
from replaykit.limits import CLAIM_BYTES_MAX
from replaykit.replay.execution import Execution

pytestmark = pytest.mark.anyio

MEGABYTE = 1 << 20

held: list[int] = []


@pytest.fixture
def traced() -> Iterator[None]:
    """Python's own count of the memory that it holds."""
    held.clear()
    peaks.clear()
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def make(size: int) -> str:
    held.append(tracemalloc.get_traced_memory()[0])
    return random.randbytes(size // 2).hex()  # the database cannot make it smaller: pages are measured as stored


peaks: list[int] = []


async def last(wait: bool) -> int:
    peaks.append(tracemalloc.get_traced_memory()[1])
    if len(peaks) == 1 and wait:
        await asyncio.Event().wait()
    return peaks[-1]


@workflow
async def drops_results(steps: int, size: int, wait: bool = False) -> int:
    total = sum([len(await step(make, size)) for _ in range(steps)])
    await step(last, wait)
    return total


@pytest.mark.parametrize("steps", [40, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_b184_a_recorded_result_leaves_memory(dsn: str, traced: None, steps: int) -> None:
    """A megabyte a step, dropped at once: memory stays within a few of them, and within some pages in a replay."""
    async with Client(dsn) as client:
        first = Worker(client, workflows=[drops_results])
        await first.start()
        handle = await client.start(drops_results, steps, MEGABYTE, True)
        while not peaks:
            await asyncio.sleep(0.01)
        await first.stop(grace_seconds=0)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        async with Worker(client, workflows=[drops_results]):
            assert await handle.result(timeout=600) == steps * MEGABYTE

    assert len(held) == steps
    assert max(held[5:]) - held[5] < 8 * MEGABYTE
    assert peaks[-1] - before < 3 * CLAIM_BYTES_MAX  # a page as it came, and as text


async def test_b184_runs_that_have_ended_leave_memory(dsn: str) -> None:
    """A hundred, some at a time: none of them is kept, and none is left to the collector."""
    async with Client(dsn) as client, Worker(client, workflows=[drops_results]):
        await (await client.start(drops_results, 1, 2)).result(timeout=30)
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                handles = await asyncio.gather(*(client.start(drops_results, 2, 10_000) for _ in range(10)))
                for handle in handles:
                    await handle.result(timeout=60)
            kept = sum(isinstance(one, Execution) and one.info is drops_results.info for one in gc.get_objects())
        finally:
            gc.enable()

    assert kept <= 10  # the last ones may still be on their way out

"""One process drives runs that were started before: `python -m benchmarks.throughput URL RUNS STEPS`.

Times are the database's: from the first claim to the last end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import psycopg

from benchmarks.workflows import echoes, nap, pauses
from replaykit import Client, Worker
from replaykit.runtime.child import calm_collector

FINISHED = (
    b"select count(*) filter (where state = 'succeeded'), count(*) filter (where state in ('failed', 'held')),"
    b" extract(epoch from max(finished_at) - min(started_at))::float8 from replaykit.runs"
)


async def finished(watch: psycopg.AsyncConnection[Any], runs: int) -> float:
    """Wait for the end of so many runs; seconds from the first claim to the last end."""
    while True:
        row = await (await watch.execute(FINISHED)).fetchone()
        assert row is not None
        done, bad, seconds = row
        if bad:
            raise RuntimeError(f"{bad} runs failed")
        if done == runs:
            return float(seconds)
        await asyncio.sleep(0.02)


async def measure(dsn: str, runs: int, steps: int, around: AbstractContextManager[Any] | None = None) -> None:
    """Start the runs, drive them, within what `around` gives, and print one line."""
    client = Client(dsn)
    started = time.perf_counter()
    for first in range(0, runs, 1000):
        await asyncio.gather(*(client.start(echoes, steps) for _ in range(min(1000, runs - first))))
    start_seconds = time.perf_counter() - started
    cpu = time.process_time()
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watch,
        Worker(client, workflows=[echoes, nap, pauses]),
    ):
        with around or contextlib.nullcontext():
            seconds = await finished(watch, runs)
    cpu = time.process_time() - cpu
    await client.aclose()
    figures = {
        "runs": runs,
        "steps": steps,
        "steps_per_s": runs * steps / seconds,
        "runs_per_s": runs / seconds,
        "ms_per_step": seconds / steps * 1000,
        "cpu_us_per_step": cpu / (runs * steps) * 1e6,
        "starts_per_s": runs / start_seconds,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    calm_collector()  # as in every child of `replaykit worker`
    asyncio.run(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

"""How soon a run in memory is told to end: `python -m benchmarks.cancelling URL RUNS`.

A worker holds that many runs, each inside a step. They are cancelled one after the other by SQL; the time is from the moment
at which the request is committed to the CancelledError in the run's own code.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from uuid import UUID

import psycopg

from replaykit import Client, Worker, step, workflow

TOLD: dict[int, asyncio.Future[float]] = {}
BEGUN: set[int] = set()


async def hang(number: int) -> None:
    """Until it is cancelled."""
    BEGUN.add(number)
    await asyncio.Event().wait()


@workflow
async def hangs(number: int) -> None:
    """Says when it is cancelled."""
    try:
        await step(hang, number)
    except asyncio.CancelledError:
        TOLD[number].set_result(time.perf_counter())
        raise


def cancel(connection: psycopg.Connection[tuple[object, ...]], run: UUID) -> float:
    """Ask for it; when that was committed."""
    connection.execute("select replaykit.cancel(%s)", [run])
    return time.perf_counter()


async def measure(dsn: str, runs: int) -> dict[str, float]:
    """Milliseconds, the median and the longest."""
    async with Client(dsn) as client, Worker(client, workflows=[hangs]):
        loop = asyncio.get_running_loop()
        handles = []
        for number in range(runs):
            TOLD[number] = loop.create_future()
            handles.append(await client.start(hangs, number))
        while len(BEGUN) < runs:
            await asyncio.sleep(0.01)
        taken = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            for number, handle in enumerate(handles):
                committed = await asyncio.to_thread(cancel, connection, handle.id)
                taken.append(max(0.0, await TOLD[number] - committed) * 1_000)
                await asyncio.sleep(0.06)  # each a first look into the mailbox, as where few are cancelled
    return {"median_ms": statistics.median(taken), "longest_ms": max(taken)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], int(sys.argv[2])))))

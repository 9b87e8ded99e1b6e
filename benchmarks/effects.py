"""What intents cost: runs of 10 idempotent steps over runs of 20 plain ones: `python -m benchmarks.effects URL RUNS PAIRS`.

An idempotent step has two rows, a plain one has one. Both kinds of runs are started before, in alternation, and driven by one
process with 100 of them in memory. Times are the database's: from the first claim to the last end of a kind.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys

import psycopg

from benchmarks.workflows import echo
from replaykit import Client, Worker, step, workflow
from replaykit.runtime.child import calm_collector

CONCURRENCY = 100
SPAN = (
    "select extract(epoch from max(finished_at) - min(started_at))::float8, count(*) filter (where state = 'succeeded')"
    " from replaykit.runs where workflow = %s"
)


@step.policy(effect="idempotent")
async def call(i: int) -> dict[str, int]:
    """As `echo`, declared as a call that the other side recognises by its key."""
    return {"i": i}


@workflow
async def ten_with_intents() -> None:
    """Ten calls, each with its intent."""
    for i in range(10):
        await step(call, i)


@workflow
async def twenty_plain() -> None:
    """As many rows."""
    for i in range(20):
        await step(echo, i)


async def measure(dsn: str, runs: int, pairs: int) -> None:
    """Drive so many runs of each kind, so often; print one line."""
    rates: dict[str, list[float]] = {ten_with_intents.name: [], twenty_plain.name: []}
    async with Client(dsn) as client, await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watch:
        for _ in range(pairs):
            for kind in (ten_with_intents, twenty_plain):
                await watch.execute("truncate replaykit.runs, replaykit.journal, replaykit.payloads, replaykit.intents")
                await asyncio.gather(*(client.start(kind) for _ in range(runs)))
                async with Worker(client, workflows=[kind], concurrency=CONCURRENCY):
                    while True:
                        row = await (await watch.execute(SPAN, (kind.name,))).fetchone()
                        assert row is not None
                        if row[1] == runs:
                            break
                        await asyncio.sleep(0.02)
                rates[kind.name].append(runs / row[0])
    ratios = [a / b for a, b in zip(rates[ten_with_intents.name], rates[twenty_plain.name], strict=True)]
    found = {name: statistics.median(values) for name, values in rates.items()}
    print(json.dumps(found | {"ratio": statistics.median(ratios)}), flush=True)


if __name__ == "__main__":
    calm_collector()  # as in every child of `replaykit worker`
    asyncio.run(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

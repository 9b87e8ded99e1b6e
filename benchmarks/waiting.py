"""What waiting runs cost: `python -m benchmarks.waiting URL MANY` parks 1,000 runs and then MANY, by a real worker.

Prints the worker's resident memory and the buffers that a claim hits, at each number.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import uuid
from pathlib import Path

import psycopg

from benchmarks.workflows import echoes, nap, pauses
from replaykit import Client, Worker
from replaykit.postgres import runs as statements
from replaykit.postgres.database import Database

WAITING = b"select count(*) from replaykit.runs where state = 'waiting'"


def rss_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def claim_buffers(dsn: str) -> int:
    """Shared buffers that one claim touches, by EXPLAIN, after a vacuum."""
    database = Database(dsn)
    bound = statements.claim(queue="default", workflows=["nap"], worker=uuid.uuid4(), token=uuid.uuid4(), limit=100)
    statement, parameters = bound[0]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(b"vacuum analyze replaykit.runs")
        await connection.execute(b"set enable_seqscan = off")
        text = "explain (analyze, buffers, format text) " + str(database.text(statement))
        rows = await (await connection.execute(text.encode(), parameters)).fetchall()
        plan = "\n".join(row[0] for row in rows)
        hit = re.search(r"shared hit=(\d+)", plan)  # the first line that has it is the whole statement's
        return int(hit[1]) if hit else 0


async def main(dsn: str, many: int) -> None:
    """Park, measure, park more, measure."""
    client = Client(dsn)
    parked = 0
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watch,
        Worker(client, workflows=[echoes, nap, pauses]),
    ):
        for target in (1_000, many):
            while parked < target:
                batch = min(1_000, target - parked)
                await asyncio.gather(*(client.start(nap, 86_400.0) for _ in range(batch)))
                parked += batch
            while True:
                row = await (await watch.execute(WAITING)).fetchone()
                assert row is not None
                if row[0] == parked:
                    break
                await asyncio.sleep(0.1)
            print(json.dumps({"waiting": parked, "rss_mb": rss_mb(), "buffers": await claim_buffers(dsn)}), flush=True)
    await client.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

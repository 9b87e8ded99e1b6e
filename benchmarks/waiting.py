"""What waiting runs cost: `python -m benchmarks.waiting URL MANY LOG` parks 1,000 runs and then MANY, by a real worker.

Prints, at each number, the resident memory of the worker's child and the buffers that a claim of 100 other runs hits.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.recovery import ask, start_worker, wait_for
from benchmarks.workflows import nap
from replaykit import Client
from replaykit.postgres import runs as statements
from replaykit.postgres.database import Database

CLAIMED = 100


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def claim_buffers(dsn: str, connection: psycopg.Connection[Any], worker: uuid.UUID) -> int:
    """Shared buffers that one claim of 100 runs hits, by EXPLAIN; taken back, so that nothing is left of it."""
    database = Database(dsn)
    bound = statements.claim(queue="probe", workflows=["probe"], worker=worker, token=uuid.uuid4(), limit=CLAIMED)
    statement, parameters = bound[0]
    text = database.text(statement)
    plain = text if isinstance(text, bytes) else str(text).encode()
    connection.execute(b"vacuum analyze replaykit.runs")
    with connection.transaction(force_rollback=True):
        connection.execute(b"set local enable_seqscan = off")  # as every connection of replaykit has it
        connection.execute(
            b"insert into replaykit.runs (id, workflow, queue)"
            b" select gen_random_uuid(), 'probe', 'probe' from generate_series(1, 100)"
        )
        rows = connection.execute(b"explain (analyze, buffers) " + plain, parameters).fetchall()
    plan = "\n".join(row[0] for row in rows)
    assert "rows=100" in plan, plan
    hit = re.search(r"shared hit=(\d+)", plan)  # the first line that has it is the whole statement's
    return int(hit[1]) if hit else 0


async def start(dsn: str, runs: int) -> None:
    """Start that many runs that wait for a day."""
    client = Client(dsn)
    for first in range(0, runs, 1_000):
        await asyncio.gather(*(client.start(nap, 86_400.0) for _ in range(min(1_000, runs - first))))
    await client.aclose()


def main(dsn: str, many: int, log: Path) -> None:
    """Park, measure, park more, measure."""
    worker = start_worker(dsn, 30, log)
    parked = 0
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            me = wait_for(connection, "select id from replaykit.workers where expires_at > now() limit 1")
            pid = ask(connection, "select pid from replaykit.workers where id = %s", me)
            for target in (1_000, many):
                asyncio.run(start(dsn, target - parked))
                parked = target
                done = "select count(*) = %s from replaykit.runs where state = 'waiting'"
                wait_for(connection, done, parked, seconds=max(900, parked / 100), pause=max(0.25, parked / 200_000))
                figures = {"waiting": parked, "rss_mb": rss_mb(pid), "buffers": claim_buffers(dsn, connection, me)}
                print(json.dumps(figures), flush=True)
    finally:
        worker.terminate()
        worker.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

"""What many of something cost: `python -m benchmarks.scale URL PART [N]`, one JSON object a line.

    fan-out N        one run gathers N steps: time, and the memory its process grew by
    journal N        a run of N entries is claimed by a fresh process: time to its next entry, and memory
    concurrent N     N runs in memory at once, each between two steps: memory a run
    processes N      one `replaykit worker` with N child processes beside one with a single one: steps a second
    bytes N          N steps of one run and of 100: bytes of WAL, and of tables and indexes, a step

Memory is resident memory of the process that has the runs. Times are the database's where it sees both ends.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.recovery import ask, start_worker, wait_for
from benchmarks.waiting import rss_mb
from benchmarks.workflows import echo, echoes
from replaykit import Client, step, workflow

WORKFLOWS = Path(__file__).resolve()
SPAN = "select extract(epoch from max(finished_at) - min(started_at))::float8 from replaykit.runs"
DONE = "select count(*) = %s from replaykit.runs where state = 'succeeded'"


@workflow
async def fan_out(width: int) -> int:
    """That many steps at once."""
    return len(await asyncio.gather(*(step(echo, i) for i in range(width))))


@workflow
async def long_one(steps: int) -> int:
    """That many steps, a wait out of memory, and one more."""
    for i in range(steps):
        await step(echo, i)
    await asyncio.sleep(3_600)
    await step(echo, steps)
    return steps


@workflow
async def between(seconds: float) -> None:
    """Waits in memory, between two steps."""
    await step(echo, 1)
    await asyncio.sleep(seconds)
    await step(echo, 2)


async def start(dsn: str, kind: Any, *arguments: Any, times: int = 1) -> None:
    """Start so many runs."""
    async with Client(dsn) as client:
        for first in range(0, times, 1_000):
            await asyncio.gather(*(client.start(kind, *arguments) for _ in range(min(1_000, times - first))))


def child(connection: psycopg.Connection[Any]) -> int:
    """The pid of the process that claims."""
    return int(
        wait_for(connection, "select pid from replaykit.workers where expires_at > now() and stopped_at is null")
    )


def part_fan_out(dsn: str, connection: psycopg.Connection[Any], width: int, worker: Any) -> dict[str, Any]:
    """One run, many bodies."""
    worker()
    pid = child(connection)
    before = rss_mb(pid)
    asyncio.run(start(dsn, fan_out, width))
    wait_for(connection, DONE, 1, seconds=300)
    return {"steps": width, "seconds": ask(connection, SPAN), "grown_mb": rss_mb(pid) - before}


def part_journal(dsn: str, connection: psycopg.Connection[Any], entries: int, worker: Any) -> dict[str, Any]:
    """A long journal, read by a process that has never seen it."""
    first = worker()
    asyncio.run(start(dsn, long_one, entries))
    wait_for(connection, "select count(*) = 1 from replaykit.runs where state = 'waiting'", seconds=1_200, pause=0.25)
    first.terminate()
    first.wait(timeout=60)
    worker()
    pid = int(
        wait_for(
            connection, "select pid from replaykit.workers where stopped_at is null order by started_at desc limit 1"
        )
    )
    before = rss_mb(pid)
    connection.execute("update replaykit.runs set available_at = now() where state = 'waiting'")
    asked = ask(connection, "select now()")
    # The timer is an hour away: the claim replays all of it, finds that, and leaves memory again.
    wait_for(connection, "select count(*) = 1 from replaykit.runs where state = 'waiting' and claims > 1", seconds=600)
    left = ask(connection, "select now()")
    return {
        "entries": ask(connection, "select count(*) from replaykit.journal"),
        "seconds": (left - asked).total_seconds(),
        "grown_mb": rss_mb(pid) - before,
    }


def part_concurrent(dsn: str, connection: psycopg.Connection[Any], runs: int, worker: Any) -> dict[str, Any]:
    """Many runs in memory."""
    worker("--concurrency", str(runs), "--evict-after-seconds", "120")
    pid = child(connection)
    before = rss_mb(pid)
    asyncio.run(start(dsn, between, 15.0, times=runs))
    wait_for(connection, "select count(*) = %s from replaykit.journal", runs, seconds=120)
    grown = rss_mb(pid) - before
    wait_for(connection, DONE, runs, seconds=300)
    return {"runs": runs, "grown_mb": grown, "kb_a_run": grown * 1024 / runs, "seconds": ask(connection, SPAN)}


def part_processes(dsn: str, connection: psycopg.Connection[Any], processes: int, worker: Any) -> dict[str, Any]:
    """One process, then many."""
    found: dict[str, Any] = {"processes": processes}
    for number in (1, processes):
        connection.execute("truncate replaykit.runs, replaykit.journal, replaykit.payloads, replaykit.workers")
        asyncio.run(start(dsn, echoes, 50, times=200))
        hired = worker("--processes", str(number), "--concurrency", str(max(1, 200 // number)))
        wait_for(connection, DONE, 200, seconds=300)
        seconds = ask(connection, SPAN)
        hired.terminate()
        hired.wait(timeout=60)
        found[f"steps_per_s_{number}"] = 200 * 50 / seconds
    return found


def part_bytes(dsn: str, connection: psycopg.Connection[Any], steps: int, worker: Any) -> dict[str, Any]:
    """WAL and tables."""
    worker()
    child(connection)
    found: dict[str, Any] = {"steps": steps}
    for runs in (1, 100):
        connection.execute("truncate replaykit.runs, replaykit.journal, replaykit.payloads")
        connection.execute("checkpoint")
        begin = ask(connection, "select pg_current_wal_lsn()")
        asyncio.run(start(dsn, echoes, steps // runs, times=runs))
        wait_for(connection, DONE, runs, seconds=300)
        found[f"wal_{runs}"] = float(ask(connection, "select pg_wal_lsn_diff(pg_current_wal_lsn(), %s)", begin)) / steps
        found[f"stored_{runs}"] = ask(connection, "select pg_total_relation_size('replaykit.journal')") / steps
    return found


PARTS = {
    "fan-out": part_fan_out,
    "journal": part_journal,
    "concurrent": part_concurrent,
    "processes": part_processes,
    "bytes": part_bytes,
}


def main(dsn: str, part: str, number: int) -> None:
    """Measure one part."""
    hired: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(dsn, autocommit=True) as connection:

        def worker(*flags: str) -> subprocess.Popen[bytes]:
            hired.append(start_worker(dsn, 30, Path(folder) / f"log{len(hired)}", WORKFLOWS, *flags))
            return hired[-1]

        try:
            print(json.dumps(PARTS[part](dsn, connection, number, worker)), flush=True)
        finally:
            for one in hired:
                if one.poll() is None:
                    one.terminate()
                    one.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

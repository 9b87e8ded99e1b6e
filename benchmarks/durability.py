"""What `durability="async"` saves and what it can lose: `python -m benchmarks.durability URL STEPS KILLS`.

Saves: one run's steps, async over sync, in one process. Loses: a process with one run of cheap steps is killed with SIGKILL
again and again; a body that runs more often than its run has steps was lost with the batch that held its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.recovery import ask, start_worker, wait_for
from replaykit import Client, Worker, step, workflow
from replaykit.runtime.child import calm_collector

FILE = Path(__file__).resolve()
ROUNDS = 5


async def echo(i: int) -> dict[str, int]:
    """A step without a body worth the name."""
    return {"i": i}


async def count(path: str) -> None:
    """One byte in a file: this body ran."""
    with Path(path).open("ab", buffering=0) as stream:
        stream.write(b".")


@workflow
async def cheap(steps: int) -> None:
    """Each result is handed on before its commit."""
    for i in range(steps):
        await step.options(durability="async")(echo, i)


@workflow
async def dear(steps: int) -> None:
    """Each result is committed first."""
    for i in range(steps):
        await step(echo, i)


@workflow
async def counted(path: str, steps: int) -> None:
    """Cheap steps whose bodies leave a trace."""
    for _ in range(steps):
        await step.options(durability="async")(count, path)


async def speed(dsn: str, steps: int) -> dict[str, float]:
    """Milliseconds a step, the better of some rounds each."""
    taken: dict[str, list[float]] = {"cheap": [], "dear": []}
    async with Client(dsn) as client, Worker(client, workflows=[cheap, dear]):
        for _ in range(ROUNDS):
            for one in (cheap, dear):
                handle = await client.start(one, steps)
                await handle.result()
                info = await handle.info()
                assert info.started_at is not None and info.finished_at is not None
                taken[one.name].append((info.finished_at - info.started_at).total_seconds() * 1_000 / steps)
    return {name: min(times) for name, times in taken.items()}


def losses(dsn: str, steps: int, kills: int) -> dict[str, Any]:
    """How many bodies ran again after so many kills of the process that ran them."""
    with tempfile.TemporaryDirectory() as folder, psycopg.connect(dsn, autocommit=True) as connection:
        seen = Path(folder) / "seen"
        seen.touch()
        worker: subprocess.Popen[bytes] = start_worker(dsn, 30, Path(folder) / "log", FILE)
        try:
            asyncio.run(_start(dsn, str(seen), steps))
            for n in range(kills):
                mark = steps * (n + 1) // (kills + 2)
                while seen.stat().st_size < mark:
                    time.sleep(0.001)
                pid = wait_for(
                    connection,
                    "select w.pid from replaykit.runs r join replaykit.workers w on w.id = r.worker"
                    " where r.state = 'running'",
                )
                os.kill(pid, 9)
            wait_for(connection, "select count(*) = 1 from replaykit.runs where state = 'succeeded'", seconds=300)
            recorded = ask(connection, "select count(*) from replaykit.journal")
        finally:
            worker.terminate()
            worker.wait(timeout=60)
        return {"recorded": recorded, "bodies": seen.stat().st_size, "kills": kills}


async def _start(dsn: str, path: str, steps: int) -> None:
    async with Client(dsn) as client:
        await client.start(counted, path, steps)


def main(dsn: str, steps: int, kills: int) -> None:
    """Both, on one line."""
    found: dict[str, Any] = asyncio.run(speed(dsn, steps))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("truncate replaykit.runs, replaykit.journal, replaykit.payloads")
    print(json.dumps(found | losses(dsn, steps * 10, kills)), flush=True)


if __name__ == "__main__":
    calm_collector()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""How soon runs go on after kill -9: `python -m benchmarks.recovery child|worker URL RUNS LEASE_SECONDS`.

`child`: one worker process with RUNS runs in flight loses its child; its parent hands the runs to another. `worker`: a whole
worker, parent and children, dies; another one is alive. Times are the database's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.workflows import pauses
from replaykit import Client

FILE = str(Path(__file__).with_name("workflows.py"))
STEPS = {"child": 60, "worker": 100}
SETTLE_SECONDS = 4.0  # a worker that has just started is still importing its spare child


def start_worker(
    dsn: str, lease_seconds: float, log: Path, module: Path | str = FILE, *flags: str
) -> subprocess.Popen[bytes]:
    """A real `replaykit worker`; later flags go before earlier ones."""
    code = "import sys; from replaykit.interfaces.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "worker",
        str(module),
        "--lease-seconds",
        str(lease_seconds),
        "--concurrency",
        "2000",
        *flags,
    ]
    return subprocess.Popen(
        command, env={**os.environ, "REPLAYKIT_DATABASE_URL": dsn}, stdout=log.open("ab"), stderr=subprocess.STDOUT
    )


def ask(connection: psycopg.Connection[Any], text: str, *parameters: Any) -> Any:
    """The first value of the first row."""
    row = connection.execute(text.encode(), parameters).fetchone()
    return None if row is None else row[0]


def wait_for(
    connection: psycopg.Connection[Any], text: str, *parameters: Any, seconds: float = 120, pause: float = 0.01
) -> Any:
    """Until the query gives something true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := ask(connection, text, *parameters):
            return value
        time.sleep(pause)
    raise RuntimeError(f"never: {text}")


async def start(dsn: str, runs: int, steps: int) -> None:
    """Start that many runs."""
    client = Client(dsn)
    await asyncio.gather(*(client.start(pauses, steps) for _ in range(runs)))
    await client.aclose()


def main(what: str, dsn: str, runs: int, lease_seconds: float, log: Path) -> None:
    """Kill, and look who goes on."""
    workers = [start_worker(dsn, lease_seconds, log)]
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            wait_for(connection, "select count(*) from replaykit.workers where expires_at > now()")
            asyncio.run(start(dsn, runs, STEPS[what]))
            wait_for(connection, "select count(*) = %s from replaykit.runs where state = 'running'", runs)
            time.sleep(SETTLE_SECONDS)
            if what == "worker":
                workers.append(start_worker(dsn, lease_seconds, log))
                wait_for(
                    connection,
                    "select count(*) >= 2 from replaykit.workers where expires_at > now() and stopped_at is null",
                )
                time.sleep(lease_seconds * 1.5)  # until the second may judge the first
            holder = wait_for(connection, "select worker from replaykit.runs where state = 'running' limit 1")
            pid = ask(connection, "select pid from replaykit.workers where id = %s", holder)
            killed_at = ask(connection, "select clock_timestamp()")
            if what == "worker":
                workers[0].kill()
            os.kill(pid, signal.SIGKILL)
            first = wait_for(
                connection,
                "select min(recorded_at) from replaykit.journal where worker <> %s and recorded_at > %s",
                holder,
                killed_at,
            )
            wait_for(connection, "select count(*) = %s from replaykit.runs where state = 'succeeded'", runs)
            entries = ask(connection, "select count(*) from replaykit.journal")
            figures = {
                "what": what,
                "first_entry_s": (first - killed_at).total_seconds(),
                "body_s": 0.2,
                "all_finished": entries == runs * STEPS[what],
                "lease_seconds": lease_seconds,
            }
            print(json.dumps(figures), flush=True)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))

"""The driver's own limit and the peers, each as its documentation says, each in a process and a database of its own.

    python -m benchmarks.peers PEER URL

PEER: `raw-single` (one connection, prepared one-row INSERT: the floor of one durable step), `raw-batch` (100 rows an INSERT:
the ceiling of group commit on one connection), `dbos` (DBOS Transact, async), `absurd` (Absurd's Python SDK, async worker).
A step is a no-op that returns {"i": i}. Prints one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

LOADS = [(1, 200), (100, 20)]  # (concurrent runs, steps in each)
WARM_UP = 50
TABLE = (
    "create table if not exists j(run_id uuid, seq int, name text, output bytea, at timestamptz default now(),"
    " primary key (run_id, seq))"
)


def report(what: str, runs: int, steps: int, seconds: float) -> None:
    """One line of the result."""
    figures = {
        "what": what,
        "runs": runs,
        "steps": steps,
        "steps_per_s": runs * steps / seconds,
        "ms_per_step": seconds / steps * 1000,
    }
    print(json.dumps(figures), flush=True)


def raw_single(dsn: str, rows: int = 1000) -> None:
    """The floor of one durable step."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE)
        insert = "insert into j(run_id, seq, name, output) values (%s, %s, 's', %s)"
        run = uuid.uuid4()
        for i in range(WARM_UP):
            connection.execute(insert, (run, -i - 1, b'{"i":1}'), prepare=True)
        started = time.perf_counter()
        for i in range(rows):
            connection.execute(insert, (run, i, b'{"i":1}'), prepare=True)
        report("raw-single", 1, rows, time.perf_counter() - started)


def raw_batch(dsn: str, batches: int = 200) -> None:
    """The ceiling of group commit on one connection."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE)
        insert = "insert into j(run_id, seq, name, output) select * from unnest(%b::uuid[], %b::int4[], %b::text[], %b::bytea[])"
        started = time.perf_counter()
        for i in range(batches):
            rows = [uuid.uuid4() for _ in range(100)]
            connection.execute(insert, (rows, [i] * 100, ["s"] * 100, [b'{"i":1}'] * 100), prepare=True)
        report("raw-batch", 100, batches, time.perf_counter() - started)


def dbos(dsn: str) -> None:
    """DBOS Transact."""
    from dbos import DBOS  # type: ignore[import-not-found, unused-ignore]

    DBOS(config={"name": "bench", "system_database_url": dsn, "log_level": "ERROR", "run_admin_server": False})

    @DBOS.step()  # type: ignore[untyped-decorator, unused-ignore]
    async def echo(i: int) -> dict[str, int]:
        return {"i": i}

    @DBOS.workflow()  # type: ignore[untyped-decorator, unused-ignore]
    async def echoes(n: int) -> int:
        for i in range(n):
            await echo(i)
        return n

    async def main() -> None:
        DBOS.launch()
        await echoes(5)
        for runs, steps in LOADS:
            started = time.perf_counter()
            await asyncio.gather(*(echoes(steps) for _ in range(runs)))
            report("dbos", runs, steps, time.perf_counter() - started)
        os._exit(0)

    asyncio.run(main())


def absurd(dsn: str) -> None:
    """Absurd."""
    from absurd_sdk import AsyncAbsurd  # type: ignore[import-not-found, unused-ignore]

    tool = Path(sys.executable).with_name("absurdctl")
    subprocess.run([str(tool), "init", "-d", dsn], check=True, stdout=subprocess.DEVNULL)

    async def main() -> None:
        app = AsyncAbsurd(dsn, queue_name="default")
        await app.create_queue("default")
        done = 0

        @app.register_task("echoes")  # type: ignore[untyped-decorator, unused-ignore]
        async def echoes(params: Any, context: Any) -> None:
            nonlocal done
            for i in range(params["n"]):

                async def body(i: int = i) -> dict[str, int]:
                    return {"i": i}

                await context.step("s", body)
            done += 1

        for runs, steps in LOADS:
            done = 0
            for _ in range(runs):
                await app.spawn("echoes", {"n": steps})
            started = time.perf_counter()
            worker = asyncio.create_task(app.start_worker(concurrency=runs, batch_size=runs, poll_interval=0.01))
            while done < runs:
                await asyncio.sleep(0.002)
            seconds = time.perf_counter() - started
            app.stop_worker()
            await asyncio.wait([worker])
            report("absurd", runs, steps, seconds)

    asyncio.run(main())


PEERS = {"raw-single": raw_single, "raw-batch": raw_batch, "dbos": dbos, "absurd": absurd}

if __name__ == "__main__":
    PEERS[sys.argv[1]](sys.argv[2])

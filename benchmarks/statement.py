"""What the server takes for an entry: `python -m benchmarks.statement URL ENTRIES`.

The statement that a quiet worker sends for one entry, prepared, on one connection, with nothing of the engine around it: what
is between it and a bare INSERT is the price of an entry's columns, their checks and the fence; the rest of a step is the engine.
"""

from __future__ import annotations

import json
import sys
import time
import uuid

import psycopg

from replaykit.postgres import journal, leases, runs
from replaykit.postgres.database import Database
from replaykit.replay.entries import Entry, Unit

WARM_UP = 50


def main(dsn: str, entries: int) -> None:
    """Claim a run, write its journal, print one line."""
    database = Database(dsn)
    worker, token = uuid.uuid4(), uuid.uuid4()
    who = leases.insert_worker(
        worker,
        hostname="bench",
        pid=1,
        lease_seconds=3_600.0,
        queues=["default"],
        workflows={},
        version="0",
        python="3",
    )
    connection = database.connect_sync()
    connection.run(*who)
    connection.close()
    with psycopg.connect(dsn, autocommit=True) as raw:
        raw.execute("insert into replaykit.runs (id, workflow) values (gen_random_uuid(), 'lone')")
        for statement, parameters in runs.claim(
            queue="default", workflows=["lone"], worker=worker, token=token, limit=1
        ):
            raw.execute(database.text(statement), parameters)
        run = raw.execute("select id from replaykit.runs where lease_token = %s", [token]).fetchone()
        assert run is not None
        seconds = 0.0
        for seq in range(1, WARM_UP + entries + 1):
            entry = Entry(seq, f"echo#{seq}", "echo", "step", "ok", seq, input="[1]", output='{"i":1}', digest="0" * 32)
            statement, parameters = journal.write_entry(Unit(run[0], token, uuid.uuid4(), [entry]))
            text = database.text(statement)
            started = time.perf_counter()
            written = raw.execute(text, parameters, prepare=True).rowcount
            if seq > WARM_UP:
                seconds += time.perf_counter() - started
            assert written == 1
    print(json.dumps({"entries": entries, "entries_per_s": entries / seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

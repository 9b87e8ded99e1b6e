"""kill -9 of the parent: its children notice, write what has ended, hand back, and leave."""

from __future__ import annotations

import time

import psycopg

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import gated, gated_sync
from tests.runtime.facts import eventually, lives

LEASE = ("--lease-seconds", "60")
SOON_SECONDS = 4.0
"""A child promises 2 s; the machine may be busy."""


def test_orphans_hand_their_runs_back_and_leave(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Within about 2 s, not when a lease of 60 s ends."""
    worker = crew.hire(*LEASE, "--processes", "2")
    orphans = worker.wait_ready(2)
    started = start(crew.dsn, gated, [("gate", 1)] * 20)
    eventually(lambda: sum(c.ended is None for c in outside.calls(key="pass_gate")) == 20, "all bodies run")

    worker.kill()
    killed_at = time.monotonic()

    eventually(lambda: not any(lives(pid) for pid in orphans), "the orphans have left")
    assert time.monotonic() - killed_at < SOON_SECONDS
    assert rows.states() == {"pending": 20}
    assert rows.recoveries() == 0
    outside.open_gate("gate")
    crew.hire().wait_ready()
    rows.wait_ended(20)
    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", [0, "gate"]))
    assert {outside.begun()[str(run), "visit"] for run in started} == {1}


def test_an_orphan_writes_what_has_ended(crew: Crew, outside: Outside, rows: Rows) -> None:
    """The result waits for a lock when the parent dies: it is written all the same, and its body is not called again."""
    worker = crew.hire(*LEASE)
    (orphan,) = worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate", 0, 1)])
    eventually(lambda: outside.calls(str(run), "pass_gate"), "the body runs")

    with psycopg.connect(crew.dsn) as foreign:
        foreign.execute("select 1 from replaykit.runs where id = %s for update", (run,))
        outside.open_gate("gate")
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        eventually(lambda: rows.ask(waits), "the write waits")
        worker.kill()
    eventually(lambda: not lives(orphan), "the orphan has left")

    assert [entry.key for entry in rows.entries(run)] == ["pass_gate"]
    crew.hire().wait_ready()
    rows.wait_ended(1)
    assert set(outside.begun().values()) == {1}


def test_an_orphan_with_a_thread_leaves_its_run_to_the_lease(crew: Crew, outside: Outside, rows: Rows) -> None:
    """The thread may act until the process is gone, so the run is not handed back; the lease of the dead runs out."""
    worker = crew.hire("--lease-seconds", "2")
    (orphan,) = worker.wait_ready()
    (run,) = start(crew.dsn, gated_sync, [("gate",)])
    eventually(lambda: outside.calls(str(run)), "the body runs")
    crew.hire("--lease-seconds", "2").wait_ready()

    worker.kill()
    eventually(lambda: not lives(orphan), "the orphan has left")
    assert rows.ask("select state from runs where id = %s", run) == [("running",)]

    outside.open_gate("gate")
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", "gate")}
    assert outside.overlaps == []

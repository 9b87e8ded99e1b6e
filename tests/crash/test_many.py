"""Many runs at once: in flight when a process dies, waiting without one, behind a row that somebody else has locked."""

from __future__ import annotations

import datetime as dt
import os
import resource
import signal
import time
from pathlib import Path

import psycopg
import pytest

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import gated, snooze_until
from tests.runtime.facts import eventually


def test_all_of_1000_runs_in_flight_survive_their_process(crew: Crew, outside: Outside, rows: Rows) -> None:
    """A child killed with a thousand bodies running: they are resumed at once, each body is called once more."""
    worker = crew.hire("--concurrency", "1000")
    (child,) = worker.wait_ready()
    started = start(crew.dsn, gated, [("gate", 1)] * 1000)
    eventually(lambda: len(outside.calls(key="pass_gate")) == 1000, "all bodies run", 60)

    os.kill(child, signal.SIGKILL)
    killed_at = time.time()
    eventually(lambda: len(outside.calls(key="pass_gate")) == 2000, "all bodies run again", 60)
    outside.open_gate("gate")
    rows.wait_ended(1000)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", [0, "gate"]))
    assert outside.begun() == {(str(run), key): n for run in started for key, n in (("visit", 1), ("pass_gate", 2))}
    again = [call.began for call in outside.calls() if call.began > killed_at]
    print(f"first resumed after {min(again) - killed_at:.3f} s, last after {max(again) - killed_at:.3f} s")
    assert min(again) - killed_at < 10


def test_the_runs_of_a_worker_killed_whole_are_taken_after_its_lease(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Parent and child at once, so that nobody hands anything back: another worker notices."""
    lease = 2.0
    worker = crew.hire("--lease-seconds", str(lease))
    (child,) = worker.wait_ready()
    started = start(crew.dsn, gated, [("gate",)] * 200)
    eventually(lambda: outside.busy(child) == 200, "all bodies run")
    crew.hire("--lease-seconds", str(lease)).wait_ready()

    worker.kill_all()
    killed_at = time.time()
    outside.open_gate("gate")
    rows.wait_ended(200)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", ["gate"]))
    assert set(outside.begun().values()) == {2}
    assert rows.recoveries() == 200
    again = [call.began for call in outside.calls() if call.began > killed_at]
    print(f"first resumed after {min(again) - killed_at:.3f} s with a lease of {lease:g} s")
    assert min(again) - killed_at < lease + 10


def test_waiting_runs_cost_no_memory_and_no_connection(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Three thousand sleep; the worker holds none of them, and wakes all of them."""
    worker = crew.hire("--evict-after-seconds", "0.2", "--concurrency", "500")
    (child,) = worker.wait_ready()
    until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=20)
    started = start(crew.dsn, snooze_until, [(until.isoformat(),)] * 1000)
    eventually(lambda: rows.states() == {"waiting": 1000}, "a thousand wait")
    before = resident_bytes(child)

    started += start(crew.dsn, snooze_until, [(until.isoformat(),)] * 2000)
    eventually(lambda: rows.states() == {"waiting": 3000}, "three thousand wait")

    assert dt.datetime.now(dt.UTC) < until, "the machine was too slow for this test"
    growth = resident_bytes(child) - before
    print(f"2,000 more waiting runs: {growth / 1e6:+.1f} MB")
    assert growth < 20e6
    mine = "select count(*) from pg_stat_activity where datname = current_database() and application_name like %s"
    assert rows.ask(mine, "replaykit:worker%")[0][0] <= 8
    eventually(lambda: rows.ask("select health->>'runs' from workers") == [("0",)], "none is in memory")
    ((waiting, first, last),) = rows.ask("select count(*), min(until), max(until) from waiting")
    assert (waiting, first) == (3000, until)
    assert last - until <= dt.timedelta(microseconds=1)  # a timer's deadline is rounded up, never down
    rows.wait_ended(3000, 120)
    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", "rested"))
    assert {len(entries) for entries in rows.journals().values()} == {1}


def test_a_row_locked_by_someone_else_delays_only_its_run(crew: Crew, outside: Outside, rows: Rows) -> None:
    """A transaction left open on one run, beyond the lease: the others end, the lease is kept, nothing is repeated."""
    worker = crew.hire("--lease-seconds", "2")
    (child,) = worker.wait_ready()
    blocked, *others = started = start(crew.dsn, gated, [("gate", 1, 1)] * 20)
    eventually(lambda: len(outside.calls(key="pass_gate")) == 20, "all bodies run")

    with psycopg.connect(crew.dsn) as foreign:
        foreign.execute("select 1 from replaykit.runs where id = %s for update", (blocked,))
        outside.open_gate("gate")
        rows.wait_ended(19)
        assert rows.outputs(others) == dict.fromkeys(others, ("succeeded", [0, "gate", 0]))
        ((beat,),) = rows.ask("select heartbeat_at from workers")
        later = "select 1 from workers where heartbeat_at > %s + interval '2 seconds'"
        eventually(lambda: rows.ask(later, beat), "the lease goes on")
        assert rows.ended() == 19
    rows.wait_ended(20)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", [0, "gate", 0]))
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0
    assert worker.ready() == [child]


def test_a_locked_row_delays_no_other_run_of_a_dead_process(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Its runs are handed back and resumed, all but the one; that one follows when it is free."""
    worker = crew.hire()
    (child,) = worker.wait_ready()
    blocked, *others = started = start(crew.dsn, gated, [("gate",)] * 20)
    eventually(lambda: outside.busy(child) == 20, "all bodies run")

    with psycopg.connect(crew.dsn) as foreign:
        foreign.execute("select 1 from replaykit.runs where id = %s for update", (blocked,))
        os.kill(child, signal.SIGKILL)
        outside.open_gate("gate")
        rows.wait_ended(19, 20)
        assert rows.outputs(others) == dict.fromkeys(others, ("succeeded", ["gate"]))
    rows.wait_ended(20)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", ["gate"]))
    assert set(outside.begun().values()) == {2}


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True)
def many_files() -> None:
    """Room for a thousand connections here and, inherited, in the workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))

"""Scenarios of the kind shutdown: what a worker that is told to end does to its runs, its lease and its bodies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from uuid import UUID

import pytest

from tests.crash.crew import Crew, WorkerProcess
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_kill import assert_completed_steps_ran_once
from tests.crash.workflows import chain, gated, gated_sync, mixed
from tests.faults.wire import Wire
from tests.runtime.facts import eventually, lives

PATIENCE_SECONDS = 60.0
"""For what takes a few seconds on a machine that has nothing else to do."""


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    """A wire to the test's database."""
    with Wire(dsn) as made:
        yield made


def in_body(outside: Outside, times: int) -> bool:
    """Whether so many bodies have come to their gate."""
    return len([call for call in outside.calls() if call.key.startswith("pass_gate")]) == times


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_b170_a_worker_that_is_stopped_leaves_no_run_behind_that_fills_its_place(
    crew: Crew, outside: Outside, rows: Rows, number: signal.Signals
) -> None:
    """Ctrl-C reaches the whole group, `docker compose down` the parent. Started again it goes on, and takes the next run."""
    one_place = ("--concurrency", "1", "--lease-seconds", "60")
    worker = crew.hire(*one_place, "--grace-seconds", "0.2")
    worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate", 1, 1)])
    eventually(partial(in_body, outside, 1), "the body runs")
    (behind,) = start(crew.dsn, chain, [(1, 0.0, 0.0)])

    if number is signal.SIGINT:
        os.killpg(worker.pid, number)
    else:
        worker.process.send_signal(number)

    assert worker.process.wait(PATIENCE_SECONDS) == 0
    assert rows.ask("select id, state, worker, recoveries from runs order by created_at") == [
        (run, "pending", None, 0),
        (behind, "pending", None, 0),
    ]
    crew.hire(*one_place)
    eventually(partial(in_body, outside, 2), "it goes on, at once and not when a lease ends")
    outside.open_gate("gate")
    rows.wait_ended(2)
    assert rows.outputs([run, behind]) == {run: ("succeeded", [0, "gate", 0]), behind: ("succeeded", 0)}


def test_b172_the_lease_is_renewed_until_the_last_body_is_recorded(crew: Crew, outside: Outside, rows: Rows) -> None:
    """It drains for longer than its lease, and a second worker looks for the dead all the while."""
    lease = 1.5
    worker = crew.hire("--lease-seconds", str(lease), "--grace-seconds", "120")
    (child,) = worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate", 0, 1)])
    eventually(partial(in_body, outside, 1), "the body runs")
    heir = crew.hire("--lease-seconds", str(lease))
    (heirs_child,) = heir.wait_ready()

    worker.process.send_signal(signal.SIGTERM)
    drains = "select heartbeat_at from workers where id = %s and (health ->> 'draining')::bool"
    eventually(lambda: rows.ask(drains, worker.worker_id(child)), "it drains")
    since = rows.ask(drains, worker.worker_id(child))[0][0]
    beat = "select heartbeat_at > %s + %s * interval '1 second' from workers where id = %s"
    eventually(
        lambda: rows.ask(beat, since, 3 * lease, worker.worker_id(child)) == [(True,)],
        "three leases are over",
        PATIENCE_SECONDS,
    )
    assert rows.ask("select worker::text, claims, recoveries from runs") == [(worker.worker_id(child), 1, 0)]
    outside.open_gate("gate")

    assert worker.process.wait(PATIENCE_SECONDS) == 0
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", ["gate", 0])}
    assert [(call.key, call.pid) for call in outside.calls()] == [("pass_gate", child), ("visit", heirs_child)]
    assert rows.recoveries() == 0


def test_b173_a_worker_whose_database_is_out_of_reach_ends_in_time_and_says_what_is_not_recorded(
    crew: Crew, outside: Outside, rows: Rows, wire: Wire
) -> None:
    """Packets are dropped, a body ends, SIGTERM: it does not wait for the network. What it could not write runs again."""
    grace, lease = 1.0, 10.0
    crew.dsn = wire.dsn
    worker = crew.hire("--lease-seconds", str(lease), "--grace-seconds", str(grace))
    (child,) = worker.wait_ready()
    (run,) = start(rows.dsn, gated, [("gate", 1, 0)])
    eventually(partial(in_body, outside, 1), "the body runs")
    eventually(rows.recorded, "its first step is written")

    wire.freeze()
    outside.open_gate("gate")
    eventually(lambda: outside.calls(key="pass_gate")[0].completed, "the body has ended")
    asked = time.monotonic()
    worker.process.send_signal(signal.SIGTERM)
    code = worker.process.wait(PATIENCE_SECONDS)

    assert time.monotonic() - asked < grace + lease + 15
    assert worker.events("workers_stopping", stage="abandoning") == [], "the parent need not lose its patience"
    assert code == 1
    assert not lives(child)
    (said,) = worker.events("left_unrecorded")
    assert (said["run_id"], said["steps"]) == (str(run), ["pass_gate"])
    wire.thaw()
    crew.dsn = rows.dsn
    crew.hire("--lease-seconds", "1.5")
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", [0, "gate"])}


def bombard(worker: WorkerProcess, chance: random.Random, numbers: list[signal.Signals]) -> int:
    """Many signals at once to one of its children, each of which is replaced; how many were sent."""
    (victim, *_) = chance.sample(worker.wait_ready(), 1)
    sent = 0
    with contextlib.suppress(ProcessLookupError):
        for _ in range(chance.randrange(1, 400)):
            os.kill(victim, chance.choice(numbers))
            sent += 1
    return sent


@pytest.mark.parametrize("signals", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_b175_signals_at_any_moment_lose_and_double_nothing(
    crew: Crew, outside: Outside, rows: Rows, signals: int
) -> None:
    """SIGTERM and SIGINT by the hundred, while they claim, record and finish: to children, and in the end to parents."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    steps, sent, turns = 12, 0, 0
    started: list[UUID] = []

    while sent < signals:
        worker = crew.hire("--processes", "2", "--lease-seconds", "3", "--grace-seconds", "1")
        until = sent + signals // 2
        while sent < until:
            worker.wait_ready()
            if len(started) - rows.ended() < 10:
                started += start(crew.dsn, mixed, [(steps, 0.0, 0.05)] * 20)
            calls = outside.count + chance.randrange(40)
            eventually(lambda: outside.count >= calls or rows.ended() == len(started), "bodies are called")  # noqa: B023
            sent += bombard(worker, chance, [signal.SIGTERM, signal.SIGINT])
            turns += 1
        for _ in range(50):
            worker.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGINT]))
        worker.process.wait(PATIENCE_SECONDS)
    crew.hire("--processes", "2", "--lease-seconds", "3")
    rows.wait_ended(len(started), 90)

    print(f"{sent} signals in {turns} turns, {len(started)} runs, {outside.count} calls")
    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(steps))))
    assert_completed_steps_ran_once(outside, rows)
    assert outside.overlaps == []
    assert rows.ask("select run_id, key from journal group by 1, 2 having count(*) > 1") == []


def test_b176_a_signal_to_the_whole_group_lets_bodies_finish(crew: Crew, outside: Outside, rows: Rows) -> None:
    """`docker stop` without an init, or systemd's default, tells the children too: the parent decides all the same."""
    worker = crew.hire("--processes", "2", "--lease-seconds", "60", "--grace-seconds", "60")
    worker.wait_ready(2)
    started = start(crew.dsn, gated_sync, [("gate",)] * 6) + start(crew.dsn, gated, [("gate",)] * 6)
    eventually(partial(in_body, outside, 12), "all bodies run")

    for _ in range(3):
        os.killpg(worker.pid, signal.SIGTERM)
    eventually(lambda: worker.events("workers_stopping"), "it stops")
    outside.open_gate("gate")

    assert worker.process.wait(PATIENCE_SECONDS) == 0
    assert rows.ask("select count(*), count(distinct run_id) from journal") == [(12, 12)]
    crew.hire()
    rows.wait_ended(12)
    assert {state for state, _ in rows.outputs(started).values()} == {"succeeded"}
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0

"""SIGTERM: bodies may finish, runs are handed back at once, and nobody calls it a recovery."""

from __future__ import annotations

import signal
import time
from uuid import UUID

import psycopg
import pytest

from replaykit import Workflow
from tests.crash.crew import Crew, WorkerProcess
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import chain, gated, gated_elsewhere, gated_stubbornly, gated_sync
from tests.runtime.facts import eventually, lives

LEASE = ("--lease-seconds", "60")
SOON_SECONDS = 20.0
"""Far below the lease, far above what leaving takes here."""


def terminate(worker: WorkerProcess) -> float:
    """Ask it to stop; when that was."""
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: worker.events("workers_stopping"), "it stops")
    return time.monotonic()


def assert_handed_back(rows: Rows, run: UUID) -> None:
    """Anybody may take the run, and its stop was no recovery."""
    assert rows.ask("select state, worker, recoveries from runs where id = %s", run) == [("pending", None, 0)]


def test_a_body_finishes_within_the_grace_period(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Its entry is written, nothing new begins, and the run goes on elsewhere without it."""
    worker = crew.hire(*LEASE, "--grace-seconds", "60")
    worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate", 1, 1)])
    eventually(lambda: outside.calls(str(run), "pass_gate"), "the body runs")

    asked = terminate(worker)
    outside.open_gate("gate")

    assert worker.process.wait(SOON_SECONDS) == 0
    assert time.monotonic() - asked < SOON_SECONDS
    assert_handed_back(rows, run)
    assert [entry.key for entry in rows.entries(run)] == ["visit", "pass_gate"]
    crew.hire().wait_ready()
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", [0, "gate", 0])}
    assert set(outside.begun().values()) == {1}


def test_a_body_that_outlasts_the_grace_period_is_cancelled(crew: Crew, outside: Outside, rows: Rows) -> None:
    """It has no entry, and runs again elsewhere."""
    worker = crew.hire(*LEASE, "--grace-seconds", "0.2")
    worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(lambda: outside.calls(str(run)), "the body runs")

    terminate(worker)

    assert worker.process.wait(SOON_SECONDS) == 0
    assert_handed_back(rows, run)
    assert rows.entries(run) == []
    outside.open_gate("gate")
    crew.hire().wait_ready()
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", ["gate"])}
    assert rows.recoveries() == 0


UNSTOPPABLE = [gated_sync, gated_elsewhere, gated_stubbornly]


@pytest.mark.parametrize("flow", UNSTOPPABLE, ids=lambda flow: str(flow.name))
def test_a_run_whose_body_cannot_be_stopped_is_handed_back_last(
    crew: Crew, outside: Outside, rows: Rows, flow: Workflow[[str], str]
) -> None:
    """Nothing ends a thread, or a body that swallows its cancellation, but the end of the process: until then nobody else
    may begin the step."""
    worker = crew.hire(*LEASE, "--grace-seconds", "0.5")
    worker.wait_ready()
    (stuck,) = start(crew.dsn, flow, [("stuck",)])
    (other,) = start(crew.dsn, gated, [("async",)])
    eventually(lambda: outside.busy() == 2, "both bodies run")
    heir = crew.hire(*LEASE)
    (heirs_child,) = heir.wait_ready()

    terminate(worker)

    eventually(lambda: len(outside.calls(str(other))) == 2, "the other run goes on elsewhere")
    assert worker.process.wait(SOON_SECONDS) == 0
    eventually(lambda: len(outside.calls(str(stuck))) == 2, "the run that was stuck goes on elsewhere")
    outside.open_gate("stuck")
    outside.open_gate("async")
    rows.wait_ended(2)
    assert {call.pid for call in outside.calls() if call.completed} == {heirs_child}
    assert outside.overlaps == []
    assert rows.recoveries() == 0


@pytest.mark.parametrize("flow", UNSTOPPABLE, ids=lambda flow: str(flow.name))
def test_an_orphan_whose_body_cannot_be_stopped_hands_nothing_back(
    crew: Crew, outside: Outside, rows: Rows, flow: Workflow[[str], str]
) -> None:
    """Its parent was killed: it ends within 2 seconds, and others wait for its lease to end."""
    worker = crew.hire("--lease-seconds", "4")
    (child,) = worker.wait_ready()
    (stuck,) = start(crew.dsn, flow, [("stuck",)])
    eventually(outside.busy, "the body runs")
    heir = crew.hire("--lease-seconds", "4")
    heir.wait_ready()

    worker.kill()

    eventually(lambda: not lives(child), "the child is gone")
    eventually(lambda: len(outside.calls(str(stuck))) == 2, "the run goes on elsewhere")
    outside.open_gate("stuck")
    rows.wait_ended(1)
    assert outside.overlaps == []
    assert rows.outputs([stuck]) == {stuck: ("succeeded", "stuck")}


def test_a_thread_that_ends_in_time_is_recorded(crew: Crew, outside: Outside, rows: Rows) -> None:
    """A sync body has the same grace period."""
    worker = crew.hire(*LEASE, "--grace-seconds", "60")
    worker.wait_ready()
    (run,) = start(crew.dsn, gated_sync, [("gate",)])
    eventually(lambda: outside.calls(str(run)), "the body runs")

    terminate(worker)
    outside.open_gate("gate")

    assert worker.process.wait(SOON_SECONDS) == 0
    assert [entry.key for entry in rows.entries(run)] == ["pass_gate_sync"]
    assert len(outside.calls()) == 1
    assert rows.recoveries() == 0


def test_a_rolling_deploy_repeats_nothing(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Workers replaced one after another under load: every body is called once, nobody recovers anything."""
    runs, steps, turns = 30, 60, 4
    staff = [crew.hire(*LEASE, "--grace-seconds", "60") for _ in range(2)]
    for worker in staff:
        worker.wait_ready()
    started = start(crew.dsn, chain, [(steps, 0.1, 0.3)] * runs)

    for turn in range(turns):
        # Shares of all calls: what is called while workers come and go may be more than one share, never more than all.
        calls = runs * steps * (turn + 1) // (turns + 2)
        eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
        leaving, staff[turn % 2] = staff[turn % 2], crew.hire(*LEASE, "--grace-seconds", "60")
        staff[turn % 2].wait_ready()
        terminate(leaving)
        assert leaving.process.wait(SOON_SECONDS) == 0
    rows.wait_ended(runs)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(steps))))
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0


def test_a_claim_on_its_way_when_the_drain_begins_starts_nothing(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Its answer is late: the runs in it are handed back as they came, within the grace period."""
    worker = crew.hire(*LEASE, "--grace-seconds", "60")
    worker.wait_ready()
    claim = "select wait_event from pg_stat_activity where query like '%update%runs%lease_token%' and state = 'active'"
    with psycopg.connect(rows.dsn) as foreign:
        foreign.execute("lock table replaykit.runs in access exclusive mode")
        eventually(lambda: foreign.execute(claim).fetchall(), "a claim waits")
        foreign.execute("select replaykit.start('gated', '[\"gate\"]') from generate_series(1, 5)")
        worker.process.send_signal(signal.SIGTERM)
        eventually(lambda: worker.events("workers_stopping"), "it stops")

    assert worker.process.wait(SOON_SECONDS) == 0
    assert outside.count == 0
    assert rows.states() == {"pending": 5}
    assert rows.recoveries() == 0

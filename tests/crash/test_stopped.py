"""A process that was stopped past its lease and goes on: it writes nothing, its runs finish elsewhere, once."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import chain, gated
from tests.runtime.facts import eventually, lives

LEASE = ("--lease-seconds", "1.5")


def written_by(rows: Rows, worker_id: str) -> int:
    """Entries that this incarnation wrote."""
    return int(rows.ask("select count(*) from journal where worker = %s", worker_id)[0][0])


def has_lost(rows: Rows, worker_id: str) -> bool:
    """Whether its lease was taken, with all of its runs."""
    ((marked, runs),) = rows.ask(
        "select exists (select from workers where id = %s and stopped_at is not null),"
        " (select count(*) from runs where worker = %s)",
        worker_id,
        worker_id,
    )
    return bool(marked) and runs == 0


def test_a_stopped_child_that_goes_on_writes_nothing(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Its body ends after the run was taken over: the end is refused, and the run goes on where it is."""
    stopped = crew.hire(*LEASE)
    (child,) = stopped.wait_ready()
    incarnation = stopped.worker_id(child)
    (run,) = start(crew.dsn, gated, [("gate", 2, 2)])
    eventually(lambda: outside.calls(str(run), "pass_gate"), "the body runs")
    other = crew.hire(*LEASE)
    (heir,) = other.wait_ready()

    outside.excuse(child)
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: has_lost(rows, incarnation), "the run is taken")
    frozen = written_by(rows, incarnation)
    eventually(lambda: len(outside.calls(str(run), "pass_gate")) == 2, "the body runs elsewhere")
    outside.open_gate("gate")
    os.kill(child, signal.SIGCONT)
    rows.wait_ended(1)
    eventually(lambda: not lives(child), "the stopped process has left")

    assert frozen == written_by(rows, incarnation) == 2
    assert rows.outputs([run]) == {run: ("succeeded", [0, 1, "gate", 0, 1])}
    assert [call.pid for call in outside.calls(str(run))] == [child, child, child, heir, heir, heir]
    assert len(rows.entries(run)) == 5


@pytest.mark.parametrize("stops", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_child_stopped_at_a_random_moment_writes_nothing_afterwards(
    crew: Crew, outside: Outside, rows: Rows, stops: int
) -> None:
    """Also in the middle of a commit or a claim, with many runs; all of them finish."""
    workers = [crew.hire(*LEASE), crew.hire(*LEASE)]
    for worker in workers:
        worker.wait_ready()
    started = []
    frozen: dict[str, int] = {}

    for turn in range(stops):
        started += start(crew.dsn, chain, [(30, 0.0, 0.05)] * 20)
        calls = outside.count + random.randrange(200)
        eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
        child = workers[turn % 2].wait_ordinary()
        incarnation = workers[turn % 2].worker_id(child)
        outside.excuse(child)
        os.kill(child, signal.SIGSTOP)
        eventually(lambda: has_lost(rows, incarnation), "its runs are taken")  # noqa: B023
        frozen[incarnation] = written_by(rows, incarnation)
        os.kill(child, signal.SIGCONT)
        eventually(lambda: not lives(child), "it leaves, for its parent knows another id")  # noqa: B023
    rows.wait_ended(len(started))

    assert frozen == {incarnation: written_by(rows, incarnation) for incarnation in frozen}
    assert set(rows.outputs(started).values()) == {("succeeded", sum(range(30)))}
    assert outside.overlaps == []

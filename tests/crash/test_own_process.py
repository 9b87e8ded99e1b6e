"""A `Worker` inside a process of one's own: stopped past its lease it drops its runs, and begins anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.crash.crew import ROOT, Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_stopped import LEASE, has_lost, written_by
from tests.crash.workflows import OUTSIDE, chain, gated
from tests.runtime.facts import eventually


@pytest.fixture
def own(dsn: str, outside: Outside) -> Iterator[subprocess.Popen[str]]:
    """The process; gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.own_process", dsn],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), OUTSIDE: outside.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    """The worker's id."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_worker_stopped_past_its_lease_begins_anew(
    own: subprocess.Popen[str], crew: Crew, outside: Outside, rows: Rows
) -> None:
    """It writes nothing of what it had; under another id it takes runs again."""
    incarnation = first_line(own)
    (run,) = start(crew.dsn, gated, [("gate", 1, 1)])
    eventually(lambda: outside.calls(str(run), "pass_gate"), "the body runs")
    other = crew.hire(*LEASE)
    (heir,) = other.wait_ready()

    outside.excuse(own.pid)
    os.kill(own.pid, signal.SIGSTOP)
    eventually(lambda: has_lost(rows, incarnation), "the run is taken")
    eventually(lambda: len(outside.calls(str(run), "pass_gate")) == 2, "the body runs elsewhere")
    frozen = written_by(rows, incarnation)
    outside.open_gate("gate")
    os.kill(own.pid, signal.SIGCONT)
    rows.wait_ended(1)

    assert rows.outputs([run]) == {run: ("succeeded", [0, "gate", 0])}
    assert [call.pid for call in outside.calls(str(run))] == [own.pid, own.pid, heir, heir]
    assert frozen == written_by(rows, incarnation) == 1
    eventually(lambda: rows.ask("select 1 from workers where pid = %s and stopped_at is null", own.pid), "it is back")
    other.kill_all()
    (again,) = start(crew.dsn, chain, [(3, 0.0, 0.0)])
    rows.wait_ended(2)
    assert {call.pid for call in outside.calls(str(again))} == {own.pid}


def test_sigterm_hands_back_at_once(own: subprocess.Popen[str], crew: Crew, outside: Outside, rows: Rows) -> None:
    """`Worker.run()` drains as a child does: the body finishes, the run is pending, nothing is a recovery."""
    first_line(own)
    (run,) = start(crew.dsn, gated, [("gate", 0, 1)])
    eventually(lambda: outside.calls(str(run), "pass_gate"), "the body runs")

    own.send_signal(signal.SIGTERM)
    eventually(lambda: rows.ask("select 1 from workers where (health->>'draining')::bool"), "it drains")
    outside.open_gate("gate")

    assert own.wait(20) == 0
    assert rows.ask("select state, recoveries from runs") == [("pending", 0)]
    assert [entry.key for entry in rows.entries(run)] == ["pass_gate"]

"""Poison runs: whoever ends its process again and again is put apart and held; everybody else succeeds."""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import UUID

import pytest

from replaykit.limits import FRUITLESS_MAX
from tests.crash.crew import Crew, WorkerProcess
from tests.crash.poison import (
    patient,
    poisonous,
    poisonous_block,
    poisonous_code,
    poisonous_signal,
    poisonous_thread,
    sound,
)
from tests.crash.rows import Rows, start
from tests.runtime.facts import eventually, lives

MODULE = "tests.crash.poison"


def held(rows: Rows) -> dict[UUID, str]:
    """The runs that are held, with their reasons."""
    return dict(rows.ask("select id, reason from runs where state = 'held'"))  # type: ignore[arg-type]


def wait_held(rows: Rows, runs: int, seconds: float = 60.0) -> dict[UUID, str]:
    """So many are held."""
    try:
        eventually(lambda: len(held(rows)) >= runs, f"{runs} runs are held", seconds)
    except AssertionError as error:
        error.add_note(str(rows.ask("select state, fruitless, suspect, recoveries, reason from runs")[:20]))
        raise
    return held(rows)


def solo_children(worker: WorkerProcess) -> list[int]:
    """Pids of the solo children that live."""
    return [e["pid"] for e in worker.events("child_started", solo=True) if lives(e["pid"])]


def assert_each_step_is_recorded_once(rows: Rows, runs: list[UUID], steps: int) -> None:
    """Of these runs: so many entries each, none of them twice."""
    counted = rows.ask(
        "select run_id, count(*), count(distinct key) from journal where run_id = any(%s) group by 1", runs
    )
    assert sorted(counted) == sorted((run, steps, steps) for run in runs)


def test_one_poison_run_among_a_thousand_is_held_alone(crew: Crew, rows: Rows) -> None:
    """1,000 healthy runs succeed, each step recorded once (issue 3)."""
    healthy = start(crew.dsn, sound, [(n,) for n in range(500)])
    (poison,) = start(crew.dsn, poisonous, [(9,)])
    healthy += start(crew.dsn, sound, [(n,) for n in range(500)])

    worker = crew.hire(MODULE)
    reasons = wait_held(rows, 1)
    rows.wait_ended(1_001)

    assert list(reasons) == [poison]
    assert reasons[poison].startswith(f"{FRUITLESS_MAX + 5} worker processes in a row have ended while they executed")
    assert "with no other run beside it; the last one ended with exit code 9; " in reasons[poison]
    assert {state for state, _ in rows.outputs(healthy).values()} == {"succeeded"}
    assert_each_step_is_recorded_once(rows, healthy, 2)
    assert [e["run_id"] for e in worker.events("run_held")] == [str(poison)]
    eventually(lambda: not solo_children(worker), "the solo children have left")
    assert worker.ready()

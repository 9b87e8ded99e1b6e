"""kill -9 of workers at random moments: another process goes on, and what was completed stays so."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict

import pytest

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import chain
from tests.runtime.facts import eventually, lives

RUNS, STEPS = 12, 40


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_finishes_elsewhere(
    crew: Crew, outside: Outside, rows: Rows, kills: int
) -> None:
    """No completed step's body is called again, and no kill repeats more than one body of a run (S4, S5, S22)."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    worker = crew.hire("--processes", "3")
    worker.wait_ready(3)

    started = []
    killed = 0
    while killed < kills:
        started += start(crew.dsn, chain, [(STEPS, 0.0, 0.04)] * RUNS)
        while killed < kills and rows.ended() < len(started):
            killed += kill_a_busy_child(crew, outside, chance)
        rows.wait_ended(len(started))

    assert set(rows.outputs(started).values()) == {("succeeded", sum(range(STEPS)))}
    assert_completed_steps_ran_once(outside, rows)
    assert_a_kill_repeats_one_body_at_most(outside)
    assert len({call.pid for call in outside.calls()}) > kills / 2, "the runs went on in other processes"


def kill_a_busy_child(crew: Crew, outside: Outside, chance: random.Random) -> int:
    """Kills one, after a random number of further calls; 0 if there was none."""
    (worker,) = crew.workers
    until = outside.count + chance.randrange(2 * RUNS)
    eventually(lambda: outside.count >= until or not outside.busy(), "bodies are called, or none is left")
    busy = [pid for pid in worker.ready() if outside.busy(pid)]
    if not busy:
        return 0
    victim = chance.choice(busy)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not lives(victim), "the child is dead")
    return 1


def assert_completed_steps_ran_once(outside: Outside, rows: Rows) -> None:
    """Once a step's entry is in the journal its body is never called again."""
    recorded = rows.recorded()
    late = [call for call in outside.calls() if call.began > recorded[call.run, call.key]]
    assert late == []


def assert_a_kill_repeats_one_body_at_most(outside: Outside) -> None:
    """For runs whose steps come one after another: of what a process called, one step at most was called again."""
    last = {(call.run, call.key): call for call in outside.calls()}
    repeated = defaultdict(set)
    for call in outside.calls():
        if last[call.run, call.key] is not call:
            repeated[call.run, call.pid].add(call.key)
    assert {who: keys for who, keys in repeated.items() if len(keys) > 1} == {}

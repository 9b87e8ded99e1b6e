"""Twenty workers, two hundred kills: no step of a run is executed by two processes at once, every run ends once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from uuid import UUID

import pytest

from tests.crash.crew import Crew, WorkerProcess
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import mixed
from tests.runtime.facts import eventually, lives

STEPS = 12


@pytest.mark.parametrize(
    ("workers", "kills"), [(4, 30), pytest.param(20, 200, marks=pytest.mark.slow)], ids=["4-30", "20-200"]
)
def test_no_step_runs_in_two_processes_at_once(
    crew: Crew, outside: Outside, rows: Rows, workers: int, kills: int
) -> None:
    """Children, parents, or both at once are killed at random, and replaced; a server outside sees who calls when."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    staff = [hire(crew) for _ in range(workers)]
    staff[0].wait_ready()

    started: list[UUID] = []
    done: Counter[str] = Counter()
    while done.total() < kills:
        if len(started) - rows.ended() < 2 * workers:
            started += start(crew.dsn, mixed, [(STEPS, 0.01, 0.1)] * 2 * workers)
        done[kill_one(crew, staff, outside, chance)] += 1
    rows.wait_ended(len(started), 90)

    print(f"{dict(done)}, {len(started)} runs, {outside.count} calls, {rows.recoveries()} recoveries")
    assert outside.overlaps == []
    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(STEPS))))
    recorded = rows.recorded()
    assert [call for call in outside.calls() if call.began > recorded[call.run, call.key]] == []
    assert Counter(run for run, _ in recorded) == dict.fromkeys(map(str, started), STEPS)


def hire(crew: Crew) -> WorkerProcess:
    """A worker with a short lease, and few runs, so that all of them have some."""
    return crew.hire("--lease-seconds", "2", "--concurrency", "8")


def kill_one(crew: Crew, staff: list[WorkerProcess], outside: Outside, chance: random.Random) -> str:
    """Kills one that works, after some more calls; what it was."""
    calls = outside.count + chance.randrange(2 * len(staff))
    eventually(lambda: outside.count >= calls, "bodies are called")
    number = eventually(lambda: busiest(staff, outside, chance), "a worker works") - 1
    worker = staff[number]
    what = chance.choices(["child", "parent", "both"], [7, 2, 1])[0]
    if what == "child":
        victim = chance.choice(worker.ready() or worker.children())
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not lives(victim), "the child is dead")
    else:
        worker.kill() if what == "parent" else worker.kill_all()
        staff[number] = hire(crew)
    return what


def busiest(staff: list[WorkerProcess], outside: Outside, chance: random.Random) -> int:
    """The number, from 1, of some worker whose child runs bodies; 0 if none does."""
    busy = [n for n, worker in enumerate(staff, 1) if any(outside.busy(pid) for pid in worker.ready())]
    return chance.choice(busy) if busy else 0

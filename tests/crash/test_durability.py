"""`durability="async"` under kill -9: what is lost is what was not committed, and nothing dear was built upon it."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.crash.crew import Crew
from tests.crash.rows import Rows, start
from tests.crash.workflows import ledger
from tests.runtime.facts import eventually, lives

DRAWS, ROUNDS = 40, 25


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_dear_step_never_sees_a_cheap_result_that_can_be_lost(
    crew: Crew, rows: Rows, tmp_path: Path, kills: int
) -> None:
    """Cheap bodies draw another number at each attempt: one idempotency key with two inputs would show."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    seen = tmp_path / "seen"
    seen.touch()
    worker = crew.hire()
    worker.wait_ready()
    started, killed = [], 0
    while killed < kills:
        started += start(crew.dsn, ledger, [(str(seen), DRAWS, ROUNDS)] * 4)
        while killed < kills and rows.ended() < len(started):
            until = seen.stat().st_size + chance.randrange(20_000)
            eventually(lambda: seen.stat().st_size >= until or rows.ended() >= len(started), "bodies run")  # noqa: B023
            for victim in worker.ready():
                os.kill(victim, signal.SIGKILL)
                eventually(lambda: not lives(victim), "the child is dead")  # noqa: B023
                killed += 1
            worker.wait_ready()
        rows.wait_ended(len(started))

    lines = [line.split() for line in seen.read_text().splitlines()]
    inputs = defaultdict(set)
    for words in lines:
        if words[0] == "spend":
            inputs[words[1]].add(words[2])
    draws = sum(words[0] == "draw" for words in lines)
    print(f"{draws - len(started) * DRAWS * ROUNDS} cheap bodies ran again in {killed} kills of {len(started)} runs")
    assert {state for state, _ in rows.outputs(started).values()} == {"succeeded"}
    assert {key: totals for key, totals in inputs.items() if len(totals) > 1} == {}
    assert len(inputs) == len(started) * ROUNDS

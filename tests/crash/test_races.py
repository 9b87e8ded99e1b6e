"""Races keep their winner: the journal decides, whoever replays it."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Any
from uuid import UUID

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, replay_in_process, start
from tests.crash.workflows import races
from tests.runtime.facts import eventually, lives

RUNS, ROUNDS, KILLS = 10, 8, 8


def test_a_race_has_the_same_winner_after_kill_9(crew: Crew, outside: Outside, rows: Rows) -> None:
    """wait(FIRST_COMPLETED), as_completed, timeout, wait_for around bodies that take another time at each attempt.

    What stood in a journal before a kill stands there after it, and the journal alone leads to the recorded result.
    """
    worker = crew.hire("--processes", "2")
    worker.wait_ready(2)
    started = start(crew.dsn, races, [(ROUNDS, 0.0, 0.06)] * RUNS)

    before: list[dict[UUID, list[tuple[Any, ...]]]] = []
    while len(before) < KILLS:
        calls = outside.count + random.randrange(3 * RUNS, 6 * RUNS)
        eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
        pid = eventually(lambda: [pid for pid in worker.ready() if outside.busy(pid)], "a child is busy")[0]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not lives(pid), "the child is dead")  # noqa: B023
        before.append(rows.journals())
    rows.wait_ended(RUNS)

    after = rows.journals()
    for journals in before:
        for run, entries in journals.items():
            assert after[run][: len(entries)] == entries
    results = rows.outputs(started)
    for run in started:
        replayed = replay_in_process(rows, races, run)
        assert replayed.hold_reason is None
        assert replayed.ended is not None
        assert results[run] == ("succeeded", json.loads(replayed.ended.output or "null"))

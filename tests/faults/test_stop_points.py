"""A worker is stopped past its lease around the commit of an irreversible call, and goes on when others have taken its runs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.crash.effects_points import Point, Points
from tests.faults.conftest import Loads
from tests.runtime.facts import eventually, lives

POINTS = [
    Point.BEFORE_INTENT,
    Point.INTENT_COMMITTED,
    Point.BEFORE_REQUEST,
    Point.BEFORE_RECORD,
    Point.RECORDED,
]


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_runs_survive_a_worker_that_is_stopped_and_continued(own_dsn: str, loads: Loads, times: int) -> None:
    """Whatever it does then is refused by the database; it finds out and leaves, and another takes its place."""
    load = loads(own_dsn, own_dsn)
    points = Points(load.folder)
    for _ in range(2):
        load.hire(lease=1.5).wait_ready()

    for point in POINTS * times:
        points.arm(point, "charge")
        load.more(["pay"], under_way=4)
        pid = points.wait_reached()
        os.kill(pid, signal.SIGSTOP)
        lost = (
            "select 1 from workers w where pid = %s and stopped_at is not null"
            " and not exists (select from runs where worker = w.id)"
        )
        eventually(lambda: load.ask(lost, pid), "its runs are taken")  # noqa: B023
        load.look()
        load.continued[pid] = time.time()
        points.go()
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: not lives(pid), "it leaves")  # noqa: B023
    load.finish()

    load.check()

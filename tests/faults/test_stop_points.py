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


@pytest.mark.parametrize("points", [POINTS[1:4:2], pytest.param(POINTS * 6, marks=pytest.mark.slow)], ids=len)
def test_runs_survive_a_worker_that_is_stopped_and_continued(own_dsn: str, loads: Loads, points: list[Point]) -> None:
    """Whatever it does then is refused by the database; it finds out and leaves, and another takes its place."""
    load = loads(own_dsn, own_dsn)
    stops = Points(load.folder)
    for worker in [load.hire(lease=1.5), load.hire(lease=1.5)]:
        worker.wait_ready()

    for point in points:
        stops.arm(point, "charge")

        def goes_on() -> None:  # those under way may be past their last charge, or wait for a person
            load.more(["pay"], under_way=4)
            load.tend()

        pid = stops.wait_reached(goes_on)
        os.kill(pid, signal.SIGSTOP)
        lost = (
            "select 1 from workers w where pid = %s and stopped_at is not null"
            " and not exists (select from runs where worker = w.id)"
        )
        eventually(lambda: load.ask(lost, pid), "its runs are taken")  # noqa: B023
        load.look()
        load.continued[pid] = time.time()
        stops.go()
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: not lives(pid), "it leaves")  # noqa: B023
    load.finish()

    load.check()

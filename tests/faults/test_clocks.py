"""Workers whose clocks are ten minutes wrong: only the database's time counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.conftest import Loads
from tests.faults.faketime import Clocks, find_faketime


@pytest.mark.skipif(find_faketime() is None, reason="needs libfaketime (Debian: apt-get install libfaketime)")
@pytest.mark.parametrize("moves", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_runs_survive_workers_whose_clocks_are_wrong(own_dsn: str, loads: Loads, tmp_path: Path, moves: int) -> None:
    """One is ahead, one is behind, and both are moved while they work: no lease is lost, no timer fires early."""
    clocks = [Clocks(tmp_path / "ahead"), Clocks(tmp_path / "behind")]
    load = loads(own_dsn, own_dsn)
    for clock, minutes in zip(clocks, (10, -10), strict=True):
        clock.move(minutes)
        load.hire(env=clock.env)
        assert 500 < abs(clock.told() - time.time()) < 700
    for worker in load.crew.workers:
        worker.wait_ready()

    for number in range(moves):
        load.more()
        load.goes_on(20)
        for clock, minutes in zip(clocks, (-10, 10) if number % 2 == 0 else (10, -10), strict=True):
            clock.move(minutes)
    load.finish()

    assert load.ask("select sum(recoveries) from runs") == [(0,)]
    late = "select count(*) from journal where abs(extract(epoch from recorded_at - at)) > 60"
    assert load.ask(late) == [(0,)]
    load.check()

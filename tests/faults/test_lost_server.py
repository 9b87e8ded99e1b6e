"""Postgres is killed, its connections end, commits are acknowledged to nobody: every run ends, no promise is broken."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import Loads
from tests.faults.server import Own
from tests.faults.wire import Lose, Wire
from tests.runtime.facts import eventually

SLOW = pytest.mark.slow


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=SLOW)])
def test_runs_survive_a_server_that_is_killed(own_server: Own, own_dsn: str, loads: Loads, kills: int) -> None:
    """kill -9 of the postmaster and immediate stops, by turns, with commits in flight."""
    load = loads(own_dsn, own_dsn)
    load.hire(children=2).wait_ready(2)

    for number in range(kills):
        load.more()
        load.goes_on(20)
        load.look()
        own_server.kill(signal.SIGQUIT if number % 2 else signal.SIGKILL)
        own_server.restart()
    load.finish()

    load.check()


@pytest.mark.parametrize("cuts", [10, pytest.param(100, marks=SLOW)])
def test_runs_survive_connections_that_break(own_dsn: str, wire: Wire, loads: Loads, cuts: int) -> None:
    """At random, a third of them each time; for a moment nobody can connect."""
    load = loads(own_dsn, wire.dsn)
    load.hire(children=2).wait_ready(2)

    for number in range(cuts):
        load.more()
        load.goes_on(load.chance.randrange(15))
        refused = wire.refused
        wire.refuse(number % 3 == 0)
        wire.cut(1.0 if number % 3 == 0 else 0.3)
        eventually(lambda: number % 3 or wire.refused > refused + 2, "nobody can connect")  # noqa: B023
        wire.refuse(False)
    wire.heal()
    load.finish()

    load.check()


@pytest.mark.parametrize("commits", [20, pytest.param(200, marks=SLOW)])
def test_runs_survive_commits_that_are_acknowledged_to_nobody(
    own_dsn: str, wire: Wire, loads: Loads, commits: int
) -> None:
    """The server did it and its answer is lost; or it did it and nobody was there; or it never heard of it."""
    load = loads(own_dsn, wire.dsn)
    load.hire(children=2).wait_ready(2)

    while wire.lost[Lose.ANSWER] + wire.lost[Lose.WIRE] < commits:
        load.more()
        wire.lose(load.chance.choice((Lose.ANSWER, Lose.ANSWER, Lose.WIRE, Lose.REQUEST)))
        load.goes_on(load.chance.randrange(4))
    wire.heal()
    load.finish()

    print(dict(wire.lost))
    load.check()


@pytest.mark.parametrize("storms", [8, pytest.param(60, marks=SLOW)])
def test_runs_survive_connections_that_are_terminated(own_dsn: str, loads: Loads, storms: int) -> None:
    """pg_terminate_backend of everybody, again and again; no process is killed, so no run is recovered."""
    load = loads(own_dsn, own_dsn)
    load.hire(children=2).wait_ready(2)

    for _ in range(storms):
        load.more()
        load.goes_on(load.chance.randrange(15))
        load.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
    load.finish()

    assert load.ask("select sum(recoveries) from runs") == [(0,)]
    load.check()

"""Scenarios of the kind crash-window: a process, or the database, dies between two things that belong together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from replaykit import Client, Worker
from tests.crash.crew import ROOT, Crew
from tests.crash.effects_points import FOLDER, Point, Points
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import chain, gated
from tests.faults.server import Own, one_server
from tests.runtime.facts import eventually, lives
from tests.scenarios.dying import careful, deadly, retried, three_steps
from tests.scenarios.stage import replaykit

MODULE = "tests.scenarios.dying"
LEASE = ("--lease-seconds", "2")
LOCK = 20_26
"""An advisory lock: who holds it keeps everybody else at the point where `hold_at` put it."""

WAITS = "select pid from pg_stat_activity where wait_event = 'advisory' and datname = current_database()"


def hold_at(rows: Rows, when: str, table: str) -> None:
    """Whoever inserts into that table stops there, before or after, until the test lets go."""
    rows.ask(
        "create function public.wait() returns trigger language plpgsql as"
        f" 'begin perform pg_advisory_xact_lock_shared({LOCK}); return new; end'"
    )
    rows.ask(f"create trigger wait {when} insert on {table} for each row execute function public.wait()")
    rows.ask("select pg_advisory_lock(%s)", LOCK)


def let_go(rows: Rows) -> None:
    """What waits goes on, and nothing stops there any more."""
    rows.ask("select pg_advisory_unlock(%s)", LOCK)


@pytest.fixture
def own_server() -> Iterator[Own]:
    """One that can be killed."""
    with one_server() as server:
        yield server


@pytest.mark.parametrize("moment", ["sweep", "claims"])
def test_b001_the_database_restarts_while_a_worker_adopts_the_runs_of_a_dead_one(
    own_server: Own, tmp_path: Path, outside: Outside, moment: str
) -> None:
    """In the statement that takes the runs back, or when some of them have been taken: all end, nobody does anything."""
    crew, rows = Crew(tmp_path, own_server.dsn, outside.address), Rows(own_server.dsn)
    try:
        dead = crew.hire(*LEASE)
        dead.wait_ready()
        started = start(crew.dsn, gated, [("gate", 1, 1)] * 250)
        eventually(lambda: len(outside.calls(key="pass_gate")) == 250, "all bodies run", 90)
        # It has room for some of them at a time: when it has taken these it is in the middle.
        heir = crew.hire(*LEASE, "--concurrency", "100")
        heir.wait_ready()
        dead.kill_all()
        if moment == "sweep":
            foreign = psycopg.connect(own_server.dsn)  # its end comes with the server's
            foreign.execute("lock table replaykit.runs in share mode")
            sweeps = "select 1 from pg_stat_activity where query like '%%dead as materialized%%' and state = 'active'"
            eventually(lambda: rows.ask(f"{sweeps} and wait_event_type = 'Lock'"), "a sweep is under way", 60)
            own_server.kill(signal.SIGQUIT)
            foreign.close()
        else:
            taken = "select count(*) from runs where state = 'running' and recoveries = 1"
            eventually(lambda: rows.ask(taken)[0][0] >= 50, "some are taken", 60)
            assert rows.states()["pending"] > 0
            own_server.kill(signal.SIGQUIT)
        rows.close()
        eventually(lambda: heir.events("claim_failed") or heir.events("sweep_failed"), "it has noticed")
        own_server.restart()
        outside.open_gate("gate")
        rows.wait_ended(250, 120)

        assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", [0, "gate", 0]))
        assert heir.process.poll() is None
        assert outside.overlaps == []
    finally:
        rows.close()
        crew.close()
        print(crew.logs())


def test_b002_a_recoverer_with_an_old_list_of_runs_takes_nothing(crew: Crew, outside: Outside, rows: Rows) -> None:
    """The parent of a dead child is stopped before it hands back that child's runs; meanwhile another worker's sweep does
    it, and that worker runs them. The parent goes on, and finds that they have moved on."""
    late = crew.hire(*LEASE)
    (child,) = late.wait_ready()
    incarnation = late.worker_id(child)
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(outside.busy, "the body runs")
    heir = crew.hire(*LEASE)
    (heirs_child,) = heir.wait_ready()

    os.kill(late.pid, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: outside.busy(heirs_child) == 1, "the body runs elsewhere", 60)
    owner = "select state, worker, lease_token, claims, recoveries from runs"
    before = rows.ask(owner)
    os.kill(late.pid, signal.SIGCONT)

    eventually(lambda: late.events("runs_released", worker=incarnation), "it has tried to hand them back", 60)
    assert late.events("runs_released", worker=incarnation)[0]["runs"] == 0
    assert rows.ask(owner) == before
    outside.open_gate("gate")
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", ["gate"])}
    assert [call.pid for call in outside.calls()] == [child, heirs_child]
    assert rows.recoveries() == 1


def test_b004_a_run_whose_worker_dies_between_two_steps_keeps_the_only_place_no_longer_than_it_takes(
    crew: Crew, rows: Rows, tmp_path: Path
) -> None:
    """Two workers with one place each are killed before its third step begins; the third one runs it, and what is behind."""
    points = Points(tmp_path)
    said = tmp_path / "said"
    one_place = ("--concurrency", "1", *LEASE, MODULE, "--lifespan", f"{MODULE}:lifespan")
    (run,) = start(crew.dsn, three_steps, [(str(said),)])
    behind = start(crew.dsn, chain, [(1, 0.0, 0.0)] * 10)

    for n in (1, 2):
        points.arm(Point.BEFORE_INTENT, "third")
        worker = crew.hire(*one_place, env={FOLDER: str(tmp_path)})
        points.wait_reached()
        assert rows.ask("select state, claims from runs where id = %s", run) == [("running", n)]
        eventually(lambda: [entry.key for entry in rows.entries(run)] == ["first", "second"], "two steps are written")
        assert n == 2 or rows.ended() == 0  # the second one has taken the others before the first one's lease has ended
        worker.kill_all()
    crew.hire(*one_place)
    rows.wait_ended(11)

    assert rows.outputs([run]) == {run: ("succeeded", "done")}
    assert {state for state, _ in rows.outputs(behind).values()} == {"succeeded"}
    assert said.read_text().split() == ["first", "second", "third"]
    assert rows.ask("select recoveries from runs where id = %s", run) == [(2,)]


def test_b004_a_run_that_gets_no_further_is_set_apart_and_shown_with_a_reason(
    crew: Crew, rows: Rows, tmp_path: Path
) -> None:
    """Its third step ends each process; what is behind it does not wait for that to be decided."""
    (run,) = start(crew.dsn, deadly, [(str(tmp_path / "said"),)])
    behind = start(crew.dsn, chain, [(1, 0.0, 0.0)] * 10)

    crew.hire("--concurrency", "1", "--recoveries-max", "1", MODULE)
    rows.wait_ended(11)

    assert {state for state, _ in rows.outputs(behind).values()} == {"succeeded"}
    assert rows.outputs([run])[run][0] == "held"
    shown = replaykit(crew.dsn, "show", str(run)).out
    assert "held" in shown
    assert "ended with exit code 9" in " ".join(shown.split())


STARTERS = ["client", "conn"]


@pytest.mark.anyio
@pytest.mark.parametrize("server", ["goes on", "ends"])
@pytest.mark.parametrize(("when", "table"), [("before", "runs"), ("before", "payloads"), ("after", "payloads")])
async def test_b005_a_start_that_is_killed_is_whole_or_not_there(
    dsn: str, rows: Rows, outside: Outside, monkeypatch: pytest.MonkeyPatch, when: str, table: str, server: str
) -> None:
    """Before the row of the run, between the row and its input, after both: the client dies, and the server's process with
    it, or not. What is there then is executed."""
    monkeypatch.setenv("REPLAYKIT_TEST_OUTSIDE", outside.address)
    hold_at(rows, when, table)
    starters = [
        subprocess.Popen([sys.executable, "-m", "tests.scenarios.starting", dsn, how], cwd=ROOT) for how in STARTERS
    ]
    try:
        eventually(lambda: len(rows.ask(WAITS)) == len(starters), "both starts are in the middle")
    finally:
        for starter in starters:
            with starter:
                starter.kill()
    if server == "ends":
        rows.ask(f"select pg_terminate_backend(pid) from ({WAITS}) as waiting")
    let_go(rows)
    started = "select 1 from pg_stat_activity where application_name like '%%replaykit:client%%' and state <> 'idle'"
    eventually(lambda: rows.ask(WAITS) == [] and rows.ask(started) == [], "nothing is under way")

    halves = "select r.id, p.run_id from runs r full join payloads p on p.run_id = r.id where r.id is null or p.run_id is null"
    assert rows.ask(halves) == []
    there = rows.ask("select key, state, queue, workflow, input::text from runs join payloads on run_id = id")
    assert there in ([], [("client", "pending", "default", "chain", there[0][-1] if there else "")])
    if server == "ends":
        assert there == []
    async with Client(dsn) as client, Worker(client, workflows=[chain]):
        for key, *_ in there:
            assert await client.handle(key).result(timeout=60) == 0
        # And it can be started: nothing of the one that died stands in the way.
        assert await (await client.options(key="client").start(chain, 1, 0.0, 0.0)).result(timeout=60) == 0
    assert rows.states() == {"succeeded": 1}


def listed(dsn: str) -> list[str]:
    """The states of the runs that a person sees."""
    return [run["state"] for run in json.loads(replaykit(dsn, "runs", "--json").out)]


def test_b007_the_run_of_a_killed_worker_is_listed_until_another_one_ends_it(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """Looked at all the time: it is there, and it is somebody's, or anybody's."""
    killed = crew.hire(*LEASE, MODULE)
    killed.wait_ready()
    (run,) = start(crew.dsn, retried, [("gate",)])
    eventually(outside.busy, "the body runs")
    heir = crew.hire(*LEASE, MODULE)
    (heirs_child,) = heir.wait_ready()
    seen: set[tuple[object, ...]] = set()

    def look() -> bool:
        (row,) = rows.ask("select state, worker is not null from runs")
        seen.add(row)
        return outside.busy(heirs_child) == 1

    assert listed(crew.dsn) == ["running"]
    killed.kill_all()
    assert listed(crew.dsn) in (["running"], ["pending"])
    eventually(look, "the other one runs it", 60)
    assert listed(crew.dsn) == ["running"]
    outside.open_gate("gate")
    rows.wait_ended(1)

    assert seen <= {("running", True), ("pending", False)}
    assert listed(crew.dsn) == ["succeeded"]
    assert rows.outputs([run]) == {run: ("succeeded", "gate")}
    assert rows.entries(run)[0].attempt == 1


@pytest.mark.parametrize("write", ["is lost", "comes late"])
def test_b008_what_a_step_returned_counts_once_it_is_written(
    crew: Crew, rows: Rows, tmp_path: Path, write: str
) -> None:
    """Its record is large and slow: nothing acts on the result meanwhile, and when the process dies nothing has."""
    said = tmp_path / "said"
    hold_at(rows, "before", "journal")
    worker = crew.hire(MODULE)
    (child,) = worker.wait_ready()
    (run,) = start(crew.dsn, careful, [(str(said), 5_000_000)])

    eventually(lambda: rows.ask(WAITS), "the body has returned, and its record is on its way", 60)
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["draw"]
    os.kill(child, signal.SIGKILL)
    eventually(lambda: not lives(child), "the child is dead")
    if write == "is lost":
        rows.ask(f"select pg_terminate_backend(pid) from ({WAITS}) as waiting")
    let_go(rows)
    rows.wait_ended(1)

    lines = [line.split() for line in said.read_text().splitlines()]
    draws = [int(number) for what, number in lines if what == "draw"]
    spent = [int(number) for what, number in lines if what == "spend"]
    drawn = rows.ask("select (output ->> 'number')::int from journal where key = 'draw'")
    assert [(number,) for number in spent] == drawn
    assert rows.outputs([run]) == {run: ("succeeded", draws[-1])}
    assert len(draws) in ((2,) if write == "is lost" else (1, 2))

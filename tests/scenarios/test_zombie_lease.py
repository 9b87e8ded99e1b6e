"""Scenarios of the kind zombie-lease: who has lost a lease writes nothing, who has one keeps it, who is dead holds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
import pytest

from replaykit import Client, Worker
from replaykit.limits import Settings
from replaykit.postgres import journal, leases
from replaykit.postgres.database import Database
from replaykit.replay.entries import Finish, State, Unit, Verdict
from tests.crash.crew import ROOT, Crew, WorkerProcess
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_stopped import has_lost, written_by
from tests.crash.workflows import OUTSIDE, chain, gated
from tests.direct import direct
from tests.faults.wire import Wire
from tests.runtime.facts import eventually, lives
from tests.scenarios.losing import ASLEEP, LEASE_SECONDS, hung, lingering, sleepless
from tests.scenarios.stage import replaykit

MODULE = "tests.scenarios.losing"
LEASE = ("--lease-seconds", str(LEASE_SECONDS))
OWNER = "select state, worker, lease_token, claims, fruitless from runs where id = %s"


class Own:
    """A process of one's own with a `Worker` in it."""

    def __init__(self, dsn: str, outside: Outside, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, dsn],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), OUTSIDE: outside.address, **({ASLEEP: how} if how else {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pid = self.process.pid
        self.id = self.process.stdout.readline().strip()

    def is_back(self, rows: Rows) -> bool:
        """Whether it has begun anew, under another id."""
        return bool(
            rows.ask("select 1 from workers where pid = %s and id <> %s and stopped_at is null", self.pid, self.id)
        )


Owns = Callable[..., Own]


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    """A wire to the test's database."""
    with Wire(dsn) as made:
        yield made


@pytest.fixture
def owns(dsn: str, outside: Outside, wire: Wire) -> Iterator[Owns]:
    """Makes such processes; gone at the end, before the wire that they may use is."""
    made: list[Own] = []

    def make(how: str = "", *, over: str | None = None) -> Own:
        own = Own(over or dsn, outside, how)
        made.append(own)
        return own

    try:
        yield make
    finally:
        for own in made:
            with own.process:
                own.process.kill()


def hire_ready(crew: Crew, *flags: str) -> tuple[WorkerProcess, int]:
    """A worker with a child that claims, and the child's pid."""
    worker = crew.hire(*LEASE, *flags, MODULE)
    (child,) = worker.wait_ready()
    return worker, child


def beats(rows: Rows, worker: str) -> tuple[Any, ...]:
    """When its last heartbeat was, until when its lease is, and whether it was taken."""
    (row,) = rows.ask("select heartbeat_at, expires_at, stopped_at from workers where id = %s", worker)
    return row


def has_renewed(rows: Rows, worker: str, leases: float = 2) -> Callable[[], bool]:
    """Whether it has sent heartbeats for so many leases from now on."""
    query = "select heartbeat_at > %s + %s * interval '1 second' from workers where id = %s"
    (since,) = rows.ask("select heartbeat_at from workers where id = %s", worker)[0]
    return lambda: rows.ask(query, since, leases * LEASE_SECONDS, worker) == [(True,)]


@pytest.mark.parametrize("how", ["blocked", "stopped"])
def test_b016_a_worker_that_wakes_after_its_lease_changes_nothing(
    crew: Crew, owns: Owns, outside: Outside, rows: Rows, tmp_path: Path, how: str
) -> None:
    """Its event loop was blocked, or the whole process stopped; its heartbeat and its result go out, and are refused."""
    door, other_door = tmp_path / "door", tmp_path / "other-door"
    own = owns(how)
    (run,) = start(crew.dsn, lingering, [(str(door), str(other_door))])
    eventually(lambda: outside.busy(own.pid), "the body runs")
    if how == "stopped":
        os.kill(own.pid, signal.SIGSTOP)
    _, heir = hire_ready(crew)
    eventually(lambda: has_lost(rows, own.id), "the run is taken", 60)
    eventually(lambda: outside.busy(heir), "the body runs elsewhere")
    owner, lost = rows.ask(OWNER, run), beats(rows, own.id)

    door.touch()
    os.kill(own.pid, signal.SIGCONT)
    eventually(lambda: own.is_back(rows), "it has learnt that it lost, and begins anew", 60)

    assert beats(rows, own.id) == lost
    assert rows.ask(OWNER, run) == owner
    assert written_by(rows, own.id) == 0
    other_door.touch()
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", heir)}
    assert rows.recoveries() == 1


def test_b017_a_step_that_hangs_is_ended_by_its_time_out_whatever_the_heartbeat_says(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """It keeps the only place for four leases, and no longer."""
    seconds = 4 * LEASE_SECONDS
    crew.hire(*LEASE, "--concurrency", "1", MODULE)
    (stuck,) = start(crew.dsn, hung, [(seconds,)])
    (behind,) = start(crew.dsn, chain, [(1, 0.0, 0.0)])
    rows.wait_ended(2)

    assert rows.outputs([stuck, behind]) == {stuck: ("failed", None), behind: ("succeeded", 0)}
    query = "select error ->> 'type', extract(epoch from recorded_at - started_at) from journal where run_id = %s"
    ((error, took),) = rows.ask(query, stuck)
    assert error == "builtins.TimeoutError"
    assert took >= seconds
    began = {call.run: call.began for call in outside.calls()}
    assert began[str(behind)] - began[str(stuck)] > seconds - LEASE_SECONDS


@pytest.mark.anyio
async def test_b017_a_step_that_hangs_without_a_time_out_is_seen_and_can_be_ended(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """Nobody else takes it; it says since when it runs; a person ends it, and the place is free."""
    worker, child = await asyncio.to_thread(hire_ready, crew, "--concurrency", "1")
    async with Client(crew.dsn) as client:
        stuck = await client.start(sleepless)
        behind = await client.start(chain, 1, 0.0, 0.0)
        await asyncio.to_thread(eventually, outside.busy, "the body runs")
        held = has_renewed(rows, worker.worker_id(child))
        await asyncio.to_thread(eventually, held, "two leases are over", 60)

        assert rows.ask("select key, since < now() from in_flight where run_id = %s", stuck.id) == [("never_end", True)]
        shown = await asyncio.to_thread(replaykit, crew.dsn, "show", str(stuck.id))
        assert "never_end (attempt 1), since " in shown.out
        assert rows.ask("select claims from runs where id = %s", stuck.id) == [(1,)]
        await stuck.cancel()
        assert await behind.result(timeout=60) == 0
    assert rows.ask("select state from runs where id = %s", stuck.id) == [("cancelled",)]


@pytest.mark.parametrize("kind", ["worker", "own process"])
def test_b019_a_worker_that_cannot_renew_its_lease_ends_its_step_before_another_begins_it(
    crew: Crew, owns: Owns, outside: Outside, rows: Rows, wire: Wire, kind: str
) -> None:
    """Only its network is cut. It knows when its lease ends, a little before the database does."""
    if kind == "worker":
        crew.dsn = wire.dsn
        cut_off, child = hire_ready(crew)
        incarnation = cut_off.worker_id(child)
    else:
        own = owns(over=wire.dsn)
        child, incarnation = own.pid, own.id
    (run,) = start(rows.dsn, gated, [("gate",)])
    eventually(lambda: outside.busy(child), "the body runs")
    crew.dsn = rows.dsn
    _, heir = hire_ready(crew)

    wire.freeze()
    eventually(lambda: outside.busy(heir), "the body runs elsewhere", 60)

    (first, second) = outside.calls(str(run))
    assert (first.pid, second.pid) == (child, heir)
    assert first.ended is not None
    (expired,) = rows.ask("select extract(epoch from expires_at)::float8 from workers where id = %s", incarnation)[0]
    assert first.ended < expired < second.began
    assert not first.completed
    wire.thaw()
    outside.open_gate("gate")
    rows.wait_ended(1)
    assert outside.overlaps == []
    assert written_by(rows, incarnation) == 0


def test_b019_a_worker_whose_network_comes_back_takes_its_run_again(
    owns: Owns, outside: Outside, rows: Rows, wire: Wire
) -> None:
    """In a process of one's own, with nobody else there: the step began anew after it was ended, and nothing is to blame."""
    own = owns(over=wire.dsn)
    (run,) = start(rows.dsn, gated, [("gate",)])
    eventually(lambda: outside.busy(own.pid), "the body runs")

    wire.freeze()
    eventually(lambda: not outside.busy(own.pid), "the body is ended")
    wire.thaw()
    eventually(lambda: outside.busy(own.pid), "it runs again", 60)
    outside.open_gate("gate")
    rows.wait_ended(1)

    assert rows.outputs([run]) == {run: ("succeeded", ["gate"])}
    assert [call.completed for call in outside.calls()] == [False, True]
    assert rows.recoveries() == 0


@pytest.mark.anyio
async def test_b020_what_a_duplicate_says_of_a_run_that_it_does_not_hold_counts_nothing(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """The run is started again, a second worker is called for it, and reports that it failed: it goes on where it is."""
    _, child = await asyncio.to_thread(hire_ready, crew, "--concurrency", "1")
    async with Client(crew.dsn) as client:
        handle = await client.options(key="R").start(gated, "gate", 1, 1)
        await asyncio.to_thread(eventually, lambda: outside.calls(key="pass_gate"), "the body runs")
        owner = rows.ask(OWNER, handle.id)
        _, second = await asyncio.to_thread(hire_ready, crew)

        again = await client.options(key="R").start(gated, "gate", 1, 1)
        assert (again.id, again.created) == (handle.id, False)
        rows.ask("select pg_notify('replaykit_work', '')")
        other = await client.start(chain, 1, 0.0, 0.0)
        assert await other.result(timeout=60) == 0  # so the second worker has looked for work, and left the run alone
        assert {call.pid for call in outside.calls(str(other.id))} == {second}
        report = Unit(
            handle.id, uuid.uuid4(), uuid.uuid4(), change=Finish(State.FAILED, error='{"type": "already running"}')
        )
        with contextlib.closing(Database(crew.dsn).connect_sync()) as connection:
            verdicts = journal.parse_verdicts(connection.run(*journal.write_units([report])))
        assert verdicts == {handle.id: Verdict.FENCED}

        assert rows.ask(OWNER, handle.id) == owner
        outside.open_gate("gate")
        assert await handle.result(timeout=60) == [0, "gate", 0]
    assert {call.pid for call in outside.calls(str(handle.id))} == {child}
    assert set(outside.begun().values()) == {1}


def test_b022_there_are_several_heartbeats_a_lease_over_a_slow_network(
    crew: Crew, outside: Outside, rows: Rows, wire: Wire
) -> None:
    """Written down by the database: two at least in each lease, and nobody takes a step that is longer than one."""
    lease = 3.0
    rows.ask("create table public.beats (worker uuid, at timestamptz)")
    rows.ask(
        "create function public.beat() returns trigger language plpgsql as"
        " 'begin insert into public.beats values (new.id, clock_timestamp()); return null; end'"
    )
    rows.ask("create trigger beat after update on workers for each row execute function public.beat()")
    wire.delay(0.2)
    crew.dsn = wire.dsn
    slow = crew.hire("--lease-seconds", str(lease))
    (child,) = slow.wait_ready()
    (run,) = start(rows.dsn, gated, [("gate",)])
    eventually(lambda: outside.busy(child), "the body runs")
    crew.dsn = rows.dsn
    crew.hire("--lease-seconds", str(lease)).wait_ready()

    said = "select extract(epoch from at)::float8 from public.beats where worker = %s order by at"
    worker = slow.worker_id(child)
    first = rows.ask(said, worker)[0][0]
    eventually(lambda: rows.ask(said, worker)[-1][0] > first + 1.5 * lease, "one and a half leases are over", 60)
    outside.open_gate("gate")
    rows.wait_ended(1)

    at = [row[0] for row in rows.ask(said, worker)]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert median(gaps) <= lease / 2
    assert rows.ask("select claims, recoveries from runs") == [(1, 0)]
    assert [call.pid for call in outside.calls(str(run))] == [child]


def test_b022_a_heartbeat_as_rare_as_the_lease_is_refused(crew: Crew) -> None:
    """In a sentence, before anything begins."""
    said = replaykit(crew.dsn, "worker", MODULE, "--lease-seconds", "60", "--heartbeat-seconds", "60")

    assert said.code == 2
    assert "heartbeat_seconds (60) must be at most half of lease_seconds (60)" in " ".join(said.err.split())


def test_b023_the_run_of_a_dead_worker_fills_no_place(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Two workers with one place each: the second one takes the run of the first, dead one, and then the next."""
    killed, _ = hire_ready(crew, "--concurrency", "1")
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(outside.busy, "the body runs")
    (behind,) = start(crew.dsn, chain, [(1, 0.0, 0.0)])
    killed.kill_all()

    outside.open_gate("gate")
    hire_ready(crew, "--concurrency", "1")
    rows.wait_ended(2)

    assert rows.outputs([run, behind]) == {run: ("succeeded", ["gate"]), behind: ("succeeded", 0)}
    assert rows.ask("select recoveries from runs where id = %s", run) == [(1,)]


def test_b025_a_restarted_worker_is_another_one_whatever_its_host_is_called(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """Killed and started at once on one host: its heartbeats do not renew the lease of the one before."""
    killed, child = hire_ready(crew)
    incarnation = killed.worker_id(child)
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(outside.busy, "the body runs")
    killed.kill_all()
    last = beats(rows, incarnation)[:2]

    _, again = hire_ready(crew)
    eventually(lambda: outside.busy(again), "the run goes on", 60)

    assert beats(rows, incarnation)[:2] == last
    names = "select count(*), count(distinct hostname), count(distinct id) from workers where id = %s or pid = %s"
    assert rows.ask(names, incarnation, again) == [(2, 1, 2)]
    late = "select extract(epoch from w.stopped_at - w.expires_at)::float8 from workers w where id = %s"
    assert rows.ask(late, incarnation)[0][0] < 20, "soon after the lease, not when somebody looks"
    outside.open_gate("gate")
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", ["gate"])}


def test_b026_a_step_that_began_long_ago_is_left_alone_while_its_worker_lives(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """47 minutes by all that the database knows of it; other workers look for the dead all the while."""
    worker, child = hire_ready(crew)
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(outside.busy, "the body runs")
    rows.ask(
        "update runs set created_at = created_at - interval '47 minutes', started_at = started_at - interval '47 minutes',"
        " available_at = available_at - interval '47 minutes'"
    )
    rows.ask("update workers set started_at = started_at - interval '47 minutes'")
    other, others_child = hire_ready(crew)

    eventually(has_renewed(rows, other.worker_id(others_child)), "the other one has looked for a while", 60)
    outside.open_gate("gate")
    rows.wait_ended(1)

    assert [call.pid for call in outside.calls(str(run))] == [child]
    assert rows.ask("select claims, recoveries from runs") == [(1, 0)]
    assert worker.ready() == [child]


@pytest.mark.anyio
async def test_b028_a_dead_workers_run_is_found_behind_more_than_a_sweep_can_take(
    dsn: str, rows: Rows, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 runs of a worker that lives and looks old, 600 of a dead one that somebody has locked, and one that can be had."""
    monkeypatch.setenv(OUTSIDE, outside.address)
    register: dict[str, Any] = {
        "hostname": "elsewhere", "pid": 1, "queues": ["default"], "workflows": {}, "version": "0", "python": "3",
    }  # fmt: skip
    old, dead, last = (uuid.UUID(int=n) for n in (1, 2, 3))
    with contextlib.closing(Database(dsn).connect_sync()) as connection:
        for worker, lease in ((old, 86_400.0), (dead, 86_400.0), (last, 86_400.0)):
            connection.run(*leases.insert_worker(worker, lease_seconds=lease, **register))
    take = (
        "update runs set state = 'running', worker = %s, lease_token = gen_random_uuid(), protocol = 1,"
        " started_at = now() - interval '9 hours'"
    )
    for worker in (old, dead):
        rows.ask("select start('gated', '[\"gate\"]') from generate_series(1, 600)")
        rows.ask(f"{take} where state = 'pending'", worker)
    async with Client(dsn) as client:
        handle = await client.start(chain, 1, 0.0, 0.0)
        rows.ask(f"{take} where id = %s", last, handle.id)
        rows.ask("update workers set heartbeat_at = heartbeat_at - interval '9 hours'")
        with psycopg.connect(direct(dsn)) as foreign:
            foreign.execute("select 1 from replaykit.runs where worker = %s for update", (dead,))
            rows.ask("update workers set expires_at = now() - interval '1 second' where id in (%s, %s)", dead, last)
            async with Worker(client, workflows=[chain], settings=Settings(lease_seconds=LEASE_SECONDS)):
                assert await handle.result(timeout=60) == 0
            assert rows.ask("select count(*) from runs where worker = %s and state = 'running'", dead) == [(600,)]

    assert rows.ask("select recoveries, claims from runs where id = %s", handle.id) == [(1, 1)]
    assert rows.ask("select count(*) from runs where worker = %s and state = 'running'", old) == [(600,)]


def test_b029_a_worker_that_takes_a_run_again_renews_its_lease_again(
    crew: Crew, owns: Owns, outside: Outside, rows: Rows
) -> None:
    """Lost while it was stopped, taken once more when the other one has died: a third one has no chance to take it."""
    own = owns()
    (run,) = start(crew.dsn, gated, [("gate",)])
    eventually(lambda: outside.busy(own.pid), "the body runs")
    outside.excuse(own.pid)
    os.kill(own.pid, signal.SIGSTOP)
    other, heir = hire_ready(crew)
    eventually(lambda: outside.busy(heir), "the body runs elsewhere", 60)
    os.kill(own.pid, signal.SIGCONT)
    eventually(lambda: own.is_back(rows), "it begins anew", 60)
    other.kill_all()
    eventually(lambda: outside.busy(heir) == 0 and outside.busy(own.pid) == 1, "it has taken the run again", 60)

    hire_ready(crew)
    (worker,) = rows.ask("select worker from runs")[0]
    assert rows.ask("select pid, id <> %s from workers where id = %s", own.id, worker) == [(own.pid, True)]
    eventually(has_renewed(rows, worker), "two leases are over", 60)
    assert rows.ask("select worker, claims from runs") == [(worker, 3)]
    outside.open_gate("gate")
    rows.wait_ended(1)
    assert rows.outputs([run]) == {run: ("succeeded", ["gate"])}
    assert [call.pid for call in outside.calls(str(run))] == [own.pid, heir, own.pid]
    assert lives(own.pid)

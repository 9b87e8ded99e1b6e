"""Poison runs: whoever ends its process again and again is put apart and held; everybody else succeeds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from replaykit import Client, Worker
from replaykit.limits import FRUITLESS_MAX, Settings
from replaykit.runtime.heartbeat import EXIT_LOOP_STUCK
from tests.crash.crew import Crew, WorkerProcess
from tests.crash.poison import (
    patient,
    poisonous,
    poisonous_block,
    poisonous_code,
    poisonous_signal,
    poisonous_thread,
    sound,
)
from tests.crash.rows import Rows, start
from tests.runtime.facts import eventually, lives

MODULE = "tests.crash.poison"


def held(rows: Rows) -> dict[UUID, str]:
    """The runs that are held, with their reasons."""
    return dict(rows.ask("select id, reason from runs where state = 'held'"))


def wait_held(rows: Rows, runs: int, seconds: float = 60.0) -> dict[UUID, str]:
    """So many are held."""
    try:
        eventually(lambda: len(held(rows)) >= runs, f"{runs} runs are held", seconds)
    except AssertionError as error:
        error.add_note(str(rows.ask("select state, fruitless, suspect, recoveries, reason from runs")[:20]))
        raise
    return held(rows)


def solo_children(worker: WorkerProcess) -> list[int]:
    """Pids of the solo children that live."""
    return [e["pid"] for e in worker.events("child_started", solo=True) if lives(e["pid"])]


def assert_each_step_is_recorded_once(rows: Rows, runs: list[UUID], steps: int) -> None:
    """Of these runs: so many entries each, none of them twice."""
    counted = rows.ask(
        "select run_id, count(*), count(distinct key) from journal where run_id = any(%s) group by 1", runs
    )
    assert sorted(counted) == sorted((run, steps, steps) for run in runs)


def test_one_poison_run_among_a_thousand_is_held_alone(crew: Crew, rows: Rows) -> None:
    """1,000 healthy runs succeed, each step recorded once (issue 3)."""
    healthy = start(crew.dsn, sound, [(n,) for n in range(500)])
    (poison,) = start(crew.dsn, poisonous, [(9,)])
    healthy += start(crew.dsn, sound, [(n,) for n in range(500)])

    worker = crew.hire(MODULE)
    reasons = wait_held(rows, 1)
    rows.wait_ended(1_001)

    assert list(reasons) == [poison]
    assert reasons[poison].startswith(f"{FRUITLESS_MAX + 5} worker processes in a row have ended while they executed")
    assert "with no other run beside it; the last one ended with exit code 9; " in reasons[poison]
    assert {state for state, _ in rows.outputs(healthy).values()} == {"succeeded"}
    assert_each_step_is_recorded_once(rows, healthy, 2)
    assert [e["run_id"] for e in worker.events("run_held")] == [str(poison)]
    eventually(lambda: not solo_children(worker), "the solo children have left")
    assert worker.ready()


def test_every_kind_of_poison_is_held(crew: Crew, rows: Rows) -> None:
    """An exit code (even 0, which a child of `replaykit worker` has when it leaves by itself), a thread's, a signal, a body
    and a workflow that never let go of the event loop: each with its own words, and nobody else."""
    kinds = {
        start(crew.dsn, poisonous, [(0,)])[0]: "the last one ended with exit code 0;",
        start(crew.dsn, poisonous_thread, [(7,)])[0]: "the last one ended with exit code 7;",
        start(crew.dsn, poisonous_signal, [()])[0]: "the last one was killed by SIGKILL, as when memory runs out;",
        start(crew.dsn, poisonous_block, [()])[0]: "the last one blocked its event loop until its lease ended;",
        start(crew.dsn, poisonous_code, [()])[0]: "the last one blocked its event loop until its lease ended;",
    }
    healthy = start(crew.dsn, sound, [(n,) for n in range(20)])

    crew.hire(MODULE, "--recoveries-max", "1", "--lease-seconds", "2")
    reasons = wait_held(rows, len(kinds), seconds=120)
    rows.wait_ended(len(kinds) + 20)

    assert {run: words in reasons[run] for run, words in kinds.items()} == dict.fromkeys(kinds, True)
    assert all(", the last of them with no other run beside it; " in reason for reason in reasons.values())
    assert {state for state, _ in rows.outputs(healthy).values()} == {"succeeded"}
    assert_each_step_is_recorded_once(rows, healthy, 2)


def test_a_blocked_loop_is_told_of_before_its_process_ends(crew: Crew, rows: Rows) -> None:
    """By the child, with the run, the step and the line; the parent says what it died of."""
    (run,) = start(crew.dsn, poisonous_block, [()])

    worker = crew.hire(MODULE, "--recoveries-max", "1", "--lease-seconds", "3")
    eventually(lambda: worker.events("child_ended", exit_code=EXIT_LOOP_STUCK), "a child has ended")

    (told, *_) = worker.events("loop_blocked")
    assert (told["run_id"], told["step"]) == (str(run), "never_yields")
    assert " in never_yields" in told["frames"][-1]


@pytest.mark.slow
def test_a_hundred_poison_runs_among_healthy_ones_are_held(crew: Crew, rows: Rows) -> None:
    """100 held, 1,000 succeed (issue 3); prints how long it took."""
    poison, healthy = [], []
    for n in range(100):
        poison += start(crew.dsn, poisonous, [(9,)])
        healthy += start(crew.dsn, sound, [(n,)] * 10)

    began = time.monotonic()
    worker = crew.hire(MODULE)
    eventually(lambda: rows.states().get("succeeded") == 1_000, "1,000 succeed", seconds=1_800)
    succeeded = time.monotonic() - began
    reasons = wait_held(rows, 100, seconds=1_800)

    deaths = len(worker.events("child_ended"))
    print(f"1,000 succeeded after {succeeded:.0f} s, 100 held after {time.monotonic() - began:.0f} s, {deaths} deaths")
    assert set(reasons) == set(poison)
    assert {state for state, _ in rows.outputs(healthy).values()} == {"succeeded"}
    assert_each_step_is_recorded_once(rows, healthy, 2)


def test_deploys_never_count(crew: Crew, rows: Rows, tmp_path: Path) -> None:
    """B131: four times SIGTERM in the middle of a step, and not one recovery."""
    (run,) = start(crew.dsn, patient, [(str(tmp_path / "go"), str(tmp_path / "go"), 0)])
    for _ in range(4):
        worker = crew.hire(MODULE, "--grace-seconds", "0")
        worker.wait_ready()
        eventually(lambda: rows.states() == {"running": 1}, "it runs")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0

    (tmp_path / "go").touch()
    crew.hire(MODULE)
    rows.wait_ended(1)

    assert rows.ask("select state, recoveries, fruitless from runs where id = %s", run) == [("succeeded", 0, 0)]


def test_suspects_are_tried_together_and_leave_when_they_have_got_further(
    crew: Crew, rows: Rows, tmp_path: Path
) -> None:
    """Innocent neighbours of a poison run need not wait for each other's long steps; the rest of them runs as ever."""
    first, second = tmp_path / "first", tmp_path / "second"
    started = start(crew.dsn, patient, [(str(first), str(second), 20)] * 30)
    rows.ask("update runs set suspect = true, fruitless = %s", FRUITLESS_MAX)

    worker = crew.hire(MODULE)
    together = "select count(*) from runs where state = 'running' group by worker"
    eventually(lambda: rows.ask(together) == [(30,)], "all are executed by one process")
    ((solo,),) = rows.ask("select distinct pid from workers w join runs r on r.worker = w.id and r.state = 'running'")
    assert solo in solo_children(worker)
    first.touch()
    eventually(lambda: rows.ask("select count(*) from runs where suspect") == [(0,)], "none is a suspect any more")
    second.touch()
    rows.wait_ended(30)

    pids = {run: output for run, (_, output) in rows.outputs(started).items()}
    assert {where[0] for where in pids.values()} == {solo}
    assert solo not in {where[-1] for where in pids.values()}


def test_a_suspect_that_dies_again_and_again_is_alone_in_the_end(crew: Crew, rows: Rows) -> None:
    """Beside it, in other processes, the others go on."""
    (poison,) = start(crew.dsn, poisonous_thread, [(9,)])
    rows.ask("update runs set suspect = true, fruitless = %s", FRUITLESS_MAX + 2)
    worker = crew.hire(MODULE)
    healthy = start(crew.dsn, sound, [(n,) for n in range(50)])

    assert list(wait_held(rows, 1)) == [poison]
    rows.wait_ended(51)

    assert {state for state, _ in rows.outputs(healthy).values()} == {"succeeded"}
    dead = {e["pid"] for e in worker.events("child_ended", exit_code=9)}
    assert len(dead) >= 3
    assert dead <= {e["pid"] for e in worker.events("child_started", solo=True)}


def test_a_worker_in_someone_elses_process_executes_one_suspect_at_a_time(dsn: str, rows: Rows, tmp_path: Path) -> None:
    """Beside its other runs: it has no process to put it into. When that one has got further it is the next one's turn."""
    first, second = tmp_path / "first", tmp_path / "second"
    call = (str(first), str(second), 0)

    def running() -> list[tuple[int, int]]:
        query = "select count(*) filter (where suspect), count(*) filter (where not suspect) from runs"
        return [(suspects, others) for suspects, others in rows.ask(f"{query} where state = 'running'")]

    async def work() -> None:
        async with Client(dsn) as client:
            suspects = [await client.start(patient, *call) for _ in range(3)]
            rows.ask("update runs set suspect = true, fruitless = %s", FRUITLESS_MAX)
            others = [await client.start(patient, *call) for _ in range(2)]
            async with Worker(client, workflows=[patient], settings=Settings(poll_seconds=0.05)):
                await comes_true(lambda: running() == [(1, 2)])
                others.append(await client.start(patient, *call))
                await comes_true(lambda: running() == [(1, 3)])
                first.touch()
                await comes_true(lambda: running() == [(0, 6)])
                second.touch()
                await asyncio.gather(*(handle.result(timeout=30) for handle in suspects + others))

    asyncio.run(work())

    assert rows.states() == {"succeeded": 6}


async def comes_true(fact: Callable[[], bool]) -> None:
    """`eventually`, while the loop turns."""
    async with asyncio.timeout(30):
        while not fact():
            await asyncio.sleep(0.01)

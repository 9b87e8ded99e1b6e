"""Scenarios of the kind scale: values that are too large, journals that are long, many that wait for one slot.

What is compared is time of the processor and rows that the database read, which a busy machine does not change much.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tenacity import AsyncRetrying, retry_if_result, stop_never, wait_random

from replaykit import Client, Worker, Workflow, step, workflow
from replaykit.limits import Settings
from replaykit.postgres import database as database_module
from replaykit.postgres.database import Database
from replaykit.postgres.schema import Statement
from tests.crash.crew import Crew
from tests.crash.rows import Rows, start
from tests.runtime.facts import eventually
from tests.scenarios.heavy import MEGABYTE, careful, light, weighs

SLOW = pytest.mark.slow

# ------------------------------------------------------------------ B160: large values


@pytest.fixture
def crew(tmp_path: Path, dsn: str) -> Iterator[Crew]:
    """Starts `replaykit worker` processes; none is left at the end."""
    hired = Crew(tmp_path, dsn, "127.0.0.1:1", module="tests.scenarios.heavy")
    yield hired
    hired.close()


@pytest.mark.parametrize("megabytes", [60, pytest.param(300, marks=SLOW)])
def test_b160_a_result_too_large_fails_its_run_with_both_sizes(crew: Crew, rows: Rows, megabytes: int) -> None:
    """Nothing of it reaches the database, the process goes on and is as small as before; the others' runs end. Where the
    work cannot be done again, a person is asked."""
    worker = crew.hire("--concurrency", "20")
    (child,) = worker.wait_ready()
    start(crew.dsn, weighs, [(5,)])
    rows.wait_ended(1)
    before = memory(child, "VmRSS")

    others = start(crew.dsn, light, [(20,)] * 10)
    (failed,) = start(crew.dsn, weighs, [(megabytes,)])
    (held,) = start(crew.dsn, careful, [(megabytes,)])
    rows.wait_ended(13, seconds=120)

    assert rows.outputs(others) == dict.fromkeys(others, ("succeeded", 20))
    limit = f"{Settings().payload_bytes_max:,}"
    ((state, error),) = rows.ask(
        "select state, error::text from runs join payloads on run_id = id where id = %s", failed
    )
    assert state == "failed"
    assert f"has {megabytes}," in error and limit in error
    ((state, reason),) = rows.ask("select state, reason from runs where id = %s", held)
    assert state == "held"
    assert limit in reason
    assert rows.ask("select key, state from intents where run_id = %s", held) == [("print_weight", "unknown")]
    ((largest,),) = rows.ask("select max(pg_column_size(j.*)) from journal j where run_id in (%s, %s)", failed, held)
    assert (largest or 0) < 10_000
    assert worker.ready() == [child]
    assert memory(child, "VmHWM") - before < 5 * megabytes * MEGABYTE
    eventually(lambda: memory(child, "VmRSS") - before < 30 * MEGABYTE, "it is small again")


@pytest.mark.parametrize("megabytes", [30, pytest.param(250, marks=SLOW)])
def test_b160_the_limit_may_be_raised(crew: Crew, rows: Rows, megabytes: int) -> None:
    """A value takes its time: it is no lost connection."""
    crew.hire("--payload-bytes-max", str(256 * 1024 * 1024)).wait_ready()
    (run,) = start(crew.dsn, weighs, [(megabytes,)])
    rows.wait_ended(1, seconds=240)

    assert rows.outputs([run]) == {run: ("succeeded", megabytes)}
    assert rows.ask("select octet_length(output::text) > %s from journal", megabytes * MEGABYTE) == [(True,)]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["run", "run_all", "wrote"])
async def test_b160_a_large_value_gets_the_time_that_it_takes(
    dsn: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However soon a statement without an answer is given up: what it carries has to be sent, parsed and written."""
    monkeypatch.setattr(database_module, "DEAD_AFTER_SECONDS", 0.2)
    slow = Statement("test-slow", "select length(%(text)s::text) from pg_sleep(1.0)")
    connection = await Database(dsn).connect()
    try:
        for text, heard in (("x" * 1_000_000, True), ("x", False)):
            with contextlib.nullcontext() if heard else pytest.raises(psycopg.OperationalError):
                match how:
                    case "run":
                        assert await connection.run(slow, {"text": text}) == [(len(text),)]
                    case "run_all":
                        assert await connection.run_all([(slow, {"text": text})]) == [[(len(text),)]]
                    case _:
                        assert await connection.wrote(slow, {"text": text})
    finally:
        await connection.close()


def memory(pid: int, what: str) -> int:
    """Resident bytes of a process: now (VmRSS), or at most so far (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024


# ------------------------------------------------------------------ B163, B164: long journals

MARKS: list[float] = []
"""The processor's time at each hundredth body."""

GATE: list[asyncio.Event] = []


async def tick(number: int, counters: dict[str, int] | None = None) -> int:
    """Tiny."""
    if number % 100 == 0:
        MARKS.append(time.process_time())
    return number


async def fetch(page: int) -> list[int]:
    """Fifty items."""
    return list(range(page * 50, page * 50 + 50))


async def last() -> None:
    """Waits, in the first worker that comes here."""
    MARKS.append(time.process_time())
    await GATE[-1].wait()


@workflow
async def sequence(steps: int) -> int:
    """One after another."""
    total = 0
    for number in range(steps):
        total += await step(tick, number)
    await step(last)
    return total


@workflow
async def pages(items: int) -> int:
    """A page, a step for each of its items, with the counts so far passed along."""
    counters = {"seen": 0, "even": 0}
    total = 0
    for page in range(items // 50):
        for item in await step(fetch, page):
            total += await step(tick, item, counters)
            counters["seen"] += 1
            counters["even"] += item % 2 == 0
    await step(last)
    return total


@workflow
async def fan(width: int) -> int:
    """Side by side."""
    total = sum(await asyncio.gather(*(step(tick, number) for number in range(width))))
    await step(last)
    return total


READ = "select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'journal'"


async def read_so_far(rows: Rows) -> int:
    """Rows of the journal that sessions, which have ended by now, have read."""
    sessions = "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'replaykit:%%'"
    await asyncio.to_thread(eventually, lambda: rows.ask(sessions) == [(0,)], "their sessions have ended")
    return int(rows.ask(READ)[0][0])


class Lived:
    """A run in two workers' hands: what it cost.

    Attributes:
        rates: the processor's seconds for each hundred steps.
        read: rows of the journal that were read until its last step.
        resumed: the processor's seconds for coming to that step again.
        reread: rows that were read for it.
        result: its result.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.read = self.reread = 0
        self.resumed = 0.0
        self.result: Any = None


async def live(dsn: str, rows: Rows, flow: Workflow[[int], int], number: int) -> Lived:
    """All of it but the last step, then by another worker once more."""
    lived = Lived()
    MARKS.clear()
    GATE.append(asyncio.Event())
    rows.ask("truncate runs, payloads, journal, workers")
    before = await read_so_far(rows)
    async with Client(dsn) as client:
        handle = await client.start(flow, number)
    first = Worker(dsn, workflows=[flow])
    await first.start()
    while len(MARKS) <= number // 100:
        await asyncio.sleep(0.01)
    await first.stop(grace_seconds=0)
    lived.rates = [b - a for a, b in itertools.pairwise(MARKS)]
    lived.read = await read_so_far(rows) - before

    marked, began = len(MARKS), time.process_time()
    GATE[-1].set()
    async with Worker(dsn, workflows=[flow]), Client(dsn) as client:
        lived.result = await client.handle(handle.id, flow).result(timeout=300)
    assert len(MARKS) == marked + 1, "no step ran again"
    lived.resumed = MARKS[-1] - began
    lived.reread = await read_so_far(rows) - before - lived.read
    return lived


@pytest.mark.anyio
@pytest.mark.parametrize("steps", [3_000, pytest.param(20_000, marks=SLOW)])
async def test_b163_steps_cost_the_same_from_first_to_last(dsn: str, rows: Rows, steps: int) -> None:
    """The journal is not read while it is written, and once when another worker goes on."""
    assert_flat(await live(dsn, rows, sequence, steps), steps)


@pytest.mark.anyio
@pytest.mark.parametrize("items", [3_000, pytest.param(5_000, marks=SLOW)])
async def test_b164_a_loop_over_pages_does_not_slow_down(dsn: str, rows: Rows, items: int) -> None:
    """With the counts so far passed along to each step."""
    assert_flat(await live(dsn, rows, pages, items), items)


def assert_flat(lived: Lived, steps: int) -> None:
    """From beginning to end."""
    assert lived.result == steps * (steps - 1) // 2
    assert min(lived.rates[-10:-1]) < 2 * min(lived.rates[1:10])
    assert lived.read < 3 * steps
    assert steps <= lived.reread < 3 * steps


@pytest.mark.anyio
@pytest.mark.parametrize("flow", [sequence, fan])
@pytest.mark.parametrize("steps", [1_000, pytest.param(5_000, marks=SLOW)])
async def test_b163_a_journal_four_times_as_long_is_resumed_in_four_times(
    dsn: str, rows: Rows, flow: Workflow[[int], int], steps: int
) -> None:
    """Not in sixteen; side by side as well."""
    short = [await live(dsn, rows, flow, steps) for _ in range(2)]
    long = [await live(dsn, rows, flow, 4 * steps) for _ in range(2)]

    assert min(lived.resumed for lived in long) < 8 * min(lived.resumed for lived in short)
    assert all(lived.read + lived.reread < 6 * 4 * steps for lived in long)


# ------------------------------------------------------------------ B166: many that wait

DEPTHS: list[int] = []


def depth() -> int:
    """Of the stack."""
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        frame, found = frame.f_back, found + 1
    return found


async def ask(rounds: int) -> bool:
    """Whether there is a slot: only after so many rounds."""
    DEPTHS.append(depth())
    return step.current().attempt >= rounds


def no(slot: bool) -> bool:
    """There is none."""
    return not slot


@workflow
async def asks_again(rounds: int) -> bool:
    """Is told to wait and ask again."""
    again = AsyncRetrying(retry=retry_if_result(no), wait=wait_random(0, 0.002), stop=stop_never)
    return await step.options(retry=again)(ask, rounds)


@pytest.mark.anyio
@pytest.mark.parametrize("rounds", [300, pytest.param(1_500, marks=SLOW)])
async def test_b166_asking_again_is_a_loop(dsn: str, rows: Rows, rounds: int) -> None:
    """The stack is as deep in the last round as in the first; the waits between are not all the same."""
    DEPTHS.clear()
    async with Client(dsn) as client, Worker(dsn, workflows=[asks_again]):
        handle = await client.start(asks_again, rounds)
        assert await handle.result(timeout=300) is True

    assert len(DEPTHS) == rounds
    assert max(DEPTHS) - min(DEPTHS) < 10
    assert rows.ask("select count(*), count(distinct next_at - ended_at) > 10 from attempts") == [(rounds - 1, True)]


RUNNING: list[int] = [0, 0]
"""How many bodies run, and how many did at most."""


async def alone(number: int) -> int:
    """Needs the slot."""
    RUNNING[0] += 1
    RUNNING[1] = max(RUNNING)
    await asyncio.sleep(0)
    RUNNING[0] -= 1
    DEPTHS.append(depth())
    return number


@workflow
async def one_slot(tasks: int) -> int:
    """All wait for the one slot of a lock that is the run's."""
    slot = asyncio.Semaphore(1)

    async def wait(number: int) -> int:
        async with slot:
            return await step(alone, number)

    return sum(await asyncio.gather(*(wait(number) for number in range(tasks))))


@workflow
async def one_of_many(number: int) -> int:
    """Waits for a worker that takes one at a time."""
    return await step(alone, number)


@pytest.mark.anyio
@pytest.mark.parametrize("tasks", [1_000, pytest.param(2_000, marks=SLOW)])
async def test_b166_tasks_that_wait_for_one_slot(dsn: str, rows: Rows, tasks: int) -> None:
    """They wait without asking, in turn."""
    DEPTHS.clear()
    RUNNING[:] = [0, 0]
    async with Client(dsn) as client, Worker(dsn, workflows=[one_slot]):
        handle = await client.start(one_slot, tasks)
        assert await handle.result(timeout=300) == tasks * (tasks - 1) // 2

    assert RUNNING == [0, 1]
    assert max(DEPTHS) - min(DEPTHS) < 10
    assert rows.ask("select count(*), count(distinct key) from journal") == [(tasks, tasks)]


@pytest.mark.anyio
@pytest.mark.parametrize("runs", [300, pytest.param(2_000, marks=SLOW)])
async def test_b166_runs_that_wait_for_a_worker_with_one_slot(dsn: str, rows: Rows, runs: int) -> None:
    """Each is taken once, when it is its turn; waiting costs it nothing."""
    RUNNING[:] = [0, 0]
    async with Client(dsn) as client:
        handles = await asyncio.gather(*(client.start(one_of_many, number) for number in range(runs)))
        async with Worker(dsn, workflows=[one_of_many], concurrency=1):
            results = await asyncio.gather(*(handle.result(timeout=300) for handle in handles))

    assert results == list(range(runs))
    assert RUNNING == [0, 1]
    assert rows.ask("select max(claims), max(recoveries) from runs") == [(1, 0)]

"""Scenarios of the kind duplicate-effect: one key is one run, one run has one owner, one attempt is alive at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from replaykit import Client, KeyConflict, Worker
from tests.crash.crew import Crew
from tests.crash.rows import Rows
from tests.direct import direct
from tests.runtime.facts import eventually
from tests.scenarios.doubled import another, impatient, long_one, once
from tests.scenarios.stage import lines, python

MODULE = "tests.scenarios.doubled"
START = """
import asyncio, sys
from replaykit import Client
from tests.scenarios.doubled import long_one

async def main():
    async with Client(sys.argv[1]) as client:
        handle = await client.options(key="14").start(long_one, sys.argv[2], sys.argv[3])
        print(handle.id, handle.created)

asyncio.run(main())
"""


@pytest.mark.anyio
async def test_b010_a_key_is_not_used_again_for_another_workflow(
    crew: Crew, rows: Rows, said: Path, tmp_path: Path
) -> None:
    """The second start is refused naming both; the run goes on after its worker was killed."""
    door = tmp_path / "door"
    worker = crew.hire("--lease-seconds", "1", MODULE)
    async with Client(crew.dsn) as client:
        named = client.options(key="X")
        handle = await named.start(long_one, str(said), str(door))
        await asyncio.to_thread(eventually, lambda: "waits" in lines(said), "it has begun")
        before = rows.ask("select workflow, key from runs")

        with pytest.raises(KeyConflict, match=r"(?s)long_one.*another|another.*long_one"):
            await named.start(another, str(said))

        assert rows.ask("select workflow, key from runs") == before
        await asyncio.to_thread(worker.kill_all)
        door.touch()
        crew.hire("--lease-seconds", "1", MODULE)
        assert await handle.result(timeout=60) == "done"
    assert Counter(lines(said)) == {"A": 1, "waits": 2, "B": 1}


@pytest.mark.anyio
async def test_b011_a_second_start_under_a_key_gets_the_first_run(
    dsn: str, rows: Rows, said: Path, tmp_path: Path
) -> None:
    """From one process and from two, at the same time: one run, and its steps act once."""
    door = tmp_path / "door"
    async with Client(dsn) as client, Worker(client, workflows=[long_one]):
        named = client.options(key="14")
        here = await asyncio.gather(*(named.start(long_one, str(said), str(door)) for _ in range(2)))
        there = await asyncio.gather(
            *(asyncio.to_thread(python, "-c", START, dsn, str(said), str(door)) for _ in range(2))
        )
        door.touch()
        assert await here[0].result(timeout=60) == "done"

    assert sorted(handle.created for handle in here) == [False, True]
    assert {one.out.split()[0] for one in there} == {str(here[0].id)}
    assert {one.out.split()[1] for one in there} == {"False"}
    assert rows.ask("select count(*) from runs") == [(1,)]
    assert Counter(lines(said)) == {"A": 1, "waits": 1, "B": 1}


@pytest.mark.anyio
async def test_b013_no_second_attempt_begins_beside_one_that_its_time_out_could_not_stop(
    dsn: str, rows: Rows, said: Path, tmp_path: Path
) -> None:
    """The journal says that the first one timed out; what it returns late is dropped."""
    door = tmp_path / "door"
    async with Client(dsn) as client, Worker(client, workflows=[impatient]):
        handle = await client.start(impatient, str(said), str(door))
        await asyncio.to_thread(
            eventually, lambda: rows.ask("select count(*) from attempts") == [(1,)], "its time is up"
        )
        assert lines(said) == ["begin 1"]
        door.touch()
        assert await handle.result(timeout=60) == 2

    assert lines(said) == ["begin 1", "end 1", "begin 2", "end 2"]
    assert rows.ask("select attempt, error ->> 'type' from attempts") == [(1, "builtins.TimeoutError")]
    assert rows.ask("select attempt, outcome, output::text from journal") == [(2, "ok", "2")]


@pytest.mark.anyio
@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
async def test_b014_each_run_is_taken_by_one_worker(
    dsn: str, rows: Rows, said: Path, workers: int, isolation: str
) -> None:
    """A thousand runs and workers that begin at the same time; also where the database refuses what does not serialize."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f"alter database \"{name}\" set default_transaction_isolation = '{isolation}'".encode())
    async with Client(dsn) as client:
        handles = await asyncio.gather(*(client.start(once, str(said), n) for n in range(1_000)))
        async with contextlib.AsyncExitStack() as stack:
            crew = [Worker(dsn, workflows=[once]) for _ in range(workers)]
            await asyncio.gather(*(stack.enter_async_context(worker) for worker in crew))
            results = await asyncio.gather(*(handle.result(timeout=120) for handle in handles))

    assert results == list(range(1_000))
    assert Counter(lines(said)) == {str(n): 1 for n in range(1_000)}
    assert rows.ask("select count(*), count(distinct run_id) from journal") == [(1_000, 1_000)]

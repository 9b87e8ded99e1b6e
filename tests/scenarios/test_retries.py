"""Scenarios of the kind retries: tries are counted in rows, and what is no failure of the code is no try of it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tenacity import AsyncRetrying, stop_after_attempt, wait_chain, wait_fixed

from replaykit import Client, ConfigurationError, Worker, step, workflow
from tests.crash.crew import Crew
from tests.crash.rows import Rows, start
from tests.runtime.facts import eventually
from tests.scenarios.retrying import crashes, interrupted, raises
from tests.scenarios.stage import play

MODULE = "tests.scenarios.retrying"
DECIDED = "select count(*) from attempts"
STANDS = "select state, waiting_for from runs"


def tries(said: Path) -> list[int]:
    """Which tries have begun."""
    return [int(line) for line in said.read_text().split()]


def has_begun(said: Path, times: int) -> bool:
    """Whether so many bodies have begun."""
    return len(tries(said)) == times


def rows_are(rows: Rows, query: str, row: tuple[Any, ...]) -> bool:
    """Whether the query has this row alone."""
    return rows.ask(query) == [row]


def test_b125_tries_are_counted_over_restarts(crew: Crew, rows: Rows, said: Path) -> None:
    """A worker is killed after each failure: the fifth try is the last, and the wait before each was kept."""
    (run,) = start(crew.dsn, raises, [(str(said),)])
    flags = (MODULE, "--lease-seconds", "1", "--evict-after-seconds", "0.05")

    for n in (1, 2, 3, 4):
        worker = crew.hire(*flags)
        eventually(partial(rows_are, rows, DECIDED, (n,)), f"attempt {n} has failed")
        eventually(partial(rows_are, rows, STANDS, ("waiting", "retry")), "it waits for its next try")
        worker.kill_all()
    crew.hire(*flags)
    rows.wait_ended(1)

    assert tries(said) == [1, 2, 3, 4, 5]
    (entry,) = rows.entries(run)
    assert (entry.attempt, entry.outcome) == (5, "error")
    assert rows.ask("select state from runs") == [("failed",)]
    early = (
        "select count(*) from attempts a join attempts b on b.attempt = a.attempt + 1 where b.started_at < a.next_at"
    )
    assert rows.ask(early) == [(0,)]


def test_b125_tries_that_end_the_process_are_bounded(crew: Crew, rows: Rows, said: Path) -> None:
    """No try has an outcome, so none is used up; what is counted is how often the run ended a process: it is held."""
    start(crew.dsn, crashes, [(str(said),)])
    crew.hire(MODULE, "--recoveries-max", "1")

    rows.wait_ended(1)

    ((state, reason),) = rows.ask("select state, reason from runs")
    assert state == "held", reason
    assert set(tries(said)) == {1}
    assert len(tries(said)) <= 5
    assert rows.ask("select count(*) from attempts") == [(0,)]


def test_b124_lost_leases_are_no_tries(crew: Crew, rows: Rows, said: Path) -> None:
    """Three workers die in the middle of the only try that is allowed; the fourth finishes it."""
    (run,) = start(crew.dsn, interrupted, [(str(said),)])

    for n in (1, 2, 3):
        worker = crew.hire(MODULE, "--lease-seconds", "1")
        eventually(partial(has_begun, said, n), f"the body runs for the time number {n}")
        worker.kill_all()
    said.with_name(f"{said.name}.open").touch()
    crew.hire(MODULE, "--lease-seconds", "1")
    rows.wait_ended(1)

    assert rows.outputs([run]) == {run: ("succeeded", "done")}
    assert rows.entries(run)[0].attempt == 1


@pytest.mark.anyio
async def test_b131_deploys_are_no_tries(dsn: str, rows: Rows, said: Path) -> None:
    """Four workers are stopped in the middle of the only try that is allowed; the fifth finishes it."""
    async with Client(dsn) as client:
        handle = await client.start(interrupted, str(said))
        for n in (1, 2, 3, 4):
            worker = Worker(client, workflows=[interrupted])
            await worker.start()
            await asyncio.to_thread(eventually, partial(has_begun, said, n), f"the body runs: {n}")
            await worker.stop(grace_seconds=0)
        said.with_name(f"{said.name}.open").touch()
        async with Worker(client, workflows=[interrupted]):
            assert await handle.result(timeout=30) == "done"

    assert set(tries(said)) == {1}
    assert rows.ask("select count(*) from attempts") == [(0,)]


CALLS: list[int] = []


async def refuse() -> None:
    """Always."""
    CALLS.append(step.current().attempt)
    raise ConnectionError("refused")


@workflow
async def thrice() -> None:
    """Whose wait after the third failure would be an hour."""
    waits = wait_chain(wait_fixed(0.01), wait_fixed(0.02), wait_fixed(3_600))
    await step.options(retry=AsyncRetrying(stop=stop_after_attempt(3), wait=waits))(refuse)


@pytest.mark.anyio
async def test_b128_nothing_is_waited_for_after_the_last_try(dsn: str, rows: Rows) -> None:
    """Two waits for three tries."""
    CALLS.clear()

    played = await play(dsn, thrice)

    assert type(played.first) is ConnectionError
    assert CALLS == [1, 2, 3]
    waits = rows.ask("select extract(epoch from next_at - ended_at)::float8 from attempts order by attempt")
    assert waits == [(0.01,), (0.02,)]


@step.policy(retry=AsyncRetrying(stop=stop_after_attempt(100)))
async def refuse_with_99_retries() -> None:
    """Always."""
    CALLS.append(step.current().attempt)
    raise ConnectionError("refused")


@workflow
async def overridden() -> None:
    """None at the call: no retry, whatever was declared."""
    await step.options(retry=None)(refuse_with_99_retries)


@workflow
async def as_declared() -> None:
    """Nothing at the call: what was declared counts."""
    await step.options(name="declared")(refuse_with_99_retries)


@pytest.mark.anyio
async def test_b130_none_at_the_call_is_one_try(dsn: str) -> None:
    """And leaving it out is what the function declares."""
    CALLS.clear()
    await play(dsn, overridden)
    assert CALLS == [1]

    CALLS.clear()
    await play(dsn, as_declared)
    assert list(range(1, 101)) == CALLS


@pytest.mark.parametrize("number", [0, False, 99])
def test_b130_a_number_is_refused_at_the_call(number: Any) -> None:
    """Never ignored: a number may mean tries or retries."""
    with pytest.raises(ConfigurationError, match="retry="):
        step.options(retry=number)

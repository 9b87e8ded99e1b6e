"""`timeout=` of a step: async bodies are cancelled, what a late thread leaves is dropped, and no two tries overlap."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed
from tenacity.asyncio import retry_if_exception as retry_if_async

from replaykit import Worker, now, step, workflow
from tests.crash.rows import Rows
from tests.runtime.working import fact, outcome, working

pytestmark = pytest.mark.anyio


@dataclass
class Outside:
    """What the bodies of one run did."""

    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)


RUNS: defaultdict[str, Outside] = defaultdict(Outside)


def outside() -> Outside:
    """Of the run whose body asks."""
    return RUNS[str(step.current().run_id)]


async def hang(slow_tries: int) -> str:
    """Does not end in so many tries."""
    here, attempt = outside(), step.current().attempt
    here.begun.append(attempt)
    try:
        if attempt <= slow_tries:
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        here.cancelled.append(attempt)
        raise
    return f"attempt {attempt}"


def hang_sync(slow_tries: int) -> str:
    """The same in a thread, which nothing but its gate can end."""
    here, attempt = outside(), step.current().attempt
    here.begun.append(attempt)
    if attempt <= slow_tries:
        here.gate.wait(60)
    here.ended.append(attempt)
    return f"attempt {attempt}"


def body_of(sync: bool) -> Callable[[int], Any]:
    """Either of the two."""
    return hang_sync if sync else hang


TIMEOUTS: dict[str, float | dt.timedelta] = {"seconds": 0.05, "timedelta": dt.timedelta(milliseconds=50)}


@workflow
async def limited(kind: str, sync: bool) -> str:
    """A step that takes too long."""
    return await step.options(timeout=TIMEOUTS[kind])(body_of(sync), 1)


@pytest.mark.parametrize("kind", TIMEOUTS)
async def test_an_async_body_is_cancelled_when_its_time_is_up(dsn: str, rows: Rows, kind: str) -> None:
    """The step raises the builtin TimeoutError, and the journal says that it was a time-out."""
    async with working(dsn, limited) as (client, _):
        handle = await client.start(limited, kind, False)
        error = await outcome(handle)

    assert type(error) is TimeoutError
    assert str(error) == "step hang: attempt 1 did not end within 0.05 s"
    assert RUNS[str(handle.id)].cancelled == [1]
    assert rows.entries(handle.id)[0].outcome == "timeout"


async def test_the_late_result_of_a_thread_is_dropped(dsn: str, rows: Rows) -> None:
    """The run goes on while the thread lives; the worker knows that it does, and what it leaves changes nothing."""
    async with working(dsn, limited) as (client, worker):
        handle = await client.start(limited, "seconds", True)
        error = await outcome(handle)
        here = RUNS[str(handle.id)]
        assert here.ended == []
        assert worker.bodies == 1
        here.gate.set()
        await fact(lambda: worker.bodies == 0, "the worker has seen the thread end")

    assert type(error) is TimeoutError
    assert here.ended == [1]
    (entry,) = rows.entries(handle.id)
    assert (entry.outcome, entry.output) == ("timeout", None)


async def refuse() -> None:
    """Raises TimeoutError, which is an error like any other."""
    raise TimeoutError("the bank did not answer")


def refuse_sync() -> None:
    """The same in a thread."""
    raise TimeoutError("the bank did not answer")


async def convert() -> str:
    """Makes something else of its cancellation."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "what there was by then"
    return "never"


@workflow
async def refused(sync: bool) -> None:
    """Has time enough."""
    await step.options(timeout=60)(refuse_sync if sync else refuse)


@workflow
async def converted() -> str:
    """Whose body ends well when its time is up."""
    return await step.options(timeout=0.05)(convert)


@pytest.mark.parametrize("sync", [False, True])
async def test_a_timeout_error_of_the_bodys_own_is_an_error(dsn: str, rows: Rows, sync: bool) -> None:
    """Its words stay, and the journal does not say that the step's time was up."""
    async with working(dsn, refused) as (client, _):
        handle = await client.start(refused, sync)
        error = await outcome(handle)

    assert (type(error), str(error)) == (TimeoutError, "the bank did not answer")
    assert rows.entries(handle.id)[0].outcome == "error"


async def test_what_a_body_makes_of_its_cancellation_counts(dsn: str) -> None:
    """As under asyncio.timeout."""
    async with working(dsn, converted) as (client, _):
        assert await outcome(await client.start(converted)) == "what there was by then"


RETRY = AsyncRetrying(retry=retry_if_exception_type(TimeoutError), stop=stop_after_attempt(3), wait=wait_fixed(0.01))


@workflow
async def stubborn(slow_tries: int, sync: bool) -> str:
    """Tries again when the time is up."""
    return await step.options(timeout=0.1, retry=RETRY)(body_of(sync), slow_tries)


async def test_a_time_out_is_retried_as_a_timeout_error(dsn: str, rows: Rows) -> None:
    """Each try has the whole time."""
    async with working(dsn, stubborn) as (client, _):
        handle = await client.start(stubborn, 2, False)
        assert await outcome(handle) == "attempt 3"

    here = RUNS[str(handle.id)]
    assert (here.begun, here.cancelled) == ([1, 2, 3], [1, 2])
    assert rows.ask("select attempt, error->>'type' from attempts order by 1") == [
        (1, "builtins.TimeoutError"),
        (2, "builtins.TimeoutError"),
    ]
    assert rows.entries(handle.id)[0].attempt == 3


async def test_no_new_try_begins_while_the_thread_of_the_last_one_lives(dsn: str, rows: Rows) -> None:
    """The decision is recorded at once; the next try waits for the thread's end, and the run for it in memory."""
    settings = {"evict_after_seconds": 0, "heartbeat_seconds": 0.1}  # a body is shown when it is a heartbeat old
    async with working(dsn, stubborn, **settings) as (client, worker):
        handle = await client.start(stubborn, 1, True)
        here = RUNS[str(handle.id)]
        passed = "select count(*) = 1 from attempts where next_at < clock_timestamp() - interval '0.2 s'"
        await fact(lambda: rows.ask(passed) == [(True,)], "the next try has been due for a while")
        assert here.begun == [1]
        assert rows.ask("select state from runs") == [("running",)]
        (lingers,) = worker._snapshot()[0]
        assert (lingers["key"], lingers["attempt"]) == ("hang_sync", 1)
        here.gate.set()
        assert await outcome(handle) == "attempt 2"

    assert (here.begun, here.ended) == ([1, 2], [1, 2])
    assert rows.entries(handle.id)[0].attempt == 2


WORKERS: list[Worker] = []
"""The one whose threads the predicate below waits for."""


async def once_it_has_ended(error: BaseException) -> bool:
    """A slow predicate: it answers when the thread that was too late has ended."""
    outside().gate.set()
    while WORKERS[0]._shop.threads_alive:
        await asyncio.sleep(0.001)
    return isinstance(error, TimeoutError)


@workflow
async def pondered() -> str:
    """Whose decision takes longer than its body."""
    retry = AsyncRetrying(retry=retry_if_async(once_it_has_ended))
    return await step.options(timeout=0.05, retry=retry)(hang_sync, 1)


async def test_a_thread_that_ends_while_its_time_out_is_judged_changes_nothing(dsn: str, rows: Rows) -> None:
    """Its result came too late, and the next try has nothing to wait for."""
    async with working(dsn, pondered) as (client, worker):
        WORKERS[:] = [worker]
        handle = await client.start(pondered)
        assert await outcome(handle) == "attempt 2"

    assert RUNS[str(handle.id)].ended == [1, 2]
    assert rows.ask("select attempt, error->>'type' from attempts") == [(1, "builtins.TimeoutError")]


async def test_the_last_try_of_a_thread_ends_the_step_while_it_lives(dsn: str, rows: Rows) -> None:
    """Nothing waits for it."""

    async with working(dsn, final) as (client, worker):
        handle = await client.start(final)
        error = await outcome(handle)
        assert worker.bodies == 1
        RUNS[str(handle.id)].gate.set()
        await fact(lambda: worker.bodies == 0, "the worker has seen the thread end")

    assert type(error) is TimeoutError
    assert rows.entries(handle.id)[0].outcome == "timeout"


@workflow
async def final() -> str:
    """One try."""
    return await step.options(timeout=0.05, retry=AsyncRetrying(stop=stop_after_attempt(1)))(hang_sync, 1)


def block() -> str:
    """Keeps the only thread."""
    here = outside()
    here.begun.append(0)
    here.gate.wait(60)
    return "blocked"


def open_gate() -> str:
    """Runs when its turn comes."""
    return "in time"


async def release() -> None:
    """Lets the thread go."""
    outside().gate.set()


@workflow
async def queued() -> list[str]:
    """Two steps for one thread, one of them with a time that is shorter than its wait for it."""

    async def later() -> str:
        await asyncio.sleep(0.4)
        await step(release)
        return "released"

    return list(await asyncio.gather(step(block), step.options(timeout=0.1)(open_gate), later()))


async def test_the_wait_for_a_thread_is_no_part_of_the_time(dsn: str) -> None:
    """A sync body's time runs from when its thread really begins."""
    async with working(dsn, queued, threads=1) as (client, _):
        assert await outcome(await client.start(queued)) == ["blocked", "in time", "released"]


@workflow
async def overdue(sync: bool) -> str:
    """A moment that has passed."""
    moment = now() - dt.timedelta(seconds=1)
    return await step.options(timeout=moment, retry=AsyncRetrying())(body_of(sync), 0)


@workflow
async def until(sync: bool) -> str:
    """A moment that comes while the first try runs, with retries without end."""
    moment = now() + dt.timedelta(seconds=0.3)
    return await step.options(timeout=moment, retry=AsyncRetrying())(body_of(sync), 99)


@workflow
async def no_use() -> str:
    """The next try would begin after the moment."""
    moment = now() + dt.timedelta(seconds=60)
    return await step.options(timeout=moment, retry=AsyncRetrying(wait=wait_fixed(3_600)))(fail)


async def fail() -> str:
    """At once."""
    outside().begun.append(step.current().attempt)
    raise ValueError("no")


@pytest.mark.parametrize("sync", [False, True])
async def test_no_try_begins_after_the_moment_that_is_the_deadline_of_all(dsn: str, rows: Rows, sync: bool) -> None:
    """It times out without a body, for good, whatever `retry=` says."""
    async with working(dsn, overdue) as (client, _):
        handle = await client.start(overdue, sync)
        error = await outcome(handle)

    assert type(error) is TimeoutError
    assert "attempt 1 did not end by " in str(error)
    assert RUNS[str(handle.id)].begun == []
    assert rows.entries(handle.id)[0].outcome == "timeout"


@pytest.mark.parametrize("sync", [False, True])
async def test_a_moment_ends_the_try_that_runs_for_good(dsn: str, rows: Rows, sync: bool) -> None:
    """Another could only time out."""
    async with working(dsn, until) as (client, _):
        handle = await client.start(until, sync)
        error = await outcome(handle)
        RUNS[str(handle.id)].gate.set()

    assert type(error) is TimeoutError
    assert RUNS[str(handle.id)].begun == [1]
    assert rows.ask("select count(*) from attempts") == [(0,)]


async def test_a_wait_beyond_the_moment_is_not_begun(dsn: str, rows: Rows) -> None:
    """The error of the last try says more than a time-out in an hour."""
    async with working(dsn, no_use) as (client, _):
        handle = await client.start(no_use)
        error = await outcome(handle)

    assert (type(error), str(error)) == (ValueError, "no")
    assert rows.ask("select count(*) from attempts") == [(0,)]


def plain(slow_tries: int) -> Coroutine[Any, Any, str]:
    """A plain function around an async one, as decorators leave it."""
    return hang(slow_tries)


@workflow
async def decorated() -> str:
    """Its rest has what is left of the time."""
    return await step.options(timeout=0.1, retry=RETRY)(plain, 1)


async def test_the_time_goes_on_for_the_coroutine_that_a_plain_function_returned(dsn: str) -> None:
    """And its next try has the whole of it."""
    async with working(dsn, decorated) as (client, _):
        handle = await client.start(decorated)
        assert await outcome(handle) == "attempt 2"

    assert RUNS[str(handle.id)].cancelled == [1]


async def test_a_drain_ends_though_a_thread_lingers(dsn: str, rows: Rows) -> None:
    """Here nothing can end it; its run is handed back when the worker is gone, with the attempt that was decided."""
    async with working(dsn, stubborn, grace_seconds=0.2) as (client, _):
        handle = await client.start(stubborn, 1, True)
        decided = "select count(*) = 1 from attempts"
        await fact(lambda: rows.ask(decided) == [(True,)], "the time-out is an attempt")
        assert RUNS[str(handle.id)].begun == [1]

    assert rows.ask("select state from runs") == [("pending",)]
    RUNS[str(handle.id)].gate.set()

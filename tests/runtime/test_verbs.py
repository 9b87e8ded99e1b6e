"""`Handle.cancel` and `Handle.retry`: what they return and raise, and what one who waits for the result sees."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from replaykit import (
    Client,
    ConfigurationError,
    NotRetryable,
    RunCancelled,
    RunFailed,
    RunNotFound,
    Worker,
    sleep,
    step,
    workflow,
)
from replaykit.replay.entries import State
from tests.direct import direct, hang_up
from tests.postgres.store import PATIENCE_SECONDS
from tests.runtime.shop import checkout, nap

pytestmark = pytest.mark.anyio

Sql = psycopg.Connection[tuple[Any, ...]]


class World:
    """What the bodies of a test meet."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.broken = False
        self.calls: list[str] = []


world: World


async def pass_gate() -> None:
    """Ends when the test opens the gate."""
    world.entered.set()
    await world.gate.wait()


async def buy(what: str) -> str:
    """Fails while the world is broken."""
    world.calls.append(what)
    if world.broken and what == "bread":
        raise ValueError("sold out")
    return what


@workflow
async def gated() -> None:
    """A body, and a long sleep."""
    await step(pass_gate)
    await sleep(3_600)


@workflow
async def shopping() -> list[str]:
    """Two steps."""
    return [await step(buy, "milk"), await step(buy, "bread")]


@pytest.fixture(autouse=True)
def new_world() -> None:
    """Made on no loop: an Event belongs to the one that waits."""
    global world
    world = World()


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """Another connection: what it sees is committed."""
    with psycopg.connect(direct(dsn), autocommit=True, options="-c search_path=replaykit") as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[Worker]:
    async with Worker(client, workflows=[gated, shopping, checkout, nap]) as worker:
        yield worker


async def test_cancel_returns_the_state_after_it(client: Client) -> None:
    """By id and by key; asked again it says the same."""
    by_id = await client.start(nap, 1)
    await client.options(key="order-42").start(nap, 1)

    assert await by_id.cancel() is State.CANCELLED
    assert await by_id.cancel(by="ada") is State.CANCELLED
    assert await client.handle("order-42").cancel() is State.CANCELLED
    with pytest.raises(RunCancelled, match=f"run {by_id.id} of nap was cancelled"):
        await by_id.result()


async def test_one_who_waits_hears_of_a_cancel_at_once(client: Client, dsn: str) -> None:
    """Also of a run that no worker had begun."""
    handle = await client.start(nap, 1)
    waiting = asyncio.create_task(handle.result(timeout=PATIENCE_SECONDS))
    async with Client(dsn) as other:
        await other.handle(handle.id).cancel()

    with pytest.raises(RunCancelled):
        await waiting


async def test_a_running_run_ends_cancelled(client: Client, worker: Worker) -> None:
    """Its body is stopped."""
    handle = await client.start(gated)
    await world.entered.wait()

    assert await handle.cancel() is State.RUNNING
    with pytest.raises(RunCancelled):
        await handle.result(timeout=PATIENCE_SECONDS)


async def test_retry_of_a_failed_run_gives_it_a_new_end(client: Client, worker: Worker) -> None:
    """What had succeeded is not run again."""
    world.broken = True
    handle = await client.start(shopping)
    with pytest.raises(RunFailed, match="sold out"):
        await handle.result(timeout=PATIENCE_SECONDS)
    world.broken = False

    assert await handle.retry(by="ada") is State.PENDING
    assert await handle.result(timeout=PATIENCE_SECONDS) == ["milk", "bread"]
    assert world.calls == ["milk", "bread", "bread"]
    with pytest.raises(NotRetryable, match=f"run {handle.id} is succeeded, and only failed and held runs are retried"):
        await handle.retry()


async def test_a_run_that_is_retried_has_not_failed(client: Client) -> None:
    """Whoever asks for its result waits for the new end."""
    async with Worker(client, workflows=[shopping]):
        world.broken = True
        handle = await client.start(shopping)
        with pytest.raises(RunFailed):
            await handle.result(timeout=PATIENCE_SECONDS)

    await handle.retry()

    with pytest.raises(TimeoutError):
        await handle.result(timeout=0)
    assert (await handle.info()).finished_at is None


async def test_a_run_that_is_not_there_is_not_found(client: Client) -> None:
    """By id and by key."""
    for run in (uuid.uuid4(), "nobody"):
        with pytest.raises(RunNotFound, match=str(run)):
            await client.handle(run).cancel()
        with pytest.raises(RunNotFound, match=str(run)):
            await client.handle(run).retry()


@pytest.mark.parametrize("by", ["a\0b", "\ud800", 7])
async def test_who_asks_is_text(client: Client, by: Any) -> None:
    """Refused before anything is sent."""
    handle = await client.start(nap, 1)

    for ask in (handle.cancel, handle.retry):
        with pytest.raises(ConfigurationError, match="by="):
            await ask(by=by)
    with pytest.raises(ConfigurationError, match="accept='outputs': it is 'inputs', or left out"):
        await handle.retry(accept="outputs")  # type: ignore[arg-type]
    assert (await handle.info()).state == "pending"


async def test_a_request_survives_a_lost_connection(dsn: str, client: Client, sql: Sql) -> None:
    """It is sent again."""
    handle = await client.start(nap, 1)
    hang_up(dsn)

    assert await handle.cancel() is State.CANCELLED


async def test_a_locked_run_keeps_only_its_own_request_waiting(client: Client, dsn: str) -> None:
    """The client's other questions go on; the request is made when the lock is gone."""
    handle, other = await client.start(nap, 1), await client.start(nap, 1)
    with psycopg.connect(dsn) as somebody:
        somebody.execute("select from replaykit.runs where id = %s for update", [handle.id])
        asking = asyncio.create_task(handle.cancel())
        for _ in range(20):
            assert (await other.info()).state == "pending"
        assert await other.cancel() is State.CANCELLED
        assert not asking.done()

    assert await asking is State.CANCELLED


async def test_a_cancel_in_an_open_transaction_delays_only_its_own_run(
    client: Client, worker: Worker, dsn: str, sql: Sql
) -> None:
    """What the run has done meanwhile is written when the transaction ends, and then it is told."""
    handle = await client.start(gated)
    await world.entered.wait()
    with psycopg.connect(dsn) as somebody:
        assert somebody.execute("select replaykit.cancel(%s)", [handle.id]).fetchone() == ("running",)
        world.gate.set()

        neighbours = [await client.start(checkout, "visa") for _ in range(20)]
        for neighbour in neighbours:
            await neighbour.result(timeout=PATIENCE_SECONDS)

        assert sql.execute("select count(*) from journal where run_id = %s", [handle.id]).fetchone() == (0,)
        assert (await handle.info()).state == "running"

    with pytest.raises(RunCancelled):
        await handle.result(timeout=PATIENCE_SECONDS)
    kinds = sql.execute("select kind from journal where run_id = %s order by seq", [handle.id]).fetchall()
    assert kinds == [("step",), ("cancel",)]

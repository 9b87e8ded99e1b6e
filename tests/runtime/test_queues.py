"""Which run a worker takes first: by the order of its queues, by priority, by age; rows may be moved by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from replaykit import Client, Handle, Worker, step, workflow
from tests.direct import direct

pytestmark = pytest.mark.anyio

Sql = psycopg.Connection[tuple[Any, ...]]

ORDER: list[str] = []
"""The names of the runs, as their bodies began. This process executes all of them."""


async def note(name: str) -> None:
    ORDER.append(name)


@workflow
async def noted(name: str) -> None:
    """Leaves its name in ORDER."""
    await step(note, name)


@pytest.fixture(autouse=True)
def _fresh_order() -> None:
    ORDER.clear()


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


async def executed(client: Client, handles: list[Handle[None]], *queues: str) -> list[str]:
    """The order in which a worker with place for one run executed them."""
    async with Worker(client, workflows=[noted], queues=queues, concurrency=1):
        for handle in handles:
            await handle.result(timeout=30)
    return ORDER


async def test_smaller_priorities_run_first_and_equal_ones_by_age(client: Client) -> None:
    """Negative ones before all."""

    wanted = [("late", 9), ("a", 0), ("first", -7), ("b", 0), ("second", -1)]
    handles = [await client.options(priority=priority).start(noted, name) for name, priority in wanted]

    assert await executed(client, handles, "default") == ["first", "second", "a", "b", "late"]


@pytest.mark.parametrize(
    ("queues", "order"),
    [(("urgent", "bulk"), ["u1", "u2", "b1", "b2"]), (("bulk", "urgent"), ["b1", "b2", "u1", "u2"])],
)
async def test_queues_are_claimed_from_in_the_order_that_the_worker_names(
    client: Client, queues: tuple[str, ...], order: list[str]
) -> None:
    """Priority counts within a queue only."""

    bulk, urgent = client.options(queue="bulk", priority=-100), client.options(queue="urgent", priority=100)
    handles = [
        await bulk.start(noted, "b1"),
        await urgent.start(noted, "u1"),
        await bulk.start(noted, "b2"),
        await urgent.start(noted, "u2"),
    ]

    assert await executed(client, handles, *queues) == order


async def test_a_worker_leaves_queues_alone_that_it_does_not_name(client: Client) -> None:
    """Their runs wait for another worker."""

    other = await client.options(queue="other").start(noted, "other")
    mine = await client.start(noted, "mine")

    assert await executed(client, [mine], "default") == ["mine"]
    assert (await other.info()).state == "pending"


async def test_a_pending_run_may_be_moved_by_hand(client: Client, sql: Sql) -> None:
    """Queue and priority are columns that an operator updates; the worker goes by what stands there."""

    names = ["a", "b", "c"]
    handles = [await client.start(noted, name) for name in names]
    elsewhere = await client.options(queue="other").start(noted, "moved here")
    sql.execute("update replaykit.runs set priority = -1 where id = %s", (handles[2].id,))
    sql.execute("update replaykit.runs set queue = 'default', priority = -2 where id = %s", (elsewhere.id,))
    sql.execute("update replaykit.runs set queue = 'other' where id = %s", (handles[0].id,))

    assert await executed(client, [handles[1], handles[2], elsewhere], "default") == ["moved here", "c", "b"]
    assert (await handles[0].info()).state == "pending"

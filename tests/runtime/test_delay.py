"""`options(delay=)`: seconds, a timedelta or an aware moment, by the database's clock."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from replaykit import Client, ConfigurationError, Worker
from tests.direct import direct
from tests.runtime.shop import Receipt, checkout

pytestmark = pytest.mark.anyio

Sql = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


@pytest.mark.parametrize("delay", [3600, 3600.0, dt.timedelta(hours=1)])
async def test_a_delayed_run_waits_for_its_start(client: Client, sql: Sql, delay: Any) -> None:
    """From the start's moment on by the database's clock; the handle says what it waits for."""

    handle = await client.options(delay=delay).start(checkout, "visa")

    info = await handle.info()
    assert (info.state, info.waiting_for, info.started_at) == ("waiting", "start", None)
    row = sql.execute(
        "select available_at - created_at between interval '3599 s' and interval '3600 s' from replaykit.runs"
    )
    assert row.fetchone() == (True,)


async def test_a_delay_to_a_moment_is_kept_to_the_microsecond(client: Client) -> None:
    """Whatever its time zone."""

    moment = dt.datetime(2100, 2, 3, 4, 5, 6, 789_012, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))

    handle = await client.options(delay=moment).start(checkout, "visa")

    info = await handle.info()
    assert (info.state, info.available_at) == ("waiting", moment)


@pytest.mark.parametrize("delay", [0, -5, dt.timedelta(seconds=-1), dt.datetime(1960, 1, 1, tzinfo=dt.UTC)])
async def test_what_is_due_already_is_pending_at_once(client: Client, delay: Any) -> None:
    """No delay, or a moment that has passed."""

    handle = await client.options(delay=delay).start(checkout, "visa")

    info = await handle.info()
    assert (info.state, info.waiting_for) == ("pending", None)


async def test_a_delayed_run_begins_when_its_time_has_come(client: Client, sql: Sql) -> None:
    """Not before; a worker that is there takes it by itself."""

    async with Worker(client, workflows=[checkout]):
        handle = await client.options(delay=0.3).start(checkout, "visa", 7)
        assert await handle.result(timeout=30) == Receipt("visa", 7)

    assert sql.execute("select started_at >= available_at from replaykit.runs").fetchone() == (True,)


async def test_a_delay_counts_from_the_start_in_a_long_transaction_too(client: Client, dsn: str, sql: Sql) -> None:
    """Not from the transaction's beginning."""

    with psycopg.connect(dsn) as mine:
        mine.execute("select pg_sleep(0.05)")
        await client.options(conn=mine, delay=60).start(checkout, "visa")
        row = mine.execute(
            "select available_at >= now() + interval '60.05 s', available_at < clock_timestamp() + interval '60 s'"
            " from replaykit.runs"
        )
        assert row.fetchone() == (True, True)


@pytest.mark.parametrize(
    ("delay", "sentence"),
    [
        (dt.datetime(2030, 1, 1), r"delay=.*needs a time zone"),
        ("soon", "delay='soon': not a number of seconds"),
        (math.nan, "not a number of seconds"),
        (math.inf, "more than a hundred years"),
        (dt.timedelta.max, "more than a hundred years"),
    ],
)
async def test_a_delay_that_is_none_is_refused_at_once(dsn: str, delay: Any, sentence: str) -> None:
    """Before anything is sent."""

    with pytest.raises(ConfigurationError, match=sentence):
        Client(dsn).options(delay=delay)

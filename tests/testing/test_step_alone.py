"""`testing.step()`: one body by itself."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from replaykit import ConfigurationError, Landed, NotLanded, OutsideRun, StepInfo, step, testing, workflow
from replaykit.replay.keys import key_uuid
from tests.testing import flows


async def pay(cents: int) -> str:
    """Uses all that a body may know."""
    info = step.current()
    await asyncio.sleep(0)
    return f"{info.resources['bank']} {info.idempotency_key} {info.attempt} {cents}"


def look() -> str:
    """A sync body."""
    return step.current().idempotency_key


def test_a_body_runs_alone() -> None:
    """`step.current()` answers in the block, with what the block was given."""

    async def run() -> str:
        with testing.step(resources={"bank": "test"}, idempotency_key="k-1"):
            return await pay(5)

    assert asyncio.run(run()) == "test k-1 1 5"


def test_a_sync_body_runs_alone_and_in_a_thread() -> None:
    """Here, and where `asyncio.to_thread` takes it."""

    async def run() -> list[str]:
        with testing.step(idempotency_key="k-2"):
            return [look(), await asyncio.to_thread(look)]

    assert asyncio.run(run()) == ["k-2", "k-2"]


def test_each_block_has_its_own_idempotency_key() -> None:
    """Of 32 hex digits, like a real one."""

    with testing.step() as first, testing.step() as second:
        assert step.current() is second

    assert first.idempotency_key != second.idempotency_key
    assert len(bytes.fromhex(first.idempotency_key)) == 16


def test_outside_of_the_block_nothing_has_changed() -> None:
    """Before and after it `step.current()` raises, also when the body failed."""

    with pytest.raises(ZeroDivisionError), testing.step():
        raise ZeroDivisionError

    with pytest.raises(OutsideRun, match="outside of a step's body"):
        step.current()


def test_a_step_in_a_body_is_a_plain_call() -> None:
    """As in a real body."""

    async def outer() -> tuple[str, int]:
        return await step(flows.reserve, "order")

    async def run() -> tuple[str, int]:
        with testing.step():
            return await outer()

    assert asyncio.run(run()) == ("order", 5)


def test_a_body_that_starts_runs_gets_a_client() -> None:
    """`client=` is `step.current().client`; its time is the test's to move."""

    async def run() -> str:
        client = testing.Client()
        await client.sleep(1)
        with testing.step(client=client):
            body = asyncio.create_task(flows.start_and_wait(2))
            await client.sleep(dt.timedelta(days=2))
            return await body

    assert asyncio.run(run()) == "2 days later"


async def order_ticket(title: str) -> str:
    """Waits for the commit of what it observed."""
    await step.current().observe("ticket", "123")
    return title


def order_ticket_in_a_thread(title: str) -> str:
    """Waits, too."""
    step.current().observe("ticket", "124").result(timeout=5)
    step.current().observe("mail", "5")
    return title


def test_what_a_body_observes_stands_in_its_info() -> None:
    """After what earlier attempts had observed."""

    with testing.step(attempt=2, observed=[("ticket", "122")]) as info:
        asyncio.run(order_ticket("a"))
        order_ticket_in_a_thread("b")

    assert info.observed == (("ticket", "122"), ("ticket", "123"), ("ticket", "124"), ("mail", "5"))


async def find_ticket(info: StepInfo) -> Landed[str] | NotLanded:
    """A reconciler: reads what the step was asked, and when it may have begun."""
    assert info.written_at is not None
    if info.observed:
        return Landed(f"{info.input['title']} {info.observed[-1][1]}")
    return NotLanded(f"nothing since {info.written_at:%H:%M}")


def test_a_reconciler_runs_alone() -> None:
    """With the input, the observations and the moment of a call in doubt."""
    at = dt.datetime(2030, 1, 1, 12, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))

    async def run(*observed: tuple[str, str]) -> Any:
        with testing.step(input={"title": "a"}, written_at=at, observed=observed) as info:
            assert (info.written_at, info.written_at and info.written_at.tzinfo) == (at, dt.UTC)
            return await find_ticket(info)

    assert asyncio.run(run(("ticket", "123"))) == Landed("a 123")
    assert str(asyncio.run(run())) == "nothing since 10:30"


def test_a_moment_without_a_zone_is_refused() -> None:
    """It would be another one elsewhere."""

    with (
        pytest.raises(ConfigurationError, match="a moment needs a time zone"),
        testing.step(written_at=dt.datetime(2030, 1, 1)),
    ):
        pass


def test_a_transactional_body_gets_the_tests_own_connection(dsn: str) -> None:
    """An asynchronous one awaited, psycopg's and SQLAlchemy's sync ones as they are; the test rolls them back."""

    async def add_row() -> int:
        conn = await step.current().connection()
        return (await conn.execute("create table rows (n int)")).rowcount

    def add_row_in_a_thread() -> Any:
        return step.current().connection(psycopg.Connection).execute("select 5").fetchone()

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            with testing.step(connection=conn):
                await add_row()
            await conn.rollback()
            assert await (await conn.execute("select to_regclass('rows')")).fetchone() == (None,)

    asyncio.run(run())
    with psycopg.connect(dsn) as conn, testing.step(connection=conn):
        assert add_row_in_a_thread() == (5,)
    with Session(create_engine("sqlite://")) as session, testing.step(connection=session) as info:
        assert info.connection(Session) is session


def test_without_a_connection_the_step_is_not_transactional() -> None:
    """As in a run."""

    with testing.step() as info, pytest.raises(OutsideRun, match="declare it with effect='transactional'"):
        info.connection()


def test_a_key_of_the_tests_own_is_no_uuid() -> None:
    """Unless it is one that a run could have."""

    with testing.step() as info:
        assert info.idempotency_uuid == key_uuid(info.idempotency_key)
    with (
        testing.step(idempotency_key="k-1") as info,
        pytest.raises(ConfigurationError, match="'k-1' is no 32 hex digits"),
    ):
        info.idempotency_uuid


def test_a_workflow_has_no_use_for_it() -> None:
    """In a workflow's own code it is refused."""

    @workflow
    async def wrong() -> None:
        with testing.step():
            pass

    async def run() -> None:
        handle = await testing.Client().start(wrong)
        with pytest.raises(Exception, match="it runs a body alone") as caught:
            await handle.result()
        assert isinstance(caught.value.__cause__, ConfigurationError)

    asyncio.run(run())

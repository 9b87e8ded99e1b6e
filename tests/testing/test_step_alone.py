"""`testing.step()`: one body by itself."""

from __future__ import annotations

import asyncio
import datetime as dt

import pytest

from replaykit import ConfigurationError, OutsideRun, step, testing, workflow
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

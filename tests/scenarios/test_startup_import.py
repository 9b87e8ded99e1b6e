"""Scenarios of the kind startup-import: what a worker has to have before it takes a run, and what names mean elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from replaykit import Client, Worker, step, workflow
from replaykit.limits import Settings
from tests.crash.rows import Rows
from tests.scenarios import owned
from tests.scenarios.stage import python, replaykit

pytestmark = pytest.mark.anyio


async def use_pool() -> str:
    pool: list[str] = step.current().resources
    return pool[0]


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


@workflow
async def uses_pool(crash: bool) -> str:
    if crash:
        await step(begin)
    return await step(use_pool)


begun: list[str] = []


async def begin() -> str:
    begun.append("begin")
    if len(begun) == 1:
        await wait_for_ever()
    return "begun"


async def test_b178_no_run_is_taken_before_the_lifespan_has_begun(dsn: str, rows: Rows) -> None:
    """A run whose worker is gone is recovered only once the resources are open, and its step finds them."""
    begun.clear()
    unclaimed: list[bool] = []

    @contextlib.asynccontextmanager
    async def slow_pool() -> AsyncIterator[list[str]]:
        for _ in range(20):  # many times as often as a worker would look
            await asyncio.sleep(0.02)
            unclaimed.append(rows.ask("select state from runs") == [("pending",)])
        yield ["open"]

    async with Client(dsn) as client:
        handle = await client.start(uses_pool, True)
        first = Worker(client, workflows=[uses_pool])
        await first.start()
        while not begun:
            await asyncio.sleep(0.002)
        await first.stop(grace_seconds=0)
        async with Worker(client, workflows=[uses_pool], lifespan=slow_pool, settings=Settings(poll_seconds=0.01)):
            assert await handle.result(timeout=30) == "open"

    assert unclaimed == [True] * 20
    assert begun == ["begin", "begin"]


class Service:
    """A configured instance whose method is a workflow."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bill = workflow(name=f"bill-{name}")(self._bill)

    async def _bill(self, cents: int) -> str:
        return await step(self.charge, cents)

    async def charge(self, cents: int) -> str:
        """A step."""
        return f"{self.name}: {cents}"


@workflow
async def something_else() -> None: ...


async def test_b179_a_workflow_of_an_instance_that_is_not_there_waits_for_it(dsn: str, rows: Rows) -> None:
    """A worker without it leaves the run alone, the command line says so, and a worker that has it goes on."""
    service = Service("acme")
    async with Client(dsn) as client:
        async with Worker(client, workflows=[something_else]):
            handle = await client.start(service.bill, 5)
            await (await client.start(something_else)).result(timeout=30)  # it did look for work since
            assert (await handle.info()).state == "pending"
            by_name = await asyncio.to_thread(replaykit, dsn, "start", "bill-acme", "5", "--wait")
            shown = await asyncio.to_thread(replaykit, dsn, "show", str(handle.id))
        async with Worker(client, workflows=[service.bill]):
            assert await handle.result(timeout=30) == "acme: 5"

    assert by_name.code != 0
    assert "bill-acme" in by_name.err
    assert "something_else" in by_name.err, "it says which names are known"
    assert "no live worker" in " ".join(shown.out.split())


async def test_b181_a_script_and_a_worker_that_imports_it_mean_the_same(dsn: str, rows: Rows) -> None:
    """The workflow has one name, and values of the script's classes come out as those of the module."""
    said = await asyncio.to_thread(python, "-m", "tests.scenarios.owned", REPLAYKIT_DATABASE_URL=dsn)
    assert said.code == 0, said.err
    run_id = uuid.UUID(said.out.strip())
    async with Client(dsn) as client, Worker(client, workflows=[owned.pay]):
        result: Any = await client.handle(run_id, owned.pay).result(timeout=30)

    assert result == [owned.Order(7), "tests.scenarios.owned"]
    assert rows.ask("select workflow from runs") == [("pay",)]

"""What others write to a run reaches it while it is in memory: a request to end, whatever the worker is doing."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from replaykit import Client, Handle, Worker, Workflow, sleep, step, workflow
from replaykit.limits import Settings
from replaykit.postgres import runs
from replaykit.postgres.database import Database
from replaykit.replay.entries import ClaimedRun, Entry
from replaykit.runtime.worker import _MAIL_SECONDS
from tests.crash.rows import Rows
from tests.runtime.facts import eventually

pytestmark = pytest.mark.anyio


TOLD: defaultdict[UUID, list[str]] = defaultdict(list)
"""By run, what its bodies have done."""


async def body() -> None:
    """Hangs until it is cancelled."""
    told = TOLD[step.current().run_id]
    told.append("begun")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        told.append("cancelled")
        raise


async def tidy() -> str:
    """Cleans up."""
    TOLD[step.current().run_id].append("tidy")
    return "tidy"


@workflow
async def hangs() -> None:
    """In a step, with another to clean up."""
    try:
        await step(body)
    finally:
        await step(tidy)


@workflow
async def sleeps(seconds: float) -> None:
    """In memory, or out of it."""
    await sleep(seconds)


@workflow
async def long(steps: int) -> None:
    """Has a long journal, and then hangs."""
    for _ in range(steps):
        await step(tidy)
    await step(body)


WORKERS: list[Worker] = []
"""The one that works."""


@asynccontextmanager
async def working(
    dsn: str, *flows: Workflow[..., Any], kind: type[Worker] = Worker, **options: Any
) -> AsyncIterator[Client]:
    """A client, beside a worker."""
    async with Client(dsn) as client, kind(client, workflows=flows, **options) as worker:
        WORKERS[:] = [worker]
        yield client


async def cancel(rows: Rows, run: UUID) -> str:
    """As anyone with SQL does it."""
    ((state,),) = await asyncio.to_thread(rows.ask, "select cancel(%s)", run)
    return str(state)


async def fact(look: Any, what: str) -> None:
    """Wait for it without blocking the worker."""
    await asyncio.to_thread(eventually, look, what)


async def is_over(rows: Rows, handle: Handle[Any]) -> None:
    """Until the run is cancelled."""
    await fact(
        lambda: rows.ask("select state from runs where id = %s", handle.id) == [("cancelled",)], "it is cancelled"
    )


NEVER = Settings(poll_seconds=3_600)
"""Only a hint makes such a worker look."""


@pytest.mark.parametrize(
    "options",
    [{"settings": NEVER}, {"settings": NEVER, "concurrency": 1}, {"poll_only": True}],
    ids=["hint", "full", "poll_only"],
)
async def test_a_running_run_is_told_to_end(dsn: str, rows: Rows, options: dict[str, Any]) -> None:
    """By a hint, or at the next look; a worker that is full looks as well. Its body is cancelled, its `finally` runs."""
    async with working(dsn, hangs, **options) as client:
        handle = await client.start(hangs)
        await fact(lambda: TOLD[handle.id] == ["begun"], "its body runs")
        assert await cancel(rows, handle.id) == "running"
        await is_over(rows, handle)

    assert TOLD[handle.id] == ["begun", "cancelled", "tidy"]
    kinds = [(entry.kind, entry.key) for entry in rows.entries(handle.id)]
    assert ("cancel", "~cancel") in kinds
    assert kinds[-1] == ("step", "tidy")


async def test_a_second_request_says_nothing_new(dsn: str, rows: Rows) -> None:
    """One entry, however often it is asked."""
    async with working(dsn, hangs) as client:
        handle = await client.start(hangs)
        await fact(lambda: TOLD[handle.id] == ["begun"], "its body runs")
        for _ in range(3):
            await cancel(rows, handle.id)
        await is_over(rows, handle)

    assert [entry.kind for entry in rows.entries(handle.id)].count("cancel") == 1


async def test_neighbours_are_left_alone(dsn: str, rows: Rows) -> None:
    """A letter reaches the run that it is for."""
    async with working(dsn, hangs) as client:
        one, other = await client.start(hangs), await client.start(hangs)
        await fact(lambda: TOLD[one.id] == TOLD[other.id] == ["begun"], "both bodies run")
        await cancel(rows, one.id)
        await is_over(rows, one)
        assert TOLD[other.id] == ["begun"]
        assert rows.ask("select state from runs where id = %s", other.id) == [("running",)]
        await cancel(rows, other.id)
        await is_over(rows, other)


async def test_a_run_that_waits_in_memory_is_told(dsn: str, rows: Rows) -> None:
    """Its timer is not waited for."""
    async with working(dsn, sleeps, settings=Settings(evict_after_seconds=7_200)) as client:
        handle = await client.start(sleeps, 3_600.0)
        await fact(lambda: rows.ask("select state from runs") == [("running",)], "it is in memory")
        await cancel(rows, handle.id)
        await is_over(rows, handle)


class Slow(Worker):
    """Whose pages of long journals wait for a gate."""

    asked: asyncio.Event
    gate: asyncio.Event

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        """Once the gate is open."""
        self.asked.set()
        await self.gate.wait()
        return await super().page(run, after_seq)


async def test_a_letter_that_comes_while_the_journal_is_read_is_not_lost(dsn: str, rows: Rows) -> None:
    """The run gets it when it is there."""
    async with working(dsn, long) as client:
        handle = await client.start(long, 250)
        await fact(lambda: "begun" in TOLD[handle.id], "its journal is long")
    Slow.asked, Slow.gate = asyncio.Event(), asyncio.Event()

    async with working(dsn, long, kind=Slow, settings=NEVER):
        await asyncio.wait_for(Slow.asked.wait(), 30)
        assert await cancel(rows, handle.id) == "running"
        (executor,) = WORKERS[0]._executors.values()
        await fact(lambda: executor.run.mail, "the worker has read it")
        Slow.gate.set()
        await is_over(rows, handle)

    assert rows.entries(handle.id)[-1].kind in ("cancel", "step")


@workflow(name="changed")
async def takes_text(word: str) -> None:
    """Before its signature changes."""
    await step(body)


@workflow(name="changed")
async def takes_number(number: int) -> None:
    """After it has."""


async def unfit(dsn: str) -> Handle[Any]:
    """A run that waits for a worker whose code its input does not fit."""
    async with working(dsn, takes_text) as client:
        handle = await client.start(takes_text, "word")
        await fact(lambda: TOLD[handle.id] == ["begun"], "it has begun")
    return handle


async def test_a_run_that_cannot_be_driven_ends_as_asked(dsn: str, rows: Rows) -> None:
    """Its code cannot be told, so it is cancelled without; it would be held for ever."""
    handle = await unfit(dsn)
    await cancel(rows, handle.id)

    async with working(dsn, takes_number):
        await is_over(rows, handle)

    assert rows.ask("select reason, lease_token, finished_at is null from runs") == [(None, None, False)]


async def test_a_run_that_cannot_be_driven_is_held_until_it_is_asked_to_end(dsn: str, rows: Rows) -> None:
    """Without a request it waits for a person; a retry after a request takes the request back."""
    handle = await unfit(dsn)

    async with working(dsn, takes_number):
        await fact(lambda: rows.ask("select state from runs") == [("held",)], "it is held")
        assert "does not fit" in rows.ask("select reason from runs")[0][0]
        rows.ask("select retry(%s)", handle.id)
        await fact(lambda: rows.ask("select state, claims from runs") == [("held", 3)], "it is held again")
        assert await cancel(rows, handle.id) == "pending"
        await is_over(rows, handle)


async def test_a_letter_that_comes_just_before_the_hold_is_read(dsn: str, rows: Rows) -> None:
    """The run is pending then: whoever takes it reads the request."""
    run, token = uuid4(), uuid4()
    columns = "id, workflow, state, lease_token, worker, wakes, started_at, protocol"
    rows.ask(f"insert into runs ({columns}) values (%s, 'x', 'running', %s, %s, 1, now(), 1)", run, token, uuid4())
    database = Database(dsn)
    connection = await database.connect()
    try:
        await connection.run(*runs.hold_run(run, token, "no use", wakes=0))
        assert rows.ask("select state, reason, lease_token from runs") == [("pending", None, None)]
        rows.ask("update runs set state = 'running', lease_token = %s, worker = %s", token, uuid4())
        await connection.run(*runs.hold_run(run, token, "no use", wakes=1))
        assert rows.ask("select state, reason, lease_token from runs") == [("held", "no use", None)]
    finally:
        await connection.close()


class Looks(Worker):
    """Counts its looks into the mailbox."""

    looks = 0

    async def _mail_turn(self) -> float:
        before = self._mail_at
        pause = await super()._mail_turn()
        Looks.looks += self._mail_at != before
        return pause


async def test_hints_that_come_thick_do_not_make_a_worker_look_all_the_time(dsn: str, rows: Rows) -> None:
    """Each start is a hint: a busy worker looks now and then, and once more after the last one."""
    Looks.looks = 0
    async with working(dsn, hangs, sleeps, kind=Looks) as client:
        handle = await client.start(hangs)
        await fact(lambda: TOLD[handle.id] == ["begun"], "its body runs")
        began, before = time.monotonic(), Looks.looks
        for _ in range(100):
            await client.start(sleeps, 0.0)
        looks, most = Looks.looks - before, (time.monotonic() - began) / _MAIL_SECONDS + 2
        await cancel(rows, handle.id)
        await is_over(rows, handle)

    assert looks <= most


class Unreadable(Worker):
    """Pages of long journals are not what they should be."""

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        raise ValueError("a row that no release has written")


async def test_a_long_journal_that_cannot_be_read_holds_its_run(dsn: str, rows: Rows) -> None:
    """Else it would look as if somebody worked on it, until this worker ends."""
    async with working(dsn, long) as client:
        handle = await client.start(long, 250)
        await fact(lambda: "begun" in TOLD[handle.id], "its journal is long")

    async with working(dsn, long, kind=Unreadable):
        held = "select state, reason from runs where id = %s and state = 'held'"
        await fact(lambda: rows.ask(held, handle.id), "it is held")

    ((_, reason),) = rows.ask(held, handle.id)
    assert reason == "its journal could not be replayed: ValueError: a row that no release has written"

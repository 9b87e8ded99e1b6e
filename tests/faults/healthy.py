"""A database in which everything has happened that may: for a checker that must find nothing in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

from tenacity import AsyncRetrying, stop_after_attempt

from replaykit import (
    Client,
    Handle,
    Landed,
    NotLanded,
    RunFailed,
    RunHeld,
    StepInfo,
    Worker,
    Workflow,
    saga,
    sleep,
    step,
    workflow,
)
from replaykit.limits import Settings
from tests.crash.rows import Rows

__all__ = ["Healthy", "make"]

CALLS: list[dict[str, Any]] = []
"""What bodies did, as another side would have seen it."""

BROKEN: set[str] = set()
"""What does not work, as long as it is in here."""

GATE: dict[str, asyncio.Event] = {}


class Refused(Exception):
    """It did not work."""


def act(effect: str = "repeatable", did: bool = True) -> StepInfo:
    """A body's call."""
    info = step.current()
    CALLS.append(
        {
            "run": str(info.run_id),
            "key": info.key,
            "attempt": info.attempt,
            "idempotency_key": info.idempotency_key if effect != "async" else None,
            "effect": None if effect == "async" else effect,
            "did": did,
            "at": time.time(),
        }
    )
    return info


async def note(number: int) -> int:
    """Repeatable."""
    act()
    return number


async def stumble(times: int) -> int:
    """Works at the last of its tries."""
    if act().attempt < times:
        raise Refused("not yet")
    return times


async def cheap(number: int) -> int:
    """Runs ahead of the journal."""
    act("async")
    return number


async def deliver(what: str) -> str:
    """Fails while that is broken."""
    act()
    if what in BROKEN:
        raise Refused(what)
    return what


@step.policy(effect="idempotent")
async def reserve(what: str) -> str:
    """The other side looks at the key."""
    act("idempotent")
    return what


async def find(info: StepInfo) -> Landed[str] | NotLanded:
    """The other side has what worked."""
    return NotLanded() if info.input["what"] in BROKEN else Landed(info.input["what"])


@step.policy(effect="irreversible", reconcile=find)
async def charge(what: str) -> str:
    """The other side can be asked."""
    act("irreversible", did=what not in BROKEN)
    if what in BROKEN:
        raise Refused(what)
    if what == "answer lost":
        raise ConnectionError(what)
    return what


@step.policy(effect="irreversible")
async def wire_money(what: str) -> str:
    """The other side cannot be asked."""
    act("irreversible")
    raise ConnectionError(what)


@step.policy(effect="irreversible")
async def unbook(booked: str) -> None:
    """Undoes `book`."""
    act("irreversible")


@step.policy(effect="idempotent", compensate=unbook)
async def book(what: str) -> str:
    """May be undone."""
    act("idempotent")
    return what


@workflow
async def plain(number: int) -> int:
    """Steps, tries, a timer, cheap steps, side by side."""
    total = sum(await asyncio.gather(*(step(note, n) for n in range(number))))
    total += await step.options(retry=AsyncRetrying(stop=stop_after_attempt(3)))(stumble, 3)
    await asyncio.sleep(0.01)
    for n in range(number):
        total += await step.options(durability="async")(cheap, n)
    return total + await step(note, total)


@workflow
async def pays() -> list[str]:
    """Every policy; one answer is lost, one call does not happen."""
    said = [await step(reserve, "bread"), await step(charge, "milk"), await step(charge, "answer lost")]
    try:
        said.append(await step(charge, "refused"))
    except Refused:
        said.append("no")
    return said


@workflow
async def wires() -> str:
    """Held: nobody knows."""
    return await step(wire_money, "gold")


@workflow
async def tours() -> None:
    """Undone."""
    async with saga():
        await step.options(name="hotel")(book, "hotel")
        await step.options(name="flight")(book, "flight")
        raise Refused("no guide")


@workflow
async def sends() -> list[str]:
    """Fails, and is mended: what had worked is not done again."""
    return [await step(deliver, "letter"), *await asyncio.gather(step(charge, "stamp"), step(deliver, "parcel"))]


@workflow
async def naps() -> None:
    """For a long time."""
    await step(note, 1)
    await sleep(3_600)


FLOWS: list[Workflow[..., Any]] = [plain, pays, wires, tours, sends, naps]


class Healthy:
    """What is known of such a database.

    Attributes:
        dsn: its URL.
        calls: what the other side saw.
        acknowledged: what somebody was told.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.calls: list[dict[str, Any]] = []
        self.acknowledged: list[dict[str, Any]] = []

    def remember(self) -> None:
        """All that is there was told to somebody."""
        self.calls = list(CALLS)
        rows = Rows(self.dsn)
        told = self.acknowledged
        told += [{"run": str(run)} for (run,) in rows.ask("select id from runs")]
        told += [
            {"run": str(run), "seq": seq, "key": key}
            for run, seq, key in rows.ask("select run_id, seq, key from journal")
        ]
        ended = rows.ask("select id, state from runs where finished_at is not null")
        told += [{"run": str(run), "state": state} for run, state in ended]
        letters = rows.ask("select run_id, kind, count(*) from mailbox group by 1, 2")
        told += [{"run": str(run), "letter": kind, "number": number} for run, kind, number in letters]
        rows.close()


async def _end(handle: Handle[Any]) -> str:
    with contextlib.suppress(RunFailed, RunHeld):
        await handle.result(timeout=30)
    return (await handle.info()).state


async def _live(dsn: str) -> None:
    BROKEN.update({"refused", "parcel"})
    settings = Settings(evict_after_seconds=0.5)
    async with Client(dsn) as client, Worker(client, workflows=FLOWS, settings=settings):

        async def started(key: str, flow: Any, *args: Any) -> Handle[Any]:
            handle: Handle[Any] = await client.options(key=key).start(flow, *args)
            return handle

        assert await _end(await started("plain", plain, 3)) == "succeeded"
        assert await _end(await started("pays", pays)) == "succeeded"
        assert await _end(await started("tours", tours)) == "failed"
        assert await _end(await started("held", wires)) == "held"
        wired = await started("wired", wires)
        assert await _end(wired) == "held"
        await wired.resolve("wire_money", Landed("gold"), by="ann", comment="seen in the books")
        assert await _end(wired) == "succeeded"
        sent = await started("sent", sends)
        assert await _end(sent) == "failed"
        BROKEN.discard("parcel")
        await sent.retry()
        assert await _end(sent) == "succeeded"
        for key in ("asleep", "woken"):
            await _parked(await started(key, naps))
        woken = client.handle("woken")
        await woken.cancel()
        await _until(woken, "cancelled")
        later = await client.options(key="later", delay=timedelta(hours=1)).start(naps)
        await later.cancel()
        await client.options(key="never", delay=timedelta(hours=1)).start(naps)


async def _parked(handle: Handle[Any]) -> None:
    await _until(handle, "waiting")


async def _until(handle: Handle[Any], state: str) -> None:
    await _true(lambda: _is(handle, state))


async def _is(handle: Handle[Any], state: str) -> bool:
    return (await handle.info()).state == state


async def _true(fact: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await fact():
            await asyncio.sleep(0.01)


def make(dsn: str) -> Healthy:
    """Let it all happen in a migrated database."""
    CALLS.clear()
    asyncio.run(_live(dsn))
    healthy = Healthy(dsn)
    healthy.remember()
    return healthy


def dump(lines: list[dict[str, Any]]) -> str:
    """As a file that the checker reads."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def run_of(rows: Rows, key: str) -> UUID:
    """By its key."""
    ((run,),) = rows.ask("select id from runs where key = %s", key)
    return UUID(str(run))

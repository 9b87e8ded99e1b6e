"""What a user writes, and the types both checkers must see in it. Checked by test_typing.py, never run."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, assert_type

import httpx
import psycopg
import sqlalchemy
from psycopg.rows import TupleRow
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from replaykit import (
    Client,
    Handle,
    Landed,
    NotLanded,
    RunFailed,
    RunHeld,
    RunInfo,
    StepInfo,
    SyncClient,
    SyncHandle,
    Unknown,
    Worker,
    Workflow,
    idempotency_header,
    now,
    rng,
    saga,
    sleep,
    step,
    testing,
    uuid4,
    workflow,
)


@dataclass
class Receipt:
    id: str


async def charge(card: str, cents: int = 5, *, note: str = "") -> Receipt:
    info = step.current()
    assert_type(info, StepInfo)
    assert_type(info.run_id, uuid.UUID)
    assert_type(info.key, str)
    assert_type(info.attempt, int)
    assert_type(info.idempotency_key, str)
    assert_type(info.idempotency_uuid, uuid.UUID)
    assert_type(info.written_at, dt.datetime | None)
    assert_type(info.observed, tuple[tuple[str, str], ...])
    await info.observe("charge", card)
    return Receipt(f"{card} {cents} {note}")


def score(value: int) -> float:
    return value / 2


async def search(query: dict[str, Any]) -> list[Any]:
    return [query]


async def nothing() -> None:
    pass


@step.policy(name="mail")
async def send_mail(to: str) -> int:
    return len(to)


@step.policy(name="count")
def count_words(text: str) -> int:
    return len(text.split())


class Shop:
    async def reserve(self, number: int) -> bool:
        return number > 0

    @step.policy(effect="idempotent", key_valid_for=dt.timedelta(days=1))
    async def release(self, number: int) -> bool:
        return number > 0


async def find_refund(info: StepInfo) -> Landed[Receipt] | NotLanded | Unknown:
    if info.attempt > 1:
        return Unknown("the bank is closed")
    return Landed(Receipt(str(info.input["card"]))) if info.observed else NotLanded("no such refund")


async def never_landed(info: StepInfo) -> NotLanded:
    return NotLanded(info.key)


async def take_back(receipt: Receipt, why: str = "") -> None:
    pass


def forget(receipt: object) -> int:
    return 5


@step.policy(effect="irreversible", reconcile=find_refund, compensate=take_back, not_landed=(KeyError, OSError))
async def refund(card: str, cents: int = 5, *, note: str = "") -> Receipt:
    return Receipt(card)


@step.policy(effect="irreversible", reconcile=find_refund, not_landed=KeyError)
def refund_in_a_thread(card: str) -> Receipt:
    step.current().observe("refund", card).result(timeout=5)
    return Receipt(card)


@step.policy(compensate=forget)
async def grant(card: str) -> Receipt:
    return Receipt(card)


@step.policy(effect="idempotent", reconcile=never_landed)
async def tell(card: str) -> str:
    return card


class Bank:
    @step.policy(effect="irreversible", reconcile=find_refund)
    async def refund(self, card: str) -> Receipt:
        return Receipt(card)

    async def take_back(self, receipt: Receipt) -> None:
        pass


@step.policy(effect="transactional")
async def write_rows(card: str) -> int:
    assert_type(await step.current().connection(), psycopg.AsyncConnection[TupleRow])
    assert_type(await step.current().connection(AsyncSession), AsyncSession)
    return len(card)


@step.policy(effect="transactional")
def write_rows_in_a_thread(card: str) -> int:
    conn: psycopg.Connection[TupleRow] = step.current().connection(psycopg.Connection)
    conn.execute("select 1")
    assert_type(step.current().connection(sqlalchemy.Connection), sqlalchemy.Connection)
    assert_type(step.current().connection(Session), Session)
    return len(card)


TOOLS: dict[str, Callable[..., Coroutine[Any, Any, str]]] = {}
tool: Callable[..., Awaitable[str]] = TOOLS["x"]


@workflow
async def checkout(order: str, count: int = 1) -> Receipt:
    """Steps: async, sync, methods, functions in a table; what asyncio makes of them keeps its type."""
    assert_type(await step(charge, order, 5, note="x"), Receipt)
    assert_type(await step(charge, card=order), Receipt)
    assert_type(await step(score, 3), float)
    assert_type(await step(search, {"a": 1}), list[Any])
    assert_type(await step(Shop().reserve, 1), bool)
    assert_type(await step(TOOLS["x"], anything=1), str)
    assert_type(await step(send_mail, "ann"), int)
    assert_type(await step(count_words, "a b"), int)
    assert_type(await step.options(name="first", key="once")(charge, order), Receipt)
    assert_type(await step.options(name="half")(score, count), float)

    receipt, half = await asyncio.gather(step(charge, order), step(score, 1))
    assert_type(receipt, Receipt)
    assert_type(half, float)
    assert_type(await asyncio.gather(*(step(score, number) for number in range(3))), list[float])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(step(charge, order))
    assert_type(task.result(), Receipt)
    done, _ = await asyncio.wait([asyncio.create_task(step(score, 1))], return_when=asyncio.FIRST_COMPLETED)
    assert_type(done.pop().result(), float)
    assert_type(await asyncio.wait_for(step(score, 1), 3), float)
    await step(nothing)
    return receipt


@workflow
async def refunds(card: str) -> Receipt:
    """Effects: a step stays what it was, with a reconciler and with an undoing, declared and for one call."""
    assert_type(await step(refund, card, 5, note="x"), Receipt)
    assert_type(await step(refund_in_a_thread, card), Receipt)
    assert_type(await step(grant, card), Receipt)
    assert_type(await step(tell, card), str)
    assert_type(await step(Bank().refund, card), Receipt)
    assert_type(await step(Shop().release, 1), bool)
    assert_type(await step(write_rows, card) + await step(write_rows_in_a_thread, card), int)
    irreversibly = step.options(effect="irreversible", reconcile=find_refund, key="refund")
    assert_type(await irreversibly(charge, card, note="x"), Receipt)
    assert_type(await step.options(reconcile=None)(refund, card), Receipt)
    assert_type(await step.options(effect="idempotent", reconcile=never_landed)(score, 1), float)
    assert_type(await step.options(effect="idempotent", key_valid_for=60)(TOOLS["x"], anything=1), str)
    async with saga():
        assert_type(await step.options(compensate=take_back)(charge, card), Receipt)
        assert_type(await step.options(compensate=Bank().take_back)(charge, card), Receipt)
        assert_type(await step.options(compensate=forget)(score, 1), float)
        assert_type(await step.options(compensate=lambda receipt: take_back(receipt, "late"))(charge, card), Receipt)
        assert_type(await step.options(compensate=None)(refund, card), Receipt)
    receipt, half = await asyncio.gather(step(refund, card), step.options(compensate=forget)(score, 1))
    assert_type(half, float)
    return receipt


@workflow(name="nightly")
async def nightly(day: dt.date) -> int:
    """Time and chance, and a workflow called inline."""
    await sleep(3)
    await sleep(dt.timedelta(days=1))
    await sleep(now() + dt.timedelta(hours=1))
    assert_type(now(), dt.datetime)
    assert_type(rng(), random.Random)
    assert_type(uuid4(), uuid.UUID)
    assert_type(await checkout("order", count=2), Receipt)
    return day.day


assert_type(nightly.name, str)
plain: Callable[[dt.date], Coroutine[Any, Any, int]] = nightly.fn


async def plain_call() -> None:
    """A function with a policy stays the function it was."""
    assert_type(await send_mail("ann"), int)
    assert_type(count_words("a b"), int)
    assert_type(await refund("card", note="x"), Receipt)
    assert_type(refund_in_a_thread("card"), Receipt)
    assert_type(await asyncio.create_task(refund("card")), Receipt)
    kept: Callable[[str], Coroutine[Any, Any, Receipt]] = refund
    assert_type(await kept("card"), Receipt)


async def with_httpx() -> None:
    async with httpx.AsyncClient(event_hooks={"request": [idempotency_header]}) as client:
        await client.post("http://localhost")
    with httpx.Client(event_hooks={"request": [idempotency_header]}) as in_a_thread:
        in_a_thread.post("http://localhost")


async def start_and_wait(client: Client) -> None:
    handle = await client.start(checkout, "order", count=2)
    assert_type(handle, Handle[Receipt])
    assert_type(handle.created, bool)
    assert_type(handle.id, uuid.UUID)
    assert_type(await handle.result(), Receipt)
    assert_type(await handle.result(timeout=dt.timedelta(seconds=5)), Receipt)
    assert_type(await handle.info(), RunInfo)

    keyed = client.options(key="order-42", queue="slow", priority=5)
    assert_type(keyed, Client)
    assert_type(await keyed.start(nightly, dt.date(2030, 1, 1)), Handle[int])
    assert_type(await client.start("checkout", "order", count=2), Handle[Any])
    assert_type(await client.handle("order-42", checkout).result(), Receipt)
    assert_type(client.handle(handle.id), Handle[Any])
    try:
        await handle.result(timeout=1)
    except RunFailed as error:
        assert_type(error.type, str)
    except RunHeld as error:
        assert_type(error.reason, str)


async def start_elsewhere(client: Client, session: AsyncSession, conn: psycopg.Connection[Any]) -> None:
    """Later, or in a transaction of the caller's."""
    assert_type(client.options(delay=3), Client)
    client.options(delay=dt.timedelta(hours=1)).options(delay=dt.datetime(2030, 1, 1, tzinfo=dt.UTC))
    assert_type(await client.options(conn=session).start(checkout, "order"), Handle[Receipt])
    assert_type(await client.options(conn=conn, key="k").start(checkout, "order"), Handle[Receipt])


def without_a_loop(client: SyncClient, session: Session) -> None:
    handle = client.options(key="order-42", delay=1.5, conn=session).start(checkout, "order", count=2)
    assert_type(handle, SyncHandle[Receipt])
    assert_type(handle.created, bool)
    assert_type(handle.id, uuid.UUID)
    assert_type(handle.result(timeout=dt.timedelta(seconds=5)), Receipt)
    assert_type(handle.info(), RunInfo)
    assert_type(client.start("checkout", "order"), SyncHandle[Any])
    assert_type(client.handle("order-42", checkout).result(), Receipt)
    assert_type(client.handle(handle.id), SyncHandle[Any])
    with SyncClient("postgresql://localhost/app") as other:
        assert_type(other, SyncClient)


async def serve() -> None:
    async with Client() as client, Worker(client, workflows=[checkout, nightly]):
        started: Workflow[[dt.date], int] = nightly
        await client.start(started, dt.date(2030, 1, 1))
    await Worker("postgresql://localhost/app", workflows=[checkout], queues=["slow"], concurrency=10).run()


async def test_in_memory() -> None:
    async with testing.Client(stubs={charge: lambda card, cents: Receipt(card), "mail": len}, resources=5) as client:
        assert_type(client, testing.Client)
        handle = await client.start(checkout, "order", count=2)
        assert_type(handle, Handle[Receipt])
        assert_type(await client.start("checkout", "order"), Handle[Any])
        await client.sleep(dt.timedelta(days=2))
        assert_type(client.now(), dt.datetime)
        assert_type(await handle.result(), Receipt)
        assert_type(client.options(key="order-42"), testing.Client)
        assert_type(client.steps(handle)["charge"], testing.StepRecord)
        assert_type(client.steps("order-42")["charge"].attempts, int)
        await start_and_wait(client)
    with testing.step(resources=5, idempotency_key="k") as info:
        assert_type(info, StepInfo)
        assert_type(await charge("card"), Receipt)
    with testing.step(input={"card": "c"}, observed=[("charge", "1")], connection=object()) as info:
        assert_type(await find_refund(info), Landed[Receipt] | NotLanded | Unknown)

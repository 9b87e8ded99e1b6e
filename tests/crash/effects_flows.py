"""Workflows whose steps act on the world outside, one for each policy; what workers of these tests execute."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, cast

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from replaykit import Landed, NotLanded, StepInfo, idempotency_header, saga, step, workflow
from tests.crash.effects_points import FOLDER, Point, install, reach

__all__ = ["POLICIES", "Receipt", "acting", "paying", "touring"]

if FOLDER in os.environ:
    install()


# ------------------------------------------------------------------ the world outside


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[httpx.AsyncClient]:
    """What bodies call with."""
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [idempotency_header]}
    async with httpx.AsyncClient(event_hooks=hooks, timeout=60, verify=False, trust_env=False) as client:
        yield client


async def call(account: str, what: str) -> str:
    """Do it there; the receipt."""
    info = step.current()
    reach(Point.BEFORE_REQUEST, info.key)
    answer = await cast(httpx.AsyncClient, info.resources).post(f"{account}/{what}", headers=caller(info))
    answer.raise_for_status()
    return cast(str, answer.json())


def call_sync(account: str, what: str) -> str:
    """The same in a thread."""
    info = step.current()
    reach(Point.BEFORE_REQUEST, info.key)
    with httpx.Client(event_hooks={"request": [idempotency_header]}, timeout=60, trust_env=False) as client:
        answer = client.post(f"{account}/{what}", headers=caller(info))
    answer.raise_for_status()
    return cast(str, answer.json())


def caller(info: StepInfo) -> dict[str, str]:
    """Who calls, for the server's log."""
    return {"x-caller": f"{info.key} {info.attempt} {os.getpid()}"}


async def find(info: StepInfo) -> Landed[str] | NotLanded:
    """What the server knows of the call."""
    account, what = info.input["account"], info.input["what"]
    answer = await cast(httpx.AsyncClient, info.resources).get(f"{account}/{what}/{info.idempotency_key}")
    return Landed(answer.raise_for_status().json()) if answer.status_code != 404 else NotLanded()


# ------------------------------------------------------------------ the five policies

REFUSED: Final = (httpx.ConnectError,)
"""No connection, no request."""

AGAIN: Final = AsyncRetrying(stop=stop_after_attempt(3), retry=retry_if_exception_type(httpx.TransportError))


async def plain(account: str, what: str) -> str:
    """Nothing is declared."""
    return await call(account, what)


@step.policy(effect="idempotent", not_landed=REFUSED)
async def idempotent(account: str, what: str) -> str:
    """The server does it once for each key."""
    return await call(account, what)


@step.policy(effect="irreversible", not_landed=REFUSED, reconcile=find)
async def reconciled(account: str, what: str) -> str:
    """The server does it as often as it is asked, and knows what it has done."""
    return await call(account, what)


@step.policy(effect="irreversible", not_landed=REFUSED)
async def unasked(account: str, what: str) -> str:
    """The server does it as often as it is asked, and cannot be asked what it has done."""
    return await call(account, what)


@step.policy(effect="transactional")
async def transactional(account: str, what: str) -> str:
    """Its effect is a row of the journal's database; the server only counts the calls."""
    info = step.current()
    connection = await info.connection()
    await connection.execute(
        "insert into public.effects (account, what, key, pid) values (%s, %s, %s, %s)",
        [account, what, info.key, os.getpid()],
    )
    return await call(account, what)


POLICIES: Final[dict[str, Callable[[str, str], Coroutine[Any, Any, str]]]] = {
    "plain": plain,
    "idempotent": idempotent,
    "irreversible, with a reconciler": reconciled,
    "irreversible, without": unasked,
    "transactional": transactional,
}

TABLE: Final = "create table public.effects (id bigserial primary key, account text, what text, key text, pid int)"
"""Of the transactional steps."""


@step.policy(effect="idempotent", not_landed=REFUSED)
def idempotent_sync(account: str, what: str) -> str:
    """In a thread."""
    return call_sync(account, what)


@step.policy(effect="irreversible", not_landed=REFUSED, reconcile=find)
def reconciled_sync(account: str, what: str) -> str:
    """In a thread."""
    return call_sync(account, what)


@step.policy(effect="irreversible", not_landed=REFUSED)
def unasked_sync(account: str, what: str) -> str:
    """In a thread."""
    return call_sync(account, what)


SYNC: Final = {
    "idempotent": idempotent_sync,
    "irreversible, with a reconciler": reconciled_sync,
    "irreversible, without": unasked_sync,
}


async def quiet(number: int) -> int:
    """Tells nobody."""
    await asyncio.sleep(0)
    return number


# ------------------------------------------------------------------ workflows


@workflow
async def acting(policy: str, account: str, sync: bool = False) -> str:
    """One step that acts, between two that do not."""
    await step(quiet, 1)
    call = step.options(name="act")
    receipt = await (call(SYNC[policy], account, "deed") if sync else call(POLICIES[policy], account, "deed"))
    await step(quiet, 2)
    return receipt


@workflow
async def insisting(policy: str, account: str) -> str:
    """One step that is tried again when its connection breaks."""
    return await step.options(name="act", retry=AGAIN)(POLICIES[policy], account, "deed")


@workflow
async def paying(policy: str, account: str, times: int) -> list[str]:
    """One payment after another."""
    receipts = []
    for number in range(times):
        await step(quiet, number)
        receipts.append(await step.options(name="pay")(POLICIES[policy], account, "charge"))
    return receipts


# ------------------------------------------------------------------ a saga


class SoldOut(Exception):
    """The last part cannot be had."""


@dataclass
class Receipt:
    """What a booking leaves, and what its undoing needs."""

    account: str
    what: str
    number: str


@step.policy(effect="idempotent", not_landed=REFUSED)
async def cancel_by_key(booked: Receipt) -> None:
    """Undo it; the server does it once for each key."""
    await call(booked.account, f"undo-{booked.what}")


async def find_cancelled(info: StepInfo) -> Landed[None] | NotLanded:
    """Whether it is undone."""
    booked: Receipt = info.input["booked"]
    client = cast(httpx.AsyncClient, info.resources)
    answer = await client.get(f"{booked.account}/undo-{booked.what}/{info.idempotency_key}")
    return NotLanded() if answer.status_code == 404 else Landed(None)


@step.policy(effect="irreversible", not_landed=REFUSED, reconcile=find_cancelled)
async def cancel_once(booked: Receipt) -> None:
    """Undo it; the server does it as often as it is asked."""
    await call(booked.account, f"undo-{booked.what}")


@step.policy(effect="idempotent", compensate=cancel_once)
async def book(account: str, what: str) -> Receipt:
    """To be undone where nobody looks at keys."""
    return Receipt(account, what, await call(account, what))


@step.policy(effect="irreversible", compensate=cancel_by_key)
async def book_once(account: str, what: str) -> Receipt:
    """To be undone where keys are looked at."""
    return Receipt(account, what, await call(account, what))


@workflow
async def touring(account: str) -> str:
    """Three bookings; then the fourth cannot be had, and they are undone: car, flight, hotel."""
    async with saga():
        await step.options(name="hotel")(book, account, "hotel")
        await step.options(name="flight")(book_once, account, "flight")
        await step.options(name="car")(book, account, "car")
        raise SoldOut("no guide")
    return "on tour"

"""What the workers of the fault tests execute: a mix of everything, each call of which the server outside sees.

A run's part of the world outside is the account of its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from replaykit import Landed, NotLanded, StepInfo, idempotency_header, saga, step, workflow
from tests.crash.effects_points import FOLDER, Point, install, reach

__all__ = ["DEDUPS", "MIX", "OUTSIDE"]

OUTSIDE: Final = "REPLAYKIT_TEST_OUTSIDE"
"""The variable that holds the server's address."""

DEDUPS: Final = ("reserve", "book", "undo")
"""What the server outside does once for each key."""

TABLE: Final = "create table if not exists public.effects (id bigserial primary key, run uuid, key text)"
"""Of the transactional steps."""

if FOLDER in os.environ:
    install()


class Refused(Exception):
    """The world outside says no."""


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[httpx.AsyncClient]:
    """What bodies call with."""
    async with httpx.AsyncClient(
        event_hooks={"request": [idempotency_header]}, timeout=60, verify=False, trust_env=False
    ) as client:
        yield client


def where(info: StepInfo, what: str) -> str:
    """The run's account."""
    return f"http://{os.environ[OUTSIDE]}/{info.run_id}/{what}"


def caller(info: StepInfo, effect: str) -> dict[str, str]:
    """Who calls, for the server's log."""
    return {"x-caller": f"{info.key} {info.attempt} {os.getpid()}", "x-effect": effect}


async def call(what: str, effect: str) -> str:
    """Do it there; the receipt."""
    info = step.current()
    reach(Point.BEFORE_REQUEST, info.key)
    answer = await cast(httpx.AsyncClient, info.resources).post(where(info, what), headers=caller(info, effect))
    if answer.status_code == 503:
        raise Refused(what)
    answer.raise_for_status()
    return cast(str, answer.json())


# ------------------------------------------------------------------ bodies


async def visit(number: int) -> int:
    """Repeatable; the other side's moods do not matter."""
    with contextlib.suppress(Refused, httpx.TransportError):
        await call("visit", "repeatable")
    return number


def visit_sync(number: int) -> int:
    """The same in a thread."""
    info = step.current()
    hooks = {"request": [idempotency_header]}
    with (
        httpx.Client(event_hooks=hooks, timeout=60, verify=False, trust_env=False) as client,
        contextlib.suppress(httpx.TransportError),
    ):
        client.post(where(info, "visit"), headers=caller(info, "repeatable"))
    return number


async def insist(number: int) -> int:
    """Fails when the other side does."""
    await call("insist", "repeatable")
    return number


async def draw(number: int) -> int:
    """Quiet and cheap."""
    await asyncio.sleep(0)
    return number


@step.policy(effect="idempotent", not_landed=(httpx.ConnectError,))
async def reserve() -> str:
    """The server does it once for each key."""
    return await call("reserve", "idempotent")


async def find(info: StepInfo) -> Landed[str] | NotLanded:
    """What the server knows of the call."""
    answer = await cast(httpx.AsyncClient, info.resources).get(f"{where(info, 'charge')}/{info.idempotency_key}")
    return NotLanded() if answer.status_code == 404 else Landed(answer.raise_for_status().json())


@step.policy(effect="irreversible", not_landed=(httpx.ConnectError, Refused), reconcile=find)
async def charge() -> str:
    """The server does it as often as it is asked, and knows what it has done."""
    return await call("charge", "irreversible")


@step.policy(effect="irreversible", not_landed=(httpx.ConnectError, Refused))
async def wire_money() -> str:
    """The server does it as often as it is asked; only a person can look into its books."""
    return await call("wire", "irreversible")


@step.policy(effect="transactional")
async def enter() -> str:
    """Its effect is a row of the journal's database."""
    info = step.current()
    connection = await info.connection()
    await connection.execute("insert into public.effects (run, key) values (%s, %s)", [info.run_id, info.key])
    with contextlib.suppress(Refused, httpx.TransportError):
        await call("enter", "transactional")
    return info.key


@step.policy(effect="idempotent", not_landed=(httpx.ConnectError,))
async def unbook(booked: str) -> None:
    """Undo it; the server does it once for each key."""
    await call("undo", "idempotent")


@step.policy(effect="idempotent", compensate=unbook)
async def book(what: str) -> str:
    """May be undone."""
    return await call("book", "idempotent")


# ------------------------------------------------------------------ workflows

AGAIN: Final = AsyncRetrying(
    stop=stop_after_attempt(4), wait=wait_fixed(0.05), retry=retry_if_exception_type((Refused, httpx.TransportError))
)


@workflow
async def chain(steps: int) -> int:
    """One step after another, in coroutines and in threads."""
    total = 0
    for number in range(steps):
        total += await (step(visit, number) if number % 3 else step(visit_sync, number))
    return total


@workflow
async def fan(steps: int) -> int:
    """Side by side."""
    return sum(await asyncio.gather(*(step(visit, number) for number in range(steps))))


@workflow
async def doze(steps: int) -> int:
    """Timers that fire, time-outs that may, and a wait for which it leaves memory."""
    total = 0
    for number in range(steps):
        await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(0.2):
                total += await step(visit, number)
        except TimeoutError:
            total += number
    await asyncio.sleep(1.5)
    return total + await step(visit, steps)


@workflow
async def persist(steps: int) -> int:
    """Tries again; fails when that does not help, and a person lets it go on."""
    total = 0
    for number in range(steps):
        total += await step.options(retry=AGAIN)(insist, number)
    return total


@workflow
async def gamble(steps: int) -> int:
    """Fails as soon as the other side does; a person lets it go on as often as it takes."""
    total = await step(visit, 0)
    for number in range(steps):
        total += (await asyncio.gather(step(insist, number), step(visit, number)))[0]
        await step(reserve)
    return total


@workflow
async def pay(steps: int) -> list[str]:
    """Every policy. A refusal is taken as one."""
    said: list[str] = []
    for number in range(steps):
        for body in (reserve, charge, wire_money, enter):
            await step(draw, number)
            try:
                said.append(await step(body))
            except Exception as error:
                said.append(type(error).__name__)
    return said


@workflow
async def tour(steps: int) -> str:
    """Bookings that are undone in the end."""
    async with saga():
        for number in range(steps):
            await step.options(name=f"book{number}", retry=AGAIN)(book, str(number))
        raise Refused("no guide")
    return "on tour"


@workflow
async def gather_cheap(steps: int) -> int:
    """Steps that run ahead of the journal, and one that depends on them."""
    total = 0
    for number in range(steps):
        for n in range(3):
            total += await step.options(durability="async")(draw, n)
        total += await step(visit, number)
    return total


@workflow
async def linger(steps: int) -> int:
    """Is cancelled, cleans up."""
    total = 0
    try:
        for number in range(steps):
            total += await step(visit, number)
            await asyncio.sleep(0.1)
        await asyncio.sleep(86_400)
    finally:
        await step(reserve)
    return total


MIX: Final[dict[str, tuple[Any, int]]] = {
    "chain": (chain, 12),
    "fan": (fan, 8),
    "doze": (doze, 3),
    "persist": (persist, 6),
    "gamble": (gamble, 4),
    "pay": (pay, 2),
    "tour": (tour, 3),
    "gather_cheap": (gather_cheap, 5),
    "linger": (linger, 4),
}
"""Workflow and number of steps, by name."""

"""Workflows that the tests of the testing client run."""

from __future__ import annotations

import asyncio
import datetime as dt
from dataclasses import dataclass
from typing import Any

import tenacity

from replaykit import now, sleep, step, workflow


@dataclass
class Receipt:
    """Not what plain JSON would give back."""

    card: str
    cents: int


class CardDeclined(Exception):
    """The bank says no."""


async def charge(card: str, cents: int) -> Receipt:
    """Declines what is negative."""
    if cents < 0:
        raise CardDeclined(f"{card}: {cents}")
    return Receipt(card, cents)


def reserve(order: str) -> tuple[str, int]:
    """A sync body."""
    return order, len(order)


@workflow
async def checkout(card: str, cents: int = 5) -> Receipt:
    """One step."""
    return await step(charge, card, cents)


@workflow
async def remind(days: int) -> str:
    """Waits, then acts."""
    before = now()
    await sleep(dt.timedelta(days=days))
    await step(reserve, f"{days} days")
    return f"{(now() - before).days} days later"


@workflow
async def patient(order: str) -> tuple[Receipt, tuple[str, int], str]:
    """Steps side by side, a wait, an error that is caught, a wait that is cut short."""
    receipt, reserved = await asyncio.gather(step(charge, order, 5), step(reserve, order))
    await asyncio.sleep(0.01)
    words = "charged"
    try:
        await step(charge, order, -1)
    except CardDeclined as error:
        words = str(error)
    with_limit = asyncio.timeout(0.01)
    try:
        async with with_limit:
            await asyncio.sleep(60)
    except TimeoutError:
        words += ", late"
    return receipt, reserved, words


@step.policy(
    retry=tenacity.AsyncRetrying(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_fixed(3_600), reraise=True)
)
async def fetch(url: str) -> dict[str, Any]:
    """Tried again after an hour, twice."""
    raise ConnectionError(url)


@workflow
async def fetching(url: str) -> dict[str, Any]:
    """One step that is retried."""
    return await step(fetch, url)


@step.policy(timeout=30)
async def ask(question: str) -> str:
    """Has half a minute."""
    return question


@workflow
async def asking(question: str) -> str:
    """Tells that nobody answered."""
    try:
        return await step(ask, question)
    except TimeoutError:
        return f"no answer at {now():%H:%M:%S}"


async def start_and_wait(days: int) -> str:
    """A body that starts another run and waits for it."""
    client = step.current().client
    handle = await client.options(key=f"{days} days").start(remind, days)
    return str(await handle.result())


@workflow
async def parent(days: int) -> str:
    """Waits in a body for another run."""
    return await step(start_and_wait, days)


@workflow
async def stuck() -> None:
    """Waits for what nothing can resolve: held."""
    await asyncio.get_running_loop().create_future()

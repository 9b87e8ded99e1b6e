"""Workflows that the tests of client and command line start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from replaykit import Secret, sleep, step, workflow


@dataclass
class Receipt:
    """What checkout returns: not what plain JSON would give back."""

    card: str
    cents: int


class CardDeclined(Exception):
    """The bank says no."""


async def charge(card: str, cents: int) -> Receipt:
    """Declines what is negative."""
    if cents < 0:
        raise CardDeclined(f"{card}: {cents}")
    return Receipt(card, cents)


@workflow
async def checkout(card: str, cents: int = 5) -> Receipt:
    """One step."""
    return await step(charge, card, cents)


@workflow
async def nap(seconds: float) -> str:
    """Waits durably."""
    await sleep(seconds)
    return "rested"


@workflow
async def stuck() -> None:
    """Waits for what nothing can resolve: held."""
    await asyncio.get_running_loop().create_future()


@workflow
async def total(*cents: int, note: str = "", **more: int) -> int:
    """Every kind of parameter."""
    return sum(cents) + sum(more.values()) + len(note)


@workflow
async def guarded(key: Secret[str]) -> None:
    """Asks for what no run can be given."""

"""Steps with an effect that the tests of the testing client run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from replaykit import Landed, NotLanded, StepInfo, Unknown, saga, step, workflow


@dataclass
class Receipt:
    """What the bank gives."""

    card: str
    cents: int


async def find_charge(info: StepInfo) -> Landed[Receipt] | NotLanded | Unknown:
    """Asks the bank, which no test does."""
    raise AssertionError("the real bank was asked")


@step.policy(effect="irreversible", reconcile=find_charge)
async def charge(card: str, cents: int) -> Receipt:
    """Calls the bank, which no test does."""
    raise AssertionError("the real bank was called")


@step.policy(effect="irreversible")
async def launch(what: str) -> str:
    """Of which nobody can say afterwards whether it happened."""
    raise AssertionError("it was really launched")


@step.policy(effect="idempotent")
async def send(text: str) -> str:
    """The other side knows a repeated one by its key."""
    raise AssertionError("it was really sent")


def give_back(text: str) -> None:
    """Undoes `keep`."""


@step.policy(compensate=give_back)
async def keep(text: str) -> str:
    """Undone by `give_back`."""
    return text


@workflow
async def buy(card: str) -> Receipt:
    """A charge, and one plain step before it."""
    await asyncio.sleep(0)
    return await step(charge, card, 5)


@workflow
async def lift_off(what: str) -> str:
    """A launch, and what its error becomes."""
    try:
        return await step(launch, what)
    except ValueError as error:
        return f"failed: {error}"


@workflow
async def tell(text: str) -> str:
    """One message."""
    return await step(send, text)


@workflow
async def pack(what: str) -> None:
    """Keeps two things, and fails."""
    async with saga():
        await step(keep, f"{what} and a hat")
        await step(keep, f"{what} and a stick")
        raise LookupError("no train today")

"""A module that is imported by a worker, and run as a script that starts a run: `python -m tests.scenarios.owned`."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Any

from replaykit import Client, step, workflow

__all__ = ["Order", "pay"]


class Colour(enum.Enum):
    """Of a script."""

    RED = "red"


@dataclass
class Order:
    """Of a script."""

    cents: int
    colour: Colour = Colour.RED


async def charge(order: Any) -> Any:
    """Gives back what it got."""
    return [order, type(order).__module__]


@workflow
async def pay(order: Order, note: Any = None) -> Any:
    """Typed and untyped."""
    return await step(charge, note)


async def main() -> None:
    """Start a run with values of this script's own classes."""
    async with Client() as client:
        print((await client.start(pay, Order(5), Order(7))).id)


if __name__ == "__main__":
    asyncio.run(main())

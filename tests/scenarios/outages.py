"""Workflows of the kind db-failure: each body leaves a line in the file that it is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from replaykit import step, workflow
from tests.scenarios.doubled import act, say, wait_for

__all__ = ["TABLE", "booked", "chain", "endless", "patient", "short"]

TABLE = "create table public.orders (what text)"
"""Of the transactional step."""


@step.policy(effect="transactional")
async def order(path: str, what: str) -> str:
    """A row of the journal's database."""
    say(path, f"order {what}")
    connection = await step.current().connection()
    await connection.execute("insert into public.orders values (%s)", [what])
    return what


@workflow
async def short(path: str, what: str) -> str:
    """One step."""
    await step(act, path, what)
    return what


@workflow
async def chain(path: str, what: str) -> str:
    """Steps one after another, and two side by side."""
    for number in range(4):
        await step(act, path, f"{what} {number}")
    await asyncio.gather(step(act, path, f"{what} left"), step(act, path, f"{what} right"))
    return what


@workflow
async def booked(path: str, what: str) -> str:
    """Its effect is in the same database."""
    return await step(order, path, what)


@workflow
async def endless(path: str, what: str) -> str:
    """Until it is asked to end; then it cleans up."""
    try:
        await asyncio.sleep(86_400)
    finally:
        await step(act, path, what)
    return what


@workflow
async def patient(path: str, door: str) -> str:
    """A long body, between two transactional ones."""
    await step(order, path, "before")
    await step(wait_for, path, door)
    await step(order, path, f"after {Path(door).name}")
    return "done"

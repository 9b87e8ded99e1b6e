"""What a worker of these tests executes. Each effect is a line of a file; the world outside is broken until a file says so."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from replaykit import sleep, step, workflow

EFFECTS = "EFFECTS"
"""The variable that names the file; beside it, `mended` says that the bank is open."""


def note(what: str) -> None:
    """One effect: what, and under which key."""
    with open(os.environ[EFFECTS], "a", encoding="utf-8") as file:
        file.write(f"{what} {step.current().idempotency_key}\n")


async def reserve(order: str) -> str:
    """Succeeds."""
    note("reserve")
    return f"{order} reserved"


async def pay(order: str) -> str:
    """Fails until the world is mended."""
    note("pay")
    if not Path(os.environ[EFFECTS]).with_name("mended").exists():
        raise OSError("the bank is closed")
    return f"{order} paid"


async def clean_up(order: str) -> None:
    """What a cancelled run still does."""
    note("clean_up")


async def hang(order: str) -> None:
    """Takes an hour, and says when it was stopped."""
    note("hang")
    try:
        await asyncio.sleep(3_600)
    except asyncio.CancelledError:
        note("stopped")
        raise


@workflow
async def order(name: str) -> str:
    """Two steps; the second fails at first."""
    stock = await step(reserve, name)
    receipt = await step(pay, name)
    return f"{stock}, {receipt}"


@workflow
async def patient(name: str) -> None:
    """Waits outside of memory."""
    try:
        await step(reserve, name)
        await sleep(3_600)
    finally:
        await step(clean_up, name)


@workflow
async def busy(name: str) -> None:
    """Waits for a body."""
    try:
        await step(hang, name)
    finally:
        await step(clean_up, name)


@workflow
async def stubborn(name: str) -> str:
    """Does not let itself be cancelled."""
    try:
        await sleep(3_600)
    except asyncio.CancelledError:
        await step(clean_up, name)
    return "all the same"


@workflow
async def stuck(name: str) -> None:
    """Waits for what nothing can resolve."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await step(clean_up, name)

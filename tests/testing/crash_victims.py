"""Workflows for the facts of `crash_everywhere` that are no bugs: what its processes are given, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator

import psycopg

from replaykit import Landed, NotLanded, StepInfo, step, workflow
from replaykit.testing import count_effect, effects_counted


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[str]:
    """What bodies write."""
    yield "here"


@contextlib.asynccontextmanager
async def no_lifespan() -> AsyncIterator[str]:
    """The pool cannot be made."""
    raise RuntimeError("no pool today")
    yield ""


async def write(folder: str, word: str) -> str:
    """A line for each time, in a file of the run's."""
    info = step.current()
    with open(f"{folder}/{info.run_id}", "a", encoding="utf-8") as file:
        file.write(f"{info.resources} {word}\n")
    return f"{info.resources} {word}"


@workflow
async def writes(folder: str, *, word: str) -> str:
    """Not idempotent, and counted by who looks into the folder."""
    return await step(write, folder, word)


async def block(pids: str) -> None:
    """Tells this process and its parent, and turns the event loop no more."""
    if pids:
        with open(pids, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {os.getppid()}\n")
    time.sleep(600)


@workflow
async def waits(pids: str) -> None:
    """Does not come to an end."""
    await step(block, pids)


async def leave() -> None:
    """Ends the process."""
    os._exit(1)


@workflow
async def ends_process() -> None:
    """Does not come to an end, nor does its process."""
    await step(leave)


async def find_payment(info: StepInfo) -> Landed[int] | NotLanded:
    """How often this run has paid, if it has."""
    times = effects_counted("pay")
    return Landed(times) if times else NotLanded()


@step.policy(effect="irreversible", reconcile=find_payment)
async def pay() -> int:
    """Its answer is always lost."""
    count_effect("pay")
    raise ConnectionError("no answer")


@workflow
async def pays_once() -> int:
    """Once."""
    return await step(pay)


async def draw() -> int:
    """Another one each time."""
    return random.randrange(10**9)


@workflow
async def runs_ahead() -> int:
    """Steps that are not recorded yet when the next one asks with their results."""
    cheap = step.options(durability="async")
    number = await cheap(draw)
    return await step(quick, await cheap(quick, number) - number)


@workflow
async def asks_with_process() -> int:
    """A step that is asked with what is of the process."""
    return await step(quick, os.getpid())


@workflow
async def fails() -> None:
    """At its first line."""
    raise ValueError("no such order")


async def end_connections(dsn: str) -> None:
    """Everybody else's."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


@workflow
async def ends_connections(dsn: str) -> None:
    """Of who looks on, too."""
    await step(end_connections, dsn)


# ------------------------------------------------------------------ held, with a call that is open


@step.policy(effect="irreversible")
async def call_slowly() -> str:
    """Is under way for a while."""
    await asyncio.sleep(0.5)
    return "called"


async def quick(number: int) -> int:
    """At once."""
    return number


@workflow
async def diverges_beside_a_call() -> int:
    """Its second step's input is of the process, and a call goes on beside it."""
    call = asyncio.create_task(_call())
    number = await step(quick, os.getpid())
    await call
    return await step(quick, 1) + number - number


async def _call() -> str:
    return await step(call_slowly)

"""What the workers of these tests execute. Every body tells the world outside when it begins and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import http.client
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from replaykit import sleep, step, workflow

OUTSIDE = "REPLAYKIT_TEST_OUTSIDE"
"""The variable that holds the server's address."""


# --- calls to the world outside ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def calling() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One call of this body, from begin to end."""
    host, _, port = os.environ[OUTSIDE].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        await _ask(reader, writer, _begin())
        yield reader, writer
        await _ask(reader, writer, "/end")
    finally:
        writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    writer.write(f"POST {path} HTTP/1.1\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")


def _begin() -> str:
    info = step.current()
    return f"/begin/{info.run_id}/{quote(info.key, safe='')}/{os.getpid()}"


# --- bodies -----------------------------------------------------------------------------------------------------------


async def visit(number: int, least: float, most: float) -> int:
    """Takes a while, not the same at each attempt."""
    async with calling():
        await asyncio.sleep(random.uniform(least, most))
    return number


def visit_sync(number: int, least: float, most: float) -> int:
    """The same in a thread."""
    connection = http.client.HTTPConnection(os.environ[OUTSIDE])
    with contextlib.closing(connection):
        connection.request("POST", _begin())
        connection.getresponse().read()
        time.sleep(random.uniform(least, most))
        connection.request("POST", "/end")
        connection.getresponse().read()
    return number


async def pass_gate(name: str) -> str:
    """Ends when the test opens the gate."""
    async with calling() as (reader, writer):
        await _ask(reader, writer, f"/gate/{name}")
    return name


def pass_gate_sync(name: str) -> str:
    """The same in a thread."""
    connection = http.client.HTTPConnection(os.environ[OUTSIDE])
    with contextlib.closing(connection):
        for path in (_begin(), f"/gate/{name}", "/end"):
            connection.request("POST", path)
            connection.getresponse().read()
    return name


async def pass_gate_elsewhere(name: str) -> str:
    """Async, and its work is in a thread: a cancellation ends only the wait for it."""
    return await asyncio.to_thread(pass_gate_sync, name)


async def pass_gate_stubbornly(name: str) -> str:
    """Async, and swallows its cancellations."""
    async with calling() as (reader, writer):
        answer = asyncio.ensure_future(_ask(reader, writer, f"/gate/{name}"))
        while not answer.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(answer)
    return name


# --- workflows --------------------------------------------------------------------------------------------------------


@workflow
async def chain(steps: int, least: float, most: float) -> int:
    """One step after another."""
    total = 0
    for number in range(steps):
        total += await step(visit, number, least, most)
    return total


@workflow
async def mixed(steps: int, least: float, most: float) -> int:
    """Steps one after another and side by side, in coroutines and in threads, and short sleeps."""
    total = 0
    for number in range(0, steps, 4):
        total += await step(visit, number, least, most)
        total += await step(visit_sync, number + 1, least, most)
        async with asyncio.TaskGroup() as group:
            pair = [
                group.create_task(step(visit, number + 2, least, most)),
                group.create_task(step(visit_sync, number + 3, least, most)),
            ]
        total += sum(task.result() for task in pair)
        await asyncio.sleep(least)
    return total


@workflow
async def gated(gate: str, before: int = 0, after: int = 0) -> list[Any]:
    """Steps, a body that waits for the test, steps."""
    seen: list[Any] = [await step(visit, number, 0.0, 0.0) for number in range(before)]
    seen.append(await step(pass_gate, gate))
    seen += [await step(visit, number, 0.0, 0.0) for number in range(after)]
    return seen


@workflow
async def gated_sync(gate: str) -> str:
    """A body in a thread that waits for the test."""
    return await step(pass_gate_sync, gate)


@workflow
async def gated_elsewhere(gate: str) -> str:
    """A body that leaves a thread behind when it is cancelled."""
    return await step(pass_gate_elsewhere, gate)


@workflow
async def gated_stubbornly(gate: str) -> str:
    """A body that cannot be cancelled."""
    return await step(pass_gate_stubbornly, gate)


async def quiet(number: int) -> int:
    """Tells nobody."""
    await asyncio.sleep(0)
    return number


@workflow
async def quiet_chain(steps: int) -> int:
    """Very many steps one after another."""
    total = 0
    for number in range(steps):
        total += await step(quiet, number)
    return total


@workflow
async def quiet_fan(steps: int) -> int:
    """Very many steps side by side."""
    return sum(await asyncio.gather(*(step(quiet, number) for number in range(steps))))


@workflow
async def snooze_until(moment: str) -> str:
    """Only waits."""
    await sleep(dt.datetime.fromisoformat(moment))
    return "rested"


@workflow
async def races(rounds: int, least: float, most: float) -> list[str]:
    """Every kind of race, around bodies of random length, and who won."""
    won: list[str] = []
    for number in range(rounds):
        tasks = {asyncio.ensure_future(_visit(number, least, most)): name for name in "abc"}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        won.append("first " + ",".join(sorted(tasks[task] for task in done)))
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

        order: list[Awaitable[int]] = [asyncio.ensure_future(_visit(n, least, most)) for n in range(3)]
        won.append("order " + ",".join([str(await next_done) for next_done in asyncio.as_completed(order)]))

        try:
            async with asyncio.timeout((least + most) / 2):
                won.append(f"in time {await step(visit, number, least, most)}")
        except TimeoutError:
            won.append("too late")

        try:
            won.append(f"waited {await asyncio.wait_for(_visit(number, least, most), (least + most) / 2)}")
        except TimeoutError:
            won.append("waited too long")
    return won


async def _visit(number: int, least: float, most: float) -> int:
    return await step(visit, number, least, most)


# --- what a body may do -----------------------------------------------------------------------------------------------


@dataclass
class Resources:
    """What the lifespan yields."""

    pid: int


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[Resources]:
    """Entered before the first claim."""
    yield Resources(os.getpid())


async def tell() -> dict[str, Any]:
    """What an async body knows of itself."""
    return _told()


def tell_sync() -> dict[str, Any]:
    """What a body in a thread knows of itself."""
    return _told()


def _told() -> dict[str, Any]:
    info = step.current()
    resources = cast(Resources, info.resources)
    return {
        "run_id": str(info.run_id),
        "key": info.key,
        "attempt": info.attempt,
        "idempotency_key": info.idempotency_key,
        "input": info.input,
        "of_this_process": resources.pid == os.getpid(),
    }


@workflow
async def telling() -> list[dict[str, Any]]:
    """Both kinds of body."""
    return [await step(tell), await step(tell_sync)]


async def leave() -> None:
    """Tries to end the process."""
    raise SystemExit(3)


def leave_sync() -> None:
    """The same in a thread."""
    raise SystemExit(3)


async def hand_out_socket() -> Any:
    """Returns what no journal can hold."""
    return {"sockets": [object()]}


async def large(size: int) -> str:
    """Returns that many bytes."""
    return "x" * size


def around(size: int) -> Any:
    """A sync function that returns a coroutine, as decorators leave them."""
    return large(size)


@workflow
async def misbehaving() -> dict[str, str]:
    """Bodies that do what they should not, and what the code sees of it."""
    seen: dict[str, str] = {}
    for body in (leave, leave_sync, hand_out_socket):
        try:
            seen[body.__name__] = repr(await step(body))
        except Exception as error:
            seen[body.__name__] = f"{type(error).__name__} {getattr(error, 'type', '')}: {error}"
    seen["around"] = await step(around, 3)
    return seen


@workflow
async def heavy(size: int) -> int:
    """One large value."""
    return len(await step(large, size))


# --- steps that may run ahead of the journal --------------------------------------------------------------------------


def note(path: str, *words: object) -> None:
    """One line in a file that outlives every process; one write, so that no kill leaves half of it."""
    with open(path, "ab", buffering=0) as stream:
        stream.write((" ".join(map(str, words)) + "\n").encode())


async def draw(path: str) -> int:
    """Gives another number at each attempt."""
    value = random.randrange(10**9)
    note(path, "draw", value)
    return value


async def spend(path: str, total: int) -> int:
    """Tells the world outside what it was asked, under its idempotency key."""
    note(path, "spend", step.current().idempotency_key, total)
    return total


@workflow
async def ledger(path: str, draws: int, rounds: int) -> int:
    """Cheap steps that may be lost, and dear ones that depend on them."""
    spent = 0
    for _ in range(rounds):
        total = 0
        for _ in range(draws):
            total += await step.options(durability="async")(draw, path)
        spent += await step(spend, path, total)
    return spent

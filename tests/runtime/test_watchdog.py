"""An event loop that does not turn is told of while it does not turn, with the run, the step and the line that blocks."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replaykit import Client, Worker, Workflow, step, workflow
from replaykit.runtime.watchdog import Watchdog
from tests.runtime.facts import DEADLINE_SECONDS


class Heard(logging.Handler):
    """What the library has told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def of(self, event: str) -> list[str]:
        """Lines of that event."""
        return [line for line in self.lines if line.startswith(event + " ")]


HEARD = Heard()


@pytest.fixture(autouse=True)
def heard() -> Iterator[Heard]:
    """A listener that a body can see too: it blocks until the library has told of it."""
    HEARD.lines.clear()
    logger = logging.getLogger("replaykit")
    logger.addHandler(HEARD)
    yield HEARD
    logger.removeHandler(HEARD)


def block_until(fact: Callable[[], object]) -> None:
    """What no body should do."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    secret = "sesame"  # a local value, of which no log may know
    while not fact():
        assert secret
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def blocking() -> str:
    """An async body that calls something blocking."""
    await asyncio.sleep(0)
    block_until(lambda: HEARD.of("loop_blocked"))
    return "done"


async def blocking_in_a_task() -> None:
    """The same, one task further down."""

    async def below() -> None:
        block_until(lambda: HEARD.of("loop_blocked"))

    await asyncio.create_task(below())


@workflow
async def body_blocks() -> str:
    """A step that blocks."""
    return await step(blocking)


@workflow
async def task_of_a_body_blocks() -> None:
    """A step whose task blocks."""
    await step(blocking_in_a_task)


async def quick() -> None:
    """Nothing."""


@workflow
async def code_blocks() -> None:
    """A workflow that blocks by itself, right after a step."""
    await step(quick)
    block_until(lambda: HEARD.of("loop_blocked"))


async def execute(dsn: str, one: Workflow[[], Any]) -> str:
    """Runs it in a worker of this process; its id."""
    async with Client(dsn) as client, Worker(client, workflows=[one]):
        handle = await client.start(one)
        await handle.result(timeout=DEADLINE_SECONDS)
        return str(handle.id)


def test_a_body_that_blocks_the_loop_is_named_while_it_blocks(dsn: str, heard: Heard) -> None:
    """Once, by run, step and stack, innermost call last; and when it is over, how long it took."""
    run_id = asyncio.run(execute(dsn, body_blocks))

    (told,) = heard.of("loop_blocked")
    assert f"run_id={run_id} step=blocking " in told
    assert re.search(r"test_watchdog\.py:\d+ in blocking', '[^']*test_watchdog\.py:\d+ in block_until'\]$", told)
    assert "sesame" not in told
    (over,) = heard.of("loop_unblocked")
    assert float(over.partition("seconds=")[2]) >= 1.0


def test_a_workflow_that_blocks_the_loop_is_named(dsn: str, heard: Heard) -> None:
    """It runs in no step, though it goes on inside the task of the one before."""
    run_id = asyncio.run(execute(dsn, code_blocks))

    (told,) = heard.of("loop_blocked")
    assert f"run_id={run_id} step=None " in told
    assert " in code_blocks', " in told


@pytest.mark.skipif(sys.version_info < (3, 12), reason="a task cannot be asked for its context before 3.12")
def test_a_task_of_a_body_that_blocks_the_loop_is_traced_to_its_step(dsn: str, heard: Heard) -> None:
    """By its context."""
    run_id = asyncio.run(execute(dsn, task_of_a_body_blocks))

    (told,) = heard.of("loop_blocked")
    assert f"run_id={run_id} step=blocking_in_a_task " in told


def test_a_blocked_loop_of_which_nothing_is_known_is_told_by_its_stack(heard: Heard) -> None:
    """Whatever goes wrong in the search for the culprit; twice blocked is told twice."""

    def broken(*_: object) -> tuple[None, None]:
        raise LookupError

    async def blocked_twice() -> None:
        watchdog = Watchdog(broken, blocked_seconds=0.05)
        watchdog.start()
        for times in (1, 2):
            block_until(lambda: len(heard.of("loop_blocked")) == times)  # noqa: B023
            watchdog.tick()
            block_until(lambda: len(heard.of("loop_unblocked")) == times)  # noqa: B023
        watchdog.stop()

    asyncio.run(blocked_twice())

    assert all(line.startswith("loop_blocked run_id=None step=None ") for line in heard.of("loop_blocked"))
    assert " in block_until']" in heard.of("loop_blocked")[0]


def test_a_log_that_fails_ends_no_watchdog(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: the next time is told of again."""
    tried: list[str] = []

    def refuse(event: str, **_: object) -> None:
        tried.append(event)
        raise TypeError("can only concatenate str")

    monkeypatch.setattr("replaykit.runtime.watchdog.log.warning", refuse, raising=True)

    async def blocked_twice() -> None:
        watchdog = Watchdog(lambda *_: (None, None), blocked_seconds=0.05)
        watchdog.start()
        for times in (1, 2):
            block_until(lambda: tried.count("loop_blocked") == times)  # noqa: B023
            watchdog.tick()
            block_until(lambda: tried.count("loop_unblocked") == times)  # noqa: B023
        watchdog.stop()

    asyncio.run(blocked_twice())


def test_a_worker_that_stops_leaves_no_watchdog(dsn: str, heard: Heard) -> None:
    """And one whose loop turns is told nothing of."""

    async def work() -> None:
        async with Client(dsn) as client, Worker(client, workflows=[body_blocks]):
            assert [t for t in threading.enumerate() if t.name == "replaykit-watchdog"]

    asyncio.run(work())

    assert [t for t in threading.enumerate() if t.name == "replaykit-watchdog"] == []
    assert heard.of("loop_blocked") == []

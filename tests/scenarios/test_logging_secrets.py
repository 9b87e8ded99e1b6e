"""What is logged, and what must not be: each line once, and no value in an error message.

A worker in a process of its own, with everything it writes: only that shows what would reach a log collector.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog

from replaykit import Client, ConfigurationError, RunFailed
from replaykit.interfaces.cli import run
from tests.interfaces.running import Running

SECRET = "s3" + "cret"

TALKATIVE = """
import asyncio, logging, os
from pathlib import Path
import structlog
from replaykit import step, workflow

log, plain = structlog.get_logger(), logging.getLogger("shop")

async def work(n: int) -> int:
    log.info("worked", n=n)
    return n

async def crash_once(folder: str) -> None:
    if not (Path(folder) / "crashed").exists():
        (Path(folder) / "crashed").touch()
        os._exit(9)

async def count(n: int) -> None:
    await asyncio.sleep(0)
    log.info("counted", n=n)

@workflow
async def talk(folder: str) -> None:
    log.info("began")
    for n in range(6):
        await step(work, n)
        log.info("after", n=n)
        plain.info("plainly after %d", n)
        if n == 2:
            await asyncio.gather(count(1), count(2))
    await step(crash_once, folder)
    log.info("ended")
"""

LEAKY = """
import structlog
from pydantic import BaseModel
from replaykit import step, workflow

class Login(BaseModel):
    user: str
    attempts: int

async def charge(cents: int) -> int:
    return cents

async def fails(cents: int) -> None:
    password = "s3" + "cret"
    try:
        raise ValueError(len(password))
    except ValueError:
        structlog.get_logger().exception("refused")
        raise

async def log_in(login: Login) -> None: ...

@workflow
async def too_many(cents: int) -> int:
    login = {"password": "s3" + "cret"}
    return await step(charge, cents, login)

@workflow
async def unknown_name(cents: int) -> int:
    return await step(charge, cents, password="s3" + "cret")

@workflow
async def too_many_for_a_workflow(cents: int) -> int:
    return await too_many(cents, "s3" + "cret")

@workflow
async def local(cents: int) -> None:
    password = "s3" + "cret"
    await step(fails, cents)
    print(password)

@workflow
async def enter(login: Login) -> None:
    await step(log_in, login)
"""


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line, run in this process, sets up the logs of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def outcomes(dsn: str, *starts: tuple[Any, ...]) -> list[BaseException]:
    """What these starts by name end with."""

    async def each(client: Client, name: str, *args: Any) -> Any:
        return await (await client.start(name, *args)).result(timeout=60)

    async def all_of_them() -> list[Any]:
        async with Client(dsn) as client:
            return await asyncio.gather(*(each(client, *start) for start in starts), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_b097_each_line_is_logged_once_although_the_run_is_replayed(dsn: str, tmp_path: Path) -> None:
    """B097: a crash near the end, a block in the middle that is not journaled; structlog's and logging's lines."""

    module = tmp_path / "talkative.py"
    module.write_text(TALKATIVE)
    worker = Running("worker", str(module), "--log-format", "json", dsn=dsn)
    try:
        worker.until("child_ready")
        assert outcomes(dsn, ("talk", str(tmp_path))) == [None]
    finally:
        worker.end()
    told = Counter((event["event"], event.get("n")) for event in worker.events if event.get("workflow") == "talk")
    lines = [("after", n) for n in range(6)] + [(f"plainly after {n}", None) for n in range(6)]

    assert (tmp_path / "crashed").exists()
    assert told == Counter(
        [("began", None), *lines, ("counted", 1), ("counted", 2), *(("worked", n) for n in range(6)), ("ended", None)]
    )


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_b191_wrong_arguments_are_not_printed(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    """B191: neither in the logs, nor in the recorded error, nor by the command line; names and counts are."""

    module = tmp_path / "leaky.py"
    module.write_text(LEAKY)
    worker = Running("worker", str(module), "--log-format", log_format, "--log-level", "debug", dsn=dsn)
    try:
        worker.until("child_ready")
        many, unknown, inline, local, entered = outcomes(
            dsn,
            ("too_many", 1),
            ("unknown_name", 1),
            ("too_many_for_a_workflow", 1),
            ("local", 1),
            ("enter", {"user": "ada", "attempts": SECRET}),
        )
        assert run(["start", "enter", f'{{"user": "ada", "attempts": "{SECRET}"}}', "--database-url", dsn]) == 2
        assert run(["start", "enter", f"login={SECRET}", "--database-url", dsn]) == 2
        for name in ("too_many", "local"):
            (run_id,) = ids(dsn, name)
            assert run(["show", run_id, "--database-url", dsn]) == 0
            assert run(["show", run_id, "--json", "--database-url", dsn]) == 0
    finally:
        worker.end()
    printed = capsys.readouterr()

    assert all(isinstance(error, RunFailed) for error in (many, unknown, inline, local))
    assert isinstance(entered, ConfigurationError)
    assert [str(error) for error in (many, unknown, inline) if SECRET in repr(error)] == []
    assert "charge(): too many positional arguments" in str(many)
    assert "$.login.attempts: an integer is needed, not a string" in str(entered)
    assert "refused" in worker.said
    assert SECRET not in worker.said
    assert SECRET not in printed.out + printed.err
    assert SECRET not in recorded(dsn)


@pytest.mark.parametrize(
    "url", [f"postgresql://ada:{SECRET}@127.0.0.1:1/shop", f"postgresql://ada:{SECRET}/@127.0.0.1:{SECRET}/shop"]
)
def test_b191_a_databases_password_is_not_printed(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """B191: whether the database cannot be reached or its URL cannot be read; by commands, workers and clients."""

    module = tmp_path / "leaky.py"
    module.write_text(LEAKY)

    async def start() -> None:
        async with Client(url) as client:
            await client.start("too_many", 1)

    codes = [
        run(["runs", "--database-url", url]),
        run(["start", "too_many", "1", "--database-url", url]),
        run(["db", "migrate", "--database-url", url]),
        run(["worker", str(module), "--database-url", url]),
        run(["dev", str(module), "--database-url", url]),
    ]
    with pytest.raises(ConfigurationError) as error:
        asyncio.run(start())
    printed = capfd.readouterr()

    assert 0 not in codes
    assert len(printed.err.splitlines()) == len(codes)
    assert SECRET not in printed.out + printed.err + str(error.value)


def ids(dsn: str, workflow: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select id from replaykit.runs where workflow = %s", [workflow]).fetchall()
    return [str(row[0]) for row in rows]


def recorded(dsn: str) -> str:
    """Errors and reasons, as they stand in the database."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select r.reason, p.error from replaykit.runs r join replaykit.payloads p on p.run_id = r.id"
        ).fetchall()
    return str(rows)

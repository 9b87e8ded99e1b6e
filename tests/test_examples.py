"""The examples of docs/examples run as they are, in the frameworks that they are for."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from replaykit import Client, SyncClient, Worker, workflow
from tests.direct import direct
from tests.runtime.facts import eventually

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"

# What a browser does, in a process that Django is set up in.
BROWSER = """
import json, logging, django
logging.disable()
django.setup()
from django.test import Client
browser = Client(raise_request_exception=False)
print(json.dumps([
    browser.post("/orders", {"customer": "ann"}).json(),
    browser.post("/orders", {"customer": "nobody"}).status_code,
]))
"""


@pytest.mark.anyio
async def test_the_fastapi_app_executes_what_its_endpoint_starts(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that is sent twice is one run; the worker ends with the app."""

    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    monkeypatch.setenv("REPLAYKIT_DATABASE_URL", dsn)
    spec = importlib.util.spec_from_file_location("fastapi_app", EXAMPLES / "fastapi_app.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fastapi_app", module)
    spec.loader.exec_module(module)
    order = {"id": "42", "cents": 700}

    async with (
        module.app.router.lifespan_context(module.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(module.app), base_url="http://app") as browser,
    ):
        first = (await browser.post("/orders", json=order)).json()
        again = (await browser.post("/orders", json=order)).json()
        await module.app.state.client.handle(first["run"]).result(timeout=30)
        there = (await browser.get(f"/runs/{first['run']}")).json()
        nobody = await browser.get("/runs/00000000-0000-7000-8000-000000000000")

    assert (first["created"], again) == (True, {"run": first["run"], "created": False})
    assert there == {"state": "succeeded", "result": "700 for 42"}
    assert nobody.status_code == 404
    with psycopg.connect(dsn) as sql:
        assert sql.execute("select count(*) from replaykit.workers where stopped_at is null").fetchone() == (0,)


def test_the_django_project_starts_a_run_with_its_order_and_executes_it(dsn: str) -> None:
    """Both are committed together, or rolled back together; the command's worker does the rest, and ends at SIGTERM."""

    pytest.importorskip("django")
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        run_python(dsn, "-m", "django", "migrate")
        run_python(dsn, "-m", "django", "makemigrations", "--check", "--dry-run")
        ordered, failed = json.loads(run_python(dsn, "-c", BROWSER))
        numbers = sql.execute("select count(*) from django_shop_order").fetchone()
        keys = sql.execute("select key, state from replaykit.runs").fetchall()
        with background(dsn, "-m", "django", "run_worker") as worker:
            until(sql, "select state from replaykit.runs", "succeeded")
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0

        assert numbers == (1,)
        assert (failed, keys) == (500, [(f"order {ordered['order']}", "pending")])
        assert sql.execute("select customer, paid from django_shop_order").fetchall() == [("ann", True)]
        assert sql.execute("select output from replaykit.payloads").fetchall() == [("ann",)]


def environment(dsn: str) -> dict[str, str]:
    """Of a process in the Django project."""
    return {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES),
        "DJANGO_SETTINGS_MODULE": "django_shop.settings",
        "REPLAYKIT_DATABASE_URL": dsn,
    }


def run_python(dsn: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments], env=environment(dsn), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@contextlib.contextmanager
def background(dsn: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], env=environment(dsn))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(sql: psycopg.Connection[tuple[Any, ...]], query: str, value: str, seconds: float = 30) -> None:
    """Wait for a query's one answer."""
    deadline = time.monotonic() + seconds
    while (row := sql.execute(query.encode()).fetchone()) != (value,):
        assert time.monotonic() < deadline, f"{query}: {row}"
        time.sleep(0.02)


PAGE = EXAMPLES.parent / "how-to" / "start-runs.md"


@dataclass
class Receipt:
    """What the page's workflow returns."""

    card: str
    cents: int


@workflow
async def pay(card: str, cents: int = 5) -> Receipt:
    """The page's workflow."""
    return Receipt(card, cents)


class Base(DeclarativeBase):
    """Of the page's table."""


class Order(Base):
    """The page's order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.anyio
async def test_the_snippets_of_the_page_run(dsn: str) -> None:
    """Each block of Python and SQL of how-to/start-runs.md, in order, with one worker."""

    engine = create_async_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    names: dict[str, Any] = {
        "AsyncSession": AsyncSession,
        "Client": Client,
        "Order": Order,
        "SyncClient": SyncClient,
        "UTC": UTC,
        "datetime": datetime,
        "dsn": dsn,
        "engine": engine,
        "pay": pay,
        "psycopg": psycopg,
        "timedelta": timedelta,
    }
    text = PAGE.read_text(encoding="utf-8")
    snippets = re.findall(r"^```(python|sql)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    expected = [(f"order-{n}", "succeeded") for n in (42, 43, 44, 45)]

    def ended() -> bool:
        with psycopg.connect(direct(dsn)) as sql:
            return (
                expected
                == sql.execute("select key, state from replaykit.runs where key is not null order by key").fetchall()
            )

    # One block puts a run that nobody has begun into another queue.
    async with Worker(dsn, workflows=[pay], queues=("default", "urgent")):
        for language, snippet in snippets:
            if language == "sql":
                with psycopg.connect(dsn) as sql:
                    sql.execute(snippet.encode())
            elif "await " in snippet:
                names["client"] = names["client"] if isinstance(names.get("client"), Client) else Client(dsn)
                await eval(compile(snippet, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            else:
                names["client"] = SyncClient(dsn)
                await asyncio.to_thread(exec, compile(snippet, str(PAGE), "exec"), names)
        await asyncio.to_thread(eventually, ended, "all runs with a key have succeeded")
    await engine.dispose()

    assert len(snippets) == 7

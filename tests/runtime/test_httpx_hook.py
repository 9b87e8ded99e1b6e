"""`idempotency_header`: requests of a step's body carry the step's key, seen by a server of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from replaykit import idempotency_header, step, testing, workflow


class Bank:
    """Notes the key of each request, None where there is none."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        bank = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bank.keys.append(self.headers["Idempotency-Key"])
                self.send_response(302 if self.path == "/moved" else 200)
                if self.path == "/moved":
                    self.send_header("Location", "/")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def bank() -> Iterator[Bank]:
    bank = Bank()
    thread = threading.Thread(target=bank.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield bank
    finally:
        bank.server.shutdown()
        bank.server.server_close()
        thread.join()


async def post(url: str, headers: dict[str, str] | None = None) -> None:
    """An async body."""
    async with httpx.AsyncClient(event_hooks={"request": [idempotency_header]}, follow_redirects=True) as client:
        await client.post(url, headers=headers)


def post_in_a_thread(url: str, headers: dict[str, str] | None = None) -> None:
    """A sync body."""
    with httpx.Client(event_hooks={"request": [idempotency_header]}, follow_redirects=True) as client:
        client.post(url, headers=headers)


@workflow
async def pay(url: str) -> None:
    """Both sorts of body."""
    await step(post, url)
    await step(post_in_a_thread, url)


@workflow
async def pay_ahead(url: str) -> None:
    """Steps whose results are handed on before their commit."""
    await step.options(durability="async")(post, url)
    await step.options(durability="async")(post_in_a_thread, url)


def test_requests_of_a_body_carry_its_steps_key(bank: Bank) -> None:
    """Of an async one, and of one in a thread: the key that stands in the journal."""

    async def run() -> list[str]:
        async with testing.Client() as client:
            handle = await client.start(pay, bank.url)
            await handle.result()
            return [record.idempotency_key for record in client.steps(handle).values()]

    assert bank.keys == asyncio.run(run())
    assert len(set(bank.keys)) == 2


def test_a_step_ahead_of_its_commit_sends_no_key(bank: Bank) -> None:
    """It has none."""

    async def run() -> None:
        async with testing.Client() as client:
            await (await client.start(pay_ahead, bank.url)).result()

    asyncio.run(run())

    assert bank.keys == [None, None]


def test_outside_of_a_step_nothing_is_added(bank: Bank) -> None:
    """A client may be shared with code that knows nothing of steps."""

    asyncio.run(post(bank.url))
    post_in_a_thread(bank.url)

    assert bank.keys == [None, None]


@pytest.mark.parametrize("name", ["Idempotency-Key", "idempotency-key"])
def test_a_header_that_is_there_is_left_alone(bank: Bank, name: str) -> None:
    """However it is written."""

    with testing.step(idempotency_key="k"):
        asyncio.run(post(bank.url, {name: "mine"}))
        post_in_a_thread(bank.url, {name: "mine"})

    assert bank.keys == ["mine", "mine"]


def test_a_redirected_request_keeps_its_key(bank: Bank) -> None:
    """The hook sees each request of the chain."""

    with testing.step(idempotency_key="k"):
        post_in_a_thread(f"{bank.url}/moved")

    assert bank.keys == ["k", "k"]

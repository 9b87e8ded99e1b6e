"""Tests of the pipeline: in memory and on virtual time; one body alone; one with a worker on a database.

Run them with `pytest test_pipeline.py`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pipeline import Summary, publish, publish_docs
from receiver import Receiver

from replaykit import Client, Landed, NotLanded, RunFailed, StepInfo, Worker, step, testing, workflow


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two documents."""
    (tmp_path / "a.md").write_text("# First\n\nSee [this](b.md).\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("# Second\n\nThe end.\n", encoding="utf-8")
    return str(tmp_path)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The world outside, as a real server."""
    receiver = Receiver()
    receiver.start()
    yield receiver
    receiver.shutdown()
    receiver.server_close()


def test_every_document_is_published(folder: str) -> None:
    """The steps run as they are, but for the one that would reach outside."""
    sent: list[str] = []

    def keep(url: str, summary: Summary) -> str:
        sent.append(f"{summary.title} to {url}")
        return f"document-{len(sent)}"

    async def run() -> int:
        async with testing.Client(stubs={publish: keep}) as client:
            handle = await client.start(publish_docs, folder, "http://there", pause=86_400)
            await client.sleep(dt.timedelta(days=2))
            return await handle.result()

    assert asyncio.run(run()) == 2
    assert sent == ["First to http://there", "Second to http://there"]


def test_the_second_document_waits_for_the_pause(folder: str) -> None:
    """Nothing happens before its time; then it does."""

    async def run() -> list[list[str]]:
        async with testing.Client(stubs={"publish": lambda url, summary: summary.path}) as client:
            handle = await client.start(publish_docs, folder, "http://there", pause=3_600)
            await client.sleep(dt.timedelta(minutes=59))
            early = list(client.steps(handle))
            await client.sleep(dt.timedelta(minutes=1))
            return [early, list(client.steps(handle))]

    early, late = asyncio.run(run())

    assert early == ["find_documents", "summarise", "publish"]
    assert late == ["find_documents", "summarise", "publish", "summarise#2", "publish#2"]


def test_a_refused_document_is_sent_again_under_its_own_key(folder: str) -> None:
    """A failed run, once retried, goes on where it failed; the receiver can tell that it is the same document."""
    keys: list[str] = []

    def refuse_once(url: str, summary: Summary) -> str:
        keys.append(step.current().idempotency_key)
        if len(keys) == 1:
            raise ConnectionRefusedError(url)
        return summary.path

    async def run() -> testing.StepRecord:
        async with testing.Client(stubs={publish: refuse_once}) as client:
            handle = await client.start(publish_docs, folder, "http://there")
            with pytest.raises(RunFailed, match="ConnectionRefusedError: http://there"):
                await handle.result()
            await handle.retry()
            await client.sleep(60)
            assert await handle.result() == 2
            return client.steps(handle)["publish"]

    published = asyncio.run(run())

    assert (published.attempts, published.outcome, published.result) == (2, "ok", "a.md")
    assert keys[0] == keys[1] == published.idempotency_key


async def find_invoice(info: StepInfo) -> Landed[str] | NotLanded:
    """Asks the bookkeeping; below, a stub does."""
    raise NotImplementedError


@step.policy(effect="irreversible", reconcile=find_invoice)
async def send_invoice(order: str) -> str:
    """Sends it; below, a stub does."""
    raise NotImplementedError


@workflow
async def bill(order: str) -> str:
    """One call that must not happen twice."""
    return await step(send_invoice, order)


def test_an_invoice_that_went_out_is_not_sent_again() -> None:
    """The worker dies after the call and before its outcome is recorded."""
    sent: dict[str, str] = {}

    async def send_and_die(order: str) -> str:
        sent[step.current().idempotency_key] = f"invoice of {order}"
        await step.current().client.crash()
        raise AssertionError("nobody is here any more")

    async def find(info: StepInfo) -> Landed[str] | NotLanded:
        invoice = sent.get(info.idempotency_key)
        return NotLanded() if invoice is None else Landed(invoice)

    async def run() -> str:
        async with testing.Client(stubs={send_invoice: send_and_die, find_invoice: find}) as client:
            return await (await client.start(bill, "order-42")).result()

    assert asyncio.run(run()) == "invoice of order-42"
    assert len(sent) == 1


def test_a_repeated_request_is_known_to_the_receiver(receiver: Receiver) -> None:
    """One body alone, against the real thing."""
    summary = Summary("a.md", "First", 4, ["First"], ["b.md"])

    with testing.step(idempotency_key="k-1"):
        first, again = publish(receiver.url, summary), publish(receiver.url, summary)

    assert (first, again, receiver.received, receiver.distinct) == ("document-1", "document-1", 2, 1)


def test_a_worker_publishes_to_a_server(
    folder: str, receiver: Receiver, replaykit_client: Client, replaykit_worker: Callable[..., Worker]
) -> None:
    """All of it: a Postgres of the test's own, a worker, HTTP."""

    async def run() -> int:
        async with replaykit_worker(workflows=[publish_docs]):
            handle = await replaykit_client.start(publish_docs, folder, receiver.url, pause=0)
            return await handle.result(timeout=30)

    assert asyncio.run(run()) == receiver.received == 2

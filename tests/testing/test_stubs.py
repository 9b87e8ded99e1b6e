"""Stubs are called instead of bodies, through the steps' own codecs and policies."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import warnings
from typing import Any

import pytest

from replaykit import ConfigurationError, NotJournalable, RunFailed, step, workflow
from replaykit.testing import Client
from tests.testing import flows


def outcome(client: Client, *args: Any) -> Any:
    """Run checkout."""

    async def run() -> Any:
        return await (await client.start(flows.checkout, *args)).result(timeout=10)

    return asyncio.run(run())


def test_a_stub_stands_for_a_function() -> None:
    """The stub gets the arguments; its result is the step's."""

    client = Client(stubs={flows.charge: lambda card, cents: flows.Receipt(card.upper(), cents * 2)})

    assert outcome(client, "card", 4) == flows.Receipt("CARD", 8)


def test_a_stub_stands_for_a_name() -> None:
    """Also for the name that a call or a policy gave the step."""

    @workflow
    async def named() -> tuple[str, int]:
        return await step.options(name="put aside")(flows.reserve, "order")

    async def run() -> None:
        client = Client(stubs={"put aside": lambda order: (order, 42)})

        assert await (await client.start(named)).result() == ("order", 42)

    asyncio.run(run())


def test_a_stub_may_be_sync_or_async_whatever_the_body_is() -> None:
    """A sync body's stub runs in a thread, as the body would; an async one's on the loop."""
    threads: list[str] = []

    def plain(*_: Any) -> Any:
        threads.append(threading.current_thread().name)
        return ("plain", 1)

    async def asynchronous(*_: Any) -> Any:
        await asyncio.sleep(0)
        return flows.Receipt("async", 1)

    @workflow
    async def both() -> list[Any]:
        return [await step(flows.reserve, "x"), await step(flows.charge, "x", 1)]

    async def run() -> None:
        normal = Client(stubs={flows.reserve: plain, flows.charge: asynchronous})
        assert await (await normal.start(both)).result() == [("plain", 1), flows.Receipt("async", 1)]

        async def reserved(order: str) -> tuple[str, int]:
            return order, 2

        crossed = Client(stubs={flows.reserve: reserved, flows.charge: lambda *_: flows.Receipt("sync", 2)})
        assert await (await crossed.start(both)).result() == [("x", 2), flows.Receipt("sync", 2)]

    asyncio.run(run())

    assert len(threads) == 1 and threads[0].startswith("replaykit-step")


def test_a_stub_is_a_step_in_its_body() -> None:
    """`step.current()` works in it, with the real key and the client's resources."""
    seen: list[Any] = []

    async def look(card: str, cents: int) -> flows.Receipt:
        info = step.current()
        seen.extend([info.key, info.attempt, len(info.idempotency_key), info.input, info.resources, info.client])
        return flows.Receipt(card, cents)

    client = Client(stubs={flows.charge: look}, resources={"bank": "test"})
    outcome(client, "card", 3)

    assert seen == ["charge", 1, 32, {"card": "card", "cents": 3}, {"bank": "test"}, client]


def test_what_a_stub_raises_is_what_the_step_raises() -> None:
    """Its error reaches the workflow rebuilt, and the caller as the cause of RunFailed."""

    def decline(card: str, cents: int) -> flows.Receipt:
        raise flows.CardDeclined(card)

    with pytest.raises(RunFailed, match=r"CardDeclined: card") as caught:
        outcome(Client(stubs={flows.charge: decline}), "card")
    assert isinstance(caught.value.__cause__, flows.CardDeclined)


def test_a_stub_keeps_the_steps_annotations() -> None:
    """A result that the real step could not have returned is refused as its own would be."""

    with pytest.raises(RunFailed) as caught:
        outcome(Client(stubs={flows.charge: lambda card, cents: {"card": card}}), "card")
    assert isinstance(caught.value.__cause__, NotJournalable)


def test_a_retried_stub_is_called_again_in_virtual_time() -> None:
    """The step's `retry=` decides: two failures, an hour of back-off after each, then a result."""
    tries: list[int] = []

    def flaky(url: str) -> dict[str, Any]:
        tries.append(step.current().attempt)
        if len(tries) < 3:
            raise ConnectionError(f"{url} is down")
        return {"ok": True}

    async def run() -> None:
        client = Client(stubs={flows.fetch: flaky})
        handle = await client.start(flows.fetching, "http://x")
        await client.sleep(3_600)
        assert (await handle.info()).waiting_for == "retry"
        assert client.steps(handle)["fetch"].attempts == 2
        await client.sleep(3_600)

        assert await handle.result() == {"ok": True}
        record = client.steps(handle)["fetch"]
        assert record.attempts == 3
        assert [str(error) for error in record.failures] == ["http://x is down", "http://x is down"]

    asyncio.run(run())

    assert tries == [1, 2, 3]


def test_a_misspelt_name_is_seen() -> None:
    """A stub whose name no step bore, while real bodies ran, is a warning when the client is closed."""

    async def run() -> None:
        async with Client(stubs={"chrage": lambda *_: None}) as client:
            await (await client.start(flows.checkout, "card")).result()

    with pytest.warns(RuntimeWarning, match="no step was called 'chrage'; without a stub ran charge"):
        asyncio.run(run())


def test_a_misspelt_name_is_seen_without_a_close_too() -> None:
    """The same when the client is simply forgotten."""

    with pytest.warns(RuntimeWarning, match="'chrage'"):
        outcome(Client(stubs={"chrage": lambda *_: None}), "card")
        gc.collect()


def test_stubs_that_are_not_needed_here_are_no_mistake() -> None:
    """No warning where nothing ran without a stub: tests may share their stubs."""

    async def run() -> None:
        stubs = {"charge": lambda card, cents: flows.Receipt(card, cents), "refund": lambda: None}
        async with Client(stubs=stubs) as client:
            await (await client.start(flows.checkout, "card")).result()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(run())


@pytest.mark.parametrize(
    ("stubs", "words"),
    [
        ({flows.checkout: lambda: None}, "checkout: ...}: that is a workflow"),
        ({"charge": 5}, "a stub is a function"),
        ({7: lambda: None}, "a stub stands for a function or a step's name"),
        ({"a/b": lambda: None}, "step name 'a/b' holds '/'"),
    ],
)
def test_what_cannot_be_a_stub_is_refused(stubs: Any, words: str) -> None:
    """At once, with a sentence."""

    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Client(stubs=stubs)

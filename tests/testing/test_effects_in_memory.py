"""Steps with an effect under the testing client: a crash in the dangerous window, reconcilers, a person's word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaykit import (
    ConfigurationError,
    InDoubt,
    Landed,
    NotLanded,
    NotResolvable,
    NotRetryable,
    RunFailed,
    RunHeld,
    RunNotFound,
    StepInfo,
    Unknown,
    step,
)
from replaykit.replay.entries import IntentState, State
from replaykit.testing import Client
from tests.testing import deeds as flows
from tests.testing.deeds import Receipt


class Bank:
    """The world outside: what was charged, by idempotency key."""

    def __init__(self, *, dies: int = 0, before: bool = False) -> None:
        self.calls = 0
        self.charged: dict[str, Receipt] = {}
        self.asked: list[dict[str, Any]] = []
        self._dies = dies
        self._before = before

    async def charge(self, card: str, cents: int) -> Receipt:
        self.calls += 1
        dies = self.calls <= self._dies
        if dies and self._before:
            await step.current().client.crash()
        receipt = self.charged[step.current().idempotency_key] = Receipt(card, cents)
        step.current().observe("charge", f"c-{self.calls}")
        if dies:
            await step.current().client.crash()
        return receipt

    async def find(self, info: StepInfo) -> Landed[Receipt] | NotLanded:
        self.asked.append(info.input)
        found = self.charged.get(info.idempotency_key)
        return NotLanded() if found is None else Landed(found)


def stubbed(bank: Bank) -> Client:
    return Client(stubs={flows.charge: bank.charge, flows.find_charge: bank.find})


async def in_doubt(client: Client, *, workflow: Any = flows.lift_off) -> Any:
    """A run that waits for a person."""
    handle = await client.start(workflow, "moon")
    with pytest.raises(RunHeld, match="step launch: nobody knows whether its call landed"):
        await handle.result()
    return handle


async def launch_and_die(what: str) -> str:
    if step.current().attempt == 1:
        await step.current().client.crash()
    return f"{what}, attempt {step.current().attempt}"


def test_a_call_that_landed_is_not_made_again() -> None:
    """The worker dies after the call: the reconciler finds it, the body does not run again."""

    async def run() -> None:
        bank = Bank(dies=1)
        client = stubbed(bank)
        handle = await client.start(flows.buy, "visa")

        assert await handle.result() == Receipt("visa", 5)
        assert (bank.calls, bank.asked) == (1, [{"card": "visa", "cents": 5}])
        record = client.steps(handle)["charge"]
        assert (record.attempts, record.outcome, record.result) == (1, "ok", Receipt("visa", 5))

    asyncio.run(run())


def test_a_call_that_did_not_land_is_made_again_with_its_key() -> None:
    """The worker dies before the call, twice."""

    async def run() -> None:
        bank = Bank(dies=2, before=True)
        client = stubbed(bank)
        handle = await client.start(flows.buy, "visa")

        assert await handle.result() == Receipt("visa", 5)
        record = client.steps(handle)["charge"]
        assert (bank.calls, len(bank.asked), record.attempts) == (3, 2, 3)
        assert list(bank.charged) == [record.idempotency_key]
        intents = client._engine.memory.rows[handle.id].intents.values()
        assert [(i.attempt, i.state) for i in intents] == [(1, "not_landed"), (2, "not_landed"), (3, "landed")]

    asyncio.run(run())


def test_an_idempotent_call_is_made_again_with_its_key() -> None:
    """Nobody is asked; it is the same attempt."""

    async def run() -> None:
        keys: list[str] = []

        async def send(text: str) -> str:
            keys.append(step.current().idempotency_key)
            if len(keys) < 3:
                await step.current().client.crash()
            return text

        client = Client(stubs={"send": send})
        handle = await client.start(flows.tell, "hello")

        assert await handle.result() == "hello"
        assert (len(keys), len(set(keys)), client.steps(handle)["send"].attempts) == (3, 1, 1)

    asyncio.run(run())


def test_a_sync_stub_of_an_async_body_may_not_die_but_a_test_may_let_it() -> None:
    """From outside: the run is taken up anew; one that no worker has is left as it is."""

    async def run() -> None:
        entered = asyncio.Event()
        calls: list[str] = []

        async def send(text: str) -> str:
            calls.append(text)
            entered.set()
            if len(calls) == 1:
                await asyncio.get_running_loop().create_future()
            return text

        client = Client(stubs={"send": send})
        handle = await client.start(flows.tell, "hello")
        await entered.wait()
        await client.crash(handle)

        assert await handle.result() == "hello"
        assert calls == ["hello", "hello"]
        await client.crash(handle.id)
        assert await handle.result() == "hello"

    asyncio.run(run())


def test_a_crash_names_a_run_that_is_there() -> None:
    """Outside of a body it has to be named."""

    async def run() -> None:
        client = Client()
        with pytest.raises(ConfigurationError, match="say which run"):
            await client.crash()
        with pytest.raises(RunNotFound, match="no run has the id or key 'nobody'"):
            await client.crash("nobody")

    asyncio.run(run())


def test_landed_completes_the_step_without_its_body() -> None:
    """A person's word, once; the same again changes nothing, another is refused and the first is named."""

    async def run() -> None:
        client = Client(stubs={"launch": launch_and_die})
        handle = await in_doubt(client)

        assert await handle.resolve("launch", Landed("seen"), by="ada", comment="saw it") is State.PENDING
        assert await handle.resolve("launch", Landed("seen"), by="bob") is State.PENDING
        with pytest.raises(
            NotResolvable, match=r"'launch' of run .* has a word already: ada said landed with \"seen\" at"
        ):
            await handle.resolve("launch", NotLanded())
        assert await handle.result() == "seen"
        assert client.steps(handle)["launch"].attempts == 1
        with pytest.raises(NotResolvable, match="has a word already"):
            await handle.resolve("launch", Landed("twice"))

    asyncio.run(run())


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "\ufdd0\ufdd2", "é\u2028"])
def test_any_text_comes_as_it_was_given(text: str) -> None:
    """Also what Postgres does not store as it is."""

    async def run() -> None:
        client = Client(stubs={"launch": launch_and_die})
        handle = await in_doubt(client)
        await handle.resolve("launch", Landed(text))
        assert await handle.result() == text

        handle = await in_doubt(client)
        await handle.resolve("launch", ValueError(text))
        assert await handle.result() == f"failed: {text}"

    asyncio.run(run())


def test_not_landed_makes_the_call_again() -> None:
    """After a worker's death."""

    async def run() -> None:
        client = Client(stubs={"launch": launch_and_die})
        handle = await in_doubt(client)
        first = client.steps(handle)["launch"].idempotency_key

        await handle.resolve("launch", NotLanded())

        assert await handle.result() == "moon, attempt 2"
        assert (client.steps(handle)["launch"].attempts, client.steps(handle)["launch"].idempotency_key) == (2, first)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(ValueError("lost"), "failed: lost"), (InDoubt(), None), (InDoubt("who knows"), None)],
    ids=["a ValueError", "InDoubt", "InDoubt with words"],
)
def test_an_error_is_raised_by_the_step(error: Exception, becomes: str | None) -> None:
    """That very one, which the code may catch; `InDoubt` without words says who let the step fail, and why."""

    async def run() -> None:
        client = Client(stubs={"launch": launch_and_die})
        handle = await in_doubt(client)
        await handle.resolve("launch", error, by="ada", comment="no trace of it")

        if becomes is not None:
            assert await handle.result() == becomes
            return
        with pytest.raises(RunFailed) as failed:
            await handle.result()
        cause = failed.value.__cause__
        assert isinstance(cause, InDoubt)
        words = str(cause)
        assert words == "who knows" if error.args else "ada let it fail: no trace of it" in words

    asyncio.run(run())


def test_an_error_of_the_body_leaves_its_call_in_doubt() -> None:
    """`NotLanded` then lets that error be raised."""

    async def run() -> None:
        async def launch(what: str) -> str:
            raise ValueError("the line is dead")

        client = Client(stubs={"launch": launch})
        handle = await in_doubt(client)

        await handle.resolve("launch", NotLanded())

        assert await handle.result() == "failed: the line is dead"
        assert client.steps(handle)["launch"].attempts == 1

    asyncio.run(run())


def test_a_value_that_does_not_fit_holds_the_run_again() -> None:
    """The reason says so, and another word may be given."""

    async def run() -> None:
        client = Client(stubs={"launch": launch_and_die})
        handle = await in_doubt(client)
        await handle.resolve("launch", Landed({"no": "text"}), by="ada")
        with pytest.raises(RunHeld, match="what ada said it returned does not fit launch"):
            await handle.result()

        await handle.resolve("launch", Landed("text"))

        assert await handle.result() == "text"

    asyncio.run(run())


def test_what_is_not_in_doubt_takes_no_word() -> None:
    """A step without an effect, one that has ended, one that is still at work."""

    async def run() -> None:
        bank = Bank()
        client = stubbed(bank)
        handle = await client.start(flows.buy, "visa")
        await handle.result()
        refused: list[tuple[str, str]] = [
            ("pay", "'pay' of run .* has written no intent"),
            ("charge", "'charge' of run .* is not in doubt: its attempt 1 has landed since"),
        ]
        for key, sentence in refused:
            with pytest.raises(NotResolvable, match=sentence):
                await handle.resolve(key, NotLanded())
        with pytest.raises(RunNotFound):
            await client.handle("nobody").resolve("charge", NotLanded())

    asyncio.run(run())


def test_a_call_at_work_takes_no_word() -> None:
    """Its worker may yet say what becomes of it."""

    async def run() -> None:
        entered = asyncio.Event()

        async def launch(what: str) -> str:
            entered.set()
            await asyncio.get_running_loop().create_future()
            return what

        async with Client(stubs={"launch": launch}) as client:
            handle = await client.start(flows.lift_off, "moon")
            await entered.wait()
            with pytest.raises(NotResolvable, match=r"'launch' of run .* may still be at work"):
                await handle.resolve("launch", NotLanded())

    asyncio.run(run())


@pytest.mark.parametrize("answer", [Unknown("the bank is closed"), ValueError("no"), 5], ids=["Unknown", "error", "5"])
def test_a_reconciler_that_does_not_know_asks_a_person(answer: Any) -> None:
    """Or one that fails, or that says what is no answer. The run is held, its reason says why."""

    async def run() -> None:
        bank = Bank(dies=1)

        async def find(info: StepInfo) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        client = Client(stubs={flows.charge: bank.charge, flows.find_charge: find})
        handle = await client.start(flows.buy, "visa")
        with pytest.raises(RunHeld, match="step charge: nobody knows whether its call landed"):
            await handle.result()
        (intent,) = client._engine.memory.rows[handle.id].intents.values()
        assert (intent.state, intent.resolved) == (IntentState.UNKNOWN, False)

        await handle.resolve("charge", Landed(Receipt("visa", 5)))

        assert await handle.result() == Receipt("visa", 5)
        assert bank.calls == 1

    asyncio.run(run())


def test_a_reconciler_sees_what_the_body_has_observed() -> None:
    """It is committed although the body never ended; later attempts see it as well."""

    async def run() -> None:
        seen: list[Any] = []

        async def charge(card: str, cents: int) -> Receipt:
            if step.current().attempt == 1:
                await step.current().observe("charge", "c-1")
                await step.current().client.crash()
            seen.append(("body", step.current().observed))
            return Receipt(card, cents)

        async def find(info: StepInfo) -> NotLanded:
            seen.append(("reconciler", info.observed))
            return NotLanded()

        client = Client(stubs={flows.charge: charge, flows.find_charge: find})
        handle = await client.start(flows.buy, "visa")

        await handle.result()
        assert seen == [("reconciler", (("charge", "c-1"),)), ("body", (("charge", "c-1"),))]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["retried", "done by hand", "let fail"])
def test_an_undoing_that_fails_waits_for_a_person(how: str) -> None:
    """What was undone stays so; what was not is undone again, taken for done, or left; then the exception goes on."""

    async def run() -> None:
        undone: list[str] = []
        broken = True

        def give_back(text: str) -> None:
            if broken and text.endswith("hat"):
                raise ConnectionError("the shop is closed")
            undone.append(text)

        client = Client(stubs={flows.give_back: give_back})
        handle = await client.start(flows.pack, "a coat")
        with pytest.raises(RunHeld, match="undone: keep#2; not undone: keep"):
            await handle.result()
        broken = False

        if how == "retried":
            await handle.retry()
        else:
            await handle.resolve("~undo:keep", Landed(None) if how == "done by hand" else InDoubt(), by="ada")
        with pytest.raises(RunFailed, match="no train today"):
            await handle.result()
        assert undone == ["a coat and a stick", *(["a coat and a hat"] if how == "retried" else [])]
        with pytest.raises(NotRetryable, match="has undone keep#2, keep, and would go on as if that stood"):
            await handle.retry()

    asyncio.run(run())


def test_a_worker_dies_in_an_undoing() -> None:
    """It is undone all the same, each once, the newest first."""

    async def run() -> None:
        begun: list[str] = []

        async def give_back(text: str) -> None:
            begun.append(text)
            if len(begun) in (1, 3):
                await step.current().client.crash()

        client = Client(stubs={flows.give_back: give_back})
        handle = await client.start(flows.pack, "a coat")

        with pytest.raises(RunFailed, match="no train today"):
            await handle.result()
        assert [text.split()[-1] for text in begun] == ["stick", "stick", "hat", "hat"]
        assert list(client.steps(handle)) == ["keep", "keep#2", "~undo:keep#2", "~undo:keep"]

    asyncio.run(run())

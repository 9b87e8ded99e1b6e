"""A step that fails and is tried again: by a real worker, on a real database. What the rows say, and what bodies see."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from tenacity import (
    AsyncRetrying,
    Retrying,
    TryAgain,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_fixed,
)
from tenacity.asyncio import retry_if_exception as retry_if_async

from replaykit import Client, Handle, ResultRejected, RunFailed, Worker, Workflow, step, workflow
from replaykit.limits import Settings
from tests.crash.rows import Rows, replay_in_process
from tests.runtime.facts import eventually

pytestmark = pytest.mark.anyio


SEEN: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
"""By run: attempt and idempotency key of each body that began. The world outside."""


def seen() -> int:
    """Say outside that this body has begun; which try it is."""
    info = step.current()
    SEEN[str(info.run_id)].append((info.attempt, info.idempotency_key))
    return info.attempt


class Busy(Exception):
    """With an attribute that no journal holds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.response = threading.Lock()


async def knock(times: int) -> str:
    """Fails so often."""
    if seen() <= times:
        raise ConnectionError(f"nobody at home, attempt {step.current().attempt}")
    return "come in"


def knock_sync(times: int) -> str:
    """The same in a thread."""
    if seen() <= times:
        raise ConnectionError(f"nobody at home, attempt {step.current().attempt}")
    return "come in"


FOUR = AsyncRetrying(stop=stop_after_attempt(4), wait=wait_fixed(0.01))


@workflow
async def visit(times: int, sync: bool) -> str:
    """Knocks up to four times."""
    if sync:
        return await step.options(retry=FOUR)(knock_sync, times)
    return await step.options(retry=FOUR)(knock, times)


async def run(dsn: str, flow: Workflow[..., Any], *args: Any, **settings: Any) -> tuple[Handle[Any], Any]:
    """To its end: the result, or the error it failed with."""
    async with Client(dsn) as client, Worker(client, workflows=[flow], settings=Settings(**settings)):
        handle = await client.start(flow, *args)
        try:
            return handle, await handle.result(timeout=30)
        except RunFailed as failed:
            return handle, failed.__cause__


ATTEMPTS = "select attempt, tries, error->>'message', ended_at >= started_at, next_at - ended_at from attempts order by attempt"


@pytest.mark.parametrize("sync", [False, True])
async def test_a_step_that_fails_twice_and_succeeds_has_two_attempts_and_one_entry(
    dsn: str, rows: Rows, sync: bool
) -> None:
    """Each decision is a row; the entry says that it was the third try; every body had the same idempotency key."""
    handle, result = await run(dsn, visit, 2, sync)

    assert result == "come in"
    found = rows.ask(ATTEMPTS)
    assert [row[:4] for row in found] == [
        (1, 1, "nobody at home, attempt 1", True),
        (2, 2, "nobody at home, attempt 2", True),
    ]
    assert [row[4].total_seconds() for row in found] == [0.01, 0.01]
    (entry,) = rows.entries(handle.id)
    assert (entry.attempt, entry.outcome) == (3, "ok")
    assert SEEN[str(handle.id)] == [(n, entry.idempotency_key) for n in (1, 2, 3)]


@pytest.mark.parametrize("sync", [False, True])
async def test_when_the_tries_are_used_up_the_last_error_itself_is_raised(dsn: str, rows: Rows, sync: bool) -> None:
    """No RetryError; the last try is the entry, and no attempt is waited for after it."""
    handle, error = await run(dsn, visit, 9, sync)

    assert type(error) is ConnectionError
    assert str(error) == "nobody at home, attempt 4"
    assert len(rows.ask(ATTEMPTS)) == 3
    (entry,) = rows.entries(handle.id)
    assert (entry.attempt, entry.outcome) == (4, "error")


async def test_a_replay_asks_no_strategy_and_runs_no_body(dsn: str, rows: Rows) -> None:
    """The journal alone gives the same result."""
    handle, _ = await run(dsn, visit, 2, False)
    before = len(SEEN[str(handle.id)])

    execution = await asyncio.to_thread(replay_in_process, rows, visit, handle.id)

    assert execution.ended is not None
    assert execution.ended.output == '"come in"'
    assert len(SEEN[str(handle.id)]) == before


COUNTED: dict[int, int] = {}


def look(dsn: str) -> int:
    """How many attempts are committed when this body runs."""
    with psycopg.connect(dsn) as connection:
        ((count,),) = connection.execute("select count(*) from replaykit.attempts").fetchall()
    COUNTED[step.current().attempt] = count
    if step.current().attempt < 4:
        raise ConnectionError
    return int(count)


@workflow
async def looks(dsn: str) -> int:
    """Tries at once, without any wait."""
    return await step.options(retry=Retrying(stop=stop_after_attempt(4)))(look, dsn)


async def test_a_decision_is_committed_before_the_next_try_begins(dsn: str) -> None:
    """So that no crash forgets a try."""
    COUNTED.clear()

    await run(dsn, looks, dsn)

    assert COUNTED == {1: 0, 2: 1, 3: 2, 4: 3}


def has_lock(error: BaseException) -> bool:
    """Only of the live error."""
    return isinstance(error, Busy) and error.response is not None


async def has_lock_async(error: BaseException) -> bool:
    """The same, as a coroutine."""
    await asyncio.sleep(0)
    return has_lock(error)


async def be_busy() -> int:
    """Once."""
    if seen() == 1:
        raise Busy("wait")
    return 2


def be_busy_sync() -> int:
    """Once."""
    if seen() == 1:
        raise Busy("wait")
    return 2


@workflow
async def busy(sync: bool, awaits: bool) -> int:
    """Asked with the live exception."""
    strategy = retry_if_async(has_lock_async) if awaits else retry_if_exception(has_lock)
    call = step.options(retry=AsyncRetrying(retry=strategy, stop=stop_after_attempt(3)))
    return await (call(be_busy_sync) if sync else call(be_busy))


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_strategies_are_asked_with_the_live_exception(dsn: str, sync: bool, awaits: bool) -> None:
    """Its attributes are there, whether a journal could hold them or not; of a thread's body, too."""
    _, result = await run(dsn, busy, sync, awaits)

    assert result == 2


async def poll(ready_at: int) -> int | None:
    """None, until it is ready."""
    return 7 if seen() >= ready_at else None


def poll_sync(ready_at: int) -> int | None:
    """The same in a thread."""
    return 7 if seen() >= ready_at else None


def is_none(value: object) -> bool:
    """Not ready."""
    return value is None


@workflow
async def polls(ready_at: int, sync: bool) -> int | None:
    """Rejects None."""
    call = step.options(retry=AsyncRetrying(retry=retry_if_result(is_none), stop=stop_after_attempt(3)))
    return await (call(poll_sync, ready_at) if sync else call(poll, ready_at))


@pytest.mark.parametrize("sync", [False, True])
async def test_a_rejected_result_is_an_attempt(dsn: str, rows: Rows, sync: bool) -> None:
    """Until it is accepted."""
    _, result = await run(dsn, polls, 3, sync)

    assert result == 7
    found = rows.ask("select attempt, error->>'type' from attempts order by attempt")
    assert found == [(n, "replaykit.errors.ResultRejected") for n in (1, 2)]


@pytest.mark.parametrize("sync", [False, True])
async def test_a_result_that_is_never_accepted_raises_result_rejected(dsn: str, rows: Rows, sync: bool) -> None:
    """With the step, the try and the result in its sentence."""
    handle, error = await run(dsn, polls, 9, sync)

    assert type(error) is ResultRejected
    assert "rejected the result of attempt 3: None" in str(error)
    assert rows.entries(handle.id)[0].attempt == 3


async def unspeakable() -> Any:
    """No journal holds a lock."""
    seen()
    return threading.Lock()


def unspeakable_sync() -> Any:
    """The same in a thread."""
    seen()
    return threading.Lock()


@workflow
async def speechless(sync: bool) -> None:
    """Would be tried for ever."""
    await step.options(retry=AsyncRetrying())(unspeakable_sync if sync else unspeakable)


@pytest.mark.parametrize("sync", [False, True])
async def test_a_result_that_cannot_be_recorded_is_not_tried_again(dsn: str, sync: bool) -> None:
    """The body has succeeded: another try would act again, and end the same."""
    handle, error = await run(dsn, speechless, sync)

    assert type(error).__name__ == "NotJournalable"
    assert len(SEEN[str(handle.id)]) == 1


def broken(error: BaseException) -> bool:
    """A mistake in a predicate."""
    return bool(error.status == 503)  # type: ignore[attr-defined]


async def cancelled(error: BaseException) -> bool:
    """As an async predicate may end whose own await was cancelled."""
    raise asyncio.CancelledError


@workflow
async def cancelling() -> str:
    """Whose predicate is cancelled by nobody here."""
    return await step.options(retry=AsyncRetrying(retry=retry_if_async(cancelled)))(knock, 9)


async def test_a_strategy_that_is_cancelled_by_itself_ends_the_step(dsn: str) -> None:
    """Nothing hangs."""
    _, error = await run(dsn, cancelling)

    assert "CancelledError" in str(getattr(error, "type", type(error)))


@workflow
async def mistaken(sync: bool) -> str:
    """Whose predicate raises."""
    call = step.options(retry=AsyncRetrying(retry=retry_if_exception(broken)))
    return await (call(knock_sync, 9) if sync else call(knock, 9))


@pytest.mark.parametrize("sync", [False, True])
async def test_the_error_of_a_strategy_is_the_steps_error(dsn: str, rows: Rows, sync: bool) -> None:
    """Caused by the body's, and raised where the step was awaited."""
    handle, error = await run(dsn, mistaken, sync)

    assert type(error) is AttributeError
    assert type(error.__cause__) is ConnectionError
    assert rows.ask(ATTEMPTS) == []
    assert len(SEEN[str(handle.id)]) == 1


TOLD: list[tuple[Any, ...]] = []


def longer(state: Any) -> float:
    """As long as the call says."""
    TOLD.append((state.fn.__name__, state.args, state.kwargs))
    return float(state.args[0]) / 1_000


@workflow
async def told(sync: bool) -> str:
    """Waits by its own arguments."""
    call = step.options(retry=AsyncRetrying(wait=longer, stop=stop_after_attempt(2)))
    return await (call(knock_sync, times=1) if sync else call(knock, 1))


@pytest.mark.parametrize("sync", [False, True])
async def test_strategies_are_told_the_bodys_call(dsn: str, rows: Rows, sync: bool) -> None:
    """Its function, and the arguments that the body had, in the order of its parameters."""
    TOLD.clear()
    _, result = await run(dsn, told, sync)

    assert result == "come in"
    assert [("knock_sync" if sync else "knock", (1,), {})] == TOLD
    ((_, _, _, _, wait),) = rows.ask(ATTEMPTS)
    assert wait.total_seconds() == 0.001


async def once_more() -> int:
    """Asks for another try itself."""
    if seen() < 3:
        raise TryAgain
    return 3


@workflow
async def asking() -> int:
    """A predicate that knows nothing of it."""
    return await step.options(retry=AsyncRetrying(retry=retry_if_exception_type(OSError)))(once_more)


async def test_a_body_may_ask_for_another_try(dsn: str) -> None:
    """By tenacity's TryAgain."""
    _, result = await run(dsn, asking)

    assert result == 3


LONG = AsyncRetrying(stop=stop_after_attempt(3), wait=wait_fixed(0.3))


@workflow
async def patient(sync: bool) -> str:
    """Waits longer than runs are kept in memory."""
    call = step.options(retry=LONG)
    return await (call(knock_sync, 2) if sync else call(knock, 2))


@pytest.mark.parametrize("sync", [False, True])
async def test_a_long_back_off_leaves_memory_and_another_worker_goes_on(dsn: str, rows: Rows, sync: bool) -> None:
    """It waits as a row, for its retry; the next try counts on, wherever it runs."""
    settings = Settings(evict_after_seconds=0.05)
    async with Client(dsn) as client:
        async with Worker(client, workflows=[patient], settings=settings):
            handle = await client.start(patient, sync)

            def waits() -> bool:
                return rows.ask("select state, waiting_for from runs") == [("waiting", "retry")]

            await asyncio.to_thread(eventually, waits, "the run waits for its retry")
        (known,) = rows.ask("select max(attempt), count(*) from attempts")
        async with Worker(client, workflows=[patient], settings=settings):
            assert await handle.result(timeout=30) == "come in"

    assert known[0] == known[1]
    assert [attempt for attempt, _ in SEEN[str(handle.id)]] == [1, 2, 3]
    assert [row[:2] for row in rows.ask(ATTEMPTS)] == [(1, 1), (2, 2)]
    assert rows.entries(handle.id)[0].attempt == 3


def wait_for_word() -> None:
    """In a thread, until the test has seen the first try's row."""
    assert SEEN_TO_FAIL.wait(60)


SEEN_TO_FAIL = threading.Event()


@workflow
async def raced() -> str:
    """Gives a step up while it waits for its next try."""
    knocking = asyncio.ensure_future(step.options(retry=AsyncRetrying(wait=wait_fixed(60)))(knock, 9))
    await step(wait_for_word)
    knocking.cancel()
    try:
        return await knocking
    except asyncio.CancelledError:
        return "too long"


async def test_a_step_that_is_given_up_is_not_tried_again(dsn: str, rows: Rows) -> None:
    """Its attempt stays visible."""
    SEEN_TO_FAIL.clear()

    def word() -> None:
        eventually(lambda: len(rows.ask(ATTEMPTS)) == 1, "the first try has failed")
        SEEN_TO_FAIL.set()

    (handle, result), _ = await asyncio.gather(run(dsn, raced), asyncio.to_thread(word))

    assert result == "too long"
    assert len(rows.ask(ATTEMPTS)) == 1
    assert len(SEEN[str(handle.id)]) == 1


# ---------------------------------------------------------------------- the page that says how


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of docs/how-to/retry-a-step.md, its waits cut short."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "retry-a-step.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "patient.py").write_text(source.replace("max=60", "max=0.01"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("patient")
    del sys.modules["patient"]


async def test_the_page_that_says_how_is_right(dsn: str, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step sends the same key on each attempt, and its other call tries once; its query shows the attempts."""
    keys: list[str] = []

    def bank(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) % 3:
            raise httpx.ConnectError("closed")
        return httpx.Response(200, json={"receipt": "r-1"})

    real = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda: real(transport=httpx.MockTransport(bank)))

    handle, result = await run(dsn, page.collect, "order-42", 500)
    assert (result, len(keys), len(set(keys))) == ("r-1", 3, 1)

    hurried, error = await run(dsn, page.collect_in_a_hurry, "order-42", 500)
    assert "ConnectError" in (type(error).__name__, getattr(error, "type", "").rpartition(".")[2])
    assert len(keys) == 4

    text = (Path(__file__).parents[2] / "docs" / "how-to" / "retry-a-step.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with psycopg.connect(dsn) as connection:
        found = connection.execute(query.replace(":'run'", f"'{handle.id}'").encode()).fetchall()
        none = connection.execute(query.replace(":'run'", f"'{hurried.id}'").encode()).fetchall()
    assert [row[:3] for row in found] == [("charge", n, "httpx.ConnectError") for n in (1, 2)]
    assert none == []

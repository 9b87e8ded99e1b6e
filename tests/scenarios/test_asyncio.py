"""Scenarios of the kind asyncio: plain asyncio in a workflow behaves as anywhere, in each replay."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import uuid
from collections import Counter
from typing import Any

import anyio
import pytest

from replaykit import Client, ConfigurationError, OutsideRun, StepFailed, SyncClient, Worker, sleep, step, workflow
from tests.crash.rows import Rows
from tests.replay import drive
from tests.scenarios.stage import outcome_of, play, replayed

pytestmark = pytest.mark.anyio


class Hall:
    """Counts the bodies that ran, and lets a test hold one at a gate."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        """The gate that bodies of that name wait at."""
        return self.gates.setdefault(name, asyncio.Event())

    async def visit(self, name: str) -> str:
        """A body that waits at its gate, if there is one."""
        self.begun[name] += 1
        if name in self.gates:
            await self.gates[name].wait()
        self.ended[name] += 1
        return name


hall = Hall()


@pytest.fixture(autouse=True)
def new_hall() -> None:
    global hall
    hall = Hall()


async def visit(name: str) -> str:
    return await hall.visit(name)


async def until(fact: Any, what: str) -> None:
    """Waits for a fact while the loop turns."""
    with anyio.fail_after(20):
        while not fact():
            await asyncio.sleep(0.002)


# --- races and gathers ------------------------------------------------------------------------------------------------


@workflow
async def race() -> list[str]:
    a, c = asyncio.create_task(step(visit, "a")), asyncio.create_task(step(visit, "c"))
    done, _ = await asyncio.wait([a, c], return_when=asyncio.FIRST_COMPLETED)
    after = await step(visit, "b") if a in done else "too late"
    return [after, await c]


@pytest.mark.parametrize("restart", [False, True], ids=["one worker", "a restart in the middle"])
async def test_b067_a_step_in_flight_is_not_started_again_by_its_neighbours_end(dsn: str, restart: bool) -> None:
    """A ends, B is started while C runs: each body ran once, in ten runs, also when the worker is replaced meanwhile."""
    hall.gate("c")
    hall.gate("b")
    async with Client(dsn) as client:
        handles = [await client.start(race) for _ in range(10)]
        worker = Worker(client, workflows=[race])
        await worker.start()
        await until(lambda: hall.begun["b"] == 10 and hall.begun["c"] == 10, "b was started, c runs")
        stopping = asyncio.create_task(worker.stop()) if restart else None
        if restart:
            await until(lambda: worker.draining, "the worker drains")
        hall.gate("b").set()
        hall.gate("c").set()
        if stopping is not None:
            await stopping
            worker = Worker(client, workflows=[race])
            await worker.start()
        results = [await handle.result(timeout=30) for handle in handles]
        await worker.stop()

    assert results == [["b", "c"]] * 10
    assert hall.begun == {"a": 10, "b": 10, "c": 10}


async def fail_now() -> None:
    raise ValueError("at once")


@workflow
async def gathers() -> list[str]:
    return await asyncio.gather(  # type: ignore[return-value]
        step(visit, "one"), step(visit, "two"), step(visit, "slow"), step(visit, "slower"), step(fail_now)
    )


async def test_b074_what_siblings_of_a_failed_step_did_is_in_the_journal(dsn: str) -> None:
    """Siblings that had ended are recorded, those that had not are stopped: no effect goes on unseen."""
    hall.gate("slow")
    hall.gate("slower")
    async with Client(dsn) as client, Worker(client, workflows=[gathers]):
        handle = await client.start(gathers)
        error = await outcome_of(handle)
    again, entries = await asyncio.to_thread(replayed, dsn, gathers, handle.id)

    assert repr(error) == repr(again) == "ValueError('at once')"
    recorded = [entry.key for entry in entries if entry.outcome == "ok"]
    assert hall.ended == Counter({"one": 1, "two": 1})
    assert sorted(recorded) == ["visit", "visit#2"]


failing: list[bool] = []


async def fail_once() -> str:
    if failing:
        raise ValueError(failing.pop())
    return "done"


@workflow
async def gathers_again() -> list[str]:
    return await asyncio.gather(  # type: ignore[return-value]
        step(visit, "one"), step(visit, "two"), step(visit, "slow"), step(fail_once)
    )


async def test_b074_a_retry_does_not_repeat_what_siblings_have_done(dsn: str) -> None:
    """The failed run goes on: the two that had ended are answered from the journal, the two others run."""
    failing[:] = [True]
    hall.gate("slow")
    async with Client(dsn) as client, Worker(client, workflows=[gathers_again]):
        handle = await client.start(gathers_again)
        assert isinstance(await outcome_of(handle), ValueError)
        hall.gates.clear()
        await handle.retry()
        assert await handle.result(timeout=30) == ["one", "two", "slow", "done"]

    assert hall.begun == {"one": 1, "two": 1, "slow": 2}


@workflow
async def groups() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(step(visit, "slow"))
        group.create_task(step(visit, "slower"))
        group.create_task(step(fail_now))


async def test_b073_a_failing_task_group_fails_the_run_with_all_that_is_in_it(dsn: str) -> None:
    """The siblings' bodies are stopped; the stored error has its members, and a replay has the same."""
    hall.gate("slow")
    hall.gate("slower")
    played = await play(dsn, groups)

    for error in (played.first, played.again):
        assert isinstance(error, ExceptionGroup)
        assert [repr(one) for one in error.exceptions] == ["ValueError('at once')"]
    assert hall.ended == Counter()
    assert [(entry.key, entry.outcome) for entry in played.entries if entry.outcome != "cancelled"] == [
        ("fail_now", "error")
    ]


# --- cancelling -------------------------------------------------------------------------------------------------------


@workflow
async def gives_up_a_sleep() -> float:
    task = asyncio.create_task(sleep(3600))
    await sleep(1)
    await step(visit, "meanwhile")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await step(visit, "after")
    return round(asyncio.get_running_loop().time())


async def test_b070_a_sleep_that_was_given_up_leaves_nothing_behind(dsn: str, rows: Rows) -> None:
    """No timer of it fires, the run does not wait for it, also when it had left memory meanwhile."""
    played = await play(dsn, gives_up_a_sleep, evict_after_seconds=0.0)

    assert played.first == played.again < 60
    assert [entry.key for entry in played.entries] == ["~timer#1", "visit", "visit#2"]
    assert rows.ask("select state, waiting_for, available_at is null or available_at < now() from runs") == [
        ("succeeded", None, True)
    ]


async def test_b070_the_loop_keeps_no_timer_of_it() -> None:
    """Nothing is due once it is cancelled, and nothing fires into a cancelled future."""
    live = drive.begin(gives_up_a_sleep)
    live.fire()
    live.answer("visit", "meanwhile")

    assert live.execution.next_deadline is None
    live.answer("visit#2", "after")
    assert live.result == 1
    assert live.execution.loop.problems == []


@workflow
async def insists() -> list[Any]:
    cancels: list[int] = []

    async def stubborn() -> str:
        call = asyncio.ensure_future(step(visit, "long"))
        while not call.done():
            try:
                await asyncio.shield(call)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                cancels.append(task.cancelling())
                task.uncancel()
        return call.result()

    task = asyncio.create_task(stubborn())
    await step(visit, "short")
    task.cancel()
    return [await task, cancels, task.cancelling()]


async def test_b071_one_cancel_is_delivered_once(dsn: str) -> None:
    """Code that catches it and goes on waiting sees one, and nothing of it is written."""
    hall.gate("long")
    async with Client(dsn) as client, Worker(client, workflows=[insists]):
        handle = await client.start(insists)
        await until(lambda: hall.begun["long"] and hall.ended["short"], "the short one has ended")
        hall.gate("long").set()
        first = await handle.result(timeout=30)
    again, entries = await asyncio.to_thread(replayed, dsn, insists, handle.id)

    assert first == again == ["long", [1], 0]
    assert sorted(entry.key for entry in entries) == ["1/visit", "visit"]


async def call_slow_service() -> str:
    with anyio.fail_after(0.01):
        await asyncio.Event().wait()
    return "never"


async def cancel_itself() -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel("by its client")
    await asyncio.sleep(10)
    return "never"


async def raise_cancelled() -> str:
    raise asyncio.CancelledError("by its library")


@workflow
async def meets_cancelled_bodies() -> list[str]:
    found = await asyncio.gather(
        step(call_slow_service), step(cancel_itself), step(raise_cancelled), return_exceptions=True
    )
    return [f"{type(one).__name__} {getattr(one, 'type', '')}".strip() for one in found]


async def test_b082_a_body_that_ends_by_cancelled_error_has_a_recorded_outcome(dsn: str) -> None:
    """A client's time-out, a body that cancels itself, a library that raises it: each is an entry, and the run goes on."""
    played = await play(dsn, meets_cancelled_bodies)

    cancelled = "StepFailed asyncio.exceptions.CancelledError"
    assert played.first == played.again == ["TimeoutError", cancelled, cancelled]
    assert {(entry.key, entry.outcome) for entry in played.entries} == {
        ("call_slow_service", "error"),
        ("cancel_itself", "error"),
        ("raise_cancelled", "error"),
    }


async def test_b082_it_fails_the_run_when_nobody_catches_it(dsn: str) -> None:
    """And does not end the worker, or the run as cancelled."""

    @workflow
    async def leaves_it() -> str:
        return await step(raise_cancelled)

    played = await play(dsn, leaves_it)

    assert isinstance(played.first, StepFailed)
    assert played.first.type == "asyncio.exceptions.CancelledError"


# --- contexts ---------------------------------------------------------------------------------------------------------

request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


async def who_am_i(n: int) -> list[Any]:
    before = step.current()
    await asyncio.sleep(0.001 * (5 - n))
    after = step.current()
    return [before.key, after.key, after.idempotency_key, before is after, request.get()]


@workflow
async def starts_five() -> list[Any]:
    async def one(n: int) -> list[Any]:
        request.set(f"request {n}")
        return await step.options(name=f"work-{n}")(who_am_i, n)

    tasks = [asyncio.create_task(one(n)) for n in range(5)]
    return [await tasks[n] for n in (3, 0, 4, 1, 2)]


async def test_b079_each_body_sees_its_own_step(dsn: str, rows: Rows) -> None:
    """Key, idempotency key and the context of the task that called it."""
    played = await play(dsn, starts_five)

    keys = dict(rows.ask("select key, idempotency_key from journal where run_id = %s", played.run_id))
    for n, (before, after, idempotency_key, same, context) in zip((3, 0, 4, 1, 2), played.first, strict=True):
        assert before == after == f"{n + 1}/work-{n}"
        assert idempotency_key == keys[after]
        assert same
        assert context == f"request {n}"
    assert len(set(keys.values())) == 5


@workflow
async def reads_request(n: int) -> str:
    found = request.get()
    request.set(f"of run {n}")
    in_a_body = await step(whose_request)
    return f"{found}, {in_a_body}"


async def whose_request() -> str:
    found = request.get()
    request.set("of a body")
    return found


async def test_b080_a_run_starts_in_a_context_of_its_own(dsn: str) -> None:
    """Whatever is set where the worker or the client was started, in other runs, in bodies."""
    request.set("of the test")
    async with Client(dsn) as client, Worker(client, workflows=[reads_request]):
        handles = await asyncio.gather(*(client.start(reads_request, n) for n in range(50)))
        found = [await handle.result(timeout=30) for handle in handles]

    assert found == [f"none, of run {n}" for n in range(50)]


# --- loops and threads ------------------------------------------------------------------------------------------------


@workflow
async def waits_within() -> str:
    event = asyncio.Event()

    async def ring() -> None:
        await step(visit, "ring")
        event.set()

    task = asyncio.create_task(ring())
    await event.wait()
    await task
    return "rung"


async def test_b076_sync_code_starts_runs_and_waits_for_them(dsn: str) -> None:
    """From a thread without a loop, and from a loop of its own with a client that another loop uses as well."""
    sync_client = SyncClient(dsn)

    def from_a_thread() -> str:
        return sync_client.start(waits_within).result(timeout=30)

    async with Client(dsn) as client, Worker(client, workflows=[waits_within]):

        async def on_another_loop() -> str:
            async with client:
                return await (await client.start(waits_within)).result(timeout=30)

        assert await (await client.start(waits_within)).result(timeout=30) == "rung"
        assert await asyncio.to_thread(from_a_thread) == "rung"
        assert await asyncio.to_thread(lambda: asyncio.run(on_another_loop())) == "rung"
        await asyncio.to_thread(sync_client.close)


async def test_b076_what_would_hang_is_refused_at_once(dsn: str) -> None:
    """Blocking the loop of the worker, calling a workflow by hand: a sentence with the way out."""
    sync_client = SyncClient(dsn)
    async with Client(dsn) as client, Worker(client, workflows=[waits_within]):
        handle = sync_client.start(waits_within)
        with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread"):
            handle.result()
        with pytest.raises(OutsideRun, match=r"client\.start"):
            waits_within().close()
        assert await client.handle(handle.id, waits_within).result(timeout=30) == "rung"
    await asyncio.to_thread(sync_client.close)


async def test_b077_a_run_outlives_the_loop_that_started_it(dsn: str) -> None:
    """Started by `asyncio.run` in a helper thread that returns at once; a worker's loop executes it."""
    started: list[uuid.UUID] = []

    async def start() -> None:
        async with Client(dsn) as client:
            started.append((await client.start(waits_within)).id)

    thread = threading.Thread(target=lambda: asyncio.run(start()))
    thread.start()
    await asyncio.to_thread(thread.join)
    async with Client(dsn) as client, Worker(client, workflows=[waits_within]):
        assert await client.handle(started[0], waits_within).result(timeout=30) == "rung"


# --- many writers of one journal --------------------------------------------------------------------------------------


@workflow
async def writes_a_lot(branches: int, steps: int) -> int:
    async def write(i: int) -> int:
        return sum([len(await step(visit, f"{i}")) for _ in range(steps)])

    return sum(await asyncio.gather(*(write(i) for i in range(branches))))


async def test_b083_gathered_branches_write_one_journal_without_a_collision(dsn: str) -> None:
    """500 entries each of two branches: positions from 1 on, none twice, in the order of delivery."""
    played = await play(dsn, writes_a_lot, 2, 500)

    assert played.first == played.again == 1000
    assert [entry.seq for entry in played.entries] == list(range(1, 1001))
    assert Counter(entry.key.partition("/")[0] for entry in played.entries) == {"1": 500, "2": 500}
    assert [entry.at for entry in played.entries] == sorted(entry.at for entry in played.entries)

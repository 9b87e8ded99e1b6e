"""A body that nobody waits for any more may go on: no other try of its step begins beside it, and its thread is made up for."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tenacity import AsyncRetrying, stop_after_attempt

from replaykit import Client, Handle, Landed, RunFailed, RunHeld, StepInfo, Worker, Workflow, step, workflow
from replaykit.limits import Settings
from replaykit.runtime.threads import BodyThreads
from tests.crash.rows import Rows
from tests.runtime.facts import eventually

pytestmark = pytest.mark.anyio


@dataclass
class World:
    """What the bodies of one run did, and what they wait for."""

    begun: int = 0
    ended: int = 0
    most: int = 0  # that ran at one moment
    told: list[tuple[int, int]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> int:
        """One more; the how many-eth it is."""
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)
        return self.begun

    def end(self) -> None:
        """One has ended."""
        self.ended += 1


WORLDS: defaultdict[str, World] = defaultdict(World)


def world() -> World:
    """Of the run whose body asks."""
    return WORLDS[str(step.current().run_id)]


def hang(first: int) -> int:
    """In a thread: the first ones wait for the gate."""
    here = world()
    number = here.begin()
    if number <= first:
        here.gate.wait(60)
    here.end()
    return number


async def hang_in_finally() -> int:
    """Its first try is cancelled, and takes its time to clean up."""
    here = world()
    number = here.begin()
    try:
        if number == 1:
            await asyncio.Event().wait()
        return number
    finally:
        while number == 1 and not here.gate.is_set():
            await asyncio.sleep(0.001)
        here.end()


async def hang_elsewhere() -> int:
    """Its work is in a thread that goes on when the body is cancelled."""
    return await asyncio.to_thread(hang, 1)


async def fail_once() -> str:
    """As soon as the other body has begun."""
    here = world()
    if not here.told:
        while not here.begun:
            await asyncio.sleep(0.001)
        here.told.append((here.begun, here.ended))
        raise ValueError("once")
    return "mended"


@asynccontextmanager
async def working(dsn: str, flow: Workflow[..., Any], **options: Any) -> AsyncIterator[tuple[Client, Worker]]:
    """A client and a worker."""
    settings = Settings(**options.pop("settings", {}))
    async with Client(dsn) as client, Worker(client, workflows=[flow], settings=settings, **options) as worker:
        yield client, worker


async def fact(look: Any, what: str) -> None:
    """Wait for it without blocking the worker."""
    await asyncio.to_thread(eventually, look, what)


async def fails(handle: Handle[Any]) -> World:
    """Wait until the run has failed; its world."""
    with pytest.raises(RunFailed):
        await handle.result(timeout=30)
    return WORLDS[str(handle.id)]


@workflow
async def timed_out_for_good() -> int:
    """A thread that is too late, without another try."""
    return await step.options(timeout=0.05)(hang, 1)


@workflow
async def cut_short() -> list[Any]:
    """Fails while another body runs, which is then given up."""
    return list(await asyncio.gather(step(hang_in_finally), step(fail_once)))


@workflow
async def cut_short_in_a_thread() -> list[Any]:
    """The same, and the other body is in a thread."""
    return list(await asyncio.gather(step(hang, 1), step(fail_once)))


def waits_again(rows: Rows, handle: Handle[Any]) -> bool:
    """Whether the run is in a worker's memory again, with its retry recorded."""
    asked = "select exists (select from journal where run_id = %s and kind = 'rewind')"
    return rows.ask(asked, handle.id) == [(True,)] and rows.ask("select state from runs") == [("running",)]


@pytest.mark.parametrize(
    "flow", [timed_out_for_good, cut_short, cut_short_in_a_thread], ids=lambda flow: str(flow.name)
)
async def test_a_retried_run_waits_for_what_its_last_life_left_here(
    dsn: str, rows: Rows, flow: Workflow[[], Any]
) -> None:
    """A thread that outlived its time, a thread or a coroutine of a run that failed meanwhile."""
    async with working(dsn, flow) as (client, worker):
        handle = await client.start(flow)
        here = await fails(handle)
        await handle.retry()
        await fact(lambda: waits_again(rows, handle), "the run is here again")
        await fact(lambda: any(e.postponed for e in worker._executors.values()), "its next try is put off")
        assert (here.begun, here.ended, worker.bodies) == (1, 0, 1)
        here.gate.set()
        await handle.result(timeout=30)

    assert (here.begun, here.ended, here.most) == (2, 2, 1)


async def test_a_drain_hands_back_no_run_that_waits_for_what_is_left_here(dsn: str, rows: Rows) -> None:
    """Where the process ends with its worker: elsewhere the step would begin beside it."""
    async with working(dsn, timed_out_for_good, supervised=True) as (client, worker):
        handle = await client.start(timed_out_for_good)
        here = await fails(handle)
        await handle.retry()
        await fact(lambda: any(e.postponed for e in worker._executors.values()), "its next try is put off")
        await worker.stop(0.1)
        assert rows.ask("select state from runs") == [("running",)]
        assert worker.bodies == 1
        here.gate.set()


async def test_a_drain_hands_a_run_back_once_what_was_left_here_has_ended(dsn: str, rows: Rows) -> None:
    """Within the grace period, before anything else of the process ends."""
    async with working(dsn, timed_out_for_good, supervised=True) as (client, worker):
        handle = await client.start(timed_out_for_good)
        here = await fails(handle)
        await handle.retry()
        await fact(lambda: any(e.postponed for e in worker._executors.values()), "its next try is put off")
        stopping = asyncio.create_task(worker.stop(60))
        await fact(lambda: worker.draining, "it drains")
        here.gate.set()
        await stopping

    assert rows.ask("select state from runs") == [("pending",)]
    assert here.begun == 1


@workflow
async def left_in_a_thread() -> int:
    """Is tried again while what its first try began in a thread goes on."""
    return await step.options(timeout=0.05, retry=AsyncRetrying(stop=stop_after_attempt(2)))(hang_elsewhere)


async def test_the_next_try_waits_for_work_that_a_cancelled_body_left_in_a_thread(dsn: str, rows: Rows) -> None:
    """Where the event loop is the worker's own, which then knows whose work its default executor does."""
    async with working(dsn, left_in_a_thread, supervised=True) as (client, worker):
        handle = await client.start(left_in_a_thread)
        passed = "select count(*) = 1 from attempts where next_at < clock_timestamp() - interval '0.2 s'"
        await fact(lambda: rows.ask(passed) == [(True,)], "the next try has been due for a while")
        here = WORLDS[str(handle.id)]
        assert (here.begun, here.ended, worker.bodies) == (1, 0, 1)
        here.gate.set()
        assert await handle.result(timeout=30) == 2

    assert here.most == 1


ASKED: dict[str, tuple[int, int]] = {}


async def count_ended(info: StepInfo) -> Landed[int]:
    """What had begun and ended when it was asked."""
    here = WORLDS[str(info.run_id)]
    ASKED[str(info.run_id)] = here.begun, here.ended
    return Landed(7)


@workflow
async def asked_about() -> int:
    """Its time is up while what it began in a thread goes on."""
    once = step.options(effect="irreversible", timeout=1, reconcile=count_ended)
    return await once(hang_elsewhere)


@workflow
async def in_doubt() -> int:
    """The same, and only a person can be asked."""
    return await step.options(effect="irreversible", timeout=1)(hang_elsewhere)


@pytest.mark.parametrize("flow", [asked_about, in_doubt], ids=lambda flow: str(flow.name))
async def test_nobody_is_asked_about_a_call_while_what_it_began_in_a_thread_goes_on(
    dsn: str, flow: Workflow[[], int]
) -> None:
    """The answer would be out of date when it is given."""
    async with working(dsn, flow, supervised=True) as (client, worker):
        handle = await client.start(flow)
        here = WORLDS[str(handle.id)]
        await fact(lambda: here.begun, "the call was made")
        (executor,) = worker._executors.values()
        await fact(lambda: not executor.bodies, "its time is up")
        assert executor.driver is not None and executor.driver.execution.hold_reason is None
        here.gate.set()
        if flow is asked_about:
            assert await handle.result(timeout=30) == 7
            assert ASKED[str(handle.id)] == (1, 1)
        else:
            with pytest.raises(RunHeld):
                await handle.result(timeout=30)


async def test_in_a_process_of_ones_own_the_default_executor_is_left_alone(dsn: str) -> None:
    """It is not the worker's."""
    loop = asyncio.get_running_loop()
    before = vars(loop)["_default_executor"]
    async with working(dsn, left_in_a_thread):
        assert before is None or vars(loop)["_default_executor"] is before
        assert type(vars(loop)["_default_executor"]).__name__ == "ThreadPoolExecutor"


# --- threads that were left behind ------------------------------------------------------------------------------------


@workflow
async def hangs_then_works() -> int:
    """A thread that is left behind, and a step that needs one."""
    try:
        await step.options(timeout=0.05)(hang, 1)
    except TimeoutError:
        return await step(hang, 1)
    return 0


async def test_a_thread_that_was_left_behind_is_made_up_for(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """The worker has one, and another sync step runs all the same; both changes are told."""
    caplog.set_level("INFO", "replaykit")
    async with working(dsn, hangs_then_works, settings={"threads": 1}) as (client, worker):
        handle = await client.start(hangs_then_works)
        assert await handle.result(timeout=30) == 2
        here = WORLDS[str(handle.id)]
        assert (here.begun, here.ended, worker._shop.threads.left_behind) == (2, 1, 1)
        here.gate.set()
        await fact(lambda: worker._shop.threads.left_behind == 0, "it has come back")

    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("threads_")]
    assert told == [("WARNING", "threads_left_behind threads=1"), ("INFO", "threads_left_behind threads=0")]


def busy(threads: BodyThreads, gate: threading.Event) -> Any:
    """Occupy a thread until the gate is opened; its future, once it runs."""
    work = threads.submit(gate.wait, 60)
    eventually(work.running, "it runs")
    return work


async def test_so_many_are_made_up_for_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond the bound steps wait, which is told; whoever ends makes room."""
    threads, gates = BodyThreads(1, left_behind_max=1), [threading.Event() for _ in range(3)]
    for gate in gates[:2]:
        busy(threads, gate)
        threads.leave_behind()
    waits = threads.submit(threading.get_ident)
    assert [r.getMessage() for r in caplog.records] == [
        "threads_left_behind threads=1",
        "threads_left_behind threads=2",
        "sync_steps_wait threads_left_behind=2 threads=1",
    ]
    assert not waits.running()

    gates[0].set()
    assert waits.result(30) != threading.get_ident()
    threads.take_back()
    last = busy(threads, gates[2])
    assert not threads.submit(threading.get_ident).running()  # one is left behind, one works

    for gate in gates:
        gate.set()
    assert last.result(30)
    threads.take_back()
    assert threads.left_behind == 0


async def test_what_threads_were_given_runs_in_order_or_can_be_cancelled() -> None:
    """As in a ThreadPoolExecutor: errors come out, what waits can be taken back, nothing is taken after the end."""
    threads, gate, seen = BodyThreads(1), threading.Event(), list[int]()
    busy(threads, gate)
    futures = [threads.submit(seen.append, number) for number in range(4)]
    broken = threads.submit(int, "x")
    assert futures[1].cancel()
    gate.set()
    with pytest.raises(ValueError, match="invalid literal"):
        broken.result(30)
    assert seen == [0, 2, 3]

    gate.clear()
    running = busy(threads, gate)
    waiting = threads.submit(seen.append, 9)
    threads.shutdown()
    assert waiting.cancelled()
    assert not running.done()
    gate.set()
    assert running.result(30)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(seen.append, 10)

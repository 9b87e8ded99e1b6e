"""Facts about the loop that a workflow runs on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
from asyncio import events
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from replaykit.replay.calls import sleep, step, workflow
from replaykit.replay.entries import Entry, Kind, Outcome
from replaykit.replay.execution import Execution
from replaykit.replay.loop import RunLoop
from tests.replay.drive import begin, echo, other, replay

ROOT = Path(__file__).resolve().parents[2]

WORKING = {
    *("call_soon", "call_soon_threadsafe", "call_later", "call_at", "time", "create_future", "create_task"),
    *("get_debug", "set_debug", "is_running", "is_closed", "get_task_factory", "get_exception_handler"),
    *("default_exception_handler", "call_exception_handler"),
}
"""What asyncio itself and anyio need; everything else reaches outside."""


# --- what a loop can do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(n for n in dir(asyncio.AbstractEventLoop) if not n.startswith("_")))
def test_every_method_of_a_loop_works_or_says_what_to_do(name: str) -> None:
    """Nothing is left to NotImplementedError, which says nothing."""

    @workflow
    async def calls() -> str:
        loop = asyncio.get_running_loop()
        method = getattr(loop, name)
        if name in WORKING:
            return "works"
        required = list(inspect.signature(getattr(asyncio.AbstractEventLoop, name)).parameters.values())
        arguments = [None for p in required[1:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        try:
            found = method(*arguments)
            if inspect.isawaitable(found):
                await found
        except RuntimeError as error:
            return str(error)
        return "did something"

    said = begin(calls).result

    if name in WORKING:
        assert said == "works"
    else:
        assert said == f"loop.{name}() reaches outside the run and would not replay: do this in a step"


def test_libraries_can_ask_the_loop_how_it_is() -> None:
    """asyncio and anyio ask these before they do anything."""

    @workflow
    async def asks() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_debug(False)
        return [
            loop.get_debug(),
            loop.is_running(),
            loop.is_closed(),
            loop.get_task_factory(),
            loop.get_exception_handler(),
        ]

    assert begin(asks).result == [False, True, False, None, None]


@pytest.mark.parametrize("reach", ["to_thread", "executor", "run", "connect"])
def test_a_way_out_of_the_run_says_do_this_in_a_step(reach: str) -> None:
    """Threads, other loops and sockets would not replay."""

    @workflow
    async def reaches() -> str:
        coroutine = echo(1)
        try:
            if reach == "to_thread":
                await asyncio.to_thread(time.sleep, 0)
            elif reach == "executor":
                await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0)
            elif reach == "connect":
                await asyncio.open_connection("localhost", 1)
            else:
                asyncio.run(coroutine)
        except RuntimeError as error:
            return str(error)
        finally:
            coroutine.close()
        return "out"

    said = begin(reaches).result

    assert "do this in a step" in said or "from a running event loop" in said


def test_a_call_from_a_foreign_thread_holds_the_run() -> None:
    """It names what was called, and tells the executor, which may be asleep."""
    told = threading.Event()

    def from_outside() -> None:
        raise AssertionError("never called")

    @workflow
    async def leaks() -> None:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(from_outside))
        thread.start()
        thread.join()
        await step(echo, 1)

    live = begin(leaks, on_outside=told.set)

    assert told.is_set()
    assert "from_outside ran outside a step" in live.reason
    assert live.open == []


def test_a_thread_of_anyio_holds_the_run() -> None:
    """`anyio.to_thread` starts threads of its own: by then nothing the run knows of can end its wait."""

    @workflow
    async def leaks() -> int:
        return await anyio.to_thread.run_sync(lambda: 1)

    live = begin(leaks)
    try:
        assert "run_sync" in live.reason or "ran outside a step" in live.reason
    finally:
        live.execution.leave()
        for thread in threading.enumerate():
            if thread.name.startswith("AnyIO worker"):
                thread.stop()  # type: ignore[attr-defined]  # it would wait for the run, and the process for it


def test_a_lock_of_another_run_says_so() -> None:
    """Objects of asyncio bind to the loop that first waits on them."""
    lock = asyncio.Lock()

    @workflow
    async def shares(n: int) -> int:
        async with lock:
            return await step(echo, n)

    one, two = begin(shares, 1), begin(shares, 2)
    one.answer("echo", 1)

    assert "nothing can ever resolve" in two.reason
    with pytest.raises(RuntimeError, match="belongs to another run"):
        _ = one.result


def test_an_event_that_another_run_waits_for_says_so() -> None:
    """`set()` would wake a task of another run, at a moment that no journal knows."""
    event = asyncio.Event()

    @workflow
    async def waits() -> None:
        async with asyncio.timeout(60):
            await event.wait()

    @workflow
    async def sets() -> str:
        try:
            event.set()
        except RuntimeError as error:
            return str(error)
        return "set"

    waiting = begin(waits)

    assert "belongs to another run" in begin(sets).result
    assert waiting.execution.ended is None


# --- turning ----------------------------------------------------------------------------------------------------------


def test_a_spin_is_held_with_its_stack() -> None:
    """A `sleep(0)` loop would stop the whole worker."""

    @workflow
    async def spins() -> None:
        waiting = asyncio.create_task(wait_for_it())
        while not waiting.done():
            await asyncio.sleep(0)

    async def wait_for_it() -> int:
        return await step(echo, 1)

    live = begin(spins, drain_callbacks_max=1_000)

    assert "1,000 callbacks without waiting" in live.reason
    assert f"{__file__}:" in live.reason and "in spins" in live.reason


def test_many_callbacks_below_the_limit_are_fine() -> None:
    """The limit is for each drain, not for the run."""

    @workflow
    async def turns() -> int:
        for n in range(5):
            for _ in range(200):
                await asyncio.sleep(0)
            await step(echo, n)
        return 5

    assert begin(turns, drain_callbacks_max=500).finish() == 5


@pytest.mark.parametrize(
    ("end", "where"),
    [
        (end, where)
        for end in (SystemExit(3), KeyboardInterrupt(), GeneratorExit())
        for where in ("root", "task", "callback")
        if not (isinstance(end, GeneratorExit) and where == "task")  # asyncio keeps it as that task's error
    ],
)
def test_what_ends_programs_ends_the_run_alone(end: BaseException, where: str) -> None:
    """SystemExit, KeyboardInterrupt and GeneratorExit of user code fail the run, not the process."""

    def out(_: Any = None) -> None:
        raise end

    async def task() -> None:
        out()

    @workflow
    async def ends() -> int:
        n = await step(echo, 1)
        if where == "root":
            out()
        elif where == "callback":
            asyncio.get_running_loop().call_soon(out)
        else:
            asyncio.create_task(task())
        return n + await step(echo, 2)

    live = begin(ends)
    live.answer("echo", 1)

    ended = live.execution.ended
    assert ended is not None and ended.error is not None
    assert type(end).__name__ in ended.error


def test_the_host_gets_its_loop_and_hooks_back() -> None:
    """A drain happens inside a callback of the worker's own loop."""

    @workflow
    async def looks() -> bool:
        return isinstance(asyncio.get_running_loop(), RunLoop)

    async def host() -> tuple[Any, Any]:
        before = (events._get_running_loop(), sys.get_asyncgen_hooks())
        assert await in_callback(lambda: begin(looks).result) is True
        return before, (events._get_running_loop(), sys.get_asyncgen_hooks())

    before, after = asyncio.run(host())

    assert before == after


async def in_callback(function: Callable[[], Any]) -> Any:
    """Call it from a plain callback of the host's loop, outside of all tasks."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(lambda: future.set_result(function()))
    return await future


def test_many_runs_take_turns_on_one_host_loop() -> None:
    """Each sees its own loop and its own current task, whoever ran before."""

    @workflow
    async def mine(n: int) -> int:
        me, loop = asyncio.current_task(), asyncio.get_running_loop()

        async def branch(i: int) -> int:
            task = asyncio.current_task()
            value = await step(echo, n * 10 + i)
            assert asyncio.current_task() is task and asyncio.get_running_loop() is loop
            return value

        values = await asyncio.gather(*(branch(i) for i in range(3)))
        assert asyncio.current_task() is me
        return sum(values)

    async def host() -> list[int]:
        lives = [await in_callback(partial(begin, mine, n)) for n in range(20)]
        for i in range(3):
            for n, live in enumerate(lives):
                await in_callback(partial(live.answer, live.open[0], n * 10 + i))
        return [live.result for live in lives]

    assert asyncio.run(host()) == [n * 30 + 3 for n in range(20)]


visitor: contextvars.ContextVar[str] = contextvars.ContextVar("visitor", default="nobody")


def test_a_run_begins_in_an_empty_context() -> None:
    """What the worker, or another run, has set does not leak in, nor out."""

    @workflow
    async def sees() -> list[str]:
        seen = [visitor.get()]
        visitor.set("run")

        async def task() -> str:
            mine = visitor.get()
            visitor.set("task")
            await step(echo, 1)
            return mine + visitor.get()

        seen.append(await asyncio.create_task(task()))
        return [*seen, visitor.get()]

    visitor.set("worker")
    try:
        assert begin(sees).finish() == ["nobody", "runtask", "run"]
        assert visitor.get() == "worker"
    finally:
        visitor.set("nobody")


def test_a_step_is_given_its_callers_context() -> None:
    """Bodies run in a copy of the calling task's context."""

    @workflow
    async def calls() -> None:
        async def task(name: str) -> None:
            visitor.set(name)
            await step(echo, 1)

        await asyncio.gather(task("a"), task("b"))

    live = begin(calls)
    contexts = [call.context for call in live.execution.open.values()]

    assert [c[visitor] for c in contexts if c is not None] == ["a", "b"]


def test_a_task_nobody_refers_to_is_not_collected() -> None:
    """The loop keeps it: else its `finally` would run at a moment of the collector's."""
    log: list[str] = []

    async def orphan() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            log.append(type(events._get_running_loop()).__name__)

    @workflow
    async def leaves() -> int:
        asyncio.create_task(orphan())
        return await step(echo, 1) + await step(echo, 2)

    live = begin(leaves)
    gc.collect()

    assert log == []
    assert live.finish() == 3
    assert log == ["RunLoop"]


# --- order ------------------------------------------------------------------------------------------------------------

SETS = """
import asyncio, sys
sys.path.insert(0, ".")
from replaykit.replay.calls import step, workflow
from tests.replay.drive import begin, echo

async def branch(n: int) -> int:
    return n

@workflow
async def sets() -> list[list[int]]:
    tasks = [asyncio.create_task(branch(i)) for i in range(40)]
    futures = [asyncio.get_running_loop().create_future() for _ in range(40)]
    calls = [step(echo, i) for i in range(40)]
    done, _ = await asyncio.wait(tasks)
    for future in futures:
        future.set_result(None)
    ready, _ = await asyncio.wait(futures)
    orders = [[tasks.index(t) for t in done], [futures.index(f) for f in ready], [calls.index(c) for c in set(calls)]]
    for call in calls:
        await call
    return orders

orders = begin(sets).finish()
assert any(order != sorted(order) for order in orders)
print(orders)
"""


def test_sets_of_tasks_futures_and_calls_iterate_alike_in_every_process() -> None:
    """Their hash comes from the run's seed and their number, never from an address."""
    printed = [run_script(SETS, PYTHONHASHSEED=seed) for seed in ("1", "2")]

    assert printed[0] == printed[1]


def run_script(source: str, **environment: str) -> str:
    """Run Python text in a fresh process; what it prints."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_hashes_of_many_runs_do_not_cluster() -> None:
    """Plain numbers are quadratic in asyncio's global set of tasks, where the runs of a process meet."""

    @workflow
    async def hashes() -> list[int]:
        tasks = [asyncio.create_task(echo(n)) for n in range(100)]
        await asyncio.wait(tasks)
        return [hash(t) for t in tasks]

    seen = [h for seed in range(20) for h in begin(hashes, seed=seed).result]

    assert len(set(seen)) == 2_000
    assert len({h & 0xFFFF for h in seen}) > 1_800


def test_as_completed_over_bare_coroutines_is_refused() -> None:
    """It puts them in a set before it makes tasks of them: their keys would change hands."""

    async def branch(n: int) -> int:
        return await step(echo, n)

    many = [branch(i) for i in range(3)]

    @workflow
    async def races() -> list[int]:
        return [await one for one in asyncio.as_completed(many)]

    with pytest.raises(TypeError, match="create_task"):
        _ = begin(races).result
    for one in many:
        one.close()


@pytest.mark.parametrize("of", ["tasks", "calls"])
def test_as_completed_over_tasks_and_step_calls_has_an_order(of: str) -> None:
    """The order in which they complete, the same in the replay."""

    @workflow
    async def races() -> list[int]:
        many: list[Any] = [step(echo, i) for i in range(4)]
        if of == "tasks":
            many = [asyncio.create_task(branch(call)) for call in many]
        return [await one for one in asyncio.as_completed(many)]

    async def branch(call: Any) -> int:
        n: int = await call
        return n

    live = begin(races)
    for key in ("echo#3", "echo", "echo#4", "echo#2"):
        live.answer(key, int(key[-1]) if "#" in key else 1)

    assert live.result == [3, 1, 4, 2]
    assert replay(races, live.journal).result == [3, 1, 4, 2]


def test_wait_over_gather_futures_is_refused() -> None:
    """`gather(...)` makes futures of asyncio's own class, which hash by address."""

    @workflow
    async def waits() -> None:
        await asyncio.wait([asyncio.gather(step(echo, 1)), asyncio.gather(step(echo, 2))])

    with pytest.raises(TypeError, match="no fixed order"):
        _ = begin(waits).result


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.1, 1 / 3, 0.000001, 0.0000001, 1.1, 86_400.7])
def test_a_timer_is_never_early(seconds: float) -> None:
    """Due times are whole microseconds, rounded up: anyio would loop for ever over one that came a little early."""

    @workflow
    async def waits() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        when = loop.time() + seconds
        loop.call_at(when, lambda: woken.set_result(loop.time()))
        return when, await woken

    live = begin(waits, started_at=1_790_000_000_123_457)
    live.fire()
    when, fired = live.result

    assert when <= fired <= when + 0.000002


def test_anyio_sleeps_exactly_once() -> None:
    """A deadline of anyio's is over when its timer fires."""

    @workflow
    async def waits() -> bool:
        with anyio.move_on_after(1 / 3) as scope:
            await anyio.sleep(10)
        return scope.cancelled_caught

    live = begin(waits)
    live.fire()

    assert live.result is True


def test_timers_of_one_deadline_fire_by_creation() -> None:
    """Ties are broken by what the code did, not by the heap."""

    @workflow
    async def waits() -> list[int]:
        order: list[int] = []

        async def nap(n: int) -> None:
            await asyncio.sleep(5)
            order.append(n)

        await asyncio.gather(*(nap(n) for n in range(8)))
        return order

    live = begin(waits)
    assert live.finish() == list(range(8))
    assert [e.due_at for e in live.journal] == [5_000_000] * 8


def test_a_cancelled_timer_fires_nothing() -> None:
    """It leaves no entry, and does not keep the run waiting."""

    @workflow
    async def waits() -> int:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(n + 1, lambda: 1 / 0) for n in range(200)]
        for handle in handles:
            handle.cancel()
        async with asyncio.timeout(5):
            return await step(echo, 1)

    live = begin(waits)

    assert live.execution.next_deadline == 5_000_000
    live.answer("echo", 1)
    assert live.result == 1
    assert live.execution.next_deadline is None


def test_a_timer_of_no_number_or_of_no_end() -> None:
    """NaN is an error, infinity is never."""

    @workflow
    async def waits() -> str:
        said = ""
        try:
            asyncio.get_running_loop().call_later(float("nan"), print)
        except ValueError as error:
            said = str(error)
        async with asyncio.timeout(float("inf")):
            await step(echo, 1)
        return said

    live = begin(waits)

    assert live.execution.next_deadline is None
    live.answer("echo", 1)
    assert "nan" in live.result


def test_the_clock_moves_with_entries_alone() -> None:
    """`loop.time()` is one value for all tasks until the next entry."""

    @workflow
    async def looks() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await step(echo, 1)
        times += [loop.time(), loop.time()]
        await sleep(10)
        return [*times, loop.time()]

    live = begin(looks, started_at=7_000_000)
    live.answer("echo", 1, at=9_500_000)
    live.fire()

    assert live.result == [0.0, 2.5, 2.5, 12.5]


# --- wait_for ---------------------------------------------------------------------------------------------------------


def test_wait_for_is_the_one_of_3_12() -> None:
    """It makes no task: keys inside are the caller's, and a result comes in the same turn."""

    async def two(n: int) -> int:
        return await step(echo, n) + await step(echo, n + 1)

    @workflow
    async def waits() -> int:
        total = await asyncio.wait_for(two(1), 10)
        total += sum(await asyncio.gather(asyncio.wait_for(two(3), 10), two(5)))
        return total

    live = begin(waits)
    assert live.finish() == 21
    assert live.asked == ["echo", "echo#2", "1/echo", "2/echo", "1/echo#2", "2/echo#2"]


@pytest.mark.parametrize("timeout", [0, -1])
def test_wait_for_of_no_time_gives_up_at_once(timeout: float) -> None:
    """As in 3.12, what it was given is begun and cancelled."""

    @workflow
    async def waits() -> str:
        try:
            await asyncio.wait_for(step(echo, 1), timeout)
        except TimeoutError:
            return "late"
        return "in time"

    live = begin(waits)

    assert live.result == "late"
    assert live.execution.next_deadline is None


def test_wait_for_gives_up_what_it_was_given() -> None:
    """And raises TimeoutError; the step's request is given up with it."""

    @workflow
    async def waits() -> str:
        try:
            await asyncio.wait_for(step(echo, 1), 5)
        except TimeoutError as error:
            return repr(error)
        return "in time"

    live = begin(waits)
    live.fire()

    assert live.result == "TimeoutError()"
    assert live.asked == ["echo", "-echo"]


def test_a_wait_for_bound_before_the_import_is_covered() -> None:
    """`from asyncio import wait_for` in a module that was imported first; outside of runs it is asyncio's own."""
    printed = run_script("""
        from asyncio import wait_for
        import asyncio, sys
        sys.path.insert(0, ".")
        from replaykit.replay.calls import step, workflow
        from tests.replay.drive import begin, echo

        async def two(n: int) -> int:
            return await step(echo, n) + await step(echo, n)

        @workflow
        async def waits() -> int:
            return await wait_for(two(1), 10)

        live = begin(waits)
        live.finish()
        print(live.asked, wait_for is asyncio.wait_for)

        async def outside() -> str:
            try:
                await wait_for(asyncio.sleep(10), 0.001)
            except asyncio.TimeoutError:
                return await wait_for(asyncio.sleep(0, "works"), None)

        print(asyncio.run(outside()))
    """)

    assert printed.splitlines() == ["['echo', 'echo#2'] True", "works"]


def test_an_exception_of_a_callback_is_kept_for_the_log() -> None:
    """It ends neither the run nor the worker, as on any loop."""

    @workflow
    async def calls() -> int:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        return await step(echo, 1)

    live = begin(calls)

    assert live.finish() == 1
    assert [type(p["exception"]).__name__ for p in live.execution.loop.problems] == ["ZeroDivisionError"]


def test_an_execution_is_known_by_its_loop() -> None:
    """The loop points to its execution, for `step` and its like."""

    @workflow
    async def looks() -> bool:
        loop = asyncio.get_running_loop()
        return isinstance(loop, RunLoop) and isinstance(loop.execution, Execution)

    assert begin(looks).result is True


def test_all_tasks_iterates_in_the_order_of_creation_whoever_else_runs() -> None:
    """asyncio keeps the tasks of all loops in one set: what other runs do must not decide an order in this one."""

    @workflow
    async def lists() -> list[str]:
        async def waits(n: int) -> int:
            return await step(echo, n)

        tasks = [asyncio.create_task(waits(n), name=f"t{n}") for n in range(40)]
        names = [t.get_name() for t in asyncio.all_tasks()]
        for t in tasks:
            t.cancel()
        return names

    def names() -> str:
        live = begin(lists)
        assert live.execution.ended is not None
        assert live.execution.ended.output is not None
        return live.execution.ended.output

    alone = names()
    others = [begin(lists) for _ in range(50)]
    among_others = names()

    assert others
    assert alone == among_others


def test_a_cancel_that_meets_a_failing_task_group_is_not_lost() -> None:
    """As in 3.13, in every Python: the group's error is caught, then the cancel arrives."""
    seen: list[str] = []

    async def fails() -> None:
        await step(echo, 1)
        raise ValueError("member")

    async def tidies() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await step(other, 2)

    @workflow
    async def groups() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
                group.create_task(tidies())
        except* ValueError:
            seen.append("caught")
        await step(echo, 3)
        return "went on"

    live = begin(groups)
    live.answer("1/echo", 1)
    live.deliver(Entry(2, "~cancel", "cancel", Kind.CANCEL, Outcome.OK, 0))
    live.answer("2/other", 2)

    ended = live.execution.ended
    assert seen == ["caught"]
    assert ended is not None
    assert ended.cancelled


@pytest.mark.parametrize("members", [1, 3])
def test_a_failed_task_group_leaves_no_count_of_cancels_behind(members: int) -> None:
    """`Task.cancelling()` is what it was before (scenario B071)."""

    async def fails() -> None:
        await step(echo, 1)
        raise ValueError("member")

    @workflow
    async def groups() -> int:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for _ in range(members):
                    group.create_task(fails())
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert begin(groups).finish(lambda call: 1) == 0


def test_a_wait_for_without_time_takes_as_many_turns_as_in_later_pythons() -> None:
    """What another task does in between is seen by the code."""
    beats: list[int] = []

    @workflow
    async def counted() -> int:
        async def beat() -> None:
            while True:
                beats.append(1)
                await asyncio.sleep(0)

        async def never() -> None:
            await asyncio.Event().wait()

        other_task = asyncio.create_task(beat())
        await asyncio.sleep(0)
        before = len(beats)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never(), 0)
        turns = len(beats) - before
        other_task.cancel()
        return turns

    assert begin(counted).finish() == 3

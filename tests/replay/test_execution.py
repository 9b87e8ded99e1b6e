"""Facts about one execution: keys, values, divergence, states, the end of the function, leaving memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import uuid
import weakref
from asyncio import events
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anyio
import pytest

from replaykit.errors import ConfigurationError, Gone, NotJournalable, StepFailed
from replaykit.replay import execution as execution_module
from replaykit.replay.calls import now, rng, sleep, step, uuid4, workflow
from replaykit.replay.entries import Entry, Outcome
from tests.replay.drive import Live, begin, echo, other, replay, step_entry

HERE = __file__


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_are_name_and_count_in_the_tasks_scope() -> None:
    """`name`, `name#2` in the root; `1/`, `1.1/` in tasks and the tasks they make."""

    @workflow
    async def keys() -> None:
        async def inner() -> None:
            await asyncio.gather(step(echo, 1), deeper())

        async def deeper() -> None:
            await step(echo, 2)

        await asyncio.gather(step(echo, 0), step(echo, 0), step(other, 0))
        await asyncio.create_task(inner())

    live = begin(keys)
    live.finish()

    assert live.asked == ["echo", "echo#2", "other", "1/echo", "1.1/echo"]


def test_a_key_is_taken_at_the_call_not_at_the_await() -> None:
    """A call made here and awaited in a task has this scope's key."""

    @workflow
    async def keys() -> None:
        first, second = step(echo, 1), step(echo, 2)

        async def later() -> None:
            await second

        task = asyncio.create_task(later())
        await step(echo, 3)
        await first
        await task

    live = begin(keys)
    live.finish()

    assert sorted(live.asked) == ["echo", "echo#2", "echo#3"]


def test_tasks_that_call_no_step_take_no_number() -> None:
    """So that a library's helper tasks, or a release of it with more of them, change no key."""

    async def helper() -> None:
        await asyncio.sleep(5)

    async def branch() -> None:
        await asyncio.sleep(0)
        await step(echo, 1)

    @workflow
    async def keys(helpers: int) -> None:
        tasks = [asyncio.create_task(helper()) for _ in range(helpers)]
        tasks.append(asyncio.create_task(branch()))
        await asyncio.gather(*tasks)

    assert begin(keys, 0).asked == begin(keys, 3).asked == ["1/echo"]


def test_a_task_is_numbered_when_one_below_it_first_needs_a_key() -> None:
    """`rng()` and `uuid4()` count as well."""

    @workflow
    async def keys() -> None:
        async def through() -> None:
            await asyncio.create_task(below())

        async def below() -> None:
            await step(echo, 1)

        async def throws() -> None:
            rng()
            await step(echo, 2)

        await asyncio.gather(through(), throws())

    assert begin(keys).asked == ["1/echo", "2.1/echo"]


def test_tasks_of_callbacks_have_a_scope_of_their_own() -> None:
    """`@1/`, `@2/`: a callback belongs to no task."""

    @workflow
    async def keys() -> None:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Task[int]] = []

        async def branch() -> int:
            return await step(echo, 1)

        loop.call_soon(lambda: made.append(loop.create_task(branch())))
        task = loop.create_task(branch())
        task.add_done_callback(lambda _: made.append(asyncio.ensure_future(branch(), loop=loop)))
        await task
        await asyncio.sleep(0)
        await asyncio.gather(*made)

    live = begin(keys)
    live.finish()

    assert live.asked == ["1/echo", "@1/echo", "@2/echo"]


def test_an_absolute_key_stands_alone() -> None:
    """`key=K` is stored as `=K`, whatever task calls it."""

    @workflow
    async def keys() -> None:
        async def branch(k: str) -> None:
            await step.options(key=k)(echo, 1)

        await asyncio.gather(branch("a"), branch("a/b"))

    assert begin(keys).asked == ["=a", "=a/b"]


def test_an_absolute_key_used_twice_holds_the_run() -> None:
    """The reason names the key and the line of the second call."""

    @workflow
    async def keys() -> None:
        await step.options(key="once")(echo, 1)
        await step.options(key="once")(echo, 2)

    live = begin(keys)
    live.answer("=once", 1)

    assert "key='once' is used twice" in live.reason
    assert f"{HERE}:" in live.reason


def test_names_come_from_the_function_the_policy_or_the_call() -> None:
    """The call's `name=` wins over the declared one, which wins over the function's own."""

    class Shop:
        @staticmethod
        async def charge(n: int) -> int:
            return n

    @step.policy(name="declared")
    async def named(n: int) -> int:
        return n

    @workflow
    async def keys() -> None:
        await asyncio.gather(step(named, 1), step.options(name="called")(named, 1), step(Shop.charge, 1))

    assert begin(keys).asked == ["declared", "called", "Shop.charge"]


def test_a_lambda_needs_a_name() -> None:
    """It has none of its own that a journal could hold."""

    @workflow
    async def keys() -> None:
        await step(lambda: 1)

    with pytest.raises(ConfigurationError, match="name="):
        _ = begin(keys).result


# --- values -----------------------------------------------------------------------------------------------------------


def test_now_rng_and_uuid4_are_the_same_in_every_replay() -> None:
    """By the run's seed, the task's scope and a count in it."""

    @workflow
    async def values() -> list[str]:
        async def branch() -> list[str]:
            return [str(uuid4()), str(rng().random())]

        seen = [now().isoformat(), str(uuid4()), str(uuid4()), str(rng().random()), str(rng().random())]
        for more in await asyncio.gather(branch(), branch()):
            seen += more
        await step(echo, 1)
        return [*seen, now().isoformat()]

    one, two, another = begin(values), begin(values), begin(values, seed=2)
    for live in (one, two, another):
        live.answer("echo", 1, at=1_500_000)

    assert one.result == two.result
    assert len(set(one.result)) == len(one.result)
    assert not set(one.result[1:-1]) & set(another.result[1:-1])
    assert one.result[0] == "1970-01-01T00:00:00+00:00"
    assert one.result[-1] == "1970-01-01T00:00:01.500000+00:00"
    assert uuid.UUID(one.result[1]).version == 4


def test_the_clock_before_the_first_entry_is_the_first_claim() -> None:
    """A run that sat in the queue for hours has not lost that time."""

    @workflow
    async def waits() -> int:
        async with asyncio.timeout(60):
            return await step(echo, 1)

    assert begin(waits, started_at=7_200_000_000).execution.next_deadline == 7_260_000_000


def test_the_first_run_sees_what_a_replay_will_see() -> None:
    """Errors are rebuilt for it too: what ends programs and tasks comes as StepFailed."""

    @workflow
    async def sees() -> list[str]:
        seen = []
        for _ in range(4):
            try:
                await step(echo, 1)
            except Exception as error:
                seen.append(type(error).__name__)
        return seen

    live = begin(sees)
    errors: list[BaseException] = [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), ValueError("x")]
    for key, error in zip(("echo", "echo#2", "echo#3", "echo#4"), errors, strict=True):
        live.answer(key, raising=error)

    assert live.result == ["StepFailed", "StepFailed", "StepFailed", "ValueError"]
    assert replay(sees, live.journal).result == live.result


def test_a_result_that_cannot_be_journaled_fails_the_run() -> None:
    """Loud, with the path."""

    @workflow
    async def returns() -> Any:
        return {"rows": [object()]}

    with pytest.raises(NotJournalable, match=r"\$\.rows\[0\]"):
        _ = begin(returns).result


def test_the_order_of_delivery_decides_every_race() -> None:
    """Whatever completes first in the journal wins, again."""

    @workflow
    async def races() -> list[int]:
        tasks = [asyncio.create_task(branch(n)) for n in range(3)]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winners = [tasks.index(t) for t in done]
        for t in left:
            t.cancel()
        return winners + [n for n, t in enumerate(tasks) if t.cancelled()]

    async def branch(n: int) -> int:
        return await step(echo, n)

    for first in ("1/echo", "2/echo", "3/echo"):
        live = begin(races)
        live.answer(first, 0)
        assert live.result[0] == int(first[0]) - 1 or not live.result
        assert replay(races, live.journal).result == live.result


# --- divergence -------------------------------------------------------------------------------------------------------


@workflow
async def two_steps() -> int:
    return await step(echo, 1) + await step(other, 2)


def recorded() -> list[Entry]:
    """The journal of `two_steps`."""
    live = begin(two_steps)
    live.finish()
    return live.journal


def reason(workflow_: Any, journal: list[Entry]) -> str:
    """Why a replay of `journal` by changed code is held."""
    return replay(workflow_, journal).reason


def test_a_step_that_the_code_no_longer_asks_for_holds_the_run() -> None:
    """The reason says what the journal holds and what the code asks for, with its line."""

    @workflow
    async def renamed() -> int:
        return await step(other, 1)

    said = reason(renamed, recorded())

    assert said.startswith("entry 1: the journal holds step echo, the code asks for other at ")
    assert f"{HERE}:" in said


def test_a_shorter_function_holds_the_run() -> None:
    """The code ended before its journal did."""

    @workflow
    async def shorter() -> int:
        return await step(echo, 1)

    assert reason(shorter, recorded()) == "entry 2: the journal holds step other, the code has ended"


def test_a_step_put_between_holds_the_run() -> None:
    """The code asks for the new step where the journal goes on with the old one."""

    @workflow
    async def longer() -> int:
        return await step(echo, 1) + await step(echo, 9) + await step(other, 2)

    said = reason(longer, recorded())

    assert "entry 2: the journal holds step other, the code asks for echo#2 at" in said


def test_a_step_added_at_the_end_is_no_divergence() -> None:
    """It is what comes next."""

    @workflow
    async def longer() -> int:
        return await step(echo, 1) + await step(other, 2) + await step(echo, 3)

    assert replay(longer, recorded()).open == ["echo#2"]


def test_another_function_under_the_same_key_holds_the_run() -> None:
    """A key of the author's own does not hide that another step is meant."""

    @workflow
    async def before() -> int:
        return await step.options(key="it")(echo, 1)

    @workflow
    async def after() -> int:
        return await step.options(key="it")(other, 1)

    live = begin(before)
    live.finish()
    said = reason(after, live.journal)

    assert said.startswith("step =it: the journal holds a call of echo, the code now calls other at ")


def test_another_input_holds_the_run_and_shows_both() -> None:
    """What was recorded, and what the code now asks with."""

    @workflow
    async def changed() -> int:
        return await step(echo, 7) + await step(other, 2)

    said = reason(changed, recorded())

    assert 'step echo: the journal holds it with input {"n":1}, the code now calls it with {"n":7} at ' in said


def test_a_parameter_added_with_its_default_is_no_divergence() -> None:
    """Inputs whose digests differ are compared as values, by today's annotations."""

    async def echo(n: int, unit: str = "EUR") -> int:
        return n

    @workflow
    async def newer() -> int:
        return await step(echo, 1, "EUR") + await step(other, 2)

    assert replay(newer, recorded()).result == 3


def test_a_result_that_no_longer_fits_its_annotation_holds_the_run() -> None:
    """Named with the result."""

    async def echo(n: int) -> list[str]:
        return []

    @workflow
    async def changed() -> Any:
        return [await step(echo, 1), await step(other, 2)]

    said = reason(changed, recorded())

    assert "step echo: its recorded result 1 does not fit the annotation of echo any more" in said


def test_a_timer_that_the_code_does_not_have_holds_the_run() -> None:
    """Both deadlines stand in the reason."""

    @workflow
    async def before() -> None:
        await sleep(5)

    @workflow
    async def after() -> None:
        await sleep(6)

    live = begin(before)
    live.fire()
    said = reason(after, live.journal)

    assert "the journal holds a timer due 1970-01-01T00:00:05+00:00" in said
    assert "its earliest timer is due 1970-01-01T00:00:06+00:00" in said


def test_an_entry_of_a_later_release_holds_the_run() -> None:
    """An unknown kind is not skipped."""
    said = reason(two_steps, [Entry(1, "~mark:x", "x", "mark", Outcome.OK, 0)])

    assert "of kind mark, which this release does not know" in said


def test_an_entry_of_a_call_that_was_given_up_reaches_nobody() -> None:
    """A body's outcome may come after its request was given up: it moves the clock."""

    @workflow
    async def gives_up() -> list[str]:
        try:
            async with asyncio.timeout(1):
                await step(echo, 1)
        except TimeoutError:
            pass
        await step(other, 2)
        return [now().isoformat()]

    live = begin(gives_up)
    live.fire()
    live.answer("echo", 1, at=9_000_000)
    live.answer("other", 2)

    assert live.result == ["1970-01-01T00:00:09+00:00"]
    assert replay(gives_up, live.journal).result == live.result


# --- states, not exceptions -------------------------------------------------------------------------------------------


async def _drops(n: int) -> int:
    step(echo, n)
    return n


@pytest.mark.parametrize("net", ["gather", "group", "suppress", "wait", "bare"])
def test_no_net_of_the_author_catches_a_hold(net: str) -> None:
    """A hold is a state of the execution: as an exception these would eat it, and a diverged run would succeed."""

    @workflow
    async def catches() -> str:
        if net == "gather":
            await asyncio.gather(_drops(1), step(other, 1), return_exceptions=True)
        elif net == "group":
            with contextlib.suppress(BaseExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_drops(1))
        elif net == "suppress":
            with contextlib.suppress(BaseException):
                await _drops(1)
        elif net == "wait":
            await asyncio.wait([asyncio.create_task(_drops(1))])
        else:
            try:
                await _drops(1)
            except:  # noqa: E722
                await step(echo, 9)
        await step(other, 2)
        return "succeeded"

    live = begin(catches)

    assert "never awaited" in live.reason
    assert live.execution.ended is None


def test_a_divergence_stops_the_drain_at_once() -> None:
    """Nothing of the run goes on after it, and no command comes out."""
    live = replay(two_steps, [step_entry(1, "gone", "gone", "1")])
    asked = list(live.asked)

    assert "the journal holds step gone" in live.reason
    assert live.execution.deliver(step_entry(2, "echo", "echo", "1")) == []
    assert live.asked == asked
    assert live.execution.ended is None


def test_a_dropped_step_holds_with_its_line() -> None:
    """`step(...)` without await would silently not run."""

    @workflow
    async def drops() -> None:
        step(echo, 1)
        await step(other, 1)

    line = drops.fn.__code__.co_firstlineno + 2

    assert begin(drops).reason == f"step echo was called at {HERE}:{line} and never awaited: write `await step(...)`"


def test_a_run_that_nothing_can_wake_is_held_with_its_stack() -> None:
    """An Event that nobody sets, with no timer and no step left."""

    @workflow
    async def stuck() -> None:
        await step(echo, 1)
        await inner(asyncio.Event())

    async def inner(event: asyncio.Event) -> None:
        await event.wait()

    live = begin(stuck)
    live.answer("echo", 1)

    assert "nothing can ever resolve" in live.reason
    assert "in inner" in live.reason and "in stuck" in live.reason
    assert f"{HERE}:" in live.reason


def test_two_tasks_that_wait_for_each_other_are_held() -> None:
    """Both stacks stand in the reason."""

    @workflow
    async def stuck() -> None:
        one, two = asyncio.Event(), asyncio.Event()

        async def left() -> None:
            await one.wait()
            two.set()

        async def right() -> None:
            await two.wait()
            one.set()

        await asyncio.gather(left(), right())

    live = begin(stuck)

    assert "in left" in live.reason and "in right" in live.reason


# --- the end of the function ------------------------------------------------------------------------------------------


def test_tasks_left_behind_are_cancelled_and_awaited() -> None:
    """Their `finally` may run steps, which belong to the run."""
    log: list[str] = []

    async def left() -> None:
        try:
            await sleep(86_400)
        finally:
            log.append(f"cleaned {await step(echo, 2)}")

    @workflow
    async def ends() -> int:
        asyncio.create_task(left())
        return await step(echo, 1)

    live = begin(ends)
    live.answer("echo", 1)
    assert live.execution.ended is None

    live.answer("1/echo", 2)
    assert live.result == 1
    assert log == ["cleaned 2"]
    assert replay(ends, live.journal).result == 1


def test_generators_left_by_break_are_closed_in_order_of_first_use() -> None:
    """At the function's end and not by the collector; their `finally` may run steps."""
    log: list[str] = []

    async def pages(name: str) -> AsyncGenerator[int, None]:
        try:
            for n in range(3):
                yield await step(echo, n)
        finally:
            log.append(f"{name} {await step(other, 9)}")

    @workflow
    async def ends() -> int:
        second = pages("second")
        async for _ in pages("first"):
            break
        async for _ in second:
            break
        gc.collect()
        return await step(echo, 5)

    live = begin(ends)
    assert live.finish() == 5
    assert log == ["first 9", "second 9"]
    assert live.asked[-2:] == ["~end/other", "~end/other#2"]
    assert replay(ends, live.journal).result == 5


def test_a_generator_that_raises_while_it_is_closed_changes_no_result() -> None:
    """It is kept for the log, as asyncio does with it."""

    async def pages() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise ValueError("while closing")

    @workflow
    async def ends() -> int:
        async for _ in pages():
            break
        return await step(echo, 5)

    live = begin(ends)

    assert live.finish() == 5
    assert "while closing" in repr(live.execution.loop.problems[0]["exception"])


def test_a_function_that_fails_ends_its_tasks_too() -> None:
    """The error is the run's, after all is cleaned up."""

    async def left() -> None:
        try:
            await sleep(86_400)
        finally:
            await step(echo, 2)

    @workflow
    async def fails() -> None:
        asyncio.create_task(left())
        await asyncio.sleep(0)
        raise ValueError("its own")

    live = begin(fails)
    assert live.open == ["1/echo"]
    live.answer("1/echo", 2)

    with pytest.raises(ValueError, match="its own"):
        _ = live.result


def test_an_exception_group_fails_the_run_with_its_members() -> None:
    """A TaskGroup's failure is an error as any other."""

    @workflow
    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(branch(1))
            group.create_task(branch(2))

    async def branch(n: int) -> None:
        await step(echo, n)

    live = begin(fails)
    live.answer("1/echo", raising=ValueError("first"))

    with pytest.raises(ExceptionGroup) as caught:
        _ = live.result
    assert [str(e) for e in caught.value.exceptions] == ["first"]


def test_a_workflow_that_cancels_itself_fails() -> None:
    """Nobody asked for it, so it is no cancelled run."""

    @workflow
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await step(echo, 1)

    with pytest.raises(StepFailed):
        _ = begin(cancels).result


# --- leaving memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What user code did; nothing of it may be left to the collector."""
    yield []
    gc.collect()


def leave(live: Live) -> None:
    """Leave, collect, and see that nothing came out."""
    asked = list(live.asked)
    live.execution.leave()
    gc.collect()
    assert live.asked == asked
    assert live.execution.net_commands() == []


def test_a_finally_runs_when_a_run_leaves_and_its_steps_do_not(log: list[str]) -> None:
    """Plain code of it may run; a step raises Gone, which no `except Exception` eats."""

    @workflow
    async def holds() -> None:
        await step(echo, 1)
        try:
            await sleep(86_400)
        except Exception:
            log.append("eaten")
        finally:
            log.append("released")
            await step(echo, 2)
            log.append("never")

    live = begin(holds)
    live.answer("echo", 1)
    leave(live)

    assert log == ["released"]


def test_the_finally_of_a_dropped_run_runs_on_its_own_loop(log: list[str]) -> None:
    """And in its own context, newest task first."""

    @workflow
    async def holds() -> None:
        async def task(n: int) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                log.append(f"{n} {type(events._get_running_loop()).__name__}")

        await asyncio.gather(task(1), task(2), sleep(5))

    leave(begin(holds))

    assert log == ["2 RunLoop", "1 RunLoop"]


def test_everything_in_a_gone_execution_raises_gone(log: list[str]) -> None:
    """Each call of replaykit, and each method of its loop that would begin something."""

    @workflow
    async def inline() -> None: ...

    @workflow
    async def tries() -> None:
        loop = asyncio.get_running_loop()
        try:
            await sleep(86_400)
        finally:
            calls: list[Any] = [
                lambda: step(echo, 1),
                now,
                rng,
                uuid4,
                inline,
                loop.create_future,
                lambda: loop.create_task(echo(1)),
                lambda: loop.call_soon(print),
                lambda: loop.call_later(1, print),
                lambda: loop.call_at(1, print),
            ]
            for call in calls:
                try:
                    call()
                except Gone:
                    log.append("gone")

    leave(begin(tries))

    assert log == ["gone"] * 10


def test_generators_are_closed_when_their_run_leaves(log: list[str]) -> None:
    """Left by `break`, or in the middle of a page."""

    async def pages(name: str) -> AsyncGenerator[int, None]:
        try:
            for n in range(3):
                yield await step(echo, n)
        finally:
            log.append(f"{name} {type(events._get_running_loop()).__name__}")
            await step(other, 1)
            log.append("never")

    @workflow
    async def reads() -> None:
        async for _ in pages("left"):
            break
        async for _ in pages("open"):
            await sleep(5)

    live = begin(reads)
    live.answer("echo", 0)
    live.answer("echo#2", 0)
    leave(live)

    assert sorted(log) == ["left RunLoop", "open RunLoop"]


@pytest.mark.parametrize("inner", [False, True])
def test_a_coroutine_that_ignores_generator_exit_runs_in_no_other_run(inner: bool, log: list[str]) -> None:
    """It is closed again until it has ended, the innermost first; its `finally` never waits for the collector."""

    async def stubborn(future: asyncio.Future[None]) -> None:
        try:
            await step(echo, 1)
        finally:
            try:
                await future  # made before: awaiting it does not raise Gone
            finally:
                log.append(f"cleanup on {execution_of()}")
                await step(other, 1)

    def execution_of() -> str:
        loop: Any = events._get_running_loop()
        return "its own" if loop is not None and loop.execution is live.execution else "another's"

    @workflow
    async def holds() -> None:
        future = asyncio.get_running_loop().create_future()
        if inner:
            await stubborn(future)
        else:
            await asyncio.gather(stubborn(future), stubborn(future))

    @workflow
    async def innocent() -> int:
        await step(echo, 1)
        gc.collect()
        return await step(echo, 2)

    live = begin(holds)
    leave(live)
    bystander = begin(innocent)
    bystander.finish()

    assert log == ["cleanup on its own"] * (1 if inner else 2)
    assert bystander.asked == ["echo", "echo#2"]


def test_a_coroutine_that_never_ends_is_kept_for_ever() -> None:
    """After a hundred tries: else the collector would run its `finally` inside another run."""

    @workflow
    async def endless() -> None:
        while True:
            try:
                await asyncio.Future()  # not by way of the loop, which would raise Gone
            except BaseException:
                continue

    kept = len(execution_module._NEVER_ENDED)
    live = begin(endless)
    # it has nothing to wait for but itself: held, and then dropped
    assert "nothing can ever resolve" in live.reason
    live.execution.leave()
    gc.collect()

    assert len(execution_module._NEVER_ENDED) == kept + 1


def test_leaving_twice_is_leaving_once(log: list[str]) -> None:
    """Whoever drops a run need not ask whether it is gone already."""

    @workflow
    async def holds() -> None:
        try:
            await sleep(5)
        finally:
            log.append("once")

    live = begin(holds)
    live.execution.leave()
    live.execution.leave()

    assert log == ["once"]
    assert live.execution.loop.is_closed()


def test_a_hold_after_leaving_is_no_hold(log: list[str]) -> None:
    """A dropped `step(...)` found by the collector in a gone execution says nothing."""

    @workflow
    async def holds() -> None:
        calls = [step(echo, n) for n in range(3)]
        await sleep(5)
        await asyncio.gather(*calls)

    live = begin(holds)
    leave(live)

    assert live.execution.hold_reason is None


# --- anyio ------------------------------------------------------------------------------------------------------------


def test_task_groups_of_anyio() -> None:
    """Keys, results and errors as with asyncio's."""

    @workflow
    async def groups() -> list[int]:
        out: list[int] = []

        async def branch(n: int) -> None:
            out.append(await step(echo, n))

        async with anyio.create_task_group() as group:
            for n in range(3):
                group.start_soon(branch, n)
        return out

    live = begin(groups)
    for key in ("2/echo", "3/echo", "1/echo"):
        live.answer(key, int(key[0]))

    assert live.result == [2, 3, 1]
    assert replay(groups, live.journal).result == [2, 3, 1]


def test_streams_locks_and_start_of_anyio() -> None:
    """What httpx and its like are built from."""

    @workflow
    async def uses() -> list[int]:
        sender, receiver = anyio.create_memory_object_stream[int](2)
        lock, out = anyio.Lock(), []

        async def produce(*, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started("up")
            async with sender:
                for n in range(4):
                    async with lock:
                        await sender.send(await step(echo, n))

        async with anyio.create_task_group() as group:
            assert await group.start(produce) == "up"
            async with receiver:
                async for n in receiver:
                    out.append(n)
        return out

    assert begin(uses).finish() == [0, 1, 2, 3]


def test_cleanup_in_a_shielded_scope_of_anyio_runs_its_step() -> None:
    """The way anyio's own documentation shows it."""

    @workflow
    async def cancels() -> list[int]:
        out: list[int] = []

        async def worker() -> None:
            try:
                await step(echo, 1)
            finally:
                with anyio.CancelScope(shield=True):
                    out.append(await step(other, 2))

        async with anyio.create_task_group() as group:
            group.start_soon(worker)
            await step(echo, 3)
            group.cancel_scope.cancel()
        return out

    live = begin(cancels)
    live.answer("echo", 3)
    live.answer("1/other", 2)

    assert live.result == [2]
    assert live.asked == ["echo", "1/echo", "-1/echo", "1/other"]


def test_nested_scopes_of_anyio_are_cancelled_in_a_fixed_order() -> None:
    """anyio keeps them in a set, by address: without help each replay would cancel its tasks in another order."""

    @workflow
    async def cancels() -> list[int]:
        out: list[int] = []

        async def worker(n: int) -> None:
            try:
                with anyio.move_on_after(100 + n):
                    await step(echo, n)
            finally:
                out.append(n)

        async with anyio.create_task_group() as group:
            for n in range(8):
                group.start_soon(worker, n)
            await step(other, 1)
            group.cancel_scope.cancel()
        return out

    orders = []
    ballast = []
    for n in range(6):
        ballast.append([object() for _ in range(7 * n)])
        live = begin(cancels)
        live.answer("other", 1)
        orders.append(live.result)

    assert orders == [orders[0]] * 6


def test_a_replay_of_anything_is_the_same_in_a_fresh_execution() -> None:
    """One program with a bit of all: the same requests in the same order, the same result."""

    @workflow
    async def all_of_it() -> list[Any]:
        out: list[Any] = [now().isoformat(), uuid4().hex]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(n)) for n in range(3)]
        out += [t.result() for t in tasks]
        try:
            async with asyncio.timeout(3):
                await sleep(10)
        except TimeoutError:
            out.append(await asyncio.wait_for(step(other, 1), 5))
        return out

    async def branch(n: int) -> int:
        await asyncio.sleep(n)
        return await step(echo, n) + rng().randrange(100)

    live = begin(all_of_it)
    live.finish()
    again = replay(all_of_it, live.journal)

    assert again.result == live.result
    assert again.asked == live.asked
    assert sys.getrefcount(again.execution) < 20


def test_code_that_swallows_everything_for_ever_can_still_be_left() -> None:
    """`while True: try: await step(...) except: pass` ends neither the worker nor its turn when its run leaves memory."""

    @workflow
    async def swallows() -> None:
        while True:
            with contextlib.suppress(BaseException):
                await step(echo, 1)

    @workflow
    async def swallows_sleep() -> None:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(5)

    for code in (swallows, swallows_sleep):
        live = begin(code)
        leave(live)

        assert live.execution.loop.gone


def test_a_library_that_polls_until_a_task_has_cleaned_up_does_not_hold_the_run() -> None:
    """anyio repeats a cancellation at every turn of the loop; the step in the `finally` it waits for still comes."""

    async def works() -> None:
        try:
            await sleep(100)
        finally:
            await step(echo, 1)

    @workflow
    async def moves_on() -> str:
        with anyio.move_on_after(5):
            async with asyncio.TaskGroup() as group:
                group.create_task(works())
        return "moved on"

    live = begin(moves_on)
    live.fire()
    assert live.execution.hold_reason is None
    assert list(live.execution.open) == ["1/echo"]

    live.answer("1/echo", 1)
    assert live.execution.ended is not None
    assert live.execution.ended.output == '"moved on"'


def test_a_call_that_an_exception_threw_away_does_not_hide_the_exception() -> None:
    """`gather(step(f), step(g, wrong))`: the run fails with the author's own error."""

    @workflow
    async def mistaken() -> None:
        wrong: Any = {"no_such": 1}
        await asyncio.gather(step(echo, 1), step(other, **wrong))

    live = begin(mistaken)

    assert live.execution.hold_reason is None
    assert live.execution.ended is not None
    assert live.execution.ended.error is not None
    assert "missing a required argument" in live.execution.ended.error


def test_a_call_dropped_by_a_function_that_returns_holds_the_run() -> None:
    """A forgotten `await` in the last line must not look like a success."""

    @workflow
    async def forgets() -> int:
        step(echo, 1)
        return 1

    live = begin(forgets)

    assert live.execution.hold_reason is not None
    assert "never awaited" in live.execution.hold_reason


def test_a_result_above_the_limit_fails_the_run_with_both_sizes() -> None:
    """`payload_bytes_max` holds for the workflow's own result as for a step's."""

    @workflow
    async def huge() -> str:
        return "x" * (17 * 1024 * 1024)

    live = begin(huge)

    assert live.execution.ended is not None
    assert live.execution.ended.error is not None
    assert "16,777,216" in live.execution.ended.error


def test_a_run_that_left_memory_leaves_nothing_to_the_collector() -> None:
    """Worker processes let it look less often: a parked run must be freed by its last reference. (What asyncio itself ties
    into a knot, a TaskGroup and its tasks, is the collector's.)"""

    @workflow
    async def waits() -> None:
        await sleep(100)

    @workflow
    async def asks() -> None:
        await step(echo, 1)

    gc.collect()
    gc.disable()
    try:
        for code in (waits, asks):
            execution = execution_module.Execution(
                code.fn, (), {}, info=code.info, run_id=uuid.UUID(int=1), seed=1, started_at=0
            )
            execution.start()
            gone = weakref.ref(execution.loop)
            execution.leave()
            del execution

            assert gone() is None
    finally:
        gc.enable()

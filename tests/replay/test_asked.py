"""Facts about what others ask of a run: cancel, retry; and about tries of its steps, on one run's whole life."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from replaykit.limits import Settings
from replaykit.replay.calls import now, sleep, step, workflow
from replaykit.replay.entries import Kind, State, Unit
from replaykit.replay.outcomes import timeout_outcome
from tests.replay.drive import echo, other
from tests.replay.story import SECOND, Again, Began, Story, TimedOut


def failing(key: str, times: int = 1, error: type[Exception] = OSError) -> Any:
    """The step of that key fails its first so many attempts."""

    def answer(began: Began) -> Any:
        if began.key == key and began.attempt <= times:
            raise error(f"attempt {began.attempt}")
        return began.input

    return answer


def count(story: Story) -> Counter[str]:
    return Counter(b.key for b in story.began)


# --- cancel -----------------------------------------------------------------------------------------------------------


@workflow
async def naps() -> str:
    try:
        await sleep(3_600)
    except asyncio.CancelledError:
        return "woken"
    return "rested"


def test_a_run_that_nobody_began_is_cancelled_at_once() -> None:
    """It has nothing to tidy up."""
    story = Story(naps)

    story.cancel()

    assert story.state is State.CANCELLED


def test_a_run_that_catches_its_cancellation_and_returns_has_succeeded() -> None:
    """The state says how the function ended, not what was asked for."""
    story = Story(naps).until(lambda s: s.state is State.WAITING)

    story.cancel()
    story.play()

    assert story.result == "woken"
    assert story.keys == ["~cancel"]


def test_a_request_that_comes_after_the_end_changes_nothing() -> None:
    """The function had ended when it came: no entry, and the run succeeds."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    story = Story(one).until(lambda s: "echo" in s.bodies)
    story.end("echo")
    story.cancel()
    story.play()

    assert story.result == 1
    assert story.keys == ["echo"]


def test_a_request_is_delivered_after_a_timer_that_was_due_before_it() -> None:
    """What is due is delivered in the order of its own time."""

    @workflow
    async def two_naps() -> list[str]:
        seen = []
        for _ in range(2):
            try:
                await sleep(10)
                seen.append("rested")
            except asyncio.CancelledError:
                seen.append("cancelled")
        return seen

    story = Story(two_naps).until(lambda s: s.state is State.WAITING)
    story.now = story.available_at + 5 * SECOND
    story.cancel()
    story.play()

    assert story.result == ["rested", "cancelled"]


def test_finally_may_wait_for_days() -> None:
    """Tidying up parks like any wait."""

    @workflow
    async def slow_to_end() -> None:
        try:
            await sleep(10)
        finally:
            await sleep(timedelta(days=3))
            await step(echo, 9)

    story = Story(slow_to_end).until(lambda s: s.state is State.WAITING)
    before = story.now
    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert story.now - before >= 3 * 86_400 * SECOND
    assert count(story) == {"echo": 1}


def test_a_second_request_while_it_tidies_up_says_nothing_new() -> None:
    """The SQL function adds no second letter; one that got in all the same is answered in its turn."""

    @workflow
    async def tidies() -> None:
        try:
            await sleep(10)
        finally:
            await step(echo, 1)

    story = Story(tidies).until(lambda s: s.state is State.WAITING)
    story.cancel()
    story.until(lambda s: "echo" in s.bodies)
    story.play()

    assert story.state is State.CANCELLED
    assert [e.kind for e in story.journal] == [Kind.CANCEL, Kind.STEP]


def test_a_run_that_waits_for_nothing_can_be_cancelled_and_tidies_up() -> None:
    """It was held because nothing could resolve its future; a cancel can."""

    @workflow
    async def stuck() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await step(echo, 1)
        return "never"

    story = Story(stuck).until(lambda s: s.state is State.HELD)

    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert count(story) == {"echo": 1}


def test_cancelling_gives_up_a_back_off() -> None:
    """A step that waits for its next try has no body: the try is never made."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    def down(began: Began) -> Any:
        raise Again(OSError("down"), 3_600)

    story = Story(one, down).until(lambda s: s.state is State.WAITING)
    assert story.waiting_for == "retry"
    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert count(story) == {"echo": 1}


# --- tries ------------------------------------------------------------------------------------------------------------


def test_no_try_begins_before_the_row_of_the_last_one_is_committed() -> None:
    """Else a death would forget it."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    def down(began: Began) -> Any:
        if began.attempt < 3:
            raise Again(OSError("down"))
        return 1

    story = Story(one, down).until(lambda s: "echo" in s.bodies)
    story.end("echo")
    assert story.driver is not None
    assert story.driver.take_actions() == []

    unit = story.driver.next_unit()
    assert unit is not None
    assert [a.attempt for a in unit.attempts] == [1]


def test_a_death_forgets_no_try() -> None:
    """Whatever became of the process, the next one counts on."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    def down(began: Began) -> Any:
        if began.attempt < 5:
            raise Again(OSError("down"), 10)
        return 7

    story = Story(one, down)
    while story.state not in (State.SUCCEEDED, State.FAILED):
        assert story.step()
        if story.bodies and len(story.began) % 2:
            story.evict()

    assert story.result == 7
    assert [a.attempt for a in story.attempts] == [1, 2, 3, 4]
    assert [a.tries for a in story.attempts] == [1, 2, 3, 4]
    assert [a.idle_seconds for a in story.attempts] == [0, 10, 20, 30]
    assert story.journal[0].attempt == 5


def test_a_short_back_off_stays_in_memory_beside_its_siblings() -> None:
    """Only what is far away leaves it."""

    @workflow
    async def both() -> list[int]:
        return list(await asyncio.gather(step(echo, 1), step(other, 2)))

    def down(began: Began) -> Any:
        if began.key == "echo" and began.attempt == 1:
            raise Again(OSError("down"), 2)
        return began.input

    story = Story(both, down).play()

    assert story.result == [1, 2]
    assert story.claims == 1


def test_no_try_begins_while_the_thread_of_the_last_one_lives() -> None:
    """Its time ran out, but a thread cannot be ended: the next try waits for it, and so does the run's leaving."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    story = Story(one).until(lambda s: "echo" in s.bodies)
    assert story.driver is not None
    start = story.bodies.pop("echo")
    outcome = timeout_outcome(start.call, 1, 1.0, story.now)
    story.driver.body_failed("echo", outcome, 0.0, story.now, lingering=True)
    story.settle()
    story.now += 3_600 * SECOND
    story.driver.tick(story.now)
    story.settle()
    assert not story.bodies

    story.driver.thread_ended("echo", story.now)
    story.settle()

    assert list(story.bodies) == ["echo"]
    assert story.began[-1].attempt == 2


def test_a_back_off_longer_than_an_eviction_waits_for_retry() -> None:
    """`waiting_for` says what it is."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    story = Story(one, lambda b: (_ for _ in ()).throw(Again(OSError("down"), 60)) if b.attempt == 1 else 1)
    story.until(lambda s: s.state is State.WAITING)

    assert story.waiting_for == "retry"
    assert story.available_at == story.attempts[0].next_at


# --- rewind -----------------------------------------------------------------------------------------------------------


@workflow
async def fan() -> list[int]:
    return list(await asyncio.gather(*(step.options(name=f"s{n}")(echo, n) for n in range(4))))


def test_results_that_a_rewind_set_aside_are_used_again() -> None:
    """Siblings of the failed step that had ended after it: no body runs twice."""
    story = Story(fan, failing("s1"))
    story.play()
    assert story.state is State.FAILED

    story.retry()
    story.play()

    assert story.result == [0, 1, 2, 3]
    assert count(story)["s1"] == 2
    reused = [e for e in story.journal if e.reuses is not None]
    for entry in reused:
        assert story.journal[entry.reuses - 1].output == entry.output  # type: ignore[operator]
        assert entry.idempotency_key == story.journal[entry.reuses - 1].idempotency_key  # type: ignore[operator]


def test_a_rewound_failure_after_finished_siblings_reuses_them() -> None:
    """The failing one ends first, its siblings end while the run awaits its `finally`."""

    @workflow
    async def shielded() -> list[int]:
        tasks = [asyncio.ensure_future(step.options(name=f"s{n}")(echo, n)) for n in range(3)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return [r for r in results if isinstance(r, int)]

    story = Story(shielded, failing("s0")).play()
    assert story.state is State.FAILED
    story.retry()
    story.play()

    assert story.result == [0, 1, 2]
    assert count(story) == {"s0": 2, "s1": 1, "s2": 1}
    assert [e.reuses for e in story.journal] == [None, None, None, None, None, 2, 3] or {
        e.reuses for e in story.journal if e.reuses
    } == {2, 3}


def test_a_step_asked_with_another_input_after_a_rewind_is_another_call() -> None:
    """Its body runs, under an idempotency key of its own; what was recorded stays."""
    flavour = ["old"]

    async def flavoured(text: str) -> str:
        return text

    @workflow
    async def depends() -> str:
        first, second = await asyncio.gather(
            step.options(name="fails")(echo, 1), step.options(name="flavoured")(flavoured, flavour[0])
        )
        return f"{first} {second}"

    def answer(began: Began) -> Any:
        if began.key == "fails" and began.attempt == 1:
            raise OSError("down")
        return began.input

    story = Story(depends, answer).until(lambda s: len(s.bodies) == 2)
    story.end("flavoured")
    story.settle()
    story.until(lambda s: s.state is State.FAILED)
    flavour[0] = "new"
    story.retry()
    story.play()
    # `flavoured` came before the error: it stands as recorded, and the new code diverges from it
    assert story.state is State.HELD

    flavour[0] = "old"
    story.retry()
    story.play()
    assert story.result == "1 old"


def test_a_result_set_aside_and_asked_with_another_input_runs_again_under_another_key() -> None:
    """No effect of it is known to have landed, so it may."""
    flavour = ["old"]

    async def flavoured(text: str) -> str:
        return text

    @workflow
    async def collects() -> str:
        results = await asyncio.gather(
            step.options(name="fails")(echo, 1),
            step.options(name="flavoured")(flavoured, flavour[0]),
            return_exceptions=True,
        )
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return f"{results[0]} {results[1]}"

    story = Story(collects, failing("fails")).play()
    assert story.keys == ["fails", "flavoured"]
    flavour[0] = "new"
    story.retry()
    story.play()

    assert story.result == "1 new"
    keys = [b.idempotency_key for b in story.began if b.key == "flavoured"]
    assert len(keys) == 2
    assert len(set(keys)) == 2


def test_attempts_go_on_counting_and_the_budget_begins_anew() -> None:
    """A person's retry gives the step its tries again; nobody is told that there were none before."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    def answer(began: Began) -> Any:
        if began.attempt in (1, 2, 4):
            raise Again(OSError(f"attempt {began.attempt}"), 1)
        if began.attempt == 3:
            raise OSError("given up")
        return began.tries

    story = Story(one, answer).play()
    assert story.state is State.FAILED
    story.retry()
    story.play()

    assert [b.attempt for b in story.began] == [1, 2, 3, 4, 5]
    assert [b.tries for b in story.began] == [1, 2, 3, 1, 2]
    assert story.result == 2
    assert [e.attempt for e in story.journal if e.kind == Kind.STEP] == [3, 5]
    assert len({b.idempotency_key for b in story.began}) == 1


def test_a_run_is_retried_as_often_as_it_fails() -> None:
    """Each rewind sets aside what the last one left; replay knows only what counts."""
    story = Story(fan, failing("s2", times=4)).play()
    for _ in range(4):
        assert story.state is State.FAILED
        story.retry()
        story.play()

    assert story.result == [0, 1, 2, 3]
    assert count(story)["s2"] == 5
    assert [e.key for e in story.journal if e.kind == Kind.REWIND] == [
        "~rewind",
        "~rewind#2",
        "~rewind#3",
        "~rewind#4",
    ]


def test_a_failure_without_an_error_entry_is_retried_by_the_mended_code() -> None:
    """The function itself raised: nothing is set aside, and the code goes on from where the journal ends."""
    bug = [True]

    @workflow
    async def buggy() -> int:
        total = await step(echo, 1)
        if bug:
            raise KeyError("a bug")
        return total + await step(other, 2)

    story = Story(buggy).play()
    assert story.state is State.FAILED
    bug.clear()
    story.retry()
    story.play()

    assert story.result == 3
    assert count(story) == {"echo": 1, "other": 1}


def test_a_rewind_moves_the_clock() -> None:
    """What comes after it is later than all that was."""

    @workflow
    async def clocked() -> list[float]:
        before = now()
        await step(echo, 1)
        return [before.timestamp(), now().timestamp()]

    story = Story(clocked, failing("echo")).play()
    story.now += 100 * SECOND
    story.retry()
    story.play()

    before, after = story.result
    assert after - before >= 100


def test_a_cancel_from_before_a_retry_is_not_delivered_again() -> None:
    """The person has changed their mind."""

    @workflow
    async def stubborn() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await sleep(10)
        return await step(echo, 1)

    story = Story(stubborn, failing("echo")).until(lambda s: s.state is State.WAITING)
    story.cancel()
    story.play()
    assert story.state is State.FAILED
    story.retry()
    story.play()

    assert story.result == 1
    assert [e.kind for e in story.journal].count(Kind.CANCEL) == 1


def test_accept_inputs_takes_recorded_results_whatever_the_code_asks_now() -> None:
    """For what was recorded by then; what comes later is compared as ever."""
    factor = [1]

    @workflow
    async def scaled() -> int:
        return await step(echo, factor[0]) + await step(other, 5)

    story = Story(scaled).until(lambda s: len(s.journal) == 1)
    story.evict()
    factor[0] = 2
    story.play()
    assert story.state is State.HELD

    story.retry(accept="inputs")
    story.play()

    assert story.result == 6
    assert count(story) == {"echo": 1, "other": 2}


@pytest.mark.parametrize(("accept", "runs"), [("inputs", 1), (None, 2)])
def test_accept_inputs_uses_what_a_rewind_set_aside_again(accept: str | None, runs: int) -> None:
    """A failed run whose code asks otherwise now: its results count if the person says so."""
    factor = [1]

    @workflow
    async def both() -> int:
        results = await asyncio.gather(step(echo, 1), step(other, factor[0]), return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return sum(r for r in results if isinstance(r, int))

    story = Story(both, failing("echo")).play()
    assert story.state is State.FAILED
    factor[0] = 2
    story.retry(accept)
    story.play()

    assert count(story)["other"] == runs
    assert story.result == (2 if accept else 3)


def test_without_accept_a_retried_run_is_held_again_for_the_same_reason() -> None:
    """Nothing is guessed."""
    factor = [1]

    @workflow
    async def scaled() -> int:
        return await step(echo, factor[0]) + await step(other, 5)

    story = Story(scaled).until(lambda s: len(s.journal) == 1)
    story.evict()
    factor[0] = 2
    story.play()
    first = story.reason
    story.retry()
    story.play()

    assert story.state is State.HELD
    assert story.reason == first


# --- durability="async" -----------------------------------------------------------------------------------------------


cheap = step.options(durability="async")


@workflow
async def cheap_then_dear() -> int:
    total = 0
    for n in range(3):
        total += await cheap(echo, n)
    return await step(other, total)


def test_a_cheap_step_begins_before_what_led_to_it_is_committed_and_a_dear_one_does_not() -> None:
    """The strict rule: only a body whose own step is async too may run ahead of the journal."""
    story = Story(cheap_then_dear)
    story.claim()
    driver = story.driver
    assert driver is not None
    for n in range(3):
        (action,) = driver.take_actions()
        story._begin(action)  # type: ignore[arg-type]
        story.end("echo" if n == 0 else f"echo#{n + 1}")
    assert driver.take_actions() == []
    assert "other" in driver.execution.open

    unit = driver.next_unit()
    assert unit is not None
    assert [e.key for e in unit.entries] == ["echo", "echo#2", "echo#3"]
    assert all(e.idempotency_key is None for e in unit.entries)


def test_what_was_not_committed_runs_again_after_a_death() -> None:
    """The loss window, and nothing else."""
    story = Story(cheap_then_dear)
    story.claim()
    for n in range(2):
        assert story.driver is not None
        (action,) = story.driver.take_actions()
        story._begin(action)  # type: ignore[arg-type]
        story.end("echo" if n == 0 else f"echo#{n + 1}")
    story.evict()
    story.play()

    assert story.result == 3
    assert count(story) == {"echo": 2, "echo#2": 2, "echo#3": 1, "other": 1}
    assert story.keys == ["echo", "echo#2", "echo#3", "other"]


# --- logs -------------------------------------------------------------------------------------------------------------


def test_code_that_has_run_before_knows_that_it_replays() -> None:
    """`execution.replaying`, which `drop_replayed` asks."""
    seen: list[tuple[str, bool]] = []

    @workflow
    async def talks() -> int:
        from replaykit.replay.execution import current_execution

        def say(what: str) -> None:
            execution = current_execution()
            assert execution is not None
            seen.append((what, execution.replaying))

        say("begins")
        first = await step(echo, 1)
        say("first")
        second = await step(other, 2)
        say("second")
        return first + second

    story = Story(talks).until(lambda s: len(s.journal) == 1)
    assert seen == [("begins", False), ("first", False)]
    seen.clear()
    story.evict()
    story.play()

    assert seen == [("begins", True), ("first", True), ("second", False)]


def test_timed_out_tries_are_retried_as_errors_are() -> None:
    """A time-out is an error of its attempt."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    def answer(began: Began) -> Any:
        if began.attempt == 1:
            raise TimedOut
        return 1

    story = Story(one, answer).play()
    with pytest.raises(TimeoutError):
        assert story.result
    story.retry()
    assert story.play().result == 1


def test_evictions_and_a_retry_change_neither_result_nor_what_ran() -> None:
    """Evictions at every turn change neither the journal's keys nor the result."""
    plain = Story(fan, failing("s1")).play()
    plain.retry()
    plain.play()
    for turns in range(1, 12):
        story = Story(fan, failing("s1"), settings=Settings(evict_after_seconds=0))
        done = 0
        while story.state not in (State.FAILED, State.HELD):
            assert story.step()
            done += 1
            if done == turns and story.driver is not None and story.state is State.RUNNING:
                story.evict()
        story.retry()
        story.play()
        assert story.result == plain.result


# --- what a run died of -----------------------------------------------------------------------------------------------


def once(*keys: str) -> Any:
    """These steps fail at their first attempt."""

    def answer(began: Began) -> Any:
        if began.key in keys and began.attempt == 1:
            raise OSError(began.key)
        return began.input

    return answer


def test_a_run_goes_on_from_the_error_that_it_died_of_and_not_from_a_later_one() -> None:
    """A clean-up that failed as well is not what the person wants mended."""

    @workflow
    async def tidies() -> int:
        try:
            return await step.options(name="pay")(echo, 1)
        finally:
            with contextlib.suppress(OSError):
                await step.options(name="release")(other, 2)

    story = Story(tidies, once("pay", "release")).play()
    story.retry()
    story.play()

    assert story.result == 1
    assert [b.key for b in story.began] == ["pay", "release", "pay", "release"]


def test_several_errors_that_a_run_died_of_are_tried_again_together() -> None:
    """A group of them takes one retry."""

    @workflow
    async def group() -> list[int]:
        names = ["a", "b", "c"]
        results = await asyncio.gather(*(step.options(name=n)(echo, 1) for n in names), return_exceptions=True)
        errors = [r for r in results if isinstance(r, Exception)]
        if errors:
            raise ExceptionGroup("some", errors)
        return [r for r in results if isinstance(r, int)]

    story = Story(group, once("a", "c")).play()
    story.retry()
    story.play()

    assert story.result == [1, 1, 1]
    assert count(story) == {"a": 2, "b": 1, "c": 2}


@pytest.mark.parametrize("link", ["cause", "context"])
def test_an_error_raised_from_a_steps_error_leads_to_it(link: str) -> None:
    """`raise X from error`, and what is raised while it is handled."""

    @workflow
    async def wraps() -> int:
        try:
            return await step(echo, 1)
        except OSError as error:
            if link == "cause":
                raise RuntimeError("wrapped") from error
            raise RuntimeError("while handling") from None if link == "none" else error

    story = Story(wraps, once("echo")).play()
    story.retry()

    assert story.play().result == 1
    assert count(story) == {"echo": 2}


def test_an_error_that_was_handled_is_not_gone_back_to() -> None:
    """The code's own mistake came later: both steps stand, and the mended code goes on."""
    bug = [True]

    @workflow
    async def falls_back() -> int:
        try:
            got = await step.options(name="primary")(echo, 1)
        except OSError:
            got = await step.options(name="fallback")(echo, 2)
        if bug:
            raise KeyError("a bug")
        return got

    story = Story(falls_back, once("primary")).play()
    bug.clear()
    story.retry()

    assert story.play().result == 2
    assert count(story) == {"primary": 1, "fallback": 1}


def test_one_call_keeps_its_idempotency_key_through_every_rewind() -> None:
    """The same step with the same input: one key; with another input: another one, whatever lies between."""
    value = [1]

    @workflow
    async def both() -> int:
        first, second = await asyncio.gather(
            step.options(name="s")(echo, value[0]), step.options(name="t")(other, 7), return_exceptions=True
        )
        for one in (first, second):
            if isinstance(one, BaseException):
                raise one
        return 1

    def answer(began: Began) -> Any:
        if began.key == "s" and began.attempt < 4:
            raise Again(OSError("again"), 30) if began.attempt == 2 else OSError("s")
        if began.key == "t" and began.attempt < 3:
            raise OSError("t")
        return began.input

    story = Story(both, answer)
    for value[0] in (1, 2, 2, 1, 2, 1):
        story.play()
        if story.state is State.SUCCEEDED:
            break
        story.retry()
    keys: dict[int, set[str]] = {}
    for began in story.began:
        if began.key == "s":
            keys.setdefault(began.input, set()).add(began.idempotency_key)

    assert all(len(found) == 1 for found in keys.values()), keys
    assert len({k for found in keys.values() for k in found}) == len(keys)


def test_a_key_goes_by_the_input_of_the_very_first_try_however_often_a_run_is_retried() -> None:
    """Of failures that `retry=` knows nothing of the journal alone knows the first one."""
    value = [1]

    @workflow
    async def one() -> int:
        return await step(echo, value[0])

    story = Story(one, failing("echo", times=3))
    for value[0] in (1, 2, 2):
        assert story.play().state is State.FAILED
        story.retry()
    value[0] = 1

    assert story.play().result == 1
    first, *others, last = [b.idempotency_key for b in story.began]
    assert first == last and len(others) == 2 and set(others).isdisjoint({first}) and len(set(others)) == 1


def test_accept_inputs_does_not_send_an_old_key_with_a_new_input() -> None:
    """An error has no result that could be accepted: the call is another one."""
    value = [1]

    @workflow
    async def one() -> int:
        return await step(echo, value[0])

    story = Story(one, once("echo")).play()
    value[0] = 2
    story.retry("inputs")
    story.play()

    assert story.result == 2
    assert len({b.idempotency_key for b in story.began}) == 2


def test_a_deadline_from_before_a_rewind_leaves_as_much_time_after_it() -> None:
    """`timeout=now() + ...`: else the step that failed could never run again."""

    @workflow
    async def due() -> int:
        deadline = now() + timedelta(seconds=60)
        return await step.options(timeout=deadline)(echo, 1)

    story = Story(due, once("echo")).play()
    story.now += 3_600 * SECOND
    story.retry()
    story.until(lambda s: "echo" in s.bodies)
    timeout = story.bodies["echo"].call.timeout

    assert isinstance(timeout, datetime)
    assert timeout.timestamp() * SECOND - story.now == 60 * SECOND
    assert story.play().result == 1


def test_a_try_with_another_input_than_the_first_has_another_idempotency_key() -> None:
    """Changed code between two tries: no key is ever sent with two inputs."""
    cents = [5]

    @workflow
    async def pays() -> int:
        return await step(echo, cents[0])

    def answer(began: Began) -> Any:
        if began.attempt < 3:
            raise Again(OSError("down"), 60)
        return began.input

    story = Story(pays, answer).until(lambda s: s.state is State.WAITING)
    cents[0] = 900
    story.until(lambda s: len(s.began) == 2)
    cents[0] = 5
    story.until(lambda s: s.state is State.WAITING)
    story.play()

    keys = [b.idempotency_key for b in story.began]
    assert [b.input for b in story.began] == [5, 900, 5]
    assert keys[0] == keys[2] != keys[1]


def test_a_result_that_was_used_again_survives_a_refused_commit_as_what_it_is() -> None:
    """A rebuild finds it again where it was set aside; it is no body's outcome of this process."""

    @workflow
    async def both() -> list[int]:
        results = await asyncio.gather(
            step.options(name="a")(echo, 1), step.options(name="b")(echo, 2), return_exceptions=True
        )
        errors = [r for r in results if isinstance(r, Exception)]
        if errors:
            raise errors[0]
        return [r for r in results if isinstance(r, int)]

    refused: list[int] = []

    def refuses(unit: Unit) -> bool:
        once_more = not refused and any(e.reuses is not None for e in unit.entries)
        refused.extend([1] * once_more)
        return once_more

    story = Story(both, once("a"), refuses=refuses).play()
    story.retry()
    story.play()
    assert refused

    again = [e for e in story.journal if e.key == "b" and e.reuses is not None]
    assert story.result == [1, 2]
    assert [(e.reuses, e.attempt) for e in again] == [(2, 1)]
    assert count(story)["b"] == 1


def test_a_step_in_back_off_when_another_one_killed_the_run_has_its_budget_anew_after_a_retry() -> None:
    """The days that the run lay failed do not count against it."""

    @workflow
    async def both() -> list[int]:
        return list(await asyncio.gather(step.options(name="slow")(echo, 1), step.options(name="dies")(other, 2)))

    def answer(began: Began) -> Any:
        if began.key == "slow" and began.attempt == 1:
            raise Again(OSError("not yet"), 3)
        if began.key == "dies" and began.attempt == 1:
            raise KeyError("dies")
        return began.input

    story = Story(both, answer).play()
    assert story.state is State.FAILED
    story.now += 86_400 * SECOND
    story.retry()
    story.play()

    assert story.result == [1, 2]
    slow = [(b.attempt, b.tries) for b in story.began if b.key == "slow"]
    assert slow == [(1, 1), (2, 1)]


def test_a_cancel_that_came_too_late_does_not_end_the_run_once_it_is_retried() -> None:
    """It was never answered, and the person has changed their mind since."""

    @workflow
    async def one() -> int:
        return await step(echo, 1)

    story = Story(one, once("echo")).until(lambda s: "echo" in s.bodies)
    story.end("echo")
    story.cancel()
    story.play()
    assert story.state is State.FAILED
    story.retry()
    story.play()

    assert story.result == 1
    assert Kind.CANCEL not in [e.kind for e in story.journal]

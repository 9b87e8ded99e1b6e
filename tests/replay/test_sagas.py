"""Facts about compensation: what a saga owes, in which order, and what becomes of it when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import tenacity

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import saga, step, workflow
from replaykit.replay.doubts import Answer
from replaykit.replay.entries import IntentState, State
from tests.replay.drive import echo
from tests.replay.story import SECOND, Again, Began, Story


async def undo(n: int) -> int:
    """Never called here."""
    return n


@step.policy(effect="irreversible")
async def refund(n: int) -> int | None:
    """Never called here."""
    return n


book = step.options(name="book", effect="irreversible", compensate=undo)
reserve = step.options(name="reserve", compensate=undo)
charge = step.options(name="charge", effect="irreversible", compensate=refund)
ship = step.options(name="ship")


class Trouble(Exception):
    pass


def failing(*keys: str, error: type[Exception] = Trouble) -> Callable[[Began], Any]:
    """The steps of these keys fail."""

    def answer(began: Began) -> Any:
        if began.key in keys:
            raise error(f"no {began.key}")
        return began.input

    return answer


def begun(story: Story) -> list[str]:
    return [b.key for b in story.began]


@workflow
async def trip() -> str:
    async with saga():
        await reserve(echo, 1)
        await book(echo, 2)
        await charge(echo, 3)
        await ship(echo, 4)
    return "gone"


def test_a_saga_that_is_left_well_undoes_nothing() -> None:
    """Nothing is owed any more."""
    story = Story(trip).play()

    assert story.result == "gone"
    assert begun(story) == ["reserve", "book", "charge", "ship"]


def test_a_saga_left_by_an_exception_undoes_state_after_newest_first_and_the_exception_goes_on() -> None:
    """Each undoing is a step of its own, with the result of what it undoes; the intents say so."""
    story = Story(trip, answer=failing("ship")).play()

    with pytest.raises(Trouble, match="no ship"):
        _ = story.result
    assert begun(story)[4:] == ["~undo:charge", "~undo:book", "~undo:reserve"]
    assert [b.input for b in story.began[4:]] == [3, 2, 1]
    assert story.states == {"book": ["compensated"], "charge": ["compensated"], "~undo:charge": ["landed"]}
    assert [(e.key, e.kind) for e in story.journal][-3:] == [
        ("~undo:charge", "step"),
        ("~undo:book", "step"),
        ("~undo:reserve", "step"),
    ]


def test_an_undoing_and_the_word_of_what_it_undid_are_one_unit() -> None:
    """No reader sees one without the other."""
    story = Story(trip, answer=failing("ship")).play()

    unit = next(u for u in story.units if any(e.key == "~undo:book" for e in u.entries))
    assert [(c.key, c.state) for c in unit.closings if c.state == IntentState.COMPENSATED] == [("book", "compensated")]


def test_a_run_that_fails_outside_of_a_saga_undoes_nothing() -> None:
    """A bug must not refund every customer."""

    @workflow
    async def careless() -> None:
        await book(echo, 1)
        raise Trouble

    story = Story(careless).play()

    assert story.state is State.FAILED
    assert begun(story) == ["book"]


def test_code_after_a_saga_goes_on_where_it_catches_the_exception() -> None:
    """Undone, and told so."""

    @workflow
    async def polite() -> str:
        try:
            async with saga():
                await book(echo, 1)
                if True:
                    await reserve(echo, 2)
                    await ship(echo, 3)
                await charge(echo, 4)
        except Trouble:
            await step(echo, 5)
            return "sorry"
        return "gone"

    story = Story(polite, answer=failing("ship")).play()

    assert story.result == "sorry"
    assert begun(story) == ["book", "reserve", "ship", "~undo:reserve", "~undo:book", "echo"]


def test_a_cancelled_run_undoes_what_its_saga_owes_and_ends_cancelled() -> None:
    """A cancel is no reason to keep the money."""
    story = Story(trip).until(lambda s: "ship" in s.bodies)

    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert begun(story)[4:] == ["~undo:charge", "~undo:book", "~undo:reserve"]


def test_a_cancel_does_not_stop_an_undoing_half_way() -> None:
    """It is raised when all is undone."""
    story = Story(trip, answer=failing("ship")).until(lambda s: "~undo:book" in s.bodies)

    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert begun(story)[4:] == ["~undo:charge", "~undo:book", "~undo:reserve"]


def test_code_after_a_saga_runs_when_all_is_undone_whatever_comes_meanwhile() -> None:
    """A cancel waits for its turn."""

    @workflow
    async def tidies() -> None:
        try:
            async with saga():
                await book(echo, 1)
                await reserve(echo, 2)
                raise Trouble
        finally:
            await step(echo, 3)

    story = Story(tidies).until(lambda s: "~undo:reserve" in s.bodies)
    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert begun(story) == ["book", "reserve", "~undo:reserve", "~undo:book", "echo"]


def test_an_undoing_under_way_outlives_the_function_of_its_run() -> None:
    """The run ends when it has ended; tasks left behind are cancelled, and that is none."""

    @workflow
    async def returns() -> str:
        async def child() -> None:
            async with saga():
                await book(echo, 1)
                raise Trouble

        task = asyncio.ensure_future(child())
        await step(echo, 2)
        return f"{task.done()}"

    story = Story(returns).until(lambda s: len(s.bodies) == 2)
    for ended in ("book", "echo"):
        story.end(next(key for key in story.bodies if key.endswith(ended)))
        story.settle()
    assert [key for key in story.bodies if "undo" in key]
    story.play()

    assert story.result == "False"
    assert set(map(tuple, story.states.values())) == {("compensated",)}


def test_a_time_out_around_a_saga_is_not_swallowed_by_its_undoing() -> None:
    """The code that set it gets it."""

    @workflow
    async def hurried() -> str:
        try:
            async with asyncio.timeout(60):
                async with saga():
                    await book(echo, 1)
                    await asyncio.sleep(3_600)
        except TimeoutError:
            return "too late"
        return "gone"

    story = Story(hurried).play()

    assert story.result == "too late"
    assert begun(story) == ["book", "~undo:book"]


@pytest.mark.parametrize("when", ["~undo:charge", "~undo:book", "~undo:reserve"])
def test_undoing_goes_on_in_another_process_where_it_stopped(when: str) -> None:
    """What is undone stays undone; what was in flight is run again, as its own policy says."""
    story = Story(trip, answer=failing("ship")).until(lambda s: when in s.bodies)

    story.evict()
    story.play()

    undone = [k for k in begun(story) if k.startswith("~undo:")]
    if when == "~undo:charge":  # irreversible, and nobody can be asked
        assert (story.state, undone) == (State.HELD, ["~undo:charge"])
        story.resolve("~undo:charge", "landed", value=None)
        story.play()
        undone = [k for k in begun(story) if k.startswith("~undo:")]
        assert undone == ["~undo:charge", "~undo:book", "~undo:reserve"]
    else:
        assert undone.count(when) == 2
        assert list(dict.fromkeys(undone)) == ["~undo:charge", "~undo:book", "~undo:reserve"]
    with pytest.raises(Trouble):
        _ = story.result


def test_newest_is_what_the_journal_says_not_the_order_of_the_calls() -> None:
    """By the `seq` of the entries."""

    @workflow
    async def together() -> None:
        async with saga():
            await asyncio.gather(book(echo, 1), book(echo, 2), book(echo, 3))
            await ship(echo, 4)

    story = Story(together, answer=failing("ship")).until(lambda s: len(s.bodies) == 3)
    for key in ("book#2", "book#3", "book"):
        story.end(key)
        story.settle()
    story.play()

    assert [k for k in begun(story) if "undo" in k] == ["~undo:book", "~undo:book#3", "~undo:book#2"]


def test_siblings_in_flight_are_waited_for_and_undone_if_they_land() -> None:
    """`gather` leaves them running when one of them fails."""

    @workflow
    async def together() -> None:
        async with saga():
            await asyncio.gather(book(echo, 1), ship(echo, 2))

    story = Story(together, answer=failing("ship")).until(lambda s: len(s.bodies) == 2)
    story.end("ship")
    story.settle()
    assert sorted(begun(story)) == ["book", "ship"]
    story.play()

    assert sorted(begun(story)) == ["book", "ship", "~undo:book"]
    assert story.states == {"book": ["compensated"]}


def test_a_call_that_was_given_up_and_landed_is_undone() -> None:
    """The code does not know its result; the saga does."""

    @workflow
    async def grouped() -> None:
        async with saga(), asyncio.TaskGroup() as group:
            group.create_task(book(echo, 1))
            group.create_task(ship(echo, 2))

    story = Story(grouped, answer=failing("ship"))
    story.until(lambda s: len(s.bodies) == 2)
    story.end("ship")
    story.settle()
    assert sorted(begun(story)) == ["book", "ship"]
    story.play()

    assert sorted(begun(story)) == ["book", "ship", "~undo:book"]
    assert story.states == {"book": ["compensated"]}


def test_a_plain_step_that_was_given_up_is_neither_waited_for_nor_undone() -> None:
    """Its body is stopped and nothing is recorded: declare an effect where that is not enough."""

    @workflow
    async def grouped() -> None:
        async with saga(), asyncio.TaskGroup() as group:
            group.create_task(reserve(echo, 1))
            group.create_task(ship(echo, 2))

    story = Story(grouped, answer=failing("ship"))
    story.until(lambda s: len(s.bodies) == 2)
    story.end("ship")
    story.play()

    assert story.state is State.FAILED
    assert sorted(begun(story)) == ["reserve", "ship"]
    assert story.given_up == ["reserve"]


def test_what_an_inner_saga_owed_the_outer_one_owes_on() -> None:
    """Ended well is not ended for good."""

    @workflow
    async def nested() -> None:
        async with saga():
            await reserve(echo, 1)
            async with saga():
                await book(echo, 2)
            await ship(echo, 3)

    story = Story(nested, answer=failing("ship")).play()

    assert begun(story) == ["reserve", "book", "ship", "~undo:book", "~undo:reserve"]


def test_what_an_inner_saga_owed_is_undone_in_its_turn() -> None:
    """Newest first by the journal, however long the inner saga took to end."""

    @workflow
    async def side_by_side() -> None:
        async def slowly() -> None:
            async with saga():
                await book(echo, 1)
                await step(echo, 2)

        async with saga():
            await asyncio.gather(slowly(), reserve(echo, 3))
            await ship(echo, 4)

    story = Story(side_by_side, answer=failing("ship")).until(lambda s: len(s.bodies) == 2)
    for ended in ("book", "reserve", "echo"):
        story.end(next(key for key in story.bodies if key.endswith(ended)))
        story.settle()
    story.play()

    undone = [key.rpartition("/")[2].removeprefix("~undo:") for key in begun(story) if "undo" in key]
    assert undone == ["reserve", "book"]


def test_a_call_that_outlives_an_inner_saga_that_ended_well_is_waited_for_by_the_outer_one() -> None:
    """Owed on is also what is not known yet."""

    @workflow
    async def leaves_a_task() -> None:
        async with saga():
            async with saga():
                task = asyncio.ensure_future(book(echo, 1))
                await step(echo, 2)
            await ship(echo, 3)
            await task

    story = Story(leaves_a_task, answer=failing("ship")).until(lambda s: "echo" in s.bodies)
    story.end("echo")
    story.until(lambda s: "ship" in s.bodies)
    story.end("ship")
    story.play()

    assert begun(story)[-1] == "~undo:" + next(key for key in begun(story) if key.endswith("book"))


def test_a_plain_step_that_is_given_up_after_its_saga_ended_well_keeps_nobody() -> None:
    """Neither that saga nor the one that owes on waits for an entry that never comes."""

    @workflow
    async def grouped() -> None:
        async with saga(), asyncio.TaskGroup() as group:
            async with saga():
                group.create_task(reserve(echo, 1))
                await step(echo, 2)
            await ship(echo, 3)

    story = Story(grouped, answer=failing("ship")).until(lambda s: "echo" in s.bodies)
    story.end("echo")
    story.until(lambda s: "ship" in s.bodies)
    story.end("ship")
    story.play()

    assert story.state is State.FAILED
    assert [key.rpartition("/")[2] for key in story.given_up] == ["reserve"]
    assert not [key for key in begun(story) if "undo" in key]


def test_an_inner_saga_undoes_its_own_alone() -> None:
    """What it undid is not undone again by the outer one."""

    @workflow
    async def nested() -> str:
        async with saga():
            await reserve(echo, 1)
            try:
                async with saga():
                    await book(echo, 2)
                    await ship(echo, 3)
            except Trouble:
                pass
            await step(echo, 4)
            raise Trouble("later")

    story = Story(nested, answer=failing("ship")).play()

    assert begun(story) == ["reserve", "book", "ship", "~undo:book", "echo", "~undo:reserve"]


def test_an_undoing_that_fails_holds_the_run_with_the_list_and_retry_runs_it_again() -> None:
    """Nothing of the rest is hidden, nothing is undone twice."""
    story = Story(trip, answer=failing("ship", "~undo:book")).play()

    assert story.state is State.HELD
    assert story.reason is not None
    assert "~undo:book: an undoing failed with" in story.reason
    assert "no ~undo:book; undone: charge; not undone: book, reserve" in story.reason
    assert "~undo:book" not in story.keys
    assert story.states["~undo:book"] == ["unknown"]
    assert "no ~undo:book" in (story.intents[-1].evidence or "")

    story.answer = failing("ship")
    story.retry()
    story.play()

    with pytest.raises(Trouble, match="no ship"):
        _ = story.result
    assert [k for k in begun(story) if "undo" in k] == ["~undo:charge", "~undo:book", "~undo:book", "~undo:reserve"]
    assert [i.state for i in story.intents if i.key == "book"] == ["compensated"]


def test_an_undoing_that_a_person_did_by_hand_is_taken_as_done() -> None:
    """`resolve RUN ~undo:KEY --landed null`."""
    story = Story(trip, answer=failing("ship", "~undo:book")).play()

    story.resolve("~undo:book", "landed", value=0)
    story.play()

    assert story.state is State.FAILED
    assert [k for k in begun(story) if "undo" in k] == ["~undo:charge", "~undo:book", "~undo:reserve"]
    assert [i.state for i in story.intents if i.key == "book"] == ["compensated"]


def test_an_undoing_that_a_person_lets_fail_does_not_keep_the_rest_from_being_undone() -> None:
    """The exception that left the saga goes on all the same."""
    story = Story(trip, answer=failing("ship", "~undo:book")).play()

    story.resolve("~undo:book", "fail")
    story.play()

    with pytest.raises(Trouble, match="no ship"):
        _ = story.result
    assert [k for k in begun(story) if "undo" in k] == ["~undo:charge", "~undo:book", "~undo:reserve"]
    assert [i.state for i in story.intents if i.key == "book"] == ["landed"]


def test_what_a_person_let_fail_is_among_what_is_not_undone() -> None:
    """The next one who reads the list must not take it for done."""
    story = Story(trip, answer=failing("ship", "~undo:charge", "~undo:book")).play()
    story.resolve("~undo:charge", "fail")

    assert story.play().state is State.HELD
    assert story.reason is not None and "undone: nothing; not undone: book, reserve, charge;" in story.reason


def test_an_undoing_is_retried_as_its_own_policy_says() -> None:
    """Before anybody is called."""

    @step.policy(retry=tenacity.AsyncRetrying())
    async def stubborn(n: int) -> int:
        return n

    @workflow
    async def tries() -> None:
        async with saga():
            await step.options(name="book", compensate=stubborn)(echo, 1)
            raise Trouble

    def answer(began: Began) -> Any:
        if began.key == "~undo:book" and began.attempt < 3:
            raise Again(OSError("busy"), 60)
        return began.input

    story = Story(tries, answer=answer).play()

    assert story.state is State.FAILED
    assert [b.attempt for b in story.began if b.key == "~undo:book"] == [1, 2, 3]
    assert [e.attempt for e in story.journal if e.key == "~undo:book"] == [3]


def test_an_irreversible_undoing_in_doubt_asks_like_any_other_call() -> None:
    """Its own intent, its own key."""
    story = Story(trip, answer=failing("ship")).until(lambda s: "~undo:charge" in s.bodies)

    story.evict()
    story.play()

    assert story.state is State.HELD
    assert story.reason is not None and "step ~undo:charge: nobody knows" in story.reason
    story.resolve("~undo:charge", "not_landed")
    story.play()
    assert [(b.key, b.attempt) for b in story.began if b.key == "~undo:charge"] == [
        ("~undo:charge", 1),
        ("~undo:charge", 2),
    ]
    assert story.play().state is State.FAILED


def test_a_step_that_outlives_its_saga_is_refused() -> None:
    """Nobody would undo it."""

    @workflow
    async def loose() -> str:
        async def later() -> None:
            await asyncio.sleep(10)
            await book(echo, 1)

        tasks = []
        try:
            async with saga():
                tasks.append(asyncio.ensure_future(later()))
                await step(echo, 2)
                raise Trouble
        except Trouble:
            pass
        await asyncio.wait(tasks)
        error = tasks[0].exception()
        assert isinstance(error, ConfigurationError)
        return str(error)

    assert "its saga was left by an exception" in Story(loose).play().result


def test_a_lambda_given_at_the_call_undoes_with_more_than_the_result() -> None:
    """It has the step's name."""

    @workflow
    async def with_more() -> None:
        async with saga():
            await step.options(name="book", compensate=lambda seat: (seat, "more"))(echo, 1)
            raise Trouble

    story = Story(with_more).play()

    assert story.state is State.FAILED
    entry = story.journal[-1]
    assert (entry.key, entry.name) == ("~undo:book", "book")
    assert list(json.loads(entry.input or "").values()) == [1]


def test_a_child_tasks_saga_undoes_when_its_workflow_ends() -> None:
    """The end of the function cancels the task; its saga runs to its end all the same."""

    @workflow
    async def forgetful() -> str:
        async def inner() -> None:
            async with saga():
                await book(echo, 1)
                await asyncio.sleep(3_600)

        tasks = [asyncio.ensure_future(inner())]
        await asyncio.sleep(1)
        return f"{len(tasks)} left behind"

    story = Story(forgetful)
    story.until(lambda s: bool(s.journal))
    story.now += 2 * SECOND
    story.play()

    assert story.result == "1 left behind"
    assert begun(story) == ["1/book", "~undo:1/book"]


def test_nothing_is_undone_before_the_outcome_of_a_call_in_doubt_is_known() -> None:
    """It may have to be undone itself."""
    story = Story(trip).until(lambda s: "charge" in s.bodies)
    story.cancel()
    story.settle()
    story.evict()
    story.play()

    assert story.state is State.HELD
    assert "~undo:book" not in begun(story)

    story.resolve("charge", "landed", value=3)
    assert story.play().state is State.CANCELLED
    assert [k for k in begun(story) if "undo" in k] == ["~undo:charge", "~undo:book", "~undo:reserve"]


def test_a_reconciler_can_be_asked_about_an_undoing() -> None:
    """Not landed: it is run again."""

    async def ask(info: Any) -> Any:
        raise AssertionError

    @step.policy(effect="irreversible", reconcile=ask)
    async def give_back(n: int) -> int:
        return n

    @workflow
    async def asks() -> None:
        async with saga():
            await step.options(name="charge", effect="irreversible", compensate=give_back)(echo, 1)
            raise Trouble

    story = Story(asks, says=lambda _: Answer(IntentState.NOT_LANDED)).until(lambda s: "~undo:charge" in s.bodies)
    story.evict()
    story.play()

    assert story.state is State.FAILED
    assert story.states == {"charge": ["compensated"], "~undo:charge": ["not_landed", "landed"]}


def test_nothing_is_undone_ahead_of_the_commit_of_the_error_that_it_is_undone_for() -> None:
    """Even where the undoing is declared `durability="async"`."""

    @step.policy(durability="async")
    async def cheap(n: int) -> int:
        return n

    @workflow
    async def hasty() -> None:
        async with saga():
            await step.options(name="book", compensate=cheap)(echo, 1)
            await ship(echo, 2)

    story = Story(hasty, answer=failing("ship")).until(lambda s: "ship" in s.bodies)
    story.end("ship")
    assert story.driver is not None
    assert [type(a).__name__ for a in story.driver.take_actions()] == []
    story.play()

    assert begun(story) == ["book", "ship", "~undo:book"]


@pytest.mark.parametrize("error", [SystemExit("no stock"), KeyboardInterrupt(), type("Own", (BaseException,), {})()])
def test_a_saga_left_by_whatever_ends_the_run_undoes_what_it_owes(error: BaseException) -> None:
    """An exception is an exception, also where it is no `Exception`."""

    @workflow
    async def leaves() -> None:
        async with saga():
            await book(echo, 1)
            raise error

    story = Story(leaves).play()

    assert story.state is State.FAILED
    assert begun(story) == ["book", "~undo:book"]


def test_what_a_generator_did_that_is_closed_early_the_saga_around_it_owes() -> None:
    """To be closed is not to fail; but it is not forgotten either."""

    async def seats() -> AsyncGenerator[int, None]:
        async with saga():
            yield await book(echo, 1)
            yield await book(echo, 2)

    @workflow
    async def picks() -> None:
        async with saga():
            async with contextlib.aclosing(seats()) as them:
                async for _ in them:
                    break
            raise Trouble

    story = Story(picks).play()

    assert story.state is State.FAILED
    assert begun(story) == ["book", "~undo:book"]


def test_sagas_left_in_another_order_keep_what_they_owe() -> None:
    """Each step is owed by the innermost that is not left yet."""

    @workflow
    async def tangled() -> None:
        outer, inner = saga(), saga()
        await outer.__aenter__()
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        try:
            await book(echo, 1)
            raise Trouble
        except Trouble as error:
            await inner.__aexit__(type(error), error, None)

    story = Story(tangled).play()

    assert begun(story) == ["book", "~undo:book"]


def test_what_a_saga_owes_passes_by_one_that_was_left_before_it() -> None:
    """Left by an exception it owes nothing new: the one around it does."""

    @workflow
    async def tangled() -> None:
        async with saga():
            middle, inner = saga(), saga()
            await middle.__aenter__()
            await inner.__aenter__()
            error = Trouble()
            await middle.__aexit__(type(error), error, None)
            await book(echo, 1)
            await inner.__aexit__(None, None, None)
            raise Trouble

    story = Story(tangled).play()

    assert begun(story) == ["book", "~undo:book"]


def test_a_saga_lies_in_the_one_that_it_is_entered_in() -> None:
    """Wherever it was made."""

    @workflow
    async def made_before() -> None:
        outer, inner = saga(), saga()
        async with outer:
            async with inner:
                await book(echo, 1)
            raise Trouble

    story = Story(made_before).play()

    assert begun(story) == ["book", "~undo:book"]


def test_a_saga_is_entered_once() -> None:
    """A second time would owe what the first one owed."""

    @workflow
    async def again() -> None:
        once = saga()
        async with once:
            pass
        async with once:
            pass

    story = Story(again).play()

    with pytest.raises(ConfigurationError, match="entered once"):
        _ = story.result


def test_a_result_that_its_undoing_cannot_be_given_holds_the_run_with_the_list() -> None:
    """Of a call that was given up nobody else has read it; a person sees what was and what was not undone."""

    async def spells(n: int) -> str:
        """Never called here."""
        return str(n)

    books: list[Any] = [echo]

    @workflow
    async def grouped() -> None:
        async with saga():
            await reserve(echo, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(book(books[0], 2))
                group.create_task(ship(echo, 3))

    story = Story(grouped, answer=failing("ship")).until(lambda s: len(s.bodies) == 2)
    for ended in ("ship", "book"):
        story.end(next(key for key in story.bodies if key.endswith(ended)))
        story.settle()
    story.evict()

    books[:] = [spells]
    assert story.play().state is State.HELD
    assert story.reason is not None and "book cannot be undone" in story.reason
    assert "undone: nothing; not undone: book, reserve" in story.reason
    books[:] = [echo]
    story.retry()
    assert story.play().state is State.FAILED
    assert [key for key in begun(story) if "undo" in key][-2:] == ["~undo:book", "~undo:reserve"]


def test_a_saga_in_a_run_that_leaves_memory_undoes_nothing() -> None:
    """What its code says then counts for nothing; the next claim goes on inside the saga."""
    left: list[str] = []

    @workflow
    async def leaves() -> None:
        try:
            async with saga():
                try:
                    await book(echo, 1)
                    await ship(echo, 2)
                finally:
                    await step(echo, 3)
        except BaseException as error:
            left.append(type(error).__name__)
            raise

    story = Story(leaves).until(lambda s: "ship" in s.bodies)
    story.evict()

    assert left == ["Gone"]
    assert story.play().state is State.SUCCEEDED
    assert begun(story) == ["book", "ship", "ship", "echo"]


def test_an_irreversible_undoing_that_failed_is_run_again_when_a_person_says_that_it_did_not_happen() -> None:
    """Retry alone would not do: nobody knows. The reason names the word that helps."""
    story = Story(trip, answer=failing("ship", "~undo:charge")).play()
    assert story.state is State.HELD
    assert story.reason is not None and "~undo:charge --not-landed" in story.reason

    story.retry()
    assert story.play().state is State.HELD
    story.answer = failing("ship")
    story.resolve("~undo:charge", "not_landed")

    assert story.play().state is State.FAILED
    assert [b.key for b in story.began if "undo" in b.key] == [
        "~undo:charge",
        "~undo:charge",
        "~undo:book",
        "~undo:reserve",
    ]

"""A ten-step workflow, cancelled, timed out, retried, evicted, diverged and rewound at each of its awaits."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from replaykit.replay.calls import Workflow, step, workflow
from replaykit.replay.entries import Kind, State
from tests.replay.drive import echo, other
from tests.replay.story import SECOND, Again, Began, Story, TimedOut

STEPS = range(1, 11)


async def tidy(n: int) -> int:
    return n


@workflow
async def ten() -> list[int]:
    """Ten steps, and one to tidy up if it is cancelled."""
    done: list[int] = []
    try:
        for n in STEPS:
            done.append(await step(echo, n))
    except asyncio.CancelledError:
        await step(tidy, len(done))
        raise
    return done


def key_of(n: int, name: str = "echo") -> str:
    return name if n == 1 else f"{name}#{n}"


def in_flight(n: int) -> Any:
    """The n-th body runs."""
    return lambda story: key_of(n) in story.bodies


def bodies(story: Story) -> Counter[str]:
    return Counter(b.key for b in story.began)


def fails_once(n: int, error: Exception) -> Any:
    """The n-th body fails the first time."""

    def answer(began: Began) -> Any:
        if began.key == key_of(n) and began.attempt == 1:
            raise error
        return began.input

    return answer


@pytest.mark.parametrize("n", STEPS)
def test_cancelled_at_an_await_it_tidies_up_and_ends_cancelled(n: int) -> None:
    """The body in flight is given up, the steps before it stay, `except CancelledError` may run a step."""
    story = Story(ten).until(in_flight(n))

    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert story.keys == [*(key_of(i) for i in range(1, n)), "~cancel", "tidy"]
    assert story.given_up == [key_of(n)]
    assert story.journal[-1].output == str(n - 1)


@pytest.mark.parametrize("n", STEPS)
def test_cancelled_while_another_worker_takes_over_it_ends_the_same(n: int) -> None:
    """The request is an entry: after a death between it and the end, the next worker sees it in its place."""
    story = Story(ten).until(in_flight(n))
    story.cancel()
    story.until(lambda s: "tidy" in s.bodies)

    story.evict()
    story.play()

    assert story.state is State.CANCELLED
    assert story.keys == [*(key_of(i) for i in range(1, n)), "~cancel", "tidy"]
    assert bodies(story)["tidy"] == 2


@pytest.mark.parametrize("n", STEPS)
def test_timed_out_at_an_await_it_fails_with_timeout_error(n: int) -> None:
    """The outcome says so; what was done before is kept."""
    story = Story(ten, fails_once(n, TimedOut())).play()

    with pytest.raises(TimeoutError, match=rf"step {key_of(n)}: attempt 1 did not end within 1 s"):
        assert story.result
    assert [e.outcome for e in story.journal] == ["ok"] * (n - 1) + ["timeout"]


@pytest.mark.parametrize("n", STEPS)
@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_tried_again_at_an_await_it_goes_on(n: int, wait: float) -> None:
    """The decision is a row; a long back-off leaves memory, and the next claim goes on counting."""
    story = Story(ten, fails_once(n, Again(ValueError("not yet"), wait))).play()

    assert story.result == list(STEPS)
    assert bodies(story) == Counter({key_of(i): 2 if i == n else 1 for i in STEPS})
    assert [(a.key, a.attempt, a.next_at - a.ended_at) for a in story.attempts] == [(key_of(n), 1, wait * SECOND)]
    assert story.journal[n - 1].attempt == 2
    assert len({b.idempotency_key for b in story.began if b.key == key_of(n)}) == 1
    assert story.claims == (2 if wait else 1)


@pytest.mark.parametrize("n", STEPS)
def test_evicted_at_an_await_only_the_body_in_flight_runs_again(n: int) -> None:
    """A completed step runs once."""
    story = Story(ten).until(in_flight(n))

    story.evict()
    story.play()

    assert story.result == list(STEPS)
    assert bodies(story) == Counter({key_of(i): 2 if i == n else 1 for i in STEPS})
    assert story.keys == [key_of(i) for i in STEPS]


@workflow(name="ten")
async def ten_and_more() -> list[int]:
    """One more await, so that the tenth entry is not the end."""
    done = [await step(echo, n) for n in STEPS]
    await step(tidy, 0)
    return done


def changed_at(n: int) -> Workflow[..., Any]:
    """Today's code: the n-th step is another."""

    @workflow(name="ten")
    async def changed() -> list[int]:
        done = [await (step(other, i) if i == n else step(echo, i)) for i in STEPS]
        await step(tidy, 0)
        return done

    return changed


@pytest.mark.parametrize("n", STEPS)
def test_diverged_at_an_await_it_is_held_and_retry_takes_it_on_with_the_right_code(n: int) -> None:
    """The reason names both sides; the code that fits takes the run to its end, and nothing has run twice."""
    story = Story(ten_and_more).until(lambda s: len(s.journal) == n)
    story.evict()
    story.claim(changed_at(n))
    story.play()

    assert story.state is State.HELD
    assert story.reason is not None
    assert f"the journal holds step {key_of(n)}, the code asks for other at" in story.reason

    story.retry()
    story.claim(ten_and_more)
    story.play()

    assert story.result == list(STEPS)
    interrupted = "tidy" if n == 10 else key_of(n + 1)
    assert all(count == (2 if key == interrupted else 1) for key, count in bodies(story).items())


@pytest.mark.parametrize("n", STEPS)
def test_cancelled_while_held_it_ends_cancelled(n: int) -> None:
    """The code that cannot be replayed cannot be told either: the entry says what it was held for."""
    story = Story(ten_and_more).until(lambda s: len(s.journal) == n)
    story.evict()
    story.claim(changed_at(n))
    story.play()

    story.cancel()
    story.play()

    assert story.state is State.CANCELLED
    assert story.keys == [*(key_of(i) for i in range(1, n + 1)), "~cancel"]
    assert "the journal holds step" in (story.journal[-1].output or "")


@pytest.mark.parametrize("n", STEPS)
def test_rewound_at_an_await_it_goes_on_from_the_error(n: int) -> None:
    """`retry` of the failed run: the steps before stand, the failed one is tried again under its own key."""
    story = Story(ten, fails_once(n, OSError("down"))).play()
    assert story.state is State.FAILED

    story.retry()
    story.play()

    assert story.result == list(STEPS)
    assert bodies(story) == Counter({key_of(i): 2 if i == n else 1 for i in STEPS})
    assert story.keys == [*(key_of(i) for i in range(1, n + 1)), "~rewind", *(key_of(i) for i in range(n, 11))]
    rewind, again = story.journal[n], story.journal[n + 1]
    assert (rewind.kind, rewind.to_seq) == (Kind.REWIND, n)
    assert (again.attempt, again.reuses) == (2, None)
    assert len({b.idempotency_key for b in story.began if b.key == key_of(n)}) == 1

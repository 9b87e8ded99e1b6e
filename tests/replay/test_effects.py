"""Facts about steps with an effect: intents, calls in doubt, a person's word, the barrier; on one run's whole life."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import tenacity

from replaykit.errors import InDoubt, NotJournalable, NotLanded
from replaykit.replay.actions import Reconcile
from replaykit.replay.answers import Landed, Unknown
from replaykit.replay.calls import StepInfo, sleep, step, workflow
from replaykit.replay.doubts import Answer
from replaykit.replay.entries import IntentState, Kind, Observation, State, Unit, Verdict
from replaykit.replay.outcomes import result_outcome
from tests.replay.drive import echo, other
from tests.replay.story import SECOND, Again, Began, Story, TimedOut


async def ask(info: StepInfo) -> Landed[int] | NotLanded | Unknown:
    """Never called here: the story's `says` answers for it."""
    raise AssertionError


charge = step.options(name="charge", effect="irreversible")
charge_that_can_be_asked = step.options(name="charge", effect="irreversible", reconcile=ask)
charge_by_key = step.options(name="charge", effect="idempotent")


@workflow
async def pays() -> int:
    return await charge(echo, 1)


@workflow
async def pays_after_a_look() -> int:
    await step(echo, 1)
    await charge(echo, 2)
    return await step(echo, 3)


@workflow
async def pays_and_can_ask() -> int:
    return await charge_that_can_be_asked(echo, 1)


@workflow
async def pays_by_key() -> int:
    return await charge_by_key(echo, 1)


def landed(asked: Reconcile, value: Any = 7) -> Answer:
    story = Story(pays)
    return Answer(IntentState.LANDED, result_outcome(asked.call.info, value, 0, story.settings))


def not_landed(asked: Reconcile) -> Answer:
    return Answer(IntentState.NOT_LANDED)


def raising(error: Exception) -> Callable[[Began], Any]:
    def answer(began: Began) -> Any:
        raise error

    return answer


def died_in_the_call(workflow: Any, **more: Any) -> Story:
    """Its worker dies while the body runs."""
    story = Story(workflow, **more).until(lambda s: "charge" in s.bodies)
    story.evict()
    return story


# --- intents ----------------------------------------------------------------------------------------------------------


def test_an_intent_is_committed_before_its_body_begins_and_closed_with_the_steps_entry() -> None:
    """`Story` itself refuses a body without an open intent."""
    story = Story(pays).play()

    assert story.result == 1
    assert [len(u.intents) for u in story.units] == [1, 0]
    assert [[c.state for c in u.closings] for u in story.units] == [[], ["landed"]]
    assert [e.key for e in story.units[1].entries] == ["charge"]


def test_an_intent_shares_the_commit_of_the_entries_that_led_to_it() -> None:
    """Two writes a step, but one wait."""
    story = Story(pays_after_a_look).play()

    together = next(u for u in story.units if u.intents)
    assert [e.key for e in together.entries] == ["echo"]
    assert [(b.key, b.idempotency_key == story.journal[1].idempotency_key) for b in story.began] == [
        ("echo", False),
        ("charge", True),
        ("echo#2", False),
    ]


def test_an_intent_holds_the_input_in_full_and_the_key_of_the_entry() -> None:
    """Whoever asks what became of it needs both."""

    @workflow
    async def pays_much() -> str:
        return await charge(str.upper, "x" * 100_000)

    story = Story(pays_much).play()

    (intent,) = story.intents
    assert json.loads(intent.input) == {"self": "x" * 100_000} or "x" * 100_000 in intent.input
    assert story.journal[0].input == intent.input
    assert story.journal[0].idempotency_key == intent.idempotency_key


def test_an_argument_that_cannot_be_journaled_is_refused_by_a_step_with_an_effect() -> None:
    """Its input is what a person or a reconciler goes by."""

    @workflow
    async def pays_with() -> None:
        await charge(print, object())

    story = Story(pays_with).play()

    with pytest.raises(NotJournalable, match="resources"):
        _ = story.result
    assert story.intents == []


# --- a worker dies ----------------------------------------------------------------------------------------------------


def test_a_call_that_nobody_can_be_asked_about_is_not_made_again_and_the_run_is_held() -> None:
    """At most once."""
    story = died_in_the_call(pays).play()

    assert story.state is State.HELD
    assert story.reason is not None
    assert "step charge: nobody knows whether its call landed" in story.reason
    assert "replaykit resolve" in story.reason
    assert story.states == {"charge": ["unknown"]}
    assert not story.intents[0].resolved
    assert len(story.began) == 1


def test_a_call_that_landed_completes_its_step_without_its_body() -> None:
    """The reconciler's value is the step's."""
    story = died_in_the_call(pays_and_can_ask, says=landed).play()

    assert story.result == 7
    assert story.states == {"charge": ["landed"]}
    assert [(a.attempt, a.error) for a in story.asked] == [(1, None)]
    assert len(story.began) == 1


def test_a_call_that_did_not_land_is_made_again_with_its_key_under_a_new_intent() -> None:
    """The old intent is closed and the new one written in one unit."""
    story = died_in_the_call(pays_and_can_ask, says=not_landed).play()

    assert story.result == 1
    assert story.states == {"charge": ["not_landed", "landed"]}
    assert [b.attempt for b in story.began] == [1, 2]
    assert len({b.idempotency_key for b in story.began}) == 1
    turn = next(u for u in story.units if u.closings)
    assert [(c.attempt, c.state, c.by) for c in turn.closings] == [(1, "not_landed", "reconcile")]
    assert [i.attempt for i in turn.intents] == [2]
    assert story.journal[0].attempt == 2


def test_a_reconciler_that_does_not_know_leaves_the_run_to_a_person_with_its_reason() -> None:
    """What it said is in the sentence."""
    story = died_in_the_call(pays_and_can_ask).play()

    assert story.state is State.HELD
    assert story.reason is not None and "the shop is closed" in story.reason
    assert story.states == {"charge": ["unknown"]}


def test_an_answer_for_another_attempt_changes_nothing() -> None:
    """It was given for a call that is not in question any more."""
    story = died_in_the_call(pays_and_can_ask)
    story.claim()
    story.settle()
    assert story.driver is not None

    story.driver.reconciled("charge", 2, landed(story.asked[0]), story.now)
    story.settle()

    assert story.journal == []


def test_an_idempotent_call_is_made_again_under_its_intent_with_its_key() -> None:
    """The other side recognises it."""
    story = died_in_the_call(pays_by_key).play()

    assert story.result == 1
    assert story.states == {"charge": ["landed"]}
    assert len({b.idempotency_key for b in story.began}) == 1
    assert [b.attempt for b in story.began] == [1, 1]


def test_an_idempotent_call_whose_key_may_be_forgotten_is_in_doubt() -> None:
    """`key_valid_for=` has passed since the first try."""

    @workflow
    async def pays_for_a_day() -> int:
        return await step.options(name="charge", effect="idempotent", key_valid_for=86_400)(echo, 1)

    fresh, stale = died_in_the_call(pays_for_a_day), died_in_the_call(pays_for_a_day)
    fresh.now += 80_000 * SECOND
    stale.now += 90_000 * SECOND

    assert fresh.play().result == 1
    assert stale.play().state is State.HELD


def test_a_body_that_did_not_begin_before_its_worker_drained_leaves_no_doubt() -> None:
    """Its intent is closed, and opened again under the same attempt."""
    story = Story(pays, postpones=True)
    story.claim()
    story.settle()
    assert story.states == {"charge": ["open"]} and story.driver is not None

    story.driver.body_unbegun("charge", story.now)
    story.driver.drain(story.now)
    story.settle()
    assert (story.state, story.states) == (State.PENDING, {"charge": ["not_landed"]})

    story.postpones = False
    assert story.play().result == 1
    assert story.states == {"charge": ["landed"]}
    assert [b.attempt for b in story.began] == [1]


def test_a_call_in_flight_at_the_end_of_a_drain_leaves_its_intent_open() -> None:
    """Whoever claims the run asks."""
    story = Story(pays).until(lambda s: "charge" in s.bodies)
    assert story.driver is not None

    story.bodies.clear()
    story.driver.body_stopped("charge", story.now)
    story.settle()

    assert (story.state, story.states) == (State.PENDING, {"charge": ["open"]})
    assert story.play().state is State.HELD


# --- a body fails -----------------------------------------------------------------------------------------------------


@workflow
async def pays_a_card_that_may_be_declined() -> int:
    declined = step.options(name="charge", effect="irreversible", not_landed=(ConnectionError,), reconcile=ask)
    return await declined(echo, 1)


@pytest.mark.parametrize("error", [ConnectionError("refused"), NotLanded("the card is expired")])
def test_an_exception_that_says_it_did_not_happen_is_the_steps_error(error: Exception) -> None:
    """Declared with `not_landed=`, or raised as `NotLanded`."""
    story = Story(pays_a_card_that_may_be_declined, answer=raising(error)).play()

    with pytest.raises(type(error), match=str(error)):
        _ = story.result
    assert story.states == {"charge": ["not_landed"]}
    assert story.asked == []


def test_any_other_exception_is_asked_about_and_the_steps_error_if_the_call_did_not_land() -> None:
    """The body does not run again: its own error is what the code gets."""
    story = Story(pays_and_can_ask, answer=raising(OSError("reset")), says=not_landed).play()

    with pytest.raises(OSError, match="reset"):
        _ = story.result
    assert [str(a.error) for a in story.asked] == ["reset"]
    assert story.states == {"charge": ["not_landed"]}
    assert len(story.began) == 1


def test_a_call_that_landed_although_its_body_failed_succeeds() -> None:
    """The answer was lost, not the deed."""
    story = Story(pays_and_can_ask, answer=raising(OSError("reset")), says=landed).play()

    assert story.result == 7


@pytest.mark.parametrize("error", [OSError("reset"), TimedOut()])
def test_an_exception_or_a_time_out_that_nobody_can_be_asked_about_holds_the_run(error: Exception) -> None:
    """The reason names what the body ended with."""
    story = Story(pays, answer=raising(error)).play()

    assert story.state is State.HELD
    assert story.reason is not None
    assert ("reset" if isinstance(error, OSError) else "TimeoutError") in story.reason
    assert story.journal == []


def test_the_error_of_a_held_call_outlives_its_worker() -> None:
    """A person's "not landed" then delivers it."""
    story = Story(pays, answer=raising(OSError("reset"))).play()

    story.resolve("charge", "not_landed")

    with pytest.raises(OSError, match="reset"):
        _ = story.play().result
    assert len(story.began) == 1


def test_a_result_that_cannot_be_journaled_holds_the_run_for_the_call_landed() -> None:
    """Nobody is asked: it is known that it landed, not what it gave."""
    story = Story(pays_and_can_ask, answer=lambda _: object()).play()

    assert story.state is State.HELD
    assert story.asked == []
    assert story.reason is not None and "cannot be journaled" in story.reason
    assert story.states == {"charge": ["unknown"]}


def test_an_idempotent_step_that_fails_has_its_error_and_nobody_is_asked() -> None:
    """Its intent is closed as unknown: whether it landed matters to nobody, as long as the key is the same."""
    story = Story(pays_by_key, answer=raising(OSError("reset"))).play()

    with pytest.raises(OSError, match="reset"):
        _ = story.result
    assert story.states == {"charge": ["unknown"]}
    assert story.intents[0].resolved


def test_each_try_of_a_step_with_an_effect_has_its_own_intent_and_the_same_key() -> None:
    """Those that did not land say so."""

    @workflow
    async def pays_stubbornly() -> int:
        return await step.options(
            name="charge", effect="irreversible", not_landed=(ConnectionError,), retry=tenacity.AsyncRetrying()
        )(echo, 1)

    def answer(began: Began) -> Any:
        if began.attempt < 3:
            raise Again(ConnectionError("refused"), 60)
        return began.input

    story = Story(pays_stubbornly, answer=answer).play()

    assert story.result == 1
    assert story.states == {"charge": ["not_landed", "not_landed", "landed"]}
    assert [a.attempt for a in story.attempts] == [1, 2]
    assert story.journal[0].attempt == 3
    assert len({b.idempotency_key for b in story.began}) == 1


# --- a person's word --------------------------------------------------------------------------------------------------


def test_a_persons_word_that_it_landed_completes_the_step_with_their_value() -> None:
    """The entry names the word, the intent the person."""
    story = died_in_the_call(pays).play()

    story.resolve("charge", "landed", value=5, comment="seen at the bank")
    story.play()

    assert story.result == 5
    assert story.journal[0].mailbox_id == story.mailbox[-1].id
    evidence = json.loads(story.intents[0].evidence or "{}")
    assert (evidence["by"], evidence["comment"]) == ("eve", "seen at the bank")


def test_a_persons_word_that_it_did_not_land_makes_the_call_again() -> None:
    """Its worker was dead: same key, next attempt."""
    story = died_in_the_call(pays).play()

    story.resolve("charge", "not_landed")

    assert story.play().result == 1
    assert story.states == {"charge": ["not_landed", "landed"]}


def test_a_person_may_let_a_call_fail_that_nobody_knows_of() -> None:
    """The code gets an error that says who."""
    story = died_in_the_call(pays).play()

    story.resolve("charge", "fail", comment="the shop is gone")

    with pytest.raises(InDoubt, match="eve let it fail: the shop is gone"):
        _ = story.play().result
    assert story.states == {"charge": ["unknown"]}
    assert story.intents[0].resolved


def test_a_value_that_does_not_fit_holds_the_run_again_and_another_word_counts() -> None:
    """Nothing is lost by a slip of the pen."""
    story = died_in_the_call(pays).play()

    story.resolve("charge", "landed", value="five")
    assert story.play().state is State.HELD
    assert story.reason is not None and "what eve said it returned does not fit" in story.reason

    story.resolve("charge", "landed", value=5)
    assert story.play().result == 5


def test_a_call_that_a_person_let_fail_is_asked_about_anew_after_a_retry() -> None:
    """Nobody knows more than before: it is not made again, and the old word does not count twice."""
    story = died_in_the_call(pays).play()
    story.resolve("charge", "fail")
    assert story.play().state is State.FAILED

    story.retry()
    assert story.play().state is State.HELD
    story.resolve("charge", "landed", value=3)

    assert story.play().result == 3
    assert len(story.began) == 1


def test_retry_of_a_run_in_doubt_asks_its_reconciler_again() -> None:
    """The shop may have opened meanwhile."""
    story = died_in_the_call(pays_and_can_ask).play()
    story.says = landed

    story.retry()

    assert story.play().result == 7


def test_a_cancel_of_a_run_in_doubt_reaches_its_code_and_does_not_settle_the_doubt() -> None:
    """It cannot end before the outcome is known."""
    story = died_in_the_call(pays).play()

    story.cancel()
    assert story.play().state is State.HELD
    assert [e.kind for e in story.journal] == [Kind.CANCEL]

    story.resolve("charge", "not_landed")
    assert story.play().state is State.CANCELLED
    assert [(e.key, e.outcome) for e in story.journal] == [("~cancel", "ok"), ("charge", "cancelled")]
    assert len(story.began) == 1


# --- given up ---------------------------------------------------------------------------------------------------------


@workflow
async def pays_within_a_minute() -> str:
    try:
        async with asyncio.timeout(60):
            await charge_that_can_be_asked(echo, 1)
    except TimeoutError:
        return "too late"
    return "paid"


def timed_out_in_the_call() -> Story:
    story = Story(pays_within_a_minute).until(lambda s: "charge" in s.bodies)
    story.now += 61 * SECOND
    assert story.driver is not None
    story.driver.tick(story.now)
    story.settle()
    return story


def test_a_run_does_not_end_before_the_outcome_of_a_call_it_gave_up() -> None:
    """The await ends at once, the call goes on and is recorded."""
    story = timed_out_in_the_call()
    assert story.state is State.RUNNING
    assert story.given_up == [] and "charge" in story.bodies

    story.play()

    assert story.result == "too late"
    assert [(e.key, e.outcome) for e in story.journal] == [("~timer#1", "ok"), ("charge", "ok")]
    assert story.states == {"charge": ["landed"]}


def test_a_call_given_up_whose_worker_died_is_asked_about_and_not_made_again() -> None:
    """NotLanded: the entry says that it was given up."""
    story = timed_out_in_the_call()
    story.says = not_landed
    story.evict()

    assert story.play().result == "too late"
    assert [(e.key, e.outcome) for e in story.journal] == [("~timer#1", "ok"), ("charge", "cancelled")]
    assert story.states == {"charge": ["not_landed"]}
    assert len(story.began) == 1


def test_a_call_given_up_before_its_body_began_is_never_made() -> None:
    """Its intent is closed in the unit of the entry that says so."""
    story = Story(pays_within_a_minute, postpones=True)
    story.claim()
    story.settle()
    assert story.states == {"charge": ["open"]} and story.driver is not None

    story.now += 61 * SECOND
    story.driver.tick(story.now)
    story.play()

    assert story.result == "too late"
    assert story.began == []
    last = next(u for u in story.units if any(e.key == "charge" for e in u.entries))
    assert [(e.key, e.outcome) for e in last.entries if e.key == "charge"] == [("charge", "cancelled")]
    assert [(c.key, c.state) for c in last.closings] == [("charge", "not_landed")]


def test_a_call_given_up_in_the_turn_it_was_made_has_no_intent_and_an_entry() -> None:
    """Nobody waits for more than that."""

    @workflow
    async def changes_its_mind() -> str:
        task = asyncio.ensure_future(charge(echo, 1))
        await asyncio.sleep(0)
        task.cancel()
        await step(other, 1)
        return "done"

    story = Story(changes_its_mind).play()

    assert story.result == "done"
    assert story.intents == []
    assert sorted((e.key, e.outcome) for e in story.journal) == [("charge", "cancelled"), ("other", "ok")]
    assert [b.key for b in story.began] == ["other"]


def test_a_run_that_gave_up_a_call_waits_for_it_in_another_process_as_well() -> None:
    """Once its outcome is recorded, the journal alone says that the run may end."""
    story = timed_out_in_the_call()
    story.end("charge")
    story.refuses = lambda unit: unit.change is not None and story.claims == 1
    assert story.driver is not None
    unit = story.driver.next_unit()
    assert unit is not None and [e.key for e in unit.entries] == ["charge"]

    story.journal += unit.entries
    story._write_effects(unit)
    story.evict()
    story.refuses = lambda unit: False

    assert story.play().result == "too late"
    assert story.asked == [] and len(story.began) == 1


# --- the journal is read again ----------------------------------------------------------------------------------------


def test_a_refused_unit_makes_no_call_twice_and_leaves_no_doubt() -> None:
    """What is in flight goes on, what was written and had not begun begins under its intent."""

    @workflow
    async def pays_twice_and_naps() -> list[int]:
        async def nap() -> int:
            await sleep(30)
            return 0

        return list(await asyncio.gather(charge(echo, 1), charge(echo, 2), nap()))

    refused: list[Unit] = []

    def refuses(unit: Unit) -> bool:
        if unit.entries and len(refused) < 3:
            refused.append(unit)
            return True
        return False

    story = Story(pays_twice_and_naps, refuses=refuses).play()

    assert story.result == [1, 2, 0]
    assert sorted(b.key for b in story.began) == ["charge", "charge#2"]
    assert story.states == {"charge": ["landed"], "charge#2": ["landed"]}


def test_an_error_in_doubt_survives_a_refused_unit() -> None:
    """It is not taken for a dead worker's call, and made again."""

    @workflow
    async def pays_and_looks() -> int:
        paid, _ = await asyncio.gather(charge_that_can_be_asked(echo, 1), step(other, 2), return_exceptions=True)
        assert isinstance(paid, OSError)
        return len(str(paid))

    def answer(began: Began) -> Any:
        if began.key == "charge":
            raise OSError("reset")
        return began.input

    seen: list[Unit] = []

    def refuses(unit: Unit) -> bool:
        seen.append(unit)
        return any(e.key == "other" for e in unit.entries) and len(seen) < 4

    story = Story(pays_and_looks, answer=answer, says=not_landed, refuses=refuses)
    story.until(lambda s: len(s.bodies) == 2)
    story.end("charge")
    story.settle()
    story.end("other")
    story.settle()

    assert story.play().result == 5
    assert len([b for b in story.began if b.key == "charge"]) == 1


# --- retry of a failed run --------------------------------------------------------------------------------------------


def test_a_landed_call_is_not_made_again_after_a_retry_with_another_input() -> None:
    """Both inputs are in the reason."""
    price = [100]

    @workflow
    async def pays_the_price() -> int:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(step(other, 1))
                group.create_task(charge(echo, price[0]))
        except* OSError:
            raise
        return 1

    def answer(began: Began) -> Any:
        if began.key.endswith("other"):
            raise OSError("down")
        return began.input

    story = Story(pays_the_price, answer=answer)
    story.until(lambda s: len(s.bodies) == 2)
    story.play()
    assert story.state is State.FAILED

    price[0] = 200
    story.answer = lambda began: began.input
    story.retry()

    assert story.play().state is State.HELD
    assert story.reason is not None and "100" in story.reason and "200" in story.reason
    price[0] = 100
    story.retry()
    assert story.play().result == 1
    assert [b.input for b in story.began if b.key.endswith("charge")] == [100]


# --- observations -----------------------------------------------------------------------------------------------------


def test_what_a_body_observes_is_committed_while_it_runs_and_seen_by_the_next_worker() -> None:
    """An identifier that is lost cannot be asked about."""
    story = Story(pays_and_can_ask).until(lambda s: "charge" in s.bodies)
    assert story.driver is not None

    story.driver.observe(Observation("charge", 1, "ticket", "123", story.now), story.now)
    story.settle()
    assert [(o.kind, o.id) for o in story.observations] == [("ticket", "123")]

    story.evict()
    story.claim()
    story.settle()
    assert story.driver.observed("charge") == [("ticket", "123")]


def test_what_was_observed_survives_a_refused_unit() -> None:
    """It goes out again with the next one."""
    refused: list[Unit] = []

    def refuses(unit: Unit) -> bool:
        if unit.observations and not refused:
            refused.append(unit)
            return True
        return False

    story = Story(pays, refuses=refuses).until(lambda s: "charge" in s.bodies)
    assert story.driver is not None
    story.driver.observe(Observation("charge", 1, "ticket", "123", story.now), story.now)
    story.settle()

    assert [(o.kind, o.id) for o in story.observations] == [("ticket", "123")]
    assert story.play().result == 1


def test_a_transactional_steps_entry_goes_into_a_unit_of_its_bodys_transaction() -> None:
    """One such step a unit."""

    @workflow
    async def books_twice() -> list[int]:
        book = step.options(name="book", effect="transactional")
        return list(await asyncio.gather(book(echo, 1), book(echo, 2)))

    story = Story(books_twice).until(lambda s: len(s.bodies) == 2)
    assert story.driver is not None
    for key in ("book", "book#2"):
        call = story.bodies.pop(key).call
        outcome = result_outcome(call.info, 1, story.now, story.settings)
        outcome.in_transaction = True
        story.driver.body_ended(key, outcome, story.now)
    story.settle()

    within = [(u.within, [e.key for e in u.entries]) for u in story.units if u.entries]
    assert within == [("book", ["book"]), ("book#2", ["book#2"])]
    assert story.intents == []


# --- the code changes while a call is in doubt ------------------------------------------------------------------------


@pytest.mark.parametrize("effect", ["idempotent", "irreversible"])
def test_a_call_in_doubt_is_not_taken_for_one_with_another_input(effect: Any) -> None:
    """Neither made again with its key, nor asked about by a reconciler that is told the new input."""
    price = [100]

    @workflow
    async def pays_the_price() -> int:
        asked = ask if effect == "irreversible" else None
        return await step.options(name="charge", effect=effect, reconcile=asked)(echo, price[0])

    story = died_in_the_call(pays_the_price, says=landed)
    price[0] = 200

    assert story.play().state is State.HELD
    assert story.reason is not None and "100" in story.reason and "200" in story.reason
    assert story.asked == [] and len(story.began) == 1

    price[0] = 100
    story.retry()
    assert story.play().result == (7 if effect == "irreversible" else 100)


def test_a_call_made_with_another_input_after_a_persons_word_has_another_key() -> None:
    """One key never has two inputs."""
    price = [100]

    @workflow
    async def pays_the_price() -> int:
        return await charge(echo, price[0])

    story = died_in_the_call(pays_the_price)
    price[0] = 200
    assert story.play().state is State.HELD

    story.resolve("charge", "not_landed")
    assert story.play().result == 200
    assert len({b.idempotency_key for b in story.began}) == 2


def test_a_call_in_doubt_that_the_code_no_longer_asks_for_holds_the_run() -> None:
    """Under another key it would be made a second time; a person's word lets the new code go on."""

    @workflow
    async def pays_by_another_name() -> int:
        return await step.options(name="pay", effect="irreversible")(echo, 1)

    story = died_in_the_call(pays)
    story.claim(pays_by_another_name)

    assert story.play().state is State.HELD
    assert story.reason is not None and "no longer asks for it" in story.reason and "pay at" in story.reason
    assert [b.key for b in story.began] == ["charge"]
    assert story.states == {"charge": ["unknown"]}

    story.resolve("charge", "not_landed")
    assert story.play().result == 1
    assert [b.key for b in story.began] == ["charge", "pay"]
    assert story.states == {"charge": ["not_landed"], "pay": ["landed"]}


def test_a_word_from_before_a_retry_does_not_let_new_code_pass_a_call_in_doubt() -> None:
    """Whoever let it fail did so for the code of that time."""

    @workflow
    async def pays_by_another_name() -> int:
        return await step.options(name="pay", effect="irreversible")(echo, 1)

    story = died_in_the_call(pays).play()
    story.resolve("charge", "fail")
    assert story.play().state is State.FAILED
    story.retry()
    assert story.play().state is State.HELD

    story.retry()
    story.claim(pays_by_another_name)

    assert story.play().state is State.HELD
    assert [b.key for b in story.began] == ["charge"]


def test_a_run_does_not_end_past_a_call_in_doubt_that_its_code_has_dropped() -> None:
    """It is held, not finished."""

    @workflow
    async def pays_no_more() -> int:
        return 0

    story = died_in_the_call(pays)
    story.claim(pays_no_more)

    assert story.play().state is State.HELD


def test_the_error_of_a_call_in_doubt_outlives_a_drain_in_the_middle_of_the_question() -> None:
    """Not landed: that error is the step's, and the call is not made again."""
    story = Story(pays_and_can_ask, answer=raising(OSError("reset")), says=not_landed).until(lambda s: bool(s.asking))
    assert story.driver is not None

    story.asking.clear()
    story.driver.reconcile_stopped("charge", story.now)
    story.settle()
    assert (story.state, story.states) == (State.PENDING, {"charge": ["open"]})

    with pytest.raises(OSError, match="reset"):
        _ = story.play().result
    assert len(story.began) == 1


def test_the_error_of_a_call_that_ends_in_a_drain_is_what_the_next_worker_asks_about() -> None:
    """It is not taken for the call of a dead worker: not landed, and the error is the step's."""
    story = Story(pays_and_can_ask, answer=raising(OSError("reset")), says=not_landed)
    story.until(lambda s: "charge" in s.bodies)
    assert story.driver is not None

    story.driver.drain(story.now)
    story.end("charge")
    story.settle()
    assert (story.state, story.asked) == (State.PENDING, [])

    with pytest.raises(OSError, match="reset"):
        _ = story.play().result
    assert [str(a.error) for a in story.asked] == ["reset"]
    assert len(story.began) == 1


def test_a_drain_in_the_middle_of_a_question_that_a_person_was_asked_leaves_it_to_the_person() -> None:
    """The call is in doubt since then, and stays so."""
    story = Story(pays_and_can_ask, answer=raising(OSError("reset"))).play()
    assert (story.state, story.states) == (State.HELD, {"charge": ["unknown"]})

    story.retry()
    story.until(lambda s: bool(s.asking))
    story.asking.clear()
    assert story.driver is not None
    story.driver.reconcile_stopped("charge", story.now)
    story.settle()

    assert (story.state, story.states) == (State.PENDING, {"charge": ["unknown"]})


def test_an_intent_that_is_committed_after_a_drain_began_begins_no_body() -> None:
    """It is closed, for its call was never made."""
    story = Story(pays)
    driver = story.claim()
    unit = driver.next_unit()
    assert unit is not None and [i.key for i in unit.intents] == ["charge"]

    driver.drain(story.now)
    story._write_effects(unit)
    driver.verdict(Verdict.OK, None, story.now)
    story.settle()

    assert (story.state, story.states, story.began) == (State.PENDING, {"charge": ["not_landed"]}, [])

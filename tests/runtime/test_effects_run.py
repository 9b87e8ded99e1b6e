"""Steps with an effect, by a real worker on a real database: what the rows say, what bodies and reconcilers see."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import sys
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_fixed

from replaykit import (
    Client,
    Handle,
    Landed,
    NotLanded,
    OutsideRun,
    RunHeld,
    StepInfo,
    Unknown,
    Worker,
    Workflow,
    step,
    workflow,
)
from replaykit.limits import RECONCILE_REASON_CHARS_MAX, Settings
from replaykit.replay.actions import Reconcile
from replaykit.replay.calls import EffectName
from replaykit.replay.doubts import Answer
from replaykit.replay.driver import Phase
from replaykit.replay.signature import describe
from replaykit.runtime.observing import Observations, Observing
from replaykit.runtime.reconciling import Reconcilers, ask
from tests.crash.rows import Rows
from tests.runtime.working import fact, outcome, working

pytestmark = pytest.mark.anyio


@dataclass
class World:
    """What is outside of one run: the calls that were made, and what a reconciler is told of them."""

    calls: list[tuple[int, str]] = field(default_factory=list)  # attempt and idempotency key
    asked: list[StepInfo] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    told: Any = None


WORLDS: defaultdict[str, World] = defaultdict(World)
"""By the first argument of a run."""


class CardDeclined(Exception):
    """The bank says no: nothing was charged."""


def call(world: str) -> World:
    """A body acts."""
    info = step.current()
    WORLDS[world].calls.append((info.attempt, info.idempotency_key))
    return WORLDS[world]


async def charge(world: str, cents: int) -> str:
    """Does as its world says; the first call may hang."""
    here = call(world)
    if isinstance(here.told, BaseException):
        raise here.told
    if here.told == "hang" and len(here.calls) == 1:
        step.current().observe("charge", f"{world}-{cents}")
        await asyncio.Event().wait()
    return f"charged {cents}"


def charge_sync(world: str, cents: int) -> str:
    """The same in a thread, which only its world's gate can end."""
    here = call(world)
    if isinstance(here.told, BaseException):
        raise here.told
    if here.told == "hang":
        here.gate.wait(60)
    return f"charged {cents}"


ANSWERS: dict[str, Callable[[], Any]] = {}
"""By world: what its reconciler says."""


async def find_charge(info: StepInfo) -> Any:
    """As its world says."""
    world = info.input["world"]
    WORLDS[world].asked.append(info)
    return ANSWERS[world]()


@workflow
async def pays(world: str, effect: EffectName, sync: bool) -> str:
    """One step, without a reconciler."""
    body: Callable[..., Any] = charge_sync if sync else charge
    declined = CardDeclined
    return await step.options(effect=effect, not_landed=(declined,))(body, world, 5)


@workflow
async def asks(world: str, sync: bool, timeout: float | None = None) -> str:
    """One irreversible step, with a reconciler."""
    body: Callable[..., Any] = charge_sync if sync else charge
    call = step.options(effect="irreversible", reconcile=find_charge, not_landed=(CardDeclined,), timeout=timeout)
    return str(await call(body, world, 5))


INTENTS = "select attempt, effect, state, resolved_by from intents order by attempt"
SHORT = {"grace_seconds": 0.0, "lease_seconds": 1.0}
"""Of a worker that is stopped while a body hangs: it leaves an open intent behind soon."""


async def interrupted(dsn: str, rows: Rows, flow: Workflow[..., Any], *args: Any) -> Handle[Any]:
    """A run whose call was made, and whose worker left before it knew what became of it."""
    world = WORLDS[args[0]]
    world.told = "hang"
    async with working(dsn, flow, **SHORT) as (client, _):
        handle = await client.start(flow, *args)
        await fact(lambda: world.calls, "the call was made")
        await fact(lambda: rows.ask("select 1 from observations"), "it was observed")
    assert rows.ask("select state from runs") == [("pending",)]
    assert [row[:3] for row in rows.ask(INTENTS)] == [(1, "irreversible", "open")]
    return handle


async def resumed(dsn: str, handle: Handle[Any], flow: Workflow[..., Any]) -> Any:
    """What another worker makes of it."""
    async with working(dsn, flow) as (client, _):
        return await outcome(client.handle(handle.id, flow))


# ---------------------------------------------------------------------- intents


SEEN: dict[str, list[tuple[Any, ...]]] = {}


def look(dsn: str, world: str) -> str:
    """What is committed when this body runs."""
    with psycopg.connect(dsn) as connection:
        SEEN[world] = connection.execute(
            "select key, attempt, state, effect, idempotency_key, input, written_at from replaykit.intents"
        ).fetchall()
    info = step.current()
    assert info.written_at == SEEN[world][0][6]
    return info.idempotency_key


async def look_async(dsn: str, world: str) -> str:
    """The same."""
    return await asyncio.to_thread(look, dsn, world)


@workflow
async def looks(dsn: str, world: str, effect: EffectName, sync: bool) -> str:
    """Its body reads its own intent."""
    looking = step.options(effect=effect, name="look")
    return await (looking(look, dsn, world) if sync else looking(look_async, dsn, world))


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("effect", ["idempotent", "irreversible"])
async def test_the_intent_is_committed_before_the_body_begins_and_closed_with_its_entry(
    dsn: str, rows: Rows, effect: EffectName, sync: bool
) -> None:
    """With the step's whole input and the key that is sent along."""
    world = f"looks-{effect}-{sync}"
    async with working(dsn, looks) as (client, _):
        key = await outcome(await client.start(looks, dsn, world, effect, sync))

    ((name, attempt, state, declared, sent, given, _),) = SEEN[world]
    assert (name, attempt, state, declared, sent) == ("look", 1, "open", effect, key)
    assert world in str(given)
    assert rows.ask(INTENTS) == [(1, effect, "landed", None)]
    assert rows.ask("select resolved_at >= written_at from intents") == [(True,)]


# ---------------------------------------------------------------------- in doubt after the worker's end


async def test_a_call_that_landed_is_not_made_again(dsn: str, rows: Rows) -> None:
    """The reconciler completes the step, and is told all that is known of the call."""
    handle = await interrupted(dsn, rows, asks, "landed", False)
    ANSWERS["landed"] = lambda: Landed("charged before")

    assert await resumed(dsn, handle, asks) == "charged before"

    world = WORLDS["landed"]
    assert len(world.calls) == 1
    (info,) = world.asked
    assert (info.run_id, info.key, info.attempt) == (handle.id, "charge", 1)
    assert info.idempotency_key == world.calls[0][1]
    assert info.input == {"world": "landed", "cents": 5}
    assert info.observed == (("charge", "landed-5"),)
    assert rows.ask("select written_at from intents") == [(info.written_at,)]
    assert isinstance(info.written_at, dt.datetime)
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", "reconcile")]
    (entry,) = rows.entries(handle.id)
    assert (entry.outcome, entry.attempt, entry.idempotency_key) == ("ok", 1, info.idempotency_key)


async def test_a_call_that_did_not_land_is_made_again_with_the_same_key_under_a_new_intent(
    dsn: str, rows: Rows
) -> None:
    """The first attempt's intent says that it did not happen, and who said so."""
    handle = await interrupted(dsn, rows, asks, "not landed", False)
    ANSWERS["not landed"] = NotLanded

    assert await resumed(dsn, handle, asks) == "charged 5"

    calls = WORLDS["not landed"].calls
    assert [attempt for attempt, _ in calls] == [1, 2]
    assert calls[0][1] == calls[1][1]
    assert rows.ask(INTENTS) == [
        (1, "irreversible", "not_landed", "reconcile"),
        (2, "irreversible", "landed", None),
    ]
    (entry,) = rows.entries(handle.id)
    assert (entry.outcome, entry.attempt) == ("ok", 2)


class Speechless(Exception):
    """Its own `__str__` fails."""

    def __str__(self) -> str:
        raise ValueError("no words")


class SpeechlessNotLanded(NotLanded):
    """The same, as an answer that counts."""

    __str__ = Speechless.__str__


def throwing(error: BaseException) -> Callable[[], Any]:
    """A reconciler that raises."""

    def answer() -> Any:
        raise error

    return answer


def cancel_itself() -> None:
    """A reconciler that ends its own task."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


DOUBTS: dict[str, tuple[Callable[[], Any], str]] = {
    "odd words": (lambda: Unknown("the bank says \0 \ud800"), "the bank says \\u0000 \\ud800"),
    "no text": (lambda: Unknown(ConnectionError("reset")), "reset"),  # type: ignore[arg-type]
    "a generator's end": (throwing(GeneratorExit()), "ended with GeneratorExit instead of an answer"),
    "no words": (throwing(Speechless()), "the last time with Speechless"),
    "its own end": (cancel_itself, ""),
    "unknown": (lambda: Unknown("the bank is closed"), "the bank is closed"),
    "nonsense": (
        lambda: "landed",
        "find_charge returned a value of type str: it returns Landed(result), NotLanded() or",
    ),
    "nothing": (lambda: None, "find_charge returned nothing"),
    "unrecordable": (
        lambda: Landed(object()),
        "find_charge says that it landed, with a result that cannot be recorded",
    ),
}


@pytest.mark.parametrize("kind", DOUBTS)
async def test_a_call_of_which_the_reconciler_cannot_say_waits_for_a_person(dsn: str, rows: Rows, kind: str) -> None:
    """The run is held with the reconciler's words, and the call stands in the view."""
    handle = await interrupted(dsn, rows, asks, kind, False)
    ANSWERS[kind], words = DOUBTS[kind]

    held = await resumed(dsn, handle, asks)

    assert isinstance(held, RunHeld)
    assert words in held.reason
    assert len(WORLDS[kind].calls) == 1
    assert [row[:3] for row in rows.ask(INTENTS)] == [(1, "irreversible", "unknown")]
    assert rows.ask("select run_id, key, idempotency_key from in_doubt") == [
        (handle.id, "charge", WORLDS[kind].calls[0][1])
    ]


async def test_an_answer_without_words_is_an_answer(dsn: str, rows: Rows) -> None:
    """Whatever its author has made of it."""
    handle = await interrupted(dsn, rows, asks, "speechless", False)
    ANSWERS["speechless"] = SpeechlessNotLanded

    assert await resumed(dsn, handle, asks) == "charged 5"


async def test_without_a_reconciler_a_person_is_asked_at_once(dsn: str, rows: Rows) -> None:
    """At most one call, whatever happens."""
    world = WORLDS["nobody"]
    world.told = "hang"
    async with working(dsn, pays, **SHORT) as (client, _):
        handle = await client.start(pays, "nobody", "irreversible", False)
        await fact(lambda: world.calls, "the call was made")

    held = await resumed(dsn, handle, pays)

    assert isinstance(held, RunHeld)
    assert len(world.calls) == 1
    assert rows.ask("select key, attempt from in_doubt") == [("charge", 1)]


async def test_an_idempotent_call_is_made_again_under_the_same_intent_with_the_same_key(dsn: str, rows: Rows) -> None:
    """The other side tells the second from the first by the key."""
    world = WORLDS["idempotent"]
    world.told = "hang"
    async with working(dsn, pays, **SHORT) as (client, _):
        handle = await client.start(pays, "idempotent", "idempotent", False)
        await fact(lambda: world.calls, "the call was made")

    assert await resumed(dsn, handle, pays) == "charged 5"

    assert world.calls == [world.calls[0]] * 2
    assert rows.ask(INTENTS) == [(1, "idempotent", "landed", None)]


async def test_a_reconciler_that_keeps_failing_has_said_that_nobody_knows(dsn: str, rows: Rows) -> None:
    """It was asked three times; the reason names its last error."""
    handle = await interrupted(dsn, rows, asks, "failing", False)

    def fail() -> None:
        raise ConnectionError(f"no line, {len(WORLDS['failing'].asked)}")

    ANSWERS["failing"] = fail

    held = await resumed(dsn, handle, asks)

    assert isinstance(held, RunHeld)
    assert "find_charge failed 3 times, the last time with ConnectionError: no line, 3" in held.reason
    assert len(WORLDS["failing"].calls) == 1


async def test_a_reconciler_that_fails_once_is_asked_again(dsn: str, rows: Rows) -> None:
    """It is a read."""
    handle = await interrupted(dsn, rows, asks, "shaky", False)

    def once() -> Any:
        if len(WORLDS["shaky"].asked) == 1:
            raise ConnectionError
        return Landed("found")

    ANSWERS["shaky"] = once

    assert await resumed(dsn, handle, asks) == "found"


class _Call:
    """As much of a step's call as a question needs."""

    def __init__(self, reconcile: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        self.reconcile = reconcile
        self.info = describe(charge)
        self.key = "charge"
        self.context = contextvars.Context()


async def test_a_reconciler_that_takes_too_long_is_cancelled_and_asked_again() -> None:
    """Its own time-outs are its own affair; this one is the worker's."""
    cancelled: list[int] = []

    async def slow(_: StepInfo) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    action = Reconcile(_Call(slow), 1, 0)  # type: ignore[arg-type]
    info = StepInfo(uuid.uuid4(), "charge", 1, "k", dict)

    answer = await ask(action, info, Settings(), seconds=0.02, pauses=(0.0,))

    assert answer.state == "unknown"
    assert answer.reason.endswith("slow failed 2 times, the last time with TimeoutError: no answer within 0.02 s")
    assert len(cancelled) == 2


async def saying(*answers: Callable[[], Any]) -> Answer:
    """What becomes of the answers that one reconciler gives, one after the other."""
    said = iter(answers)

    async def reconciler(_: StepInfo) -> Any:
        return next(said)()

    action = Reconcile(_Call(reconciler), 1, 0)  # type: ignore[arg-type]
    return await ask(
        action, StepInfo(uuid.uuid4(), "charge", 1, "k", dict), Settings(), pauses=(0.0,) * (len(answers) - 1)
    )


async def test_a_reconciler_that_awaits_something_cancelled_has_failed_and_is_asked_again() -> None:
    """The worker has not cancelled it."""
    answer = await saying(throwing(asyncio.CancelledError()), NotLanded)

    assert answer.state == "not_landed"


async def test_a_reconciler_may_raise_that_it_did_not_land() -> None:
    """An answer is an answer."""
    answer = await saying(throwing(NotLanded("it never came")))

    assert (answer.state, answer.reason) == ("not_landed", "it never came")


async def test_one_question_is_asked_once_and_answers_for_both_who_asked() -> None:
    """The journal was read again meanwhile."""
    asked: list[int] = []
    answers: list[tuple[str, int]] = []
    gate = asyncio.Event()

    async def reconciler(info: StepInfo) -> Any:
        asked.append(info.attempt)
        await gate.wait()
        return NotLanded()

    told: Callable[..., None] = lambda key, attempt, _: answers.append((key, attempt))  # noqa: E731
    reconcilers = Reconcilers(uuid.uuid4(), Settings(), told, lambda key: None)
    action = Reconcile(_Call(reconciler), 1, 0)  # type: ignore[arg-type]
    info = StepInfo(uuid.uuid4(), "charge", 1, "k", dict)
    reconcilers.begin(action, info)
    while not asked:
        await asyncio.sleep(0)
    reconcilers.begin(action, info)
    gate.set()
    while len(reconcilers):
        await asyncio.sleep(0)

    assert (asked, answers) == ([1], [("charge", 1)])


async def test_of_a_reconcilers_words_the_beginning_is_kept() -> None:
    """A page of HTML is no reason."""
    answer = await saying(lambda: Unknown("<html>" * 100_000))

    assert answer.reason == ("<html>" * 100_000)[:RECONCILE_REASON_CHARS_MAX]


class Incomparable(str):
    """Its own code fails when it is looked at."""

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = str.__hash__


async def test_a_result_of_a_reconciler_whose_own_code_fails_cannot_be_recorded() -> None:
    """Nor does it leave the run without an answer."""
    answer = await saying(lambda: Landed(Incomparable("paid")))

    assert answer.state == "unknown"
    assert "cannot be recorded" in answer.reason


# ---------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("error", [CardDeclined("no"), NotLanded("never sent")], ids=["declared", "raised"])
async def test_an_error_that_says_that_nothing_happened_is_the_steps(
    dsn: str, rows: Rows, error: Exception, sync: bool
) -> None:
    """Nobody is asked."""
    world = f"declared-{type(error).__name__}-{sync}"
    WORLDS[world].told = error
    async with working(dsn, asks) as (client, _):
        raised = await outcome(await client.start(asks, world, sync))

    assert (type(raised), str(raised)) == (type(error), str(error))
    assert WORLDS[world].asked == []
    assert rows.ask(INTENTS) == [(1, "irreversible", "not_landed", None)]


@pytest.mark.parametrize("sync", [False, True])
async def test_any_other_error_leaves_the_call_in_doubt_and_a_reconciler_may_know_better(
    dsn: str, rows: Rows, sync: bool
) -> None:
    """The connection broke after the request: it had landed."""
    world = f"broken-{sync}"
    WORLDS[world].told = ConnectionResetError("in the middle")
    ANSWERS[world] = lambda: Landed("charged, after all")
    async with working(dsn, asks) as (client, _):
        result = await outcome(await client.start(asks, world, sync))

    assert result == "charged, after all"
    assert len(WORLDS[world].calls) == 1
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", "reconcile")]


async def test_an_error_after_which_nothing_had_happened_is_the_steps(dsn: str, rows: Rows) -> None:
    """The body does not run again: it has said what went wrong."""
    WORLDS["refused"].told = ConnectionRefusedError("nobody there")
    ANSWERS["refused"] = NotLanded
    async with working(dsn, asks) as (client, _):
        raised = await outcome(await client.start(asks, "refused", False))

    assert (type(raised), str(raised)) == (ConnectionRefusedError, "nobody there")
    assert len(WORLDS["refused"].calls) == 1
    assert rows.ask(INTENTS) == [(1, "irreversible", "not_landed", "reconcile")]


async def test_an_error_without_a_reconciler_holds_the_run(dsn: str, rows: Rows) -> None:
    """The view has it."""
    WORLDS["alone"].told = ConnectionResetError("in the middle")
    async with working(dsn, pays) as (client, _):
        held = await outcome(await client.start(pays, "alone", "irreversible", False))

    assert isinstance(held, RunHeld)
    assert rows.ask("select key, attempt from in_doubt") == [("charge", 1)]
    assert rows.ask("select evidence->'error'->>'message' from intents") == [("in the middle",)]


@pytest.mark.parametrize("error", [CardDeclined("no"), ConnectionResetError("?")], ids=["declared", "undeclared"])
async def test_an_idempotent_call_that_fails_is_in_doubt_for_nobody(dsn: str, rows: Rows, error: Exception) -> None:
    """Its error is the step's, and the intent says what is known."""
    world = f"idempotent-{type(error).__name__}"
    WORLDS[world].told = error
    async with working(dsn, pays) as (client, _):
        raised = await outcome(await client.start(pays, world, "idempotent", False))

    assert type(raised) is type(error)
    state = "not_landed" if isinstance(error, CardDeclined) else "unknown"
    assert rows.ask(INTENTS) == [(1, "idempotent", state, None)]
    assert rows.ask("select * from in_doubt") == []


async def cancels_itself(world: str, cents: int) -> str:
    """A cancel from inside."""
    call(world)
    raise asyncio.CancelledError


async def returns_a_lock(world: str, cents: int) -> Any:
    """It has acted, and what it says of that fits no journal."""
    call(world)
    return threading.Lock()


@workflow
async def odd(world: str, kind: str) -> Any:
    """Bodies with odd ends."""
    body: Any = cancels_itself if kind == "cancelled" else returns_a_lock
    return await step.options(effect="irreversible", reconcile=find_charge)(body, world, 5)


async def test_a_body_that_ends_cancelled_by_itself_is_in_doubt(dsn: str) -> None:
    """The call may have been on its way."""
    ANSWERS["cancelled"] = lambda: Landed("found")
    async with working(dsn, odd) as (client, _):
        assert await outcome(await client.start(odd, "cancelled", "cancelled")) == "found"


async def test_a_result_that_cannot_be_recorded_holds_the_run_and_nobody_is_asked(dsn: str, rows: Rows) -> None:
    """That it landed is known; what it came to a person has to say."""
    async with working(dsn, odd) as (client, _):
        held = await outcome(await client.start(odd, "lock", "lock"))

    assert isinstance(held, RunHeld)
    assert WORLDS["lock"].asked == []
    assert [row[:3] for row in rows.ask(INTENTS)] == [(1, "irreversible", "unknown")]


# ---------------------------------------------------------------------- time-outs and retries


async def test_an_async_body_whose_time_is_up_is_in_doubt(dsn: str, rows: Rows) -> None:
    """Cancelled in the middle of its call."""
    WORLDS["late"].told = "hang"
    ANSWERS["late"] = lambda: Landed("it had landed")
    async with working(dsn, asks) as (client, _):
        assert await outcome(await client.start(asks, "late", False, 0.1)) == "it had landed"

    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", "reconcile")]


async def test_a_thread_whose_time_is_up_is_waited_for_and_what_it_says_counts(
    dsn: str, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """Its call may still land, and no answer would hold; nobody knows better than the thread itself."""
    world = WORLDS["late thread"]
    world.told = "hang"
    ANSWERS["late thread"] = lambda: Landed("gate open" if world.gate.is_set() else "too early")
    async with working(dsn, asks) as (client, _):
        handle = await client.start(asks, "late thread", True, 0.1)
        await fact(lambda: "step_late" in caplog.text, "its time is up")
        assert rows.ask("select state from runs") == [("running",)]
        world.gate.set()
        assert await outcome(handle) == "charged 5"

    assert len(world.calls) == 1 and world.asked == []
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", None)]


async def fails_in_turn(world: str, errors: list[str]) -> str:
    """One error a try."""
    here = call(world)
    for name in errors[len(here.calls) - 1 : len(here.calls)]:
        raise {"declined": CardDeclined, "reset": ConnectionResetError}[name]
    return "charged"


THREE = AsyncRetrying(stop=stop_after_attempt(3), wait=wait_fixed(0.01), retry=retry_if_exception_type(Exception))


@workflow
async def tries(world: str, errors: list[str]) -> str:
    """Up to three tries."""
    return await step.options(effect="irreversible", retry=THREE, not_landed=(CardDeclined,))(
        fails_in_turn, world, errors
    )


async def test_an_irreversible_call_is_tried_again_only_where_it_did_not_happen(dsn: str, rows: Rows) -> None:
    """Each try has an intent of its own, and all have the same key."""
    async with working(dsn, tries) as (client, _):
        assert await outcome(await client.start(tries, "tries", ["declined", "declined"])) == "charged"

    calls = WORLDS["tries"].calls
    assert [attempt for attempt, _ in calls] == [1, 2, 3]
    assert len({key for _, key in calls}) == 1
    assert [row[2] for row in rows.ask(INTENTS)] == ["not_landed", "not_landed", "landed"]
    assert len(rows.ask("select * from attempts")) == 2


async def test_an_irreversible_call_in_doubt_is_not_tried_again_whatever_retry_says(dsn: str, rows: Rows) -> None:
    """A person decides."""
    async with working(dsn, tries) as (client, _):
        held = await outcome(await client.start(tries, "no tries", ["declined", "reset"]))

    assert isinstance(held, RunHeld)
    assert len(WORLDS["no tries"].calls) == 2
    assert rows.ask("select key, attempt from in_doubt") == [("fails_in_turn", 2)]


@workflow
async def picky(world: str, effect: EffectName) -> str:
    """Does not like its result."""
    retry = AsyncRetrying(stop=stop_after_attempt(3), retry=retry_if_result(lambda _: True))
    options = step.options(effect=effect, retry=retry, not_landed=(CardDeclined,))
    return await options(charge, world, 5)


async def test_the_result_of_an_irreversible_call_is_never_tried_again(dsn: str) -> None:
    """It is a deed, whatever it looks like."""
    async with working(dsn, picky) as (client, _):
        assert await outcome(await client.start(picky, "picky", "irreversible")) == "charged 5"

    assert len(WORLDS["picky"].calls) == 1


async def test_the_result_of_an_idempotent_call_may_be_tried_again(dsn: str, rows: Rows) -> None:
    """As a plain step's."""
    async with working(dsn, picky) as (client, _):
        raised = await outcome(await client.start(picky, "picky again", "idempotent"))

    assert type(raised).__name__ == "ResultRejected"
    assert len(WORLDS["picky again"].calls) == 3
    assert rows.ask("select * from in_doubt") == []


# ---------------------------------------------------------------------- observations


COMMITTED = "select kind, value, attempt from observations order by id"


async def watches(world: str) -> str:
    """Goes on when its gate opens; what it observes is committed by then."""
    here = call(world)
    await step.current().observe("ticket", f"{world}-1")
    step.current().observe("ticket", f"{world}-2")
    while not here.gate.is_set():
        await asyncio.sleep(0.01)
    return str(step.current().observed)


def watches_sync(world: str) -> str:
    """The same in a thread."""
    here = call(world)
    step.current().observe("ticket", f"{world}-1").result(timeout=30)
    step.current().observe("ticket", f"{world}-2")
    here.gate.wait(60)
    return str(step.current().observed)


@workflow
async def watching(world: str, sync: bool, effect: EffectName) -> str:
    """Its body observes."""
    body: Any = watches_sync if sync else watches
    return await step.options(effect=effect)(body, world)


@pytest.mark.parametrize("effect", ["repeatable", "irreversible"])
@pytest.mark.parametrize("sync", [False, True])
async def test_what_a_body_observes_is_committed_while_it_runs(
    dsn: str, rows: Rows, sync: bool, effect: EffectName
) -> None:
    """Others can read it, nobody has to wait for it, and the body sees it too."""
    world = f"watching-{sync}-{effect}"
    seen = [("ticket", f"{world}-1", 1), ("ticket", f"{world}-2", 1)]
    async with working(dsn, watching) as (client, _):
        handle = await client.start(watching, world, sync, effect)
        await fact(lambda: rows.ask(COMMITTED) == seen, "both are committed")
        assert rows.entries(handle.id) == []
        WORLDS[world].gate.set()
        assert await outcome(handle) == str(tuple(row[:2] for row in seen))


GONE: dict[str, Exception | None] = {}


def observes_in_vain(world: str) -> None:
    """Its run leaves before the commit."""
    call(world).gate.wait(60)
    committing = step.current().observe("ticket", "1")
    try:
        committing.result(timeout=30)
    except OutsideRun as error:
        GONE[world] = error
    try:
        step.current().observe("ticket", "2")
    except OutsideRun as error:
        GONE[f"{world}, later"] = error


@workflow
async def in_vain(world: str) -> None:
    """One plain step in a thread."""
    await step(observes_in_vain, world)


async def test_who_waits_for_an_observation_whose_run_has_left_gets_an_error(dsn: str, rows: Rows) -> None:
    """And never hangs. The run's row is locked, so that nothing of it is written."""
    async with working(dsn, in_vain) as (client, worker):
        handle = await client.start(in_vain, "vain")
        await fact(lambda: WORLDS["vain"].calls, "the body runs")
        other = await asyncio.to_thread(lambda: psycopg.connect(dsn))
        await asyncio.to_thread(other.execute, "select 1 from replaykit.runs for update")
        WORLDS["vain"].gate.set()
        executor = worker._executors[handle.id]
        while executor.driver is None or executor.driver.unit is None:
            await asyncio.sleep(0.01)
        executor.drop()
        await fact(lambda: "vain, later" in GONE, "the body has its answer")
        await asyncio.to_thread(other.close)

    assert isinstance(GONE["vain"], OutsideRun)
    assert "the run has left this worker before it was committed" in str(GONE["vain"])
    assert "its run has left this worker" in str(GONE["vain, later"])


async def test_a_wait_for_an_observation_that_is_cancelled_takes_it_from_nobody_else() -> None:
    """It is committed all the same."""
    observing = Observing()

    async def wait() -> None:
        await observing

    waits = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait(waits[:1])
    observing.committed()

    await waits[1]
    assert waits[0].cancelled()


async def test_an_observation_is_awaited_on_an_event_loop() -> None:
    """Its thread would wait for itself."""
    with pytest.raises(OutsideRun, match="write `await"):
        Observing().result(0)


class Owner:
    """As much of a run as its observations and its reconcilers hold."""

    def wake(self, *_: Any) -> None:
        """Is called."""

    def observed(self, _: str) -> tuple[tuple[str, str], ...]:
        """Is asked."""
        return ()


async def test_a_body_that_goes_on_does_not_keep_the_run_that_has_left() -> None:
    """What is left of it is freed at once, without the collector."""
    owner = Owner()
    observations = Observations(uuid.uuid4(), asyncio.get_running_loop(), lambda: 0, owner.wake, owner.observed)
    reconcilers = Reconcilers(uuid.uuid4(), Settings(), owner.wake, owner.wake)
    side = observations.side("charge", 1)

    observations.close()
    reconcilers.leave()
    left = weakref.ref(owner)
    del owner

    assert left() is None
    assert (list(side.observed()), len(reconcilers)) == ([], 0)


# ---------------------------------------------------------------------- beginning and ending


class Doubtful:
    """A lease that is not ours beyond doubt when a body is just about to begin; ours again right after."""

    def __init__(
        self, valid: Callable[[], bool], times: int, where: tuple[str, ...] = ("_run_async", "_run_sync")
    ) -> None:
        self.valid = valid
        self.times = times
        self.where = where

    def __call__(self) -> bool:
        if self.times > 0 and sys._getframe(1).f_code.co_name in self.where:
            self.times -= 1
            return False
        return self.valid()


@pytest.mark.parametrize("sync", [False, True])
async def test_a_body_does_not_begin_when_the_lease_is_in_doubt_right_before_it(
    dsn: str, rows: Rows, sync: bool
) -> None:
    """It begins once the lease is ours: one attempt, one intent, one call."""
    world = f"doubtful-{sync}"
    async with working(dsn, pays) as (client, worker):
        worker._shop.valid = doubtful = Doubtful(worker._shop.valid, 2)
        assert await outcome(await client.start(pays, world, "irreversible", sync)) == "charged 5"

    assert doubtful.times == 0
    assert [attempt for attempt, _ in WORLDS[world].calls] == [1]
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", None)]


async def test_nobody_is_asked_while_the_lease_is_in_doubt(dsn: str) -> None:
    """Another worker may have the run by now, and make the call."""
    world = WORLDS["doubtful question"]
    world.told, ANSWERS["doubtful question"] = ConnectionResetError(), lambda: Landed("found")
    async with working(dsn, asks) as (client, worker):
        worker._shop.valid = doubtful = Doubtful(worker._shop.valid, 2, ("_reconcile",))
        assert await outcome(await client.start(asks, "doubtful question", False)) == "found"

    assert doubtful.times == 0
    assert len(world.asked) == 1


async def test_nobody_is_asked_while_the_call_may_go_on_in_this_process(dsn: str, rows: Rows) -> None:
    """A thread outlives its lease; what it does at last is to be seen by whoever looks."""
    world = WORLDS["goes on"]
    world.told, ANSWERS["goes on"] = "hang", lambda: Landed("found")
    async with working(dsn, asks) as (client, worker):
        handle = await client.start(asks, "goes on", True)
        await fact(lambda: world.calls, "the call was made")
        worker._lease_lost(worker.worker_id)
        rows.ask("update runs set state = 'pending', lease_token = null, worker = null")
        await fact(lambda: any(e.postponed for e in worker._executors.values()), "the run is here again, and waits")
        assert world.asked == []
        world.gate.set()
        assert await outcome(handle) == "found"

    assert (len(world.calls), len(world.asked)) == (1, 1)


async def lasts(world: str) -> str:
    """Longer than the grace period."""
    here = call(world)
    while not here.gate.is_set():
        await asyncio.sleep(0.01)
    return "done"


def lasts_sync(world: str) -> str:
    """The same in a thread."""
    call(world).gate.wait(60)
    return "done"


@workflow
async def lasting(world: str, sync: bool) -> str:
    """One irreversible step."""
    once = step.options(effect="irreversible")
    return await (once(lasts_sync, world) if sync else once(lasts, world))


@pytest.mark.parametrize("sync", [False, True])
async def test_a_drain_waits_for_an_effect_longer_than_the_grace_period(dsn: str, rows: Rows, sync: bool) -> None:
    """As long as the lease: its outcome is recorded, and the run handed back with nothing in doubt."""
    world = WORLDS[f"lasting-{sync}"]
    async with Client(dsn) as client:
        worker = Worker(client, workflows=[lasting], settings=Settings(grace_seconds=0))
        await worker.start()
        handle = await client.start(lasting, f"lasting-{sync}", sync)
        await fact(lambda: world.calls, "the call was made")
        stopping = asyncio.create_task(worker.stop())
        done, _ = await asyncio.wait([stopping], timeout=0.3)
        assert done == set()
        world.gate.set()
        await asyncio.wait_for(stopping, 20)

    assert [entry.outcome for entry in rows.entries(handle.id)] == ["ok"]
    assert rows.ask("select state, resolved_at is not null from intents") == [("landed", True)]
    assert await resumed(dsn, handle, lasting) == "done"
    assert len(world.calls) == 1


@workflow
async def withdraws(world: str) -> str:
    """Gives a call up whose body waits for the only thread."""
    blocker = asyncio.ensure_future(step(lasts_sync, world))
    try:
        async with asyncio.timeout(0.3):
            await step.options(effect="irreversible")(charge_sync, world, 5)
    except TimeoutError:
        pass
    return await blocker


async def test_a_call_that_was_given_up_before_its_body_began_did_not_happen(dsn: str, rows: Rows) -> None:
    """Its intent is closed, its entry is `cancelled`, and the body never runs."""
    world = WORLDS["withdrawn"]
    async with working(dsn, withdraws, threads=1) as (client, _):
        handle = await client.start(withdraws, "withdrawn")
        await fact(lambda: rows.ask("select 1 from intents where state = 'not_landed'"), "the intent is closed")
        world.gate.set()
        assert await outcome(handle) == "done"

    assert len(world.calls) == 1  # of the blocker
    assert [(e.key, e.outcome) for e in rows.entries(handle.id) if e.key == "charge_sync"] == [
        ("charge_sync", "cancelled")
    ]


@workflow
async def abandons(world: str) -> str:
    """Gives a call up that has begun."""
    try:
        async with asyncio.timeout(0.2):
            return await step.options(effect="irreversible")(lasts, world)
    except TimeoutError:
        return "given up"


async def test_a_call_that_was_given_up_after_its_body_began_goes_on_and_is_recorded(dsn: str, rows: Rows) -> None:
    """The await ends at once; the run does not end before its outcome is known."""
    world = WORLDS["abandoned"]
    async with working(dsn, abandons) as (client, _):
        handle = await client.start(abandons, "abandoned")
        await fact(lambda: rows.ask("select 1 from journal where kind = 'timer'"), "the time is up")
        assert rows.ask("select state from runs") == [("running",)]
        world.gate.set()
        assert await outcome(handle) == "given up"

    assert [(e.kind, e.outcome) for e in rows.entries(handle.id)] == [("timer", "ok"), ("step", "ok")]
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", None)]


@workflow
async def queued(world: str) -> str:
    """Its call waits for the only thread, which a plain step has."""
    blocker = asyncio.ensure_future(step(lasts_sync, world))
    result = await step.options(effect="irreversible")(charge_sync, world, 5)
    await blocker
    return result


async def test_a_body_that_had_not_begun_when_the_worker_drained_begins_elsewhere(dsn: str, rows: Rows) -> None:
    """Its intent says that it did not happen: nobody is asked, and it is still the first attempt."""
    world = WORLDS["queued"]
    async with working(dsn, queued, threads=1, grace_seconds=0.2, lease_seconds=1.0) as (client, _):
        handle = await client.start(queued, "queued")
        await fact(lambda: rows.ask("select 1 from intents"), "the intent is written")
        await fact(lambda: world.calls, "the thread is taken")

    assert rows.ask("select state from runs") == [("pending",)]
    assert [row[:3] for row in rows.ask(INTENTS)] == [(1, "irreversible", "not_landed")]
    world.gate.set()
    assert await resumed(dsn, handle, queued) == "charged 5"
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", None)]


@workflow
async def held_beside(world: str) -> Any:
    """One step holds the run while the other acts."""
    acting = asyncio.ensure_future(step.options(effect="irreversible")(lasts, world))
    await step.options(effect="irreversible")(returns_a_lock, f"{world}, lock", 5)
    return await acting


async def test_a_held_run_waits_for_its_effects_longer_than_the_grace_period(dsn: str, rows: Rows) -> None:
    """What became of the call is recorded, and only the other one is in doubt."""
    world = WORLDS["beside"]
    async with working(dsn, held_beside, grace_seconds=0) as (client, _):
        handle = await client.start(held_beside, "beside")
        await fact(lambda: rows.ask("select 1 from runs where reason is not null"), "the run is about to be held")
        waiting = asyncio.ensure_future(outcome(handle))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert done == set()
        world.gate.set()
        assert isinstance(await waiting, RunHeld)

    assert [(e.key, e.outcome) for e in rows.entries(handle.id)] == [("lasts", "ok")]
    assert rows.ask("select key from in_doubt") == [("returns_a_lock",)]


async def test_a_held_run_waits_for_its_effects_no_longer_than_a_lease(dsn: str, rows: Rows) -> None:
    """Then they are cut off, and in doubt as well."""
    async with working(dsn, held_beside, grace_seconds=0, lease_seconds=3) as (client, _):
        handle = await client.start(held_beside, "beside for good")
        assert isinstance(await outcome(handle), RunHeld)

    assert set(rows.ask("select key from in_doubt")) == {("lasts",), ("returns_a_lock",)}


PATIENCE: dict[str, asyncio.Event] = {}


async def find_slowly(info: StepInfo) -> Landed[str]:
    """Answers when it is let to."""
    world = info.input["world"]
    WORLDS[world].asked.append(info)
    await PATIENCE[world].wait()
    return Landed("found")


@workflow
async def asks_slowly(world: str) -> str:
    """One irreversible step, with a slow reconciler."""
    return await step.options(effect="irreversible", reconcile=find_slowly)(charge, world, 5)


async def test_a_reconciler_that_a_drain_has_cut_off_is_asked_again_elsewhere(dsn: str, rows: Rows) -> None:
    """The intent stays open until somebody has said."""
    world, PATIENCE["cut off"] = WORLDS["cut off"], asyncio.Event()
    world.told = ConnectionResetError()
    async with working(dsn, asks_slowly, **SHORT) as (client, _):
        handle = await client.start(asks_slowly, "cut off")
        await fact(lambda: world.asked, "it is asked")

    assert rows.ask("select state from runs") == [("pending",)]
    assert [row[:3] for row in rows.ask(INTENTS)] == [(1, "irreversible", "open")]
    PATIENCE["cut off"].set()
    assert await resumed(dsn, handle, asks_slowly) == "found"
    assert (len(world.calls), len(world.asked)) == (1, 2)


async def test_an_answer_that_comes_while_the_journal_is_read_again_counts(dsn: str) -> None:
    """Asked once: the run that was rebuilt gets it."""
    world, PATIENCE["stale"] = WORLDS["stale"], asyncio.Event()
    world.told = ConnectionResetError()
    async with working(dsn, asks_slowly) as (client, worker):
        handle = await client.start(asks_slowly, "stale")
        await fact(lambda: world.asked, "it is asked")
        executor = worker._executors[handle.id]
        driver = executor.driver
        assert driver is not None
        driver.phase = Phase.STALE  # as after a verdict
        executor._changed_hands(driver)
        PATIENCE["stale"].set()
        assert await outcome(handle) == "found"
        assert executor.driver is not driver

    assert (len(world.calls), len(world.asked)) == (1, 1)


async def test_a_call_in_flight_goes_on_while_the_journal_is_read_again(dsn: str, rows: Rows) -> None:
    """Though the journal is empty yet: the rebuilt run asks for the same call, and takes the body over."""
    world = WORLDS["rebuilt"]
    async with working(dsn, lasting) as (client, worker):
        handle = await client.start(lasting, "rebuilt", False)
        await fact(lambda: world.calls, "the call was made")
        executor = worker._executors[handle.id]
        driver = executor.driver
        assert driver is not None
        driver.phase = Phase.STALE  # as after a verdict
        executor._changed_hands(driver)
        while executor.driver is driver:
            await asyncio.sleep(0.01)
        world.gate.set()
        assert await outcome(handle) == "done"

    assert len(world.calls) == 1
    assert rows.ask(INTENTS) == [(1, "irreversible", "landed", None)]

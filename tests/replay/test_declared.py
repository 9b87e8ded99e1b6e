"""Options of a step: what cannot work is refused, early, in one sentence that says what to write instead."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import re
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import pytest
from tenacity import AsyncRetrying, stop_after_attempt

from replaykit import ConfigurationError, Landed, NotLanded, OutsideRun, StepInfo, Unknown, step, testing, workflow
from replaykit.replay.entries import Effect
from replaykit.replay.keys import idempotency_key, key_uuid
from replaykit.replay.requests import POLICY_ATTRIBUTE, UNSET, Policy
from tests.replay.drive import begin

RETRY = AsyncRetrying(stop=stop_after_attempt(3))


class Declined(Exception):
    """The other side says no."""


async def find(info: StepInfo) -> Landed[str] | NotLanded | Unknown:
    """Asks the other side."""
    return Unknown("nobody knows")


async def find_with(info: StepInfo, more: str) -> Unknown:
    """Wants more than it is given."""
    return Unknown()


def find_sync(info: StepInfo) -> Unknown:
    """Would block the worker's loop."""
    return Unknown()


async def undo(result: str) -> None:
    """Takes it back."""


async def undo_with(result: str, why: str) -> None:
    """Wants more than it is given."""


async def undo_bit_by_bit(result: str) -> AsyncIterator[None]:
    """No step can be one."""
    yield


class Finder:
    """A callable object."""

    async def __call__(self, info: StepInfo) -> Unknown:
        return Unknown()

    def undo(self, result: str) -> None:
        """A method takes the result alone as well."""


async def charge(cents: int) -> str:
    """The body."""
    return f"{cents}"


def of(function: Callable[..., Any]) -> Policy:
    policy: Policy = getattr(function, POLICY_ATTRIBUTE)
    return policy


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown effect": (
        {"effect": "once"},
        "effect='once': it is 'repeatable' (the default), 'idempotent', 'irreversible' or 'transactional'",
    ),
    "no effect at all": ({"effect": None}, "effect=None: it is 'repeatable' (the default), "),
    "reconcile without an effect": (
        {"reconcile": find},
        "reconcile=find without effect=: it is asked whether a call landed, and a step without an effect just runs again; "
        "say effect='idempotent' or 'irreversible', or leave it out",
    ),
    "reconcile of a repeatable step": (
        {"reconcile": find, "effect": "repeatable"},
        "reconcile=find with effect='repeatable'",
    ),
    "reconcile of a transactional step": (
        {"reconcile": find, "effect": "transactional"},
        "reconcile=find with effect='transactional': it is asked whether a call landed, and what such a body writes is "
        "committed with its entry or not at all; leave it out",
    ),
    "a reconciler that is not async": (
        {"reconcile": find_sync, "effect": "irreversible"},
        "reconcile=find_sync is no async function: write `async def find_sync(info)`",
    ),
    "a reconciler that is no function": (
        {"reconcile": "find", "effect": "irreversible"},
        "reconcile='find': it is an async",
    ),
    "a reconciler that wants more": (
        {"reconcile": find_with, "effect": "irreversible"},
        "reconcile=find_with cannot be called with one argument: it is asked with the step's StepInfo alone",
    ),
    "not_landed without an effect": (
        {"not_landed": (Declined,)},
        "not_landed=(Declined,) without effect=: it says which errors leave no doubt",
    ),
    "not_landed of a transactional step": (
        {"not_landed": Declined, "effect": "transactional"},
        "not_landed=(Declined,) with effect='transactional'",
    ),
    "not_landed of no class": (
        {"not_landed": (Declined, "declined"), "effect": "irreversible"},
        "not_landed=(Declined, 'declined') has 'declined', which is no class of exceptions",
    ),
    "not_landed of an instance": (
        {"not_landed": Declined(), "effect": "irreversible"},
        "which is no class of exceptions",
    ),
    "not_landed of another class": (
        {"not_landed": str, "effect": "irreversible"},
        "has str, which is no class of exceptions",
    ),
    "not_landed of None": ({"not_landed": None, "effect": "irreversible"}, "none: not_landed=()"),
    "not_landed of what ends a body": (
        {"not_landed": (asyncio.CancelledError,), "effect": "irreversible"},
        "not_landed=(CancelledError,) has CancelledError, which is no Exception: what ends a body from outside says nothing",
    ),
    "key_valid_for without an effect": ({"key_valid_for": 60}, "key_valid_for=60 without effect=: "),
    "key_valid_for of an irreversible step": (
        {"key_valid_for": 60, "effect": "irreversible"},
        "key_valid_for=60 with effect='irreversible': it says for how long the other side knows a call by its key",
    ),
    "key_valid_for of no time": (
        {"key_valid_for": dt.timedelta(0), "effect": "idempotent"},
        "key_valid_for=datetime.timedelta(0): the other side would never recognise a key",
    ),
    "key_valid_for of negative time": (
        {"key_valid_for": -1, "effect": "idempotent"},
        "key_valid_for=-1: the other side",
    ),
    "a reconciler that is never asked": (
        {"effect": "idempotent", "reconcile": find},
        "with effect='idempotent' and no key_valid_for=: such a call is made again with its key and nobody is ever asked",
    ),
    "key_valid_for for ever": ({"key_valid_for": float("inf"), "effect": "idempotent"}, "for ever is None"),
    "key_valid_for of a moment": (
        {"key_valid_for": dt.datetime(2030, 1, 1, tzinfo=dt.UTC), "effect": "idempotent"},
        "it is a number of seconds or a timedelta",
    ),
    "key_valid_for of True": ({"key_valid_for": True, "effect": "idempotent"}, "key_valid_for=True: it is a number"),
    "an effect ahead of its commit": (
        {"durability": "async", "effect": "idempotent"},
        "durability='async' with effect='idempotent': the result would be handed on before anything says that the call was "
        "made; leave durability= out",
    ),
    "a transaction ahead of its commit": (
        {"durability": "async", "effect": "transactional"},
        "durability='async' with effect",
    ),
    "compensate ahead of its commit": (
        {"durability": "async", "compensate": undo},
        "durability='async' with compensate=undo",
    ),
    "reconcile ahead of its commit": ({"durability": "async", "reconcile": find}, "reconcile=find without effect="),
    "tries of an irreversible step": (
        {"retry": RETRY, "effect": "irreversible"},
        "retry=AsyncRetrying(...) with effect='irreversible': an error leaves in doubt whether the call landed, and a second "
        "one might be a second deed; name the errors that say that it did not happen, as in "
        "not_landed=(ConnectionRefusedError,), or not_landed=NotLanded alone",
    ),
    "tries of an irreversible step of which none is safe": (
        {"retry": RETRY, "effect": "irreversible", "not_landed": ()},
        "retry=AsyncRetrying(...) with effect='irreversible'",
    ),
    "compensate that is no function": (
        {"compensate": 5},
        "compensate=5: it is a function of the step's result, or None",
    ),
    "compensate that wants more": (
        {"compensate": undo_with},
        "compensate=undo_with cannot be called with one argument: it gets the step's result alone; at a call a lambda gives it "
        "more: step.options(compensate=lambda result: undo(result, ...))",
    ),
    "compensate that wants nothing": ({"compensate": lambda: None}, "cannot be called with one argument"),
    "compensate that is a generator": (
        {"compensate": undo_bit_by_bit},
        "compensate=undo_bit_by_bit is a generator function",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_where_it_is_declared(options: dict[str, Any], sentence: str) -> None:
    """Before any function is there to be a step."""

    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        step.policy(**options)


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_at_the_call(options: dict[str, Any], sentence: str) -> None:
    """At the latest when the call brings options and function together; those that may be completed not before."""

    @workflow
    async def calls() -> None:
        await step.options(**options)(charge, 5)

    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        begin(calls).result


ACCEPTED: dict[str, dict[str, Any]] = {
    "an idempotent step": {"effect": "idempotent", "key_valid_for": dt.timedelta(days=1), "retry": RETRY, "timeout": 5},
    "an irreversible step": {"effect": "irreversible", "reconcile": find, "not_landed": (Declined, OSError)},
    "one that is tried again": {"effect": "irreversible", "retry": RETRY, "not_landed": NotLanded},
    "a transactional step": {"effect": "transactional", "retry": RETRY, "timeout": 5, "compensate": undo},
    "a repeatable step": {"effect": "repeatable", "durability": "async", "reconcile": None, "key_valid_for": None},
    "an undoing of a step without effect": {"compensate": undo},
    "an undoing by a method": {"compensate": Finder().undo},
    "an undoing by a lambda": {"compensate": lambda result: undo_with(result, "why")},
    "an undoing by a partial": {"compensate": functools.partial(undo_with, why="why")},
    "an undoing by a function of C": {"compensate": print},
    "a reconciler that is an object": {"effect": "irreversible", "reconcile": Finder()},
    "a reconciler that is a partial": {"effect": "irreversible", "reconcile": functools.partial(find_with, more="x")},
    "nothing that is declared": {"effect": "idempotent", "not_landed": (), "reconcile": None, "compensate": None},
}


@pytest.mark.parametrize("options", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_can_work_is_taken(options: dict[str, Any]) -> None:
    """On a function and at a call."""

    step.options(**options)
    policy = of(step.policy(**options)(functools.partial(charge)))

    assert {option for option in options if getattr(policy, option) is UNSET} == set()


def test_an_effect_is_kept_as_one_of_four_and_errors_as_a_tuple() -> None:
    """However they were written."""

    policy = of(step.policy(effect="irreversible", not_landed=Declined)(functools.partial(charge)))

    assert (policy.effect, policy.not_landed) == (Effect.IRREVERSIBLE, (Declined,))


def test_a_declaration_does_not_look_at_annotations() -> None:
    """What a reconciler or an undoing says of its types may stand further down in the module."""

    async def find_later(info: Later) -> Later:  # type: ignore[name-defined] # noqa: F821
        return info

    async def undo_later(result: Later) -> None:  # type: ignore[name-defined] # noqa: F821
        pass

    step.policy(effect="irreversible", reconcile=find_later, compensate=undo_later)


@step.policy(effect="irreversible")
async def once(cents: int) -> str:
    """A declared effect."""
    return f"{cents}"


@step.policy(effect="irreversible", reconcile=find)
async def once_asked(cents: int) -> str:
    """A declared effect, with a reconciler."""
    return f"{cents}"


@step.policy(durability="async", name="quick")
async def ahead(cents: int) -> str:
    """Declared as cheap."""
    return f"{cents}"


@step.policy(compensate=undo)
async def undone(cents: int) -> str:
    """Can be undone."""
    return f"{cents}"


MERGED: dict[str, tuple[dict[str, Any], Callable[[int], Any], str]] = {
    "tries of a declared irreversible step": (
        {"retry": RETRY},
        once,
        "step once: retry=AsyncRetrying(...) with effect=",
    ),
    "a declared effect ahead of its commit": (
        {"durability": "async"},
        once,
        "step once: durability='async' with effect='irreversible'",
    ),
    "an effect of a step declared ahead": (
        {"effect": "idempotent"},
        ahead,
        "step ahead: durability='async' with effect='idempotent'",
    ),
    "a declared undoing ahead of its commit": (
        {"durability": "async"},
        undone,
        "step undone: durability='async' with compensate=undo",
    ),
    "a declared reconciler of a step that is repeatable here": (
        {"effect": "repeatable"},
        once_asked,
        "step once_asked: reconcile=find with effect='repeatable'",
    ),
    "a reconciler of a step without effect": (
        {"reconcile": find},
        charge,
        "step charge: reconcile=find without effect=",
    ),
}


@pytest.mark.parametrize(("options", "function", "sentence"), MERGED.values(), ids=MERGED.keys())
def test_options_of_a_call_have_to_go_with_what_is_declared(
    options: dict[str, Any], function: Callable[[int], Any], sentence: str
) -> None:
    """The sentence names the step."""

    @workflow
    async def calls() -> None:
        await step.options(**options)(function, 5)

    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        begin(calls).result


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({"reconcile": find}, once),
        ({"not_landed": Declined}, once),
        ({"retry": RETRY, "not_landed": Declined}, once),
        ({"effect": "repeatable", "reconcile": None}, once_asked),
        ({"durability": "sync", "effect": "idempotent"}, ahead),
        ({"durability": "async", "compensate": None}, undone),
    ],
)
def test_options_of_a_call_complete_and_replace_what_is_declared(
    options: dict[str, Any], function: Callable[[int], Any]
) -> None:
    """What could not work alone is taken where the function declares the rest."""

    @workflow
    async def calls() -> None:
        await step.options(**options)(function, 5)

    assert len(begin(calls).asked) == 1


@pytest.mark.parametrize(
    ("options", "function", "effect"),
    [
        ({}, once, "irreversible"),
        ({"effect": "idempotent"}, charge, "idempotent"),
        ({"effect": "transactional"}, charge, "transactional"),
    ],
)
def test_a_step_with_an_effect_is_refused_in_a_body(
    options: dict[str, Any], function: Callable[[int], Any], effect: str
) -> None:
    """Declared, or by the call: there it would be a plain call without an intent. It is refused at the call, not the await."""

    with testing.step(), pytest.raises(ConfigurationError) as caught:
        step.options(**options)(function, 5)

    assert re.fullmatch(
        rf"step\({function.__name__} \(.+\), \.\.\.\) in the body of step alone: it has effect='{effect}', and in a body it "
        r"would be a plain call without an intent or an entry: call it in the workflow, or as a plain function",
        str(caught.value),
    )


def test_a_step_without_an_effect_is_a_plain_call_in_a_body() -> None:
    """Also one whose effect the call takes back."""

    async def body() -> list[str]:
        with testing.step():
            return [await step(charge, 5), await step(undone, 6), await step.options(effect="repeatable")(once, 7)]

    assert asyncio.run(body()) == ["5", "6", "7"]


# --- keys -------------------------------------------------------------------------------------------------------------

RUN = UUID("018f2f6e-7c1b-7d3a-9c55-0123456789ab")

GOLDEN = {
    "charge": ("1da4c226699ebdc61617640b9fb79790", "1da4c226-699e-8dc6-9617-640b9fb79790"),
    "1/charge#2": ("0eb3e29c5c40a1bb76a7b2cc41d0a794", "0eb3e29c-5c40-81bb-b6a7-b2cc41d0a794"),
    "=order-42": ("e8d5d7d358976efd28f4f285adaee7f1", "e8d5d7d3-5897-8efd-a8f4-f285adaee7f1"),
    "~undo:charge": ("5575032a32ffc8aaad7891cdca98dfd1", "5575032a-32ff-88aa-ad78-91cdca98dfd1"),
    "größe": ("76fd608b5ca6a2a1da42b41fe985546d", "76fd608b-5ca6-82a1-9a42-b41fe985546d"),
}


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_the_key_of_a_step_is_the_same_in_every_release(key: str, expected: tuple[str, str]) -> None:
    """What other sides remember of a run must be found again: these never change."""

    found = idempotency_key(RUN, key)

    assert (found, str(key_uuid(found))) == expected


@pytest.mark.parametrize("key", ["0" * 32, "f" * 32, "0123456789abcdef" * 2])
def test_a_keys_uuid_is_of_version_8(key: str) -> None:
    """RFC 9562's for an algorithm of one's own: all bits are the key's but those of version and variant."""

    found = key_uuid(key)

    assert (found.version, found.variant) == (8, "specified in RFC 4122")
    assert {n for n, (a, b) in enumerate(zip(found.hex, key, strict=True)) if a != b} <= {12, 16}


# --- what a body may tell ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "identifier", "sentence"),
    [
        ("", "123", "the kind is a non-empty text"),
        (None, "123", "the kind is a non-empty text"),
        ("ticket", "", 'the id is a non-empty text, such as observe("ticket", "123")'),
        ("ticket", None, "the id is a non-empty text"),
        ("ticket", 123, "observe('ticket', 123) in step alone: the id is a non-empty text, write str(123)"),
        ("tic:ket", "123", "the kind holds ':', which ends it in `replaykit find kind:id`"),
        ("tic\0ket", "123", "the kind holds NUL"),
        ("ticket", "1\0", "the id holds NUL"),
        ("ticket", "\ud800", "the id holds a lone surrogate"),
        ("ticket", "x" * 1_025, "has 1025 bytes: at most 1024"),
    ],
)
def test_an_observation_is_refused_that_could_not_be_stored_or_found(kind: Any, identifier: Any, sentence: str) -> None:
    """Empty, no text, NUL, a colon in the kind."""

    with testing.step() as info, pytest.raises(ConfigurationError, match=re.escape(sentence)):
        step.current().observe(kind, identifier)

    assert info.observed == ()


def test_a_step_ahead_of_its_commit_observes_nothing() -> None:
    """Its body may run again after others have gone on from it."""

    info = StepInfo(RUN, "quick", 1, "", dict)

    with pytest.raises(
        ConfigurationError, match=r"observe\('ticket', \.\.\.\) in step quick, which has durability='async'"
    ):
        info.observe("ticket", "123")


def test_what_nobody_handed_in_is_not_there() -> None:
    """No intent, no observation, no connection."""

    info = StepInfo(RUN, "charge", 1, idempotency_key(RUN, "charge"), dict)

    assert (info.written_at, info.observed) == (None, ())
    with pytest.raises(
        OutsideRun, match=r"connection\(\) in step charge, which is not transactional: declare it with effect="
    ):
        info.connection()

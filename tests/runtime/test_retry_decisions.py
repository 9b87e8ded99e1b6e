"""What a tenacity object decides about a try, asked without its loop: every strategy, alone and combined."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tenacity
import tenacity.asyncio
from tenacity import AsyncRetrying, BaseRetrying, Retrying, TryAgain

from replaykit.errors import ConfigurationError
from replaykit.limits import RETRY_WAIT_SECONDS_MAX
from replaykit.replay.declared import declare
from replaykit.replay.entries import IntentState
from replaykit.replay.outcomes import error_outcome, timeout_outcome
from replaykit.replay.requests import CallStep
from replaykit.replay.retrying import check_retry
from replaykit.replay.signature import describe
from replaykit.runtime.retries import Tried, after_error, decide, looks_at_results, rejected

KNOCK = OSError("knock")


def ask(
    retry: BaseRetrying,
    error: BaseException | None = KNOCK,
    *,
    value: Any = None,
    tries: int = 1,
    elapsed: float = 0.0,
    idle: float = 0.0,
) -> float | None:
    """The decision."""
    answer = decide(retry, tries=tries, error=error, value=value, elapsed_seconds=elapsed, idle_seconds=idle)
    return asyncio.run(answer).wait_seconds


@dataclass
class Case:
    """One strategy, and what it says of two situations (as keyword arguments of `ask`)."""

    strategy: Any
    goes_on: dict[str, Any]
    gives_up: dict[str, Any]


def over(seconds: float) -> Callable[[Any], bool]:
    """A predicate."""
    return lambda value: value is not None and value > seconds


def caused(cause: BaseException) -> BaseException:
    """An error with a cause."""
    error = RuntimeError("outer")
    error.__cause__ = cause
    return error


async def is_os_error(error: BaseException) -> bool:
    """An async predicate."""
    await asyncio.sleep(0)
    return isinstance(error, OSError)


async def is_none(value: Any) -> bool:
    """An async predicate of results."""
    await asyncio.sleep(0)
    return value is None


SET = threading.Event()
SET.set()

STOPS = {
    "stop_never": Case(tenacity.stop_never, {"tries": 10**6}, {}),
    "stop_any": Case(tenacity.stop_after_attempt(2) | tenacity.stop_after_delay(9), {"tries": 1}, {"elapsed": 9.0}),
    "stop_all": Case(
        tenacity.stop_after_attempt(2) & tenacity.stop_after_delay(9),
        {"tries": 5, "elapsed": 1.0},
        {"tries": 2, "elapsed": 9.0},
    ),
    "stop_when_event_set": Case(tenacity.stop_when_event_set(threading.Event()), {"tries": 9}, {}),
    "stop_after_attempt": Case(tenacity.stop_after_attempt(3), {"tries": 2}, {"tries": 3}),
    "stop_after_delay": Case(tenacity.stop_after_delay(10), {"elapsed": 9.9, "tries": 9}, {"elapsed": 10.0}),
    "stop_before_delay": Case(tenacity.stop_before_delay(10), {"elapsed": 5.0}, {"elapsed": 6.5}),  # with a wait of 4
}

WAITS: dict[str, tuple[Any, dict[int, Any]]] = {
    "wait_fixed": (tenacity.wait_fixed(3), {1: 3, 9: 3}),
    "wait_none": (tenacity.wait_none(), {1: 0, 9: 0}),
    "wait_random": (tenacity.wait_random(1, 2), {1: (1, 2)}),
    "wait_combine": (tenacity.wait_fixed(3) + tenacity.wait_incrementing(start=1, increment=1), {1: 4, 3: 6}),
    "wait_chain": (tenacity.wait_chain(*(tenacity.wait_fixed(n) for n in (1, 5, 9))), {1: 1, 2: 5, 3: 9, 7: 9}),
    "wait_exception": (tenacity.wait_exception(lambda error: 7.0 if error is KNOCK else 0.0), {1: 7}),
    "wait_incrementing": (tenacity.wait_incrementing(start=1, increment=2, max=6), {1: 1, 2: 3, 9: 6}),
    "wait_exponential": (tenacity.wait_exponential(multiplier=1, max=60), {1: 1, 2: 2, 5: 16, 99: 60}),
    "wait_random_exponential": (tenacity.wait_random_exponential(multiplier=1, max=8), {1: (0, 1), 9: (0, 8)}),
    "wait_exponential_jitter": (tenacity.wait_exponential_jitter(initial=1, max=9, jitter=1), {1: (1, 2), 99: (9, 9)}),
}

RETRIES = {
    "retry_never": Case(tenacity.retry_never, {}, {"error": KNOCK}),
    "retry_always": Case(tenacity.retry_always, {"error": KeyboardInterrupt()}, {}),
    "retry_if_exception": Case(
        tenacity.retry_if_exception(lambda error: error is KNOCK), {"error": KNOCK}, {"error": OSError()}
    ),
    "retry_if_exception_type": Case(
        tenacity.retry_if_exception_type(OSError), {"error": TimeoutError()}, {"error": KeyError()}
    ),
    "retry_if_not_exception_type": Case(
        tenacity.retry_if_not_exception_type(OSError), {"error": KeyError()}, {"error": TimeoutError()}
    ),
    "retry_unless_exception_type": Case(
        tenacity.retry_unless_exception_type(OSError), {"error": None, "value": 1}, {"error": KNOCK}
    ),
    "retry_if_exception_cause_type": Case(
        tenacity.retry_if_exception_cause_type(OSError),
        {"error": caused(caused(OSError()))},
        {"error": caused(KeyError())},
    ),
    "retry_if_result": Case(
        tenacity.retry_if_result(over(3)), {"error": None, "value": 4}, {"error": None, "value": 3}
    ),
    "retry_if_not_result": Case(
        tenacity.retry_if_not_result(over(3)), {"error": None, "value": 3}, {"error": None, "value": 4}
    ),
    "retry_if_exception_message": Case(
        tenacity.retry_if_exception_message(match="kno"), {"error": KNOCK}, {"error": OSError("else")}
    ),
    "retry_if_not_exception_message": Case(
        tenacity.retry_if_not_exception_message(message="knock"), {"error": OSError("else")}, {"error": KNOCK}
    ),
    "retry_any": Case(
        tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_result(over(3)),
        {"error": None, "value": 4},
        {"error": KeyError()},
    ),
    "retry_all": Case(
        tenacity.retry_if_exception_type(OSError) & tenacity.retry_if_exception_message(match="kno"),
        {"error": KNOCK},
        {"error": OSError("else")},
    ),
    "asyncio.retry_if_exception": Case(
        tenacity.asyncio.retry_if_exception(is_os_error), {"error": KNOCK}, {"error": KeyError()}
    ),
    "asyncio.retry_if_result": Case(
        tenacity.asyncio.retry_if_result(is_none), {"error": None, "value": None}, {"error": None, "value": 1}
    ),
    "asyncio.retry_any": Case(
        tenacity.asyncio.retry_if_exception(is_os_error) | tenacity.retry_if_exception_type(KeyError),
        {"error": KeyError()},
        {"error": TypeError()},
    ),
    "asyncio.retry_all": Case(
        tenacity.asyncio.retry_if_exception(is_os_error) & tenacity.retry_if_exception_message(match="kno"),
        {"error": KNOCK},
        {"error": OSError("else")},
    ),
}

WAIT_ALIASES = {"wait_full_jitter"}


def strategies(base: type, *modules: Any) -> set[str]:
    """The names under which tenacity exports strategies of a kind: classes, and the objects `stop_never`, `retry_always`."""
    found = set()
    for module in modules:
        prefix = "" if module is tenacity else "asyncio."
        for name in module.__all__ if hasattr(module, "__all__") else dir(module):
            thing = getattr(module, name)
            kind = thing if isinstance(thing, type) else type(thing)
            if issubclass(kind, base) and not name.endswith("_base"):
                if prefix and getattr(tenacity, name, None) is thing:
                    continue
                found.add(prefix + name)
    return found


def test_every_strategy_that_tenacity_exports_has_a_case_here() -> None:
    """A release of tenacity with a new one fails here until it has been looked at."""
    assert strategies(tenacity.stop.stop_base, tenacity) == set(STOPS)
    assert strategies(tenacity.wait.wait_base, tenacity) == set(WAITS) | WAIT_ALIASES
    assert strategies(tenacity.retry_base, tenacity, tenacity.asyncio) == set(RETRIES)


@pytest.mark.parametrize("kind", [Retrying, AsyncRetrying])
@pytest.mark.parametrize("name", STOPS)
def test_each_stop_strategy_is_heard(name: str, kind: type[BaseRetrying]) -> None:
    """By the numbers that the rows give, not by a clock; stop_before_delay knows the wait."""
    case = STOPS[name]
    retry = kind(stop=case.strategy, wait=tenacity.wait_fixed(4))

    assert ask(retry, **case.goes_on) == 4
    if case.gives_up:
        assert ask(retry, **case.gives_up) is None


def test_an_event_that_is_set_stops_the_tries() -> None:
    """It is this process's event: the next process has another."""
    assert ask(AsyncRetrying(stop=tenacity.stop_when_event_set(SET))) is None


@pytest.mark.parametrize("kind", [Retrying, AsyncRetrying])
@pytest.mark.parametrize("name", WAITS)
def test_each_wait_strategy_is_heard(name: str, kind: type[BaseRetrying]) -> None:
    """By the number of the try."""
    strategy, expected = WAITS[name]
    retry = kind(wait=strategy)

    for tries, seconds in expected.items():
        wait = ask(retry, tries=tries)
        low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        assert wait is not None
        assert low <= wait <= high


@pytest.mark.parametrize("kind", [Retrying, AsyncRetrying])
@pytest.mark.parametrize("name", RETRIES)
def test_each_retry_strategy_is_heard(name: str, kind: type[BaseRetrying]) -> None:
    """On the live exception or result; async ones are awaited, whatever object they were given to."""
    case = RETRIES[name]
    retry = kind(retry=case.strategy)

    if case.goes_on:
        assert ask(retry, **case.goes_on) == 0
    if case.gives_up:
        assert ask(retry, **case.gives_up) is None


@pytest.mark.parametrize("name", RETRIES)
def test_what_never_looks_at_results_is_known(name: str) -> None:
    """So that a step that returned costs nothing more; in doubt a result is asked about."""
    retry = AsyncRetrying(retry=RETRIES[name].strategy)

    accepted = all(ask(retry, None, value=value) is None for value in (None, 1, 4))

    assert looks_at_results(retry) is not accepted or name.endswith("all")


def test_try_again_is_always_tried_again() -> None:
    """As tenacity has it, whatever the predicate; until stop says no."""
    retry = AsyncRetrying(retry=tenacity.retry_if_result(over(3)), stop=tenacity.stop_after_attempt(2))

    assert ask(retry, TryAgain(), tries=1) == 0
    assert ask(retry, TryAgain(), tries=2) is None


def test_the_default_retries_exceptions_and_nothing_that_ends_a_process() -> None:
    """An exit, an interrupt and a cancellation are no failures to try again."""
    for retry in (Retrying(), AsyncRetrying()):
        assert ask(retry, ValueError()) == 0
        for error in (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), GeneratorExit()):
            assert ask(retry, error) is None


def test_a_disabled_object_never_retries() -> None:
    """`enabled=False` is how tests and settings turn retries off."""
    assert ask(AsyncRetrying(enabled=False)) is None
    assert not looks_at_results(AsyncRetrying(enabled=False, retry=tenacity.retry_always))


def test_own_strategies_are_plain_or_async_functions_of_the_state() -> None:
    """The state says what tenacity's says: try, error, seconds since the start, idle seconds."""
    seen: list[tuple[Any, ...]] = []

    async def wait(state: tenacity.RetryCallState) -> float:
        seen.append((state.attempt_number, state.outcome, state.seconds_since_start, state.idle_for))
        return 2.5

    async def stop(state: tenacity.RetryCallState) -> bool:
        return state.upcoming_sleep != 2.5

    retry = AsyncRetrying(wait=wait, stop=stop, retry=lambda state: state.outcome is not None)  # type: ignore[arg-type]

    assert ask(retry, tries=4, elapsed=11.0, idle=6.0) == 2.5
    ((number, outcome, since, idle),) = seen
    assert (number, since, idle) == (4, 11.0, 6.0)
    assert outcome.exception() is KNOCK
    assert "state" not in vars(retry._local)
    assert not hasattr(retry._local, "statistics")


def test_strategies_are_told_the_call_and_what_tenacity_counts() -> None:
    """Function, arguments and statistics, as tenacity's own loop gives them; the object itself, which many runs share,
    keeps nothing."""
    seen: list[Any] = []

    def wait(state: tenacity.RetryCallState) -> float:
        seen.append((state.fn, state.args, state.kwargs, dict(state.retry_object.statistics)))
        return 1.0

    retry = AsyncRetrying(wait=wait)
    asked = decide(
        retry,
        tries=3,
        elapsed_seconds=11.0,
        idle_seconds=6.0,
        error=KNOCK,
        function=is_none,
        arguments=((1,), {"card": "visa"}),
    )
    assert asyncio.run(asked).wait_seconds == 1.0

    ((function, args, kwargs, statistics),) = seen
    assert (function, args, kwargs) == (is_none, (1,), {"card": "visa"})
    assert statistics == {
        "start_time": 0.0,
        "attempt_number": 3,
        "idle_for": 6.0,
        "delay_since_first_attempt": 11.0,
    }
    assert retry.statistics == {}


class Thoughtless:
    """A strategy that forgets its return."""

    def __call__(self, state: tenacity.RetryCallState) -> Any:
        return None


def forgetful(state: tenacity.RetryCallState) -> Any:
    """The same as a function."""


def wordy(state: tenacity.RetryCallState) -> Any:
    """Says it in words."""
    return "3"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [(forgetful, "wait=forgetful"), (Thoughtless(), "wait=Thoughtless"), (wordy, "wait=wordy of retry= returned '3'")],
)
def test_a_wait_that_is_no_number_is_told_by_the_strategys_name(strategy: Any, said: str) -> None:
    """In one sentence, with the try's error as its cause."""
    with pytest.raises(TypeError, match=f"{said}.* it must return seconds, as a number; 0 is no wait") as caught:
        ask(AsyncRetrying(wait=strategy))

    assert caught.value.__cause__ is KNOCK


@pytest.mark.parametrize(
    ("given", "wait"),
    [
        (-3, 0),
        (math.nan, 0),
        (math.inf, RETRY_WAIT_SECONDS_MAX),
        (2**10_000, RETRY_WAIT_SECONDS_MAX),
        (-(2**10_000), 0),
        (0.25, 0.25),
    ],
)
def test_waits_that_no_calendar_holds_are_cut(given: float, wait: float) -> None:
    """Negative or not a number: at once. Endless: a hundred years."""
    assert ask(AsyncRetrying(wait=lambda state: given)) == wait


def test_the_error_of_a_strategy_goes_up_with_the_tries_error_as_its_cause() -> None:
    """Both are wanted by whoever mends the predicate."""

    def broken(error: BaseException) -> bool:
        return error.response.status == 503  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="response") as caught:
        ask(AsyncRetrying(retry=tenacity.retry_if_exception(broken)))

    assert caught.value.__cause__ is KNOCK
    assert "retry=" in caught.value.__notes__[0]


def test_a_rejected_result_says_what_it_was() -> None:
    """Shortly, and whatever its repr does."""

    class Rude:
        def __repr__(self) -> str:
            raise ValueError

    assert str(rejected("1/poll", 2, None)) == "step 1/poll: its retry= rejected the result of attempt 2: None"
    assert "Rude" in str(rejected("1/poll", 1, Rude()))
    assert len(str(rejected("1/poll", 1, "x" * 10_000))) < 200


# ---------------------------------------------------------------------- at the declaration


@pytest.mark.parametrize(
    "retry",
    [
        Retrying(),
        AsyncRetrying(),
        Retrying().copy(stop=tenacity.stop_after_attempt(3)),
        AsyncRetrying().copy(wait=tenacity.wait_fixed(1)),
        AsyncRetrying(reraise=True, name="payments", enabled=False),
        Retrying(before=tenacity.before_nothing, before_sleep=tenacity.before_sleep_nothing),
    ],
)
def test_tenacity_objects_are_taken_as_they_are(retry: BaseRetrying) -> None:
    """`reraise` may say what it likes: the last error itself is raised."""
    assert check_retry(retry) is retry


def hook(*_: Any) -> None:
    """Would never be called."""


class OwnError(tenacity.RetryError):
    """Would never be raised."""


@pytest.mark.parametrize("kind", [Retrying, AsyncRetrying])
@pytest.mark.parametrize("name", ["before", "after", "before_sleep", "retry_error_callback", "sleep"])
def test_hooks_that_would_never_be_called_are_refused(name: str, kind: Any) -> None:
    """By name, with the place to look instead."""
    with pytest.raises(ConfigurationError, match=rf"retry= has {name}=hook, which would never be called.*leave it out"):
        check_retry(kind(**{name: hook}))


def test_another_error_class_is_refused() -> None:
    """The last error itself is raised, never a wrapper."""
    with pytest.raises(ConfigurationError, match=r"retry_error_cls=OwnError.*the error of the last try"):
        check_retry(AsyncRetrying(retry_error_cls=OwnError))


@tenacity.retry
def wrapped() -> None:
    """Retries by itself."""


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, r"3 tries are retry=AsyncRetrying\(stop=stop_after_attempt\(3\)\)"),
        (0, "no retry at all is retry=None"),
        (False, "no retry at all is retry=None"),
        (True, "write retry=AsyncRetrying"),
        ({"max_attempts": 3}, "no tenacity object"),
        (tenacity.stop_after_attempt(3), r"retry=AsyncRetrying\(stop=stop_after_attempt"),
        (tenacity.wait_fixed(3), r"retry=AsyncRetrying\(wait=wait_fixed"),
        (tenacity.retry_if_exception_type(OSError), r"retry=AsyncRetrying\(retry=retry_if_exception_type"),
        (AsyncRetrying, "is the class"),
        (tenacity.retry, "no tenacity object"),
        (wrapped, r"retry=wrapped\.retry"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(given: Any, sentence: str) -> None:
    """In one sentence."""
    with pytest.raises(ConfigurationError, match=sentence):
        check_retry(given)


# --- calls with an effect ---------------------------------------------------------------------------------------------


async def charge() -> None:
    """Never called here."""


def irreversible(*not_landed: type[Exception]) -> CallStep:
    """A call whose `retry=` wants another try whatever happens."""
    policy = declare(whole=True, effect="irreversible", retry=AsyncRetrying(), not_landed=not_landed)
    info = describe(charge)
    return CallStep("charge", "charge", charge, info, info.bind((), {}), policy, (charge.__code__, 0))


def test_an_irreversible_call_that_may_have_happened_is_not_asked_of_retry() -> None:
    """Whatever it would say; only where the call did not happen its word counts."""
    call = irreversible(ConnectionRefusedError)
    doubtful, refused = OSError("reset"), ConnectionRefusedError("closed")

    in_doubt = after_error(call, doubtful, error_outcome(doubtful, 0))
    tried = after_error(call, refused, error_outcome(refused, 0))

    assert not isinstance(in_doubt, Tried) and in_doubt.call_state is IntentState.UNKNOWN
    assert isinstance(tried, Tried) and tried.outcome.call_state is IntentState.NOT_LANDED


def test_a_time_out_leaves_a_call_in_doubt_whatever_the_bodys_own_time_outs_say() -> None:
    """Its own may come of a connection that was never made; the step's comes at any moment."""
    call = irreversible(TimeoutError)
    own, late = TimeoutError("connect"), timeout_outcome(call, 1, 1.0, 0)

    tried = after_error(call, own, error_outcome(own, 0))
    in_doubt = after_error(call, late.value, late)

    assert isinstance(tried, Tried) and tried.outcome.call_state is IntentState.NOT_LANDED
    assert not isinstance(in_doubt, Tried) and in_doubt.call_state is IntentState.UNKNOWN

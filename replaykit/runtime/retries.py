"""What `retry=` decides, asked once for each try that failed; the decision is then a row of `attempts`.

The strategies of a tenacity object are called without its loop, its clock and its sleep (DESIGN 4): every number comes from the
rows. They may be coroutine functions. They are asked with the live exception or result, because a recorded one lacks what
could not be recorded (`error.response`).
"""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import inspect
import math
import reprlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from replaykit.errors import ResultRejected
from replaykit.limits import RETRY_WAIT_SECONDS_MAX, Settings
from replaykit.replay.actions import StartBody
from replaykit.replay.entries import Effect, IntentState, Outcome
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome
from replaykit.replay.requests import CallStep
from replaykit.runtime.timeouts import microseconds

if TYPE_CHECKING:
    from tenacity import BaseRetrying

__all__ = [
    "Decision",
    "Tried",
    "after_error",
    "after_result",
    "decide",
    "judge",
    "looks_at_results",
    "rejected",
    "state_after",
    "unbegun",
]

_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


@dataclass(slots=True)
class Tried:
    """A try that has ended: what would be recorded of it, and the live error or result that `retry=` is asked with."""

    outcome: BodyOutcome
    error: BaseException | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the strategies say: whether the outcome stands, and if not, the wait before the next try (None: there is none)."""

    stands: bool
    wait_seconds: float | None


_STANDS: Final = Decision(True, None)


async def judge(
    start: StartBody, tried: Tried, now: int, arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
) -> tuple[BodyOutcome, float | None]:
    """The outcome to record of a try, and how many seconds to wait before the next one; None: the outcome is final.

    `arguments` are those that the body was called with: strategies may look at them.
    A result that is rejected becomes `ResultRejected`; what a strategy raises becomes the step's error.
    """
    call, outcome = start.call, tried.outcome
    assert call.retry is not None
    first_at = outcome.started_at if start.first_at is None else start.first_at
    try:
        decision = await decide(
            call.retry,
            tries=start.tries,
            elapsed_seconds=max(0, now - first_at) / 1_000_000,
            idle_seconds=start.idle_seconds,
            error=tried.error,
            value=tried.value,
            function=call.function,
            arguments=arguments,
        )
    except (asyncio.CancelledError, GeneratorExit):  # maybe this worker's own doing
        raise
    except BaseException as failure:
        return _instead_of(outcome, failure), None
    if decision.stands:
        return outcome, None
    if tried.error is None:
        outcome = _instead_of(outcome, rejected(call.key, start.attempt, tried.value))
    wait = decision.wait_seconds
    if isinstance(call.timeout, dt.datetime) and wait is not None:
        # A moment is the deadline of all tries: one that would begin after it could only time out.
        late = outcome.outcome is Outcome.TIMEOUT or now + wait * 1_000_000 >= microseconds(call.timeout)
        wait = None if late else wait
    return outcome, wait


def _instead_of(outcome: BodyOutcome, error: BaseException) -> BodyOutcome:
    """An error that stands for what the body came to."""
    stands = error_outcome(error, outcome.started_at)
    # Of a result that was not accepted nobody needs to be asked: the step has failed, and its intent is closed with that.
    stands.call_state = IntentState.UNKNOWN if outcome.call_state is IntentState.LANDED else outcome.call_state
    return stands


async def decide(
    retry: BaseRetrying,
    *,
    tries: int,
    elapsed_seconds: float,
    idle_seconds: float,
    error: BaseException | None = None,
    value: Any = None,
    function: Callable[..., Any] | None = None,
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
) -> Decision:
    """Ask the strategies of a tenacity object, once.

    Args:
        retry: the tenacity object.
        tries: how many there were, this one included.
        elapsed_seconds: from the first one's start to this one's end.
        idle_seconds: how long was waited between them.
        error: what this one raised; None: it returned `value`.
        value: its result.
        function: the step's function, for strategies that say its name.
        arguments: those by place and by name that it was called with.

    Raises:
        Exception: whatever a strategy raises, with the try's error as its cause.
    """
    from tenacity import Future, RetryCallState, TryAgain

    if not getattr(retry, "enabled", True):
        return _STANDS
    args, kwargs = arguments
    state = RetryCallState(_with_statistics(retry, tries, elapsed_seconds, idle_seconds), function, args, kwargs)
    state.start_time, state.outcome_timestamp = 0.0, elapsed_seconds
    state.attempt_number, state.idle_for = tries, idle_seconds
    state.outcome = Future.construct(tries, value if error is None else error, error is not None)

    async def ask(strategy: Any) -> Any:
        answer = strategy(state)
        return await answer if inspect.isawaitable(answer) else answer

    try:
        if not (isinstance(error, TryAgain) or await ask(retry.retry)):
            return _STANDS
        # Before stop, as tenacity has it: stop_before_delay looks at the wait.
        state.upcoming_sleep = wait = _seconds(await ask(retry.wait), retry.wait)
        return Decision(False, None if await ask(retry.stop) else wait)
    except Exception as failure:
        if failure is not error and failure.__cause__ is None and error is not None:
            failure.__cause__ = error
        failure.add_note("raised by a strategy of the step's retry=")
        raise


def _with_statistics(retry: BaseRetrying, tries: int, elapsed_seconds: float, idle_seconds: float) -> BaseRetrying:
    """A copy for one question: what tenacity counts by itself it keeps by thread, where many runs ask."""
    asked = copy.copy(retry)
    asked._local = threading.local()
    asked.statistics.update(
        start_time=0.0,
        attempt_number=tries,
        idle_for=idle_seconds,
        delay_since_first_attempt=elapsed_seconds,
    )
    return asked


def _seconds(wait: Any, strategy: Any) -> float:
    number: Any = wait
    try:
        if isinstance(wait, str):
            raise TypeError
        seconds = float(wait)
    except (TypeError, ValueError):
        name = getattr(strategy, "__qualname__", type(strategy).__qualname__)
        raise TypeError(
            f"wait={name} of retry= returned {_REPR.repr(wait)}: it must return seconds, as a number; 0 is no wait"
        ) from None
    except OverflowError:  # 2 ** 10_000, of an exponential wait without max=
        seconds = math.inf if number > 0 else 0.0
    if not seconds > 0:  # negative, or not a number
        return 0.0
    return min(seconds, RETRY_WAIT_SECONDS_MAX)


def after_result(call: CallStep, value: Any, started_at: int, settings: Settings) -> BodyOutcome | Tried:
    """A body returned. `Tried`: `retry=` is to be asked about it; never about the result of an irreversible step, which is a
    deed whatever it looks like."""
    outcome = result_outcome(call.info, value, started_at, settings)
    if call.has_intent or call.compensates is not None:
        outcome.call_state = IntentState.LANDED
    if outcome.error is None and call.retry is not None and call.effect is not Effect.IRREVERSIBLE:
        return Tried(outcome, None, value) if looks_at_results(call.retry) else outcome
    return outcome


def after_error(call: CallStep, error: BaseException, outcome: BodyOutcome) -> BodyOutcome | Tried:
    """A body raised, or its time was up. `Tried`: `retry=` is to be asked about it; of an irreversible step only where the call
    did not happen."""
    if call.has_intent:
        timed_out = outcome.outcome is Outcome.TIMEOUT  # a TimeoutError that may be declared is the body's own
        outcome.call_state = IntentState.UNKNOWN if timed_out else state_after(call, error)
    if call.retry is None or (call.effect is Effect.IRREVERSIBLE and outcome.call_state is not IntentState.NOT_LANDED):
        return outcome
    return Tried(outcome, error)


def unbegun(call: CallStep, outcome: BodyOutcome) -> BodyOutcome:
    """A body could not begin. An idempotent one may have, at an earlier claim under the same intent."""
    if call.has_intent:
        irreversible = call.effect is Effect.IRREVERSIBLE
        outcome.call_state = IntentState.NOT_LANDED if irreversible else IntentState.UNKNOWN
    return outcome


def state_after(call: CallStep, error: BaseException) -> IntentState:
    """What an error of a step's body says of its call."""
    return IntentState.NOT_LANDED if call.says_not_landed(error) else IntentState.UNKNOWN


def looks_at_results(retry: BaseRetrying) -> bool:
    """Whether a result may be rejected: tenacity's own strategies for exceptions never do, anything else might."""
    return getattr(retry, "enabled", True) and _looks_at_results(retry.retry)


def _looks_at_results(strategy: Any) -> bool:
    import tenacity
    import tenacity.asyncio

    kind = type(strategy)
    if kind in (tenacity.retry_any, tenacity.asyncio.retry_any):
        return any(_looks_at_results(one) for one in strategy.retries)
    if kind in (tenacity.retry_all, tenacity.asyncio.retry_all):
        return all(_looks_at_results(one) for one in strategy.retries)
    return kind not in (
        tenacity.retry_if_exception,
        tenacity.retry_if_exception_type,
        tenacity.retry_if_not_exception_type,
        tenacity.retry_if_exception_message,
        tenacity.retry_if_exception_cause_type,
        tenacity.asyncio.retry_if_exception,
        type(tenacity.retry_never),
    )


def rejected(key: str, attempt: int, value: Any) -> ResultRejected:
    """The error that stands for a result which `retry=` did not accept."""
    try:
        shown = _REPR.repr(value)
    except Exception:
        shown = f"<{type(value).__name__} object>"
    return ResultRejected(f"step {key}: its retry= rejected the result of attempt {attempt}: {shown}")

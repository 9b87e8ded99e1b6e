"""Asks reconcilers what became of a call: reads, tried again a few times, whose answers the driver takes.

A reconciler has a task of its own, in a copy of its call's context. What it says is a value (`Landed`, `NotLanded`, `Unknown`);
one that keeps failing, takes too long or says something else has said that nobody knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from replaykit.errors import NotLanded
from replaykit.events import brief, log
from replaykit.limits import RECONCILE_PAUSES_SECONDS, RECONCILE_REASON_CHARS_MAX, RECONCILE_SECONDS_MAX, Settings
from replaykit.replay.actions import Reconcile
from replaykit.replay.answers import Landed, Unknown
from replaykit.replay.calls import CURRENT_STEP, StepInfo
from replaykit.replay.doubts import Answer
from replaykit.replay.entries import IntentState
from replaykit.replay.outcomes import result_outcome
from replaykit.runtime.logged import bind_body
from replaykit.runtime.timeouts import TimeIsUp, until

__all__ = ["Reconcilers", "ask"]


@dataclass(slots=True, eq=False)
class _Asking:
    """A reconciler that is being asked."""

    action: Reconcile
    task: asyncio.Task[Answer]
    stopping: bool = False  # by this worker's drain: it will be asked again elsewhere


def _nobody(*_: Any) -> None:
    """Hears of a run that has left."""


class Reconcilers:
    """Those of one run that are being asked. For plain callbacks of the worker's loop, which it calls back from as well.

    Args:
        run_id: whose.
        settings: what of a result can be recorded.
        answered: called with the step's key, the attempt and the answer.
        stopped: called with the key of a step whose reconciler was cancelled by `stop`.
    """

    def __init__(
        self,
        run_id: UUID,
        settings: Settings,
        answered: Callable[[str, int, Answer], None],
        stopped: Callable[[str], None],
    ) -> None:
        self._run_id = run_id
        self._settings = settings
        self._answered = answered
        self._stopped = stopped
        self._asked: dict[str, _Asking] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def begin(self, action: Reconcile, info: StepInfo) -> None:
        """Ask. One that is asked already about the same attempt answers for both."""
        call = action.call
        before = self._asked.get(call.key)
        if before is not None:
            if before.action.attempt == action.attempt:
                return
            before.task.cancel()
        assert call.context is not None
        coroutine = _ask_in_its_context(action, info, self._settings)
        task = asyncio.get_running_loop().create_task(coroutine, context=call.context.copy())
        asking = self._asked[call.key] = _Asking(action, task)
        task.add_done_callback(lambda _: self._done(asking))

    def stop(self) -> None:
        """Cancel them: the worker drains, and another will ask."""
        for asking in self._asked.values():
            asking.stopping = True
            asking.task.cancel()

    def leave(self) -> None:
        """Cancel them, and tell nobody: the run has left memory."""
        asked, self._asked = self._asked, {}
        self._answered, self._stopped = (
            _nobody,
            _nobody,
        )  # nothing holds the run that has left: no work for the collector
        for asking in asked.values():
            asking.task.cancel()

    def _done(self, asking: _Asking) -> None:
        call, attempt, task = asking.action.call, asking.action.attempt, asking.task
        if self._asked.get(call.key) is not asking:
            if not task.cancelled():
                task.exception()  # else asyncio would tell of it
            return
        del self._asked[call.key]
        if task.cancelled() and asking.stopping:
            self._stopped(call.key)
            return
        try:
            answer = task.result()
        except (
            BaseException
        ) as error:  # whatever a reconciler did to its own task: the run must not wait for it for ever
            words = f"its reconciler ended with {type(error).__qualname__} instead of an answer"
            answer = Answer(IntentState.UNKNOWN, None, words)
        log.info("reconciled", run_id=str(self._run_id), step=call.key, attempt=attempt, state=str(answer.state))
        self._answered(call.key, attempt, answer)


async def _ask_in_its_context(action: Reconcile, info: StepInfo, settings: Settings) -> Answer:
    CURRENT_STEP.set(info)
    bind_body(info.key, info.attempt)
    return await ask(action, info, settings)


async def ask(
    action: Reconcile,
    info: StepInfo,
    settings: Settings,
    *,
    seconds: float = RECONCILE_SECONDS_MAX,
    pauses: Sequence[float] = RECONCILE_PAUSES_SECONDS,
) -> Answer:
    """What the reconciler of a call says.

    Args:
        action: what to ask.
        info: what the reconciler is given.
        settings: what of a result can be recorded.
        seconds: how long one try may take.
        pauses: seconds between two tries: one try more than there are pauses.
    """
    reconcile = action.call.reconcile
    assert reconcile is not None
    error: BaseException | None = None
    for pause in (*pauses, None):
        try:
            return _answer(action, await _said(reconcile, info, seconds), settings)
        except _Failed as failed:
            error = failed.error
        log.warning(
            "reconciler_failed", run_id=str(info.run_id), step=info.key, error=error, retrying=pause is not None
        )
        if pause is not None:
            await asyncio.sleep(pause)
    tries = len(pauses) + 1
    assert error is not None
    words = f"its reconciler {_name(reconcile)} failed {tries} times, the last time with {brief(error)}"
    return Answer(IntentState.UNKNOWN, None, words)


class _Failed(Exception):
    """A try has no answer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _said(reconcile: Callable[[Any], Any], info: StepInfo, seconds: float) -> Any:
    """What one try returns, or raises as an answer."""
    try:
        return await until(asyncio.get_running_loop().time() + seconds, reconcile, (info,), {})
    except NotLanded as answer:
        return answer
    except TimeIsUp:
        raise _Failed(TimeoutError(f"no answer within {seconds:g} s")) from None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _Failed(error) from None  # its own
    except GeneratorExit:  # of a coroutine that is closed, which must not wait for anything any more
        raise
    except BaseException as error:
        raise _Failed(error) from None


def _answer(action: Reconcile, said: Any, settings: Settings) -> Answer:
    call = action.call
    assert call.reconcile is not None
    if isinstance(said, NotLanded):
        return Answer(IntentState.NOT_LANDED, None, _text(said))
    if isinstance(said, Unknown):
        return Answer(IntentState.UNKNOWN, None, _text(said.reason))
    if not isinstance(said, Landed):
        words = (
            f"its reconciler {_name(call.reconcile)} returned {_kind(said)}: it returns Landed(result), NotLanded() or "
            "Unknown(reason)"
        )
        return Answer(IntentState.UNKNOWN, None, words)
    try:
        outcome = result_outcome(call.info, said.value, action.written_at or 0, settings)
        refused = outcome.value if outcome.error is not None else None
    except Exception as error:  # of the value's own code
        outcome, refused = None, error
    if outcome is None or refused is not None:
        words = f"its reconciler {_name(call.reconcile)} says that it landed, with a result that cannot be recorded: {refused}"
        return Answer(IntentState.UNKNOWN, None, words)
    outcome.call_state = IntentState.LANDED
    return Answer(IntentState.LANDED, outcome, "")


def _text(said: object) -> str:
    """What it said in its own words; an author's `__str__` may do anything."""
    try:
        return str(said)[:RECONCILE_REASON_CHARS_MAX]
    except Exception:
        return f"a {type(said).__qualname__} without words"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _kind(said: Any) -> str:
    if said is None:
        return "nothing"
    return f"the class {said.__qualname__}" if isinstance(said, type) else f"a value of type {type(said).__qualname__}"

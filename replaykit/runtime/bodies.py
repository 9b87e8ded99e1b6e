"""How the bodies of one run run: on the event loop or in threads, until they end, time out, are stopped or are given up.

    start         a body begins; its arguments are decoded, its context is a copy of its call's
    _judge        it has returned or raised, and `retry=` is asked what to make of it
    _ended        a try has an outcome, and the driver is told
    give_up       nobody waits for it any more; what of it goes on is known as a leftover until it ends
    stop          this worker drains: it will run again elsewhere

A thread cannot be stopped. One whose time is up, or that was given up, is made up for by another, and no other try of its step
begins here before it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from replaykit.events import log
from replaykit.replay.actions import StartBody
from replaykit.replay.calls import CURRENT_STEP, StepInfo
from replaykit.replay.driver import Driver
from replaykit.replay.entries import Effect, IntentState
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome
from replaykit.replay.requests import CallStep
from replaykit.runtime.logged import bind_body
from replaykit.runtime.observing import Observations
from replaykit.runtime.retries import Tried, after_error, after_result, judge, unbegun
from replaykit.runtime.shop import Shop
from replaykit.runtime.timeouts import TimeIsUp, seconds_left, timed_out, until
from replaykit.runtime.transactions import Lent, RunTransactions
from replaykit.runtime.writer import MAY_NEST

__all__ = ["Bodies", "Body"]


@dataclass(slots=True)
class Body:
    """A body that is running (or a thread's that was given up and has not ended)."""

    start: StartBody
    started_at: int
    context: contextvars.Context
    task: asyncio.Task[None] | Future[Any] | None = None  # None: about to be made
    thread: Future[Any] | None = None  # its work there, ended or not
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # its own, kept for `retry=`
    lent: Lent | None = None  # of a transactional step: what it may take of the database
    is_async: bool = False
    begun: bool = False  # the author's code has been called
    stopping: bool = False  # cancelled by this worker's drain: it will run again
    given_up: bool = False  # its outcome no longer counts
    timed_out: bool = False  # of a thread: what it still leaves is dropped
    left_behind: bool = False  # of a thread: it was made up for by another
    deadline: float | None = None  # of its `timeout=`, on the event loop's clock
    timer: asyncio.TimerHandle | None = None  # rings then, for a thread

    @property
    def call(self) -> CallStep:
        """Whose body it is."""
        return self.start.call

    @property
    def attempt(self) -> int:
        """Which try."""
        return self.start.attempt

    def cancel(self) -> None:
        """Stop it, if that can be done."""
        if self.task is not None:
            self.task.cancel()


def _nobody(*_: Any) -> None:
    """Hears of a run that has left."""


class Bodies:
    """The bodies of one run. For plain callbacks of the worker's loop, unless said otherwise.

    Args:
        run_id: whose.
        shop: what it shares with its neighbours.
        observations: what bodies tell of the world outside.
        transactions: of the run's transactional steps.
        tell: called with an event of the driver's, as a function of `Driver`, and what belongs to it.
        put_off: called with what does not begin now.
        wake: called when what was put off may begin.
    """

    def __init__(
        self,
        run_id: UUID,
        shop: Shop,
        observations: Observations,
        transactions: RunTransactions,
        *,
        tell: Callable[..., None],
        put_off: Callable[[StartBody], None],
        wake: Callable[[], None],
    ) -> None:
        self.run_id = run_id
        self.running: dict[str, Body] = {}
        self._shop = shop
        self._observations = observations
        self._transactions = transactions
        self._tell = tell
        self._put_off = put_off
        self._wake = wake
        self._host = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self.running)

    # ------------------------------------------------------------------ a body begins

    def start(self, action: StartBody, started_at: int) -> None:
        """Begin a body, now or when nothing of its step goes on any more."""
        call = action.call
        left = None
        if call.policy is not None and call.timeout is not None:
            left = seconds_left(call.timeout, started_at)
        if left is not None and left <= 0 and isinstance(call.timeout, dt.datetime):
            outcome = unbegun(call, timed_out(call, action.attempt, started_at))
            self._host.call_soon(self._ended, call.key, None, outcome)
            return
        # Of the try before, or of this run's last claim in this process.
        if self._shop.leftovers and self.goes_on(call.key):
            self._put_off(action)
            if self._shop.leftovers.when_over((self.run_id, call.key), self._wake):
                log.info("step_waits", run_id=str(self.run_id), step=call.key, attempt=action.attempt)
            return
        try:
            args, kwargs = call.info.fresh_arguments(call.input)
            transactional = call.effect is not None and call.effect is Effect.TRANSACTIONAL
            lent = self._transactions.lend(call) if transactional else None
        except Exception as error:
            outcome = unbegun(call, error_outcome(error, started_at))
            self._host.call_soon(self._ended, call.key, None, outcome)
            return
        info = self.info(call, action.attempt, action.written_at, lent)
        assert call.context is not None
        body = self.running[call.key] = Body(action, started_at, call.context.copy(), lent=lent)
        if call.policy is not None and call.retry is not None:
            body.arguments = args, kwargs
        if call.info.is_async:
            body.is_async = True
            body.deadline = None if left is None else self._host.time() + left
            body.task = self._host.create_task(self._run_async(body, args, kwargs, info), context=body.context)
        else:
            self._run_thread(body, args, kwargs, info, left)

    def info(self, call: CallStep, attempt: int, written_at: int | None, lent: Lent | None = None) -> StepInfo:
        """What its body or its reconciler may know of a step."""
        side = None
        if written_at is not None or lent is not None:
            connect = None if lent is None else lent.connect
            side = self._observations.side(call.key, attempt, written_at, connect)
        return StepInfo(
            self.run_id,
            call.key,
            attempt,
            call.idempotency_key,
            lambda: call.info.decode_input(call.input.text),
            self._shop.resources,
            self._shop.client,
            side,
            self._observations.side,  # and not a method of its own: a context may outlive the run
        )

    def _run_thread(
        self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any], info: StepInfo, left: float | None
    ) -> None:
        began: Callable[[], object] | None = None
        if left is not None:
            if isinstance(body.call.timeout, dt.datetime):
                self._ring(body, left)
            else:  # the wait for a thread does not count
                began = functools.partial(self._host.call_soon_threadsafe, functools.partial(self._ring, body, left))
        # Not `run_in_executor`: its future can be cancelled while the thread goes on, and then nobody knows of it.
        work = body.task = body.thread = self._shop.threads.submit(
            body.context.run, _run_sync, body, args, kwargs, info, self._shop, began
        )
        self._shop.threads_alive[id(body)] = body
        work.add_done_callback(lambda done: self._thread_done(body, done))

    async def _run_async(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any], info: StepInfo) -> None:
        if body.call.has_intent and not self._shop.valid():
            self._host.call_soon(self._unbegun, body)
            return
        body.begun = True
        CURRENT_STEP.set(info)
        bind_body(info.key, info.attempt)
        await self._await_outcome(body, body.call.function, args, kwargs)

    # ------------------------------------------------------------------ what it comes to

    async def _await_outcome(
        self, body: Body, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call, started_at = body.call, body.started_at
        if body.lent is not None:
            function, args, kwargs = body.lent.run, (function, args, kwargs), {}
        try:
            if body.deadline is None:
                value = await function(*args, **kwargs)
            else:
                value = await until(body.deadline, function, args, kwargs)
            if call.policy is None and call.compensates is None:
                came_to: BodyOutcome | Tried = result_outcome(call.info, value, started_at, self._shop.settings)
            else:
                came_to = after_result(call, value, started_at, self._shop.settings)
        except TimeIsUp:
            outcome = timed_out(call, body.attempt, started_at)
            came_to = after_error(call, outcome.value, outcome)
        except asyncio.CancelledError as error:
            if body.stopping and self.running.get(call.key) is body:
                self._host.call_soon(self._stopped, call.key)
                return
            came_to = after_error(call, error, error_outcome(error, started_at))
        except BaseException as error:
            came_to = after_error(call, error, error_outcome(error, started_at))
        if isinstance(came_to, Tried):
            try:
                await self._judge(body, came_to)
            finally:
                del came_to  # its error holds this frame
        elif MAY_NEST:
            self._ended(call.key, body, came_to)
        else:
            self._host.call_soon(self._ended, call.key, body, came_to)

    async def _judge(self, body: Body, tried: Tried) -> None:
        """Ask `retry=` what to make of a try; in a task of the body's context, as the strategies may be coroutines."""
        if body.given_up:
            return
        try:
            outcome, wait = await judge(body.start, tried, self._shop.clock.now(), body.arguments)
        except asyncio.CancelledError as error:
            if body.stopping and body.timed_out and id(body) in self._shop.threads_alive:
                body.is_async = False  # what cannot be stopped is waited for
                return
            if body.stopping and self.running.get(body.call.key) is body:
                self._host.call_soon(self._stopped, body.call.key)
                return
            outcome, wait = error_outcome(error, body.started_at), None
            outcome.call_state = tried.outcome.call_state
        self._host.call_soon(
            self._ended, body.call.key, body, outcome, wait
        )  # the driver is told from outside of any task

    def _ended(self, key: str, body: Body | None, outcome: BodyOutcome, wait: float | None = None) -> None:
        """A try has an outcome: final, or (`wait` seconds) to be followed by another. `body` None: it never began."""
        lingers = False
        if body is not None:
            if self.running.get(key) is not body:
                return
            del self.running[key]
            if body.timed_out and id(body) in self._shop.threads_alive:
                body.given_up = True
                self._left_over(body)
            if body.lent is not None:
                self._keep_or_discard(body, body.lent, outcome if wait is None else None)
            if wait is not None and self.goes_on(key):
                lingers = True
                self._shop.leftovers.when_over(
                    (self.run_id, key), functools.partial(self._tell, Driver.thread_ended, key)
                )
        in_doubt = wait is None and outcome.call_state is IntentState.UNKNOWN
        if in_doubt and body is not None and body.call.effect is Effect.IRREVERSIBLE and self.goes_on(key):
            # What it left in a thread may still make the call: nobody is asked before that is over.
            tell_ended = functools.partial(self._tell, Driver.body_ended, key, outcome)
            self._shop.leftovers.when_over((self.run_id, key), tell_ended)
            return
        if wait is None:
            self._tell(Driver.body_ended, key, outcome)
        else:
            log.info(
                "step_attempt_failed",
                run_id=str(self.run_id),
                step=key,
                attempt=body.attempt if body is not None else 0,
                error=outcome.value,
                wait_seconds=round(wait, 3),
                thread_lives=lingers,
            )
            self._tell(functools.partial(Driver.body_failed, lingering=lingers), key, outcome, wait)

    def _keep_or_discard(self, body: Body, lent: Lent, outcome: BodyOutcome | None) -> None:
        """What a transactional body wrote waits for the step's entry, or is rolled back."""
        if outcome is not None and outcome.error is None and lent.used:
            outcome.in_transaction = True
            self._transactions.keep(body.call.key, lent)
        else:
            lent.discard()

    async def _run_rest(self, body: Body, coroutine: Coroutine[Any, Any, Any]) -> None:
        """What a plain function has returned to be awaited."""

        async def rest() -> Any:
            return await coroutine

        await self._await_outcome(body, rest, (), {})

    # ------------------------------------------------------------------ threads

    def _ring(self, body: Body, seconds: float) -> None:
        """From now on so long."""
        body.deadline = self._host.time() + seconds
        if self.running.get(body.call.key) is body and not body.is_async:
            body.timer = self._host.call_later(seconds, self._thread_timed_out, body)

    def _thread_timed_out(self, body: Body) -> None:
        """The thread runs on, and nobody waits for it but the next try."""
        work = body.task
        if self.running.get(body.call.key) is not body or body.is_async or work is None or work.done():
            return
        if body.call.effect is Effect.IRREVERSIBLE and not work.cancel():
            # Nobody is to be asked about a call that is still on its way; what the thread comes to is the best answer.
            log.warning("step_late", run_id=str(self.run_id), step=body.call.key, attempt=body.attempt)
            return
        body.timed_out = True
        outcome = timed_out(body.call, body.attempt, body.started_at)
        if work.cancelled() or work.cancel():
            self._ended(body.call.key, body, unbegun(body.call, outcome))
            return
        self._leave_behind(body)
        came_to = after_error(body.call, outcome.value, outcome)
        if isinstance(came_to, BodyOutcome):
            self._ended(body.call.key, body, came_to)
        else:
            self._go_on_here(body, self._judge(body, came_to))

    def _go_on_here(self, body: Body, coroutine: Coroutine[Any, Any, None]) -> None:
        """What is left of a thread's body is a task of the host's loop. Its thread may still be in its context: a copy."""
        body.is_async = True
        body.task = self._host.create_task(coroutine, context=body.context.copy())

    def _thread_done(self, body: Body, done: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has outlived the worker and its loop
            self._host.call_soon_threadsafe(self._thread_ended, body, done)

    def _thread_ended(self, body: Body, done: Future[Any]) -> None:
        self._shop.threads_alive.pop(id(body), None)
        if body.timer is not None:
            body.timer.cancel()
        key = body.call.key
        current = self.running.get(key) is body
        if body.left_behind:
            self._shop.threads.take_back()
        self._shop.leftovers.remove((self.run_id, key), body)
        if done.cancelled():  # it had not begun
            if current and not body.timed_out:
                self._stopped(key)
            return
        error = done.exception()
        result = error_outcome(error, body.started_at) if error is not None else done.result()
        if body.timed_out or body.stopping or not current:  # what it leaves is not wanted any more
            if isinstance(result, Coroutine):
                result.close()
            if body.stopping and current and not body.is_async:
                self._stopped(key)
        elif result is None:
            self._unbegun(body)
        elif isinstance(result, BodyOutcome):
            self._ended(key, body, result)
        elif isinstance(result, Tried):
            self._go_on_here(body, self._judge(body, result))
        else:
            # A plain function around an async one, as many decorators leave it: the rest is awaited here.
            self._go_on_here(body, self._run_rest(body, result))

    # ------------------------------------------------------------------ it is stopped, or given up

    def stop(self, *, effects: bool = True) -> None:
        """Cancel the async bodies: the grace is over. They will run again elsewhere.

        Args:
            effects: those of steps with an effect too: their intents stay open, and others ask what became of the calls.
        """
        for body in list(self.running.values()):
            effect = body.call.has_intent
            if (effect and not effects) or ((effect or body.is_async) and self.withdraw(body)):
                continue
            if body.is_async and not body.stopping:
                body.stopping = True
                body.cancel()

    def _stopped(self, key: str) -> None:
        body = self.running.get(key)
        if body is not None and self.goes_on(key):  # work that it began in a thread: waited for as a thread is
            body.is_async = False
            self._shop.leftovers.when_over((self.run_id, key), functools.partial(self._stopped, key))
            return
        if body is not None and body.lent is not None:
            body.lent.discard()
        self.running.pop(key, None)
        self._tell(Driver.body_stopped, key)

    def _unbegun(self, body: Body) -> None:
        """The lease was not ours beyond doubt any more when it was to begin."""
        if self.running.get(body.call.key) is body:
            del self.running[body.call.key]
            self._put_off(body.start)

    def withdraw(self, body: Body) -> bool:
        """Take back the start of a body, if it has not begun."""
        if body.begun or (body.thread is not None and not body.thread.cancel()):
            return False
        body.cancel()
        del self.running[body.call.key]
        if body.timer is not None:
            body.timer.cancel()
        self._host.call_soon(self.not_begun, body.call)
        return True

    def not_begun(self, call: CallStep) -> None:
        """A body never began, and will not begin here."""
        self._tell(Driver.body_unbegun if call.effect is not None else Driver.body_stopped, call.key)

    def give_up(self, key: str) -> None:
        """The code waits for it no longer, or the run leaves."""
        body = self.running.pop(key, None)
        if body is not None:
            body.given_up = True
            if body.timer is not None:
                body.timer.cancel()
            if body.lent is not None:
                body.lent.discard()
            body.cancel()
            self._left_over(body)

    def leave(self) -> None:
        """Give all of them up, and tell nobody: the run has left memory."""
        for key in list(self.running):
            self.give_up(key)
        self._tell = self._put_off = self._wake = (
            _nobody  # nothing holds the run that has left: no work for the collector
        )

    def goes_on(self, key: str) -> bool:
        """Whether something of a try that is waited for no longer still acts in this process."""
        return (self.run_id, key) in self._shop.leftovers

    def _left_over(self, body: Body) -> None:
        """It is waited for no longer, and may go on: a thread, a coroutine in its `finally`."""
        leftovers, step, task = self._shop.leftovers, (self.run_id, body.call.key), body.task
        if id(body) in self._shop.threads_alive:
            leftovers.add(step, body)  # until `_thread_ended`
            if body.thread is not None and body.thread.running():
                self._leave_behind(body)
        elif isinstance(task, asyncio.Task) and not task.done():
            leftovers.add(step, body)
            task.add_done_callback(lambda _: leftovers.remove(step, body))

    def _leave_behind(self, body: Body) -> None:
        if not body.left_behind:
            body.left_behind = True
            self._shop.threads.leave_behind()


def _run_sync(
    body: Body,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    info: StepInfo,
    shop: Shop,
    began: Callable[[], object] | None,
) -> BodyOutcome | Tried | Coroutine[Any, Any, Any] | None:
    """A sync body, in a thread; also encodes its outcome there. `Tried`: `retry=` is to be asked; a coroutine that the
    body returned is for the loop to await; None: it did not begin."""
    call = body.call
    if call.has_intent and not shop.valid():
        return None
    if began is not None:
        began()
    body.begun = True
    CURRENT_STEP.set(info)
    bind_body(info.key, info.attempt)
    try:
        if body.lent is None:
            value = call.function(*args, **kwargs)
        else:
            value = body.lent.run_in_thread(call.function, args, kwargs)
        if isinstance(value, Coroutine):
            return value
    except BaseException as error:
        return after_error(call, error, error_outcome(error, body.started_at))
    return after_result(call, value, body.started_at, shop.settings)

"""Obeys one driver: runs the bodies it asks for, hands its units to the writer, wakes it in time.

Nothing is decided here. Each event (a body's end, a verdict, a timer) is told to the driver from a plain callback of the
event loop, and `_pump` carries out what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from uuid import UUID

from replaykit.events import log
from replaykit.limits import SLICE_SECONDS, Settings
from replaykit.replay.calls import CURRENT_STEP, StepInfo, Workflow
from replaykit.replay.codec import misfit
from replaykit.replay.driver import (
    BodyOutcome,
    CancelBody,
    Driver,
    Phase,
    StartBody,
    error_outcome,
    result_outcome,
)
from replaykit.replay.entries import ClaimedRun, Entry, Finish, Unit, Verdict
from replaykit.replay.execution import Execution
from replaykit.replay.requests import CallStep
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.logged import bind_body, run_context
from replaykit.runtime.writer import MAY_NEST, Answer

__all__ = ["Body", "Executor", "Shop"]


_SLICE_ENTRIES: Final = 256  # entries between two looks at the clock
_HOLD_AGAIN_SECONDS: Final = 5.0
_INLINE_ENTRIES_MAX: Final = 200  # a shorter journal is replayed at once, a longer one by a task of its own


class Journals(Protocol):
    """What an executor asks of the database by itself."""

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        """The next entries of a long journal; empty at its end, None if the lease is another's."""

    async def renew_token(self, run: ClaimedRun) -> ClaimedRun | None:
        """A new token for the run, by a statement of its own, and its `wakes`; None: the lease is another's."""

    async def hold(self, run: ClaimedRun, reason: str) -> None:
        """Hold the run at once."""


@dataclass(slots=True)
class Body:
    """A body that is running (or a thread's that was given up and has not ended)."""

    call: CallStep
    attempt: int
    started_at: int
    task: asyncio.Task[None] | Future[Any]
    is_async: bool
    context: contextvars.Context
    stopping: bool = False  # cancelled by this worker's drain: it will run again
    given_up: bool = False  # cancelled by the code: its outcome no longer counts


@dataclass(slots=True)
class Shop:
    """What all executors of a worker share."""

    settings: Settings
    clock: DatabaseClock
    put: Callable[[Unit, Answer], None]
    journals: Journals
    threads: ThreadPoolExecutor
    new_id: Callable[[], UUID]
    valid: Callable[[], bool]  # whether the lease is ours beyond doubt: no body begins otherwise
    congested: Callable[[], bool]  # whether too much waits to be written: no body begins meanwhile
    left: Callable[[Executor, Phase], None]
    resources: Any = None
    client: Any = None
    ended_runs: int = 0
    threads_alive: dict[int, Body] = field(default_factory=dict)


class Executor:
    """One claimed run in memory.

    Args:
        shop: what it shares with its neighbours.
        run: as claimed.
        workflow: whose function it is.
    """

    def __init__(self, shop: Shop, run: ClaimedRun, workflow: Workflow[..., Any]) -> None:
        self.shop = shop
        self.run = run
        self.workflow = workflow
        self.bodies: dict[str, Body] = {}
        self.driver: Driver | None = None
        self._host = asyncio.get_running_loop()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at: int | None = None
        self._loading: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None  # with the bodies of a held run
        self.postponed: list[StartBody] = []
        self._draining = False
        self._left = False

    # ------------------------------------------------------------------ the life of a run here

    def begin(self) -> None:
        """Replay the journal and go on. Called from a plain callback of the event loop, as all that follows."""
        run = self.run
        if run.last_seq is None or len(run.entries) < run.last_seq or run.last_seq > _INLINE_ENTRIES_MAX:
            self._loading = self._host.create_task(self._load(run, None))
            return
        try:
            driver = self._new_driver(run)
            if driver is None:
                return
            driver.replay(run.entries)
        except Exception as error:
            log.exception("journal_not_replayed", run_id=str(run.id))
            self._stop_at(f"its journal could not be replayed: {error!r}")
            return
        run.entries = []
        self._ready(driver)

    def drain(self) -> None:
        """Start nothing new; the run is handed back when its bodies have ended."""
        self._draining = True
        postponed, self.postponed = self.postponed, []
        if self.driver is not None and self._loading is None:
            self._tell(self.driver.drain)
            for action in postponed:  # else the run would wait for bodies that never began
                self._tell(self.driver.body_stopped, action.call.key)

    def stop_bodies(self) -> None:
        """Cancel the async bodies: the grace is over. They will run again elsewhere."""
        for body in self.bodies.values():
            if body.is_async and not body.stopping:
                body.stopping = True
                body.task.cancel()

    def tick(self) -> None:
        """Look again: time went on, the lease is valid again, or the backlog is gone."""
        if self.driver is not None and self._loading is None:
            self._tell(self.driver.tick)

    def drop(self) -> None:
        """The lease is gone: forget the run, cancel its bodies, write nothing."""
        if not self._left:
            self._leave(Phase.LOST)

    # ------------------------------------------------------------------ replay

    def _new_driver(self, run: ClaimedRun) -> Driver | None:
        info = self.workflow.info
        try:
            args, kwargs = info.decode_arguments(run.input, {})
        except Exception as error:
            self._stop_at(f"the recorded input does not fit {self.workflow.name} ({info.line}): {misfit(error)}")
            return None
        execution = Execution(
            self.workflow.fn,
            args,
            kwargs,
            info=info,
            run_id=run.id,
            seed=run.seed,
            started_at=run.started_at,
            drain_callbacks_max=self.shop.settings.drain_callbacks_max,
            payload_bytes_max=self.shop.settings.payload_bytes_max,
            on_outside=self._held_from_outside,
            context=run_context(run.id, self.workflow.name),
        )
        return Driver(run, execution, new_id=self.shop.new_id, settings=self.shop.settings)

    def _held_from_outside(self) -> None:
        """In a foreign thread."""
        self._host.call_soon_threadsafe(self.tick)

    async def _load(self, run: ClaimedRun, old: Driver | None) -> None:
        """Replay a long journal, page by page and in slices, so that the worker's loop stays alive."""
        driver: Driver | None = None
        try:
            driver = self._new_driver(run)
            if driver is None:
                return
            entries, run.entries = run.entries, []
            read = 0
            while True:
                await self._replay_slices(driver, entries)
                read += len(entries)
                if run.last_seq is not None and read >= run.last_seq:
                    break
                page = await self.shop.journals.page(run, read)
                if page is None:
                    driver.execution.leave()
                    self._host.call_soon(self.drop)
                    return
                if not page:
                    break
                entries = page
        except asyncio.CancelledError:
            if driver is not None:
                driver.execution.leave()
            raise
        except Exception as error:
            log.warning("journal_read_failed", run_id=str(run.id), error=error)
            if driver is not None:
                driver.execution.leave()
            self._host.call_soon(self.drop)
            return
        self._host.call_soon(self._loaded, driver, old)

    def _loaded(self, driver: Driver, old: Driver | None) -> None:
        self._loading = None
        if self._left:
            driver.execution.leave()
            return
        if old is not None:
            driver.adopt(old)
            old.execution.leave()
        self._ready(driver)

    async def _replay_slices(self, driver: Driver, entries: list[Entry]) -> None:
        started = time.perf_counter()
        for start in range(0, len(entries), _SLICE_ENTRIES):
            # From a plain callback: a run's tasks may not be entered from inside one of the host's (3.14 refuses).
            done = self._host.create_future()
            self._host.call_soon(self._replay_slice, driver, entries[start : start + _SLICE_ENTRIES], done)
            await done
            if time.perf_counter() - started > SLICE_SECONDS:
                await asyncio.sleep(0)
                started = time.perf_counter()

    def _replay_slice(self, driver: Driver, entries: list[Entry], done: asyncio.Future[None]) -> None:
        try:
            driver.replay(entries)
        except BaseException as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    def _ready(self, driver: Driver) -> None:
        self.driver = driver
        self._tell(functools.partial(driver.begin, draining=self._draining))

    # ------------------------------------------------------------------ obeying

    def _tell(self, event: Callable[..., None], *what: Any) -> None:
        """Tell the driver of an event, at the time it is now, and carry out what it answers."""
        if self._left or self._holding is not None:
            return
        now = self.shop.clock.now()
        try:
            event(*what, now)
            self._pump(now)
        except Exception as error:  # a defect of ours: this run stops where a person sees it, the others go on
            log.exception("run_broken", run_id=str(self.run.id))
            self._stop_at(f"a defect of replaykit stopped the run, please report it: {error!r}")

    def _pump(self, now: int) -> None:
        driver = self.driver
        assert driver is not None
        if self.postponed and self.shop.valid() and not self.shop.congested():
            self._begin_postponed(driver, now)
        for step in driver.take_actions():
            if type(step) is StartBody:
                self._start_body(step, now)
            elif type(step) is CancelBody:
                self._give_up(step.key)
        unit = driver.next_unit()
        if unit is not None:
            self.shop.put(unit, self._verdict)
        if driver.execution.loop.problems:
            self._report(driver)
        if driver.execution.hold_reason is not None and self.bodies and self._patience is None:
            self._patience = self._host.call_later(self.shop.settings.grace_seconds, self.stop_bodies)
        if driver.phase is not Phase.ACTIVE:
            self._changed_hands(driver)
            return
        wake_at = driver.next_wake
        if wake_at != self._wake_at:
            self._arm(wake_at, now)

    def _report(self, driver: Driver) -> None:
        """Errors that reach nobody in the workflow, as a plain event loop logs them."""
        problems = driver.execution.loop.problems
        for problem in problems:
            error = problem.get("exception")
            message = problem.get("message") if error is None else None  # asyncio's may quote a callback's arguments
            log.error("workflow_callback_failed", run_id=str(self.run.id), message=message, exc_info=error)
        problems.clear()

    def _begin_postponed(self, driver: Driver, now: int) -> None:
        """Bodies whose start was put off: those still wanted begin once they may."""
        postponed, self.postponed = self.postponed, []
        for action in postponed:
            if driver.may_begin(action.call.key):
                self._start_body(action, now)

    def _arm(self, wake_at: int | None, now: int) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        self._wake_at = wake_at
        if wake_at is not None:
            delay = max(0.0, (wake_at - now) / 1_000_000)
            self._wake = self._host.call_later(delay, self._woken)

    def _woken(self) -> None:
        self._wake = None
        self._wake_at = None
        self.tick()

    def _verdict(self, verdict: Verdict, words: str | None) -> None:
        """Called by the writer, from a plain callback."""
        if self.driver is not None:
            self._tell(self.driver.verdict, verdict, words)

    def _changed_hands(self, driver: Driver) -> None:
        if driver.phase is Phase.STALE:
            if self._loading is None:
                self._loading = self._host.create_task(self._rebuild(driver))
        elif driver.phase is Phase.BROKEN:
            self._stop_at(driver.words or "the journal refused an entry")
        else:
            self._leave(driver.phase)

    async def _rebuild(self, old: Driver) -> None:
        """The journal moved on without us: a new token (fences what is still in flight), then read it again."""
        try:
            fresh = await self.shop.journals.renew_token(self.run)
        except Exception as error:
            log.exception("token_not_renewed", run_id=str(self.run.id))
            self._stop_at(f"its journal could not be read again: {error!r}")
            return
        if fresh is None:
            self._loading = None
            self._host.call_soon(self.drop)
            return
        self.run = fresh
        await self._load(fresh, old)

    def _stop_at(self, reason: str) -> None:
        """Hold the run by a statement of its own: the driver can't, or there is none."""
        if self._holding is None and not self._left:
            self._holding = self._host.create_task(self._hold(self.run, reason))

    async def _hold(self, run: ClaimedRun, reason: str) -> None:
        while True:
            try:
                await self.shop.journals.hold(run, reason)
                break
            except Exception:  # a run that nobody drives must not look as if somebody did: ask until it is said
                log.exception("run_not_held", run_id=str(run.id))
                await asyncio.sleep(_HOLD_AGAIN_SECONDS)
        self._host.call_soon(self.drop)

    def _leave(self, phase: Phase) -> None:
        """Out of memory: bodies nobody waits for are stopped, the execution is closed."""
        self._left = True
        self._arm(None, 0)
        if self._patience is not None:
            self._patience.cancel()
        if self._holding is not None:
            self._holding.cancel()
        if self._loading is not None:
            self._loading.cancel()
        for key in list(self.bodies):
            self._give_up(key)
        if self.driver is not None:
            self.driver.execution.leave()
            if isinstance(self.driver.change, Finish):
                self.shop.ended_runs += 1
        self.shop.left(self, phase)
        self.driver = None

    # ------------------------------------------------------------------ bodies

    def _start_body(self, action: StartBody, started_at: int) -> None:
        if not self.shop.valid() or self.shop.congested():
            self.postponed.append(action)
            return
        call = action.call
        try:
            args, kwargs = call.info.fresh_arguments(call.input)
        except Exception as error:
            outcome = error_outcome(error, started_at)
            self._host.call_soon(self._ended, call.key, None, outcome)
            return
        info = StepInfo(
            self.run.id,
            call.key,
            action.attempt,
            call.idempotency_key,
            lambda: call.info.decode_input(call.input.text),
            self.shop.resources,
            self.shop.client,
        )
        assert call.context is not None
        context = call.context.copy()
        if call.info.is_async:
            task = self._host.create_task(self._run_async(call, args, kwargs, info, started_at), context=context)
            self.bodies[call.key] = Body(call, action.attempt, started_at, task, True, context)
            return
        # Not `run_in_executor`: its future can be cancelled while the thread goes on, and then nobody knows of it.
        work = self.shop.threads.submit(
            context.run, _run_sync, call, args, kwargs, info, started_at, self.shop.settings
        )
        body = self.bodies[call.key] = Body(call, action.attempt, started_at, work, False, context)
        self.shop.threads_alive[id(body)] = body
        work.add_done_callback(lambda done: self._thread_done(call.key, body, done))

    async def _run_async(
        self, call: CallStep, args: tuple[Any, ...], kwargs: dict[str, Any], info: StepInfo, started_at: int
    ) -> None:
        CURRENT_STEP.set(info)
        bind_body(info.key, info.attempt)
        await self._await_outcome(call, call.function, args, kwargs, started_at)

    async def _await_outcome(
        self,
        call: CallStep,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        started_at: int,
    ) -> None:
        try:
            value = await function(*args, **kwargs)
            outcome = result_outcome(call.info, value, started_at, self.shop.settings)
        except asyncio.CancelledError as error:
            running = self.bodies.get(call.key)
            if running is not None and running.stopping:
                self._host.call_soon(self._stopped, call.key)
                return
            outcome = error_outcome(error, started_at)
        except BaseException as error:
            outcome = error_outcome(error, started_at)
        if MAY_NEST:
            self._ended(call.key, asyncio.current_task(), outcome)
        else:
            self._host.call_soon(self._ended, call.key, asyncio.current_task(), outcome)

    def _thread_done(self, key: str, body: Body, done: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has outlived the worker and its loop
            self._host.call_soon_threadsafe(self._thread_ended, key, body, done)

    def _thread_ended(self, key: str, body: Body, done: Future[Any]) -> None:
        self.shop.threads_alive.pop(id(body), None)
        if done.cancelled():  # it had not begun
            if self.bodies.get(key) is body:
                self._stopped(key)
            return
        error = done.exception()
        result = error_outcome(error, body.started_at) if error is not None else done.result()
        if isinstance(result, BodyOutcome):
            self._ended(key, body.task, result)
        elif self.bodies.get(key) is not body or body.stopping:
            result.close()  # given up meanwhile
            if body.stopping:
                self._stopped(key)
        else:
            # A plain function around an async one, as many decorators leave it: the rest is awaited here.
            body.is_async = True
            body.task = self._host.create_task(self._run_rest(body, result), context=body.context)

    async def _run_rest(self, body: Body, coroutine: Coroutine[Any, Any, Any]) -> None:
        async def rest() -> Any:
            return await coroutine

        await self._await_outcome(body.call, rest, (), {}, body.started_at)

    def _ended(self, key: str, task: Any, outcome: BodyOutcome) -> None:
        body = self.bodies.get(key)
        if body is not None:
            if task is not None and body.task is not task:
                return
            del self.bodies[key]
            if body.given_up:
                return
        if self.driver is not None:
            self._tell(self.driver.body_ended, key, outcome)

    def _stopped(self, key: str) -> None:
        self.bodies.pop(key, None)
        if self.driver is not None:
            self._tell(self.driver.body_stopped, key)

    def _give_up(self, key: str) -> None:
        self.postponed = [p for p in self.postponed if p.call.key != key]
        body = self.bodies.pop(key, None)
        if body is not None:
            body.given_up = True
            body.task.cancel()


def _run_sync(
    call: CallStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    info: StepInfo,
    started_at: int,
    settings: Settings,
) -> BodyOutcome | Coroutine[Any, Any, Any]:
    """A sync body, in a thread; also encodes its outcome there. A coroutine that it returned is for the loop to await."""
    CURRENT_STEP.set(info)
    bind_body(info.key, info.attempt)
    try:
        value = call.function(*args, **kwargs)
    except BaseException as error:
        return error_outcome(error, started_at)
    if isinstance(value, Coroutine):
        return value
    return result_outcome(call.info, value, started_at, settings)

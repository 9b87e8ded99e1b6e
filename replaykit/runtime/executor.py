"""Obeys one driver: runs the bodies it asks for, hands its units to the writer, wakes it in time.

Nothing is decided here. Each event (a body's end, a verdict, a timer) is told to the driver from a plain callback of the
event loop, and `_pump` carries out what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from uuid import UUID

from replaykit.events import brief, log
from replaykit.limits import SLICE_SECONDS, Settings
from replaykit.replay.actions import CancelBody, Reconcile, StartBody, Withdraw
from replaykit.replay.calls import CURRENT_STEP, StepInfo, Workflow
from replaykit.replay.doubts import Answer as Said
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import ClaimedRun, Effect, Entry, Finish, IntentState, Mail, Unit, Verdict
from replaykit.replay.execution import Execution
from replaykit.replay.letters import Letters
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome
from replaykit.replay.requests import CallStep
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.leftovers import Leftovers
from replaykit.runtime.logged import bind_body, run_context
from replaykit.runtime.named import why_unfit
from replaykit.runtime.observing import Observations
from replaykit.runtime.reconciling import Reconcilers
from replaykit.runtime.retries import Tried, after_error, after_result, judge, unbegun
from replaykit.runtime.threads import BodyThreads
from replaykit.runtime.timeouts import TimeIsUp, seconds_left, timed_out, within
from replaykit.runtime.transactions import Lent, Within
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
        """A new token for the run, by a statement of its own, and what stands under it; None: the lease is another's."""

    async def hold(self, run: ClaimedRun, reason: str) -> None:
        """Hold the run at once; pending instead if others have written to it since its `wakes` was read."""

    async def cancel(self, run: ClaimedRun) -> None:
        """End the run as cancelled at once."""


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


@dataclass(slots=True)
class Shop:
    """What all executors of a worker share."""

    settings: Settings
    clock: DatabaseClock
    put: Callable[[Unit, Answer], None]
    journals: Journals
    threads: BodyThreads
    new_id: Callable[[], UUID]
    valid: Callable[[], bool]  # whether the lease is ours beyond doubt: no body begins otherwise
    congested: Callable[[], bool]  # whether too much waits to be written: no body begins meanwhile
    left: Callable[[Executor, Phase], None]
    lend: Callable[[CallStep], Lent]  # to the body of a transactional step
    attentive: Callable[
        [Unit, Answer], Answer
    ]  # of what does not go through `put`: an answer that the worker hears, too
    resources: Any = None
    client: Any = None
    ended_runs: int = 0
    threads_alive: dict[int, Body] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)


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
        self.postponed: list[StartBody | Reconcile] = []
        self._observations = Observations(run.id, self._host, shop.clock.now, self.tick, self._observed)
        self._reconcilers = Reconcilers(run.id, shop.settings, self._reconciled, self._reconcile_stopped)
        self._within = Within(run.id, shop.lend)
        self._said: list[tuple[str, int, Said]] = []  # by reconcilers while the journal was read again
        self._mail: tuple[int, list[Mail]] | None = None  # came while the journal was read
        self._draining = False
        self._left = False

    # ------------------------------------------------------------------ the life of a run here

    def begin(self) -> None:
        """Replay the journal and go on. Called from a plain callback of the event loop, as all that follows."""
        run = self.run
        if run.last_seq is None or len(run.entries) < run.last_seq or run.last_seq > _INLINE_ENTRIES_MAX:
            self._loading = self._host.create_task(self._load(run, None))
            return
        driver: Driver | None = None
        try:
            driver = self._new_driver(run)
            if driver is None:
                return
            driver.replay(run.entries)
        except Exception as error:
            self._give_up_replay(driver, error)
            return
        run.entries = []
        self._ready(driver)

    def drain(self) -> None:
        """Start nothing new; the run is handed back when its bodies have ended."""
        self._draining = True
        if self.driver is not None and self._loading is None:
            postponed, self.postponed = self.postponed, []
            self._tell(self.driver.drain)
            for action in postponed:
                self._put_off(action)

    def stop_bodies(self, *, effects: bool = True) -> None:
        """Cancel the async bodies: the grace is over. They will run again elsewhere.

        Args:
            effects: those of steps with an effect too: their intents stay open, and others ask what became of the calls.
        """
        for body in list(self.bodies.values()):
            effect = body.call.has_intent
            if (effect and not effects) or ((effect or body.is_async) and self._withdrawn(body)):
                continue
            if body.is_async and not body.stopping:
                body.stopping = True
                body.cancel()

    def stop_reconcilers(self) -> None:
        """Cancel them: the grace is over. Whoever claims the run next asks again."""
        self._reconcilers.stop()

    @property
    def acts(self) -> bool:
        """Whether the body of a step with an effect runs: cut off it would leave its call in doubt."""
        return any(body.call.has_intent for body in self.bodies.values())

    def tick(self) -> None:
        """Look again: time went on, the lease is valid again, or the backlog is gone."""
        if self.driver is not None and self._loading is None:
            self._tell(self.driver.tick)

    def mail(self, wakes: int, letters: list[Mail]) -> None:
        """Others have written to the run: all of its mailbox, as of these `wakes`."""
        run = self.run
        if self._left or wakes <= run.wakes:
            return
        run.mail = letters
        if self.driver is not None and self._loading is None:
            self._tell(self.driver.mail, wakes, letters)
        else:
            self._mail = wakes, letters

    def drop(self) -> None:
        """The lease is gone: forget the run, cancel its bodies, write nothing."""
        if not self._left:
            self._leave(Phase.LOST)

    # ------------------------------------------------------------------ replay

    def _new_driver(self, run: ClaimedRun, *, again: bool = False) -> Driver | None:
        info = self.workflow.info
        try:
            args, kwargs = info.decode_arguments(run.input, {})
        except Exception as error:
            why = why_unfit(self.workflow, run.id, run.input, error)
            self._stop_at(f"the recorded input does not fit {self.workflow.name} ({info.line}): {why}")
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
        return Driver(run, execution, new_id=self.shop.new_id, settings=self.shop.settings, again=again)

    def _held_from_outside(self) -> None:
        """In a foreign thread."""
        self._host.call_soon_threadsafe(self.tick)

    async def _load(self, run: ClaimedRun, old: Driver | None) -> None:
        """Replay a long journal, page by page and in slices, so that the worker's loop stays alive."""
        driver: Driver | None = None
        try:
            driver = self._new_driver(run, again=old is not None)
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
            self._loading = None
            self._host.call_soon(self._give_up_replay, driver, error)
            return
        self._host.call_soon(self._loaded, driver, old)

    def _give_up_replay(self, driver: Driver | None, error: Exception) -> None:
        """A run whose journal can't be read or replayed stops where a person sees it: nobody else may claim it meanwhile."""
        log.error("journal_not_replayed", run_id=str(self.run.id), exc_info=error)
        if driver is not None:
            driver.execution.leave()
        self._stop_at(f"its journal could not be replayed: {brief(error)}")

    def _loaded(self, driver: Driver, old: Driver | None) -> None:
        self._loading = None
        if self._left:
            driver.execution.leave()
            return
        if old is not None:
            self._within.forget_all()
            driver.adopt(old)
            old.execution.leave()
        self._ready(driver)

    async def _replay_slices(self, driver: Driver, entries: list[Entry]) -> None:
        started = time.perf_counter()
        for start in range(
            0, len(entries) or 1, _SLICE_ENTRIES
        ):  # of an empty journal too: its code asks for its first calls
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
        mail, self._mail = self._mail, None
        if mail is not None and mail[0] > self.run.wakes:
            self.mail(*mail)
        said, self._said = self._said, []
        for one in said:
            self._reconciled(*one)

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
            self._stop_at(f"a defect of replaykit stopped the run, please report it: {brief(error)}")

    def _pump(self, now: int) -> None:
        driver = self.driver
        assert driver is not None
        if self._observations.untold:
            for seen in self._observations.take():
                driver.observe(seen, now)
        if self.postponed and self.shop.valid() and not self.shop.congested():
            self._begin_postponed(driver, now)
        for step in driver.take_actions():
            if type(step) is StartBody:
                self._start_body(step, now)
            elif type(step) is CancelBody:
                self._give_up(step.key)
            elif type(step) is Withdraw:
                self._withdraw(step.key)
            elif type(step) is Reconcile:
                self._reconcile(step)
        unit = driver.next_unit()
        if unit is not None:
            if unit.within is not None:
                self._within.write(unit, self.shop.attentive(unit, self._verdict))
            else:
                self.shop.put(unit, self._verdict)
        if driver.execution.loop.problems:
            self._report(driver)
        if driver.execution.hold_reason is not None and self.bodies and self._patience is None:
            self._patience = self._host.call_later(self.shop.settings.grace_seconds, self._lose_patience)
        if driver.phase is not Phase.ACTIVE:
            self._changed_hands(driver)
            return
        wake_at = driver.next_wake
        if wake_at != self._wake_at:
            self._arm(wake_at, now)

    def _lose_patience(self) -> None:
        """With the bodies of a held run; last with those whose calls would be in doubt."""
        settings = self.shop.settings
        self.stop_bodies(effects=False)
        self._patience = self._host.call_later(settings.effect_grace - settings.grace_seconds, self.stop_bodies)

    def _report(self, driver: Driver) -> None:
        """Errors that reach nobody in the workflow, as a plain event loop logs them."""
        problems = driver.execution.loop.problems
        for problem in problems:
            error = problem.get("exception")
            words = problem.get("message") if error is None else None  # asyncio's may quote a callback's arguments
            log.error("workflow_callback_failed", run_id=str(self.run.id), problem=words, exc_info=error)
        problems.clear()

    def _begin_postponed(self, driver: Driver, now: int) -> None:
        """Bodies whose start was put off: those still wanted begin once they may. Reconcilers too."""
        postponed, self.postponed = self.postponed, []
        for action in postponed:
            if self._draining:
                self._put_off(action)
            elif type(action) is Reconcile:
                self._reconcile(action)
            elif driver.may_begin(action.call.key):
                assert type(action) is StartBody
                self._start_body(action, now)

    def _put_off(self, action: StartBody | Reconcile) -> None:
        """It does not begin now; in a drain not at all, else the run would wait for it here."""
        key, driver = action.call.key, self.driver
        if (
            not self._draining or driver is None or self._goes_on(key)
        ):  # elsewhere it would begin beside what is left here
            self.postponed.append(action)
        elif type(action) is Reconcile:
            self._host.call_soon(self._reconcile_stopped, key)
        else:
            self._host.call_soon(self._not_begun, action.call)

    def _not_begun(self, call: CallStep) -> None:
        """A body never began, and will not begin here."""
        driver = self.driver
        if driver is not None:
            self._tell(driver.body_unbegun if call.effect is not None else driver.body_stopped, call.key)

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
        driver = self.driver
        if driver is None:
            return
        unit = driver.unit
        if verdict is Verdict.OK and unit is not None and (unit.closings or unit.observations):
            self._committed(unit)
        self._tell(driver.verdict, verdict, words)

    def _committed(self, unit: Unit) -> None:
        if unit.observations:
            self._observations.committed(unit.observations)
        for closing in unit.closings:
            if closing.state == IntentState.UNKNOWN and not closing.resolved:
                log.warning("step_in_doubt", run_id=str(self.run.id), step=closing.key, attempt=closing.attempt)

    def _changed_hands(self, driver: Driver) -> None:
        if driver.phase is Phase.STALE:
            self._within.forget_all()
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
            self._stop_at(f"its journal could not be read again: {brief(error)}")
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
                asked_to_end = self.driver.asked_to_end if self.driver is not None else Letters(self.run.mail).cancel
                if asked_to_end:  # its code cannot be told, so it ends as asked
                    await self.shop.journals.cancel(run)
                    log.warning("run_cancelled_untold", run_id=str(run.id))
                else:
                    await self.shop.journals.hold(run, reason)
                    log.error(
                        "run_held", run_id=str(run.id), why="its input or its journal: `replaykit show` has the reason"
                    )
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
        self._within.forget_all()
        self._reconcilers.leave()
        self._observations.close()
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
        left = None
        if call.policy is not None and call.timeout is not None:
            left = seconds_left(call.timeout, started_at)
        if left is not None and left <= 0 and isinstance(call.timeout, dt.datetime):
            outcome = unbegun(call, timed_out(call, action.attempt, started_at))
            self._host.call_soon(self._ended, call.key, None, outcome)
            return
        if self.shop.leftovers and self._goes_on(
            call.key
        ):  # of the try before, or of this run's last claim in this process
            self.postponed.append(action)
            if self.shop.leftovers.when_over((self.run.id, call.key), self.tick):
                log.info("step_waits", run_id=str(self.run.id), step=call.key, attempt=action.attempt)
            return
        try:
            args, kwargs = call.info.fresh_arguments(call.input)
            transactional = call.effect is not None and call.effect is Effect.TRANSACTIONAL
            lent = self._within.lend(call) if transactional else None
        except Exception as error:
            outcome = unbegun(call, error_outcome(error, started_at))
            self._host.call_soon(self._ended, call.key, None, outcome)
            return
        info = self._info(call, action.attempt, action.written_at, lent)
        assert call.context is not None
        body = self.bodies[call.key] = Body(action, started_at, call.context.copy(), lent=lent)
        if call.policy is not None and call.retry is not None:
            body.arguments = args, kwargs
        if call.info.is_async:
            body.is_async = True
            body.deadline = None if left is None else self._host.time() + left
            body.task = self._host.create_task(self._run_async(body, args, kwargs, info), context=body.context)
        else:
            self._run_thread(body, args, kwargs, info, left)

    def _info(self, call: CallStep, attempt: int, written_at: int | None, lent: Lent | None = None) -> StepInfo:
        """What its body or its reconciler may know of a step."""
        side = None
        if written_at is not None or lent is not None:
            connect = None if lent is None else lent.connect
            side = self._observations.side(call.key, attempt, written_at, connect)
        return StepInfo(
            self.run.id,
            call.key,
            attempt,
            call.idempotency_key,
            lambda: call.info.decode_input(call.input.text),
            self.shop.resources,
            self.shop.client,
            side,
            self._observations.side,  # and not a method of its own: a context may outlive the run
        )

    def _observed(self, key: str) -> Sequence[tuple[str, str]]:
        return self.driver.observed(key) if self.driver is not None else ()

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
        work = body.task = body.thread = self.shop.threads.submit(
            body.context.run, _run_sync, body, args, kwargs, info, self.shop, began
        )
        self.shop.threads_alive[id(body)] = body
        work.add_done_callback(lambda done: self._thread_done(body, done))

    async def _run_async(self, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any], info: StepInfo) -> None:
        if body.call.has_intent and not self.shop.valid():
            self._host.call_soon(self._unbegun, body)
            return
        body.begun = True
        CURRENT_STEP.set(info)
        bind_body(info.key, info.attempt)
        await self._await_outcome(body, body.call.function, args, kwargs)

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
                value = await within(body.deadline, function, args, kwargs)
            if call.policy is None and call.compensates is None:
                came_to: BodyOutcome | Tried = result_outcome(call.info, value, started_at, self.shop.settings)
            else:
                came_to = after_result(call, value, started_at, self.shop.settings)
        except TimeIsUp:
            outcome = timed_out(call, body.attempt, started_at)
            came_to = after_error(call, outcome.value, outcome)
        except asyncio.CancelledError as error:
            if body.stopping and self.bodies.get(call.key) is body:
                self._host.call_soon(self._stopped, call.key)
                return
            came_to = after_error(call, error, error_outcome(error, started_at))
        except BaseException as error:
            came_to = after_error(call, error, error_outcome(error, started_at))
        if isinstance(came_to, BodyOutcome):
            self._tried(body, came_to, None)
            return
        try:
            await self._judge(body, came_to)
        finally:
            del came_to  # its error holds this frame

    def _tried(self, body: Body, outcome: BodyOutcome, wait: float | None) -> None:
        """Tell the driver, from inside a host task."""
        if MAY_NEST:
            self._ended(body.call.key, body, outcome, wait)
        else:
            self._host.call_soon(self._ended, body.call.key, body, outcome, wait)

    async def _judge(self, body: Body, tried: Tried) -> None:
        """Ask `retry=` what to make of a try; in a task of the body's context, as the strategies may be coroutines."""
        if body.given_up:
            return
        try:
            outcome, wait = await judge(body.start, tried, self.shop.clock.now(), body.arguments)
        except asyncio.CancelledError as error:
            if body.stopping and body.timed_out and id(body) in self.shop.threads_alive:
                body.is_async = False  # what cannot be stopped is waited for
                return
            if body.stopping and self.bodies.get(body.call.key) is body:
                self._host.call_soon(self._stopped, body.call.key)
                return
            outcome, wait = error_outcome(error, body.started_at), None
            outcome.landed = tried.outcome.landed
        self._tried(body, outcome, wait)

    def _ring(self, body: Body, seconds: float) -> None:
        """From now on so long."""
        body.deadline = self._host.time() + seconds
        if self.bodies.get(body.call.key) is body and not body.is_async:
            body.timer = self._host.call_later(seconds, self._thread_timed_out, body)

    def _thread_timed_out(self, body: Body) -> None:
        """The thread runs on, and nobody waits for it but the next try."""
        work = body.task
        if self.bodies.get(body.call.key) is not body or body.is_async or work is None or work.done():
            return
        if body.call.effect is Effect.IRREVERSIBLE and not work.cancel():
            # Nobody is to be asked about a call that is still on its way; what the thread comes to is the best answer.
            log.warning("step_late", run_id=str(self.run.id), step=body.call.key, attempt=body.attempt)
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
        self.shop.threads_alive.pop(id(body), None)
        if body.timer is not None:
            body.timer.cancel()
        key = body.call.key
        current = self.bodies.get(key) is body
        if body.left_behind:
            self.shop.threads.take_back()
        self.shop.leftovers.remove((self.run.id, key), body)
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

    async def _run_rest(self, body: Body, coroutine: Coroutine[Any, Any, Any]) -> None:
        async def rest() -> Any:
            return await coroutine

        await self._await_outcome(body, rest, (), {})

    def _ended(self, key: str, body: Body | None, outcome: BodyOutcome, wait: float | None = None) -> None:
        """A try has an outcome: final, or (`wait` seconds) to be followed by another. `body` None: it never began."""
        lingers = False
        if body is not None:
            if self.bodies.get(key) is not body:
                return
            del self.bodies[key]
            if body.timed_out and id(body) in self.shop.threads_alive:
                body.given_up = True
                self._left_over(body)
            if body.lent is not None:
                self._keep_or_discard(body, body.lent, outcome if wait is None else None)
            if wait is not None and self._goes_on(key):
                lingers = True
                self.shop.leftovers.when_over((self.run.id, key), functools.partial(self._left_nothing, key))
        driver = self.driver
        if driver is None:
            return
        in_doubt = wait is None and outcome.landed is IntentState.UNKNOWN
        if in_doubt and body is not None and body.call.effect is Effect.IRREVERSIBLE and self._goes_on(key):
            # What it left in a thread may still make the call.
            self.shop.leftovers.when_over((self.run.id, key), functools.partial(self._over, key, outcome))
            return
        if wait is None:
            self._tell(driver.body_ended, key, outcome)
        else:
            log.info(
                "step_attempt_failed",
                run_id=str(self.run.id),
                step=key,
                attempt=body.attempt if body is not None else 0,
                error=outcome.value,
                wait_seconds=round(wait, 3),
                thread_lives=lingers,
            )
            self._tell(functools.partial(driver.body_failed, lingering=lingers), key, outcome, wait)

    def _over(self, key: str, outcome: BodyOutcome) -> None:
        """Nothing goes on any more of a call that may have landed: now somebody may be asked."""
        if self.driver is not None:
            self._tell(self.driver.body_ended, key, outcome)

    def _keep_or_discard(self, body: Body, lent: Lent, outcome: BodyOutcome | None) -> None:
        """What a transactional body wrote waits for the step's entry, or is rolled back."""
        if outcome is not None and outcome.error is None and lent.used and self.driver is not None:
            outcome.within = True
            self._within.keep(body.call.key, lent)
        else:
            lent.discard()

    def _goes_on(self, key: str) -> bool:
        """Whether something of a try that is waited for no longer still acts in this process."""
        return (self.run.id, key) in self.shop.leftovers

    def _left_nothing(self, key: str) -> None:
        """Nothing goes on any more of a step that waits for its next try."""
        if self.driver is not None:
            self._tell(self.driver.thread_ended, key)

    def _stopped(self, key: str) -> None:
        body = self.bodies.get(key)
        if body is not None and self._goes_on(key):  # work that it began in a thread: waited for as a thread is
            body.is_async = False
            self.shop.leftovers.when_over((self.run.id, key), functools.partial(self._stopped, key))
            return
        if body is not None and body.lent is not None:
            body.lent.discard()
        self.bodies.pop(key, None)
        if self.driver is not None:
            self._tell(self.driver.body_stopped, key)

    # ------------------------------------------------------------------ calls with an effect

    def _unbegun(self, body: Body) -> None:
        """The lease was not ours beyond doubt any more when it was to begin."""
        if self.bodies.get(body.call.key) is body:
            del self.bodies[body.call.key]
            self._put_off(body.start)

    def _withdraw(self, key: str) -> None:
        """Given up by the code: its body does not begin any more. One that has begun goes on."""
        waiting = [p for p in self.postponed if p.call.key == key and type(p) is StartBody]
        body = self.bodies.get(key)
        if waiting:
            self.postponed = [p for p in self.postponed if p not in waiting]
            self._host.call_soon(self._not_begun, waiting[0].call)
        elif body is not None:
            self._withdrawn(body)

    def _withdrawn(self, body: Body) -> bool:
        """Take back the start of a body, if it has not begun."""
        if body.begun or (body.thread is not None and not body.thread.cancel()):
            return False
        body.cancel()
        del self.bodies[body.call.key]
        if body.timer is not None:
            body.timer.cancel()
        self._host.call_soon(self._not_begun, body.call)
        return True

    def _reconcile(self, action: Reconcile) -> None:
        """Ask what became of a call, once nothing of it goes on here and the lease is ours."""
        key = action.call.key
        if self._draining or not self.shop.valid():
            self._put_off(action)
        elif self._goes_on(key):
            self.postponed.append(action)
            self.shop.leftovers.when_over((self.run.id, key), self.tick)
        else:
            self._reconcilers.begin(action, self._info(action.call, action.attempt, action.written_at))

    def _reconciled(self, key: str, attempt: int, said: Said) -> None:
        driver = self.driver
        if self._loading is not None or (driver is not None and driver.phase is Phase.STALE):
            self._said.append((key, attempt, said))
        elif driver is not None:
            self._tell(driver.reconciled, key, attempt, said)

    def _reconcile_stopped(self, key: str) -> None:
        if self.driver is not None:
            self._tell(self.driver.reconcile_stopped, key)

    def _give_up(self, key: str) -> None:
        self.postponed = [p for p in self.postponed if p.call.key != key]
        body = self.bodies.pop(key, None)
        if body is not None:
            body.given_up = True
            if body.timer is not None:
                body.timer.cancel()
            if body.lent is not None:
                body.lent.discard()
            body.cancel()
            self._left_over(body)

    def _left_over(self, body: Body) -> None:
        """It is waited for no longer, and may go on: a thread, a coroutine in its `finally`."""
        leftovers, step, task = self.shop.leftovers, (self.run.id, body.call.key), body.task
        if id(body) in self.shop.threads_alive:
            leftovers.add(step, body)  # until `_thread_ended`
            if body.thread is not None and body.thread.running():
                self._leave_behind(body)
        elif isinstance(task, asyncio.Task) and not task.done():
            leftovers.add(step, body)
            task.add_done_callback(lambda _: leftovers.remove(step, body))

    def _leave_behind(self, body: Body) -> None:
        if not body.left_behind:
            body.left_behind = True
            self.shop.threads.leave_behind()


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

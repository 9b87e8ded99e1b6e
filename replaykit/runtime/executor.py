"""Obeys one driver: has the bodies run that it asks for (`bodies.py`), hands its units to the writer, wakes it in time.

Nothing is decided here. Each event (a body's end, a verdict, a timer) is told to the driver from a plain callback of the
event loop, and `_pump` carries out what it answers.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from replaykit.events import brief, log
from replaykit.limits import SLICE_SECONDS
from replaykit.replay.actions import CancelBody, Reconcile, StartBody, Withdraw
from replaykit.replay.calls import Workflow
from replaykit.replay.doubts import Answer
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import ClaimedRun, Entry, Finish, IntentState, Mail, Unit, Verdict
from replaykit.replay.execution import Execution
from replaykit.replay.letters import Letters
from replaykit.runtime.bodies import Bodies
from replaykit.runtime.logged import run_context
from replaykit.runtime.named import why_unfit
from replaykit.runtime.observing import Observations
from replaykit.runtime.reconciling import Reconcilers
from replaykit.runtime.shop import Shop
from replaykit.runtime.transactions import RunTransactions

__all__ = ["Executor"]

_SLICE_ENTRIES: Final = 256  # entries between two looks at the clock
_HOLD_AGAIN_SECONDS: Final = 5.0
_INLINE_ENTRIES_MAX: Final = 200  # a shorter journal is replayed at once, a longer one by a task of its own


class Executor:
    """One claimed run in memory.

    Args:
        shop: what it shares with its neighbours.
        run: as claimed.
        workflow: whose function it is.
        left: called once, when the run has left memory, with its executor and why (OVER or LOST).
    """

    def __init__(
        self,
        shop: Shop,
        run: ClaimedRun,
        workflow: Workflow[..., Any],
        left: Callable[[Executor, Phase], None],
    ) -> None:
        self.shop = shop
        self.run = run
        self.workflow = workflow
        self.driver: Driver | None = None
        self.postponed: list[StartBody | Reconcile] = []
        self._tell_left = left
        self._host = asyncio.get_running_loop()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at: int | None = None
        self._loading: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None  # with the bodies of a held run
        self._observations = Observations(run.id, self._host, shop.clock.now, self.tick, self._observed)
        self._reconcilers = Reconcilers(run.id, shop.settings, self._reconciled, self._reconcile_stopped)
        self._transactions = RunTransactions(run.id, shop.lend)
        self.bodies = Bodies(
            run.id,
            shop,
            self._observations,
            self._transactions,
            tell=self._tell,
            put_off=self._put_off,
            wake=self.tick,
        )
        self._answers: list[tuple[str, int, Answer]] = []  # of reconcilers while the journal was read again
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
            self._tell(Driver.drain)
            for action in postponed:
                self._put_off(action)

    def stop_reconcilers(self) -> None:
        """Cancel them: the grace is over. Whoever claims the run next asks again."""
        self._reconcilers.stop()

    @property
    def acts(self) -> bool:
        """Whether the body of a step with an effect runs: cut off it would leave its call in doubt."""
        return any(body.call.has_intent for body in self.bodies.running.values())

    def tick(self) -> None:
        """Look again: time went on, the lease is valid again, or the backlog is gone."""
        if self._loading is None:
            self._tell(Driver.tick)

    def mail(self, wakes: int, letters: list[Mail]) -> None:
        """Others have written to the run: all of its mailbox, as of these `wakes`."""
        run = self.run
        if self._left or wakes <= run.wakes:
            return
        run.mail = letters
        if self.driver is not None and self._loading is None:
            self._tell(Driver.mail, wakes, letters)
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
            self._transactions.forget_all()
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
        self._tell(functools.partial(Driver.begin, draining=self._draining))
        mail, self._mail = self._mail, None
        if mail is not None and mail[0] > self.run.wakes:
            self.mail(*mail)
        answers, self._answers = self._answers, []
        for one in answers:
            self._reconciled(*one)

    # ------------------------------------------------------------------ obeying

    def _tell(self, event: Callable[..., None], *what: Any) -> None:
        """Tell the driver of an event (a function of `Driver`), at the time it is now, and carry out what it answers."""
        driver = self.driver
        if driver is None or self._left or self._holding is not None:
            return
        now = self.shop.clock.now()
        try:
            event(driver, *what, now)
            self._pump(driver, now)
        except Exception as error:  # a defect of ours: this run stops where a person sees it, the others go on
            log.exception("run_broken", run_id=str(self.run.id))
            self._stop_at(f"a defect of replaykit stopped the run, please report it: {brief(error)}")

    def _pump(self, driver: Driver, now: int) -> None:
        if self._observations.untold:
            for seen in self._observations.take():
                driver.observe(seen, now)
        if self.postponed and self.shop.valid() and not self.shop.congested():
            self._begin_postponed(driver, now)
        for action in driver.take_actions():
            if type(action) is StartBody:
                self._start_body(action, now)
            elif type(action) is CancelBody:
                self._give_up(action.key)
            elif type(action) is Withdraw:
                self._withdraw(action.key)
            elif type(action) is Reconcile:
                self._reconcile(action)
        unit = driver.next_unit()
        if unit is not None:
            if unit.within is not None:
                self._transactions.write(unit, self.shop.attentive(unit, self._verdict))
            else:
                self.shop.put(unit, self._verdict)
        if driver.execution.loop.problems:
            self._report(driver)
        if driver.execution.hold_reason is not None and self.bodies.running and self._patience is None:
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
        self.bodies.stop(effects=False)
        self._patience = self._host.call_later(settings.effect_grace - settings.grace_seconds, self.bodies.stop)

    def _report(self, driver: Driver) -> None:
        """Errors that reach nobody in the workflow, as a plain event loop logs them."""
        problems = driver.execution.loop.problems
        for problem in problems:
            error = problem.get("exception")
            words = problem.get("message") if error is None else None  # asyncio's may quote a callback's arguments
            log.error("workflow_callback_failed", run_id=str(self.run.id), problem=words, exc_info=error)
        problems.clear()

    def _start_body(self, action: StartBody, started_at: int) -> None:
        if self.shop.valid() and not self.shop.congested():
            self.bodies.start(action, started_at)
        else:
            self.postponed.append(action)

    def _give_up(self, key: str) -> None:
        self.postponed = [p for p in self.postponed if p.call.key != key]
        self.bodies.give_up(key)

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
            not self._draining or driver is None or self.bodies.goes_on(key)
        ):  # elsewhere it would begin beside what is left here
            self.postponed.append(action)
        elif type(action) is Reconcile:
            self._host.call_soon(self._reconcile_stopped, key)
        else:
            self._host.call_soon(self.bodies.not_begun, action.call)

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
        unit = self.driver.unit if self.driver is not None else None
        if verdict is Verdict.OK and unit is not None and (unit.closings or unit.observations):
            self._committed(unit)
        self._tell(Driver.verdict, verdict, words)

    def _committed(self, unit: Unit) -> None:
        if unit.observations:
            self._observations.committed(unit.observations)
        for closing in unit.closings:
            if closing.state == IntentState.UNKNOWN and not closing.resolved:
                log.warning("step_in_doubt", run_id=str(self.run.id), step=closing.key, attempt=closing.attempt)

    def _changed_hands(self, driver: Driver) -> None:
        if driver.phase is Phase.STALE:
            self._transactions.forget_all()
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
        self.bodies.leave()
        self._transactions.forget_all()
        self._reconcilers.leave()
        self._observations.close()
        if self.driver is not None:
            self.driver.execution.leave()
            if isinstance(self.driver.change, Finish):
                self.shop.ended_runs += 1
        self._tell_left(self, phase)
        self.driver = None

    # ------------------------------------------------------------------ calls with an effect

    def _withdraw(self, key: str) -> None:
        """Given up by the code: its body does not begin any more. One that has begun goes on."""
        waiting = [p for p in self.postponed if p.call.key == key and type(p) is StartBody]
        body = self.bodies.running.get(key)
        if waiting:
            self.postponed = [p for p in self.postponed if p not in waiting]
            self._host.call_soon(self.bodies.not_begun, waiting[0].call)
        elif body is not None:
            self.bodies.withdraw(body)

    def _reconcile(self, action: Reconcile) -> None:
        """Ask what became of a call, once nothing of it goes on here and the lease is ours."""
        key = action.call.key
        if self._draining or not self.shop.valid():
            self._put_off(action)
        elif self.bodies.goes_on(key):
            self.postponed.append(action)
            self.shop.leftovers.when_over((self.run.id, key), self.tick)
        else:
            self._reconcilers.begin(action, self.bodies.info(action.call, action.attempt, action.written_at))

    def _reconciled(self, key: str, attempt: int, answer: Answer) -> None:
        driver = self.driver
        if self._loading is not None or (driver is not None and driver.phase is Phase.STALE):
            self._answers.append((key, attempt, answer))
        else:
            self._tell(Driver.reconciled, key, attempt, answer)

    def _reconcile_stopped(self, key: str) -> None:
        self._tell(Driver.reconcile_stopped, key)

    def _observed(self, key: str) -> Sequence[tuple[str, str]]:
        return self.driver.observed(key) if self.driver is not None else ()

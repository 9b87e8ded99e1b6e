"""Executes runs in this event loop, on virtual time: the worker's part, without threads of its own, leases or polling.

The executors, drivers and executions are those of production; what they write goes to a `Memory`. A run that waits for
time leaves memory at once, so every wait is followed by a replay of the run from the top. The run of a long journal is
replayed at each doubling instead: a day of waits of a minute each would otherwise take minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from typing_extensions import override

from replaykit.errors import ConfigurationError, OutsideRun, ReplaykitError, WorkflowUnknown
from replaykit.limits import Settings
from replaykit.postgres.runs import RunResult
from replaykit.replay.actions import Reconcile, StartBody
from replaykit.replay.calls import CURRENT_STEP, Workflow
from replaykit.replay.driver import Phase
from replaykit.replay.entries import ClaimedRun, Entry, State, Unit
from replaykit.replay.execution import current_execution
from replaykit.replay.requests import CallStep
from replaykit.replay.tags import remember_modules
from replaykit.runtime.bodies import Body
from replaykit.runtime.executor import Executor
from replaykit.runtime.ids import write_ids
from replaykit.runtime.shop import Shop
from replaykit.runtime.threads import BodyThreads
from replaykit.runtime.timeouts import TimeIsUp, seconds_left
from replaykit.runtime.watcher import ENDED
from replaykit.runtime.writer import OnVerdict
from replaykit.testing.clock import VirtualClock, moment_of
from replaykit.testing.lending import LentInMemory
from replaykit.testing.memory import Memory
from replaykit.testing.stubs import Stubs

__all__ = ["Engine", "WaitsForTime"]

REPLAYED_ENTRIES_MAX: Final = 200
"""A run whose journal is longer is not replayed after every wait."""

_LEAVING: Final = Settings(evict_after_seconds=0)
_STAYING: Final = Settings(evict_after_seconds=1e9)


class WaitsForTime(ReplaykitError):
    """`result()` of a run that goes on only when virtual time does: `await client.sleep(...)`."""


class _Executor(Executor):
    """An executor that is woken by virtual time alone, and calls stubs."""

    def __init__(self, engine: Engine, shop: Shop, run: ClaimedRun, workflow: Workflow[..., Any]) -> None:
        super().__init__(shop, run, workflow, engine.forget_run)
        self.stays = len(run.entries) > REPLAYED_ENTRIES_MAX  # in memory while it waits
        self.replay_at = 2 * len(run.entries)
        self._engine = engine

    @override
    def _arm(self, wake_at: int | None, now: int) -> None:
        """The engine tells every executor when time has moved."""

    @override
    def _start_body(self, action: StartBody, started_at: int) -> None:
        self._engine.begins(self.run.id, action)
        super()._start_body(action, started_at)

    @override
    def _reconcile(self, action: Reconcile) -> None:
        self._engine.stubs.replace_reconciler(action.call)
        super()._reconcile(action)

    @property
    def asks(self) -> bool:
        """Whether a reconciler of its is being asked."""
        return len(self._reconcilers) > 0


class Engine:
    """What a testing client and its twins share.

    Args:
        clock: virtual time.
        stubs: what is called instead of bodies.
        resources: of `step.current()`.
        connection: what bodies of transactional steps get; None: nothing.
    """

    def __init__(self, clock: VirtualClock, stubs: Stubs, resources: Any, connection: Any = None) -> None:
        self.memory = Memory()
        self.clock = clock
        self.stubs = stubs
        self.calls: dict[UUID, dict[str, CallStep]] = {}  # each step's last call whose body began
        self.tries: dict[UUID, Counter[str]] = {}  # the attempt that it was
        self.client: Any = None
        self._resources = resources
        self._connection = connection
        self._workflows: dict[str, Workflow[..., Any]] = {}
        self._host: asyncio.AbstractEventLoop | None = None
        self._forget()

    def _forget(self) -> None:
        """Everything that belongs to one event loop."""
        self._executors: dict[UUID, _Executor] = {}
        self._resting: Counter[int] = Counter()  # by id: bodies that wait for time, or for another run
        self._sleepers: list[tuple[int, asyncio.Future[None]]] = []
        self._onlookers: list[asyncio.Future[None]] = []
        self._turn_due: asyncio.Handle | None = None
        self._moving: set[object] = set()  # sleeps that are on their way
        self._mover = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._shop: Shop | None = None

    # ------------------------------------------------------------------ what clients ask

    def enter(self) -> None:
        """Every question begins here: the engine moves to the running event loop.

        Raises:
            ConfigurationError: it executes on another loop that is still running.
            OutsideRun: this is a workflow's own code.
        """
        if current_execution() is not None:
            raise OutsideRun("the testing client inside of a workflow's own code: do this in a step")
        host = asyncio.get_running_loop()
        if host is self._host:
            return
        if self._host is not None and self._host.is_running():
            raise ConfigurationError("this testing client executes runs on another event loop: make one for each")
        self.close()
        self._host = host
        self.work()

    def know(self, workflows: Iterable[Workflow[..., Any]]) -> None:
        """Runs of these workflows can be executed.

        Raises:
            ConfigurationError: another one of that name is known.
        """
        for workflow in workflows:
            other = self._workflows.setdefault(workflow.name, workflow)
            if other is not workflow:
                raise ConfigurationError(
                    f"two workflows are called {workflow.name!r}, in {other.module} and in {workflow.module}: "
                    "give one another name with @workflow(name=...)"
                )

    def workflow(self, name: str) -> Workflow[..., Any]:
        """The workflow of a name.

        Raises:
            WorkflowUnknown: nobody has named it.
        """
        found = self._workflows.get(name)
        if found is None:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise WorkflowUnknown(
                f"this testing client does not know the workflow {name!r} (it knows {known}): "
                "start it by the function, or name it in Client(workflows=[...])"
            )
        return found

    def work(self) -> None:
        """Look for runs that want a worker, soon."""
        if self._turn_due is None:
            self._turn_due = self._loop.call_soon(self._turn)

    async def end_of(self, run_id: UUID) -> RunResult | None:
        """Wait for a run's end; None: no such run.

        Raises:
            WaitsForTime: nothing will happen before virtual time moves, and this is not the code of a body.
        """
        with self._rest() as inside:
            while True:
                quiet = not inside and not self._moving and await self._is_quiet()
                result = self.memory.result(run_id)
                if result is None or result.state in ENDED:
                    return result
                if quiet and not self._moving:
                    raise WaitsForTime(self._what_it_waits_for(run_id))
                await self._change()

    async def sleep_until(self, due: int) -> None:
        """Move virtual time, and run all that is due on the way, in order. In a body: wait until others have moved it."""
        with self._rest() as inside:
            if inside:
                await self._sleep_in_body(due)
                return
            moving, this = self._moving, object()
            moving.add(this)
            try:
                async with self._mover:
                    await self._move(due)
            finally:
                moving.discard(this)
                self._tell()

    async def _sleep_in_body(self, due: int) -> None:
        body = self._body()
        left = None if body is None or body.call.timeout is None else seconds_left(body.call.timeout, body.started_at)
        deadline = due if body is None or left is None else body.started_at + int(left * 1_000_000)
        if min(due, deadline) > self.clock.now():
            future = self._loop.create_future()
            self._sleepers.append((min(due, deadline), future))
            await future
        if deadline < due:
            raise TimeIsUp  # of the step's `timeout=`, which counts real time where the body takes that

    def _body(self) -> Body | None:
        """The body whose code this is."""
        info = CURRENT_STEP.get()
        executor = None if info is None else self._executors.get(info.run_id)
        return None if info is None or executor is None else executor.bodies.running.get(info.key)

    def wake(self, run_id: UUID) -> None:
        """Others have written to the run."""
        executor = self._executors.get(run_id)
        row = self.memory.rows[run_id]
        if executor is not None and row.state == State.RUNNING:
            self._loop.call_soon(executor.mail, row.wakes, list(row.mailbox))
        self.work()

    async def crash(self, run_id: UUID) -> None:
        """Drop a run as the death of its worker does; it is claimed anew. Does not return to the code of its bodies."""
        info = CURRENT_STEP.get()
        dies_here = info is not None and info.run_id == run_id and self._body() is not None
        executor = self._executors.pop(run_id, None)
        if executor is not None:
            executor.drop()
            self.memory.release(run_id, self.clock.now())
            self.work()
            self._tell()
        if dies_here:
            await self._loop.create_future()  # until the task of the body is cancelled, which has been asked for

    def close(self) -> None:
        """Leave the event loop: runs in memory go back to be claimed anew, their bodies are stopped."""
        shop, watch, self._watch = self._shop, self._watch, None
        for executor in list(self._executors.values()):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and took its tasks along
                executor.drop()
            self.memory.release(executor.run.id, self.clock.now())
        if shop is not None:
            shop.threads.shutdown()
        if watch is not None and not watch.get_loop().is_closed():
            watch.cancel()
        if self._turn_due is not None:
            self._turn_due.cancel()
        self._tell()
        self._host = None
        self._forget()

    # ------------------------------------------------------------------ time

    async def _move(self, target: int) -> None:
        await self._settle()
        while (due := self._next_due()) is not None and due <= target:
            self.clock.move(due)
            self.work()
            await self._settle()
        self.clock.move(target)

    def _next_due(self) -> int | None:
        """When something happens next."""
        dues = [self.memory.next_due(), *(due for due, future in self._sleepers if not future.done())]
        dues += [e.driver.next_wake for e in self._executors.values() if e.driver is not None]
        return min((due for due in dues if due is not None), default=None)

    async def _settle(self) -> None:
        """Wait until nothing more happens at this moment of virtual time: bodies are real, and take real time."""
        while not await self._is_quiet():
            if self._busy():
                await self._change()

    async def _is_quiet(self) -> bool:
        if not self._busy():
            await asyncio.sleep(0)  # tasks that were made or woken just now go first
        return not self._busy()

    def _busy(self) -> bool:
        return self._turn_due is not None or any(not self._rests(executor) for executor in self._executors.values())

    def _rests(self, executor: _Executor) -> bool:
        """Whether nothing of the run happens before time moves or another run ends: all its bodies wait for that."""
        driver = executor.driver
        if driver is None or driver.unit is not None or executor.asks:
            return False
        if executor.bodies.running:
            return all(self._resting[id(body)] > 0 for body in executor.bodies.running.values())
        if not executor.stays or driver.in_flight or executor.shop.threads_alive:
            return False
        return driver.next_wake is not None and driver.next_wake > self.clock.now()

    @contextlib.contextmanager
    def _rest(self) -> Iterator[bool]:
        """Whether the code that waits here is a body's; if so, virtual time may move meanwhile."""
        body = self._body()
        if body is None:
            yield False
            return
        resting = self._resting
        resting[id(body)] += 1
        self._tell()
        try:
            yield True
        finally:
            resting[id(body)] -= 1

    def _what_it_waits_for(self, run_id: UUID) -> str:
        row = self.memory.rows[run_id]
        of = f"run {run_id} of {row.workflow}"
        due = self._next_due()
        if due is None:
            return f"{of} is {row.state}, and nothing that is known here will make it go on"
        executor = self._executors.get(run_id)
        if executor is None:
            waits = f"waits ({row.waiting_for})"
        else:
            waits = "has a step that waits" if executor.bodies.running else "waits"
        until = row.available_at if row.state == State.WAITING and row.available_at is not None else due
        return (
            f"{of} {waits} until {moment_of(until).isoformat()}, and virtual time stands still at "
            f"{moment_of(self.clock.now()).isoformat()}: move it with "
            f"`await client.sleep({moment_of(until) - moment_of(self.clock.now())!r})`"
        )

    # ------------------------------------------------------------------ runs

    def _turn(self) -> None:
        """A plain callback: wake what is due, take what is free."""
        self._turn_due = None
        now = self.clock.now()
        for due, future in self._sleepers:
            if due <= now and not future.done():
                future.set_result(None)
        self._sleepers = [(due, future) for due, future in self._sleepers if not future.done()]
        for executor in list(self._executors.values()):
            if executor.stays and not executor.bodies.running and self._entries(executor) >= executor.replay_at:
                executor.drain()
            executor.tick()
        self.memory.promote(now)
        for run in self.memory.claim(now):
            executor = self._executors[run.id] = _Executor(self, self._open(), run, self._workflows[run.workflow])
            if executor.stays:
                executor.shop = replace(executor.shop, settings=_STAYING)
            executor.begin()
        if self._executors and self._watch is None:
            self._watch = self._loop.create_task(self._until_the_loop_ends(), name="replaykit testing")
        self._tell()

    async def _until_the_loop_ends(self) -> None:
        """While runs are in memory. `asyncio.run` cancels all tasks at its end: that is no outcome of a body."""
        try:
            while self._executors:
                await self._change()
        except asyncio.CancelledError:
            if self._watch is asyncio.current_task():
                self.close()
            raise
        if self._watch is asyncio.current_task():
            self._watch = None

    def _entries(self, executor: Executor) -> int:
        return len(self.memory.rows[executor.run.id].journal)

    def _open(self) -> Shop:
        if self._shop is None:
            self._shop = Shop(
                settings=_LEAVING,
                clock=self.clock,
                put=self._put,
                journals=self,
                threads=BodyThreads(_LEAVING.threads),
                new_id=write_ids(),
                valid=lambda: True,
                congested=lambda: False,
                lend=lambda call: LentInMemory(call, self._connection),
                attentive=lambda unit, on_verdict: on_verdict,
                resources=self._resources,
                client=self.client,
            )
        return self._shop

    def begins(self, run_id: UUID, action: StartBody) -> None:
        """A body is about to begin: remember its call, and put a stub in its place."""
        call = action.call
        self.calls.setdefault(run_id, {})[call.key] = call
        self.tries.setdefault(run_id, Counter())[call.key] = action.attempt
        self.stubs.replace(call)

    def _put(self, unit: Unit, on_verdict: OnVerdict) -> None:
        self._loop.call_soon(self._write, unit, on_verdict)

    def _write(self, unit: Unit, on_verdict: OnVerdict) -> None:
        verdict, words = self.memory.write(unit, self.clock.now())
        on_verdict(verdict, words)
        self._tell()

    def forget_run(self, executor: Executor, phase: Phase) -> None:
        """A run is no longer in memory."""
        if self._executors.get(executor.run.id) is executor:
            del self._executors[executor.run.id]
        if self.memory.rows[executor.run.id].state == State.PENDING:
            self.work()
        self._tell()

    async def _change(self) -> None:
        """Wait until something has happened."""
        future = self._loop.create_future()
        self._onlookers.append(future)
        await future

    def _tell(self) -> None:
        onlookers, self._onlookers = self._onlookers, []
        for future in onlookers:
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        assert self._host is not None, "the engine was not entered"
        return self._host

    def begin_run(self) -> None:
        """Errors of classes that are loaded by now are rebuilt from the journal, as those of a worker's modules are."""
        remember_modules()
        self.work()

    # ------------------------------------------------------------------ journals, for executors

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        """A claim hands over the whole journal: there is no next page."""
        return []

    async def renew_token(self, run: ClaimedRun) -> ClaimedRun | None:
        """A new token for the run."""
        return self.memory.renew(run.id, run.token)

    async def hold(self, run: ClaimedRun, reason: str) -> None:
        """Hold the run at once."""
        self.memory.hold(run, reason, self.clock.now())

    async def cancel(self, run: ClaimedRun) -> None:
        """End the run as cancelled at once."""
        self.memory.end_cancelled(run, self.clock.now())

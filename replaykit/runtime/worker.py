"""`Worker`: claims runs, executes them, hands them back.

    async with Worker(client, workflows=[checkout]):     in the background; drains at the end, no signal handlers
    await Worker(dsn, workflows=[checkout]).run()        until SIGTERM or SIGINT

`replaykit worker` runs one of these in each of its child processes. There a sync body can be kept from overlapping its next
attempt, because the process ends with it; in someone else's process nothing can end a thread, and the docs say so.

Suspects, runs under which processes ended again and again, are left by such a child to its parent, which has solo children
for them: workers that take nothing else, a group at a time, in the end one. In someone else's process nothing can be put
apart: there a worker executes one suspect at a time beside its other runs, which share its fate.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import signal
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, Final, Self

from replaykit.about import __version__
from replaykit.errors import ConfigurationError
from replaykit.events import log
from replaykit.limits import (
    BACKLOG_BYTES_MAX,
    CLAIM_RUNS_MAX,
    LOCK_TIMEOUT_SECONDS,
    PAGE_ENTRIES,
    REAP_RUNS_MAX,
    WORKER_ROWS_KEEP_SECONDS,
    Settings,
)
from replaykit.postgres import journal, leases, runs
from replaykit.postgres.database import Connection, Database, is_lock_timeout, is_transient
from replaykit.postgres.schema import Bound, done_channel, work_channel
from replaykit.postgres.transaction import Connections
from replaykit.replay.calls import CURRENT_STEP, Workflow
from replaykit.replay.driver import Phase
from replaykit.replay.entries import ClaimedRun, Entry, Finish, Hold, Unit, Verdict
from replaykit.replay.tags import remember_modules
from replaykit.runtime.bodies import Bodies, Body
from replaykit.runtime.client import CLAIM_TASK, Client
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.executor import Executor
from replaykit.runtime.heartbeat import EXIT_LEASE_LOST, Heartbeat
from replaykit.runtime.ids import write_ids
from replaykit.runtime.leftovers import DefaultThreads, Leftovers
from replaykit.runtime.shop import Shop
from replaykit.runtime.target import Target
from replaykit.runtime.threads import BodyThreads
from replaykit.runtime.transactions import BodyTransaction
from replaykit.runtime.watchdog import Culprit, Watchdog
from replaykit.runtime.writer import OnVerdict, Writer

__all__ = ["Lifespan", "Worker"]


Lifespan = Callable[[], AbstractAsyncContextManager[Any]]
"""An async context manager without arguments; what it yields is `step.current().resources`."""

_OF_RUNS: Final = (Executor.__module__, Bodies.__module__)  # whose frames know the run that they work for
_TICK_SECONDS: Final = 0.05  # between two signs of the loop's life, and two looks at what was postponed
_REAP_SECONDS: Final = 0.5  # between two looks for workers whose lease has ended
_PRUNE_SECONDS: Final = 3_600.0  # between two sweeps of old rows of workers
_HINT_SECONDS: Final = 0.02  # between two hints that runs have ended: each is a commit
_MAIL_SECONDS: Final = 0.05  # between two looks into the mailbox
_RECOVER_SECONDS: Final = 0.25  # before another try after the database was lost
_HEARS_SECONDS: Final = (
    5.0  # without a hint, before the connection for hints is asked whether it lives; and for its answer
)
_LISTEN_SECONDS_MAX: Final = 2.0  # the longest pause before another try to listen
_HAND_BACK_SECONDS_MAX: Final = LOCK_TIMEOUT_SECONDS + 2.0  # at the end; then the parent does it, or the lease ends
_SUSPECTS_SECONDS: Final = 0.25  # between two words to the parent that there are suspects
_SOLO_POLL_SECONDS: Final = 0.25  # between two looks for suspects, where there is nothing else to do
_SOLO_IDLE_SECONDS: Final = 1.0  # without a suspect before a solo worker is done: the next may be on its way back


class Worker:
    """Executes runs of these workflows.

    A run that ends the process ends yours. Runs under which that happened again and again are executed one at a time,
    beside the others; only `replaykit worker` has processes to put them apart.

    Args:
        client_or_dsn: where; a `Client`, a URL, or None for the environment's database or the embedded one.
        workflows: what it executes. Two of one name are refused, naming both modules.
        queues: which runs it takes, most wanted queue first.
        concurrency: runs in memory at once; None: the setting's 1,000.
        lifespan: an async context manager without arguments, entered before the first claim; what it yields is
            `step.current().resources`.
        settings: leases, limits and times.
        worker_id: this incarnation's id (a supervisor chooses it); None: a new one.
        supervised: the process may be ended with the lease, and its event loop is the worker's (it gets a default executor
            that knows whose work it does); False in someone else's process.
        solo: take suspects only, and set `idle` when there are none left.
        on_suspects: called, not too often, when there are suspects that a supervised worker leaves to a solo one.
        poll_only: use no LISTEN.

    Raises:
        ConfigurationError: no workflow, or two of one name.
    """

    def __init__(
        self,
        client_or_dsn: Client | str | None = None,
        *,
        workflows: Sequence[Workflow[..., Any]],
        queues: Sequence[str] = ("default",),
        concurrency: int | None = None,
        lifespan: Lifespan | None = None,
        settings: Settings | None = None,
        schema: str = "replaykit",
        worker_id: uuid.UUID | None = None,
        supervised: bool = False,
        solo: bool = False,
        on_suspects: Callable[[], None] | None = None,
        poll_only: bool = False,
    ) -> None:
        self.settings = settings or Settings()
        self.workflows = _by_name(workflows)
        self.queues = tuple(queues)
        self.concurrency = concurrency or self.settings.concurrency
        self.worker_id = worker_id or uuid.uuid4()
        self.draining = False
        self.idle = asyncio.Event()
        self._used = False
        self._client, self._target = _resolve(client_or_dsn, schema)
        self._lifespan = lifespan
        self._supervised = supervised
        self._solo = solo
        self._on_suspects = on_suspects
        self._suspects: set[uuid.UUID] = set()  # in memory, and not got further yet
        self._cleared: set[uuid.UUID] = set()  # in memory of a solo worker, which parts with them
        self._suspects_at = 0.0  # monotonic: when the last one left memory, or the parent was told of some
        self._poll_only = poll_only
        self._stack: contextlib.AsyncExitStack | None = None
        self._executors: dict[uuid.UUID, Executor] = {}
        self._work = asyncio.Event()
        self._quiet = asyncio.Event()
        self._more = False  # the last claim was full: more is likely there
        self._mail_hint = False  # a hint came that was not looked after in the mailbox
        self._mail_at = 0.0  # when the mailbox may be looked into again
        self._claim_tokens: dict[tuple[str, bool], uuid.UUID] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._claims: Connection | None = None
        self._strays_at = 0.0  # when to look again for leases of runs that are not in memory
        self._others: Connection | None = None
        self._unproven = False  # at the last look the lease was not ours beyond doubt
        self._others_free = asyncio.Lock()
        self._ended_hint = asyncio.Event()
        self._watchdog = Watchdog(self._executing)

    # ------------------------------------------------------------------ public

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT, then drain."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            async with self:
                await stop.wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Open connections, enter the lifespan, take the lease, begin to claim.

        Raises:
            DatabaseUnreachable, SchemaMismatch: the database cannot be used.
        """
        remember_modules()
        if self._used:
            raise ConfigurationError("this Worker has been started before: make another")
        self._used = True
        stack = contextlib.AsyncExitStack()
        try:
            await self._open(stack)
        except BaseException:
            await stack.aclose()
            raise
        self._stack = stack
        log.info(
            "worker_started", worker=str(self.worker_id), workflows=sorted(self.workflows), queues=list(self.queues)
        )

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Drain: claim nothing, let bodies finish for the grace period, hand every run back.

        Bodies of steps with an effect may finish for the length of the lease, if that is longer: cut off they would leave
        their calls in doubt.

        Runs whose body has not ended by then (a sync one, one that swallows its cancellation, one that has left work in
        `asyncio.to_thread`) are handed back last of all: by the parent, once this process is gone; without a parent at this
        call's end, though the body goes on.
        """
        if self._stack is None:
            return
        grace = self.settings.grace_seconds if grace_seconds is None else grace_seconds
        self._begin_drain()
        await self._until_quiet(grace)
        for executor in list(self._executors.values()):
            executor.bodies.stop(effects=False)
            executor.stop_reconcilers()
        await self._until_quiet(max(grace, self.settings.effect_grace) - grace, acting_only=True)
        for executor in list(self._executors.values()):
            executor.bodies.stop()
        await self._until_quiet(1.0, async_only=True)
        await self._flush(2.0)
        await self._close(although_bodies_run=not self._supervised)

    async def abandon(self) -> None:
        """The parent is gone: cancel async bodies, write what has ended, hand back, within 2 seconds.

        While a body goes on nothing more is handed back: the lease has to run out, because the body may still act.
        """
        if self._stack is None:
            return
        self._begin_drain()
        for executor in list(self._executors.values()):
            executor.bodies.stop()
            executor.stop_reconcilers()
        await self._until_quiet(0.7, async_only=True)
        await self._flush(0.7)
        await self._close(although_bodies_run=False)

    @property
    def bodies(self) -> int:
        """Steps of which anything is running in this process: bodies, those that were given up, and what they have left."""
        running = {(e.run.id, key) for e in list(self._executors.values()) for key in list(e.bodies.running)}
        return len(running | self._shop.leftovers.steps())

    # ------------------------------------------------------------------ opening and closing

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        leftovers = Leftovers()
        if self._supervised:
            asyncio.get_running_loop().set_default_executor(DefaultThreads(leftovers))
        dsn = await asyncio.to_thread(self._target.open)
        self._database = Database(dsn, self._target.schema, name="worker")
        writer = self._writer = Writer(self._database)
        await self._connect(writer, stack)
        if self._client is None:
            self._client = Client(dsn, self._target.schema)
            stack.push_async_callback(self._client.aclose)
        resources = await stack.enter_async_context(self._lifespan()) if self._lifespan is not None else None
        self._clock = DatabaseClock()
        connections = self._connections = Connections(
            Database(dsn, self._target.schema, name="step"), self.settings.connections
        )
        self._shop = Shop(
            settings=self.settings,
            clock=self._clock,
            put=self._put if self._solo or not self._supervised else writer.put,
            journals=self,
            threads=BodyThreads(self.settings.threads),
            new_id=write_ids(),
            valid=self._valid,
            congested=lambda: writer.backlog_bytes > BACKLOG_BYTES_MAX,
            lend=lambda call: BodyTransaction(connections, call),
            attentive=self._attentive,
            resources=resources,
            client=self._client,
            leftovers=leftovers,
        )
        await self._take_lease()
        loops = [self._tick_loop, self._claim_loop, self._reap_loop]
        if not self._poll_only:
            loops += [self._listen_loop, self._hint_loop]
        self._tasks = [asyncio.create_task(loop(), name=f"replaykit{loop.__name__}") for loop in loops]
        self._tasks[1].set_name(CLAIM_TASK)
        self._watchdog.start()

    async def _connect(self, writer: Writer, stack: contextlib.AsyncExitStack) -> None:
        """Everything at once: a child that replaces a dead one has runs waiting for it."""
        stack.push_async_callback(writer.close)
        checked, started, claims = await asyncio.gather(
            self._database.check(), writer.start(), self._database.connect(), return_exceptions=True
        )
        if isinstance(claims, Connection):
            self._claims = claims
            stack.push_async_callback(claims.close)
        for result in (checked, started, claims):  # what the schema lacks says more than what then failed
            if isinstance(result, BaseException):
                raise result

    async def _take_lease(self) -> None:
        host, worker_id = asyncio.get_running_loop(), self.worker_id

        def on_lost() -> None:
            host.call_soon_threadsafe(self._lease_lost, worker_id)

        self._heartbeat = Heartbeat(
            self._database,
            self.worker_id,
            settings=self.settings,
            clock=self._clock,
            register=self._register(),
            snapshot=self._snapshot,
            on_lost=on_lost,
            exit_on_expiry=self._supervised,
            busy=lambda: self.bodies > 0,
        )
        await asyncio.to_thread(self._heartbeat.start)

    def _register(self) -> dict[str, Any]:
        return {
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "lease_seconds": self.settings.lease_seconds,
            "queues": list(self.queues),
            "workflows": {name: w.info.schema() for name, w in self.workflows.items()},
            "version": __version__,
            "python": platform.python_version(),
        }

    def _begin_drain(self) -> None:
        self.draining = True
        self._work.set()
        for executor in list(self._executors.values()):
            executor.drain()

    async def _until_quiet(self, seconds: float, *, async_only: bool = False, acting_only: bool = False) -> None:
        """Wait until no run is in memory (or none that could leave, or none that acts on the world), at most that long."""
        end = time.monotonic() + seconds
        while self._executors:
            if acting_only and not any(executor.acts for executor in self._executors.values()):
                return
            if async_only and all(
                all(not b.is_async for b in e.bodies.running.values()) and e.bodies.running
                for e in self._executors.values()
            ):
                return
            self._quiet.clear()
            left = end - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), min(left, _TICK_SECONDS))

    async def _flush(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._writer.drained(), seconds)
        except TimeoutError:
            # The database is away, it seems. Statements are ended before their tasks are cancelled: psycopg would ask the
            # server to forget them, and wait for its answer, for 5 seconds each.
            self._writer.cut_off()
            for connection in (self._claims, self._others):
                if connection is not None:
                    connection.cut()
            await asyncio.sleep(_TICK_SECONDS)

    def _tell_unrecorded(self) -> None:
        """What has ended and could not be written: its bodies run again elsewhere."""
        for executor in self._executors.values():
            steps = executor.driver.unrecorded() if executor.driver is not None else []
            if steps:
                log.error("left_unrecorded", run_id=str(executor.run.id), steps=steps)

    async def _close(self, *, although_bodies_run: bool) -> None:
        stack, self._stack = self._stack, None
        self._tell_unrecorded()
        self._watchdog.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.close()
        for executor in list(self._executors.values()):
            executor.drop()
        self._shop.threads.shutdown()
        await self._connections.close()
        try:
            if stack is not None:
                await stack.aclose()
        finally:
            await self._let_go(although_bodies_run)
        log.info("worker_stopped", worker=str(self.worker_id), runs_ended=self._shop.ended_runs)

    async def _let_go(self, although_bodies_run: bool) -> None:
        """The last thing of all: until then nobody else may take what still acts in this process."""
        hand_back = self._heartbeat.valid() and (although_bodies_run or not self.bodies)
        await asyncio.to_thread(self._heartbeat.stop)
        if hand_back:
            try:
                async with asyncio.timeout(_HAND_BACK_SECONDS_MAX):
                    await self._release()
                    await self._ask(runs.notify(work_channel(self._target.schema)))
            except Exception as error:
                log.warning("release_failed", worker=str(self.worker_id), error=error)
        for connection in (self._claims, self._others):
            if connection is not None:
                await connection.close()

    async def _release(self) -> None:
        try:
            await self._ask(leases.release_worker(self.worker_id, recovered=False))
        except Exception as error:
            if not is_lock_timeout(error):
                raise
            # A row that somebody outside has locked keeps only that run: the sweep hands it back later.
            await self._ask(leases.release_worker(self.worker_id, recovered=False, wait=False))

    # ------------------------------------------------------------------ the lease

    def _valid(self) -> bool:
        return self._heartbeat.valid()

    def _snapshot(self) -> tuple[Any, Any]:
        """In a thread: bodies older than one heartbeat, and how the process is."""
        now = self._clock.now()
        old = now - int(self.settings.heartbeat * 1_000_000)
        in_flight = [
            {"run_id": str(executor.run.id), "key": body.call.key, "attempt": body.attempt, "since": body.started_at}
            for executor in list(self._executors.values())
            for body in list(executor.bodies.running.values())
            if body.started_at < old
        ]
        in_flight += [
            {"run_id": str(run_id), "key": key, "attempt": thing.attempt, "since": thing.started_at}
            for (run_id, key), thing in self._shop.leftovers.things()
            if isinstance(thing, Body) and thing.started_at < old and run_id in self._executors
        ]
        health = {
            "runs": len(self._executors),
            "bodies": self.bodies,
            "runs_ended": self._shop.ended_runs,
            "backlog_bytes": self._writer.backlog_bytes,
            "draining": self.draining,
        }
        return in_flight, health

    def _lease_lost(self, worker_id: uuid.UUID) -> None:
        """Someone took our runs: forget them, and begin anew under another id; a supervised process ends instead, since
        its parent hands back by the id that it gave."""
        if worker_id != self.worker_id:  # known before its heartbeat heard it
            return
        log.warning("lease_lost_runs_dropped", worker=str(worker_id), runs=len(self._executors))
        if self._supervised:
            os._exit(EXIT_LEASE_LOST)
        for executor in list(self._executors.values()):
            executor.drop()
        if not self.draining:
            self.worker_id = uuid.uuid4()
            self._begin_task(self._begin_anew(worker_id), "replaykit_begin_anew")

    def _begin_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends by itself, and is cancelled with the worker if it has not."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.append(task)
        task.add_done_callback(lambda done: self._tasks.remove(done) if done in self._tasks else None)

    def _look_at_lease(self) -> None:
        """Without a parent nothing ends this process with its lease, so what can be cancelled is: others may begin it once
        the database, too, sees the lease end. If only the loop was blocked, the heartbeat says so before the second look."""
        if self._supervised or self._heartbeat.valid():
            self._unproven = False
            return
        again, self._unproven = self._unproven, True
        if again and any(body.is_async for one in self._executors.values() for body in one.bodies.running.values()):
            log.warning("lease_not_renewed_in_time", worker=str(self.worker_id))
            self._lease_lost(self.worker_id)

    async def _begin_anew(self, lost: uuid.UUID) -> None:
        await asyncio.to_thread(self._heartbeat.stop)
        while not self.draining:
            try:
                await self._take_lease()
            except Exception as error:
                log.warning("lease_not_taken", error=error)
                await asyncio.sleep(_RECOVER_SECONDS)
            else:
                self._work.set()
                await self._release_lost(lost)
                return

    async def _release_lost(self, worker_id: uuid.UUID) -> None:
        """What nobody took meanwhile, as after an outage: no run is to blame. While a body goes on the sweep decides."""
        if not self.bodies:
            with contextlib.suppress(Exception):  # the sweep does it as well
                await self._ask(leases.release_worker(worker_id, recovered=False, wait=False))
                self._work.set()

    def _executing(self, task: asyncio.Task[Any] | None, frame: FrameType) -> Culprit:
        """Whose code the loop executes at this moment. In the watchdog's thread."""
        at: FrameType | None = frame
        while at is not None:
            found = at.f_locals.get("self") if at.f_globals.get("__name__") in _OF_RUNS else None
            bodies = found.bodies if isinstance(found, Executor) else found
            if isinstance(bodies, Bodies):  # of a body's task, else the workflow's own code
                running = list(bodies.running.items())
                return bodies.run_id, next((key for key, body in running if body.task is task), None)
            at = at.f_back
        # A task that a body has made: its context says whose it is (it can be asked from 3.12 on).
        context: Mapping[Any, Any] = getattr(task, "get_context", dict)()
        step = context.get(CURRENT_STEP)
        return (step.run_id, step.key) if step is not None else (None, None)

    async def _tick_loop(self) -> None:
        while True:
            self._heartbeat.tick()
            self._watchdog.tick()
            self._look_at_lease()
            for executor in list(self._executors.values()):
                if executor.postponed:
                    asyncio.get_running_loop().call_soon(executor.tick)
            await asyncio.sleep(_TICK_SECONDS)

    async def _reap_loop(self) -> None:
        """Hand back the runs of workers whose lease has ended; forget old rows."""
        prune_at = time.monotonic()
        while True:
            await asyncio.sleep(min(self.settings.heartbeat, _REAP_SECONDS))
            if not self._heartbeat.may_reap():
                continue
            try:
                question = leases.reap_expired(REAP_RUNS_MAX, recoveries_max=self.settings.recoveries_max)
                reaped = leases.parse_reaped(await self._ask(question))
                if reaped.workers or reaped.runs:
                    log.warning("workers_reaped", workers=reaped.workers, runs_handed_back=reaped.runs)
                    self._work.set()
                for run_id in reaped.held:
                    log.error("run_held", run_id=str(run_id), why="too many recoveries without progress")
                    self._ended_hint.set()
                if time.monotonic() > prune_at:
                    prune_at = time.monotonic() + _PRUNE_SECONDS
                    await self._ask(leases.prune_workers(WORKER_ROWS_KEEP_SECONDS))
            except Exception as error:
                log.warning("sweep_failed", error=error)
                await asyncio.sleep(_RECOVER_SECONDS)

    async def _hint_loop(self) -> None:
        """Tell clients that runs have ended: coalesced, outside of the journal's transactions, and only a hint."""
        while True:
            await self._ended_hint.wait()
            self._ended_hint.clear()
            with contextlib.suppress(Exception):
                await self._ask(runs.notify(done_channel(self._target.schema)))
            await asyncio.sleep(_HINT_SECONDS)

    # ------------------------------------------------------------------ claiming

    async def _claim_loop(self) -> None:
        pause = 0.0
        while not self.draining:
            if pause > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), pause)
            self._work.clear()
            if self.draining:
                return
            try:
                mail_pause = await self._mail_turn()
                await self._strays_turn()
                pause = min(mail_pause, await self._claim_turn())
            except Exception as error:
                if not is_transient(error):
                    log.error("claim_failed", error=error, exc_info=True)
                else:
                    log.warning("claim_failed", error=error, retrying=True)
                pause = _RECOVER_SECONDS

    async def _mail_turn(self) -> float:
        """Tell the runs in memory what others have left for them; how soon to look again at the latest.

        Apart from claims, since a worker that is full looks as well; rarely enough that a busy one is not slowed by it.
        """
        host = asyncio.get_running_loop()
        early = self._mail_at - host.time()
        if early > 0 and self._executors:
            return early if self._mail_hint else self.settings.poll_seconds
        self._mail_hint = False
        if not self._executors or not self._heartbeat.valid():
            return self.settings.poll_seconds
        connection = await self._claim_connection()
        worker = self.worker_id
        found = runs.parse_mail(await connection.run(*runs.read_mail(worker)))
        self._mail_at = host.time() + _MAIL_SECONDS
        for run_id, (wakes, letters) in found.items():
            executor = self._executors.get(run_id)
            if executor is not None and worker == self.worker_id:
                host.call_soon(executor.mail, wakes, letters)
        return self.settings.poll_seconds

    async def _strays_turn(self) -> None:
        """Take in what this worker leases without knowing of it, once a heartbeat. Only this loop claims: none is on its way, and
        what an unanswered one took its repetition hands over."""
        host = asyncio.get_running_loop()
        if host.time() < self._strays_at or self._claim_tokens or not self._heartbeat.valid():
            return
        connection = await self._claim_connection()
        worker = self.worker_id
        strays = await connection.run(*runs.read_strays(worker, list(self._executors)))
        self._strays_at = host.time() + self.settings.heartbeat
        suspect_of = {run_id: suspect for run_id, _, suspect in strays}
        for token in {token for _, token, _ in strays}:
            found = runs.parse_claimed(await connection.run_all(runs.read_claimed(worker, token)), token)
            if worker != self.worker_id:  # their lease was lost meanwhile
                return
            for run in found:
                if run.id in suspect_of:  # under one token there may be runs that have just left memory
                    log.warning("claim_found_late", run_id=str(run.id))
                    if suspect_of[run.id]:
                        self._suspects.add(run.id)
                    self._admit(run)

    async def _claim_turn(self) -> float:
        """Wake what is due, take what is free; how many seconds to wait until the next turn."""
        room = self.concurrency - len(self._executors)
        self._more = False
        if not self._heartbeat.valid() or self._shop.congested():
            self._more = True
            return self.settings.poll_seconds
        connection = await self._claim_connection()
        if self._solo:
            return await self._claim_suspects_turn(connection)
        look = runs.promote_due(REAP_RUNS_MAX, self.queues, list(self.workflows))
        promoted = runs.parse_promoted(await connection.run(*look))
        self._clock.observe(promoted.now, time.monotonic())
        if promoted.suspects:
            room -= await self._attend_suspects(connection, room)
        if room <= 0:
            self._more = True
            return self.settings.poll_seconds
        taken = 0
        for queue in self.queues:
            limit = min(room - taken, CLAIM_RUNS_MAX)
            if limit <= 0:
                break
            claimed = await self._claim(connection, queue, limit)
            taken += len(claimed)
            self._more = self._more or len(claimed) == limit
            for run in claimed:
                self._admit(run)
        if self._more or promoted.count >= REAP_RUNS_MAX:
            return 0.0 if self._has_room() else self.settings.poll_seconds
        pause = self.settings.poll_seconds
        if promoted.next_due_at is not None:
            pause = min(pause, max(0.001, (promoted.next_due_at - promoted.now) / 1_000_000))
        return pause

    async def _claim(
        self, connection: Connection, queue: str, limit: int, suspects: Sequence[int] | None = None
    ) -> list[ClaimedRun]:
        # Until it is answered a claim is repeated with its token: what an unanswered one took is handed over then.
        token = self._claim_tokens.setdefault((queue, suspects is not None), uuid.uuid4())
        worker = self.worker_id
        workflows = list(self.workflows)
        sent = runs.claim(queue=queue, workflows=workflows, worker=worker, token=token, limit=limit, suspects=suspects)
        claimed = runs.parse_claim(await connection.run_all(sent), token)
        del self._claim_tokens[queue, suspects is not None]
        return claimed if worker == self.worker_id else []  # else their lease was lost while the answer was on its way

    def _admit(self, run: ClaimedRun) -> None:
        executor = Executor(self._shop, run, self.workflows[run.workflow], self._left)
        if self.draining:  # the claim was on its way when the drain began
            executor.drain()
        self._executors[run.id] = executor
        asyncio.get_running_loop().call_soon(executor.begin)

    async def _attend_suspects(self, connection: Connection, room: int) -> int:
        """Suspects want a worker: how many were taken here."""
        if self._supervised:
            now = time.monotonic()
            if self._on_suspects is not None and now - self._suspects_at >= _SUSPECTS_SECONDS:
                self._suspects_at = now
                self._on_suspects()
            return 0
        return await self._take_suspects(connection, ()) if room > 0 and not self._suspects else 0

    async def _claim_suspects_turn(self, connection: Connection) -> float:
        """The turn of a solo worker: the next ones when none is left of those before."""
        if self._executors:
            return self.settings.poll_seconds
        groups = [min(size, self.concurrency) for size in leases.suspect_groups(self.settings.recoveries_max)]
        if await self._take_suspects(connection, groups):
            return self.settings.poll_seconds
        now = time.monotonic()
        self._suspects_at = self._suspects_at or now
        if now - self._suspects_at >= _SOLO_IDLE_SECONDS:
            self.idle.set()
        return min(_SOLO_POLL_SECONDS, self.settings.poll_seconds)

    async def _take_suspects(self, connection: Connection, groups: Sequence[int]) -> int:
        for queue in self.queues:
            claimed = await self._claim(connection, queue, 1, groups)
            for run in claimed:
                self._suspects.add(run.id)
                self._admit(run)
            if claimed:
                return len(claimed)
        return 0

    def _put(self, unit: Unit, on_verdict: OnVerdict) -> None:
        """`Writer.put` in a worker that may have suspects in memory."""
        self._writer.put(unit, self._attentive(unit, on_verdict))

    def _attentive(self, unit: Unit, on_verdict: OnVerdict) -> OnVerdict:
        """So that the worker hears the verdict, too, if the run is a suspect: whether it gets further is what it waits for."""
        suspects, cleared = self._suspects, self._cleared
        if not (suspects or cleared) or (unit.run_id not in suspects and unit.run_id not in cleared):
            return on_verdict

        def heard(verdict: Verdict, words: str | None) -> None:
            on_verdict(verdict, words)
            executor = self._executors.get(unit.run_id)
            if executor is None or verdict is not Verdict.OK:
                return
            if unit.run_id in self._cleared:
                self._part_with(executor)
            elif unit.run_id in self._suspects and unit.entries:
                self._suspects.discard(unit.run_id)
                self._begin_task(self._clear(executor), "replaykit_clear")

        return heard

    async def _clear(self, executor: Executor) -> None:
        """A run that got further is no suspect any more: it makes room for the next, and goes on among the others."""
        try:
            cleared = await self._ask(runs.clear_suspect(executor.run.id, executor.run.token))
        except Exception as error:  # it stays what it is, and here, until it parks or ends
            log.warning("suspect_not_cleared", run_id=str(executor.run.id), error=error)
            return
        if cleared:
            self._work.set()  # the next one's turn, where they are counted
            if self._solo:
                self._cleared.add(executor.run.id)
                self._part_with(executor)

    def _part_with(self, executor: Executor) -> None:
        # With bodies side by side it stays until later: what comes after the short ones would wait for the long one.
        if len(executor.bodies.running) <= 1:
            asyncio.get_running_loop().call_soon(executor.drain)

    def _left(self, executor: Executor, phase: Phase) -> None:
        """A run is no longer in memory here."""
        if executor.run.id in self._suspects or self._solo:  # the next one's turn
            self._suspects.discard(executor.run.id)
            self._cleared.discard(executor.run.id)
            self._work.set()
        if self._solo:
            self._suspects_at = time.monotonic()
        if self._executors.get(executor.run.id) is executor:
            del self._executors[executor.run.id]
        self._quiet.set()
        change = executor.driver.change if executor.driver is not None else None
        if isinstance(change, Finish | Hold):
            self._ended_hint.set()
        if isinstance(change, Hold):  # without its reason, which may quote inputs
            log.error("run_held", run_id=str(executor.run.id), why="its code: `replaykit show` has the reason")
        if self._more and self._has_room():
            self._work.set()

    def _has_room(self) -> bool:
        # A full batch's worth, so that a busy worker does not claim one run at a time.
        room = self.concurrency - len(self._executors)
        return room >= min(CLAIM_RUNS_MAX, max(1, self.concurrency // 2)) or not self._executors

    async def _listen_loop(self) -> None:
        """NOTIFY is a hint: it shortens the wait for the next look, and polling does without it."""
        lost_at: float | None = None
        pause = _RECOVER_SECONDS
        while True:
            connection: Connection | None = None
            try:
                connection = await self._database.connect()
                if connection.pooled:
                    return
                await connection.listen(work_channel(self._target.schema))
                if lost_at is not None:
                    log.info("hints_restored", seconds=round(time.monotonic() - lost_at, 3))
                lost_at, pause = None, _RECOVER_SECONDS
                self._heed_hint()  # whatever there was while nobody listened
                while True:
                    if await connection.wait_notify(_HEARS_SECONDS):
                        self._heed_hint()
                    else:  # silence, or a network that swallows what is sent
                        await connection.ask_alive(_HEARS_SECONDS)
            except Exception as error:
                if lost_at is None:
                    lost_at = time.monotonic()
                    log.warning("hints_lost", error=error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LISTEN_SECONDS_MAX)
            finally:
                if connection is not None:
                    await connection.close()

    def _heed_hint(self) -> None:
        self._mail_hint = True
        self._work.set()

    async def _claim_connection(self) -> Connection:
        """The one of the claim loop."""
        self._claims = await self._open_if_closed(self._claims)
        return self._claims

    async def _open_if_closed(self, connection: Connection | None) -> Connection:
        if connection is not None and not connection.closed:
            return connection
        if connection is not None:
            await connection.close()
        return await self._database.connect()

    async def _ask(self, question: Bound) -> list[tuple[Any, ...]]:
        """One statement on the connection that all but claims and journals share."""
        async with self._others_free:
            self._others = await self._open_if_closed(self._others)
            return await self._others.run(*question)

    async def _ask_until_answered(self, *questions: Bound) -> list[list[tuple[Any, ...]]]:
        while True:
            try:
                async with self._others_free:
                    self._others = await self._open_if_closed(self._others)
                    return await self._others.run_all(questions)
            except Exception as error:
                if not is_transient(error) or self._stack is None:
                    raise
                await asyncio.sleep(_RECOVER_SECONDS)

    # ------------------------------------------------------------------ journals, for executors

    async def page(self, run: ClaimedRun, after_seq: int) -> list[Entry] | None:
        """The next page of a long journal; empty at its end, None if the lease is another's."""
        (rows,) = await self._ask_until_answered(journal.read_journal(run.id, run.token, after_seq, PAGE_ENTRIES))
        return journal.parse_page(rows)

    async def renew_token(self, run: ClaimedRun) -> ClaimedRun | None:
        """A new token by a statement of its own: it waits for an attempt in flight and fences a later one."""
        token = uuid.uuid4()
        (rows,) = await self._ask_until_answered(runs.renew_token(run.id, run.token, token))
        if not rows:
            return None
        found = runs.parse_claimed(await self._ask_until_answered(*runs.read_claimed(self.worker_id, token)), token)
        if not found:
            return None
        (now,) = found
        return dataclasses.replace(
            run,
            token=token,
            wakes=now.wakes,
            rewinds=now.rewinds,
            attempts=now.attempts,
            mail=now.mail,
            intents=now.intents,
            observations=now.observations,
            entries=[],
            last_seq=None,
        )

    async def hold(self, run: ClaimedRun, reason: str) -> None:
        """Hold the run at once, under its token; pending if others have written to it meanwhile."""
        await self._ask_until_answered(runs.hold_run(run.id, run.token, reason, run.wakes))
        self._ended_hint.set()

    async def cancel(self, run: ClaimedRun) -> None:
        """End the run as cancelled at once, under its token."""
        await self._ask_until_answered(runs.cancel_run(run.id, run.token))
        self._ended_hint.set()


def _by_name(workflows: Sequence[Workflow[..., Any]]) -> dict[str, Workflow[..., Any]]:
    if not workflows:
        raise ConfigurationError(
            "a worker without workflows has nothing to do: give it at least one in workflows=[...]"
        )
    found: dict[str, Workflow[..., Any]] = {}
    for one in workflows:
        if not isinstance(one, Workflow):
            raise ConfigurationError(f"workflows=[...] holds {one!r}, which is no workflow: decorate it with @workflow")
        other = found.setdefault(one.name, one)
        if other is not one:
            raise ConfigurationError(
                f"two workflows are called {one.name!r}, in {other.module} and in {one.module}: "
                "give one another name with @workflow(name=...)"
            )
    return found


def _resolve(client_or_dsn: Client | str | None, schema: str) -> tuple[Client | None, Target]:
    if isinstance(client_or_dsn, Client):
        return client_or_dsn, client_or_dsn.target
    return None, Target(client_or_dsn, schema)

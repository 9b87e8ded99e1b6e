"""`replaykit worker`: a parent that spawns children, buries them and hands back their runs at once.

The parent runs nothing of the user's, so nothing of the user's can take it down; a dead child's runs are released as
soon as waitpid returns, not when a lease ends (DESIGN 5). It only waits: for a signal, for a child's word, for the
next moment at which it has decided to do something.

    RUNNING --SIGTERM, SIGINT--> DRAINING --time, SIGINT--> ABANDONING --time, SIGINT--> KILLING
    children are                 children let bodies        lifelines are closed:        SIGKILL
    respawned                    finish, then release       children give up in 2 s

A run under which child after child dies (a suspect) is not claimed by its children any more; they tell the parent, which
starts up to SUSPECT_PROCESSES_MAX solo children for such runs: each executes a few of them, in the end one alone, and
leaves when there are none. Their deaths are expected, and slow down nobody else.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID, uuid4

from pydantic import ValidationError

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.events import log
from replaykit.limits import SUSPECT_PROCESSES_MAX
from replaykit.postgres import leases, runs
from replaykit.postgres.database import Database, SyncConnection, is_lock_timeout
from replaykit.postgres.schema import done_channel, work_channel
from replaykit.runtime.config import WorkerConfig
from replaykit.runtime.heartbeat import EXIT_LEASE_LOST, EXIT_LOOP_STUCK
from replaykit.runtime.lifeline import Incarnation, Report, as_line

__all__ = ["EXIT_CONFIGURATION", "Bell", "WorkerConfig", "refusal_code", "run_workers"]


SPARE: Final = -1
"""The number of the slot of the spare child."""

EXIT_CONFIGURATION: Final = 2
"""A child's exit code: it cannot start as it was told; its report says why."""

REFUSALS: Final[Mapping[int, type[ConfigurationError]]] = {
    EXIT_CONFIGURATION: ConfigurationError,
    65: SchemaMismatch,
    69: DatabaseUnreachable,  # also between the parent's look at the database and the child's
}
"""What the parent ends with when its first children end with these codes: starting again may help, or cannot."""

SPARE_AFTER_SECONDS: Final = 1.0
"""After a spare has taken a place the next one waits a little: its imports would slow down the recovery."""

QUICK_SECONDS: Final = 10.0
"""A child that dies younger than this, never ready, dies quickly; after quick deaths in a row the next one waits."""

QUICK_READY_SECONDS: Final = 1.0
"""The same for one that had been ready: only a run that kills each child at once may make the others wait."""

RESPAWN_SECONDS_MAX: Final = 30.0
"""Longest wait before a child that never became ready is tried again."""

RESPAWN_READY_SECONDS_MAX: Final = 1.0
"""Longest wait after a child that had been ready: what killed it is likelier a run, and the others want a worker."""

DRAIN_MARGIN_SECONDS: Final = 5.0
"""Beyond the grace period or the lease, whichever is longer, before the parent loses patience with a drain."""

ABANDON_SECONDS: Final = 4.0
"""Between the closing of the lifelines and SIGKILL; a child promises 2 s."""

DOUBLE_SIGINT_SECONDS: Final = 0.2
"""Two SIGINTs closer than this are one: a terminal sends it to the whole group, and `uv run` or `make` pass it on."""

RELEASE_AGAIN_SECONDS: Final = 1.0
"""After a death the runs are released once more: a claim that was on its way is committed for nobody."""

RELEASE_PAUSE_SECONDS_MAX: Final = 2.0
"""Longest wait between two tries to hand back a dead child's runs."""

RELEASE_SECONDS_MAX: Final = 5.0
"""How long the parent, leaving, tries to reach a database that is away; then the leases end by themselves."""


class Bell:
    """Lets another thread drain the workers, as SIGTERM does, and tells afterwards whether a person has asked for it too.

    Attributes:
        signalled: SIGTERM or SIGINT came.
    """

    def __init__(self) -> None:
        self.signalled = False
        self._lock = threading.Lock()
        self._rung = False
        self._strike: Callable[[], None] | None = None

    def ring(self) -> None:
        """From any thread, once or more often, also before the workers run and after they have ended."""
        with self._lock:
            self._rung = True
            if self._strike is not None:
                self._strike()

    def hang(self, strike: Callable[[], None] | None) -> None:
        """For `run_workers`: what a ring does from now on."""
        with self._lock:
            self._strike = strike
            if strike is not None and self._rung:
                strike()


def run_workers(config: WorkerConfig, bell: Bell | None = None) -> int:
    """Runs the children until SIGTERM, SIGINT or the bell, and until all of them have ended. Main thread only.

    Returns:
        Exit code: 0 all ended as asked; 1 some had to be killed, or their runs could not be handed back.

    Raises:
        ConfigurationError: the children cannot start as configured; DatabaseUnreachable, SchemaMismatch: on this
            database, now. Raised when all have ended and nothing is logged any more: the sentence is the last word.
    """
    with _signals(bell or Bell()) as (wakeup, arrived):
        return Supervisor(config, wakeup, arrived).run()


class Stage(enum.IntEnum):
    """How far the parent is from its end."""

    RUNNING = 0
    DRAINING = 1
    ABANDONING = 2
    KILLING = 3


@dataclass(slots=True)
class Child:
    """One incarnation: a process, its pipes, and the id under which it holds leases."""

    worker_id: UUID | None  # None: a spare, which has imported all and waits for its incarnation
    process: subprocess.Popen[bytes]
    lifeline: int | None  # the write end; None once closed
    status: int  # the read end
    started: float
    ready: bool = False
    leaving: bool = False  # it has said that it ends by itself
    failure: str | None = None
    unread: bytes = b""


@dataclass(slots=True)
class Slot:
    """A place for a child, filled again when it dies."""

    number: int  # -1: the spare's
    solo: bool = False  # for suspects
    wanted: bool = True  # to be filled; a solo place only when there are suspects
    child: Child | None = None
    quick_deaths: int = 0
    spawn_at: float = field(default=0.0)  # monotonic


def respawn_delay(quick_deaths: int, ready: bool) -> float:
    """Seconds to wait after that many quick deaths in a row: none after the first, then doubling from 0.1."""
    if quick_deaths <= 1:
        return 0.0
    longest = RESPAWN_READY_SECONDS_MAX if ready else RESPAWN_SECONDS_MAX
    return float(min(longest, 0.1 * 2 ** min(quick_deaths - 2, 20)))


class Supervisor:
    """The parent's loop: what it has (slots, stage) and one turn after another."""

    def __init__(self, config: WorkerConfig, wakeup: socket.socket, arrived: deque[int]) -> None:
        self._config = config
        self._config_line = as_line(config)
        self._arrived = arrived
        self._slots = [Slot(number) for number in range(config.processes)]
        self._spare = Slot(SPARE)
        self._solos = [
            Slot(config.processes + number, solo=True, wanted=False) for number in range(SUSPECT_PROCESSES_MAX)
        ]
        self._selector = selectors.DefaultSelector()
        self._wakeup = wakeup
        self._releases = Releases(config)
        self._stage = Stage.RUNNING
        self._stage_ends: float | None = None  # monotonic: when the next, harsher stage begins by itself
        self._last_sigint = -DOUBLE_SIGINT_SECONDS
        self._ever_ready = False
        self._exit_code = 0
        self._refusal: ConfigurationError | None = None

    def run(self) -> int:
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._releases.start()
        try:
            while self._turn():
                pass
        finally:
            for _, child in self._children():  # after an error of ours: the children end as orphans do
                _close_lifeline(child)
            if not self._releases.finish():
                self._exit_code = self._exit_code or 1
            self._selector.close()
        if self._refusal is not None:
            mistaken = type(self._refusal) is ConfigurationError
            log.info("workers_stopped", exit_code=EXIT_CONFIGURATION if mistaken else 1)
            raise self._refusal
        log.info("workers_stopped", exit_code=self._exit_code)
        return self._exit_code

    def _turn(self) -> bool:
        """One turn: act on what is due, wait, take in what came. False: all is over."""
        now = time.monotonic()
        if self._stage_ends is not None and now >= self._stage_ends:
            self._advance(Stage(min(self._stage + 1, Stage.KILLING)))
        if self._stage is Stage.RUNNING:
            for slot in self._empty_slots():
                if slot.spawn_at <= now:
                    self._fill(slot)
        elif not self._children():
            return False
        for key, _ in self._selector.select(self._seconds_to_wait()):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
            else:
                self._read_status(key.data)
        while self._arrived:
            self._take_signal(self._arrived.popleft())
        for slot, child in self._children():
            if child.process.poll() is not None:
                self._bury(slot, child)
        return True

    def _children(self) -> list[tuple[Slot, Child]]:
        slots = (*self._slots, *self._solos, self._spare)
        return [(slot, slot.child) for slot in slots if slot.child is not None]

    def _empty_slots(self) -> list[Slot]:
        """Those to be filled. The spare comes when all is well: a child has been ready, and none is missing."""
        empty = [slot for slot in self._slots if slot.child is None]
        solos = [slot for slot in self._solos if slot.child is None and slot.wanted]
        if not empty and self._config.spare and self._ever_ready and self._spare.child is None:
            return [*solos, self._spare]
        return empty + solos

    def _seconds_to_wait(self) -> float | None:
        moments = [slot.spawn_at for slot in self._empty_slots()] if self._stage is Stage.RUNNING else []
        if self._stage_ends is not None:
            moments.append(self._stage_ends)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _fill(self, slot: Slot) -> None:
        """The spare takes the place, if there is one: it has only its lease to take, not all to import."""
        try:
            if slot is not self._spare and self._spare.child is not None:
                slot.child, self._spare.child = self._spare.child, None
                self._spare.spawn_at = time.monotonic() + (0 if slot.solo else SPARE_AFTER_SECONDS)
            else:
                slot.child = self._spawn()
        except OSError as error:  # no memory, no process, no descriptor left: the machine's trouble may pass
            log.error("child_not_started", child=slot.number, error=error)
            slot.spawn_at = time.monotonic() + RESPAWN_READY_SECONDS_MAX
            return
        if slot is self._spare:
            log.info("spare_started", pid=slot.child.process.pid)
        else:
            self._commission(slot, slot.child)

    def _commission(self, slot: Slot, child: Child) -> None:
        """Gives a child its id: from now on it may hold leases."""
        worker_id = uuid4()
        child.worker_id = worker_id
        child.started = time.monotonic()
        _write_line(child, as_line(Incarnation(worker_id=worker_id, slot=slot.number, solo=slot.solo)))
        log.info("child_started", child=slot.number, solo=slot.solo, pid=child.process.pid, worker=str(worker_id))

    def _spawn(self) -> Child:
        lifeline_read, lifeline_write = os.pipe()  # not inheritable: only this process ever holds the write end
        status_read, status_write = os.pipe()
        arguments = [str(lifeline_read), str(status_write), str(os.getpid())]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._config.child_module, *arguments],
                pass_fds=(lifeline_read, status_write),
            )
        except OSError:
            os.close(lifeline_write)
            os.close(status_read)
            raise
        finally:
            os.close(lifeline_read)
            os.close(status_write)
        child = Child(None, process, lifeline_write, status_read, time.monotonic())
        _write_line(child, self._config_line)
        os.set_blocking(status_read, False)
        self._selector.register(status_read, selectors.EVENT_READ, child)
        return child

    def _read_status(self, child: Child) -> None:
        """Takes in what the child has written so far."""
        while True:
            try:
                data = os.read(child.status, 65536)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.status)
                return
            *lines, child.unread = (child.unread + data).split(b"\n")
            for line in lines:
                self._take_report(child, line)

    def _take_report(self, child: Child, line: bytes) -> None:
        try:
            report = Report.model_validate_json(line)
        except ValidationError:
            log.warning("child_unintelligible", pid=child.process.pid, bytes=len(line))
            return
        if report.kind == "ready":
            child.ready = self._ever_ready = True
            log.info("child_ready", pid=child.process.pid, worker=str(child.worker_id))
        elif report.kind == "suspects":
            self._want_solo()
        elif report.kind == "leaving":
            child.leaving = True
        else:
            child.failure = report.text

    def _want_solo(self) -> None:
        """There are suspects that nobody executes: one more child for them, if there may be one."""
        if any(slot.wanted and (slot.child is None or not slot.child.ready) for slot in self._solos):
            return  # the one that is starting may be all that they need
        free = next((slot for slot in self._solos if slot.child is None and not slot.wanted), None)
        if free is not None:
            free.wanted = True

    def _bury(self, slot: Slot, child: Child) -> None:
        """After waitpid: hand back its runs, then decide about the next one."""
        code = child.process.returncode
        self._read_status(child)
        blameless = code == EXIT_LEASE_LOST or (code == 0 and child.leaving) or self._stage is Stage.KILLING
        if child.worker_id is not None:
            self._releases.add(Release(child.worker_id, recovered=not blameless, how=how_it_ended(code)))
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.status)
        os.close(child.status)
        _close_lifeline(child)
        slot.child = None
        lived = time.monotonic() - child.started
        asked = (
            code in (0, EXIT_LEASE_LOST, -signal.SIGTERM)
            if self._stage is not Stage.RUNNING
            else slot.solo and code == 0 and child.leaving
        )
        tell = log.info if asked else log.warning
        tell("child_ended", child=slot.number, pid=child.process.pid, **_cause(code), seconds=round(lived, 3))
        if code in REFUSALS and not self._ever_ready:
            sentence = child.failure or f"a worker's process could not start (exit code {code})"
            self._refuse(REFUSALS[code](sentence))
        elif child.failure is not None:
            log.error("child_failed", child=slot.number, reason=child.failure)
        slot.wanted = not slot.solo or not blameless  # what killed a solo child will be there again
        if slot.solo and child.ready:  # that it dies is what it is for, and each of its runs kills only a few
            slot.quick_deaths, slot.spawn_at = 0, 0.0
            return
        slot.quick_deaths = (
            slot.quick_deaths + 1 if lived < (QUICK_READY_SECONDS if child.ready else QUICK_SECONDS) else 0
        )
        slot.spawn_at = time.monotonic() + respawn_delay(slot.quick_deaths, child.ready)

    def _refuse(self, refusal: ConfigurationError) -> None:
        """No child can start: it is said once, however many children found out, and at the end."""
        self._refusal = self._refusal or refusal
        if self._stage is Stage.RUNNING:
            self._advance(Stage.DRAINING)

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTERM:  # twice is once: systemd tells the whole group, and we tell the children
            if self._stage is Stage.RUNNING:
                self._advance(Stage.DRAINING)
        elif number == signal.SIGINT:
            now = time.monotonic()
            if now - self._last_sigint >= DOUBLE_SIGINT_SECONDS:
                self._last_sigint = now
                self._advance(Stage(min(self._stage + 1, Stage.KILLING)))

    def _advance(self, stage: Stage) -> None:
        """Enters a harsher stage and tells the children."""
        self._stage = stage
        settings = self._config.settings
        now = time.monotonic()
        log.info("workers_stopping", stage=stage.name.lower())
        for _, child in self._children():
            if stage is Stage.DRAINING:
                child.process.terminate()
            elif stage is Stage.ABANDONING:
                _close_lifeline(child)
            else:
                child.process.kill()
                self._exit_code = self._exit_code or 1
        if stage is Stage.DRAINING:
            # The lease too: it is what an effect in flight gets (DESIGN 5).
            self._stage_ends = now + max(settings.grace_seconds, settings.lease_seconds) + DRAIN_MARGIN_SECONDS
        else:
            self._stage_ends = now + ABANDON_SECONDS if stage is Stage.ABANDONING else None


@dataclass(frozen=True, slots=True)
class Release:
    """A dead child whose runs are to be handed back."""

    worker_id: UUID
    recovered: bool  # its death may be a run's fault, and counts for each
    how: str  # it ended, in words for the reason of a run that is held


class Releases:
    """Hands back the runs of dead children: in a thread, so that a database that is away delays no burial."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._database = Database(config.dsn, config.schema_name, name="supervisor")
        self._connection: SyncConnection | None = None
        self._queue: queue.SimpleQueue[Release | None] = queue.SimpleQueue()
        self._again: deque[tuple[float, Release]] = deque()  # when, which
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaykit-releases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, release: Release) -> None:
        """Releases that worker's runs, soon."""
        self._queue.put(release)

    def finish(self) -> bool:
        """Waits until all is released, or for `RELEASE_SECONDS_MAX`; whether all is."""
        self._queue.put(None)
        self._thread.join(RELEASE_SECONDS_MAX)
        self._leaving.set()
        if self._thread.is_alive():
            log.warning("runs_not_released", reason="the database is not reachable; the leases will end by themselves")
            return False
        return True

    def _run(self) -> None:
        self._connect()
        while (item := self._next()) is not None:
            tries = 0
            while not self._release(item):
                tries += 1
                if self._leaving.wait(min(RELEASE_PAUSE_SECONDS_MAX, 0.02 * 2 ** min(tries, 10))):
                    return
        self._disconnect()

    def _next(self) -> Release | None:
        """The next worker to release: one that has just died, or one that had died a while ago."""
        try:
            wait = max(0.0, self._again[0][0] - time.monotonic()) if self._again else None
            item = self._queue.get(timeout=wait)
        except queue.Empty:
            return self._again.popleft()[1]
        if item is not None and item.recovered:
            self._again.append((time.monotonic() + RELEASE_AGAIN_SECONDS, item))
        return item

    def _connect(self) -> None:
        """Ahead of the first death, which then costs one round trip."""
        with contextlib.suppress(Exception):
            self._connection = self._database.connect_sync()

    def _release(self, item: Release) -> bool:
        try:
            if self._connection is None:
                self._connection = self._database.connect_sync()
            recoveries_max = self._config.settings.recoveries_max
            released = leases.parse_released(_release(self._connection, item, recoveries_max))
            if released.runs:
                self._connection.run(*runs.notify(work_channel(self._config.schema_name)))
            if released.held:
                self._connection.run(*runs.notify(done_channel(self._config.schema_name)))
        except Exception as error:  # whatever it is: the runs stay where they are until it works or the lease ends
            log.warning("release_failed", worker=str(item.worker_id), error=error)
            self._disconnect()
            return False
        log.info("runs_released", worker=str(item.worker_id), runs=released.runs, recovered=item.recovered)
        for run_id in released.held:
            log.error("run_held", run_id=str(run_id), why="too many recoveries without progress")
        return True

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()


def _release(connection: SyncConnection, item: Release, recoveries_max: int) -> list[tuple[Any, ...]]:
    asked = functools.partial(
        leases.release_worker, item.worker_id, item.recovered, how=item.how, recoveries_max=recoveries_max
    )
    try:
        return connection.run_all([leases.lock_runs(item.worker_id), asked()])[-1]
    except Exception as error:
        if not is_lock_timeout(error):
            raise
        return connection.run(*asked(wait=False))


def _write_line(child: Child, line: bytes) -> None:
    if child.lifeline is not None:
        with contextlib.suppress(BrokenPipeError):  # dead already: waitpid will say so
            os.write(child.lifeline, line)


def _close_lifeline(child: Child) -> None:
    if child.lifeline is not None:
        os.close(child.lifeline)
        child.lifeline = None


def refusal_code(error: ConfigurationError) -> int:
    """The exit code of a child that cannot start because of it."""
    return next((code for code, kind in REFUSALS.items() if kind is type(error)), EXIT_CONFIGURATION)


def how_it_ended(code: int) -> str:
    """A child's exit code in words, for the reason of a run that is held: "the last process ..."."""
    if code == EXIT_LOOP_STUCK:
        return "blocked its event loop until its lease ended"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as when memory runs out"
    cause = _cause(code)
    return f"was killed by {cause['signal']}" if "signal" in cause else f"ended with exit code {code}"


def _cause(code: int) -> dict[Literal["signal", "exit_code"], str | int]:
    if code < 0:
        with contextlib.suppress(ValueError):
            return {"signal": signal.Signals(-code).name}
    return {"exit_code": code}


@contextlib.contextmanager
def _signals(bell: Bell) -> Iterator[tuple[socket.socket, deque[int]]]:
    """Signals become bytes on a socket (to end a wait) and numbers in a queue (to be acted on), in that order."""
    arrived: deque[int] = deque()
    receiving, sending = socket.socketpair()
    receiving.setblocking(False)
    sending.setblocking(False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def arrive(number: int, _: Any) -> None:
        arrived.append(number)
        bell.signalled = bell.signalled or number != signal.SIGCHLD

    def strike() -> None:
        arrived.append(signal.SIGTERM)
        with contextlib.suppress(BlockingIOError):
            sending.send(b"!")

    before = {number: signal.signal(number, arrive) for number in numbers}
    wakeup_before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    bell.hang(strike)
    try:
        yield receiving, arrived
    finally:
        bell.hang(None)
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiving.close()
        sending.close()

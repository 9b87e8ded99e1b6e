"""`crash_everywhere`: a workflow in real processes, killed before and after every commit, and what became of it.

    def test_checkout_survives(replaykit_dsn: str) -> None:
        testing.crash_everywhere(checkout, order, dsn=replaykit_dsn).raise_if_not_ok()

For each commit of a clean run and each side of it: a fresh run in a fresh process, which SIGKILL ends at that point; another
fresh process takes the run up, and what it comes to is compared with the clean run: state, result or error, journal, and what
was done outside.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from uuid import UUID, uuid4

from replaykit.errors import ConfigurationError, DatabaseUnreachable, NotResolvable, ReplaykitError
from replaykit.limits import Settings
from replaykit.postgres import leases
from replaykit.postgres.database import Database, SyncConnection, is_transient
from replaykit.postgres.schema import Statement
from replaykit.replay.answers import Landed
from replaykit.replay.calls import Workflow
from replaykit.runtime.sync_client import SyncClient
from replaykit.testing.counting import COUNTED_IN, Effect, read_effects, tally
from replaykit.testing.crash_child import ORDER_BYTES, Job, Kill, Side
from replaykit.testing.crash_report import Crash, CrashReport, Entry, Ran, differences, end_of, facts, varying

__all__ = ["Doubt", "Nursery", "crash_everywhere"]

_LOOK_SECONDS: Final = 0.01  # between two looks whether a run has ended
_POLL_SECONDS: Final = 0.05  # of the workers: nothing hints to them
_START_SECONDS: Final = 60.0  # for a child to import its module, on a machine that others keep busy
_COMMITS_MAX: Final = 1_000  # of one run: a workflow with more is tested with less to do
_WORDS_MAX: Final = 20  # of a person, for one run
_ROUNDS: Final = (
    5  # of all kills where the clean runs disagree on which steps there are: what chance decides, one kill may miss
)
_ENDED: Final = ("succeeded", "failed", "cancelled", "held", "continued")

RUN: Final = Statement(
    "runs-read-crashed",
    "select r.state, r.reason, p.output::text, p.error::text, r.waiting_for"
    " from {schema}.runs r join {schema}.payloads p on p.run_id = r.id where r.id = %(run)s",
)
JOURNAL: Final = Statement(
    "journal-list-crashed",
    "select seq, kind, key, name, outcome, digest, output::text, error::text"
    " from {schema}.journal where run_id = %(run)s order by seq",
)
DOUBTS: Final = Statement(
    "intents-list-crashed",
    "select key, idempotency_key from {schema}.intents"
    " where run_id = %(run)s and state = 'unknown' and resolved_at is null order by key",
)
# Runs draw from their seed: with one seed all runs draw the same, and can be compared. Only then may a worker see it.
SEED: Final = Statement("runs-seed-crashed", "update {schema}.runs set seed = 1, queue = %(queue)s where id = %(run)s")


@dataclass(frozen=True)
class Doubt:
    """A call with which a run waits for a person, as `resolve=` gets it.

    Attributes:
        run_id: the run.
        key: the step's key.
        idempotency_key: what its body sent along.
        effects: what `count_effect` has counted in the run so far.
    """

    run_id: UUID
    key: str
    idempotency_key: str
    effects: tuple[Effect, ...]

    def counted(self, what: str) -> int:
        """How often this step has counted that."""
        return sum(effect.what == what and effect.step == self.key for effect in self.effects)


def crash_everywhere(
    workflow: Workflow[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    dsn: str | None = None,
    schema: str = "replaykit",
    module: str | None = None,
    lifespan: str | Callable[[], Any] | None = None,
    settings: Settings | None = None,
    effects: Callable[[UUID], Any] | None = None,
    resolve: Callable[[Doubt], Landed[Any] | BaseException] | None = None,
    kill: Sequence[Literal["before", "after"]] = ("before", "after"),
    twice: bool = False,
    ignore: Sequence[str] = (),
    timeout: float = 30.0,
    jobs: int = 4,
    nursery: Nursery | None = None,
) -> CrashReport:
    """Run a workflow in real processes, kill them with SIGKILL before and after every commit, and compare what the runs come to
    with a run that nobody killed. Blocks; for a test without an event loop, or a thread.

    Args:
        workflow: defined at the top level of a module, which the processes import.
        args: its arguments, the same for each run.
        kwargs: its arguments by name.
        dsn: a migrated database, such as pytest's `replaykit_dsn`; None: a throw-away Postgres of its own (some seconds more).
        schema: the schema of replaykit's tables there.
        module: where the workflow is, as `replaykit worker` takes it; None: the module that it says it is of.
        lifespan: an async context manager, or where it is (`MODULE:NAME`), as a worker has it.
        settings: the workers'.
        effects: says of a run, by its id, what it has done outside: anything made of dicts, lists and numbers. Asked once the
            run has ended, in a thread. What bodies count with `count_effect` is compared without it.
        resolve: a person's word on a call that is in doubt, as `Handle.resolve` takes it; asked in a thread. None: a run that
            waits for a person is a difference.
        kill: on which sides of a commit.
        twice: kill the process that takes over as well, at its own first commit, on the same side; a third one goes on.
        ignore: step keys (with `*`), or `result`: what is not compared.
        timeout: seconds that a run may take after its start, or after its kill.
        jobs: how many runs at once. 1 where `effects` cannot tell one run from another.
        nursery: makes the processes, kept from one call to the next; None: one for this call.

    Raises:
        ConfigurationError: the workflow cannot be found by another process; a clean run does not end; an option says nothing.
        DatabaseUnreachable, SchemaMismatch: the database cannot be used, or is lost meanwhile.
        TypeError, NotJournalable: of the arguments.
    """
    _check(workflow, kill, ignore, timeout, jobs)
    with contextlib.ExitStack() as stack:
        if dsn is None:
            dsn = stack.enter_context(_own_database())
        if nursery is None:
            nursery = stack.enter_context(Nursery())
        lab = _Lab(workflow, args, dict(kwargs or {}), dsn, schema, nursery)
        stack.callback(lab.close)
        lab.module = module if module is not None else _module_of(workflow)
        lab.lifespan = _reference(lifespan) if callable(lifespan) else lifespan
        lab.settings = settings if settings is not None else Settings(poll_seconds=_POLL_SECONDS)
        lab.effects, lab.resolve, lab.timeout, lab.twice = effects, resolve, timeout, twice
        try:
            return _everywhere(lab, tuple(dict.fromkeys(kill)), tuple(ignore), jobs)
        except Exception as error:
            if isinstance(error, ReplaykitError) or not is_transient(error):
                raise
            raise DatabaseUnreachable(f"the database went away under crash_everywhere: {error}") from error


def _check(workflow: object, kill: Sequence[str], ignore: Sequence[str], timeout: float, jobs: int) -> None:
    if COUNTED_IN in os.environ:  # each of them would make others, without end
        raise ConfigurationError(
            "crash_everywhere is called by a process of its own, which imports this module: call it in a test, or below"
            ' `if __name__ == "__main__":`'
        )
    if not isinstance(workflow, Workflow):
        raise ConfigurationError(
            f"crash_everywhere takes a workflow, and {workflow!r} is none: decorate it with @workflow"
        )
    if isinstance(kill, str) or not kill or not set(kill) <= {"before", "after"}:
        raise ConfigurationError(f"kill= is a list of 'before', 'after' or both, not {kill!r}")
    if isinstance(ignore, str):
        raise ConfigurationError(f"ignore= is a list of step keys, such as [{ignore!r}], not a text")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigurationError(f"timeout= is seconds, more than 0, not {timeout!r}")
    if not isinstance(jobs, int) or jobs < 1:
        raise ConfigurationError(f"jobs= is how many runs at once, 1 at least, not {jobs!r}")


def _everywhere(lab: _Lab, sides: tuple[Side, ...], ignore: tuple[str, ...], jobs: int) -> CrashReport:
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="replaykit-crash")
    try:
        clean_runs: list[Callable[[], Ran]] = [
            lambda: lab.run_clean(0),
            lambda: lab.run_clean(1),
            lab.run_after_another,
        ]
        clean, twin, later = pool.map(lambda run: run(), clean_runs)
        vary = varying(facts(clean), facts(twin))
        declared = clean.declared

        def compared(ran: Ran, commit: int, side: str) -> Crash:
            declared.update(ran.declared)
            what = ran.commits[commit - 1] if 0 < commit <= len(ran.commits) else "none"
            again = tuple(step for step, times in ran.begun.items() if times > clean.begun[step])
            found = differences(clean, ran, vary=vary, ignore=ignore, declared=declared)
            held = ran.reason if ran.state == "held" else None
            doubts = tuple(dict.fromkeys(ran.doubts))
            return Crash(ran.run_id, commit, side, what, ran.kills, again, doubts, held, found)

        def crash_at(kill: Kill) -> Crash:
            return compared(lab.run_killed(kill), kill.commit, kill.side)

        commits = max(len(clean.commits), len(twin.commits))
        kills = [Kill(commit=number, side=side) for number in range(1, commits + 1) for side in sides]
        if any(len(path) == 2 and path[0] == "journal" for path in vary):
            kills *= _ROUNDS
        crashes = list(pool.map(crash_at, kills))
        # Bodies side by side are committed together or apart, as it happens: there may be more to come.
        for number in range(commits + 1, _COMMITS_MAX):
            first, *others = (Kill(commit=number, side=side) for side in sides)
            crash = crash_at(first)
            if not crash.reached:
                crashes += [crash] if crash.differences else []
                break
            crashes += [crash, *map(crash_at, others)]
        after_another = compared(later, 0, "")
        crashes += [after_another] if after_another.differences else []
    except BaseException:
        lab.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    ignored = sorted({".".join(p if p[0] != "effects" else p[:2]) for p in _outermost(vary)} | set(ignore))
    return CrashReport(lab.workflow.name, tuple(clean.commits), tuple(crashes), tuple(ignored), end_of(clean))


def _outermost(paths: frozenset[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [path for path in paths if not any(path[:n] in paths for n in range(1, len(path)))]


@contextlib.contextmanager
def _own_database() -> Iterator[str]:
    from replaykit.postgres.copies import copy_of  # alembic and SQLAlchemy: the children import this module, too
    from replaykit.testing.server import TEMPLATE, SharedServer

    with tempfile.TemporaryDirectory(prefix="replaykit-crash-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # the server of a root is another user's
        server = SharedServer(Path(folder) / "postgres")
        try:
            with copy_of(server.start(), TEMPLATE) as url:
                yield url
        finally:
            server.close()


def _module_of(workflow: Workflow[..., Any]) -> str:
    name = _import_name(workflow.module, workflow.fn.__code__.co_filename, workflow.name)
    module = sys.modules.get(workflow.module)
    if module is not None and not any(value is workflow for value in vars(module).values()):
        raise ConfigurationError(
            f"{workflow.name} does not stand at the top level of {workflow.module}, where another process finds it: put it there,"
            " or say with module= where it stands"
        )
    return name


def _reference(lifespan: Callable[[], Any]) -> str:
    name = getattr(lifespan, "__qualname__", "")
    if not name or "<" in name:
        raise ConfigurationError(
            f"another process cannot find lifespan={lifespan!r}: define it at the top level of a module"
        )
    code = getattr(inspect.unwrap(lifespan), "__code__", None)
    return f"{_import_name(lifespan.__module__, code.co_filename if code is not None else '', name)}:{name}"


def _import_name(module: str, file: str, what: str) -> str:
    """By what name another process imports it: `__main__` is there something else."""
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name)  # python -m
    if not Path(file).is_file():
        raise ConfigurationError(
            f"{what} stands in no file, so that no other process can import it: put it into a module"
        )
    return file


# ---------------------------------------------------------------------- one run


class _Lab:
    """Runs of one workflow."""

    module: str
    lifespan: str | None
    settings: Settings
    effects: Callable[[UUID], Any] | None
    resolve: Callable[[Doubt], Landed[Any] | BaseException] | None
    timeout: float
    twice: bool

    def __init__(
        self,
        workflow: Workflow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dsn: str,
        schema: str,
        nursery: Nursery,
    ) -> None:
        self.workflow = workflow
        self.nursery = nursery
        self._args, self._kwargs = args, kwargs
        self._dsn, self._schema = dsn, schema
        self._client = SyncClient(dsn, schema)
        self._database = Database(dsn, schema, name="testing")
        self._running: set[_Experiment] = set()
        self._stopping = False

    def stop(self) -> None:
        """End what runs: nobody wants to know any more."""
        self._stopping = True
        for test in list(self._running):
            test.stop()

    def close(self) -> None:
        """Leave the database."""
        self._client.close()

    def run_clean(self, generation: int) -> Ran:
        """A run that nobody kills.

        Raises:
            ConfigurationError: it does not come to an end.
        """
        with self._experiment() as test:
            self._finish_clean(test, generation).kill()
        return test.ran

    def run_after_another(self) -> Ran:
        """A run in a process that has executed another one already, as a worker's processes have.

        Raises:
            ConfigurationError: that other one does not come to an end.
        """
        with self._experiment() as test:
            child = self._finish_clean(test, 0)
            child.hush()
            test.start_another()
            if not test.watch(child):
                test.ran.broken.append("the process that had executed a run of it before ended by itself")
            test.look()
            child.kill()
        return test.ran

    def _finish_clean(self, test: _Experiment, generation: int) -> _Child:
        """Its process, which lives."""
        child = test.child(generation, None)
        child.go()
        if not test.watch(child):
            began = [step for step, times in test.ran.begun.items() if times]
            after = f" after {began[-1]} had begun" if began else ""
            words = self.nursery.last_words().strip()
            raise ConfigurationError(
                f"a clean run of {self.workflow.name} ended its process{after}"
                + (f"; its last words:\n{words}" if words else " and said nothing")
            )
        test.look()
        ran = test.ran
        if ran.state not in _ENDED or (ran.state == "held" and not ran.doubts):
            raise ConfigurationError(
                f"a clean run of {self.workflow.name} is {ran.state}, so there is nothing to compare with"
                + (f": {ran.reason}" if ran.reason else f": give it more than timeout={self.timeout:g}")
            )
        return child

    def run_killed(self, kill: Kill) -> Ran:
        """A run whose process is killed there, and which another one takes up; which is killed at once, too, if `twice`."""
        with self._experiment() as test:
            kills = [kill, Kill(commit=1, side=kill.side), None] if self.twice else [kill, None]
            children = [test.child(number % 2, each) for number, each in enumerate(kills)]  # all import meanwhile
            for child in children:
                child.go()
                if test.watch(child):
                    break
                test.bury(child)
            else:
                test.ran.broken.append("the process that took the run up ended by itself")
            test.look()
        return test.ran

    @contextlib.contextmanager
    def _experiment(self) -> Iterator[_Experiment]:
        connection = self._database.connect_sync()
        test = _Experiment(self, connection, self.nursery.new_file())
        self._running.add(test)
        try:
            test.start()
            yield test
        finally:
            self._running.discard(test)
            test.close()
            connection.close()

    def is_stopping(self) -> bool:
        """Whether what runs is to end."""
        return self._stopping

    def start_run(self, queue: str) -> UUID:
        """A fresh run."""
        return self._client.options(queue=queue).start(self.workflow, *self._args, **self._kwargs).id

    def say_word(self, doubt: Doubt) -> None:
        """Ask `resolve=`, and pass it on."""
        assert self.resolve is not None
        with contextlib.suppress(NotResolvable):
            self._client.handle(doubt.run_id).resolve(doubt.key, self.resolve(doubt), by="resolve=")

    def job(self, queue: str, counted_in: Path, kill: Kill | None) -> Job:
        """For a child."""
        return Job(
            path=[str(Path(part).absolute()) for part in sys.path],
            module=self.module,
            workflow=self.workflow.name,
            dsn=self._dsn,
            schema_name=self._schema,
            queue=queue,
            worker_id=uuid4(),
            settings=self.settings,
            lifespan=self.lifespan,
            counted_in=str(counted_in),
            kill=kill,
        )


class _Experiment:
    """One run, its processes and what is seen of it."""

    def __init__(self, lab: _Lab, connection: SyncConnection, counted_in: Path) -> None:
        self._lab = lab
        self._connection = connection
        self._counted_in = counted_in
        self._queue = f"crash-{uuid4().hex}"
        self._children: list[_Child] = []
        self._standing: list[Entry] = []
        self._words = 0
        self._counted_before = 0  # lines of the run before this one

    def start(self) -> None:
        """Begin the run, for whoever executes its queue."""
        self.ran = Ran(self._lab.start_run(f"{self._queue}-new"))
        self._connection.run(SEED, {"run": self.ran.run_id, "queue": self._queue})

    def start_another(self) -> None:
        """Begin another run, for the same processes; the one before has ended."""
        self._counted_before = len(read_effects(self._counted_in))
        self._words = 0
        self.start()

    def _effects(self) -> list[Effect]:
        effects = read_effects(self._counted_in)[self._counted_before :]
        return [effect for effect in effects if effect.run in (None, str(self.ran.run_id))]

    def stop(self) -> None:
        """End its processes; its own thread hears of that. From another."""
        for child in self._children:
            child.shut()

    def child(self, generation: int, kill: Kill | None) -> _Child:
        """A process for it, which imports the module meanwhile."""
        if self._lab.is_stopping():
            raise ConfigurationError("the runs that crash_everywhere compares with, or others, have failed")
        child = self._lab.nursery.child(generation, self._lab.job(self._queue, self._counted_in, kill))
        self._children.append(child)
        return child

    def watch(self, child: _Child) -> bool:
        """Until the run has ended, or its time is over; False: the process has ended before."""
        end = time.monotonic() + self._lab.timeout

        def hear(said: Mapping[str, Any]) -> None:
            self._heard(child, said)

        while True:
            alive = child.listen(_LOOK_SECONDS, hear)
            state, reason, output, error, waiting_for = self._connection.run(RUN, {"run": self.ran.run_id})[0]
            self.ran.state, self.ran.reason, self.ran.result, self.ran.error = state, reason, output, error
            if state in _ENDED and not self._asked(state):
                # What it has said when it made the last commit; with which it may be about to kill itself.
                kill = child.job.kill
                while child.listen(2 * _LOOK_SECONDS, hear) and time.monotonic() < end:
                    if kill is None or kill.commit > child.commits:
                        break
                return True
            if not alive:
                return False
            if time.monotonic() > end:
                waits = f", waiting for {waiting_for}" if waiting_for else ""
                self.ran.state = f"still {state}{waits} after {self._lab.timeout:g} s"
                return True

    def _heard(self, child: _Child, said: Mapping[str, Any]) -> None:
        ran = self.ran
        if said["kind"] == "commit":
            child.commits += 1
            if child is self._children[0]:
                ran.commits.append(said["what"])
        elif said["kind"] == "killed":
            ran.kills += 1
        elif said["kind"] == "body":
            ran.begun[said["step"]] += 1
            ran.declared[said["step"]] = said["effect"]
            ran.inputs.setdefault(said["step"], set()).add(said["digest"])

    def _asked(self, state: str) -> bool:
        """Whether the run was held for a word, and has one now."""
        if state != "held":
            return False
        doubts = self._connection.run(DOUBTS, {"run": self.ran.run_id})
        self.ran.doubts += [key for key, _ in doubts if key not in self.ran.doubts]
        if self._lab.resolve is None or not doubts or self._words >= _WORDS_MAX:
            return False
        self._words += 1
        for key, idempotency_key in doubts:
            effects = tuple(self._effects())
            self._lab.say_word(Doubt(self.ran.run_id, key, idempotency_key, effects))
        return True

    def bury(self, child: _Child) -> None:
        """After its death: hand its run back, as a worker's parent does, and note what stands."""
        worker = child.job.worker_id
        asked = leases.release_worker(worker, True, how="was killed by SIGKILL")
        self._connection.run_all([leases.lock_runs(worker), asked])
        self._standing += self._journal()

    def look(self) -> None:
        """See what the run has come to."""
        ran = self.ran
        ran.entries = self._journal()
        for before in self._standing:
            now = next((entry for entry in ran.entries if entry.seq == before.seq), None)
            if now != before:
                ran.broken.append(f"the entry of {before.key} stood in the journal, and does not stand as it did")
        if ran.state != "held":
            ran.doubts = ran.doubts if self._words else []
        ran.effects = tally(self._effects())
        if self._lab.effects is not None:
            ran.outside = self._lab.effects(ran.run_id)

    def _journal(self) -> list[Entry]:
        rows = self._connection.run(JOURNAL, {"run": self.ran.run_id})
        return [Entry(*row) for row in rows]

    def close(self) -> None:
        """End its processes, and say that they are gone."""
        for child in self._children:
            child.kill()
            with contextlib.suppress(Exception):  # the database is gone, and with it all that this is for
                self._connection.run(*leases.release_worker(child.job.worker_id, False))


# ---------------------------------------------------------------------- processes


class _Child:
    """A process that executes one run, seen from its parent."""

    def __init__(self, wire: socket.socket, job: Job, end: Callable[[int], None]) -> None:
        self.job = job
        self.commits = 0  # that it has begun
        self._end = end
        self._wire = wire
        self._unread = b""
        self._pid: int | None = None
        self._failure: str | None = None
        self._gone = False

    def go(self) -> None:
        """Let it work, once it has imported its module.

        Raises:
            ConfigurationError: it cannot: the module does not import, or has no such workflow.
        """
        end = time.monotonic() + _START_SECONDS
        while self._pid is None and self._failure is None and not self._gone and time.monotonic() < end:
            self.listen(0.5, self._heard)
        if self._failure is not None:
            raise ConfigurationError(self._failure)
        if self._pid is None:
            raise ConfigurationError(
                f"a process that imports {self.job.module} {'ended' if self._gone else 'did not get ready'}"
            )
        with contextlib.suppress(OSError):
            self._wire.sendall(b"go\n")

    def _heard(self, said: Mapping[str, Any]) -> None:
        if said["kind"] == "ready":
            self._pid = said["pid"]
        elif said["kind"] == "failed":
            self._failure = said["text"]

    def listen(self, seconds: float, hear: Callable[[Mapping[str, Any]], None]) -> bool:
        """Take in what it says in that time; returns early when it has said something. False: it has ended."""
        if self._gone:
            return False
        self._wire.settimeout(max(seconds, 0.0001))
        try:
            data = self._wire.recv(65536)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        self._gone = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            hear(json.loads(line))
        return not self._gone

    def hush(self) -> None:
        """Pass over all that it has said so far."""
        heard: list[Mapping[str, Any]] = [{}]
        while heard or self._unread:
            heard.clear()
            if not self.listen(_LOOK_SECONDS, heard.append):
                return

    def kill(self) -> None:
        """End it, and wait until it has ended."""
        if not self._gone and self._pid is not None:
            self._end(self._pid)
            end = time.monotonic() + _START_SECONDS
            while self.listen(0.5, lambda said: None) and time.monotonic() < end:
                pass
        self._wire.close()  # one that has not come so far ends when it notices

    def shut(self) -> None:
        """Say no more, and hear no more: it ends when it notices. From any thread."""
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)


class Nursery:
    """Makes the processes of `crash_everywhere`: two that have imported replaykit, from which the others are forked.

    They differ in the order of their sets and in their addresses: who is killed is of the first, who takes over of the second.
    Their environment is that of the moment at which the nursery was made. Use it in a `with`.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="replaykit-crash-", ignore_cleanup_errors=True)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._log = Path(self._folder.name) / "log"
        self._makers = [self._spawn(seed) for seed in ("1", "2")]

    def _spawn(self, hash_seed: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "replaykit.testing.crash_child"],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's SIGINT is for us, and we end them
            )
        return process, ours

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all of its processes. May be called twice."""
        with self._lock:
            makers, self._makers = self._makers, []
        for _, wire in makers:
            wire.close()
        for process, _ in makers:
            with process:
                pass
        self._folder.cleanup()

    def new_file(self) -> Path:
        """A name for a file that one run's processes share."""
        return Path(self._folder.name) / f"effects-{next(self._numbers)}"

    def last_words(self) -> str:
        """The end of what its processes have printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-2_000:] if self._log.exists() else ""

    def child(self, generation: int, job: Job) -> _Child:
        """A process for a job. Any thread may ask.

        Raises:
            ConfigurationError: the nursery is closed.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._order(generation, 0, theirs)
        except BaseException:
            ours.close()
            raise
        with contextlib.suppress(OSError):
            ours.sendall(job.model_dump_json().encode() + b"\n")

        def end(pid: int) -> None:
            with contextlib.suppress(ConfigurationError):  # closed: it has ended with all others
                self._order(generation, pid)

        return _Child(ours, job, end)

    def _order(self, generation: int, number: int, *sockets: socket.socket) -> None:
        with self._lock:
            if not self._makers:
                raise ConfigurationError("this Nursery is closed: use it in a `with`, and inside of that")
            try:
                order = f"{number:{ORDER_BYTES}}".encode()
                socket.send_fds(self._makers[generation][1], [order], [each.fileno() for each in sockets])
            except OSError as error:
                raise ConfigurationError(f"a nursery's process has ended:\n{self.last_words()}") from error

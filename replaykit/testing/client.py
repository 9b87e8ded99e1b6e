"""`replaykit.testing.Client`: the client of production over runs that execute here.

What it shares with it is the class: starting, options, handles, results and errors. What it has instead of a database
is an `Engine`, behind the same questions.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, overload
from uuid import UUID

from typing_extensions import override

from replaykit.errors import ConfigurationError, RunNotFound
from replaykit.postgres import mailbox
from replaykit.postgres.runs import RunResult, Started, StartRow
from replaykit.postgres.schema import Bound, Statement
from replaykit.replay.calls import CURRENT_STEP, Moment, Workflow
from replaykit.replay.entries import Entry, Kind, Outcome, State
from replaykit.replay.failures import decode_error
from replaykit.runtime import client as real
from replaykit.runtime.client import Handle, RunInfo
from replaykit.runtime.named import Caller, bind_by_schema
from replaykit.runtime.target import Target
from replaykit.runtime.watcher import ENDED
from replaykit.runtime.words import Word
from replaykit.testing.clock import VirtualClock, moment_of
from replaykit.testing.engine import Engine
from replaykit.testing.memory import Row, as_people_see_it
from replaykit.testing.stubs import Stubs

__all__ = ["Client", "StepRecord"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a run's journal holds of a step, decoded.

    Attributes:
        key: its key in the run, such as `charge#2`; a `key=K` is stored as `=K`.
        name: its name.
        attempts: how many times its body began.
        outcome: `ok`, `error`, `timeout` or `cancelled`; None: it has none yet.
        result: what the workflow got, where the outcome is `ok`.
        error: what the workflow got otherwise.
        failures: the errors of attempts that `retry=` followed with another, oldest first.
        input: its arguments by parameter name.
        idempotency_key: the same on every attempt with the same input.
        started_at: when the last attempt began, by virtual time; None: no attempt has ended.
        at: when the outcome was recorded; None: it has none yet.
    """

    key: str
    name: str
    attempts: int
    outcome: str | None
    result: Any
    error: BaseException | None
    failures: tuple[BaseException, ...]
    input: dict[str, Any]
    idempotency_key: str
    started_at: dt.datetime | None
    at: dt.datetime | None


class Client(real.Client):
    """A `Client` whose runs execute in this event loop, in memory, on virtual time, through the real core and codec.

    Virtual time moves only by `sleep`. A run that waits for it leaves memory and is replayed from the top when its time
    has come, so that a workflow which does not replay is held here as it would be in production.

    Args:
        stubs: functions to call instead of the bodies of steps, by function or by the step's name.
        resources: `step.current().resources`.
        now: the start of virtual time, aware; None: the real time.
        workflows: those that are started by name before they were started by function.
        connection: `step.current().connection()` in bodies of transactional steps, awaited in async ones where its own
            `commit` is async. What is written over it is the test's affair: nothing here commits it or rolls it back.

    Raises:
        ConfigurationError: `now` without a time zone, or a stub for what is no step.
    """

    def __init__(
        self,
        stubs: Mapping[Any, Any] | None = None,
        resources: Any = None,
        now: dt.datetime | None = None,
        workflows: Sequence[Workflow[..., Any]] = (),
        connection: Any = None,
    ) -> None:
        super().__init__()
        self.target = _NoDatabase()
        self._borrower = _NoBorrower()  # type: ignore[assignment]
        self._engine = Engine(VirtualClock(now), Stubs(stubs), resources, connection)
        self._engine.know(workflows)
        self._engine.client = self
        self._sessions = _Sessions(self._engine)  # type: ignore[assignment]

    @overload
    async def start(self, workflow: Workflow[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]: ...
    @overload
    async def start(self, workflow: str, /, *args: Any, **kwargs: Any) -> Handle[Any]: ...
    @override
    async def start(self, workflow: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a run, or find the one that holds the key; it executes while this event loop turns.

        Raises:
            TypeError: the arguments do not fit the workflow's parameters.
            NotJournalable: an argument cannot be recorded without loss.
            WorkflowUnknown: by name, of a workflow that this client has not seen.
            ConfigurationError: by name, an argument does not fit its annotation.
            KeyConflict: the key belongs to a run of another workflow.
        """
        if isinstance(workflow, Workflow):
            self._engine.know([workflow])
        return await super().start(workflow, *args, **kwargs)

    async def sleep(self, until: Moment) -> None:
        """Move virtual time, running what becomes due on the way in the order of time; returns when all has settled.

        Bodies take no virtual time: it waits for those that run. In a body (a stub, too) this makes the body last that
        long: it goes on when somebody else has moved the time. One after the other, not several at once.

        Args:
            until: seconds, a timedelta, or an aware moment.

        Raises:
            ConfigurationError: a moment without a time zone, or what is no number of seconds.
            OutsideRun: in a workflow's own code, where `replaykit.sleep` is meant.
        """
        self._engine.enter()
        await self._engine.sleep_until(self._engine.clock.after(until))

    def now(self) -> dt.datetime:
        """Virtual time, aware, in UTC."""
        return moment_of(self._engine.clock.now())

    async def crash(self, run: Handle[Any] | UUID | str | None = None) -> None:
        """Let the worker of a run die: what its bodies were at is lost, and the run is taken up anew from its journal.

        In a body (a stub, too) this is where it ends: `await step.current().client.crash()` after what it did outside shows what
        becomes of a call whose outcome was never recorded. Without a worker a run has nothing to lose.

        Args:
            run: its handle, id or key; None: the run whose body this is.

        Raises:
            RunNotFound: no run has that id or key.
            ConfigurationError: no run is named, and this is no body.
        """
        self._engine.enter()
        if run is None:
            info = CURRENT_STEP.get()
            if info is None:
                raise ConfigurationError("crash() outside of a step's body: say which run, as in client.crash(handle)")
            run = info.run_id
        await self._engine.crash(self._run_of(run).id)

    def steps(self, run: Handle[Any] | UUID | str) -> Mapping[str, StepRecord]:
        """The steps of a run so far, by key, in the order in which their bodies began.

        Args:
            run: its handle, id or key.

        Raises:
            RunNotFound: no run has that id or key.
        """
        row = self._run_of(run)
        calls = self._engine.calls.get(row.id, {})
        return _Steps({key: self._record(row, key) for key in calls})

    def _run_of(self, run: Handle[Any] | UUID | str) -> Row:
        reference = (run._id or run._named or "") if isinstance(run, Handle) else run
        return _found(self._engine.memory.find(reference), reference)

    def _record(self, row: Row, key: str) -> StepRecord:
        call = self._engine.calls[row.id][key]
        entry: Entry | None = None
        for standing in row.standing:
            if standing.kind == Kind.STEP and standing.key == key:
                entry = standing
        ok = entry is not None and entry.outcome == Outcome.OK
        failed = sorted((a for a in row.attempts if a.key == key), key=lambda a: a.attempt)
        started = [a.started_at for a in failed] + ([entry.started_at] if entry is not None else [])
        return StepRecord(
            key=key,
            name=call.name,
            attempts=self._engine.tries[row.id][key],
            outcome=None if entry is None else str(entry.outcome),
            result=call.info.decode_result(entry.output or "null") if entry is not None and ok else None,
            error=decode_error(entry.error or "{}") if entry is not None and not ok else None,
            failures=tuple(decode_error(a.error) for a in failed),
            input=call.info.decode_input(call.input.text),
            idempotency_key=call.idempotency_key,
            started_at=None if not started or started[-1] is None else moment_of(started[-1]),
            at=None if entry is None else moment_of(entry.at),
        )

    @override
    async def aclose(self) -> None:
        """Stop the bodies that run. The client keeps its runs and may be used again."""
        self._engine.close()
        self._engine.stubs.warn_of_unused()

    @override
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Steps(dict[str, StepRecord]):
    def __missing__(self, key: str) -> StepRecord:
        raise KeyError(f"no step {key!r} has begun; there are {', '.join(self) or 'none'}")


def _found(row: Row | None, reference: UUID | str) -> Row:
    if row is None:
        what = "id" if isinstance(reference, UUID) else "id or key"
        raise RunNotFound(f"no run has the {what} {str(reference)!r}")
    return row


class _NoDatabase(Target):
    """Stands where a real client says which database it is."""

    @override
    def open(self) -> str:
        raise ConfigurationError(_NO_DATABASE)


class _NoBorrower:
    """Stands where a real client borrows a caller's connection."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(_NO_DATABASE)


_NO_DATABASE: Final = (
    "a testing client has no database, so neither a Worker nor options(conn=) can use it: "
    "take the fixtures replaykit_client and replaykit_worker for that"
)


class _Sessions:
    """Stands where a real client has its connections: every event loop is given the engine."""

    def __init__(self, engine: Engine) -> None:
        self._session = _Session(engine)
        self._engine = engine

    async def here(self) -> _Session:
        """The engine, on the running event loop."""
        self._engine.enter()
        return self._session


class _Session:
    """Answers what a real client asks the database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.starts = self.named = self.watcher = self.line = self

    async def start(self, row: StartRow) -> Started:
        """A new run, or the one that holds the key."""
        engine = self._engine
        engine.workflow(row.workflow)
        started = engine.memory.start(row, engine.clock.now())
        engine.begin_run()
        return started

    async def bind(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: Caller) -> str:
        """The input of a start by name, as JSON text."""
        return bind_by_schema(name, self._engine.workflow(name).info.schema(), args, kwargs)

    async def find(self, reference: UUID | str) -> RunInfo:
        """The run of an id or a key."""
        row = as_people_see_it(_found(self._engine.memory.find(reference), reference))
        return RunInfo(**{name: getattr(row, name) for name in RunInfo.__slots__})

    async def end_of(self, run_id: UUID) -> RunResult | None:
        """Wait for a run's end; None: no such run."""
        return await self._engine.end_of(run_id)

    async def end_now(self, run_id: UUID) -> RunResult | None:
        """A run's end; None: no such run. Raises TimeoutError if it has not ended."""
        result = self._engine.memory.result(run_id)
        if result is not None and result.state not in ENDED:
            raise TimeoutError
        return result

    async def run_all(self, bound: Sequence[Bound], **_: Any) -> list[list[tuple[Any, ...]]]:
        """Answers the statements of a person's verbs, which are values here as everywhere."""
        return [[(self._verb(statement, params),)] for statement, params in bound]

    def _verb(self, statement: Statement, params: Mapping[str, Any]) -> State:
        engine = self._engine
        run_id, now = params["run_id"], engine.clock.now()
        _found(engine.memory.find(run_id), run_id)
        if statement is mailbox.CANCEL:
            state = engine.memory.cancel(run_id, params["by"], now)
        elif statement is mailbox.RETRY:
            state = engine.memory.retry(run_id, params["accept"], params["by"], now)
        elif statement is mailbox.RESOLVE:
            word = Word(params["landed"], params["not_landed"], params["error"], params["comment"])
            state = engine.memory.resolve(run_id, params["key"], word, params["by"], now)
        else:
            raise ConfigurationError(f"the testing client does not know {statement.name}: use a database for this")
        engine.wake(run_id)
        return state

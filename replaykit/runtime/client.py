"""The client: start runs, and wait for what becomes of them.

    client = Client("postgresql://localhost/app")
    handle = await client.options(key="order-42").start(checkout, order)
    receipt = await handle.result()

A start is durable when it returns and idempotent by key. Nothing is opened before the first use; each event loop has
connections of its own (one for questions and starts, one more while a result is awaited).
"""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import math
import threading
import weakref
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Generic, Literal, ParamSpec, Self, SupportsFloat, TypeVar, overload
from uuid import UUID

from replaykit.errors import (
    ConfigurationError,
    KeyConflict,
    RunCancelled,
    RunFailed,
    RunHeld,
    RunNotFound,
)
from replaykit.limits import KEY_BYTES_MAX, Settings
from replaykit.postgres import mailbox
from replaykit.postgres.borrowed import Borrowable, Borrower, Conversation, check_borrowable, insert_run
from replaykit.postgres.database import Database
from replaykit.postgres.leases import live_workflows, parse_workflows
from replaykit.postgres.runs import (
    RunResult,
    Started,
    StartRow,
    find_run,
    parse_results,
    parse_runs,
    run_results,
)
from replaykit.replay.answers import Landed
from replaykit.replay.calls import Moment, Workflow
from replaykit.replay.codec import codec_for
from replaykit.replay.entries import State
from replaykit.replay.failures import decode_error, error_summary
from replaykit.replay.jsontext import check_size
from replaykit.replay.keys import check_name
from replaykit.replay.requests import UNSET, Unset
from replaykit.runtime.forks import leave_to_parent, renew_after_fork
from replaykit.runtime.ids import new_id
from replaykit.runtime.line import Line
from replaykit.runtime.named import Caller, NamedWorkflows, bind_among
from replaykit.runtime.starts import START_LOCK_SECONDS, Starts
from replaykit.runtime.target import Target
from replaykit.runtime.verbs import ask, checked_accept, checked_by, checked_comment, checked_key
from replaykit.runtime.watcher import ENDED, Watcher
from replaykit.runtime.words import word_of

__all__ = ["CLAIM_TASK", "Client", "Handle", "RunInfo"]

CLAIM_TASK: Final = "replaykit_claims"
"""The name of the task by which a Worker claims: `SyncClient` refuses to block the event loop that it is on."""

_PAYLOAD_BYTES_MAX: Final = Settings().payload_bytes_max
_DELAY_SECONDS_MAX: Final = 100 * 366 * 86_400.0
_MOMENT_MAX: Final = (
    221_845_392_000_000_000  # the year 9000, in microseconds: Postgres writes later ones than Python reads
)
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run's row in `runs`, by the same names. Times are aware, in UTC; `entries` is the length of its journal."""

    id: UUID
    workflow: str
    key: str | None
    state: State
    queue: str
    priority: int
    waiting_for: str | None
    reason: str | None
    created_at: dt.datetime
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    available_at: dt.datetime | None
    parent_id: UUID | None
    forked_from: UUID | None
    recoveries: int
    worker: UUID | None
    protocol: int | None
    entries: int


@dataclass(frozen=True, slots=True)
class _Options:
    """What belongs to the start and not to the workflow."""

    key: str | None = None
    queue: str = "default"
    priority: int = 0
    delay: int | None = None  # microseconds
    available_at: int | None = None  # microseconds since 1970
    conn: Any = None

    def with_(
        self, *, key: str | None, queue: str | None, priority: int | None, delay: Moment | None, conn: Any
    ) -> Self:
        """The same with what is given, checked; what is None, or UNSET, stays."""
        new: dict[str, Any] = {}
        if key is not None:
            new["key"] = _checked_key(key)
        if queue is not None:
            new["queue"] = check_name(queue, "queue")
        if priority is not None:
            new["priority"] = _checked_priority(priority)
        if delay is not None:
            new["delay"], new["available_at"] = _checked_delay(delay)
        if conn is not UNSET:
            check_borrowable(conn)
            new["conn"] = conn
        return replace(self, **new)


@dataclass(frozen=True, slots=True)
class Call:
    """A start as it was asked for: of a workflow, or of a name whose arguments the live workers tell how to bind."""

    name: str
    workflow: Workflow[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    text: str | None
    """The input; None: not bound yet."""
    caller: Caller | None = None
    """Of a start by name: whom to warn."""


class Client:
    """Starts runs and finds them again. Opens at first use; needs no `with`.

    Args:
        dsn: a URL or libpq connection string. None: `REPLAYKIT_DATABASE_URL`, else the embedded Postgres, which
            migrates itself (a URL is never migrated unasked: `replaykit db migrate`).
        schema: the schema that replaykit's tables live in.

    Attributes:
        target: which database it is.
    """

    def __init__(self, dsn: str | None = None, schema: str = "replaykit") -> None:
        self.target = Target(dsn, schema)
        self._sessions = _Sessions(self.target)
        self._borrower = Borrower(schema)
        self._options = _Options()

    @overload
    async def start(self, workflow: Workflow[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]: ...
    @overload
    async def start(self, workflow: str, /, *args: Any, **kwargs: Any) -> Handle[Any]: ...
    async def start(self, workflow: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a run, or find the one that holds the key. The run is durable when this returns.

        Concurrent starts share a commit. By name, the arguments are checked against what the live workers say of the
        workflow; a `RuntimeWarning` says when no live worker has it.

        Raises:
            TypeError: the arguments do not fit the workflow's parameters.
            NotJournalable: an argument cannot be recorded without loss.
            ConfigurationError: by name, an argument does not fit its annotation (the message names the path).
            KeyConflict: the key belongs to a run of another workflow.
            DatabaseUnreachable: no connection could be made.
            psycopg.Error: what the database answers on a caller's own connection (`options(conn=)`).
        """
        call = self._call(workflow, args, kwargs)
        conn = self._options.conn
        if conn is None:
            found = await self._start(call)
        else:
            found = await self._borrower.talk_async(conn, self._conversation(call))
        return self._started(call, found)

    # The parts of a start. SyncClient binds in its caller's thread and sends in its own.

    def _call(self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if isinstance(workflow, Workflow):
            text = workflow.info.bind(args, kwargs, strict=True).text
            return Call(workflow.name, workflow, args, kwargs, text)
        if isinstance(workflow, str):
            return Call(check_name(workflow, "workflow"), None, args, kwargs, None, Caller())
        raise TypeError(f"start({workflow!r}): a workflow is a function with @workflow, or the name of one")

    async def _start(self, call: Call) -> Started:
        """Start a run over a connection of this client's own."""
        session = await self._sessions.here()
        text = call.text
        if text is None:
            assert call.caller is not None
            text = await session.named.bind(call.name, call.args, call.kwargs, call.caller)
        return await session.starts.start(self._row(call.name, text))

    def _conversation(self, call: Call) -> Conversation[Started]:
        """What is said over a caller's connection to start a run."""
        text = call.text
        if text is None:
            assert call.caller is not None
            there = parse_workflows((yield live_workflows()))
            text = bind_among(call.name, there, call.args, call.kwargs, call.caller)
        return (yield from insert_run(self._row(call.name, text)))

    def _row(self, name: str, text: str) -> StartRow:
        check_size(text, _PAYLOAD_BYTES_MAX, f"the input of {name}")
        asked = self._options
        return StartRow(
            id=new_id(),
            workflow=name,
            input=text,
            key=asked.key,
            queue=asked.queue,
            priority=asked.priority,
            delay=asked.delay,
            available_at=asked.available_at,
        )

    def _started(self, call: Call, found: Started) -> Handle[Any]:
        if found.workflow != call.name:
            key = self._options.key
            raise KeyConflict(f"key {key!r} belongs to run {found.id} of {found.workflow!r}, not of {call.name!r}")
        return Handle(self, call.workflow, run_id=found.id, created=found.id == found.asked)

    def options(
        self,
        *,
        key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: Moment | None = None,
        conn: Borrowable | Unset = UNSET,
    ) -> Self:
        """A client on the same connections that starts with these options; what is None stays as it is.

        Args:
            key: the caller's idempotency key: a second start under it finds the first one's run.
            queue: which workers may take the run.
            priority: smaller runs first.
            delay: the earliest beginning: seconds from now by the database's clock, a timedelta, or an aware moment.
            conn: insert the run over this connection, in its transaction: it is there when, and if, the caller commits.
                psycopg's, or SQLAlchemy's connection or session over psycopg, sync or async.

        Raises:
            ConfigurationError: an option that cannot be stored, or a `conn` that is none.
        """
        twin = copy.copy(self)
        twin._options = self._options.with_(key=key, queue=queue, priority=priority, delay=delay, conn=conn)
        return twin

    @overload
    def handle(self, run: UUID | str) -> Handle[Any]: ...
    @overload
    def handle(self, run: UUID | str, workflow: Workflow[..., T]) -> Handle[T]: ...
    def handle(self, run: UUID | str, workflow: Workflow[..., Any] | None = None) -> Handle[Any]:
        """A handle of a run that is there already; the database is asked when the handle is.

        Args:
            run: its id, or its key.
            workflow: with it, the result is decoded by its annotation.

        Raises:
            ConfigurationError: no run can have such a key.
        """
        if isinstance(run, UUID):
            return Handle(self, workflow, run_id=run)
        return Handle(self, workflow, named=_checked_reference(run))

    async def aclose(self) -> None:
        """Close this event loop's connections. The client may be used again: it opens anew."""
        await self._sessions.close_here()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Handle(Generic[T]):
    """A run, seen from outside. It holds no connection.

    Attributes:
        created: True if the `start` that returned it made the run; False: it was there already.
    """

    __slots__ = ("_client", "_id", "_named", "_workflow", "created")

    def __init__(
        self,
        client: Client,
        workflow: Workflow[..., T] | None,
        *,
        run_id: UUID | None = None,
        named: str | None = None,
        created: bool = False,
    ) -> None:
        self._client = client
        self._workflow = workflow
        self._id = run_id
        self._named = named
        self.created = created

    @property
    def id(self) -> UUID:
        """The run's id. Of a handle by key it is known once `info()` or `result()` was awaited."""
        if self._id is None:
            raise RunNotFound(f"the id of run {self._named!r} is not known yet: await handle.info() first")
        return self._id

    async def info(self) -> RunInfo:
        """The run's row, now.

        Raises:
            RunNotFound: no run has that id or key.
        """
        session = await self._client._sessions.here()
        info = await session.find(self._id or self._named or "")
        self._id = info.id
        return info

    async def result(self, timeout: Moment | None = None) -> T:
        """Wait for the run's end and return its result.

        Args:
            timeout: seconds, a timedelta, or an aware moment; None: as long as it takes, through outages.

        Raises:
            RunFailed: the run failed; its error is `__cause__`.
            RunHeld: the run waits for a person.
            RunCancelled: the run was cancelled.
            RunNotFound: no run has that id or key.
            TimeoutError: the builtin; the run goes on.
        """
        return self._outcome(await self._ended(timeout))

    async def _ended(self, timeout: Moment | None) -> RunResult:
        """How the run has ended, once it has."""
        seconds = seconds_until(timeout)
        try:
            # Without time to wait there is still one look: `timeout=0` asks whether the run has ended.
            async with asyncio.timeout(seconds or None):
                return await self._end(wait=seconds != 0)
        except TimeoutError:
            raise TimeoutError(f"run {self._id or self._named} has not ended within {seconds:g} s") from None

    async def _end(self, *, wait: bool) -> RunResult:
        session = await self._client._sessions.here()
        run_id = self._id or (await self.info()).id
        end = await session.watcher.end_of(run_id) if wait else await session.end_now(run_id)
        if end is None:
            raise RunNotFound(f"no run has the id {run_id}")
        return end

    async def cancel(self, by: str | None = None) -> State:
        """Ask the run to end. Asking again changes nothing; of a held run, it ends what cannot go on.

        A run that nobody has begun is `cancelled` when this returns. Any other gets the request at its next moment: its
        root task is cancelled as asyncio cancels tasks, and may clean up in steps. Await `result()` for the end.

        Args:
            by: who asks, for people.

        Returns:
            The run's state after the request. A run that has ended keeps its end.

        Raises:
            RunNotFound: no run has that id or key.
        """
        by = checked_by(by)
        session, run_id = await self._found()
        return await ask(session.line, mailbox.cancel(run_id, by))

    async def retry(self, accept: Literal["inputs"] | None = None, by: str | None = None) -> State:
        """Take a failed or held run on. A failed one goes on from before the error that it died of: what succeeded is not run
        again.

        Args:
            accept: "inputs": take the recorded results although the code now asks with other inputs.
            by: who asks, for people.

        Returns:
            The run's state after the request: pending.

        Raises:
            NotRetryable: the run is neither failed nor held.
            RunNotFound: no run has that id or key.
        """
        bound = checked_accept(accept), checked_by(by)
        session, run_id = await self._found()
        return await ask(session.line, mailbox.retry(run_id, *bound))

    async def resolve(
        self, key: str, answer: Landed[Any] | BaseException, *, by: str | None = None, comment: str | None = None
    ) -> State:
        """Say what became of a call that is in doubt; the run goes on at once.

        The same word again, of whoever lost the answer, changes nothing. A value that does not fit the step's annotation
        holds the run again, and another word may be given.

        Args:
            key: the step's key.
            answer: `Landed(value)`: it happened, and the step returns this. `NotLanded()`: it did not; after a worker's death
                the body runs again, after an error that error is raised. An error, such as `InDoubt()`: nobody knows; it is
                raised by the step.
            by: who says so, for people.
            comment: how they know, for people.

        Returns:
            The run's state after it: pending.

        Raises:
            NotResolvable: no call of that key is in doubt, or another word was given for it, which the message names.
            RunNotFound: no run has that id or key.
            NotJournalable: the value has no JSON, or is too large.
            ConfigurationError: no such answer, or a text that cannot be stored.
        """
        key, by, comment = checked_key(key), checked_by(by), checked_comment(comment)
        word = word_of(answer, comment)
        session, run_id = await self._found()
        bound = mailbox.resolve(
            run_id,
            key,
            landed=word.landed,
            not_landed=word.not_landed,
            fail=word.fail,
            by=by,
            comment=word.comment,
            error=word.error,
        )
        return await ask(session.line, bound)

    async def _found(self) -> tuple[_Session, UUID]:
        return await self._client._sessions.here(), self._id or (await self.info()).id

    def _outcome(self, ended: RunResult) -> T:
        of = f"run {ended.id} of {ended.workflow}"
        if ended.state == State.SUCCEEDED:
            return self._decoded(ended.output)
        if ended.state == State.HELD:
            raise RunHeld(f"{of} is held: {ended.reason}", reason=ended.reason or "")
        if ended.state == State.CANCELLED:
            raise RunCancelled(f"{of} was cancelled")
        text = ended.error or "{}"
        kind, message, line = error_summary(text)
        where = f" ({line})" if line else ""
        raise RunFailed(
            f"{of} failed: {kind.removeprefix('builtins.')}: {message}{where}", type=kind, message=message
        ) from decode_error(text)

    def _decoded(self, text: str | None) -> T:
        if text is None:
            text = "null"
        if self._workflow is not None:
            result: T = self._workflow.info.decode_result(text)
            return result
        value: T = codec_for(Any).decode(text)
        return value

    def __repr__(self) -> str:
        of = f" of {self._workflow.name}" if self._workflow is not None else ""
        return f"<Handle {self._id or self._named}{of}>"


class _Session:
    """What a client has on one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._opening = asyncio.Lock()
        self._ready = False

    async def open(self) -> None:
        """Find the database and see that its schema fits; again at the next use if that fails."""
        if self._ready:
            return
        async with self._opening:
            if self._ready:
                return
            dsn = await asyncio.to_thread(self._target.open)
            database = Database(dsn, self._target.schema)
            await database.check()
            self.line = Line(database, lock_timeout_seconds=START_LOCK_SECONDS)
            self.starts = Starts(self.line, database)
            self.watcher = Watcher(database)
            self.named = NamedWorkflows(self.line)
            self._ready = True

    async def find(self, reference: UUID | str) -> RunInfo:
        """The run of an id or a key.

        Raises:
            RunNotFound: there is none.
        """
        for row in parse_runs(await self.line.run(find_run(str(reference)))):
            if row.id == _as_id(reference) or row.key == reference:  # people's short forms are for people
                return RunInfo(**{name: getattr(row, name) for name in RunInfo.__slots__})
        raise RunNotFound(f"no run has the {'id' if isinstance(reference, UUID) else 'id or key'} {str(reference)!r}")

    async def end_now(self, run_id: UUID) -> RunResult | None:
        """The run's end; None: no such run. Raises TimeoutError if it has not ended."""
        result = parse_results(await self.line.run(run_results([run_id]))).get(run_id)
        if result is not None and result.state not in ENDED:
            raise TimeoutError
        return result

    async def close(self) -> None:
        """Send what was asked for, then close the connections."""
        async with self._opening:
            if self._ready:
                self._ready = False
                await self.starts.close()
                await self.watcher.close()
                await self.line.close()

    def abandon(self) -> None:
        """Drop the connections of an event loop that is closed."""
        if self._ready:
            self._ready = False
            self.watcher.abandon()
            self.starts.abandon()
            self.line.abandon()

    def __del__(self) -> None:
        self.abandon()


class _Sessions:
    """The sessions of a client and its twins, one for each event loop that uses it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = weakref.WeakKeyDictionary()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a child: the loops and their connections are the parent's."""
        leave_to_parent([*self._by_loop.items()])
        self._lock = threading.Lock()
        self._by_loop = weakref.WeakKeyDictionary()

    async def here(self) -> _Session:
        """The running loop's session, open."""
        loop = asyncio.get_running_loop()
        session = self._by_loop.get(loop)
        if session is None:
            with self._lock:
                self._forget_closed()
                session = self._by_loop.setdefault(loop, _Session(self._target))
        await session.open()
        return session

    async def close_here(self) -> None:
        """Close the running loop's session, and let go of an embedded Postgres that no other loop uses."""
        with self._lock:
            session = self._by_loop.pop(asyncio.get_running_loop(), None)
            self._forget_closed()
            last = not self._by_loop
        if session is not None:
            await session.close()
        if last:
            await asyncio.to_thread(self._target.close)

    def _forget_closed(self) -> None:
        for loop in [loop for loop in self._by_loop if loop.is_closed()]:
            self._by_loop.pop(loop).abandon()


def seconds_until(moment: Moment | None) -> float | None:
    """Seconds from now, never negative; None stays None.

    Raises:
        ConfigurationError: a moment without a time zone, or what is no number of seconds.
    """
    if moment is None:
        return None
    if isinstance(moment, dt.datetime):
        seconds = (_aware("timeout", moment) - dt.datetime.now(dt.UTC)).total_seconds()
    else:
        seconds = _seconds("timeout", moment)
    return max(0.0, seconds)


def _checked_delay(delay: Moment) -> tuple[int | None, int | None]:
    """Microseconds from now on, or microseconds since 1970."""
    if isinstance(delay, dt.datetime):
        available_at = max(0, (_aware("delay", delay) - _EPOCH) // dt.timedelta(microseconds=1))
        if available_at > _MOMENT_MAX:
            raise ConfigurationError(f"delay={delay!r}: a run begins before the year 9000")
        return None, available_at
    seconds = max(0.0, _seconds("delay", delay))
    if seconds > _DELAY_SECONDS_MAX:
        raise ConfigurationError(f"delay={delay!r}: more than a hundred years")
    return round(seconds * 1_000_000), None


def _aware(option: str, moment: dt.datetime) -> dt.datetime:
    if moment.utcoffset() is None:
        raise ConfigurationError(f"{option}={moment!r}: a moment needs a time zone, as datetime(..., tzinfo=UTC)")
    return moment


def _seconds(option: str, moment: float | dt.timedelta) -> float:
    seconds = moment.total_seconds() if isinstance(moment, dt.timedelta) else _number(moment)
    if math.isnan(seconds):
        raise ConfigurationError(f"{option}={moment!r}: not a number of seconds")
    return seconds


def _number(moment: float) -> float:
    """NaN for what is no number, or none that a clock can count."""
    try:
        return float(moment) if isinstance(moment, SupportsFloat) else math.nan  # a str is none
    except OverflowError:
        return math.nan


def _as_id(reference: UUID | str) -> UUID | None:
    """The id that a text is in any of its forms (capitals, too)."""
    try:
        return UUID(str(reference))
    except ValueError:
        return None


def _checked_reference(run: str) -> str:
    try:
        if isinstance(run, str) and b"\0" not in run.encode():
            return run
    except UnicodeEncodeError:  # a lone surrogate
        pass
    raise ConfigurationError(f"run {run!r}: a run is named by its id, or by its key, which is text without NUL")


def _checked_key(key: str) -> str:
    if not isinstance(key, str) or not key or "\0" in key:
        raise ConfigurationError(f"key={key!r}: a run's key is a non-empty string without NUL")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"key={key!r} holds a lone surrogate") from None
    if size > KEY_BYTES_MAX:
        raise ConfigurationError(f"key={key[:40]!r}... has {size} bytes: at most {KEY_BYTES_MAX}")
    return key


def _checked_priority(priority: int) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**31) <= priority < 2**31:
        raise ConfigurationError(f"priority={priority!r}: a priority is a whole number of 32 bits; smaller runs first")
    return priority

"""What a workflow calls: `step`, `sleep`, `now`, `rng`, `uuid4`, and the `@workflow` it is.

Inside a run they ask the execution whose loop is running; inside a step's body `step(...)` is a plain call; anywhere else
each raises one sentence that says what to do instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Never, ParamSpec, Protocol, TypeVar, overload

from replaykit.errors import ConfigurationError, Gone, OutsideRun
from replaykit.replay.execution import EPOCH, Execution, current_execution
from replaykit.replay.keys import check_name, check_observation, key_uuid
from replaykit.replay.loop import RunLoop
from replaykit.replay.requests import POLICY_ATTRIBUTE, UNSET, Pending, Policy, Unset
from replaykit.replay.retrying import check_retry
from replaykit.replay.signature import FunctionInfo, describe

if TYPE_CHECKING:
    import psycopg
    from psycopg.rows import TupleRow
    from tenacity import BaseRetrying

__all__ = [
    "CURRENT_STEP",
    "Committing",
    "EffectSide",
    "Moment",
    "Step",
    "StepCall",
    "StepInfo",
    "Workflow",
    "now",
    "rng",
    "sleep",
    "step",
    "uuid4",
    "workflow",
]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
AsyncKind = TypeVar("AsyncKind", bound="_AsyncConnection")
SyncKind = TypeVar("SyncKind", bound="_SyncConnection")

Moment = float | dt.timedelta | dt.datetime
"""Wherever a time is asked for: seconds, a timedelta, or an aware moment."""


class Committing(Protocol):
    """An observation on its way into the journal: nobody has to wait for it, an async body may `await` its commit, a sync
    one may call `result()`."""

    def __await__(self) -> Generator[Any, Any, None]: ...

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit, in a thread.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: the time is over; the observation is still on its way.
        """


class EffectSide(Protocol):
    """What few steps ask for, behind `StepInfo`: the runtime's object for this try of the step."""

    @property
    def written_at(self) -> int | None:
        """Microseconds since 1970 of its intent; None without one."""

    @property
    def connect(self) -> Callable[[type[Any] | None], Any] | None:
        """Gives the body's own connection of a class (None: psycopg's own, of the body's sort): in an async body an awaitable of
        it, in a sync one itself. None: the step is not transactional."""

    def observed(self) -> Sequence[tuple[str, str]]:
        """(kind, id) of all observations of the step, oldest first: of earlier tries, and of this one, committed or not."""
        ...

    def observe(self, kind: str, id: str) -> Committing:
        """Send an observation with the next commit. Called in the body: on the worker's loop or in a thread."""
        ...


class _AsyncConnection(Protocol):
    async def commit(self) -> None: ...


class _SyncConnection(Protocol):
    def commit(self) -> None: ...


class StepInfo:
    """What a step's body may know of itself: `step.current()`. So may its reconciler.

    Attributes:
        run_id: the run.
        key: the step's key in its run, such as `1/charge#2`.
        attempt: which try of this step this is, from 1, for the whole life of the run.
        resources: what the worker's `lifespan` yielded.
        client: a `Client` on the worker's database.
    """

    __slots__ = (
        "_decode_input",
        "_effects",
        "_idempotency_key",
        "_input",
        "attempt",
        "client",
        "key",
        "resources",
        "run_id",
    )

    def __init__(
        self,
        run_id: uuid.UUID,
        key: str,
        attempt: int,
        idempotency_key: str,
        decode_input: Callable[[], dict[str, Any]],
        resources: Any = None,
        client: Any = None,
        effects: EffectSide | None = None,
    ) -> None:
        self.run_id = run_id
        self.key = key
        self.attempt = attempt
        self._idempotency_key = idempotency_key
        self.resources = resources
        self.client = client
        self._decode_input = decode_input
        self._input: dict[str, Any] | None = None
        self._effects = effects

    @property
    def idempotency_key(self) -> str:
        """32 hex digits, the same on every attempt with the same input, in every process: send it with the request.

        Raises:
            OutsideRun: the step has `durability="async"`: its result may be lost and its body run again after others have
                gone on from it, so no key can stand for one call.
        """
        if not self._idempotency_key:
            raise OutsideRun(
                f"step {self.key} has durability='async' and so no idempotency key: give it durability='sync'"
            )
        return self._idempotency_key

    @property
    def idempotency_uuid(self) -> uuid.UUID:
        """The same as a UUID (version 8), for an interface that wants one.

        Raises:
            OutsideRun: the step has `durability="async"`.
        """
        return key_uuid(self.idempotency_key)

    @property
    def input(self) -> dict[str, Any]:
        """The recorded arguments by parameter name, decoded when first asked for."""
        if self._input is None:
            self._input = self._decode_input()
        return self._input

    @property
    def written_at(self) -> dt.datetime | None:
        """When the intent of this attempt was written, aware, in UTC: no earlier can its call have landed. None without one."""
        at = None if self._effects is None else self._effects.written_at
        return None if at is None else EPOCH + dt.timedelta(microseconds=at)

    @property
    def observed(self) -> tuple[tuple[str, str], ...]:
        """`(kind, id)` of all that this step has observed, oldest first, earlier attempts included."""
        return () if self._effects is None else tuple(self._effects.observed())

    def observe(self, kind: str, id: str) -> Committing:
        """Tell an identifier of the world outside, such as `observe("ticket", "123")`: it is committed as soon as can be, seen by
        later attempts and by the reconciler, and found by `replaykit find ticket:123`.

        Args:
            kind: what the identifier names, without a colon.
            id: the identifier.

        Returns:
            What an async body may await, and a sync one wait for with `.result()`: the commit. Nobody has to.

        Raises:
            ConfigurationError: no text, an empty one, or one that cannot be stored.
            OutsideRun: the step has `durability="async"`, or this is no longer its body.
        """
        check_observation(kind, id, self.key)
        if not self._idempotency_key:
            raise OutsideRun(
                f"observe({kind!r}, ...) in step {self.key}, which has durability='async' and may run again after others "
                "have gone on from it: give it durability='sync'"
            )
        if self._effects is None:
            raise OutsideRun(f"observe({kind!r}, ...) in step {self.key}: no run here takes observations")
        return self._effects.observe(kind, id)

    @overload
    def connection(self) -> Awaitable[psycopg.AsyncConnection[TupleRow]]: ...
    @overload
    def connection(self, kind: type[AsyncKind]) -> Awaitable[AsyncKind]: ...
    @overload
    def connection(self, kind: type[SyncKind]) -> SyncKind: ...
    def connection(self, kind: type[Any] | None = None) -> Any:
        """The connection of a step with `effect="transactional"`, on the journal's database: what the body writes over it is
        committed together with the step's entry, or not at all. It is committed for the body, never by it.

        Args:
            kind: psycopg's `AsyncConnection` (the default) or SQLAlchemy's `AsyncConnection` or `AsyncSession`: await what this
                returns. In a sync body psycopg's `Connection` or SQLAlchemy's `Connection` or `Session`: itself.

        Raises:
            OutsideRun: the step is not transactional.
            ConfigurationError: another class, or one of the other sort of body.
        """
        connect = None if self._effects is None else self._effects.connect
        if connect is None:
            raise OutsideRun(
                f"connection() in step {self.key}, which is not transactional: declare it with effect='transactional'"
            )
        return connect(kind)

    def __repr__(self) -> str:
        return f"<step {self.key}, attempt {self.attempt} of run {self.run_id}>"


CURRENT_STEP: Final[contextvars.ContextVar[StepInfo | None]] = contextvars.ContextVar("replaykit_step", default=None)
"""Set by the executor in a body's own context."""


class StepCall:
    """Calls functions as steps, with the options it was made with."""

    def __init__(self, options: Policy | None = None) -> None:
        self._options = options

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]: ...
    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` as a step: recorded when it completes, never run again.

        Args:
            fn: an async function, or a sync one (it runs in a thread). Not an (async) generator function.

        Raises:
            TypeError: the arguments do not fit.
            OutsideRun: there is no run here: call `fn` itself.
        """
        loop = asyncio._get_running_loop()
        if type(loop) is RunLoop:
            return loop.execution.call_step(fn, args, kwargs, self._options)  # type: ignore[attr-defined]
        if CURRENT_STEP.get() is not None:
            return _plain_call(fn, args, kwargs)
        name = getattr(fn, "__qualname__", repr(fn))
        raise OutsideRun(f"step({name}, ...) outside of a run: call {name}(...) itself, or do this in a @workflow")


class Step(StepCall):
    """`step`: calls a function as a step, and declares how steps are to be treated."""

    def options(
        self,
        *misplaced: Never,
        name: str | None = None,
        key: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Literal["sync", "async"] | Unset = UNSET,
    ) -> StepCall:
        """A `step` with these options for one call: `step.options(name="charge")(fn, x)`. They go before declared ones.

        Args:
            name: the step's name, instead of the function's.
            key: its key, absolute in the run, instead of one by scope and count; used twice in a run it holds the run.
            retry: a tenacity `AsyncRetrying` or `Retrying`: when and how often a failed body is tried again. Each decision
                is a row of `attempts`; the last error itself is raised, never `RetryError`. None: not at all.
            timeout: for each attempt: seconds, a timedelta, or an aware moment. A body that takes longer fails with
                `TimeoutError`; an async one is cancelled, a sync one's late result is dropped. None: as long as it takes.
            durability: "async" hands the result on before its commit, for cheap steps that may run again: see
                `docs/explanation/durability.md`.

        Raises:
            ConfigurationError: an option that cannot work as given.
        """
        _refuse_bare("step.options", misplaced)
        return StepCall(_policy(name, key, retry, timeout, durability))

    def policy(
        self,
        *misplaced: Never,
        name: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Literal["sync", "async"] | Unset = UNSET,
    ) -> Callable[[F], F]:
        """Declare the same options on the function, which stays a plain function.

        Raises:
            ConfigurationError: an option that cannot work as given, or no parentheses: `@step.policy` alone.
        """
        if len(misplaced) == 1 and callable(misplaced[0]):
            raise ConfigurationError(
                f"@step.policy on {_told(describe(misplaced[0]))} says nothing: write @step.policy(retry=..., timeout=...)"
            )
        _refuse_bare("step.policy", misplaced)
        declared = _policy(name, None, retry, timeout, durability)

        def declare(function: F) -> F:
            setattr(function, POLICY_ATTRIBUTE, declared)
            return function

        return declare

    def current(self) -> StepInfo:
        """The step whose body runs here.

        Raises:
            OutsideRun: no body of a step runs here.
        """
        info = CURRENT_STEP.get()
        if info is None or current_execution() is not None:
            raise OutsideRun(
                "step.current() outside of a step's body: only the function that step(...) calls has a current step"
            )
        return info


step: Final = Step()
"""Calls a function as a step: `await step(fn, x)`; `step.options(...)`, `step.policy(...)`, `step.current()`."""


def _policy(
    name: str | None,
    key: str | None,
    retry: BaseRetrying | Unset | None,
    timeout: Moment | Unset | None,
    durability: Literal["sync", "async"] | Unset,
) -> Policy:
    if name is not None:
        name = check_name(name, "step")
    if retry is not None and retry is not UNSET:
        check_retry(retry)
    if timeout is not None and timeout is not UNSET:
        _check_timeout(timeout)
    if durability is not UNSET and durability not in ("sync", "async"):
        raise ConfigurationError(f"durability={durability!r}: it is 'sync' (the default) or 'async'")
    return Policy(name, key, retry, timeout, durability)


def _check_timeout(timeout: Moment) -> None:
    if isinstance(timeout, dt.datetime):
        if timeout.utcoffset() is None:
            raise ConfigurationError(
                f"timeout={timeout!r}: a moment needs a time zone, such as datetime(..., tzinfo=UTC)"
            )
        return
    if isinstance(timeout, dt.timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise ConfigurationError(f"timeout={timeout!r}: it is a number of seconds, a timedelta, or an aware moment")
    if not seconds > 0:  # NaN is not above 0 either
        raise ConfigurationError(f"timeout={timeout!r}: no attempt could ever end in time; None means no limit")


async def _plain_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A sync function would block the worker's loop: it goes to a thread here as it does as a step.
    if describe(fn).is_async:
        return await fn(*args, **kwargs)
    return await asyncio.to_thread(fn, *args, **kwargs)


def _told(info: FunctionInfo) -> str:
    return info.label if info.name is None else f"{info.name} ({info.line})"


def _refuse_bare(what: str, misplaced: tuple[Any, ...]) -> None:
    if misplaced:
        one = misplaced[0]
        name = _told(describe(one)) if callable(one) else repr(one)
        raise ConfigurationError(
            f"{what} was given {name} by place: it takes options by name alone, and what it returns takes the function"
        )


class Workflow(Generic[P, T]):
    """An async function whose runs survive. Made by `@workflow`.

    Attributes:
        fn: the plain function.
        name: what runs of it are called, in Python, SQL and on the command line.
    """

    def __init__(self, fn: Callable[P, Coroutine[Any, Any, T]], name: str | None = None) -> None:
        self.fn = fn
        self.info: FunctionInfo = describe(fn)
        if not self.info.is_async:
            raise ConfigurationError(f"@workflow on {_told(self.info)}: a workflow is an async function (`async def`)")
        chosen = name if name is not None else getattr(fn, "__name__", None)
        if chosen is None or chosen == "<lambda>":
            raise ConfigurationError(
                f"@workflow on {_told(self.info)}: it has no name of its own; give one with @workflow(name=...)"
            )
        self.name = check_name(chosen, "workflow")
        self.module: str = getattr(fn, "__module__", "?")
        self.__name__ = getattr(fn, "__name__", self.name)
        self.__qualname__ = getattr(fn, "__qualname__", self.name)
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Inside a workflow: run inline, as a plain async function. Anywhere else it raises."""
        execution = current_execution()
        if execution is None:
            raise OutsideRun(
                f"{self.name}(...) outside of a run: start one with `await client.start({self.name}, ...)`, in a test "
                f"with the client of replaykit.testing; the plain function is {self.name}.fn"
            )
        if execution.loop.gone:
            raise Gone
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<workflow {self.name} of {self.module}>"


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Workflow[P, T]: ...


@overload
def workflow(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Workflow[P, T]: ...
@overload
def workflow(*, name: str | None = None) -> _Decorator: ...
def workflow(fn: Any = None, /, *, name: str | None = None) -> Any:
    """Make an async function a workflow: `@workflow` or `@workflow(name="checkout")`."""
    if fn is not None:
        return Workflow(fn)

    def decorate(function: Callable[..., Coroutine[Any, Any, Any]]) -> Workflow[..., Any]:
        return Workflow(function, name)

    return decorate


def _here(what: str, instead: str) -> Execution:
    execution = current_execution()
    if execution is None:
        raise OutsideRun(f"{what} outside of a run's own code: {instead}")
    return execution


async def sleep(until: Moment) -> None:
    """Wait durably: seconds, a timedelta, or until an aware moment. `asyncio.sleep(seconds)` does the same.

    Raises:
        OutsideRun: not in a workflow's own code.
        ConfigurationError: a moment without a time zone.
    """
    execution = _here("sleep()", "use asyncio.sleep() there")
    if isinstance(until, dt.datetime):
        if until.utcoffset() is None:
            raise ConfigurationError(f"sleep({until!r}): a moment needs a time zone, such as datetime(..., tzinfo=UTC)")
        seconds = (until - execution.now()).total_seconds()
    else:
        seconds = until.total_seconds() if isinstance(until, dt.timedelta) else float(until)
    await asyncio.sleep(max(0.0, seconds))


def now() -> dt.datetime:
    """The run's clock, aware, in UTC: the time of the last recorded entry, the same in every replay.

    Raises:
        OutsideRun: not in a workflow's own code.
    """
    return _here("now()", "use datetime.now(UTC) there").now()


def rng() -> random.Random:
    """A generator of chance that gives the same numbers in every replay; each call gives a new, independent one.

    Raises:
        OutsideRun: not in a workflow's own code.
    """
    return _here("rng()", "use the random module there").rng()


def uuid4() -> uuid.UUID:
    """A UUID that is the same in every replay and in no other run.

    Raises:
        OutsideRun: not in a workflow's own code.
    """
    return _here("uuid4()", "use uuid.uuid4() there").uuid4()

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
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Never, ParamSpec, Protocol, TypeAlias, overload

from typing_extensions import TypeVar

from replaykit.errors import ConfigurationError, Gone, NotLanded, OutsideRun
from replaykit.replay.answers import Landed, Unknown
from replaykit.replay.declared import check_call, declare, effect_of
from replaykit.replay.entries import Effect
from replaykit.replay.execution import EPOCH, Execution, current_execution
from replaykit.replay.keys import check_name, check_observation, key_uuid
from replaykit.replay.loop import RunLoop
from replaykit.replay.requests import POLICY_ATTRIBUTE, UNSET, Pending, Policy, Unset
from replaykit.replay.sagas import SagaBlock
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
    "saga",
    "sleep",
    "step",
    "uuid4",
    "workflow",
]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L", default=object)
C = TypeVar("C", bound=Callable[..., object], default=Callable[[object], object])
L_contra = TypeVar("L_contra", contravariant=True)
C_co = TypeVar("C_co", covariant=True)
AsyncKind = TypeVar("AsyncKind", bound="_AsyncConnection")
SyncKind = TypeVar("SyncKind", bound="_SyncConnection")

Moment = float | dt.timedelta | dt.datetime
"""Wherever a time is asked for: seconds, a timedelta, or an aware moment."""

Durability: TypeAlias = Literal["sync", "async"]
EffectName: TypeAlias = Literal["repeatable", "idempotent", "irreversible", "transactional"]
Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]


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
        "_effects_of",
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
        effects_of: Callable[[str, int], EffectSide] | None = None,
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
        self._effects_of = effects_of  # makes them for (key, attempt): few plain bodies ever ask

    def _side(self) -> EffectSide | None:
        if self._effects is None and self._effects_of is not None:
            self._effects = self._effects_of(self.key, self.attempt)
        return self._effects

    @property
    def has_key(self) -> bool:
        """Whether there is an idempotency key: not in a step with `durability="async"`."""
        return bool(self._idempotency_key)

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
        side = self._side()
        at = None if side is None else side.written_at
        return None if at is None else EPOCH + dt.timedelta(microseconds=at)

    @property
    def observed(self) -> tuple[tuple[str, str], ...]:
        """`(kind, id)` of all that this step has observed, oldest first, earlier attempts included."""
        side = self._side()
        return () if side is None else tuple(side.observed())

    def observe(self, kind: str, id: str) -> Committing:
        """Tell an identifier of the world outside, such as `observe("ticket", "123")`: it is committed as soon as can be, seen by
        later attempts and by the reconciler, and found by `replaykit find ticket:123`.

        Args:
            kind: what the identifier names, without a colon.
            id: the identifier.

        Returns:
            What an async body may await, and a sync one wait for with `.result()`: the commit. Nobody has to.

        Raises:
            ConfigurationError: no text, an empty one, or one that cannot be stored; the step has `durability="async"`.
            OutsideRun: the step's try is over.
        """
        check_observation(kind, id, self.key)
        if not self._idempotency_key:
            raise ConfigurationError(
                f"observe({kind!r}, ...) in step {self.key}, which has durability='async' and may run again after others "
                "have gone on from it: give it durability='sync'"
            )
        side = self._side()
        if side is None:
            raise OutsideRun(f"observe({kind!r}, ...) in step {self.key}: no run here takes observations")
        return side.observe(kind, id)

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
        side = self._side()
        connect = None if side is None else side.connect
        if connect is None:
            raise OutsideRun(
                f"connection() in step {self.key}, which is not transactional: declare it with effect='transactional'"
            )
        return connect(kind)

    def __repr__(self) -> str:
        return f"<step {self.key}, attempt {self.attempt} of run {self.run_id}>"


Reconciler: TypeAlias = Callable[[StepInfo], Awaitable[Landed[L] | NotLanded | Unknown]]
"""What `reconcile=` takes, for a step whose result is an `L`."""

if TYPE_CHECKING:
    # What checkers see of a call or a declaration with reconcile= or compensate=: the function's result R has to be an L, and
    # what the compensation C takes. Matched by self, which is all that binds R from two sides at once. The first rows are for
    # what takes any object, such as a lambda: a match with it would leave no more of R than `object`.
    # No `Any` in the type of a declared async function: mypy would find its step(...) ambiguous.

    class TypedCall(Generic[L_contra, C_co]):
        @overload
        def __call__(
            self: TypedCall[object, Callable[[object], object]],
            fn: Callable[P, Coroutine[Any, Any, R]],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> Pending[R]: ...
        @overload
        def __call__(
            self: TypedCall[object, Callable[[object], object]],
            fn: Callable[P, R],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> Pending[R]: ...
        @overload
        def __call__(
            self: TypedCall[R, Callable[[R], object]],
            fn: Callable[P, Coroutine[Any, Any, R]],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> Pending[R]: ...
        @overload
        def __call__(
            self: TypedCall[R, Callable[[R], object]], fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
        ) -> Pending[R]: ...
        def __call__(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any: ...

    class TypedPolicy(Generic[L_contra, C_co]):
        @overload
        def __call__(self: TypedPolicy[object, Callable[[object], object]], fn: F, /) -> F: ...
        @overload
        def __call__(
            self: TypedPolicy[R, Callable[[R], object]], fn: Callable[P, Coroutine[Any, Any, R]], /
        ) -> Callable[P, Coroutine[object, Never, R]]: ...
        @overload
        def __call__(self: TypedPolicy[R, Callable[[R], object]], fn: Callable[P, R], /) -> Callable[P, R]: ...
        def __call__(self, fn: Any, /) -> Any: ...


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
            ConfigurationError: options that do not go together with what is declared on `fn`; a step with an effect in a body.
        """
        if self._options is not None:
            check_call(self._options, fn)
        loop = asyncio._get_running_loop()
        if type(loop) is RunLoop:
            return loop.execution.call_step(fn, args, kwargs, self._options)  # type: ignore[attr-defined]
        info = CURRENT_STEP.get()
        if info is not None:
            _refuse_effect(fn, self._options, info)
            return _plain_call(fn, args, kwargs)
        name = getattr(fn, "__qualname__", repr(fn))
        raise OutsideRun(f"step({name}, ...) outside of a run: call {name}(...) itself, or do this in a @workflow")


class Step(StepCall):
    """`step`: calls a function as a step, and declares how steps are to be treated."""

    @overload
    def options(
        self,
        *misplaced: Never,
        name: str | None = None,
        key: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Durability | Unset = UNSET,
        effect: EffectName | Unset = UNSET,
        not_landed: Errors | Unset = UNSET,
        key_valid_for: float | dt.timedelta | Unset | None = UNSET,
    ) -> StepCall: ...
    @overload
    def options(
        self,
        *misplaced: Never,
        name: str | None = None,
        key: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Durability | Unset = UNSET,
        effect: EffectName | Unset = UNSET,
        reconcile: Reconciler[L] | Unset | None = UNSET,
        not_landed: Errors | Unset = UNSET,
        compensate: C | Unset | None,
        key_valid_for: float | dt.timedelta | Unset | None = UNSET,
    ) -> TypedCall[L, C]: ...
    @overload
    def options(
        self,
        *misplaced: Never,
        name: str | None = None,
        key: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Durability | Unset = UNSET,
        effect: EffectName | Unset = UNSET,
        reconcile: Reconciler[L] | Unset | None,
        not_landed: Errors | Unset = UNSET,
        key_valid_for: float | dt.timedelta | Unset | None = UNSET,
    ) -> TypedCall[L, Callable[[object], object]]: ...
    def options(
        self,
        *misplaced: Never,
        name: str | None = None,
        key: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Durability | Unset = UNSET,
        effect: EffectName | Unset = UNSET,
        reconcile: Any = UNSET,
        not_landed: Errors | Unset = UNSET,
        compensate: Any = UNSET,
        key_valid_for: float | dt.timedelta | Unset | None = UNSET,
    ) -> Any:
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
            effect: what the body does to the world. "repeatable" (the default): nothing that a second time would spoil.
                "idempotent": the other side recognises a second call by `step.current().idempotency_key`. "irreversible": a
                second call would be a second deed. "transactional": rows over `step.current().connection()`, committed with the
                step's entry.
            reconcile: an async function that asks the world whether a call in doubt landed; it gets the step's `StepInfo`.
            not_landed: an exception class, or a tuple of them, with which the body says that its call did not happen.
            compensate: a function of the step's result that undoes it, as a step of its own: see `saga()`.
            key_valid_for: for how long the other side recognises the key: seconds or a timedelta; None: for ever.

        Raises:
            ConfigurationError: an option that cannot work as given.
        """
        _refuse_bare("step.options", misplaced)
        options = declare(
            whole=False,
            name=name,
            key=key,
            retry=retry,
            timeout=timeout,
            durability=durability,
            effect=effect,
            reconcile=reconcile,
            not_landed=not_landed,
            compensate=compensate,
            key_valid_for=key_valid_for,
        )
        return StepCall(options)

    def policy(
        self,
        *misplaced: Never,
        name: str | None = None,
        retry: BaseRetrying | Unset | None = UNSET,
        timeout: Moment | Unset | None = UNSET,
        durability: Durability | Unset = UNSET,
        effect: EffectName | Unset = UNSET,
        reconcile: Reconciler[L] | Unset | None = UNSET,
        not_landed: Errors | Unset = UNSET,
        compensate: C | Unset | None = UNSET,
        key_valid_for: float | dt.timedelta | Unset | None = UNSET,
    ) -> TypedPolicy[L, C]:
        """Declare the same options on the function, which stays a plain function.

        Raises:
            ConfigurationError: an option that cannot work as given, or no parentheses: `@step.policy` alone.
        """
        if len(misplaced) == 1 and callable(misplaced[0]):
            raise ConfigurationError(
                f"@step.policy on {_told(describe(misplaced[0]))} says nothing: write @step.policy(retry=..., timeout=...)"
            )
        _refuse_bare("step.policy", misplaced)
        declared = declare(
            whole=True,
            name=name,
            retry=retry,
            timeout=timeout,
            durability=durability,
            effect=effect,
            reconcile=reconcile,
            not_landed=not_landed,
            compensate=compensate,
            key_valid_for=key_valid_for,
        )

        def leave(function: Any) -> Any:
            setattr(function, POLICY_ATTRIBUTE, declared)
            return function

        return leave  # type: ignore[return-value]

    def current(self) -> StepInfo:
        """The step whose body runs here, or whose reconciler.

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


def _refuse_effect(fn: Callable[..., Any], options: Policy | None, outer: StepInfo) -> None:
    effect = effect_of(options, fn)
    if effect is not Effect.REPEATABLE:
        name = _told(describe(fn))
        raise ConfigurationError(
            f"step({name}, ...) in the body of step {outer.key}: it has effect={effect.value!r}, and in a body it would be a "
            "plain call without an intent or an entry: call it in the workflow, or as a plain function"
        )


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


def saga() -> SagaBlock:
    """`async with saga():` owes the undoing of each step with `compensate=` that is called inside and succeeds.

    Left by an exception or a cancel it undoes them, newest first, each as a step of its own under the key `~undo:KEY`; then the
    exception goes on. Left well it owes nothing, unless it lies in another one: that owes on. An undoing that fails leaves
    the run `held`, with the list of what was and what was not undone. Without a saga nothing is ever undone.

    Raises:
        OutsideRun: not in a workflow's own code.
    """
    return SagaBlock(_here("saga()", "it belongs around the steps that are to be undone"))

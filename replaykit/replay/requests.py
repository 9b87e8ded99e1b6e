"""What a workflow asks for: a call of a step, as a value, and the awaitable that stands for it."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from replaykit.errors import NotLanded
from replaykit.replay.entries import Effect
from replaykit.replay.signature import BoundInput, FunctionInfo

if TYPE_CHECKING:  # a workflow's module that declares no retry needs no tenacity
    from tenacity import BaseRetrying

__all__ = ["POLICY_ATTRIBUTE", "UNSET", "CallStep", "CancelStep", "Command", "Pending", "Policy", "Unset", "line_of"]

T_co = TypeVar("T_co", covariant=True)

POLICY_ATTRIBUTE: Final = "__replaykit_policy__"
"""Where `@step.policy(...)` leaves its policy; the function stays plain."""


class Unset(Enum):
    """An option that was not given: `None` is an answer of its own (`retry=None`: no retry, whatever was declared)."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""Stands for an option that was not given."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is to be treated: declared on the function, overridden for one call.

    `retry` is a tenacity object; `timeout` is for each attempt: seconds, a timedelta or an aware moment; `durability` says
    whether a result is handed on before its commit ("async"); `effect` and what follows it say what its body does to the
    world, and how that is found out, undone and for how long (seconds, a timedelta) its idempotency key is recognised.
    """

    name: str | None = None
    key: str | None = None
    retry: BaseRetrying | Unset | None = UNSET
    timeout: float | dt.timedelta | dt.datetime | Unset | None = UNSET
    durability: Literal["sync", "async"] | Unset = UNSET
    effect: Effect | Unset = UNSET
    reconcile: Callable[[Any], Coroutine[Any, Any, Any]] | Unset | None = UNSET
    not_landed: tuple[type[BaseException], ...] | Unset = UNSET
    compensate: Callable[..., Any] | Unset | None = UNSET
    key_valid_for: float | dt.timedelta | Unset | None = UNSET

    def over(self, other: Policy | None) -> Policy:
        """These options, completed by those of `other`."""
        if other is None:
            return self
        return Policy(
            name=self.name or other.name,
            key=self.key or other.key,
            retry=other.retry if self.retry is UNSET else self.retry,
            timeout=other.timeout if self.timeout is UNSET else self.timeout,
            durability=other.durability if self.durability is UNSET else self.durability,
            effect=other.effect if self.effect is UNSET else self.effect,
            reconcile=other.reconcile if self.reconcile is UNSET else self.reconcile,
            not_landed=other.not_landed if self.not_landed is UNSET else self.not_landed,
            compensate=other.compensate if self.compensate is UNSET else self.compensate,
            key_valid_for=other.key_valid_for if self.key_valid_for is UNSET else self.key_valid_for,
        )


class CallStep:
    """Command: call this step. Also the execution's record of the request until its entry comes."""

    __slots__ = (
        "abandoned",
        "asked_at",
        "compensates",
        "context",
        "effect",
        "function",
        "future",
        "has_intent",
        "idempotency_key",
        "info",
        "input",
        "key",
        "line",
        "name",
        "number",
        "policy",
        "runs_ahead",
        "saga",
        "shift",
    )

    def __init__(
        self,
        key: str,
        name: str,
        function: Callable[..., Any],
        info: FunctionInfo,
        input: BoundInput,
        policy: Policy | None,
        line: tuple[CodeType, int],
    ) -> None:
        self.key = key
        self.name = name
        self.function = function
        self.info = info
        self.input = input
        self.policy = policy
        self.line = line
        self.runs_ahead = policy is not None and policy.durability == "async"
        """Whether its body may start ahead of the journal and its result is handed on before its commit."""
        self.effect: Effect | None = None
        """Its `effect=`; None of a repeatable step."""
        self.has_intent = False
        """Whether an intent is committed before its body begins."""
        if policy is not None and policy.effect is not UNSET and policy.effect is not Effect.REPEATABLE:
            self.effect = policy.effect
            self.has_intent = self.effect is not Effect.TRANSACTIONAL
        self.saga: Any = None  # the innermost `saga()` that it was called in and that owes its undoing
        self.compensates: tuple[str, int] | None = None  # of an undoing: the step, the attempt whose intent it closes
        self.abandoned = False
        self.asked_at = 0  # the run's clock then
        self.shift = 0  # microseconds by which a rewind moved the moments that it was asked with
        self.number = 0
        self.idempotency_key = ""  # set when its body is to start
        self.context: contextvars.Context | None = None
        self.future: asyncio.Future[Any] | None = None

    @property
    def reconcile(self) -> Callable[[Any], Coroutine[Any, Any, Any]] | None:
        """Its `reconcile=`."""
        return None if self.policy is None or self.policy.reconcile is UNSET else self.policy.reconcile

    @property
    def compensate(self) -> Callable[..., Any] | None:
        """Its `compensate=`."""
        return None if self.policy is None or self.policy.compensate is UNSET else self.policy.compensate

    @property
    def key_valid_us(self) -> int | None:
        """Microseconds for which the other side recognises its key; None: for ever."""
        if self.policy is None or self.policy.key_valid_for is UNSET or self.policy.key_valid_for is None:
            return None
        valid = self.policy.key_valid_for
        return int((valid.total_seconds() if isinstance(valid, dt.timedelta) else valid) * 1_000_000)

    def says_not_landed(self, error: BaseException) -> bool:
        """Whether an exception of its body says that its call did not happen."""
        if isinstance(error, NotLanded):
            return True
        declared = None if self.policy is None or self.policy.not_landed is UNSET else self.policy.not_landed
        return declared is not None and isinstance(error, declared)

    @property
    def retry(self) -> BaseRetrying | None:
        """Its `retry=`; None: a failure is final."""
        return None if self.policy is None or self.policy.retry is UNSET else self.policy.retry

    @property
    def timeout(self) -> float | dt.timedelta | dt.datetime | None:
        """Its `timeout=`, for each attempt. A moment that was chosen before a rewind leaves as much time after it."""
        if self.policy is None or self.policy.timeout is UNSET:
            return None
        timeout = self.policy.timeout
        return timeout + dt.timedelta(microseconds=self.shift) if isinstance(timeout, dt.datetime) else timeout

    @property
    def where(self) -> str:
        """The line of user code that called the step: `file:line`."""
        return line_of(*self.line)


def line_of(code: CodeType, instruction: int) -> str:
    """`file:line` of an instruction (`frame.f_lasti`): a line number costs more than a step, and few are ever read."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{code.co_filename}:{line}"


@dataclass(frozen=True, slots=True)
class CancelStep:
    """Command: the code has given this request up."""

    key: str


Command = CallStep | CancelStep
"""What an execution asks for."""


class Asker(Protocol):
    """The execution, as an awaitable sees it."""

    def request(self, call: CallStep) -> asyncio.Future[Any]:
        """The call is awaited for the first time."""
        ...

    def abandon(self, call: CallStep) -> None:
        """The await was cancelled."""

    def dropped(self, call: CallStep) -> None:
        """The call was never awaited."""

    def hash_of(self, call: CallStep) -> int:
        """A fixed hash for the awaitable of a call."""
        ...


class Pending(Coroutine[Any, Any, T_co]):
    """What `step(...)` returns: its key is taken, its arguments are encoded; awaited, it asks for the step.

    A coroutine class of our own, covariant in the result, so that `gather(step(f), step(g))` is typed, and with a fixed
    hash, so that sets of them iterate alike.
    """

    __slots__ = ("__weakref__", "_asker", "_call", "_generator")

    def __init__(self, asker: Asker, call: CallStep) -> None:
        self._asker = asker
        self._call = call
        self._generator: Generator[Any, Any, Any] | None = None

    def __await__(self) -> Generator[Any, None, T_co]:
        if self._generator is not None:
            raise RuntimeError(f"cannot await {self!r} twice")
        self._generator = generator = self._ask()
        return generator

    def _ask(self) -> Generator[Any, Any, Any]:
        call = self._call
        future = self._asker.request(call)
        try:
            return (yield from future)
        except asyncio.CancelledError:
            if future.cancelled():
                self._asker.abandon(call)
            raise

    def send(self, value: Any, /) -> Any:
        if self._generator is None:
            self._generator = self._ask()
        return self._generator.send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None, /) -> Any:
        if self._generator is None:
            self._generator = self._ask()
        if val is None and tb is None:
            return self._generator.throw(typ)
        return self._generator.throw(typ, val, tb)

    def close(self) -> None:
        if self._generator is None:
            self._generator = self._ask()
        self._generator.close()

    def __hash__(self) -> int:
        return self._asker.hash_of(self._call)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<step {self._call.key} called at {self._call.where}>"

    def __del__(self) -> None:
        if self._generator is None:
            self._asker.dropped(self._call)

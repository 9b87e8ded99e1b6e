"""Compensation: what a saga owes, and the undoing of it, newest first.

    async with saga():
        seat = await step(book_seat, order)        # declared with compensate=release_seat
        await step(charge, order)                  # raises: release_seat(seat) runs as a step, then the exception goes on

Owed is the undoing of each step with `compensate=` that was called inside and succeeded; abandoned ones that landed included
(issue "Effects", part 7). Which is the newest the journal says: by the `seq` of their entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol

from replaykit.errors import ConfigurationError, Gone
from replaykit.replay.entries import Entry, Outcome
from replaykit.replay.requests import CallStep, Pending

__all__ = ["CURRENT_SAGA", "Owed", "Saga", "SagaBlock", "owing_saga"]


@dataclass(frozen=True, slots=True)
class Owed:
    """A step that succeeded and is to be undone. `output` is its recorded result; `attempt` that of its intent (0: none)."""

    call: CallStep
    compensate: Callable[..., Any]
    seq: int
    output: str
    attempt: int

    @property
    def key(self) -> str:
        """The step's."""
        return self.call.key


class Undoer(Protocol):
    """The execution, as a saga sees it."""

    async def outcomes(self, awaited: Callable[[], bool]) -> None:
        """Wait as long as `awaited()`, and for every call with an effect that was given up."""

    async def compensate(self, saga: Saga) -> None:
        """Undo what a saga owes; no cancel stops that half-way."""

    def undoing(self, owed: Owed, saga: Saga) -> Pending[Any]:
        """The step that undoes another."""
        ...

    def hold(self, reason: str) -> None:
        """The run cannot go on."""


@dataclass(eq=False, slots=True)
class Saga:
    """What one `async with saga():` owes.

    Attributes:
        outer: the saga around it, which owes on when this one ends well.
        owed: steps to be undone, oldest first.
        pending: keys of steps with `compensate=` that were asked for and have no entry yet.
        undone: keys of steps that were undone.
        not_undone: keys of steps whose undoing a person let fail.
        ended: it ended well: what lands later is the outer one's.
        undoing: it was left by an exception: it owes nothing new.
    """

    execution: Undoer
    outer: Saga | None
    owed: list[Owed] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)
    undone: list[str] = field(default_factory=list)
    not_undone: list[str] = field(default_factory=list)
    ended: bool = False
    undoing: bool = False

    def gave_up(self, call: CallStep) -> None:
        """The await of a step without an effect was cancelled: it may never have an entry, so nobody waits for one."""
        saga: Saga | None = self
        while saga is not None:
            saga.pending.discard(call.key)
            saga = saga.outer

    def settled(self, call: CallStep, entry: Entry) -> None:
        """A step that was called in it, or an undoing of its own, has its entry."""
        if call.compensates is not None:
            (self.undone if entry.outcome == Outcome.OK else self.not_undone).append(call.compensates[0])
            return
        self.gave_up(call)
        if entry.outcome == Outcome.OK and call.compensate is not None:
            owing = self.owing
            if owing is not None:
                attempt = entry.attempt if call.has_intent else 0
                owing.owed.append(Owed(call, call.compensate, entry.seq, entry.output or "null", attempt))

    @property
    def owing(self) -> Saga | None:
        """Itself, or where it ended well the one around it; None: nobody owes any more."""
        found: Saga | None = self
        while found is not None and found.ended:
            found = found.outer
        return found

    def end(self) -> None:
        """It was left without an exception: the one around it owes what it owed."""
        self.ended = True
        owing = self.owing
        if owing is not None:
            owing.owed += self.owed
            owing.pending |= self.pending
        self.owed = []

    async def undo(self) -> None:
        """Undo what it owes, newest first; what is still in flight first gets its outcome."""
        while True:
            await self.execution.outcomes(lambda: bool(self.pending))
            if not self.owed:
                return
            owed = max(self.owed, key=lambda o: o.seq)
            self.owed.remove(owed)
            try:
                asked = self.execution.undoing(owed, self)
            except Exception as error:
                self.execution.hold(
                    f"step {owed.key} cannot be undone: {owed.compensate!r} does not take its result "
                    f"({type(error).__name__}: {error}); undone: {', '.join(self.undone) or 'nothing'}; not undone: "
                    f"{', '.join([owed.key, *self.keys_owed])}"
                )
                await asyncio.get_running_loop().create_future()
                return
            with contextlib.suppress(Exception):  # a person let it fail: the rest is undone all the same
                await asked

    @property
    def keys_owed(self) -> list[str]:
        """Of what is to be undone, newest first; then of what a person let stand."""
        return [*(o.key for o in sorted(self.owed, key=lambda o: -o.seq)), *self.not_undone]


CURRENT_SAGA: Final[contextvars.ContextVar[Saga | None]] = contextvars.ContextVar("replaykit_saga", default=None)
"""The innermost saga of the code that runs; tasks begin in a copy of their maker's context, and so in its saga."""


class SagaBlock:
    """`async with saga():` in a workflow. Use it once."""

    def __init__(self, execution: Undoer) -> None:
        self._saga = Saga(execution, None)
        self._entered = False

    async def __aenter__(self) -> None:
        if self._entered:
            raise ConfigurationError("a saga() is entered once: write `async with saga():` each time")
        self._entered = True
        self._saga.outer = CURRENT_SAGA.get()  # where it is entered, not where it was made
        CURRENT_SAGA.set(self._saga)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        saga = self._saga
        self._step_out()
        if error is None or isinstance(error, GeneratorExit):  # a generator that is closed early has not failed
            saga.end()
        elif not isinstance(error, Gone):
            saga.undoing = True
            await saga.execution.compensate(saga)

    def _step_out(self) -> None:
        """Of this one, wherever it stands: blocks of an exit stack, or of generators, may be left in another order."""
        saga, current = self._saga, CURRENT_SAGA.get()
        if current is saga:
            CURRENT_SAGA.set(saga.outer)
            return
        while current is not None:
            if current.outer is saga:
                current.outer = saga.outer
                return
            current = current.outer


def owing_saga(call: CallStep) -> Saga | None:
    """The saga that a call is made in.

    Raises:
        ConfigurationError: an exception has left it, and the task of the call lives on: nobody would undo it.
    """
    saga = CURRENT_SAGA.get()
    owing = saga.owing if saga is not None else None
    if owing is not None and owing.undoing:
        raise ConfigurationError(
            f"step {call.name} at {call.where} has compensate=, and its saga was left by an exception: await all tasks of a saga "
            "inside it, in a TaskGroup"
        )
    return owing

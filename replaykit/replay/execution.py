"""One replay of one run: entries go in, commands come out.

    execution.start()          -> commands
    execution.deliver(entry)   -> commands
    execution.hold_reason      why it cannot go on (a state, not an exception: user code would eat an exception)
    execution.ended            the function's outcome, once it and all it left behind have ended
    execution.leave()          leaves memory; no `finally` of user code counts from then on

Replay is the same calls with recorded entries, followed by `net_commands()`: what is still asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import hashlib
import random
import sys
import uuid
from asyncio import events
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from replaykit.errors import ConfigurationError, Gone, NotJournalable
from replaykit.limits import Settings
from replaykit.replay.entries import Entry, Kind, Outcome
from replaykit.replay.failures import decode_error, encode_error, error_summary
from replaykit.replay.jsontext import check_size, head
from replaykit.replay.keys import absolute_key, check_name
from replaykit.replay.libraries import order_libraries
from replaykit.replay.loop import RunLoop, RunTask, Scope, _mix
from replaykit.replay.requests import (
    POLICY_ATTRIBUTE,
    CallStep,
    CancelStep,
    Command,
    Pending,
    Policy,
    line_of,
)
from replaykit.replay.sagas import Owed, Saga, owing_saga
from replaykit.replay.signature import FunctionInfo, describe, same_input

__all__ = ["Ended", "Execution", "current_execution"]

EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MISSING: Final = object()
_CLOSES_MAX: Final = 100  # a coroutine that ignores GeneratorExit is closed again, at most this often
_RAISED_MAX: Final = 1_000  # delivered errors that are remembered: of a run that handles more, the latest
_CHAIN_MAX: Final = 1_000  # exceptions that are looked at to find the step that a run died of
_NEVER_ENDED: list[Any] = []
"""Tasks and generators that would not end: kept for the life of the process, else their `finally` runs inside another run."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the function ended: JSON text of the result or of the error; neither, if a request to end ended it.

    `died_of` is the seq of the entry whose error ended it: the earliest of those that its exception is, is made of, or was
    raised from or during.
    """

    output: str | None
    error: str | None
    cancelled: bool = False
    died_of: int | None = None


class Execution:
    """One run's function on its own loop.

    Args:
        function: the workflow's plain async function.
        args, kwargs: its decoded input.
        info: the function's description; its return annotation encodes the result.
        run_id: for messages and idempotency keys.
        seed: feeds `rng()`, `uuid4()` and hashes.
        started_at: the run's clock before its first entry, microseconds since 1970.
        context: what the code starts in; None: an empty one, since runs share nothing through context variables.

    Attributes:
        accept_inputs_to: up to this seq recorded results are taken although the code asks with other inputs
            (`retry --accept inputs`).
        replaying: code runs that has run before, in an earlier claim: what it logs has been logged.
    """

    def __init__(
        self,
        function: Callable[..., Coroutine[Any, Any, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        info: FunctionInfo,
        run_id: uuid.UUID,
        seed: int,
        started_at: int,
        drain_callbacks_max: int = Settings().drain_callbacks_max,
        payload_bytes_max: int = Settings().payload_bytes_max,
        on_outside: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self.replaying = False
        self.accept_inputs_to = 0
        self.run_id = run_id
        self.seed = seed
        self.info = info
        # The methods that mypy misses are made in a loop of loop.py: each raises its sentence.
        self.loop = RunLoop(  # type: ignore[abstract]
            self, seed=seed, started_at=started_at, drain_callbacks_max=drain_callbacks_max
        )
        self.open: dict[str, CallStep] = {}
        self.timers_fired = 0
        self.hold_reason: str | None = None
        self.ended: Ended | None = None
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._commands: list[Command] = []
        self._absolute: set[str] = set()
        self._calls_made = 0
        self._payload_bytes_max = payload_bytes_max
        self._dropped: CallStep | None = None  # the first call that was thrown away without an await
        self._awaited = 0  # calls in `open` that the code still waits for
        self._owed = 0  # calls in `open` of steps with an effect that the code has given up: each gets an entry
        self._undoing: set[RunTask] = set()  # no cancel stops these half-way
        self._waiters: list[asyncio.Future[None]] = []  # for the next entry of a step
        self._fatal: BaseException | None = None
        self._root: RunTask | None = None
        self._raised: dict[int, tuple[BaseException, int]] = {}  # errors that were delivered, with their seq
        self._cancels = 0  # requests to end that were delivered
        self._stuck = False  # held because nothing can ever resolve what it waits for
        self._context = context
        self._on_outside = on_outside

    # ------------------------------------------------------------------ entries in, commands out

    def start(self) -> list[Command]:
        """Call the function and run it until it waits."""
        order_libraries(RunLoop)
        loop = self.loop
        with loop.turning():
            context = self._context if self._context is not None else contextvars.Context()
            coroutine = context.run(self._function, *self._args, **self._kwargs)
            self._root = loop.add_task(coroutine, loop.root_scope, name="workflow", context=context)
            self._root.add_done_callback(self._function_ended, context=context)
            self._advance()
        return self._take_commands()

    def deliver(self, entry: Entry, value: Any = _MISSING) -> list[Command]:
        """Hand one entry to the code and run it until it waits again.

        Args:
            entry: the next of the journal.
            value: the decoded result or the rebuilt error, where the caller has it already (first run = replay).
        """
        with self.loop.turning():
            self._deliver(entry, value)
        return self._take_commands()

    def replay(self, entries: Iterable[Entry]) -> None:
        """Deliver recorded entries until their end or a hold. Commands are not kept: `net_commands` says what remains."""
        with self.loop.turning():
            for entry in entries:
                if self.hold_reason is not None and not self._stuck:
                    break
                self._deliver(entry, _MISSING)
                self._commands.clear()
        self.loop.problems.clear()  # they were told when they were new

    def _deliver(self, entry: Entry, value: Any) -> None:
        loop = self.loop
        if entry.at > loop.clock:
            loop.clock = entry.at
        if entry.kind == "step":
            self._deliver_step(entry, value)
        elif entry.kind == Kind.TIMER:
            self._deliver_timer(entry)
        elif entry.kind == Kind.CANCEL:
            self._deliver_cancel()
        elif entry.kind == Kind.REWIND:
            pass  # it moves the clock
        else:
            self.hold(
                f"entry {entry.seq} ({entry.key}) is of kind {entry.kind}, which this release does not know: "
                "a later release wrote it"
            )
        self._advance()

    def _deliver_step(self, entry: Entry, value: Any) -> None:
        call = self.open.get(entry.key)
        if call is None:
            self.hold(self._not_asked(entry))
            return
        if call.name != entry.name:
            self.hold(
                f"step {entry.key}: the journal holds a call of {entry.name}, the code now calls {call.name} at {call.where}"
            )
            return
        if (
            entry.digest is not None
            and call.input.digest != entry.digest
            and entry.seq > self.accept_inputs_to
            and not self._same_input(entry, call)
        ):
            self.hold(
                f"step {entry.key}: the journal holds it with input {head(entry.input)}, "
                f"the code now calls it with {head(call.input.text)} at {call.where}"
            )
            return
        del self.open[entry.key]
        if not call.abandoned:
            self._awaited -= 1
        elif call.effect is not None:
            self._owed -= 1
        if call.saga is not None:
            call.saga.settled(call, entry)
        self._look_again()
        future = call.future
        if future is None or future.done():
            return  # the code gave it up: the entry moves the clock and reaches nobody
        if entry.outcome == Outcome.CANCELLED:
            self.hold(
                f"step {entry.key}: the journal says that the code gave it up before it began, the code now waits for it at "
                f"{call.where}"
            )
        elif entry.outcome == Outcome.OK:
            if value is _MISSING:
                try:
                    value = call.info.decode_result(entry.output or "null")
                except Exception as misfit:
                    self.hold(
                        f"step {entry.key}: its recorded result {head(entry.output)} does not fit the annotation of {call.name} "
                        f"any more ({type(misfit).__name__}: {head(str(misfit))})"
                    )
                    return
            future.set_result(value)
        else:
            error = value if value is not _MISSING else decode_error(entry.error or "{}")
            self._raised[id(error)] = (error, entry.seq)
            if len(self._raised) > _RAISED_MAX:
                del self._raised[next(iter(self._raised))]
            future.set_exception(error)
            future.exception()  # retrieved, so that a result nobody awaits makes no noise

    def _same_input(self, entry: Entry, call: CallStep) -> bool:
        try:
            return entry.input is not None and same_input(call.info, entry.input, call.input)
        except Exception:
            return False

    @property
    def may_be_cancelled(self) -> bool:
        """Whether a request to end still reaches the code: its function runs, or waits for what nothing can resolve."""
        root = self._root
        return root is not None and not root.done() and (self.hold_reason is None or self._stuck)

    def _deliver_cancel(self) -> None:
        self._cancels += 1
        if self._stuck:
            self._stuck = False
            self.hold_reason = None
            self.loop.stopped = False
        if self._root is not None and not self._root.done():
            self._root.cancel()

    def _deliver_timer(self, entry: Entry) -> None:
        self.timers_fired += 1
        if entry.due_at is None or not self.loop.fire(entry.due_at):
            due = "none" if entry.due_at is None else _moment(entry.due_at).isoformat()
            timer = self.loop.next_timer()
            have = f"its earliest timer is due {_moment(timer.due_at).isoformat()}" if timer else "it has no timer"
            self.hold(
                f"entry {entry.seq}: the journal holds a timer due {due}, the code has none of that time ({have})"
            )

    def _not_asked(self, entry: Entry) -> str:
        asked = [f"{c.key} at {c.where}" for c in self.open.values() if not c.abandoned]
        code = f"the code asks for {', '.join(asked[:3])}" if asked else f"the code waits at {self._stacks()}"
        if self.ended is not None:
            code = "the code has ended"
            if self.ended.error is not None:
                kind, message, line = error_summary(self.ended.error)
                code += f" with {kind.removeprefix('builtins.')}: {head(message)}{f' ({line})' if line else ''}"
        return f"entry {entry.seq}: the journal holds step {entry.key}, {code}"

    def _advance(self) -> None:
        if self.hold_reason is None:
            self.loop.drain()
            if self._dropped is not None:
                self._judge_dropped(self._dropped)
            if self.hold_reason is None and self.ended is None and not self.waits_outside():
                self._stuck = True
                self.hold(f"the run waits for something that nothing can ever resolve: {self._stacks()}")

    def _judge_dropped(self, call: CallStep) -> None:
        if self.ended is None or self.ended.error is None:
            self.hold(f"step {call.name} was called at {call.where} and never awaited: write `await step(...)`")

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def hash_of(self, call: CallStep) -> int:
        """A fixed hash for the awaitable of a call."""
        return _mix(self.seed ^ 0x3333, call.number)

    def net_commands(self) -> list[Command]:
        """What is still asked for after a replay, in the order of the requests; calls of steps with an effect that the code
        has given up, too: what became of them is to be recorded."""
        return [call for call in self.open.values() if not call.abandoned or call.effect is not None]

    @property
    def next_deadline(self) -> int | None:
        """Microseconds since 1970 of the earliest live timer."""
        timer = self.loop.next_timer()
        return timer.due_at if timer is not None else None

    # ------------------------------------------------------------------ what the code calls

    def call_step(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Policy | None
    ) -> Pending[Any]:
        """A step is called: its key is taken and its arguments are encoded now."""
        loop = self.loop
        if loop.gone:
            if loop.may_raise_gone():
                raise Gone
            return asyncio.Future(loop=loop)  # type: ignore[return-value]
        info = describe(function)
        policy: Policy | None = getattr(function, POLICY_ATTRIBUTE, None)
        if options is not None:
            policy = options.over(policy)
        frame = sys._getframe(2)
        line = (frame.f_code, frame.f_lasti)
        name = _step_name(function, info, policy)
        bound = info.bind(args, kwargs)
        if policy is not None and policy.key is not None:
            key = absolute_key(policy.key)
            if key in self._absolute:
                self.hold(
                    f"key={policy.key!r} is used twice in this run, again at {line_of(*line)}: an absolute key names one call"
                )
            self._absolute.add(key)
        else:
            key = loop.scope().key(name)
        self._calls_made += 1
        call = CallStep(key, name, function, info, bound, policy, line)
        call.number = self._calls_made
        if policy is not None:
            if call.compensate is not None:
                call.saga = owing_saga(call)
            if call.effect is not None and bound.live:
                self._refuse_live(call)
        return Pending(self, call)

    def _refuse_live(self, call: CallStep) -> None:
        """Whoever asks what became of a call needs all of its input."""
        opaque = call.info.opaque_arguments(call.input)
        if opaque:
            raise NotJournalable(
                f"$.{opaque[0]}: cannot journal a {type(call.input.live[opaque[0]]).__name__}, and step {call.key} has "
                f"effect={str(call.effect)!r}, whose input is kept in full: hand it over through the worker's lifespan "
                "(step.current().resources)"
            )

    def undoing(self, owed: Owed, saga: Saga) -> Pending[Any]:
        """The step that undoes another: of its own function's policy, under the key `~undo:KEY`."""
        info = describe(owed.compensate)
        policy: Policy | None = getattr(owed.compensate, POLICY_ATTRIBUTE, None)
        name = policy.name if policy is not None and policy.name is not None else info.name or owed.call.name
        bound = info.bind((owed.call.info.decode_result(owed.output),), {})
        self._calls_made += 1
        call = CallStep(f"~undo:{owed.key}", name, owed.compensate, info, bound, policy, owed.call.line)
        call.number = self._calls_made
        call.compensates = owed.key, owed.attempt
        call.runs_ahead = False  # nothing is undone before the error that it is undone for is committed
        call.saga = saga
        return Pending(self, call)

    async def compensate(self, saga: Saga) -> None:
        """Undo what a saga owes. A cancel that comes meanwhile is raised when that is done.

        Raises:
            CancelledError: one came.
        """
        task = self.loop.add_task(saga.undo(), Scope(None, "~saga/"), name="undo")
        self._undoing.add(task)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        self._undoing.discard(task)
        task.result()
        if cancelled is not None:
            raise cancelled

    async def outcomes(self, awaited: Callable[[], bool]) -> None:
        """Wait, entry by entry, as long as `awaited()`, and until every call with an effect that was given up has its entry."""
        while self._owed or awaited():
            waiter: asyncio.Future[None] = asyncio.Future(loop=self.loop)
            self._waiters.append(waiter)
            await waiter

    def _look_again(self) -> None:
        """What `outcomes` waits for may have come."""
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    def request(self, call: CallStep) -> asyncio.Future[Any]:
        """A called step is awaited for the first time."""
        if self.loop.gone:
            raise Gone
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        call.future = future
        if self.hold_reason is None:
            call.context = contextvars.copy_context()
            call.asked_at = self.loop.clock
            self.open[call.key] = call
            self._awaited += 1
            if call.saga is not None and call.compensates is None:
                call.saga.pending.add(call.key)
            self._commands.append(call)
        return future

    def abandon(self, call: CallStep) -> None:
        """The await of a step was cancelled."""
        if self.loop.gone or self.hold_reason is not None:
            return
        call.abandoned = True
        if call.key in self.open:
            self._awaited -= 1
            self._owed += call.effect is not None
        if call.effect is None and call.saga is not None:
            call.saga.gave_up(call)
            self._look_again()
        self._commands.append(CancelStep(call.key))

    def dropped(self, call: CallStep) -> None:
        """A called step was thrown away without an await. Judged at the end of the turn: one that an exception threw away
        with it, on its way out of the function, is no mistake of its own."""
        if not self.loop.gone and self.ended is None and self._dropped is None:
            self._dropped = call

    def now(self) -> dt.datetime:
        """The run's clock: the last delivered `at`."""
        if self.loop.gone:
            raise Gone
        return _moment(self.loop.clock)

    def rng(self) -> random.Random:
        """A new generator, seeded by the run, the task's scope and a count in it."""
        return random.Random(int.from_bytes(self._chance("~rng")))

    def uuid4(self) -> uuid.UUID:
        """A UUID that is the same in every replay."""
        return uuid.UUID(bytes=self._chance("~uuid4")[:16], version=4)

    def _chance(self, what: str) -> bytes:
        if self.loop.gone:
            raise Gone
        key = self.loop.scope().key(what)
        return hashlib.sha256(f"{self.seed}:{key}".encode()).digest()

    # ------------------------------------------------------------------ states

    def hold(self, reason: str) -> None:
        """The run cannot go on: nothing more of it runs, and the reason is for a person."""
        if self.hold_reason is None and not self.loop.gone:
            self.hold_reason = reason
            self.loop.stopped = True

    def hold_spinning(self, callbacks: int) -> None:
        """One drain needed too many callbacks."""
        self.hold(f"the run made {callbacks:,} callbacks without waiting for anything: {self._stacks()}")

    def hold_from_outside(self, reason: str) -> None:
        """Called from a foreign thread."""
        if self.loop.gone:
            return
        self.hold(reason)
        if self._on_outside is not None:
            self._on_outside()

    def escaped(self, error: BaseException) -> None:
        """SystemExit and its like end the run, not the worker."""
        if self._fatal is None:
            self._fatal = error
            if self._root is not None and not self._root.done():
                self._root.cancel()

    def waits_outside(self) -> bool:
        """Whether an entry may still come for something that the code waits for."""
        return self._awaited > 0 or self._owed > 0 or self.loop.next_timer() is not None

    def _stacks(self) -> str:
        lines = [text for task in self.loop.tasks if not task.done() for text in [_stack(task)] if text]
        return "; ".join(lines[:5]) or "no task of it is alive"

    # ------------------------------------------------------------------ the end of the function

    def _function_ended(self, root: asyncio.Task[Any]) -> None:
        loop = self.loop
        if self._owed or self._live_tasks() or any(getattr(g, "ag_frame", None) is not None for g in loop.generators):
            task = loop.add_task(self._end(), Scope(None, "~end/"), name="end", context=contextvars.Context())
            task.add_done_callback(lambda _: self._settle())
        else:
            self._settle()

    def _live_tasks(self) -> list[RunTask]:
        current = asyncio.current_task(self.loop)
        return [t for t in self.loop.tasks if not t.done() and t is not current]

    async def _end(self) -> None:
        """Cancel and await the other tasks, then close async generators in order of first use; both may run steps. Then
        wait for what becomes of calls with an effect that were given up: the run does not end before that is known."""
        while True:
            live = self._live_tasks()
            for task in live:
                if task not in self._undoing:
                    task.cancel()
            if live:
                await asyncio.wait(live)
                continue
            generators = [g for g in self.loop.generators if getattr(g, "ag_frame", None) is not None]
            if not generators and self._owed:
                await self.outcomes(lambda: False)
                continue
            if not generators:
                return
            try:
                await generators[0].aclose()
            except Exception as error:
                self.loop.call_exception_handler(
                    {"message": f"exception while closing {generators[0]!r}", "exception": error}
                )
                self.loop.generators.remove(generators[0])

    def _settle(self) -> None:
        root = self._root
        assert root is not None and root.done()
        error: BaseException | None = self._fatal
        line = ""
        if error is None and root.cancelled() and self._cancels:
            self.ended = Ended(None, None, cancelled=True)
            self.loop.stopped = True
            return
        if error is None:
            error = asyncio.CancelledError("the workflow cancelled itself") if root.cancelled() else root.exception()
        if error is None:
            try:
                text, _ = self.info.encode_result(root.result())
                check_size(text, self._payload_bytes_max, "the workflow's result")
                self.ended = Ended(text, None)
            except NotJournalable as refused:
                error, line = self.info.refused_result(refused), self.info.line
        elif not root.cancelled():
            root.exception()
        if error is not None:
            self.ended = Ended(None, encode_error(error, line), died_of=self._died_of(error))
        self.loop.stopped = True

    def _died_of(self, error: BaseException) -> int | None:
        found: list[int] = []
        seen: set[int] = set()
        to_see: list[BaseException | None] = [error]
        while to_see:
            one = to_see.pop()
            if one is None or id(one) in seen or len(seen) > _CHAIN_MAX:
                continue
            seen.add(id(one))
            raised = self._raised.get(id(one))
            if raised is not None and raised[0] is one:
                found.append(raised[1])  # its own cause came with it, from the body
                continue
            to_see += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                to_see += one.exceptions
        return min(found, default=None)

    # ------------------------------------------------------------------ leaving memory

    def leave(self) -> None:
        """Leave memory. Coroutines are closed newest first, on their own loop and in their own context, each until it has
        ended; nothing they do comes out (DESIGN 4, Leaving memory)."""
        loop = self.loop
        if loop.gone:
            return
        loop.gone = True
        previous = events._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(loop)
        sys.set_asyncgen_hooks(lambda _: None, lambda _: None)
        try:
            for task in reversed(loop.tasks):
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    if task.own_context.run(_close, task.get_coro()):
                        loop.untie(task)
                    else:
                        _NEVER_ENDED.append(task)
            for generator in loop.generators:
                if getattr(generator, "ag_frame", None) is not None and not _close_generator(generator):
                    _NEVER_ENDED.append(generator)
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(previous)
            loop.ready.clear()
            loop.timers.clear()
            loop.generators.clear()
            loop.tasks.clear()
            self.open.clear()
            self._commands.clear()
            self._raised.clear()
            self._waiters.clear()
            self._undoing.clear()
            self._context = None
            self._root = None  # what runs leave behind is freed at once, as far as that can be done
            self._args, self._kwargs = (), {}
            self._on_outside = None
            loop.forget_execution()


def current_execution() -> Execution | None:
    """The execution whose code runs now, or None outside of a run."""
    loop = events._get_running_loop()
    return loop.execution if type(loop) is RunLoop else None  # type: ignore[return-value]


def _step_name(function: Callable[..., Any], info: FunctionInfo, policy: Policy | None) -> str:
    if policy is not None and policy.name is not None:
        return policy.name  # checked where it was declared
    if info.name is None:
        raise ConfigurationError(f"{info.label} has no name of its own: step.options(name=...)(...) gives it one")
    name = _CHECKED.get(info.name)
    if name is None:
        name = check_name(info.name, "step")
        if len(_CHECKED) < 10_000:
            _CHECKED[info.name] = name
    return name


_CHECKED: dict[str, str] = {}


def _close(coroutine: Any) -> bool:
    """Close what it awaits first, the innermost first of all: a coroutine that ignores GeneratorExit would end its caller
    with a RuntimeError and be left to the collector."""
    chain = []
    link = coroutine
    while link is not None and hasattr(link, "close"):
        chain.append(link)
        link = getattr(link, "cr_await", None) or getattr(link, "gi_yieldfrom", None) or getattr(link, "ag_await", None)
    ended = [_close_one(link) for link in reversed(chain)]
    return all(ended)


def _close_one(coroutine: Any) -> bool:
    for _ in range(_CLOSES_MAX):
        try:
            coroutine.close()
        except BaseException:  # whatever a gone execution's code raises counts for nothing
            continue
        return True
    return False


def _close_generator(generator: Any) -> bool:
    """Like `_close`. Where its `finally` waits for something, it is told to end again, through the same `aclose()`: a
    second one would find the generator running."""
    closing = generator.aclose()
    resume: Callable[[], Any] = lambda: closing.send(None)  # noqa: E731
    for _ in range(_CLOSES_MAX):
        try:
            resume()
        except BaseException:
            if getattr(generator, "ag_frame", None) is None:
                return True
            closing = generator.aclose()
            resume = lambda: closing.send(None)  # noqa: B023, E731
        else:
            resume = lambda: closing.throw(GeneratorExit())  # noqa: B023, E731
    return getattr(generator, "ag_frame", None) is None


def _moment(microseconds: int) -> dt.datetime:
    return EPOCH + dt.timedelta(microseconds=microseconds)


def _stack(task: asyncio.Task[Any]) -> str:
    """The innermost lines of user code that a task waits at: `a.py:3 in pay < a.py:9 in main`."""
    lines: list[str] = []
    below: list[str] = []  # asyncio's and ours: shown where there are no others'

    awaited: Any = task.get_coro()
    for _ in range(100):
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is None:
            break
        code: CodeType = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        part = below if package in ("asyncio", "replaykit") else lines
        part.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return " < ".join((lines or below)[:-7:-1])

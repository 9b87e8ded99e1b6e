"""The deterministic event loop that a workflow runs on.

It has a ready queue, timers, and a clock that only the journal moves. `drain()` runs what is ready, in order, until nothing
is, and returns: so plain asyncio behaves the same in every replay, and `asyncio.sleep` and `asyncio.timeout` are durable.
Everything that would reach outside (sockets, threads, signals) raises one sentence that says "do this in a step".
"""

from __future__ import annotations

import asyncio
import asyncio.tasks
import contextvars
import heapq
import math
import sys
import types
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, NoReturn, Protocol

from replaykit.errors import ConfigurationError, Gone
from replaykit.replay.libraries import is_polling

__all__ = ["RunFuture", "RunLoop", "RunTask", "Scope"]

_GONE_MAX: Final = 1_000
_POLLING_AFTER: Final = 1_000  # callbacks in one drain after which it looks for a library that polls
_POLLS_MAX: Final = 100
DO_IN_A_STEP: Final = "reaches outside the run and would not replay: do this in a step"
"""What is said of all that would."""

_SCOPE_CHARS_MAX: Final = 700  # leaves room for a name of 200 bytes and a count in KEY_BYTES_MAX
_MASK: Final = (1 << 64) - 1


def _mix(seed: int, number: int) -> int:
    """A 60-bit hash of a run's n-th task or future: sets iterate alike in every replay, and do not cluster.

    Plain numbers are quadratic in asyncio's global set of tasks, where the runs of a process meet.
    """
    x = (seed + number * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return (x ^ (x >> 31)) >> 4


class Scope:
    """A task's part of a step key. Numbered when it, or one below it, first needs a key, so that the tasks of libraries
    that never call a step take no number."""

    __slots__ = ("_prefix", "children", "counts", "parent")

    def __init__(self, parent: Scope | None, prefix: str | None = None) -> None:
        self.parent = parent
        self._prefix = prefix
        self.children = 0
        self.counts: dict[str, int] = {}

    @property
    def prefix(self) -> str:
        """`""` for the root's, else `1/`, `2.1/`, `@1/`."""
        if self._prefix is None:
            unnumbered: list[Scope] = [self]
            above = self.parent
            while above is not None and above._prefix is None:
                unnumbered.append(above)
                above = above.parent
            for scope in reversed(unnumbered):
                assert scope.parent is not None
                scope._prefix = scope.parent._number_child()
        assert self._prefix is not None
        return self._prefix

    def _number_child(self) -> str:
        assert self._prefix is not None
        self.children += 1
        stem = self._prefix
        text = f"{stem[:-1]}.{self.children}/" if stem and stem != "@/" else f"{stem[:-1]}{self.children}/"
        if len(text) > _SCOPE_CHARS_MAX:
            raise ConfigurationError(
                f"tasks are nested so deeply that the step key would begin with {text[:60]!r}...: flatten them"
            )
        return text

    def count(self, name: str) -> int:
        """The how-manieth call of `name` in this scope this is, from 1."""
        n = self.counts.get(name, 0) + 1
        self.counts[name] = n
        return n

    def key(self, name: str) -> str:
        """The next key for `name` here."""
        prefix = self._prefix if self._prefix is not None else self.prefix
        n = self.count(name)
        return prefix + name if n == 1 else f"{prefix}{name}#{n}"


class RunFuture(asyncio.Future[Any]):
    """A future with a fixed hash."""

    def __init__(self, *, loop: RunLoop) -> None:
        super().__init__(loop=loop)
        loop.futures_made += 1
        self._number = loop.futures_made

    def __hash__(self) -> int:
        loop: RunLoop = self.get_loop()  # type: ignore[assignment]
        return _mix(loop.seed ^ 0x5555, self._number)


class RunTask(asyncio.Task[Any]):
    """A task with a fixed hash and name, its part of a step key, and its context."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: RunLoop,
        scope: Scope,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        loop.tasks_made += 1
        self._hash = _mix(loop.seed, loop.tasks_made)
        self.scope = scope
        self.own_context = context if context is not None else contextvars.copy_context()
        super().__init__(coro, loop=loop, name=name or f"task-{loop.tasks_made}", context=self.own_context)

    def __hash__(self) -> int:
        return self._hash


class _Ready(asyncio.Handle):
    """A callback in the ready queue; lighter than asyncio's, which keeps a traceback and a repr."""

    __slots__ = ("args", "callback", "dropped", "own_context")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback = callback
        self.args = args
        self.own_context = context if context is not None else contextvars.copy_context()
        self.dropped = False

    def cancel(self) -> None:
        self.dropped = True

    def cancelled(self) -> bool:
        return self.dropped

    def get_context(self) -> contextvars.Context:
        return self.own_context

    def __repr__(self) -> str:
        return f"<callback {getattr(self.callback, '__qualname__', self.callback)!s}>"


class _Timer(asyncio.TimerHandle):
    """A timer of a run: due at a whole microsecond of the run's clock, ties by creation."""

    __slots__ = ("due_at", "number")

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: RunLoop,
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.number = 0
        self.due_at = 0

    def __lt__(self, other: Any) -> bool:
        return (self.due_at, self.number) < (other.due_at, other.number)


_NOTHING: Final = _Ready(lambda: None, (), contextvars.Context())
"""Stands for a callback that is thrown away."""


class Host(Protocol):
    """What a loop tells its execution."""

    def hold(self, reason: str) -> None:
        """The run cannot go on."""

    def hold_spinning(self, callbacks: int) -> None:
        """One drain needed more callbacks than it may."""

    def waits_outside(self) -> bool:
        """Whether an entry may still come for something that the code waits for."""
        ...

    def hold_from_outside(self, reason: str) -> None:
        """A foreign thread called in: the run cannot go on."""

    def escaped(self, error: BaseException) -> None:
        """A callback let out an exception that ends programs (SystemExit, KeyboardInterrupt, GeneratorExit)."""


class _Nobody:
    """In the place of an execution that has left memory."""

    def __getattr__(self, name: str) -> Any:
        raise Gone


_NOBODY: Final[Any] = _Nobody()


class _Turning:
    """A context manager as a class: a generator would cost as much as the turn."""

    __slots__ = ("_hooks", "_loop", "_previous")

    def __init__(self, loop: RunLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        loop = self._loop
        self._previous = events._get_running_loop()
        self._hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(loop)
        sys.set_asyncgen_hooks(loop._generator_begun, loop._generator_collected)
        loop.accepting = True

    def __exit__(self, *_: object) -> None:
        self._loop.accepting = False
        sys.set_asyncgen_hooks(*self._hooks)
        events._set_running_loop(self._previous)


class RunLoop(asyncio.AbstractEventLoop):
    """One run's loop. `drain()` turns it; nothing else does.

    Args:
        execution: is told of holds and of exceptions that end programs.
        seed: the run's seed, for hashes.
        started_at: the run's clock at its first entry, microseconds since 1970.
        drain_callbacks_max: callbacks in one drain after which the run is held.
    """

    def __init__(self, execution: Host, *, seed: int, started_at: int, drain_callbacks_max: int) -> None:
        self.execution = execution
        self.seed = seed
        self.started_at = started_at
        self.clock = started_at
        self.drain_callbacks_max = drain_callbacks_max
        self.tasks_made = 0
        self.futures_made = 0
        self.timers_made = 0
        self.gone = False
        self.gone_raised = 0
        self.untying = False  # while callbacks of a gone run are thrown away
        self.stopped = False
        self.draining = False
        self.accepting = False  # true while the execution advances: nobody else may schedule here
        self.ready: deque[_Ready | _Timer] = deque()
        self.timers: list[_Timer] = []
        self.timers_cancelled = 0
        self.tasks: list[RunTask] = []
        self._tasks_next_sweep = 64
        self.generators: list[AsyncGenerator[Any, Any]] = []
        self._generators_next_sweep = 16
        self.problems: list[dict[str, Any]] = []
        self.root_scope = Scope(None, "")
        self.callback_scope = Scope(None, "@/")

    # ------------------------------------------------------------------ turning

    def turning(self) -> _Turning:
        """For the time of the block this is the thread's running loop, and may be scheduled on."""
        return _Turning(self)

    def drain(self) -> None:
        """Run what is ready, in order, until nothing is (or the run stops). Within `turning()`."""
        self.draining = True
        ready = self.ready
        left = self.drain_callbacks_max
        polls = 0
        try:
            while ready and not self.stopped:
                left -= 1
                if left < 0:
                    self.execution.hold_spinning(self.drain_callbacks_max)
                    return
                handle = ready.popleft()
                if left < self.drain_callbacks_max - _POLLING_AFTER and is_polling(handle):
                    polls += 1
                    if polls > _POLLS_MAX and self.execution.waits_outside():
                        ready.appendleft(handle)  # the next entry may bring what it polls for
                        return
                try:
                    if type(handle) is _Ready:
                        if not handle.dropped:
                            handle.own_context.run(handle.callback, *handle.args)
                    elif not handle._cancelled:
                        handle._run()
                except Exception as error:
                    self.call_exception_handler({"message": f"exception in {handle!r}", "exception": error})
                except BaseException as error:
                    self.execution.escaped(error)
        finally:
            self.draining = False

    def _generator_begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        # A strong reference: a generator left by `break` is closed at the function's end, in order of first use, and
        # never by the garbage collector, whose timing differs from replay to replay.
        if len(self.generators) >= self._generators_next_sweep:
            self.generators = [g for g in self.generators if getattr(g, "ag_frame", None) is not None]
            self._generators_next_sweep = max(16, 2 * len(self.generators))
        self.generators.append(generator)

    def _generator_collected(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Only reached once the loop no longer holds the generator: it is finished or the run is gone."""

    # ------------------------------------------------------------------ clock and timers

    def time(self) -> float:
        """Seconds of the run's clock since the run started."""
        return (self.clock - self.started_at) / 1_000_000

    def next_timer(self) -> _Timer | None:
        """The earliest live timer."""
        timers = self.timers
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)
            self.timers_cancelled -= 1
        return timers[0] if timers else None

    def fire(self, due_at: int) -> bool:
        """Make the earliest-made live timer of that deadline ready; False when there is none."""
        first = self.next_timer()
        if first is not None and first.due_at == due_at:
            heapq.heappop(self.timers)
        else:
            alike = [t for t in self.timers if t.due_at == due_at and not t._cancelled]
            if not alike:
                return False
            first = min(alike)
            self.timers.remove(first)
            heapq.heapify(self.timers)
        self.ready.append(first)
        return True

    def call_later(  # type: ignore[override]  # the typeshed's TypeVarTuple adds nothing here
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check()
        timer = _Timer(when, callback, args, self, context)
        if math.isnan(when):
            raise ValueError("a timer's time is not a number (nan)")
        if when > 2.0e11:  # the year 8300: never, as far as a journal is concerned
            return timer
        due_after = math.ceil(when * 1_000_000)
        if due_after / 1_000_000 < when:  # rounding must never make a timer fire early: anyio would loop
            due_after += 1
        self.timers_made += 1
        timer.number = self.timers_made
        timer.due_at = self.started_at + due_after
        timer._scheduled = True  # type: ignore[attr-defined]  # cancel() then tells us
        heapq.heappush(self.timers, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers_cancelled += 1
        if self.timers_cancelled > 64 and self.timers_cancelled * 2 > len(self.timers):
            self.timers = [t for t in self.timers if not t._cancelled]
            heapq.heapify(self.timers)
            self.timers_cancelled = 0

    # ------------------------------------------------------------------ callbacks, futures, tasks

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.gone:
            if self.untying:
                return _NOTHING
            raise Gone
        if not self.accepting:
            raise RuntimeError(
                "this Lock, Queue, Event or Future belongs to another run: objects of asyncio are used within one run; "
                "share state between runs through the database"
            )
        handle = _Ready(callback, args, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.gone and events._get_running_loop() is not self:
            return _NOTHING
        if events._get_running_loop() is not self:
            what = getattr(callback, "__qualname__", None) or repr(callback)
            self.execution.hold_from_outside(
                f"{what} ran outside a step: a thread called back into the run; call it through step(...)"
            )
            return _Ready(callback, args, context)
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        self._check()
        caller = sys._getframe(1)
        if caller.f_code is _WAIT:
            _refuse_unordered(caller.f_locals["fs"])
        return RunFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        if self.gone:
            coro.close()
            raise Gone
        if _called_by_as_completed(sys._getframe(1)) and isinstance(coro, types.CoroutineType):
            coro.close()
            raise TypeError(
                "asyncio.as_completed over bare coroutines has no fixed order: "
                "wrap each in asyncio.create_task(...), or pass step(...) calls"
            )
        parent = asyncio.current_task(self) if self.draining else None
        above = parent.scope if isinstance(parent, RunTask) else self.callback_scope
        return self.add_task(coro, Scope(above), name=name, context=context)

    def add_task(
        self, coro: Any, scope: Scope, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> RunTask:
        """Make a task with that scope; the loop keeps a strong reference until it is done."""
        task = RunTask(coro, loop=self, scope=scope, name=name, context=context)
        if len(self.tasks) >= self._tasks_next_sweep:
            self.tasks = [t for t in self.tasks if not t.done()]
            self._tasks_next_sweep = max(64, 2 * len(self.tasks))
        self.tasks.append(task)
        return task

    def scope(self) -> Scope:
        """Of the task that runs now, or of callbacks."""
        task = asyncio.current_task(self)
        return task.scope if isinstance(task, RunTask) else self.callback_scope

    def untie(self, task: RunTask) -> None:
        """Part a task that will never run again from what it waited for: each holds the other, and a worker that parks a
        thousand runs a second would leave them all to the collector."""
        waiter = getattr(task, "_fut_waiter", None)
        if isinstance(waiter, RunFuture) or type(waiter) is asyncio.Future:
            self.untying = True
            try:
                waiter.cancel()
            finally:
                self.untying = False

    def forget_execution(self) -> None:
        """The last thing of all: loop and execution hold each other."""
        self.execution = _NOBODY

    def _check(self) -> None:
        if self.gone and self.may_raise_gone():
            raise Gone

    def may_raise_gone(self) -> bool:
        """Whether `Gone` may still help. Code that swallows it in a loop gets a future that never resolves instead, at
        which its coroutine can be given up; else `leave` would never return."""
        self.gone_raised += 1
        return self.gone_raised <= _GONE_MAX

    # ------------------------------------------------------------------ what asyncio and libraries ask a loop

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        if enabled:
            self._refuse("set_debug")

    def is_running(self) -> bool:
        return self.draining

    def is_closed(self) -> bool:
        return self.gone

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> None:
        return None

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # Also called by the collector for exceptions nobody asked for: kept for the log, seen by no user code.
        if not self.gone and len(self.problems) < 20:
            self.problems.append(context)

    def _refuse(self, method: str) -> NoReturn:
        raise RuntimeError(f"loop.{method}() {DO_IN_A_STEP}")


def _refusal(method: str, is_async: bool) -> Callable[..., Any]:
    """A loop method that raises the sentence."""
    if is_async:

        async def refuse_async(self: RunLoop, *args: Any, **kwargs: Any) -> Any:
            self._refuse(method)

        refuse: Callable[..., Any] = refuse_async
    else:

        def refuse_sync(self: RunLoop, *args: Any, **kwargs: Any) -> Any:
            self._refuse(method)

        refuse = refuse_sync
    refuse.__name__ = method
    refuse.__qualname__ = f"RunLoop.{method}"
    return refuse


for _name in dir(asyncio.AbstractEventLoop):
    if not _name.startswith("_") and _name not in RunLoop.__dict__:
        _method = getattr(asyncio.AbstractEventLoop, _name)
        setattr(RunLoop, _name, _refusal(_name, asyncio.iscoroutinefunction(_method)))


# ---------------------------------------------------------------------- what asyncio leaves without an order

_WAIT: Final = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]


def _refuse_unordered(futures: Any) -> None:
    """`asyncio.wait` returns sets: of futures that hash by address, an order that changes with every replay."""
    if len(futures) > 1 and not all(isinstance(f, RunTask | RunFuture) for f in futures):
        odd = next(f for f in futures if not isinstance(f, RunTask | RunFuture))
        raise TypeError(
            f"asyncio.wait over a {type(odd).__name__.strip('_')} has no fixed order: "
            "wrap each gather(...) in a coroutine and asyncio.create_task"
        )


_ENSURE: Final = {
    f.__code__ for f in (getattr(asyncio.tasks, n, None) for n in ("ensure_future", "_ensure_future")) if f is not None
}


def _called_by_as_completed(frame: types.FrameType | None) -> bool:
    if frame is None or frame.f_code not in _ENSURE:
        return False
    for _ in range(5):
        frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__") != "asyncio.tasks":
            return False
        if frame.f_code.co_name == "as_completed" or "_AsCompletedIterator" in frame.f_code.co_qualname:
            return True
    return False


# ---------------------------------------------------------------------- what asyncio does otherwise on a run's loop


async def _wait_for(fut: Any, timeout: float | None) -> Any:
    """3.12's `asyncio.wait_for`, over `asyncio.timeout`.

    3.11's makes a task of its own and comes one turn later: its journals would not replay on 3.12.
    """
    if timeout is not None and timeout <= 0:
        fut = asyncio.ensure_future(fut)
        if fut.done():
            return fut.result()
        gone = asyncio.get_running_loop().create_future()  # 3.12 awaits one as well: it takes a turn of the loop
        fut.add_done_callback(lambda _: None if gone.done() else gone.set_result(None))
        fut.cancel()
        await gone
        try:
            return fut.result()
        except asyncio.CancelledError as error:
            raise TimeoutError from error
    async with asyncio.timeout(timeout):
        return await fut


def _all_tasks(loop: RunLoop) -> set[asyncio.Task[Any]]:
    """`asyncio.all_tasks` in the order of creation: its own set is filled in the order of a set that all runs of the process
    share, and where hashes collide that decides how it iterates."""
    return {task for task in loop.tasks if not task.done()}


async def _leave_group(original: Callable[..., Any], group: Any, kind: Any, error: Any, trace: Any) -> Any:
    """3.13's way out of a `TaskGroup`: a cancel from outside that comes while the group is failing is not lost with the
    group's own, and is delivered after it.

    Earlier ones forget the count of their own cancel, and with it that of another: the code would go another way there.
    """
    asked_before = group._parent_cancel_requested
    parent = group._parent_task
    try:
        return await original(group, kind, error, trace)
    except BaseExceptionGroup:
        if group._base_error is None:
            if group._parent_cancel_requested and not asked_before:
                parent.uncancel()
            if parent.cancelling():
                parent.uncancel()
                parent.cancel()
        raise


def _lead(function: Any, on_a_run: Callable[..., Any], source: str) -> None:
    """Give a function of asyncio another behaviour for callers on a run's loop, and leave it to everyone else.

    The function keeps its identity and gets new code, so that a `from asyncio import ...` made earlier is covered.
    """
    namespace: dict[str, Any] = function.__globals__
    name = function.__name__
    marker = f"_replaykit_{name.strip('_')}"
    if marker in namespace:
        return
    original = types.FunctionType(function.__code__, namespace, name, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    namespace[marker] = (RunLoop, on_a_run, original)
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace, made)
    function.__code__ = made[name].__code__


if sys.version_info < (3, 12):
    _lead(
        asyncio.tasks.wait_for,
        _wait_for,
        "async def wait_for(fut, timeout):\n"
        "    loop_type, on_a_run, original = _replaykit_wait_for\n"
        "    if isinstance(events._get_running_loop(), loop_type):\n"
        "        return await on_a_run(fut, timeout)\n"
        "    return await original(fut, timeout)\n",
    )
if sys.version_info < (3, 13):
    _lead(
        asyncio.TaskGroup.__aexit__,
        _leave_group,
        "async def __aexit__(self, et, exc, tb):\n"
        "    loop_type, on_a_run, original = _replaykit_aexit\n"
        "    if isinstance(self._loop, loop_type):\n"
        "        return await on_a_run(original, self, et, exc, tb)\n"
        "    return await original(self, et, exc, tb)\n",
    )
_lead(
    asyncio.tasks.all_tasks,
    _all_tasks,
    "def all_tasks(loop=None):\n"
    "    loop_type, on_a_run, original = _replaykit_all_tasks\n"
    "    asked = events._get_running_loop() if loop is None else loop\n"
    "    if isinstance(asked, loop_type):\n"
    "        return on_a_run(asked)\n"
    "    return original(loop)\n",
)

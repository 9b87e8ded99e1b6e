"""A random workflow: a tree drawn from a number, and an interpreter that runs it with plain asyncio and anyio.

Every program ends: what waits for a sibling waits with a backstop, so that a run that gets stuck is the core's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import functools
import random
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from replaykit.replay.calls import now, rng, saga, sleep, step, uuid4, workflow
from replaykit.replay.entries import Entry, Kind
from replaykit.replay.entries import Outcome as Ended
from replaykit.replay.execution import Execution, current_execution
from replaykit.replay.requests import CallStep, Command, Pending
from replaykit.replay.sagas import Owed, Saga
from tests.simulator.bodies import ACTING, CALLS, OWING, Boom, add, breach, call_of, visitor, whose

__all__ = ["Node", "Outcome", "Watched", "inline", "program", "tree"]

Node = tuple[Any, ...]
"""One construct: its name and its parts."""

BACKSTOP_SECONDS: Final = 9_000.0
_STEPS: Final = ("add", "add", "add", "thread", "flaky", "flaky", *CALLS, *ACTING, *OWING)
_SECONDS: Final = (0.0, 0.001, 1 / 3, 1.0, 2.0, 6.0, 60.0, 3_600.0, 172_800.0)
_SHORT: Final = (0.5, 1.0, 3.0, 10.0)


@dataclass
class Outcome:
    """What a program returns."""

    acc: int
    notes: int
    at: dt.datetime
    id: uuid.UUID


class Watched(Execution):
    """An execution that keeps, for each entry, what the code asked for and saw after it.

    Attributes:
        marks: by seq (0: the start), `(commands, sights)`.
        committed: up to which seq its entries are known to stand in the journal.
        rewinds: how many of them it knows of.
        sent: when the requests were sent that it may be told of, by mailbox id.
        got: the entry of each step.
        undoable: keys of steps whose saga was left by an exception.
        let_go: keys of steps without an effect that the code has given up.
    """

    marks: dict[int, tuple[Any, Any]]
    sights: list[Any]
    committed: int = 0
    absolute: int = 0
    live: bool = False  # driven by a worker that does not drain
    reading: bool = False
    wrong: bool = False  # of other code than the journal's
    rewinds: int = 0
    sent: dict[int, int]
    got: dict[str, Entry]
    undoable: set[str]
    let_go: set[str]
    _undone: list[tuple[Saga, int]]

    def start(self) -> list[Any]:
        self.marks, self.sights, self.got, self.undoable, self._undone = {}, [], {}, set(), []
        self.let_go = set()
        commands = super().start()
        self._mark(0, commands)
        return commands

    def replay(self, entries: Iterable[Entry]) -> None:
        self.reading = True
        super().replay(entries)
        self.reading = False

    def _deliver(self, entry: Entry, value: Any) -> None:  # live and replayed entries both come by here
        due = self.next_deadline
        if entry.kind == Kind.STEP and due is not None and due < entry.at and self.live and not self.reading:
            breach(f"the outcome of {entry.key} overtook a timer that was due {entry.at - due} us before")
        if entry.kind == Kind.CANCEL and entry.mailbox_id is not None and not self.reading and self.live:
            sent = self.sent[entry.mailbox_id]
            if due is not None and due < sent and due <= entry.at:
                breach(f"a request to end overtook a timer that was due {sent - due} us before it was sent")
        if entry.kind == Kind.STEP:
            self.got[entry.key] = entry
        super()._deliver(entry, value)
        self._mark(entry.seq, self._commands)
        unknown = self._unknown() if self.ended is not None else []
        if unknown:
            breach(f"the run ended before anybody knew what became of {unknown}")

    def _unknown(self) -> list[str]:
        """Calls with an effect that the code has given up and that have no entry."""
        return [c.key for c in self.open.values() if c.abandoned and c.effect is not None]

    def abandon(self, call: CallStep) -> None:
        super().abandon(call)
        if call.effect is None:
            self.let_go.add(call.key)

    def undoing(self, owed: Owed, saga: Saga) -> Pending[Any]:
        if owed.key not in self.undoable:
            breach(f"{owed.key} is undone, and no saga of it was left by an exception")
        if self._unknown():
            breach(f"{owed.key} is undone before anybody knew what became of {self._unknown()}")
        if owed.key not in self.let_go and any(of is saga and seq <= owed.seq for of, seq in self._undone):
            breach(f"{owed.key} is undone after an older one")
        if owed.key not in self.let_go:
            self._undone.append((saga, owed.seq))
        return super().undoing(owed, saga)

    def _mark(self, seq: int, commands: list[Command]) -> None:
        asked = tuple(
            (c.key, c.name, c.input.digest) if isinstance(c, CallStep) else ("given up", c.key) for c in commands
        )
        self.marks[seq] = (asked, tuple(self.sights))
        self.sights.clear()


@workflow
async def program(number: int) -> Outcome:
    """Run the program of that number."""
    execution = current_execution()
    assert execution is not None
    interpreter = Interpreter(execution)
    acc = [1]
    await interpreter.run(tree(number), acc)
    return Outcome(acc[0], interpreter.notes, now(), uuid4())


@workflow
async def inline(n: int) -> int:
    """A workflow that others call inline."""
    return await step(add, n) + await step(add, n + 1)


# ---------------------------------------------------------------------- drawing


@functools.lru_cache(maxsize=64)
def tree(number: int) -> Node:
    """The program of that number, the same in every process."""
    return _Grower(random.Random(f"program {number}")).root()


class _Grower:
    """Grows a tree of about twenty constructs."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.left = dice.choice((6, 12, 18, 24))

    def root(self) -> Node:
        parts = [self.node(0) for _ in range(self.dice.randint(2, 4))]
        parts = [("attempt", part) if self.dice.random() < 0.7 else part for part in parts]
        if self.dice.random() < 0.3:  # runs that fail are retried: now it may go well
            end: Node = ("fail", self.dice.choice((1, 2, 3)), True)
            if self.dice.random() < 0.7:  # of a step, whose siblings have ended after it
                end = ("collect", ("flaky", self.part("acting", 9), *self.part("steps", 9)))
            parts.insert(self.dice.randint(1, len(parts)), end)
        return ("seq", tuple(parts))

    def node(self, depth: int) -> Node:
        self.left -= 1
        if depth >= 4 or self.left <= 0:
            return self.leaf()
        kind = self.dice.choice(_KINDS)
        return (kind, *(self.part(shape, depth) for shape in _SHAPES[kind]))

    def leaf(self) -> Node:
        kind = self.dice.choice(("step", "step", "step", "step", "sleep", "values"))
        return (kind, *(self.part(shape, 9) for shape in _SHAPES[kind]))

    def part(self, shape: str, depth: int) -> Any:
        draw = self.dice
        if shape == "node":
            return self.node(depth + 1)
        if shape == "nodes":
            return tuple(self.node(depth + 1) for _ in range(draw.randint(2, 3)))
        if shape == "steps":
            return tuple(draw.choice(_STEPS) for _ in range(draw.randint(2, 4)))
        if shape == "owing":
            return tuple(draw.choice((*OWING, *OWING, *_STEPS)) for _ in range(draw.randint(2, 4)))
        if shape == "plain":
            return tuple(self.plain() for _ in range(draw.randint(2, 3)))
        table: dict[str, tuple[Any, ...]] = {
            "step": _STEPS,
            "seconds": _SECONDS,
            "short": _SHORT,
            "flag": (True, False),
            "few": (1, 2, 3),
            "acting": (*ACTING, *OWING),
        }
        return draw.choice(table[shape])

    def plain(self) -> Node:
        """Something that ends at once when it is cancelled: until it does, anyio cancels in every turn of the loop."""
        draw = self.dice
        kind = draw.choice(("step", "step", "sleep", "cleanup", "scoped"))
        if kind in ("step", "cleanup"):
            return (kind, draw.choice(_STEPS))
        return (kind, draw.choice(_SECONDS)) if kind == "sleep" else (kind, draw.choice(_SHORT), draw.choice(_STEPS))


_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "step": ("step",),
    "keyed": ("step",),
    "seq": ("nodes",),
    "gather": ("nodes", "flag"),
    "gather_calls": ("steps", "flag"),
    "collect": ("steps",),
    "group": ("nodes",),
    "first": ("nodes", "flag"),
    "every": ("nodes",),
    "rounds": ("nodes",),
    "completed": ("nodes", "seconds"),
    "completed_calls": ("steps",),
    "timeout": ("seconds", "node"),
    "wait_for": ("seconds", "node"),
    "wait_some": ("seconds", "nodes"),
    "shielded": ("short", "node"),
    "queue": ("nodes", "few"),
    "event": ("node", "few"),
    "condition": ("node", "few"),
    "lock": ("nodes",),
    "semaphore": ("nodes",),
    "barrier": ("nodes",),
    "pages": ("nodes", "node", "few"),
    "cancel": ("node", "node"),
    "orphan": ("node",),
    "final": ("node", "node"),
    "absorb": ("node", "node"),
    "stubborn": ("node",),
    "attempt": ("node",),
    "fail": ("few", "flag"),
    "branch": ("node", "node"),
    "members": ("nodes",),
    "library": ("node", "seconds"),
    "sleep": ("seconds",),
    "until": ("seconds", "flag"),
    "values": (),
    "callback": ("node", "flag"),
    "later": ("seconds", "node"),
    "context": ("node", "few"),
    "inline": (),
    "anyio_group": ("plain", "flag"),
    "anyio_move_on": ("short", "plain"),
    "anyio_fail_after": ("short", "plain"),
    "anyio_stream": ("plain",),
    "saga": ("nodes", "few"),
    "saga_tried": ("nodes", "few"),
    "saga_gather": ("owing", "flag"),
    "saga_group": ("owing", "nodes"),
    "saga_cut": ("short", "owing", "node"),
    "anyio_saga": ("short", "owing"),
    "act": ("acting",),
    "give_up": ("acting", "short"),
}
_KINDS: Final = (
    *_SHAPES,
    *("step",) * 8,
    "gather",
    "gather",
    "group",
    "first",
    "timeout",
    "wait_for",
    "final",
    "cancel",
    *("saga", "saga_tried", "saga_gather", "saga_cut", "act", "give_up"),
)


# ---------------------------------------------------------------------- running


@dataclass(eq=False)
class OwnSaga:
    """What the program itself keeps of a saga: the keys of the calls in it that are to be undone."""

    outer: OwnSaga | None
    calls: list[str] = field(default_factory=list)
    ended: bool = False
    undoing: bool = False

    @property
    def owing(self) -> OwnSaga | None:
        found: OwnSaga | None = self
        while found is not None and found.ended:
            found = found.outer
        return found


own_saga: Final[contextvars.ContextVar[OwnSaga | None]] = contextvars.ContextVar("own_saga", default=None)


def mix(acc: list[int], value: int) -> None:
    acc[0] = (acc[0] * 31 + value) % 1_000_003


def say(value: Any) -> str:
    """A value in words that are the same in every process."""
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(say, value))) + "}"
    if isinstance(value, BaseExceptionGroup):
        return f"{type(value).__name__}({value.message!r}, {[say(e) for e in value.exceptions]})"
    if isinstance(value, asyncio.CancelledError) and str(value).startswith("Cancelled via cancel scope"):
        return "CancelledError(of anyio)"  # its words hold an address
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    return repr(value)


class Interpreter:
    """Runs trees inside one execution; checks at every turn that it is this one's loop that runs it."""

    def __init__(self, execution: Execution) -> None:
        self.me = execution
        self.notes = 0

    def note(self, what: str, value: Any = None) -> None:
        """Something the code saw: it must be the same in every replay."""
        if current_execution() is not self.me:
            breach(f"user code of run {self.me.run_id} ran on another's loop, at {what}")
        if not self.me.loop.gone:
            self.notes += 1
            sights = getattr(self.me, "sights", None)
            if sights is not None:
                sights.append((what, say(value)))

    def see(self, acc: list[int], what: str, value: Any) -> None:
        """Note a value and let it decide about what follows."""
        self.note(what, value)
        mix(acc, zlib.crc32(say(value).encode("utf-8", "backslashreplace")))

    async def run(self, node: Node, acc: list[int]) -> int:
        self.note(node[0])
        await getattr(self, f"_{node[0]}")(acc, *node[1:])
        return acc[0]

    def task(self, node: Node, acc: list[int]) -> asyncio.Task[Any]:
        return asyncio.create_task(self.run(node, acc))

    def tasks(self, nodes: tuple[Node, ...], acc: list[int]) -> list[asyncio.Task[Any]]:
        return [self.task(node, acc if i % 2 else [acc[0] + i]) for i, node in enumerate(nodes)]

    def call(self, kind: str, n: int) -> Any:
        gone = self.me.loop.gone
        call = call_of(kind, n)
        if gone:
            breach(f"step {kind} could be called in an execution that has left memory")
        mine = own_saga.get()
        if kind in OWING and mine is not None and mine.owing is not None:
            mine.owing.calls.append(call._call.key)
        return call

    def calls(self, kinds: tuple[str, ...], n: int) -> list[Any]:
        """Several calls at once. One that a saga refuses would throw the others away, which holds the run."""
        mine = own_saga.get()
        refused = mine is not None and mine.owing is not None and mine.owing.undoing
        return [self.call("add" if refused and kind in OWING else kind, n + i) for i, kind in enumerate(kinds)]

    async def settle(self, acc: list[int], tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel and await tasks, whatever they end with."""
        for t in tasks:
            t.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            self.see(acc, "settled", result)

    # --- steps and values

    async def _step(self, acc: list[int], kind: str) -> None:
        self.see(acc, kind, await self.call(kind, acc[0] % 97))

    async def _keyed(self, acc: list[int], kind: str) -> None:
        self.me.absolute += 1  # type: ignore[attr-defined]
        key = f"own/{self.me.absolute}"  # type: ignore[attr-defined]
        self.see(acc, kind, await step.options(key=key)(add, acc[0] % 97))

    async def _values(self, acc: list[int]) -> None:
        self.see(acc, "now", now().isoformat())
        self.see(acc, "clock", asyncio.get_running_loop().time())
        self.see(acc, "rng", rng().randrange(1_000_000))
        self.see(acc, "uuid4", uuid4())

    async def _inline(self, acc: list[int]) -> None:
        self.see(acc, "inline", await inline(acc[0] % 97))

    async def _sleep(self, acc: list[int], seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.see(acc, "slept", now().isoformat())

    async def _until(self, acc: list[int], seconds: float, moment: bool) -> None:
        span = dt.timedelta(seconds=seconds)
        await sleep(now() + span if moment else span)
        self.see(acc, "slept", now().isoformat())

    async def _context(self, acc: list[int], node: Node, n: int) -> None:
        async def visit() -> None:
            visitor.set(acc[0] % 7)
            mine = visitor.get()
            await self.run(node, acc)
            # Its input says whose it is: else a rewind would rightly repeat the result of another visitor.
            if visitor.get() != mine or await step(whose, mine + 7 * n) != mine:
                breach("a body or a task saw another task's context variable")

        await asyncio.gather(visit(), visit())

    # --- control flow

    async def _seq(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            await self.run(node, acc)

    async def _branch(self, acc: list[int], one: Node, two: Node) -> None:
        await self.run(one if acc[0] % 2 else two, acc)

    async def _attempt(self, acc: list[int], node: Node) -> None:
        try:
            await self.run(node, acc)
        except Exception as error:
            self.see(acc, "caught", error)

    async def _fail(self, acc: list[int], modulus: int, boom: bool) -> None:
        if acc[0] % (modulus + 1) == 0:
            raise Boom("by the code", acc[0]) if boom else LookupError(acc[0])

    async def _final(self, acc: list[int], node: Node, cleanup: Node) -> None:
        try:
            await self.run(node, acc)
        finally:
            await self.run(cleanup, acc)

    async def _absorb(self, acc: list[int], node: Node, after: Node) -> None:
        try:
            await self.run(node, acc)
        except asyncio.CancelledError as error:
            self.see(acc, "absorbed", error)
            await self.run(after, acc)

    async def _stubborn(self, acc: list[int], node: Node) -> None:
        """A coroutine that ignores GeneratorExit, as code with a bare `except:` does."""
        try:
            await self.run(node, acc)
        except GeneratorExit:
            with contextlib.suppress(BaseException):
                await asyncio.Event().wait()
            await self.call("add", 1)

    async def _members(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        errors: list[Exception] = []
        for node in nodes:
            try:
                await self.run(node, acc)
            except Exception as error:
                errors.append(error)
        try:
            if errors:
                raise ExceptionGroup("of members", errors)
        except* Boom as group:
            self.see(acc, "booms", group)
        except* ValueError as group:
            self.see(acc, "values", group)

    # --- sagas

    @contextlib.asynccontextmanager
    async def saga(self) -> AsyncGenerator[None]:
        """A saga that is looked at when it has undone what it owed."""
        mine = OwnSaga(own_saga.get())
        own_saga.set(mine)
        try:
            async with saga():
                try:
                    yield
                except (Exception, asyncio.CancelledError):
                    self.me.undoable.update(mine.calls)  # type: ignore[attr-defined]
                    mine.undoing = True
                    raise
        except (Exception, asyncio.CancelledError) as error:
            own_saga.set(mine.outer)
            if not self.me.loop.gone:
                self.note("left a saga", error)
                self.check_undone(mine.calls)
            raise
        own_saga.set(mine.outer)
        mine.ended = True
        outer = mine.owing
        if outer is not None and outer.undoing:  # of a task that nobody awaited in it: undone as long as that undoes
            self.me.undoable.update(mine.calls)  # type: ignore[attr-defined]
            self.me.let_go.update(mine.calls)  # type: ignore[attr-defined]
        elif outer is not None:
            outer.calls += mine.calls

    def check_undone(self, keys: list[str]) -> None:
        """All that succeeded was undone, the newest first, and nothing is on its way."""
        got = self.me.got  # type: ignore[attr-defined]
        for key in keys:
            done, undoing = got.get(key), got.get(f"~undo:{key}")
            if key in self.me.let_go:  # type: ignore[attr-defined]
                continue  # without an effect nobody waits for what becomes of it
            if done is None and key in self.me.open and not self.me.open[key].abandoned:
                breach(f"a saga was left before anybody knew what became of {key}")
            owed = done is not None and done.outcome == Ended.OK
            if owed != (undoing is not None):
                breach(f"{key} {'is not undone' if owed else 'is undone, and did not succeed'}")
        let_go = self.me.let_go  # type: ignore[attr-defined]
        undone = [key for key in keys if f"~undo:{key}" in got and key in got and key not in let_go]
        pairs = [(got[f"~undo:{key}"].seq, got[key].seq) for key in undone]
        if [seq for _, seq in sorted(pairs)] != sorted((seq for _, seq in pairs), reverse=True):
            breach(f"sagas undo in the order {sorted(pairs)}")

    async def _saga(self, acc: list[int], nodes: tuple[Node, ...], how: int) -> None:
        async with self.saga():
            for node in nodes:
                await self.run(node, acc)
            if how == 1 or acc[0] % how:
                raise Boom("by the code of a saga", how)

    async def _saga_tried(self, acc: list[int], nodes: tuple[Node, ...], how: int) -> None:
        try:
            await self._saga(acc, nodes, how)
        except Exception as error:
            self.see(acc, "undone", error)

    async def _saga_gather(self, acc: list[int], kinds: tuple[str, ...], keep: bool) -> None:
        """An error leaves it with the others in flight."""
        try:
            async with self.saga():
                calls = self.calls(kinds, acc[0] % 97)
                self.see(acc, "gathered", [say(r) for r in await asyncio.gather(*calls, return_exceptions=keep)])
                if acc[0] % 3:
                    raise Boom("by the code of a saga", 3)
        except Exception as error:
            self.see(acc, "undone", error)

    async def _saga_group(self, acc: list[int], kinds: tuple[str, ...], nodes: tuple[Node, ...]) -> None:
        """An error in it cancels the others."""
        try:
            async with self.saga(), asyncio.TaskGroup() as group:
                for kind in kinds:
                    group.create_task(self._step(acc, kind))
                for node in nodes:
                    group.create_task(self.run(node, acc))
        except* Exception as errors:
            self.see(acc, "undone", errors)

    async def _saga_cut(self, acc: list[int], seconds: float, kinds: tuple[str, ...], node: Node) -> None:
        """A time-out leaves it, and comes while another one undoes."""
        try:
            async with asyncio.timeout(seconds):
                async with self.saga():
                    tasks = [asyncio.create_task(self._step(acc, kind)) for kind in kinds]
                    try:
                        await self.run(node, acc)
                        await asyncio.gather(*tasks)
                    finally:
                        await self.settle(acc, tasks)
                    raise Boom("by the code of a saga", 4)
        except Exception as error:
            self.see(acc, "undone", error)

    async def _act(self, acc: list[int], kind: str) -> None:
        try:
            self.see(acc, kind, await self.call(kind, acc[0] % 97))
        except Exception as error:
            self.see(acc, kind, error)

    async def _give_up(self, acc: list[int], kind: str, seconds: float) -> None:
        """The await ends, the call goes on."""
        try:
            async with asyncio.timeout(seconds / 10):
                self.see(acc, kind, await self.call(kind, acc[0] % 97))
        except Exception as error:
            self.see(acc, kind, error)

    # --- many at once

    async def _gather(self, acc: list[int], nodes: tuple[Node, ...], keep: bool) -> None:
        results = await asyncio.gather(*(self.run(node, acc) for node in nodes), return_exceptions=keep)
        self.see(acc, "gathered", [say(r) for r in results])

    async def _gather_calls(self, acc: list[int], kinds: tuple[str, ...], keep: bool) -> None:
        calls = self.calls(kinds, acc[0] % 97)
        self.see(acc, "gathered", [say(r) for r in await asyncio.gather(*calls, return_exceptions=keep)])

    async def _collect(self, acc: list[int], kinds: tuple[str, ...]) -> None:
        """All of them, each going on with what the others have made of the sum, and then the first error."""

        async def chain(i: int, kind: str) -> Any:
            got = await self.call(kind, acc[0] % 97 + i)
            mix(acc, zlib.crc32(say(got).encode("utf-8", "backslashreplace")))
            return await self.call(kind if i % 2 and kind in ACTING else "add", acc[0] % 97)

        chains = [chain(i, kind) for i, kind in enumerate(kinds)]
        results = await asyncio.gather(*chains, return_exceptions=True)
        self.see(acc, "collected", [say(r) for r in results])
        for one in results:
            if isinstance(one, Exception):
                raise one

    async def _group(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for node in nodes:
                    group.create_task(self.run(node, acc))
                mix(acc, 3)
        except* (Boom, LookupError) as errors:
            self.see(acc, "group", errors)

    async def _first(self, acc: list[int], nodes: tuple[Node, ...], error: bool) -> None:
        tasks = self.tasks(nodes, acc)
        when = asyncio.FIRST_EXCEPTION if error else asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(tasks, return_when=when)
            for t in done:
                self.see(acc, "winner", tasks.index(t))
        finally:
            await self.settle(acc, tasks)

    async def _every(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        tasks = self.tasks((*nodes, *nodes), acc)
        gate = asyncio.Event()

        async def at_once(t: asyncio.Task[Any]) -> Any:
            await asyncio.wait([t])
            async with asyncio.timeout(BACKSTOP_SECONDS):
                await gate.wait()

        waiting = [asyncio.create_task(at_once(t)) for t in tasks]
        await asyncio.wait(tasks)
        gate.set()
        done, _ = await asyncio.wait(waiting)
        for t in done:  # a set of tasks that ended together: its order is the hashes'
            self.see(acc, "one of all", waiting.index(t))
            if acc[0] % 2:
                await self.call("add", waiting.index(t))
        await self.settle(acc, tasks)

    async def _rounds(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        tasks = self.tasks(nodes, acc)
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for t in done:
                self.see(acc, "round", tasks.index(t))
                await self.call("add", acc[0] % 5)
        await self.settle(acc, tasks)

    async def _completed(self, acc: list[int], nodes: tuple[Node, ...], seconds: float) -> None:
        tasks = self.tasks(nodes, acc)
        try:
            for one in asyncio.as_completed(tasks, timeout=seconds):
                try:
                    self.see(acc, "completed", await one)
                except TimeoutError as error:
                    self.see(acc, "late", error)
                    break
                except Exception as error:
                    self.see(acc, "failed", error)
        finally:
            await self.settle(acc, tasks)

    async def _completed_calls(self, acc: list[int], kinds: tuple[str, ...]) -> None:
        for one in asyncio.as_completed(self.calls(kinds, 0)):
            try:
                self.see(acc, "completed", await one)
            except Exception as error:
                self.see(acc, "failed", error)

    async def _cancel(self, acc: list[int], node: Node, meanwhile: Node) -> None:
        victim = self.task(node, [acc[0]])
        try:
            await self.run(meanwhile, acc)
        finally:
            victim.cancel("by its parent")
            for result in await asyncio.gather(victim, return_exceptions=True):
                self.see(acc, "victim", result)

    async def _orphan(self, acc: list[int], node: Node) -> None:
        self.task(node, acc)
        await asyncio.sleep(0)

    # --- time

    async def _timeout(self, acc: list[int], seconds: float, node: Node) -> None:
        try:
            async with asyncio.timeout(seconds) as scope:
                await self.run(node, acc)
        except TimeoutError as error:
            self.see(acc, f"timeout {scope.expired()}", error)  # pyright: ignore[reportPossiblyUnboundVariable]

    async def _wait_for(self, acc: list[int], seconds: float, node: Node) -> None:
        try:
            await asyncio.wait_for(self.run(node, acc), seconds)
        except TimeoutError as error:
            self.see(acc, "timeout", error)

    async def _wait_some(self, acc: list[int], seconds: float, nodes: tuple[Node, ...]) -> None:
        tasks = self.tasks(nodes, acc)
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds)
            for t in done:
                self.see(acc, "in time", tasks.index(t))
        finally:
            await self.settle(acc, tasks)

    async def _shielded(self, acc: list[int], seconds: float, node: Node) -> None:
        inner = self.task(node, acc)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(inner)
        except TimeoutError:
            self.see(acc, "shielded", inner.done())
        for result in await asyncio.gather(inner, return_exceptions=True):
            self.see(acc, "inner", result)

    async def _later(self, acc: list[int], seconds: float, node: Node) -> None:
        loop = asyncio.get_running_loop()
        rung = loop.create_future()

        def ring() -> None:
            if not rung.done():
                rung.set_result(loop.time())

        bell = loop.call_later(seconds, ring)
        loop.call_later(seconds + 1, self.note, "a second bell")
        await self.run(node, acc)
        if acc[0] % 2:
            bell.cancel()
            rung.cancel()
        try:
            self.see(acc, "rung", await rung)
        except asyncio.CancelledError:
            if not rung.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise

    # --- what tasks share

    async def _queue(self, acc: list[int], nodes: tuple[Node, ...], consumers: int) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def consume() -> None:
            while True:
                n = await queue.get()
                with contextlib.suppress(Exception):
                    self.see(acc, "took", await self.call("add", n % 97))
                queue.task_done()

        workers = [asyncio.create_task(consume()) for _ in range(consumers)]
        try:
            for node in nodes:
                await self.run(node, acc)
                async with asyncio.timeout(BACKSTOP_SECONDS):
                    await queue.put(acc[0])
            async with asyncio.timeout(BACKSTOP_SECONDS):
                await queue.join()
        finally:
            await self.settle(acc, workers)

    async def _event(self, acc: list[int], node: Node, waiters: int) -> None:
        event = asyncio.Event()

        async def wait(i: int) -> None:
            async with asyncio.timeout(BACKSTOP_SECONDS):
                await event.wait()
            self.see(acc, f"woken {i}", await self.call("add", i))

        tasks = [asyncio.create_task(wait(i)) for i in range(waiters)]
        try:
            await self.run(node, acc)
        finally:
            event.set()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                self.see(acc, "waiter", result)

    async def _condition(self, acc: list[int], node: Node, waiters: int) -> None:
        condition = asyncio.Condition()
        ready: list[int] = []

        async def wait(i: int) -> None:
            async with asyncio.timeout(BACKSTOP_SECONDS), condition:
                await condition.wait_for(lambda: len(ready) > i)
                self.see(acc, f"notified {i}", await self.call("add", i))

        tasks = [asyncio.create_task(wait(i)) for i in range(waiters)]
        try:
            await self.run(node, acc)
            for _ in range(waiters):
                async with condition:
                    ready.append(1)
                    condition.notify_all()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self.settle(acc, tasks)

    async def _exclusive(self, acc: list[int], lock: Any, nodes: tuple[Node, ...]) -> None:
        async def hold(node: Node) -> None:
            async with lock:
                self.see(acc, "holds", lock.locked())
                await self.run(node, acc)

        results = await asyncio.gather(*(hold(node) for node in nodes), return_exceptions=True)
        self.see(acc, "released", [say(r) for r in results])

    async def _lock(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        await self._exclusive(acc, asyncio.Lock(), nodes)

    async def _semaphore(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        await self._exclusive(acc, asyncio.BoundedSemaphore(2), (*nodes, ("step", "add")))

    async def _barrier(self, acc: list[int], nodes: tuple[Node, ...]) -> None:
        barrier = asyncio.Barrier(len(nodes))

        async def arrive(node: Node) -> None:
            try:
                await self.run(node, acc)
            finally:
                async with asyncio.timeout(BACKSTOP_SECONDS):
                    self.see(acc, "passed", await barrier.wait())

        results = await asyncio.gather(*(arrive(node) for node in nodes), return_exceptions=True)
        self.see(acc, "barrier", [say(r) for r in results])

    # --- generators, callbacks, libraries

    async def _pages(self, acc: list[int], nodes: tuple[Node, ...], cleanup: Node, how: int) -> None:
        async def pages() -> AsyncGenerator[int, None]:
            try:
                for i, node in enumerate(nodes):
                    await self.run(node, acc)
                    yield i
            finally:
                await self.run(cleanup, acc)

        source = pages()
        if how == 1:
            async with contextlib.aclosing(source):
                async for page in source:
                    self.see(acc, "page", page)
                    break
            return
        async for page in source:  # left by `break`: closed at the end of the function
            self.see(acc, "page", page)
            if how == 2 or acc[0] % 2:
                break

    async def _callback(self, acc: list[int], node: Node, soon: bool) -> None:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Task[Any]] = []

        def later(_: Any = None) -> None:
            self.note("callback")
            made.append(loop.create_task(self.run(node, [acc[0]])))

        if soon:
            loop.call_soon(later)
        else:
            self.task(("step", "add"), acc).add_done_callback(later)
        await self.run(("step", "add"), acc)
        await asyncio.sleep(0)
        for result in await asyncio.gather(*made, return_exceptions=True):
            self.see(acc, "of the callback", result)

    async def _library(self, acc: list[int], node: Node, seconds: float) -> None:
        """A helper of a library that never calls a step: it takes no number."""

        async def beat() -> None:
            for _ in range(3):
                await asyncio.sleep(seconds)
                self.note("beat")

        helper = asyncio.create_task(beat())
        try:
            await self.run(node, acc)
        finally:
            helper.cancel()

    # --- anyio

    async def _cleanup(self, acc: list[int], kind: str) -> None:
        try:
            await self._step(acc, kind)
        finally:
            with anyio.CancelScope(shield=True):
                self.see(acc, "cleaned", await self.call("add", 1))

    async def _scoped(self, acc: list[int], seconds: float, kind: str) -> None:
        with anyio.move_on_after(seconds) as scope:
            await self._step(acc, kind)
        self.see(acc, "scope", scope.cancelled_caught)

    async def _anyio_group(self, acc: list[int], plain: tuple[Node, ...], stop: bool) -> None:
        try:
            async with anyio.create_task_group() as group:
                for node in plain:
                    group.start_soon(self.run, node, acc)
                if stop:
                    await self.run(("step", "add"), acc)
                    group.cancel_scope.cancel()
        except* Exception as errors:
            self.see(acc, "anyio group", errors)

    async def _plainly(self, acc: list[int], scope: Callable[[], Any], plain: tuple[Node, ...]) -> None:
        try:
            with scope() as cancel_scope:
                for node in plain:
                    await self.run(node, acc)
        except TimeoutError as error:
            self.see(acc, "anyio timeout", error)
        self.see(acc, "anyio scope", cancel_scope.cancelled_caught)  # pyright: ignore[reportPossiblyUnboundVariable]

    async def _anyio_move_on(self, acc: list[int], seconds: float, plain: tuple[Node, ...]) -> None:
        await self._plainly(acc, lambda: anyio.move_on_after(seconds), plain)

    async def _anyio_fail_after(self, acc: list[int], seconds: float, plain: tuple[Node, ...]) -> None:
        await self._plainly(acc, lambda: anyio.fail_after(seconds), plain)

    async def _anyio_saga(self, acc: list[int], seconds: float, kinds: tuple[str, ...]) -> None:
        """Left by a scope's time, which cancels at every turn while it undoes."""
        with anyio.move_on_after(seconds) as scope:
            try:
                async with self.saga():
                    for kind in kinds:
                        await self._step(acc, kind)
                    raise Boom("by the code of a saga", 5)
            except Exception as error:
                self.see(acc, "undone", error)
        self.see(acc, "scope", scope.cancelled_caught)

    async def _anyio_stream(self, acc: list[int], plain: tuple[Node, ...]) -> None:
        sender, receiver = anyio.create_memory_object_stream[int](1)

        async def produce() -> None:
            async with sender:
                for node in plain:
                    await self.run(node, acc)
                    await sender.send(acc[0])

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(produce)
                async with receiver:
                    async for n in receiver:
                        self.see(acc, "received", n)
                        await self.call("add", n % 97)
        except* Exception as errors:
            self.see(acc, "anyio stream", errors)

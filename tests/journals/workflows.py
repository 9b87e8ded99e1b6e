"""The workflows of the committed journals. Their code may not change: a journal would not replay any more.

Each one asks something of asyncio that another version of Python might answer in another order. Add new ones, and write
the journals anew for them only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
from pydantic import BaseModel
from typing_extensions import TypedDict

from replaykit import Workflow, now, rng, sleep, step, uuid4, workflow
from tests.journals.dice import roll

__all__ = ["WORKFLOWS"]


# --- bodies -----------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """An error with an attribute and an `__init__` of its own."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


async def take(n: int) -> int:
    """Some number."""
    return n + roll(10)


def take_in_thread(n: int) -> int:
    """The same, of a sync function."""
    return n + roll(10)


async def maybe(n: int) -> int:
    """Fails one time in three."""
    if roll(3) == 0:
        raise Refused(roll(5), detail=f"at {n}")
    return n + roll(10)


async def fail(n: int) -> int:
    """Fails in one of many ways."""
    try:
        raise LookupError(f"the cause of {n}")
    except LookupError as cause:
        noted = ValueError("noted")
        noted.add_note(f"a note on {n}")
        ways: list[BaseException] = [
            Refused(n, detail="é \0 \ud83d"),
            ExceptionGroup("of members", [noted, ExceptionGroup("inner", [Refused(1, detail="in")])]),
            noted,
            FileNotFoundError(2, "none", "file"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
            KeyError("key"),
            StopIteration(n),
            SystemExit(n),
            asyncio.CancelledError("of the body's own"),
            TimeoutError("of the body's own"),
            re.error("of another name since 3.13"),
        ]
        raise ways[roll(len(ways))] from cause


visitor: contextvars.ContextVar[int] = contextvars.ContextVar("visitor", default=0)


async def whose() -> int:
    """The caller's context variable."""
    return visitor.get()


class Colour(enum.Enum):
    """A member with a tuple as its value."""

    RED = (1, 2)
    BLUE = "blue"


class Level(enum.IntEnum):
    """Is an int."""

    LOW = 1
    HIGH = 2


class Right(enum.Flag):
    """May be combined."""

    READ = 1
    WRITE = 2


class Mood(enum.StrEnum):
    """Is a str."""

    GOOD = "good"


@dataclass(frozen=True)
class Point:
    """Frozen."""

    x: float
    y: float = 0.0


@dataclass(kw_only=True)
class Line:
    """With a computed field, and others in it."""

    points: list[Point]
    mood: Mood | None = None
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.points)


class Order(BaseModel):
    """A model."""

    id: uuid.UUID
    total: decimal.Decimal
    lines: dict[int, Line]
    at: dt.datetime | None = None


class Row(TypedDict, total=False):
    """A typed dict."""

    name: str
    level: Level


class Pair(NamedTuple):
    """A named tuple."""

    left: int
    right: str


_MOMENT = dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.timezone(dt.timedelta(hours=1)))

UNTYPED: list[Any] = [
    None,
    (1, (2.5, "x")),
    {1: "a", "1": "b", None: "c", (1, 2): "d"},
    {3, 1, 2},
    frozenset({"a", "b"}),
    b"\xff\x00",
    bytearray(b"ab"),
    "é\0\ud83d",
    "\\u0000",
    10**40,
    2**53 + 1,
    [float("nan"), float("inf"), -0.0, 1e300, 0.1],
    1 + 2j,
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    _MOMENT,
    dt.datetime(2026, 1, 1),
    dt.date(2026, 1, 1),
    dt.time(1, 2, 3, 4),
    dt.timedelta(days=1, microseconds=1),
    uuid.UUID(int=7),
    pathlib.PurePosixPath("a/b"),
    pathlib.Path("a/b"),
    ipaddress.ip_address("10.0.0.1"),
    ipaddress.ip_network("fe80::/10"),
    range(1, 9, 2),
    re.compile("a+", re.IGNORECASE),
    Colour.RED,
    Level.HIGH,
    Right.READ | Right.WRITE,
    Mood.GOOD,
    Point(1.5),
    Line(points=[Point(1, 2)]),
    Order(id=uuid.UUID(int=8), total=decimal.Decimal("0.30"), lines={1: Line(points=[])}, at=_MOMENT),
    Pair(1, "r"),
    deque([1, 2], maxlen=3),
    Counter("abca"),
    OrderedDict(b=1, a=2),
    defaultdict(list, {"k": [1]}),
    {"~tuple": [1]},
]


async def value_of_any_kind(n: int) -> Any:
    """An untyped value."""
    return UNTYPED[n]


async def same(value: Any) -> Any:
    """What it is given."""
    return value


async def make_order(lines: list[Line], *, total: decimal.Decimal, row: Row) -> Order:
    """Typed in and out."""
    return Order(id=uuid.UUID(int=roll(9)), total=total + roll(3), lines=dict(enumerate(lines)), at=_MOMENT)


async def make_pair(levels: set[Level], when: dict[dt.date, tuple[int, ...]], mood: Mood | None) -> Pair:
    """Typed in and out."""
    return Pair(sum(levels) + sum(map(sum, when.values())), f"{mood}")


# --- one after another, side by side ----------------------------------------------------------------------------------


async def branch(n: int, steps: int = 2) -> int:
    """Some steps, one after another."""
    for _ in range(steps):
        n = await step(take, n % 50)
    return n


async def outcomes(*tasks: Any) -> list[str]:
    """How they ended, in words."""
    return [say(x) for x in await asyncio.gather(*tasks, return_exceptions=True)]


def say(value: Any) -> str:
    """Words that are the same under each Python."""
    if isinstance(value, re.error):
        return f"re.error({value})"
    if isinstance(value, BaseExceptionGroup):
        return f"{type(value).__name__}({value.message!r}, {[say(e) for e in value.exceptions]})"
    return f"{type(value).__name__}({value})" if isinstance(value, BaseException) else repr(value)


@workflow
async def straight(n: int) -> list[int]:
    seen = [await step(take, n), await step(take_in_thread, n)]
    while seen[-1] % 3:
        seen.append(await step(take, seen[-1]))
    if seen[-1] % 2:
        seen.append(await step.options(name="odd")(take, n))
    seen.append(await step.options(key="own/key")(take, n))
    return seen


@workflow
async def inner(n: int) -> int:
    return await branch(n)


@workflow
async def gathered(n: int) -> list[Any]:
    calls = [step(take, i) for i in range(3)]
    mixed = await asyncio.gather(*calls, branch(n), inner(n), step(take_in_thread, n))
    after = await asyncio.gather(branch(n), branch(n, 1), branch(n, 3))
    return [mixed, after]


@workflow
async def gathered_failures(n: int) -> list[Any]:
    first = await outcomes(*(step(maybe, i) for i in range(4)), branch(n))
    try:
        return [first, await asyncio.gather(*(step(maybe, i) for i in range(4)), branch(n))]
    except Refused as error:
        return [first, error.code, error.detail, await branch(n)]


@workflow
async def groups(n: int) -> list[str]:
    seen: list[str] = []

    async def member(i: int) -> None:
        try:
            await step(maybe, i)
            await branch(i)
        finally:
            seen.append(f"left {i}: {await step(take, i)}")

    for _ in range(2):
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(3):
                    group.create_task(member(i))
                await step(take, n)
                async with asyncio.TaskGroup() as within:
                    within.create_task(branch(n))
                    within.create_task(member(7))
        except* Refused as errors:
            seen.append(say(errors))
    return seen


@workflow
async def nested_tasks(n: int) -> list[Any]:
    async def grow(depth: int) -> Any:
        if depth == 0:
            return await step(take, depth)
        tasks = [asyncio.create_task(grow(depth - 1)) for _ in range(2)]
        mine = await step(take, depth)
        return [mine, [await t for t in reversed(tasks)]]

    helper = asyncio.create_task(asyncio.sleep(0))  # takes no number
    grown = await grow(3)
    await helper
    return [grown, await asyncio.create_task(branch(n))]


# --- time -------------------------------------------------------------------------------------------------------------


async def within(seconds: float, what: Coroutine[Any, Any, Any]) -> Any:
    """Its result, or that it was late."""
    try:
        return await asyncio.wait_for(what, seconds)
    except TimeoutError:
        return "late"


@workflow
async def waited_for(n: int) -> list[Any]:
    async def tidy() -> int:
        try:
            return await branch(n, 3)
        finally:
            await step(take, 99)

    seen = [await within(5, branch(n)), await within(1, step(take, n)), await within(0, branch(n))]
    seen += [await within(3, tidy()), await within(4, within(2, tidy()))]
    seen += await asyncio.gather(within(2, branch(n)), within(3, tidy()), within(1, step(take, n)))
    seen += await asyncio.gather(*(asyncio.create_task(branch(i)) for i in range(2)))
    return seen


@workflow
async def many_waited_for(n: int) -> list[Any]:
    for i in range(9):  # 3.11's wait_for made a task here: the tasks after it had other hashes
        await asyncio.wait_for(step(take, i), 1_000)
    tasks = {asyncio.create_task(branch(i, 1), name=f"t{i}") for i in range(8)}
    return [[t.get_name(), await t, await step(take, n)] for t in tasks]


@workflow
async def timeouts(n: int) -> list[Any]:
    seen: list[Any] = []
    for seconds in (1, 3, 8):
        try:
            async with asyncio.timeout(seconds) as scope:
                seen.append(await branch(n))
                async with asyncio.timeout(2):
                    seen.append(await asyncio.gather(branch(n), branch(n)))
                scope.reschedule(asyncio.get_running_loop().time() + 2)
                seen.append(await branch(n))
        except TimeoutError:
            seen.append([scope.expired(), asyncio.current_task().cancelling()])  # type: ignore[union-attr]
            seen.append(await step(take, n))
    return seen


@workflow
async def group_in_a_timeout(n: int) -> list[str]:
    seen: list[str] = []
    for seconds in (1.0, 2.0, 4.0):
        try:
            async with asyncio.timeout(seconds):
                async with asyncio.TaskGroup() as group:
                    group.create_task(branch(n, 3))
                    group.create_task(step(maybe, n))
                    try:
                        await asyncio.sleep(seconds)
                    finally:
                        await asyncio.shield(asyncio.create_task(branch(n, 1)))
        except* TimeoutError as errors:
            seen.append(f"{say(errors)} {asyncio.current_task().cancelling()}")  # type: ignore[union-attr]
        except* Refused as errors:
            seen.append(f"{say(errors)} {asyncio.current_task().cancelling()}")  # type: ignore[union-attr]
        seen.append(str(await step(take, n)))
    return seen


@workflow
async def sleeps(n: int) -> list[Any]:
    start = now()
    await asyncio.sleep(1 / 3)
    await sleep(dt.timedelta(hours=2))
    await sleep(now() + dt.timedelta(microseconds=7))
    await asyncio.gather(sleep(2), sleep(2), asyncio.sleep(1), asyncio.sleep(0), step(take, n))
    task = asyncio.create_task(sleep(3_600))
    first = await step(take, n)
    task.cancel()
    ended = await outcomes(task)
    return [(now() - start).total_seconds(), asyncio.get_running_loop().time(), first, ended]


# --- races ------------------------------------------------------------------------------------------------------------


@workflow
async def races(n: int) -> list[Any]:
    seen: list[Any] = []
    left = {asyncio.create_task(branch(i, 1 + i % 3), name=f"t{i}") for i in range(6)}
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            seen.append([task.get_name(), task.result(), await step(take, n)])
        if len(left) == 2:
            for task in left:
                task.cancel()
    return seen


@workflow
async def first_failure(n: int) -> list[Any]:
    tasks = [asyncio.create_task(step(maybe, i), name=f"t{i}") for i in range(5)]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=6)
    seen: list[Any] = [[t.get_name() for t in done], [t.get_name() for t in left]]
    for task in left:
        task.cancel()
        seen.append(await step(take, n))
    return [*seen, await outcomes(*tasks)]


@workflow
async def as_they_complete(n: int) -> list[Any]:
    seen: list[Any] = []
    for one in asyncio.as_completed([step(take, i) for i in range(4)]):
        seen.append(await one)
    tasks = [asyncio.create_task(branch(i)) for i in range(4)]
    try:
        for one in asyncio.as_completed(tasks, timeout=5):
            seen.append([await one, await step(take, n)])
    except TimeoutError:
        seen.append("late")
    return seen


@workflow
async def sets_of_tasks(n: int) -> list[Any]:
    tasks = {asyncio.create_task(step(maybe, i), name=f"t{i}") for i in range(12)}
    steps = {step(take, i) for i in range(5)}
    seen: list[Any] = [[await one for one in steps]]
    done, _ = await asyncio.wait(tasks)
    seen.append([t.get_name() for t in done])
    seen.append([t.get_name() for t in asyncio.all_tasks()])
    return seen


# --- cancelling -------------------------------------------------------------------------------------------------------


@workflow
async def cancelled(n: int) -> list[Any]:
    seen: list[Any] = []

    async def tidy(i: int) -> int:
        try:
            return await branch(i, 3)
        except asyncio.CancelledError as error:
            seen.append([i, str(error), await step(take, i)])
            raise
        finally:
            seen.append([i, await branch(i)])

    tasks = [asyncio.create_task(tidy(i)) for i in range(3)]
    await step(take, n)
    for task in tasks:
        task.cancel("enough")
    await step(take, n)
    for task in tasks:
        task.cancel("more than enough")
    return [seen, await outcomes(*tasks), [t.cancelled() for t in tasks]]


@workflow
async def shielded(n: int) -> list[Any]:
    task = asyncio.create_task(branch(n, 3))
    late: list[Any] = []
    try:
        async with asyncio.timeout(3):
            late.append(await asyncio.shield(task))
    except TimeoutError:
        late.append(await step(take, n))
    outer = asyncio.create_task(asyncio.wait_for(asyncio.shield(task), 100))
    await asyncio.sleep(0)
    outer.cancel()
    return [late, await outcomes(outer, task)]


@workflow
async def generators(n: int) -> list[Any]:
    seen: list[Any] = []

    async def pages(name: str) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield await step(take, n)
        finally:
            seen.append([name, await step(take, n)])

    async with contextlib.aclosing(pages("closed")) as source:
        async for page in source:
            seen.append(page)
            if page % 2:
                break
    for name in ("left", "left as well"):
        async for page in pages(name):
            seen.append(page)
            break
    return seen


@workflow
async def orphans(n: int) -> list[int]:
    async def tidy(i: int) -> None:
        try:
            await branch(i, 4)
        finally:
            await branch(i)

    for i in range(3):
        asyncio.create_task(tidy(i))
    return [await branch(n)]


@workflow
async def is_cancelled(n: int) -> list[int]:
    async def tidy(i: int) -> int:
        try:
            return await branch(i, 3)
        finally:
            await step(take, i)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(tidy(i)) for i in range(2)]
            await asyncio.wait_for(branch(n, 3), 100)
        return [task.result() for task in tasks]
    finally:
        await asyncio.gather(branch(n), asyncio.shield(branch(n)))


@workflow
async def survives_a_cancel(n: int) -> list[Any]:
    seen: list[Any] = []
    for _ in range(3):
        try:
            seen.append(await asyncio.gather(branch(n), step(take, n)))
            async with asyncio.timeout(5):
                await sleep(2)
        except asyncio.CancelledError:
            seen.append(await step(take, n))
            task = asyncio.current_task()
            seen.append(task.uncancel() if task is not None else None)
    return seen


@workflow
async def is_retried(n: int) -> list[Any]:
    first = await asyncio.gather(branch(n), branch(n, 1))
    found = await asyncio.gather(*(step(maybe, i) for i in range(5)), branch(n), return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(step(maybe, i)) for i in range(2)]
        tasks.append(group.create_task(branch(n, 3)))
    return [first, found, [task.result() for task in tasks], await step(maybe, n)]


# --- what tasks share -------------------------------------------------------------------------------------------------


@workflow
async def queues(n: int) -> list[Any]:
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
    urgent: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
    seen: list[Any] = []

    async def consume(name: str) -> None:
        while True:
            item = await queue.get()
            seen.append([name, item, await step(take, item)])
            urgent.put_nowait(-item)
            queue.task_done()

    consumers = [asyncio.create_task(consume(name)) for name in "abc"]
    for i in range(7):
        await queue.put(i + await step(take, n) if i % 3 == 0 else i)
    await queue.join()
    for consumer in consumers:
        consumer.cancel()
    return [seen, [urgent.get_nowait() for _ in range(urgent.qsize())], await outcomes(*consumers)]


@workflow
async def locks(n: int) -> list[Any]:
    lock, pair, condition = asyncio.Lock(), asyncio.Semaphore(2), asyncio.Condition()
    gate, barrier = asyncio.Event(), asyncio.Barrier(3)
    seen: list[Any] = []

    async def hold(i: int) -> None:
        async with pair:
            seen.append(["pair", i, await step(take, i)])
        async with lock:
            seen.append(["lock", i, await step(take, i)])
            gate.set()
        await gate.wait()
        async with condition:
            await condition.wait_for(lambda: len(seen) >= 6)
            condition.notify_all()
        async with condition:
            condition.notify_all()
        seen.append(["passed", await barrier.wait() >= 0, i])

    tasks = [asyncio.create_task(hold(i)) for i in range(3)]
    waiter = asyncio.create_task(hold(9))
    await step(take, n)
    waiter.cancel()
    await outcomes(waiter)
    async with condition:
        await condition.wait_for(lambda: len(seen) >= 6)
        condition.notify_all()
    await asyncio.wait(tasks, timeout=50)
    return seen


@workflow
async def contexts(n: int) -> list[Any]:
    async def visit(i: int) -> list[int]:
        visitor.set(i)
        seen = await step(whose)
        await branch(n, 1)
        return [seen, visitor.get(), await asyncio.create_task(step(whose))]

    visitor.set(n)
    return [await asyncio.gather(*(visit(i) for i in range(3))), await step(whose)]


@workflow
async def callbacks(n: int) -> list[Any]:
    loop = asyncio.get_running_loop()
    made: list[asyncio.Task[int]] = []

    def later(*_: Any) -> None:
        made.append(loop.create_task(branch(n, 1)))

    loop.call_soon(later)
    bell = loop.call_later(2, later)
    asyncio.create_task(step(take, n)).add_done_callback(later)
    await branch(n)
    bell.cancel()
    loop.call_later(1, later)
    await sleep(1.5)
    return [len(made), await asyncio.gather(*made)]


# --- values and errors ------------------------------------------------------------------------------------------------


@workflow
async def chance(n: int) -> list[Any]:
    async def draw() -> list[Any]:
        dice = rng()
        await step(take, n)
        return [dice.random(), rng().randrange(10**9), uuid4(), dice.sample(range(100), 3), rng().gauss(0, 1)]

    return [await asyncio.gather(draw(), draw()), await draw(), uuid4(), now()]


@workflow
async def untyped_values(n: int) -> list[Any]:
    seen = []
    for i in range(n - 1, len(UNTYPED), 3):  # the three journals hold all of them
        value = await step(value_of_any_kind, i)
        again = await step(same, value)
        seen.append([type(again).__name__, again == value or i == 11])
    return seen


@workflow
async def typed_values(n: int) -> list[Any]:
    lines = [Line(points=[Point(n, 0.1)]), Line(points=[], mood=Mood.GOOD)]
    order = await step(make_order, lines, total=decimal.Decimal("1.1"), row={"name": "é", "level": Level.HIGH})
    pair = await step(make_pair, {Level.HIGH, Level.LOW}, {dt.date(2026, 1, 2): (1, 2)}, Mood.GOOD)
    return [order, pair, order.lines[1].mood is Mood.GOOD, type(order.total).__name__]


@workflow
async def failures(n: int) -> list[Any]:
    seen: list[Any] = []
    for i in range(8):
        try:
            await step(fail, i)
        except* Refused as errors:
            seen.append([say(errors), [getattr(e, "code", None) for e in errors.exceptions]])
        except* Exception as errors:
            seen.append([say(errors), [repr(e.__cause__) for e in errors.exceptions]])
    return seen


@workflow
async def fails(n: int) -> None:
    try:
        await step(maybe, n)
        async with asyncio.TaskGroup() as group:
            group.create_task(step(fail, n))
            group.create_task(branch(n, 3))
    except BaseException as error:
        error.add_note(f"of {n}")
        raise
    finally:
        await branch(n)


# --- anyio ------------------------------------------------------------------------------------------------------------


@workflow
async def with_anyio(n: int) -> list[Any]:
    seen: list[Any] = []
    sender, receiver = anyio.create_memory_object_stream[int](1)

    async def produce(mine: Any, start: int) -> None:
        async with mine:
            for i in range(2):
                await mine.send(start + i + await step(take, i))

    async with receiver, anyio.create_task_group() as group:
        group.start_soon(produce, sender.clone(), 0)
        group.start_soon(produce, sender.clone(), 100)
        sender.close()
        async for item in receiver:
            seen.append([item, await step(take, item % 7)])
    for seconds in (1, 4):
        with anyio.move_on_after(seconds) as scope:
            seen.append(await branch(n))
        seen.append(scope.cancelled_caught)
        try:
            with anyio.fail_after(seconds):
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: step(maybe, n))
                    group.start_soon(branch, n)
                    with anyio.CancelScope(shield=True):
                        seen.append(await step(take, n))
        except* TimeoutError:
            seen.append("late")
        except* Refused as errors:
            seen.append(say(errors))
    return seen


WORKFLOWS: dict[str, Workflow[..., Any]] = {
    found.name: found for found in list(globals().values()) if isinstance(found, Workflow) and found is not inner
}
"""By name."""

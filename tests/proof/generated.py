"""Random workflows that always come to the same end: a tree drawn from a number, and an interpreter that runs it.

Time and the order in which bodies end decide nothing here that a crash may change: what races, races against what takes an
hour, and each construct makes its result of its parts in their own order. So a run whose process was killed must equal one whose
process was not, in its result, its journal and what it did outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
import zlib
from collections.abc import Callable
from typing import Any, Final

from tenacity import AsyncRetrying, stop_after_attempt, wait_fixed

from replaykit import Landed, NotLanded, StepInfo, now, rng, saga, sleep, step, uuid4, workflow
from replaykit.testing import count_effect, effects_counted

__all__ = ["program", "tree"]

Node = tuple[Any, ...]
"""One construct: its name and its parts."""

AGAIN: Final = AsyncRetrying(stop=stop_after_attempt(3), wait=wait_fixed(0.01))
AN_HOUR: Final = 3_600.0
MODULUS: Final = 1_000_003


class Boom(Exception):
    """An error of the author's."""


# ------------------------------------------------------------------ bodies


async def plain(n: int) -> int:
    """At once."""
    return n + 1


async def slow(n: int) -> int:
    """A few milliseconds, not the same for each."""
    await asyncio.sleep(n % 4 / 200)
    return n + 2


def in_thread(n: int) -> int:
    """The same in a thread."""
    time.sleep(n % 3 / 200)
    return n + 3


async def flaky(n: int) -> int:
    """Fails once or twice."""
    if step.current().attempt <= 1 + n % 2:
        raise Boom(f"try {step.current().attempt} of {n}")
    return n + 4


async def fails(n: int) -> int:
    """Always."""
    raise Boom(f"{n}")


async def endless(n: int) -> int:
    """Nobody waits for it."""
    await asyncio.sleep(AN_HOUR)
    return n


@step.policy(effect="idempotent", not_landed=Boom)
async def put(n: int) -> int:
    """The other side knows the key."""
    count_effect("put", once=True)
    return n + 5


@step.policy(effect="idempotent")
def put_in_thread(n: int) -> int:
    """The same in a thread."""
    count_effect("put", once=True)
    return n + 6


async def find(info: StepInfo) -> Landed[int] | NotLanded:
    """Whether it was sent."""
    return Landed(info.input["n"] + 7) if effects_counted("send") else NotLanded()


@step.policy(effect="irreversible", reconcile=find)
async def send(n: int) -> int:
    """Twice would be twice."""
    await asyncio.sleep(n % 3 / 200)
    count_effect("send")
    return n + 7


@step.policy(effect="irreversible", reconcile=find)
def send_in_thread(n: int) -> int:
    """The same in a thread."""
    count_effect("send")
    return n + 7


@step.policy(effect="irreversible", not_landed=Boom, reconcile=find)
async def send_at_last(n: int) -> int:
    """Is refused once."""
    if step.current().attempt == 1:
        raise Boom(f"not now, {n}")
    count_effect("send")
    return n + 7


@step.policy(effect="irreversible", reconcile=find)
async def send_observed(n: int) -> int:
    """Tells an identifier before."""
    await step.current().observe("parcel", f"{step.current().key}-{n}")
    count_effect("send")
    return n + 7


@step.policy(effect="transactional")
async def insert(n: int) -> int:
    """A row."""
    info = step.current()
    connection = await info.connection()
    await connection.execute("insert into public.booked values (%s, %s, %s)", [info.run_id, info.key, f"row {n}"])
    return n + 8


async def undo_plain(n: int) -> None:
    """Nobody minds a second one."""


@step.policy(effect="idempotent")
async def undo_put(n: int) -> None:
    """By key."""
    count_effect("take back", once=True)


async def find_recalled(info: StepInfo) -> Landed[None] | NotLanded:
    """Whether it is undone."""
    return Landed(None) if effects_counted("recall") else NotLanded()


@step.policy(effect="irreversible", reconcile=find_recalled)
def undo_send(n: int) -> None:
    """Once."""
    count_effect("recall")


@step.policy(effect="transactional")
async def undo_insert(n: int) -> None:
    """Another row."""
    info = step.current()
    connection = await info.connection()
    await connection.execute("insert into public.booked values (%s, %s, %s)", [info.run_id, info.key, f"undone {n}"])


CALLS: Final[dict[str, Callable[[int], Any]]] = {
    "plain": lambda n: step(plain, n),
    "slow": lambda n: step(slow, n),
    "thread": lambda n: step(in_thread, n),
    "named": lambda n: step.options(name=f"named-{n % 3}")(plain, n),
    "cheap": lambda n: step.options(durability="async")(plain, n),
    "flaky": lambda n: step.options(retry=AGAIN)(flaky, n),
    "put": lambda n: step(put, n),
    "put in a thread": lambda n: step(put_in_thread, n),
    "send": lambda n: step(send, n),
    "send in a thread": lambda n: step(send_in_thread, n),
    "send at last": lambda n: step.options(retry=AGAIN)(send_at_last, n),
    "send observed": lambda n: step(send_observed, n),
    "insert": lambda n: step(insert, n),
}
"""How steps are called that come to an end."""

OWING: Final[dict[str, Callable[[int], Any]]] = {
    "plain": lambda n: step.options(compensate=undo_plain)(slow, n),
    "put": lambda n: step.options(compensate=undo_put)(put, n),
    "send": lambda n: step.options(compensate=undo_send)(send, n),
    "insert": lambda n: step.options(compensate=undo_insert)(insert, n),
    "lent": lambda n: step.options(compensate=lambda got: None)(put_in_thread, n),
}
"""How steps are called that a saga undoes."""


# ------------------------------------------------------------------ drawing

_KINDS: Final = ("seq", "gather", "group", "saga", "saga", "late", "race", "queue", "lock", "final", "shield", "stop")
_LEAVES: Final = (*("step",) * 6, "caught", "nap", "values")


@functools.lru_cache(maxsize=64)
def tree(number: int) -> Node:
    """The program of that number, the same in every process."""
    dice = random.Random(f"proof {number}")
    left = [dice.choice((5, 8, 11))]
    return ("seq", tuple(_node(dice, 0, left) for _ in range(dice.randint(2, 3))))


def _node(dice: random.Random, depth: int, left: list[int]) -> Node:
    left[0] -= 1
    if depth >= 3 or left[0] <= 0 or dice.random() < 0.3:
        return _leaf(dice)
    kind = dice.choice(_KINDS)
    if kind == "saga":
        return (kind, tuple(dice.choice(tuple(OWING)) for _ in range(dice.randint(1, 3))), dice.choice((0, 1, 2)))
    if kind in ("late", "race", "stop"):
        return (kind, dice.choice(tuple(CALLS)))
    if kind in ("queue", "lock"):
        return (kind, tuple(dice.choice(tuple(CALLS)) for _ in range(dice.randint(2, 3))))
    return (kind, tuple(_node(dice, depth + 1, left) for _ in range(2)))


def _leaf(dice: random.Random) -> Node:
    kind = dice.choice(_LEAVES)
    return (kind, dice.choice(tuple(CALLS))) if kind == "step" else (kind,)


# ------------------------------------------------------------------ running


@workflow
async def program(number: int) -> list[int]:
    """Run the program of that number."""
    return [number, await run(tree(number), number % 97)]


async def run(node: Node, n: int) -> int:
    """A construct's value, which its number and its parts alone decide."""
    kind, *parts = node
    return int(await globals()[f"_{kind}"](n, *parts)) % MODULUS


def mix(*values: Any) -> int:
    """One number of many, in their order."""
    return zlib.crc32(repr(values).encode()) % MODULUS


async def _step(n: int, kind: str) -> int:
    return mix(await CALLS[kind](n % 97))


async def _caught(n: int) -> int:
    try:
        return int(await step(fails, n % 97))
    except Boom as error:
        return mix(n, str(error))


async def _nap(n: int) -> int:
    await sleep(0.01 + n % 3 / 100)
    return n


async def _values(n: int) -> int:
    """Who draws first of tasks side by side is not the same in each run: only what all draws have in common counts."""
    before = now()
    drawn = rng().randrange(97)
    after = await step(plain, n % 97)
    return mix(n, 0 <= drawn < 97, after, now() >= before, len(str(uuid4())))


async def _seq(n: int, nodes: tuple[Node, ...]) -> int:
    for node in nodes:
        n = await run(node, n)
    return n


async def _gather(n: int, nodes: tuple[Node, ...]) -> int:
    return mix(*await asyncio.gather(*(run(node, n + i) for i, node in enumerate(nodes))))


async def _group(n: int, nodes: tuple[Node, ...]) -> int:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(node, n + i)) for i, node in enumerate(nodes)]
    return mix(*(task.result() for task in tasks))


async def _saga(n: int, kinds: tuple[str, ...], how: int) -> int:
    """`how` 0: it goes well; 1: an error after its steps; 2: its steps side by side, then an error."""
    try:
        async with saga():
            if how == 2:
                got = await asyncio.gather(*(OWING[kind](n % 97 + i) for i, kind in enumerate(kinds)))
            else:
                got = [await OWING[kind](n % 97 + i) for i, kind in enumerate(kinds)]
            if how:
                raise Boom("by the code of a saga")
            return mix(*got)
    except Boom as error:
        return mix(n, str(error), await step(plain, n % 97))


async def _late(n: int, kind: str) -> int:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await step(endless, n % 97)
    async with asyncio.timeout(AN_HOUR):
        return await _step(n, kind)


async def _race(n: int, kind: str) -> int:
    tasks = [asyncio.create_task(_step(n, kind)), asyncio.create_task(_endless(n))]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return mix(*(task.result() for task in done))


async def _endless(n: int) -> int:
    return int(await step(endless, n % 97))


async def _queue(n: int, kinds: tuple[str, ...]) -> int:
    todo: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
    found: dict[int, int] = {}

    async def consume() -> None:
        while True:
            i = await todo.get()
            found[i] = await _step(n + i, kinds[i])
            todo.task_done()

    worker = asyncio.create_task(consume())  # one: two would share the numbers of their steps by who comes first
    for i in range(len(kinds)):
        await todo.put(i)
    await todo.join()
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    return mix(*sorted(found.items()))


async def _lock(n: int, kinds: tuple[str, ...]) -> int:
    lock = asyncio.Lock()

    async def hold(i: int) -> int:
        async with lock:
            return await _step(n + i, kinds[i])

    return mix(*await asyncio.gather(*(hold(i) for i in range(len(kinds)))))


async def _final(n: int, nodes: tuple[Node, ...]) -> int:
    cleaned = 0
    try:
        await run(nodes[0], n)
        raise Boom("by the code")
    except Boom as error:
        n = mix(n, str(error))
    finally:
        cleaned = await run(nodes[1], n)
    return mix(n, cleaned)


async def _shield(n: int, nodes: tuple[Node, ...]) -> int:
    return mix(*[await asyncio.shield(asyncio.ensure_future(run(node, n))) for node in nodes])


async def _stop(n: int, kind: str) -> int:
    """A task that is cancelled while its step runs, and cleans up."""
    cleaned: list[int] = []

    async def wait() -> None:
        try:
            await step(endless, n % 97)
        finally:
            cleaned.append(await _step(n, kind))

    task = asyncio.create_task(wait())
    other = await step(plain, n % 97)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return mix(other, *cleaned)

"""What can differ between the code that wrote a journal and the code that replays it, and what the run says then.

python -m tests.replay.divergences --write      puts the sentences into docs/reference/held.md
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaykit.replay.calls import now, sleep, step, workflow
from replaykit.replay.entries import State
from tests.replay.story import Story

__all__ = ["CASES", "DOC", "Case", "reason_of", "table"]

DOC: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "held.md"
BEGIN, END = "<!-- sentences: written by tests -->", "<!-- end of sentences -->"

Body = Callable[["World"], Awaitable[Any]]


@dataclass
class World:
    """What the code can see besides its journal: another one in the process that replays."""

    second: bool

    @property
    def order(self) -> list[str]:
        """How a set of strings iterates: by the process' hash seed."""
        return ["b", "a"] if self.second else ["a", "b"]


async def reserve(item: str) -> str:
    return item


async def charge(cents: int) -> int:
    return cents


async def ship(to: str) -> str:
    return to


async def post(order: dict[str, Any]) -> Any:
    return order


@dataclass(frozen=True)
class Case:
    """One kind of divergence. `code` is given the world it runs in; `entries` are recorded before the process dies."""

    title: str
    code: Body
    entries: int = 2


async def before(_: World) -> None:
    await step(reserve, "book")
    await step(charge, 100)
    await step(ship, "Rome")


def either(old: Body, new: Body) -> Body:
    """Yesterday's code in the first process, today's in the second."""

    async def code(world: World) -> Any:
        return await (new if world.second else old)(world)

    return code


async def extra(_: World) -> None:
    await step(reserve, "book")
    await step(ship, "extra")
    await step(charge, 100)


async def missing(_: World) -> None:
    await step(charge, 100)
    await step(ship, "Rome")


async def renamed(_: World) -> None:
    await step.options(name="book")(reserve, "book")
    await step(charge, 100)


async def reordered(_: World) -> None:
    await step(charge, 100)
    await step(reserve, "book")


async def other_function(_: World) -> None:
    await step.options(key="first")(charge, 100)
    await step(charge, 100)


async def one_function(_: World) -> None:
    await step.options(key="first")(reserve, "book")
    await step(charge, 100)
    await step(ship, "Rome")


async def sleeps_instead(_: World) -> None:
    await step(reserve, "book")
    await sleep(60)


async def slept_before(_: World) -> None:
    await step(reserve, "book")
    await sleep(3)
    await step(ship, "Rome")


async def steps_instead(_: World) -> None:
    await step(reserve, "book")
    await step(charge, 100)


async def other_input(_: World) -> None:
    await step(reserve, "book")
    await step(charge, 120)


async def shorter(_: World) -> None:
    await step(reserve, "book")


async def raises(_: World) -> None:
    await step(reserve, "book")
    raise ValueError("a new check")


async def branches(world: World) -> None:
    await step(reserve, "book")
    await (step(ship, "Rome") if world.second else step(charge, 100))
    await step(ship, "Rome")


async def a_set(world: World) -> None:
    for item in world.order:  # for item in {"a", "b"}
        await step(reserve, item)
    await step(ship, "Rome")


async def a_dict_of_objects(world: World) -> None:
    await step(post, {"id": id(world)})  # repr or id() of an object: an address
    await step(ship, "Rome")


async def environment(world: World) -> None:
    await step(reserve, "book")
    await step(ship, "Paris" if world.second else "Rome")  # os.environ["CITY"]
    await step(ship, "Rome")


async def wall_clock(world: World) -> None:
    await step(reserve, "2026-12-01" if world.second else "2026-11-30")  # datetime.now().date()
    await step(ship, "Rome")


async def a_thread(world: World) -> None:
    await step(reserve, "book")
    if world.second:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(print))
        thread.start()
        thread.join()
    await step(charge, 100)
    await step(ship, "Rome")


async def dropped(world: World) -> None:
    await step(reserve, "book")
    if world.second:
        step(charge, 100)
    else:
        await step(charge, 100)
    await step(ship, "Rome")


async def twice(world: World) -> None:
    await step.options(key="order")(reserve, "book")
    await step.options(key="order" if world.second else "other")(charge, 100)
    await step(ship, "Rome")


async def other_task(world: World) -> None:
    async def pay() -> None:
        await step(charge, 100)

    await step(reserve, "book")
    await (asyncio.create_task(pay()) if world.second else pay())
    await step(ship, "Rome")


async def spins(world: World) -> None:
    await step(reserve, "book")
    while world.second:
        await asyncio.sleep(0)
    await step(charge, 100)
    await step(ship, "Rome")


async def waits_for_nothing(world: World) -> None:
    await step(reserve, "book")
    if world.second:
        await asyncio.Event().wait()
    await step(charge, 100)
    await step(ship, "Rome")


async def clock_of_the_run(_: World) -> None:
    await step(reserve, now().isoformat())
    await step(ship, "Rome")


CASES: Final = [
    Case("an extra step", either(before, extra)),
    Case("a missing step", either(before, missing)),
    Case("a renamed step", either(before, renamed)),
    Case("two steps reordered", either(before, reordered)),
    Case("another function under the same `key=`", either(one_function, other_function)),
    Case("a sleep where a step was", either(before, sleeps_instead)),
    Case("a step where a sleep was", either(slept_before, steps_instead)),
    Case("another input", either(before, other_input)),
    Case("another branch", branches),
    Case("a shorter function", either(before, shorter)),
    Case("a function that raises before its journal ends", either(before, raises)),
    Case("a step in another task than before", other_task),
    Case("the order of a set of strings", a_set, 1),
    Case("an object's `repr` or `id()` in an argument", a_dict_of_objects, 1),
    Case("a variable of the environment", environment),
    Case("the wall clock instead of `now()`", wall_clock, 1),
    Case("a thread that calls back into the run", a_thread),
    Case("a `step(...)` without `await`", dropped),
    Case("a `key=` used twice", twice),
    Case("a loop that never waits", spins),
    Case("a wait for what nothing can resolve", waits_for_nothing),
]


def reason_of(case: Case) -> str | None:
    """Why the second process holds the run; None if it does not."""
    world = World(second=False)

    @workflow(name="order")
    async def order() -> None:
        await case.code(world)

    story = Story(order).until(lambda s: len(s.journal) == case.entries)
    story.evict()
    world = World(second=True)
    story.play()
    return story.reason if story.state is State.HELD else None


def told(reason: str) -> str:
    """A reason without what differs from one machine or Python to the next."""
    reason = re.sub(r"[^\s:<(]*/(tests/[\w/]+\.py):\d+", "order.py:12", reason)
    reason = re.sub(r"order\.py:12 in \w+( < order\.py:12 in \w+)*", "order.py:12 in order", reason)
    reason = re.sub(r'"id":\d+', '"id":1400', reason)
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.+]+", "2026-11-30T10:00:00+00:00", reason)


def table() -> str:
    """The rows of docs/reference/held.md."""
    lines = ["| what differs | what the run says |", "|---|---|"]
    for case in CASES:
        reason = reason_of(case)
        assert reason is not None, f"{case.title}: it is not held"
        lines.append(f"| {case.title} | {told(reason).replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table between its markers."""
    text = DOC.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    DOC.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}")


if __name__ == "__main__" and "--write" in sys.argv:
    main()

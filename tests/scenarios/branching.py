"""Workflows whose branches end in any order, and a process that replays their journals.

`python -m tests.scenarios.branching write FILE` runs them, `... replay FILE` replays what was written.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from replaykit import Workflow, step, workflow
from tests.journals.record import record, replay
from tests.journals.workflows import take

__all__ = ["FLOWS", "of_three", "two_steps"]


async def two_steps(i: int) -> int:
    """Two steps, one after the other."""
    return await step(take, i) + await step(take, 2 * i)


@workflow
async def waits_for_twenty(n: int) -> list[Any]:
    tasks = [asyncio.create_task(two_steps(i), name=f"t{i}") for i in range(20)]
    seen: list[Any] = []
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    while True:
        for task in done:
            seen.append([task.get_name(), task.result(), await step(take, n)])
        if not left:
            return seen
        done, left = await asyncio.wait(left)


@workflow
async def takes_twenty_as_they_come(n: int) -> list[int]:
    seen = []
    for one in asyncio.as_completed([asyncio.create_task(two_steps(i)) for i in range(20)]):
        seen.append(await one)
        if len(seen) % 5 == 0:
            seen.append(await step(take, n))
    return seen


async def step_a(n: int) -> int:
    """The first of three."""
    return await take(n)


async def step_b(n: int) -> int:
    """The second."""
    return await take(n)


async def step_c(n: int) -> int:
    """The third."""
    return await take(n)


@workflow
async def of_three(n: int) -> list[int]:
    found = await asyncio.gather(step(step_a, n), step(step_b, n), step(step_c, n))
    return [*found, await step(take, sum(found))]


async def branch(i: int) -> list[int]:
    """Three steps of one name."""
    return [await step(take, i), await step(take, i), await step(take, i)]


@workflow
async def of_two_branches(n: int) -> list[Any]:
    return [await asyncio.gather(branch(1), branch(2)), await branch(3)]


FLOWS: dict[str, Workflow[..., Any]] = {
    flow.name: flow for flow in (waits_for_twenty, takes_twenty_as_they_come, of_three, of_two_branches)
}
"""By name."""


def main(what: str, file: str) -> None:
    """Write, or replay and print for each workflow how many of its journals came out the same."""
    path = Path(file)
    if what == "write":
        path.write_text(json.dumps([record(flow, n) for flow in FLOWS.values() for n in range(10)]))
        return
    same = dict.fromkeys(FLOWS, 0)
    for found in json.loads(path.read_text()):
        same[found["workflow"]] += replay(FLOWS[found["workflow"]], found) == found
    print(json.dumps(same))


if __name__ == "__main__":
    main(*sys.argv[1:])

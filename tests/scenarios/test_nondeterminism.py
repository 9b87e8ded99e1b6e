"""Scenarios of the kind nondeterminism: the same keys in each replay, or a run that is held and says why."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replaykit import Client, NotJournalable, RunHeld, Worker, Workflow, step, workflow
from tests.crash.rows import Rows
from tests.journals.record import entries_of, record, replay
from tests.replay import drive
from tests.scenarios.branching import FLOWS, of_three, two_steps
from tests.scenarios.stage import ROOT, play, python, replaykit

pytestmark = pytest.mark.anyio

SEEDS = ("1", "2", "3", "4", "0")


# --- sets, gathers, branches ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """How many journals of each workflow replay, in each of five fresh processes with hash seeds of their own."""
    file = tmp_path_factory.mktemp("journals") / "written.json"
    written = python("-m", "tests.scenarios.branching", "write", str(file), PYTHONHASHSEED="5")
    assert written.code == 0, written.err
    found = []
    for seed in SEEDS:
        said = python("-m", "tests.scenarios.branching", "replay", str(file), PYTHONHASHSEED=seed)
        assert said.code == 0, said.err
        found.append(json.loads(said.out))
    return found


def test_b085_sets_of_tasks_iterate_alike_in_each_process(elsewhere: list[dict[str, int]]) -> None:
    """asyncio.wait and as_completed over twenty tasks of two steps each: same keys, same results."""
    for name in ("waits_for_twenty", "takes_twenty_as_they_come"):
        assert [same[name] for same in elsewhere] == [10] * len(SEEDS)


def test_b085_what_has_no_order_is_refused_with_a_way_out() -> None:
    """as_completed over bare coroutines is a set of addresses: told at once, and the run fails."""

    given: list[Any] = []

    @workflow
    async def bare() -> None:
        given.extend(two_steps(n) for n in range(20))
        for one in asyncio.as_completed(given):
            await one

    live = drive.begin(bare)
    for coroutine in given:
        coroutine.close()
    with pytest.raises(TypeError, match=r"asyncio\.create_task"):
        live.result


def test_b088_branches_may_interleave_in_any_way(elsewhere: list[dict[str, int]]) -> None:
    """Identity is by branch: ten journals of two branches of three steps, in five fresh processes."""
    assert [same["of_two_branches"] for same in elsewhere] == [10] * len(SEEDS)
    found = {tuple(entry.key for entry in entries_of(record(FLOWS["of_two_branches"], n))) for n in range(10)}
    assert len(found) > 5, "the branches did interleave"


def test_b086_a_gather_has_its_keys_by_the_order_of_its_calls() -> None:
    """Killed after any entry, fifty times, and gone on with elsewhere in another order: the same keys, no mismatch."""
    for n in range(50):
        whole = record(of_three, n)
        entries = entries_of(whole)
        keys = {entry.key: entry.name for entry in entries}
        assert keys == {name: name for name in ("step_a", "step_b", "step_c", "take")}
        for cut in range(len(entries)):
            other = record(of_three, n, entries[:cut], chance=f"cut {cut}")
            assert entries_of(other)[:cut] == entries[:cut]
            assert {entry.key: entry.name for entry in entries_of(other)} == keys
            assert replay(of_three, other) == other


gates: dict[str, asyncio.Event] = {}
begun: Counter[str] = Counter()


async def pass_gate(name: str) -> str:
    begun[name] += 1
    if name in gates:
        await gates[name].wait()
    return name


@workflow
async def three_at_gates() -> list[str]:
    return list(
        await asyncio.gather(
            *(step.options(name=f"pass-{name}")(pass_gate, name) for name in ("a", "b", "c")),
        )
    )


async def test_b086_another_worker_goes_on_with_a_gather(dsn: str, rows: Rows) -> None:
    """The last of three ends first and is recorded; a second worker runs the two others again, and it alone."""
    begun.clear()
    gates.update(a=asyncio.Event(), b=asyncio.Event())
    async with Client(dsn) as client:
        first = Worker(client, workflows=[three_at_gates])
        await first.start()
        handle = await client.start(three_at_gates)
        while rows.ask("select key from journal") != [("pass-c",)]:
            await asyncio.sleep(0.005)
        await first.stop(grace_seconds=0)
        gates.clear()
        async with Worker(client, workflows=[three_at_gates]):
            result = await handle.result(timeout=30)

    assert result == ["a", "b", "c"]
    assert begun == {"a": 2, "b": 2, "c": 1}


# --- what a body does for the workflow --------------------------------------------------------------------------------


async def report(events: list[str]) -> list[str]:
    events.append("half")
    return [*events, "done"]


@workflow
async def consumes() -> list[Any]:
    events: list[str] = []
    told = await step(report, events)
    return [events, told]


async def test_b089_what_a_body_tells_is_its_result(dsn: str) -> None:
    """It gets copies: events reach the workflow as part of the recorded outcome or, in the first run as well, not at all."""
    played = await play(dsn, consumes)

    assert played.first == played.again == [[], ["half", "done"]]


async def put(queue: Any) -> None:
    queue.put_nowait("event")


@workflow
async def shares(kind: str) -> None:
    shared: Any = asyncio.get_running_loop().create_future() if kind == "Future" else getattr(asyncio, kind)()
    await step(put, shared)


@pytest.mark.parametrize("kind", ["Queue", "Event", "Lock", "Future"])
async def test_b089_what_tasks_of_a_run_share_is_refused_to_a_body(kind: str) -> None:
    """Handing one over is told in a sentence at the call, not found out by the first replay."""
    live = drive.begin(shares, kind)

    with pytest.raises(NotJournalable, match=rf"^\$\.queue: an? .*{kind} belongs to the run's own tasks"):
        live.result
    assert live.asked == []


# --- the code has changed ---------------------------------------------------------------------------------------------


async def one(n: int) -> int:
    return n + 1


async def two(n: int) -> int:
    return n + 2


async def whole(n: int) -> int:
    return n + 3


async def parts(n: int) -> int:
    return await step(one, n) + await step(two, n)


@workflow(name="blocks")
async def journaled(n: int) -> int:
    return await step(whole, n) + await step(one, 5)


@workflow(name="blocks")
async def transparent(n: int) -> int:
    return await parts(n) + await step(one, 5)


@pytest.mark.parametrize(
    ("before", "after", "holds", "asks"),
    [(journaled, transparent, "step whole", "one at"), (transparent, journaled, "step one", "whole at")],
    ids=["made transparent", "made one step"],
)
def test_b091_a_block_that_became_another_kind_of_block_holds_the_run(
    before: Workflow[..., Any], after: Workflow[..., Any], holds: str, asks: str
) -> None:
    """Both sides are named; no old result stands for new code."""
    live = drive.begin(before, 1)
    live.finish()
    again = drive.replay(after, live.journal, 1)

    assert holds in again.reason
    assert asks in again.reason


ENVIRONMENT: dict[str, Any] = {"weekend": False}


@workflow
async def chooses_by_the_clock() -> str:
    if ENVIRONMENT["weekend"]:  # as datetime.now().weekday() > 4 says, some days later
        await step.options(name="wait-for-monday")(pass_gate, "monday")
    await step.options(name="ship-today")(pass_gate, "today")
    return await step.options(name="tell")(pass_gate, "tell")


async def test_b092_code_that_asks_the_clock_leaves_a_held_run_with_its_reason(dsn: str, rows: Rows) -> None:
    """State, client and command line name the run, what the journal holds and what the code asked."""
    gates["tell"] = asyncio.Event()
    async with Client(dsn) as client:
        first = Worker(client, workflows=[chooses_by_the_clock])
        await first.start()
        handle = await client.start(chooses_by_the_clock)
        while rows.ask("select key from journal") != [("ship-today",)]:
            await asyncio.sleep(0.002)
        await first.stop(grace_seconds=0)
        ENVIRONMENT["weekend"] = True
        try:
            async with Worker(client, workflows=[chooses_by_the_clock]):
                with pytest.raises(RunHeld) as held:
                    await handle.result(timeout=30)
                info = await handle.info()
        finally:
            ENVIRONMENT["weekend"] = False
            gates.clear()
    shown = await asyncio.to_thread(replaykit, dsn, "show", str(handle.id))

    assert str(handle.id) in str(held.value)
    assert info.state == "held"
    for words in (held.value.reason, info.reason or "", " ".join(shown.out.split())):
        assert "step ship-today" in words
        assert "wait-for-monday" in words


spent = Counter[str]()


async def spend(cents: int) -> int:
    spent["step"] += cents
    return cents


@workflow
async def spends(cents: int) -> int:
    spent["workflow"] += cents  # wrong: it happens again in each replay
    first = await step(spend, cents)
    return first + await step(pass_gate_for, cents)


async def pass_gate_for(cents: int) -> int:
    begun["spend"] += 1
    if "spend" in gates:
        await gates["spend"].wait()
    return cents


async def test_b094_what_is_to_happen_once_belongs_into_a_step(dsn: str, rows: Rows) -> None:
    """Resumed twice, a step's effect happened once, that of the workflow's own code three times; the docs say so."""
    spent.clear()
    begun.clear()
    gates["spend"] = asyncio.Event()
    async with Client(dsn) as client:
        handle = None
        for times in (1, 2):
            worker = Worker(client, workflows=[spends])
            await worker.start()
            handle = handle or await client.start(spends, 5)
            while begun["spend"] < times or rows.ask("select key from journal") != [("spend",)]:
                await asyncio.sleep(0.002)
            await worker.stop(grace_seconds=0)
        gates.clear()
        async with Worker(client, workflows=[spends]):
            assert handle is not None
            assert await handle.result(timeout=30) == 10

    assert spent == {"step": 5, "workflow": 15}
    docs = (Path(ROOT) / "docs" / "explanation" / "how-replay-works.md").read_text()
    assert "Everything that touches the world goes into a step" in docs


# --- failures ---------------------------------------------------------------------------------------------------------


async def member(n: int) -> int:
    if n == 13:
        raise LookupError(f"member {n}")
    return n


@workflow
async def fans_out() -> list[Any]:
    found = await asyncio.gather(*(step(member, n) for n in range(20)), return_exceptions=True)
    failed = [n for n, one in enumerate(found) if isinstance(one, LookupError)]
    after = []
    for n in range(5):
        after.append(await step(one, n + len(failed)))
    return [failed, [str(found[n]) for n in failed], after]


def test_b095_a_step_that_failed_for_good_fails_alike_in_each_replay() -> None:
    """Replayed after each later step: the same failure at the same place, the same path after it."""
    live = drive.begin(fans_out)
    while live.open:
        call = live.execution.open[live.open[0]]
        n = json.loads(call.input.text)["n"]
        live.answer(call.key, n, raising=LookupError("member 13") if call.name == "member" and n == 13 else None)

    assert live.result == [[13], ["member 13"], [1, 2, 3, 4, 5]]
    for cut in range(len(live.journal) + 1):
        again = drive.replay(fans_out, live.journal[:cut])
        assert again.asked == live.asked[: len(again.asked)]
        for entry in live.journal[cut:]:
            again.deliver(dataclasses.replace(entry))
        assert again.result == live.result
        assert again.asked == live.asked

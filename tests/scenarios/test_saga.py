"""Scenarios of the kind saga: what is undone, in which order, and what becomes of an undoing that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replaykit import Client, RunFailed, RunHeld, Worker, saga, step, workflow
from tests.crash.rows import Rows
from tests.runtime.facts import eventually
from tests.scenarios.doubled import say
from tests.scenarios.stage import lines

pytestmark = pytest.mark.anyio


async def undo(what: str) -> None:
    path, _, name = what.rpartition(" ")
    if name == "s2" and Path(f"{path}.broken").exists():
        raise ConnectionError("no answer")
    while name == "s1" and Path(f"{path}.shut").exists():
        await asyncio.sleep(0.01)
    say(path, f"undo {name}")


@step.policy(compensate=undo)
async def do(path: str, name: str) -> str:
    say(path, name)
    return f"{path} {name}"


async def fail(path: str) -> None:
    raise ValueError("s3")


@workflow
async def conditional(path: str, cond: bool) -> str:
    try:
        async with saga():
            await step(do, path, "s1")
            if cond:
                await step(do, path, "s2")
                await step(fail, path)
            await step(do, path, "s4")
    except ValueError:
        await step(do, path, "after")
    return "done"


@workflow
async def plain_saga(path: str) -> None:
    async with saga():
        await step(do, path, "s1")
        await step(do, path, "s2")
        await step(fail, path)


async def test_b136_what_was_done_inside_an_if_is_undone_in_reverse(dsn: str, said: Path) -> None:
    """s4 does not begin; the code after the saga goes on."""
    async with Client(dsn) as client, Worker(client, workflows=[conditional]):
        assert await (await client.start(conditional, str(said), True)).result(timeout=30) == "done"
        assert lines(said) == ["s1", "s2", "undo s2", "undo s1", "after"]

        assert await (await client.start(conditional, str(said), False)).result(timeout=30) == "done"
        assert lines(said)[5:] == ["s1", "s4"]


async def test_b137_an_undoing_that_fails_is_seen_and_hides_nothing(dsn: str, rows: Rows, said: Path) -> None:
    """Held with what is and what is not undone; told to go on it undoes the rest, each once."""
    broken = Path(f"{said}.broken")
    broken.touch()
    async with Client(dsn) as client, Worker(client, workflows=[plain_saga]):
        handle = await client.start(plain_saga, str(said))
        with pytest.raises(RunHeld, match="undone: nothing; not undone: do#2, do"):
            await handle.result(timeout=30)
        assert rows.ask("select key, state from in_doubt join intents using (run_id, key)") == [
            ("~undo:do#2", "unknown")
        ]

        broken.unlink()
        await handle.retry()
        with pytest.raises(RunFailed, match="s3"):
            await handle.result(timeout=30)

    assert lines(said) == ["s1", "s2", "undo s2", "undo s1"]


async def test_b137_a_cancel_does_not_stop_compensation_half_way(dsn: str, rows: Rows, said: Path) -> None:
    """Nor does the death of a worker between two undoings: it is cancelled when all is undone."""
    shut = Path(f"{said}.shut")
    shut.touch()
    async with Client(dsn) as client:
        async with Worker(client, workflows=[plain_saga]):
            handle = await client.start(plain_saga, str(said))
            await asyncio.to_thread(eventually, lambda: "undo s2" in lines(said), "the newest is undone")
            await handle.cancel()
            await asyncio.to_thread(
                eventually,
                lambda: rows.ask("select count(*) from journal where kind = 'cancel'") == [(1,)],
                "it is told",
            )
            shut.unlink()
        async with Worker(client, workflows=[plain_saga]):
            info = await handle.info()
            while info.finished_at is None:
                info = await handle.info()

    assert info.state == "cancelled"
    assert lines(said) == ["s1", "s2", "undo s2", "undo s1"]

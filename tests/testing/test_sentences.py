"""What a mistake in a workflow says: the step, the way out and a line of the user's, in one sentence."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

import pytest

from replaykit import ConfigurationError, RunFailed, step, workflow
from replaykit.replay.calls import Workflow
from replaykit.testing import Client


async def double(n: int) -> int:
    return n * 2


@workflow
async def wrong_argument() -> int:
    anything: Any = "text"
    return await step(double, anything)


@workflow
async def wrong_result() -> int:
    anything: Any = "text"
    return anything  # type: ignore[no-any-return]


@workflow
async def nameless() -> int:
    return await step(lambda: 1)


@workflow
async def partial() -> int:
    return await step(functools.partial(double, 1))


@workflow
async def outside() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.open_connection("localhost", 9))


untyped_step: Any = step
untyped_workflow: Any = workflow  # type checkers refuse these, too

HERE = re.escape(__file__)


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        (wrong_argument, rf"NotJournalable: \$: a str where int is declared \(the result of double\) \({HERE}:\d+\)$"),
        (wrong_result, rf"\$: a str where int is declared \(the result of wrong_result\) \({HERE}:\d+\)$"),
        (nameless, rf"the callable at {HERE}:\d+ has no name of its own: step\.options\(name=\.\.\.\)"),
        (partial, rf"the callable at {HERE}:\d+ has no name of its own"),
        (outside, rf"RuntimeError: loop\.\w+\(\) reaches outside .*: do this in a step \({HERE}:\d+\)$"),
    ],
)
def test_a_run_fails_with_the_sentence_and_a_line_of_the_users(failing: Workflow[[], Any], sentence: str) -> None:
    """Not with one of replaykit's lines, and not with an address."""

    async def run() -> None:
        async with Client() as client:
            await (await client.start(failing)).result()

    with pytest.raises(RunFailed, match=sentence):
        asyncio.run(run())


def test_a_stub_of_the_wrong_type_is_named() -> None:
    """As the step itself would be."""

    @workflow
    async def doubled() -> int:
        return await step(double, 1)

    async def run() -> None:
        async with Client(stubs={double: lambda n: "text"}) as client:
            await (await client.start(doubled)).result()

    with pytest.raises(RunFailed, match=r"a str where int is declared \(the result of double\)"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("declare", "sentence"),
    [
        (
            lambda: untyped_step.policy(double),
            rf"^@step\.policy on double \({HERE}:\d+\) says nothing: write @step\.policy\(ret",
        ),
        (
            lambda: untyped_step.options(double),
            rf"^step\.options was given double \({HERE}:\d+\) by place: it takes options by",
        ),
        (lambda: untyped_step.options("charge"), r"^step\.options was given 'charge' by place"),
        (
            lambda: untyped_workflow(lambda: 1),
            rf"^@workflow on the callable at {HERE}:\d+: a workflow is an async function",
        ),
    ],
)
def test_a_declaration_that_is_none_is_refused_in_a_sentence(declare: Any, sentence: str) -> None:
    """Where it is written."""

    with pytest.raises(ConfigurationError, match=sentence):
        declare()

"""The word of a person in memory and in Postgres: the same is taken, the same refused, in the same sentence."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from replaykit import Client, InDoubt, Landed, NotLanded
from replaykit.errors import ReplaykitError
from replaykit.postgres.runs import StartRow
from replaykit.replay.entries import Closing, Effect, Intent, IntentState, State
from replaykit.runtime.words import word_of
from replaykit.testing.memory import Memory
from tests.direct import direct

Sql = psycopg.Connection[tuple[Any, ...]]

IN_DOUBT = [(1, "unknown", False)]
TWO = [(1, "not_landed", True), (2, "unknown", False)]
OTHER = ValueError("no")

SCENARIOS: dict[str, tuple[str, list[tuple[int, str, bool]], list[Any]]] = {
    "landed, again, otherwise": ("held", IN_DOUBT, [Landed(1), Landed(1), Landed(2), NotLanded()]),
    "not landed": ("held", IN_DOUBT, [NotLanded("why"), NotLanded(), Landed(None)]),
    "fail": ("held", IN_DOUBT, [InDoubt(), InDoubt(), OTHER, Landed(1)]),
    "fail with an error": ("held", IN_DOUBT, [OTHER, OTHER, InDoubt(), NotLanded()]),
    "an open call of a held run": ("held", [(1, "open", False)], [Landed({"a": [1]}), Landed({"a": [1]})]),
    "the last attempt": ("held", TWO, [Landed(1), NotLanded()]),
    "at work": ("running", [(1, "open", False)], [NotLanded()]),
    "before it is held": ("pending", [(1, "open", False)], [NotLanded(), NotLanded(), Landed(1)]),
    "waiting": ("waiting", IN_DOUBT, [NotLanded()]),
    "it has landed": ("succeeded", [(1, "landed", True)], [Landed(1)]),
    "it has not": ("failed", [(1, "not_landed", True)], [Landed(1)]),
    "it was undone": ("failed", [(1, "compensated", True)], [NotLanded()]),
    "nobody was to be asked": ("failed", [(1, "unknown", True)], [NotLanded()]),
    "of a run that has ended": ("cancelled", IN_DOUBT, [NotLanded(), NotLanded(), Landed(1)]),
    "no intent": ("held", [], [Landed(1)]),
}


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    with psycopg.connect(direct(dsn), autocommit=True, options="-c search_path=replaykit") as connection:
        yield connection


def in_memory(state: str, intents: list[tuple[int, str, bool]], words: list[Any]) -> list[str]:
    """What comes of each word."""
    memory, run_id = Memory(), uuid.uuid4()
    memory.start(StartRow(run_id, "w", "{}"), 0)
    row = memory.rows[run_id]
    for attempt, was, settled in intents:
        row.intents["pay", attempt] = Intent("pay", attempt, "pay", Effect.IRREVERSIBLE, "k", "{}", 0)
        if was != "open":
            row.close(Closing("pay", attempt, IntentState(was), settled, "ada" if settled else None), 0)
    row.state = State(state)

    def say(word: Any) -> str:
        return memory.resolve(run_id, "pay", word_of(word), "ada", 0)

    return [_come_of(lambda word=word: say(word)) for word in words]


def in_postgres(dsn: str, sql: Sql, state: str, intents: list[tuple[int, str, bool]], words: list[Any]) -> list[str]:
    """The same."""
    run_id = uuid.uuid4()
    finished = state in ("succeeded", "failed", "cancelled")
    sql.execute(
        "insert into runs (id, workflow, state, reason, waiting_for, started_at, finished_at, protocol, lease_token, worker)"
        " values (%s, 'w', %s, %s, %s, now(), case when %s then now() end, 1, %s, %s)",
        [
            run_id,
            state,
            "why" if state == "held" else None,
            "timer" if state == "waiting" else None,
            finished,
            uuid.uuid4() if state == "running" else None,
            uuid.uuid4() if state == "running" else None,
        ],
    )
    for attempt, was, settled in intents:
        sql.execute(
            "insert into intents (run_id, key, attempt, name, effect, idempotency_key, input, state, written_at, doubt_at,"
            " resolved_at, resolved_by, write_id) values (%s, 'pay', %s, 'pay', 'irreversible', 'k', '{}', %s, now(),"
            " case when %s = 'unknown' then now() end, case when %s then now() end, %s, gen_random_uuid())",
            [run_id, attempt, was, was, settled, "ada" if settled else None],
        )

    async def say(word: Any) -> str:
        async with Client(dsn) as client:
            return await client.handle(run_id).resolve("pay", word, by="ada")

    return [_come_of(lambda word=word: asyncio.run(say(word))) for word in words]


def _come_of(ask: Any) -> str:
    """The state, or the refusal without what differs from run to run."""
    try:
        return str(ask())
    except ReplaykitError as refused:
        text = re.sub(r"run [0-9a-f-]{36}", "run RUN", f"{type(refused).__name__}: {refused}")
        text = re.sub(r"worker [0-9a-f-]{36}", "a worker", text)
        return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "WHEN", text)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_comes_of_each_word(dsn: str, sql: Sql, scenario: str) -> None:
    """State or sentence."""
    assert in_memory(*SCENARIOS[scenario]) == in_postgres(dsn, sql, *SCENARIOS[scenario])

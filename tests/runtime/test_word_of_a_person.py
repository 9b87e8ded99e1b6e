"""A person's word on a call in doubt, from `Handle.resolve` to the end of the run under a real worker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json

from replaykit import (
    Client,
    ConfigurationError,
    Handle,
    InDoubt,
    Landed,
    NotJournalable,
    NotLanded,
    NotResolvable,
    RunFailed,
    RunHeld,
    RunNotFound,
    SyncClient,
    Worker,
    step,
    workflow,
)
from replaykit.replay.entries import State
from replaykit.replay.keys import idempotency_key
from tests.direct import direct, hang_up
from tests.postgres.store import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

Sql = psycopg.Connection[tuple[Any, ...]]


@dataclass
class Receipt:
    """What a charge returns."""

    card: str
    cents: int


class World:
    """What the body does, and how often it was called."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.calls: list[tuple[int, str]] = []  # attempt, idempotency key


world: World


@step.policy(effect="irreversible")
async def charge(card: str, cents: int) -> Receipt:
    """Nobody can be asked about it."""
    world.calls.append((step.current().attempt, step.current().idempotency_key))
    if world.gate is not None:
        await world.gate.wait()
    if world.error is not None:
        raise world.error
    return Receipt(card, cents)


@workflow
async def pay(card: str) -> Receipt:
    """One charge; a LookupError of it is an answer, too."""
    try:
        return await step(charge, card, 5)
    except LookupError as error:
        return Receipt(str(error), 0)


@pytest.fixture(autouse=True)
def new_world() -> None:
    global world
    world = World()


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """Another connection: what it sees is committed."""
    with psycopg.connect(direct(dsn), autocommit=True, options="-c search_path=replaykit") as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[Worker]:
    async with Worker(client, workflows=[pay]) as worker:
        yield worker


async def held(handle: Handle[Any]) -> str:
    """Wait until it is; why."""
    with pytest.raises(RunHeld) as why:
        await handle.result(timeout=PATIENCE_SECONDS)
    return why.value.reason


async def after_a_death(client: Client, sql: Sql) -> Handle[Receipt]:
    """A run whose worker died with its call under way: what is left of that is an open intent."""
    handle = await client.options(delay=3_600).start(pay, "visa")  # no worker has it before its intent is there
    sql.execute(
        "insert into intents (run_id, key, attempt, name, effect, idempotency_key, input, written_at, write_id)"
        " values (%s, 'charge', 1, 'charge', 'irreversible', %s, %s, now(), gen_random_uuid())",
        [handle.id, idempotency_key(handle.id, "charge"), Json({"card": "visa", "cents": 5})],
    )
    sql.execute(
        "update runs set state = 'pending', waiting_for = null, available_at = clock_timestamp() where id = %s",
        [handle.id],
    )
    return handle


async def after_an_error(client: Client, error: Exception) -> Handle[Receipt]:
    """A run whose body ended with an error that says nothing of its call."""
    world.error = error
    handle = await client.start(pay, "visa")
    assert "nobody knows whether its call landed" in await held(handle)
    world.calls.clear()
    return handle


def intents(sql: Sql, handle: Handle[Any]) -> list[tuple[Any, ...]]:
    """Attempt, state, and who said so."""
    return sql.execute(
        "select attempt, state, resolved_by from intents where run_id = %s order by attempt", [handle.id]
    ).fetchall()


async def test_a_call_that_landed_is_not_made_again(client: Client, worker: Worker, sql: Sql) -> None:
    """The step returns what the person says; who said it, when and why is kept."""
    handle = await after_a_death(client, sql)
    assert "charge: nobody knows whether its call landed (attempt 1, its worker died)" in await held(handle)

    assert await handle.resolve("charge", Landed(Receipt("visa", 7)), by="ada", comment="saw it") is State.PENDING

    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt("visa", 7)
    assert world.calls == []
    assert intents(sql, handle) == [(1, "landed", "ada")]
    (letter,) = sql.execute("select kind, name, body, sent_by, sent_at < now() from mailbox").fetchall()
    said = {"key": "charge", "attempt": 1, "word": "landed", "value": {"card": "visa", "cents": 7}, "error": None}
    assert letter == ("resolve", "charge", {**said, "comment": "saw it"}, "ada", True)
    entry = sql.execute("select outcome, output, attempt, mailbox_id is not null from journal").fetchall()
    assert entry == [("ok", {"card": "visa", "cents": 7}, 1, True)]


async def test_a_call_that_did_not_land_is_made_again_with_its_key(client: Client, worker: Worker, sql: Sql) -> None:
    """After a death: the next attempt, its intent beside the one that is closed."""
    handle = await after_a_death(client, sql)
    await held(handle)

    await handle.resolve("charge", NotLanded(), by="ada")

    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt("visa", 5)
    assert world.calls == [(2, idempotency_key(handle.id, "charge"))]
    assert intents(sql, handle) == [(1, "not_landed", "ada"), (2, "landed", None)]


async def test_after_an_error_not_landed_raises_it(client: Client, worker: Worker, sql: Sql) -> None:
    """The code gets what the body raised; nothing is called again."""
    handle = await after_an_error(client, LookupError("the line is dead"))

    await handle.resolve("charge", NotLanded(), by="ada")

    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt("the line is dead", 0)
    assert world.calls == []
    assert intents(sql, handle) == [(1, "not_landed", "ada")]


async def test_an_error_is_raised_by_the_step(client: Client, worker: Worker, sql: Sql) -> None:
    """The one that the person gives: nobody knows whether it landed, and nobody is asked any more."""
    handle = await after_an_error(client, OSError("the line is dead"))

    await handle.resolve("charge", KeyError("no trace"), by="ada")

    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt("'no trace'", 0)
    assert intents(sql, handle) == [(1, "unknown", "ada")]
    assert sql.execute("select * from in_doubt").fetchall() == []


async def test_in_doubt_says_who_let_the_step_fail(client: Client, worker: Worker, sql: Sql) -> None:
    """And why."""
    handle = await after_a_death(client, sql)
    await held(handle)
    await handle.resolve("charge", InDoubt(), by="ada", comment="the bank is closed")

    with pytest.raises(RunFailed) as failed:
        await handle.result(timeout=PATIENCE_SECONDS)
    assert isinstance(failed.value.__cause__, InDoubt)
    assert "ada let it fail: the bank is closed" in failed.value.message


async def test_the_first_word_stands(client: Client, sql: Sql) -> None:
    """The same again is that word, of whoever lost the answer; another one is refused, and the first is named."""
    handle = await after_a_death(client, sql)
    sql.execute("update runs set state = 'held', reason = 'why'")

    for by in ("ada", "bob"):
        assert await handle.resolve("charge", Landed(Receipt("visa", 5)), by=by) is State.PENDING
    others: list[Any] = [NotLanded(), InDoubt(), ValueError("no"), Landed(Receipt("visa", 6))]
    for other in others:
        with pytest.raises(
            NotResolvable, match=rf"'charge' of run {handle.id} has a word already: ada said landed with"
        ):
            await handle.resolve("charge", other)

    assert sql.execute("select count(*) from mailbox").fetchone() == (1,)


async def test_a_value_that_does_not_fit_may_be_said_again(client: Client, worker: Worker, sql: Sql) -> None:
    """The run is held again and says whose word did not fit, and where."""
    handle = await after_a_death(client, sql)
    await held(handle)
    await handle.resolve("charge", Landed({"card": "visa"}), by="ada")

    reason = await held(handle)
    assert "what ada said it returned does not fit charge" in reason
    assert "$.cents" in reason
    await handle.resolve("charge", Landed({"card": "visa", "cents": 8}))

    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt("visa", 8)
    assert world.calls == []


async def test_a_call_at_work_takes_no_word(client: Client, worker: Worker, sql: Sql) -> None:
    """Its worker may yet say what becomes of it. Nor does what is not in doubt."""
    world.gate = asyncio.Event()
    handle = await client.start(pay, "visa")
    while not world.calls:
        await asyncio.sleep(0)

    with pytest.raises(NotResolvable, match=r"'charge' of run .* may still be at work"):
        await handle.resolve("charge", NotLanded())
    world.gate.set()
    await handle.result(timeout=PATIENCE_SECONDS)
    with pytest.raises(NotResolvable, match=r"'charge' of run .* is not in doubt: its attempt 1 has landed since"):
        await handle.resolve("charge", NotLanded())
    with pytest.raises(NotResolvable, match=r"'ship' of run .* has written no intent"):
        await handle.resolve("ship", NotLanded())
    assert sql.execute("select * from mailbox").fetchall() == []


async def test_a_run_that_is_not_there_is_not_found(client: Client) -> None:
    """By id and by key."""
    for run in (uuid.uuid4(), "nobody"):
        with pytest.raises(RunNotFound, match=str(run)):
            await client.handle(run).resolve("charge", NotLanded())


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 7])
async def test_what_cannot_be_stored_is_refused(client: Client, sql: Sql, text: Any) -> None:
    """Before anything is sent."""
    handle = await after_a_death(client, sql)

    for asked in ({"by": text}, {"comment": text}, {"key": text}):
        with pytest.raises(ConfigurationError, match=f"^{next(iter(asked))}="):
            await handle.resolve(**{"key": "charge", "answer": NotLanded(), **asked})
    with pytest.raises(NotJournalable):
        await handle.resolve("charge", Landed(object()))
    with pytest.raises(ConfigurationError, match="a word is Landed"):
        await handle.resolve("charge", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("card", ["a\0b", "\ufdd0\ufdd2", 'é"\\'])
async def test_any_text_comes_as_it_was_given(client: Client, worker: Worker, sql: Sql, card: str) -> None:
    """In a value and in an error."""
    handle = await after_a_death(client, sql)
    await held(handle)
    await handle.resolve("charge", Landed(Receipt(card, 1)))
    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt(card, 1)

    handle = await after_a_death(client, sql)
    await held(handle)
    await handle.resolve("charge", LookupError(card))
    assert await handle.result(timeout=PATIENCE_SECONDS) == Receipt(card, 0)


async def test_a_word_survives_a_lost_connection(dsn: str, client: Client, sql: Sql) -> None:
    """It is sent again."""
    handle = await after_a_death(client, sql)
    sql.execute("update runs set state = 'held', reason = 'why'")
    hang_up(dsn)

    assert await handle.resolve("charge", NotLanded()) is State.PENDING
    assert sql.execute("select count(*) from mailbox").fetchone() == (1,)


async def test_a_sync_handle_takes_it_too(client: Client, dsn: str, sql: Sql) -> None:
    """With the same refusals."""
    handle = await after_a_death(client, sql)
    sql.execute("update runs set state = 'held', reason = 'why'")

    def ask() -> State:
        with SyncClient(dsn) as sync:
            there = sync.handle(handle.id)
            with pytest.raises(NotResolvable, match="has written no intent"):
                there.resolve("ship", NotLanded())
            return there.resolve("charge", Landed(Receipt("visa", 5)), by="ada", comment="saw it")

    assert await asyncio.to_thread(ask) is State.PENDING
    assert sql.execute("select sent_by, body ->> 'comment' from mailbox").fetchall() == [("ada", "saw it")]

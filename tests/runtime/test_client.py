"""The client: starts that are durable and idempotent, results that are waited for, outages that are sat out."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import json
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from replaykit import (
    Client,
    ConfigurationError,
    DatabaseUnreachable,
    Handle,
    KeyConflict,
    NotJournalable,
    RunCancelled,
    RunFailed,
    RunHeld,
    RunNotFound,
    SchemaMismatch,
    SyncClient,
    Worker,
)
from replaykit.postgres import migrate
from replaykit.postgres.database import Database
from replaykit.postgres.runs import StartRow
from replaykit.replay.calls import Workflow
from replaykit.runtime import starts, watcher
from replaykit.runtime.client import _Session
from replaykit.runtime.ids import new_id, uuid7
from replaykit.runtime.target import Target
from tests.direct import connections, direct, hang_up
from tests.runtime.shop import CardDeclined, Receipt, checkout, nap, stuck, total

pytestmark = pytest.mark.anyio

WORKFLOWS: list[Workflow[..., Any]] = [checkout, nap, stuck, total]


@pytest.fixture
def sql(dsn: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Another connection: what it sees is committed."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[Worker]:
    """A worker that has all workflows of the shop."""
    async with Worker(client, workflows=WORKFLOWS) as worker:
        yield worker


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[_Session]:
    """What a client has on this loop, to look at its parts."""
    session = _Session(Target(dsn))
    await session.open()
    yield session
    await session.close()


def end(sql: psycopg.Connection[tuple[Any, ...]], run_id: uuid.UUID, output: str = '"done"') -> None:
    """End a run as a worker would, without one."""
    sql.execute("update replaykit.payloads set output = %s where run_id = %s", (output, run_id))
    sql.execute(
        "update replaykit.runs set state = 'succeeded', started_at = now(), protocol = 1, finished_at = now()"
        " where id = %s",
        (run_id,),
    )


async def eventually(fact: Any, what: str) -> Any:
    """The first true value of `fact()`; fails naming `what` after 20 s."""
    for _ in range(2000):
        if value := fact():
            return value
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 20 s: {what}")


# --- starts -----------------------------------------------------------------------------------------------------------


async def test_a_start_is_durable_when_it_returns(client: Client, sql: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Another connection sees the run with its input by parameter name."""

    handle = await client.options(queue="slow", priority=3).start(checkout, "visa", cents=7)

    row = sql.execute(
        "select workflow, state, queue, priority, key, input from replaykit.runs join replaykit.payloads on run_id = id"
        " where id = %s",
        (handle.id,),
    ).fetchone()
    assert row == ("checkout", "pending", "slow", 3, None, {"card": "visa", "cents": 7})
    assert handle.created


async def test_concurrent_starts_share_a_commit(client: Client, sql: psycopg.Connection[tuple[Any, ...]]) -> None:
    """A hundred starts at once need a few transactions."""

    handles = await asyncio.gather(*(client.start(checkout, "visa", n) for n in range(100)))

    rows = sql.execute("select count(*), count(distinct xmin::text) from replaykit.runs").fetchone()
    assert rows is not None
    assert rows[0] == len({handle.id for handle in handles}) == 100
    assert rows[1] <= 3


async def test_a_second_start_under_a_key_finds_the_first_run(client: Client) -> None:
    """Its own input is not compared; `created` tells the two apart."""

    keyed = client.options(key="order-42")
    first = await keyed.start(checkout, "visa")
    second = await keyed.start(checkout, "master", 99)

    assert (first.created, second.created) == (True, False)
    assert second.id == first.id


async def test_concurrent_starts_of_one_key_make_one_run(dsn: str, sql: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Within one client and between two: one run, created once."""

    async with Client(dsn) as one, Client(dsn) as two:
        starts = [c.options(key=f"k{n % 5}").start(checkout, "visa") for n in range(20) for c in (one, two)]
        handles = await asyncio.gather(*starts)

    assert sum(handle.created for handle in handles) == 5
    assert sql.execute("select count(*) from replaykit.runs").fetchone() == (5,)


async def test_a_key_of_another_workflow_is_an_error_that_names_both(client: Client) -> None:
    """Nothing is started."""

    await client.options(key="order-42").start(checkout, "visa")

    with pytest.raises(KeyConflict, match=r"'order-42' belongs to run .* of 'checkout', not of 'nap'"):
        await client.options(key="order-42").start(nap, 1)


async def test_a_start_that_is_sent_again_recognises_its_own_row(session: _Session) -> None:
    """A lost acknowledgement: the same id again is the same run, created."""

    row = StartRow(id=new_id(), workflow="checkout", input='{"card":"visa"}', key="k")
    first = await session.starts.start(row)
    again = await session.starts.start(row)

    assert first.id == again.id == row.id
    assert first.created
    assert again.created


async def test_a_refused_row_fails_only_its_own_start(session: _Session) -> None:
    """Its neighbours of the same commit are started."""

    rows = [
        StartRow(id=new_id(), workflow="checkout", input=text) for text in ('{"card":"a"}', "no json", '{"card":"b"}')
    ]
    outcomes = await asyncio.gather(*(session.starts.start(row) for row in rows), return_exceptions=True)

    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, False]


async def test_a_start_survives_a_lost_connection(
    dsn: str, client: Client, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """The server ends the client's sessions; the next start connects anew."""

    await client.start(checkout, "visa")
    hang_up(dsn)
    handle = await client.start(checkout, "visa")

    assert handle.created
    assert sql.execute("select count(*) from replaykit.runs").fetchone() == (2,)


def held_keys(dsn: str, *keys: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A transaction of somebody else that has started runs under these keys and is left open."""
    other = psycopg.connect(dsn)
    for key in keys:
        other.execute("select replaykit.start('checkout', '[\"visa\"]', %s)", (key,))
    return other


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_a_key_in_an_open_transaction_delays_only_its_own_start(client: Client, dsn: str, ends: str) -> None:
    """Starts of the same moment and later ones go on; the one that waits has its answer when the transaction ends."""

    with held_keys(dsn, "held") as other:
        await client.start(checkout, "visa")
        keyed = [asyncio.create_task(client.options(key="held").start(checkout, "visa")) for _ in range(2)]
        async with asyncio.timeout(20):
            free = await asyncio.gather(
                *(client.start(checkout, "visa") for _ in range(3)),
                *(client.options(key=f"free-{n}").start(checkout, "visa") for n in range(3)),
            )
            keyed.append(asyncio.create_task(client.options(key="held").start(checkout, "visa")))
            free.append(await client.start(checkout, "visa"))
        waited = [task.done() for task in keyed]
        getattr(other, ends)()
        async with asyncio.timeout(20):
            handles = await asyncio.gather(*keyed)

    assert waited == [False] * 3
    assert all(handle.created for handle in free)
    assert len({handle.id for handle in handles}) == 1
    assert [handle.created for handle in handles].count(True) == (ends == "rollback")


async def test_a_thousand_starts_go_on_beside_some_whose_keys_are_held(client: Client, dsn: str) -> None:
    """Those that are held are found among them; each has its answer in the end."""

    held = [f"key-{n}" for n in range(0, 1_000, 250)]
    with held_keys(dsn, *held) as other:
        asked = {
            f"key-{n}": asyncio.create_task(client.options(key=f"key-{n}").start(checkout, "visa"))
            for n in range(1_000)
        }
        async with asyncio.timeout(20):
            await asyncio.gather(*(start for key, start in asked.items() if key not in held))
        assert not any(asked[key].done() for key in held)
        other.commit()
        async with asyncio.timeout(20):
            found = await asyncio.gather(*(asked[key] for key in held))

    assert not any(handle.created for handle in found)


async def test_a_start_that_is_cancelled_while_its_key_is_held_starts_nothing(
    client: Client, dsn: str, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """Its caller has left; the lane's connection is closed when nobody waits there."""

    with held_keys(dsn, "held") as other:
        await client.start(checkout, "visa")
        alone = len(connections(dsn))
        keyed = asyncio.create_task(client.options(key="held").start(checkout, "visa"))
        await eventually(lambda: len(connections(dsn)) > alone, "the lane's connection")
        keyed.cancel()
        await eventually(lambda: len(connections(dsn)) == alone, "its end")
        other.rollback()
    await client.start(checkout, "visa")

    assert sql.execute("select count(*), count(key) from replaykit.runs").fetchone() == (2, 0)


async def test_a_client_that_is_closed_fails_starts_whose_keys_are_held(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while: a transaction may be left open for ever."""

    monkeypatch.setattr(starts, "CLIENT_RETRY_SECONDS", 0.2)
    with held_keys(dsn, "held"):
        keyed = asyncio.create_task(client.options(key="held").start(checkout, "visa"))
        await client.start(checkout, "visa")
        await client.aclose()
        with pytest.raises(DatabaseUnreachable, match="another transaction held the run's key"):
            await keyed


async def test_a_cancelled_start_leaves_the_client_usable(client: Client) -> None:
    """The statement under way ends by itself; nobody else is cancelled with it."""

    await client.start(checkout, "visa")
    tasks = [asyncio.create_task(client.start(checkout, "visa", n)) for n in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert all(isinstance(outcome, Handle) for outcome in outcomes[1:])
    assert (await client.start(checkout, "visa")).created


async def test_arguments_that_do_not_fit_start_nothing(
    client: Client, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """A wrong call is a TypeError, a value that would be lost names its path."""

    wrong: Any = checkout
    with pytest.raises(TypeError, match="checkout"):
        await client.start(wrong)
    with pytest.raises(NotJournalable, match=r"\$\.cents"):
        await client.start(wrong, "visa", object())
    with pytest.raises(TypeError, match="@workflow"):
        await client.start(print)  # type: ignore[call-overload]

    assert sql.execute("select count(*) from replaykit.runs").fetchone() == (0,)


async def test_options_leave_the_client_as_it_was(client: Client) -> None:
    """They add up, on the same connections."""

    slow = client.options(queue="slow")
    keyed = slow.options(key="a", priority=-1)
    handles = [await c.start(checkout, "visa") for c in (client, slow, keyed)]
    infos = [await handle.info() for handle in handles]

    assert [(info.queue, info.key, info.priority) for info in infos] == [
        ("default", None, 0),
        ("slow", None, 0),
        ("slow", "a", -1),
    ]


@pytest.mark.parametrize(
    "options", [{"key": ""}, {"key": "a\0"}, {"key": "k" * 2000}, {"key": "\ud800"}, {"queue": ""}, {"priority": 2**31}]
)
async def test_options_that_cannot_be_stored_are_refused_at_once(dsn: str, options: dict[str, Any]) -> None:
    """Before anything is sent."""

    with pytest.raises(ConfigurationError):
        Client(dsn).options(**options)


# --- by name ----------------------------------------------------------------------------------------------------------


async def test_a_start_by_name_is_recorded_by_parameter_name(client: Client, worker: Worker) -> None:
    """The live workers know the parameters; the run ends as one that was started with the workflow."""

    handle = await client.start("checkout", "visa", cents=7)

    assert await handle.result(timeout=20) == {"card": "visa", "cents": 7}
    assert await client.handle(handle.id, checkout).result() == Receipt("visa", 7)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        (("visa", "x"), {}, r"checkout: \$\.cents: an integer is needed, not a string"),
        ((), {"cents": 1}, "checkout needs 'card'"),
        (("visa", 1, 2), {}, "at most 2 arguments"),
        (("visa",), {"card": "b"}, "'card' twice"),
        (("visa",), {"dollars": 1}, "no parameter 'dollars'"),
    ],
)
async def test_a_start_by_name_is_checked_against_the_live_workers(
    client: Client, worker: Worker, args: tuple[Any, ...], kwargs: dict[str, Any], sentence: str
) -> None:
    """The sentence names the path."""

    with pytest.raises(ConfigurationError, match=sentence):
        await client.start("checkout", *args, **kwargs)


async def test_every_kind_of_parameter_can_be_given_by_name(client: Client, worker: Worker) -> None:
    """By place, `*args`, by name, `**kwargs`: what the schema cannot place the worker binds."""

    handles = [
        await client.start("total"),
        await client.start("total", note="abc"),
        await client.start("total", 1, 2),
        await client.start("total", 1, note="ab", extra=4),
    ]

    assert [await handle.result(timeout=20) for handle in handles] == [0, 3, 3, 7]


async def test_a_start_by_name_that_no_live_worker_has_warns_and_starts(
    client: Client, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """The call is kept as it was made, for the worker that will bind it."""

    with pytest.warns(RuntimeWarning, match="no live worker has the workflow 'later'") as warned:
        handle = await client.start("later", 1, day=dt.date(2030, 1, 2))

    row = sql.execute("select input from replaykit.payloads where run_id = %s", (handle.id,)).fetchone()
    assert row == ({"~call": {"args": [1], "kwargs": {"day": "2030-01-02"}}},)
    assert [warning.filename for warning in warned] == [__file__]


def test_the_warning_of_a_sync_start_names_the_callers_line(dsn: str) -> None:
    """Although another thread asks the database, and whether or not the connection is the caller's own."""

    with SyncClient(dsn) as client, psycopg.connect(dsn) as conn:
        for one in (client, client.options(conn=conn)):
            with pytest.warns(RuntimeWarning, match="no live worker has the workflow 'later'") as warned:
                one.start("later")
            assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('{"args": [7]}', "$.card: a string is needed, not an integer"),
        ('{"kwargs": {"card": "visa", "cents": "much"}}', "$.cents: an integer is needed, not a string"),
        ("[]", "checkout needs 'card'; its parameters are card, cents"),
    ],
)
async def test_a_start_in_sql_that_does_not_fit_is_held_with_the_words_of_a_start_by_name(
    client: Client, worker: Worker, sql: psycopg.Connection[tuple[Any, ...]], given: str, reason: str
) -> None:
    """Nobody could check it at the start: path and reason, without the value."""

    row = sql.execute("select replaykit.start('checkout', %s::json)", [given]).fetchone()
    sql.commit()
    assert row is not None

    with pytest.raises(RunHeld) as held:
        await client.handle(row[0]).result(timeout=20)
    assert held.value.reason.endswith(f"shop.py:{checkout.info.line.rpartition(':')[2]}): {reason}")


# --- results ----------------------------------------------------------------------------------------------------------


async def test_a_result_is_decoded_by_the_workflow(client: Client, worker: Worker) -> None:
    """With the workflow the annotated type, without it plain JSON values."""

    handle = await client.options(key="k").start(checkout, "visa", 7)

    assert await handle.result(timeout=20) == Receipt("visa", 7)
    assert await client.handle("k", checkout).result() == Receipt("visa", 7)
    assert await client.handle(str(handle.id)).result() == {"card": "visa", "cents": 7}


async def test_a_failed_run_raises_with_its_own_error_as_cause(client: Client, worker: Worker) -> None:
    """Type, message and the user's line are in the sentence."""

    handle = await client.start(checkout, "visa", -1)

    with pytest.raises(RunFailed, match=r"checkout failed: .*CardDeclined: visa: -1 \(.*shop\.py:\d+\)") as caught:
        await handle.result(timeout=20)
    assert isinstance(caught.value.__cause__, CardDeclined)
    assert caught.value.__cause__.args == ("visa: -1",)
    assert caught.value.type.endswith("CardDeclined")
    assert caught.value.message == "visa: -1"


async def test_a_held_run_raises_with_its_reason(client: Client, worker: Worker) -> None:
    """Nobody waits for a person unasked."""

    handle = await client.start(stuck)

    with pytest.raises(RunHeld, match="stuck is held") as caught:
        await handle.result(timeout=20)
    assert caught.value.reason == (await handle.info()).reason != ""


async def test_a_cancelled_run_raises(client: Client, sql: psycopg.Connection[tuple[Any, ...]]) -> None:
    """There is no result to return."""

    handle = await client.start(nap, 1)
    sql.execute("update replaykit.runs set state = 'cancelled', finished_at = now() where id = %s", (handle.id,))

    with pytest.raises(RunCancelled, match="was cancelled"):
        await handle.result(timeout=20)


async def test_a_run_that_is_not_there_is_not_found(client: Client) -> None:
    """By id, by key; and the end of an id is no key."""

    there = await client.start(checkout, "visa")
    for reference in (uuid.uuid4(), str(uuid.uuid4()), "no such key", str(there.id)[-8:]):
        with pytest.raises(RunNotFound):
            await client.handle(reference).info()
        with pytest.raises(RunNotFound):
            await client.handle(reference).result(timeout=20)


@pytest.mark.parametrize("zero", [0, -1, dt.timedelta(0), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)])
async def test_a_timeout_of_zero_asks_once(
    client: Client, sql: psycopg.Connection[tuple[Any, ...]], zero: float | dt.timedelta | dt.datetime
) -> None:
    """The builtin TimeoutError while the run works, the result once it is there."""

    handle = await client.start(nap, 60)
    with pytest.raises(TimeoutError, match="has not ended"):
        await handle.result(timeout=zero)
    end(sql, handle.id)

    assert await handle.result(timeout=zero) == "done"


@pytest.mark.parametrize("some", [0.05, dt.timedelta(milliseconds=50)])
async def test_a_timeout_leaves_the_run_alone(client: Client, some: float | dt.timedelta) -> None:
    """Seconds or a timedelta."""

    handle = await client.start(nap, 60)

    with pytest.raises(TimeoutError):
        await handle.result(timeout=some)
    assert (await handle.info()).state == "pending"


async def test_a_timeout_without_a_zone_is_refused(client: Client) -> None:
    """A naive moment could mean anything."""

    handle = await client.start(nap, 60)

    with pytest.raises(ConfigurationError, match="time zone"):
        await handle.result(timeout=dt.datetime(2030, 1, 1))


@pytest.mark.parametrize("timeout", ["x", "5", b"1", [], float("nan"), 10**400])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(client: Client, timeout: Any) -> None:
    """In one sentence that shows it."""

    with pytest.raises(ConfigurationError, match="not a number of seconds"):
        await client.handle("order-42").result(timeout=timeout)


@pytest.mark.parametrize("run", ["a\0", "\ud800", 5, b"order-42", None])
async def test_a_handle_by_what_no_key_can_be_is_refused(client: Client, run: Any) -> None:
    """At once, without a question to the database."""

    with pytest.raises(ConfigurationError, match="named by its id, or by its key"):
        client.handle(run)


async def test_an_id_as_text_is_read_in_any_of_its_forms(client: Client) -> None:
    """Capitals too; a key that looks like an id stays a key."""

    started = await client.start(checkout, "visa")
    keyed = await client.options(key=str(new_id()).upper()).start(checkout, "visa")
    info = await keyed.info()

    for text in (str(started.id), str(started.id).upper(), started.id.hex):
        assert (await client.handle(text).info()).id == started.id
    assert info.key is not None
    assert (await client.handle(info.key).info()).id == keyed.id


@pytest.mark.parametrize("schema", ["", "a\0b", "pg_x", "x" * 64, "é" * 32, "\ud800", None])
def test_a_schema_that_postgres_would_not_take_is_refused(schema: Any) -> None:
    """Where it is named: by a client, a worker, a migration."""

    for maker in (
        lambda: Client("postgresql://nobody@127.0.0.1:1/nowhere", schema),
        lambda: Database("", schema),
        lambda: migrate.upgrade("postgresql://nobody@127.0.0.1:1/nowhere", schema),
        lambda: migrate.sql(schema),
    ):
        with pytest.raises(ConfigurationError, match="schema name"):
            maker()


async def test_a_handle_by_key_learns_its_id(client: Client) -> None:
    """The database is asked when the handle is, not before."""

    handle = client.handle("order-42")
    with pytest.raises(RunNotFound, match="not known yet"):
        _ = handle.id
    started = await client.options(key="order-42").start(checkout, "visa")

    assert (await handle.info()).id == handle.id == started.id


async def test_many_results_are_awaited_on_one_connection(
    dsn: str, client: Client, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """Fifty awaited runs, two connections; none is held by a handle afterwards."""

    handles = await asyncio.gather(*(client.start(nap, n) for n in range(50)))
    waiting = asyncio.gather(*(handle.result(timeout=30) for handle in handles))
    await asyncio.sleep(0)
    await eventually(lambda: len(connections(dsn)) == 2, "the watcher's connection")
    for handle in handles:
        end(sql, handle.id)

    assert await waiting == ["done"] * 50
    assert len(connections(dsn)) == 2


async def test_a_hint_ends_the_wait_at_once(
    dsn: str, client: Client, sql: psycopg.Connection[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without polling: the pause would be an hour."""

    monkeypatch.setattr(watcher, "_PAUSE_SECONDS_MIN", 3600)
    monkeypatch.setattr(watcher, "WATCH_PAUSE_SECONDS_MAX", 3600)
    handle = await client.start(nap, 1)
    task = asyncio.create_task(handle.result(timeout=20))
    await eventually(lambda: len(connections(dsn)) == 2, "the watcher's connection")
    end(sql, handle.id)

    async def hint() -> None:
        while not task.done():
            sql.execute("select pg_notify('replaykit_done:replaykit', '')")
            await asyncio.sleep(0.02)

    await asyncio.gather(hint(), task)
    assert task.result() == "done"


async def test_a_wait_survives_a_lost_connection(
    dsn: str, client: Client, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """The server ends the sessions while a result is awaited; the watcher connects anew and looks again."""

    handle = await client.start(nap, 1)
    task = asyncio.create_task(handle.result(timeout=30))
    await eventually(lambda: len(connections(dsn)) == 2, "the watcher's connection")
    hang_up(dsn)
    end(sql, handle.id)

    assert await task == "done"


async def test_behind_a_pooler_results_come_by_polling(
    dsn: str, client: Client, sql: psycopg.Connection[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there."""

    connect = Database.connect

    async def pooled(self: Database, **options: Any) -> Any:
        connection = await connect(self, **options)
        connection.pooled = True
        return connection

    monkeypatch.setattr(Database, "connect", pooled)
    handle = await client.start(nap, 1)
    task = asyncio.create_task(handle.result(timeout=30))
    await eventually(lambda: len(connections(dsn)) == 2, "the watcher's connection")
    end(sql, handle.id)

    assert await task == "done"


# --- loops and connections --------------------------------------------------------------------------------------------


def test_a_client_serves_one_event_loop_after_the_other(dsn: str) -> None:
    """It opens anew, and what a closed loop left behind is closed without a warning."""

    client = Client(dsn)

    async def start_and_wait(client: Client = client) -> bool:
        handle = await client.start(nap, 60)
        with pytest.raises(TimeoutError):
            await handle.result(timeout=0.05)
        return handle.created

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [asyncio.run(start_and_wait()) for _ in range(3)] == [True] * 3
        del client
        gc.collect()


async def test_a_closed_client_has_no_connection_and_opens_again(
    dsn: str, sql: psycopg.Connection[tuple[Any, ...]]
) -> None:
    """`aclose` ends what was open; the next use opens."""

    client = Client(dsn)
    assert connections(dsn) == set()
    await client.start(checkout, "visa")
    assert len(connections(dsn)) == 1
    await client.aclose()
    await eventually(lambda: connections(dsn) == set(), "no connection")
    await client.start(checkout, "visa")
    await client.aclose()


async def test_an_unreachable_database_is_named_without_its_password() -> None:
    """At once: a first connection that fails is a mistake, not an outage."""

    async with Client("postgresql://ann:secret@127.0.0.1:1/app") as client:
        with pytest.raises(DatabaseUnreachable) as caught:
            await client.start(checkout, "visa")

    assert "127.0.0.1:1/app" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_database_by_url_is_never_migrated_unasked(empty_dsn: str) -> None:
    """The sentence names the command."""

    async with Client(empty_dsn) as client:
        with pytest.raises(SchemaMismatch, match="replaykit db migrate"):
            await client.start(checkout, "visa")


# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_sort_by_time_and_are_of_version_seven() -> None:
    """A function of a moment and of chance, ordered to the microsecond within a millisecond."""

    us = 1_700_000_000_123_456
    ids = [uuid7(us + step, 2**62 - 1 - step) for step in (0, 1, 2, 600, 1_000, 10**9)]

    assert uuid7(us, 5) == uuid7(us, 5 + (1 << 62))
    assert ids == sorted(ids)
    assert {(i.version, i.variant) for i in ids} == {(7, uuid.RFC_4122)}
    assert ids[0].int >> 80 == us // 1000
    assert new_id() != new_id()


def test_inputs_by_name_are_json_whatever_python_gives() -> None:
    """Numbers that JSON lacks and bytes are written as the codec reads them."""

    from replaykit.runtime.named import call_as_made

    made = json.loads(call_as_made((float("inf"), b"\0\xff", {1: (2,)}), {"ä": None}))

    assert made == {"~call": {"args": ["Infinity", "AP8=", {"1": [2]}], "kwargs": {"ä": None}}}

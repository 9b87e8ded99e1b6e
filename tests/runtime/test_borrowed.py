"""`options(conn=)`: a run is inserted in its caller's own transaction, over any connection that the caller may have.

What is promised is told by two looks: one through the caller's own connection, one through another, which sees only what
is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_async

from replaykit import Client, ConfigurationError, KeyConflict, SchemaMismatch, SyncClient, Worker
from tests.direct import direct
from tests.runtime.facts import eventually
from tests.runtime.shop import Receipt, checkout, nap

pytestmark = pytest.mark.anyio

Sql = psycopg.Connection[tuple[Any, ...]]

ROWS_AS_DICTS: Any = dict_row  # psycopg's types know no factory of rows beside one of cursors


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """Another connection: what it sees is committed."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        yield connection


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as client:
        yield client


def runs(sql: Sql) -> int:
    """How many runs are committed."""
    row = sql.execute("select count(*) from replaykit.runs join replaykit.payloads on run_id = id").fetchone()
    assert row is not None
    return int(row[0])


# --- every kind of connection -----------------------------------------------------------------------------------------


@dataclass
class Caller:
    """A caller's connection, in whichever kind: what to give to `conn=`, and how its owner ends the transaction."""

    conn: Any
    commit: Callable[[], Awaitable[None]]
    rollback: Callable[[], Awaitable[None]]


def caller(conn: Any) -> Caller:
    """Of a connection or session whose commit and rollback may or may not be awaited."""

    def end(name: str) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            ended = getattr(conn, name)()
            if ended is not None:
                await ended

        return call

    return Caller(conn, end("commit"), end("rollback"))


@contextlib.asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Caller]:
    with psycopg.connect(dsn) as conn:
        yield caller(conn)


@contextlib.asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield caller(conn)


@contextlib.asynccontextmanager
async def sqlalchemy_sync(dsn: str) -> AsyncIterator[Caller]:
    with engine(dsn) as made, made.connect() as conn:
        yield caller(conn)


@contextlib.asynccontextmanager
async def sqlalchemy_session(dsn: str) -> AsyncIterator[Caller]:
    with engine(dsn) as made, orm.Session(made) as session:
        yield caller(session)


@contextlib.asynccontextmanager
async def sqlalchemy_scoped_session(dsn: str) -> AsyncIterator[Caller]:
    with engine(dsn) as made:
        session = orm.scoped_session(orm.sessionmaker(made), scopefunc=lambda: 1)
        yield caller(session)
        session.remove()


@contextlib.asynccontextmanager
async def sqlalchemy_async_connection(dsn: str) -> AsyncIterator[Caller]:
    async with async_engine(dsn) as made, made.connect() as conn:
        yield caller(conn)


@contextlib.asynccontextmanager
async def sqlalchemy_async_session(dsn: str) -> AsyncIterator[Caller]:
    async with async_engine(dsn) as made, sqlalchemy_async.AsyncSession(made) as session:
        yield caller(session)


@contextlib.contextmanager
def engine(dsn: str, **options: Any) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1), **options)
    yield made
    made.dispose()


@contextlib.asynccontextmanager
async def async_engine(dsn: str) -> AsyncIterator[sqlalchemy_async.AsyncEngine]:
    made = sqlalchemy_async.create_async_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1))
    yield made
    await made.dispose()


SYNC = [psycopg_sync, sqlalchemy_sync, sqlalchemy_session, sqlalchemy_scoped_session]
ASYNC = [psycopg_async, sqlalchemy_async_connection, sqlalchemy_async_session]
KINDS = pytest.mark.parametrize("kind", [*SYNC, *ASYNC])


@KINDS
async def test_a_run_is_there_when_its_caller_commits(client: Client, dsn: str, sql: Sql, kind: Any) -> None:
    """And not before; a worker that polls takes it then."""

    async with kind(dsn) as caller:
        handle = await client.options(conn=caller.conn, queue="q", priority=3).start(checkout, "visa", cents=7)
        before = runs(sql)
        await caller.commit()

    assert (before, runs(sql), handle.created) == (0, 1, True)
    info = await handle.info()
    assert (info.workflow, info.state, info.queue, info.priority) == ("checkout", "pending", "q", 3)
    async with Worker(client, workflows=[checkout], queues=["q"]):
        assert await handle.result(timeout=30) == Receipt("visa", 7)


@KINDS
async def test_a_run_is_never_there_when_its_caller_rolls_back(client: Client, dsn: str, sql: Sql, kind: Any) -> None:
    """The next transaction of the same connection may start it again under its key."""

    async with kind(dsn) as caller:
        keyed = client.options(conn=caller.conn, key="order-42")
        first = await keyed.start(checkout, "visa")
        await caller.rollback()
        gone = runs(sql)
        second = await keyed.start(checkout, "visa")
        await caller.commit()

    assert (gone, runs(sql)) == (0, 1)
    assert first.created and second.created and first.id != second.id


@KINDS
async def test_a_key_is_found_and_conflicts_without_spoiling_the_transaction(
    client: Client, dsn: str, sql: Sql, kind: Any
) -> None:
    """What the caller has done besides is committed."""

    there = await client.options(key="order-42").start(checkout, "visa")
    async with kind(dsn) as caller:
        keyed = client.options(conn=caller.conn, key="order-42")
        again = await keyed.start(checkout, "visa")
        with pytest.raises(KeyConflict, match=f"'order-42' belongs to run {there.id} of 'checkout', not of 'nap'"):
            await keyed.start(nap, 1)
        await client.options(conn=caller.conn, key="order-43").start(nap, 1)
        await caller.commit()

    assert (again.id, again.created) == (there.id, False)
    assert runs(sql) == 2


@pytest.mark.parametrize("kind", SYNC)
async def test_a_sync_client_inserts_over_sync_connections(dsn: str, sql: Sql, kind: Any) -> None:
    """In the caller's own thread: without a portal, without a connection of its own."""

    client = SyncClient(dsn)
    async with kind(dsn) as caller:
        handle = client.options(conn=caller.conn).start(checkout, "visa")
        before = runs(sql)
        await caller.commit()
    served = client._portal._serving

    assert (before, runs(sql), handle.created, served) == (0, 1, True, None)


@pytest.mark.parametrize("kind", ASYNC)
async def test_a_sync_client_says_where_async_connections_belong(dsn: str, kind: Any) -> None:
    """Nothing is started."""

    async with kind(dsn) as caller:
        with pytest.raises(ConfigurationError, match=r"conn= is async .* await Client\.start"):
            SyncClient(dsn).options(conn=caller.conn).start(checkout, "visa")


async def test_a_start_by_name_asks_over_the_same_connection(client: Client, dsn: str, sql: Sql) -> None:
    """What the live workers say is checked; no connection of the client's own is opened."""

    async with Worker(client, workflows=[checkout]):
        with psycopg.connect(dsn) as mine:
            borrowing = Client("postgresql://nowhere.invalid/x").options(conn=mine)
            handle = await borrowing.start("checkout", "visa", cents=7)
            with pytest.raises(ConfigurationError, match=r"checkout: \$\.cents"):
                await borrowing.start("checkout", "visa", cents="x")
            mine.commit()
        assert await client.handle(handle.id, checkout).result(timeout=30) == Receipt("visa", 7)


# --- the caller's connection is left as it was ------------------------------------------------------------------------


async def test_a_start_leaves_nothing_on_the_connection(client: Client, dsn: str) -> None:
    """No setting, no listening, no prepared statement; the transaction is the caller's to end."""

    settings = "select name, setting from pg_settings where source = 'session' order by name"
    with psycopg.connect(dsn, prepare_threshold=0) as mine:
        mine.prepare_threshold = None
        before = mine.execute(settings).fetchall()
        mine.prepare_threshold = 0
        for _ in range(3):
            await client.options(conn=mine).start(checkout, "visa")
        mine.prepare_threshold = None

        assert mine.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert mine.execute(settings).fetchall() == before
        assert mine.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
        assert mine.execute("select count(*) from pg_listening_channels()").fetchone() == (0,)


async def test_a_connection_in_autocommit_commits_each_start(client: Client, sql: Sql) -> None:
    """As it does each statement; inside of its `transaction()` it waits for that one's end."""

    await client.options(conn=sql).start(checkout, "visa")
    alone = runs(sql)
    with pytest.raises(ZeroDivisionError), sql.transaction():
        await client.options(conn=sql).start(checkout, "visa")
        1 / 0

    assert (alone, runs(sql)) == (1, 1)


async def test_row_factories_cursors_and_encodings_of_the_caller_do_not_matter(
    client: Client, dsn: str, sql: Sql
) -> None:
    """Dict rows, client-side binding, and a client encoding that has no letter of the key."""

    for encoding in ("LATIN1", "SQL_ASCII"):
        with psycopg.connect(dsn, row_factory=ROWS_AS_DICTS, cursor_factory=psycopg.ClientCursor) as mine:
            mine.execute(f"set client_encoding to {encoding}".encode())
            keyed = client.options(conn=mine, key=f"заказ-{encoding}")
            first = await keyed.start(checkout, "карта")
            again = await keyed.start(checkout, "карта")
            with pytest.raises(KeyConflict, match="'checkout'"):
                await keyed.start(nap, 1)
            assert (first.created, again.created, again.id) == (True, False, first.id)

    rows = sql.execute("select key, input ->> 'card' from replaykit.runs join replaykit.payloads on run_id = id")
    assert sorted(rows.fetchall()) == [("заказ-LATIN1", "карта"), ("заказ-SQL_ASCII", "карта")]


async def test_a_transaction_of_sqlalchemy_knows_of_the_start(client: Client, dsn: str, sql: Sql) -> None:
    """`commit()` commits although nothing else was executed, and `begin()` blocks end as they always do."""

    with engine(dsn) as made:
        with made.connect() as mine:
            await client.options(conn=mine).start(checkout, "visa")
            assert mine.in_transaction()
            mine.commit()
        with made.begin() as mine:
            await client.options(conn=mine).start(checkout, "visa")
        with pytest.raises(ZeroDivisionError), orm.Session(made) as session, session.begin():
            await client.options(conn=session).start(checkout, "visa")
            1 / 0
    with engine(dsn, isolation_level="AUTOCOMMIT") as made, made.connect() as mine:
        await client.options(conn=mine).start(checkout, "visa")
        committed = runs(sql)

    assert (committed, runs(sql)) == (3, 3)


# --- keys in flight ---------------------------------------------------------------------------------------------------


def waits_for_a_lock(sql: Sql) -> bool:
    """Whether somebody in the test's database does: behind a pooler nobody knows his server process."""
    query = "select from pg_stat_activity where datname = current_database() and pg_blocking_pids(pid) <> '{}'"
    return sql.execute(query).fetchone() is not None


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_a_key_of_an_open_transaction_is_waited_for(client: Client, dsn: str, sql: Sql, ends: str) -> None:
    """As Postgres does; the event loop goes on meanwhile."""

    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        one = await client.options(conn=first, key="order-42").start(checkout, "visa")
        starting = asyncio.create_task(client.options(conn=second, key="order-42").start(checkout, "visa"))
        await asyncio.to_thread(eventually, lambda: waits_for_a_lock(sql), "the second start waits")
        getattr(first, ends)()
        two = await starting

    assert two.created == (ends == "rollback")
    assert (two.id == one.id) == (ends == "commit")


@pytest.mark.parametrize("kind", [psycopg_sync, psycopg_async])
async def test_a_cancelled_start_leaves_the_connection_at_rest(client: Client, dsn: str, sql: Sql, kind: Any) -> None:
    """The statement is ended; its owner rolls back and goes on."""

    with psycopg.connect(dsn) as first:
        await client.options(conn=first, key="order-42").start(checkout, "visa")
        async with kind(dsn) as caller:
            starting = asyncio.create_task(client.options(conn=caller.conn, key="order-42").start(checkout, "visa"))
            await asyncio.to_thread(eventually, lambda: waits_for_a_lock(sql), "the second start waits")
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await caller.rollback()
            handle = await client.options(conn=caller.conn, key="order-43").start(checkout, "visa")
            await caller.commit()
        first.rollback()

    assert handle.created
    assert runs(sql) == 1


async def test_a_key_taken_after_the_snapshot_is_a_serialization_failure_with_a_way_out(
    client: Client, dsn: str
) -> None:
    """Under REPEATABLE READ what came later can't be found; psycopg's own class, so that those who try again do."""

    with psycopg.connect(dsn) as mine:
        mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        mine.execute("select 1 from replaykit.runs")
        there = await client.options(key="late").start(checkout, "visa")
        fresh = await client.options(conn=mine, key="new").start(checkout, "visa")
        with pytest.raises(
            psycopg.errors.SerializationFailure, match=r"key was taken .* roll back and try again"
        ) as caught:
            await client.options(conn=mine, key="late").start(checkout, "visa")
        mine.rollback()
        found = await client.options(conn=mine, key="late").start(checkout, "visa")

    assert caught.value.sqlstate == "40001"
    assert fresh.created
    assert (found.id, found.created) == (there.id, False)


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_connection_that_cannot_be_used_is_refused_in_a_sentence(client: Client, dsn: str, sql: Sql) -> None:
    """Closed, in a failed transaction, in pipeline mode; the last two go on as they were."""

    with psycopg.connect(dsn) as mine:
        with mine.pipeline(), pytest.raises(ConfigurationError, match="pipeline mode"):
            await client.options(conn=mine).start(checkout, "visa")
        with pytest.raises(psycopg.errors.DivisionByZero):
            mine.execute("select 1 / 0")
        with pytest.raises(ConfigurationError, match="failed transaction"):
            await client.options(conn=mine).start(checkout, "visa")
        mine.rollback()
        assert (await client.options(conn=mine).start(checkout, "visa")).created
    with pytest.raises(ConfigurationError, match="conn= is closed"):
        await client.options(conn=mine).start(checkout, "visa")
    with engine(dsn) as made:
        with made.connect() as connection:
            pass
        with pytest.raises(ConfigurationError, match="conn= is closed"):
            await client.options(conn=connection).start(checkout, "visa")
    async with async_engine(dsn) as made_async:
        async with made_async.connect() as async_connection:
            pass
        with pytest.raises(ConfigurationError, match="conn= is closed"):
            await client.options(conn=async_connection).start(checkout, "visa")

    assert runs(sql) == 1


@pytest.mark.parametrize("broken", ["terminated"])
async def test_a_connection_that_was_lost_raises_psycopgs_own_error(
    client: Client, dsn: str, sql: Sql, broken: str
) -> None:
    """Nothing is tried again: the transaction is gone with it."""

    with psycopg.connect(dsn) as mine:
        await client.options(conn=mine).start(checkout, "visa")
        (pid,) = mine.execute("select pg_backend_pid()").fetchone() or (None,)
        sql.execute("select pg_terminate_backend(%s, 10000)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            await client.options(conn=mine).start(checkout, "visa")
        with pytest.raises(ConfigurationError, match="conn= is closed"):
            await client.options(conn=mine).start(checkout, "visa")

    assert runs(sql) == 0


async def test_a_database_without_the_schema_is_named_and_the_transaction_lives_on(
    client: Client, empty_dsn: str
) -> None:
    """Found by a look, not by a failure."""

    with psycopg.connect(empty_dsn) as mine:
        mine.execute("create table orders (id int)")
        with pytest.raises(
            SchemaMismatch, match=r"test_.*, schema 'replaykit': not set up; run `replaykit db migrate`"
        ):
            await client.options(conn=mine).start(checkout, "visa")
        mine.execute("insert into orders values (1)")
        mine.commit()


@pytest.mark.parametrize(
    ("conn", "sentence"),
    [
        (None, "conn=None: there is no connection yet"),
        (object(), r"not builtins\.object"),
        ("postgresql://localhost/app", r"not builtins\.str"),
        (sqlalchemy.create_engine("sqlite://"), r"not sqlalchemy\.engine\.base\.Engine"),
    ],
)
async def test_what_is_no_connection_is_refused_at_once(dsn: str, conn: Any, sentence: str) -> None:
    """`None` too: a start that was meant for a transaction must not happen outside of it."""

    with pytest.raises(ConfigurationError, match=sentence):
        Client(dsn).options(conn=conn)


async def test_another_driver_is_refused_in_a_sentence(client: Client) -> None:
    """Runs are inserted over psycopg alone."""

    made = sqlalchemy.create_engine("sqlite://")
    with made.connect() as mine:
        with pytest.raises(ConfigurationError, match=r"runs on sqlite3\.Connection.*psycopg alone"):
            await client.options(conn=mine).start(checkout, "visa")
        assert not mine.in_transaction()
    made.dispose()


def test_a_client_imports_no_sqlalchemy() -> None:
    """Nor do starts over psycopg's own connections."""

    code = (
        "import sys, psycopg, replaykit.runtime.sync_client as it\n"
        "from replaykit.postgres.borrowed import check_borrowable, is_async\n"
        "it.SyncClient('postgresql://localhost/x')\n"
        "conn = psycopg.AsyncConnection.__new__(psycopg.AsyncConnection)\n"
        "check_borrowable(conn), is_async(conn)\n"
        "try: check_borrowable(5)\n"
        "except it.ConfigurationError: pass\n"
        "print([name for name in sys.modules if name.startswith('sqlalchemy')])"
    )

    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout == "[]\n"

"""`effect="transactional"`: what a body writes over its connection and the step's entry stand or fall together.

On a real database, by a real worker. A trigger notes the transaction of each entry: the rows that bodies write bear theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm, text
from sqlalchemy.ext import asyncio as aio
from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_fixed

from replaykit import (
    Client,
    ConfigurationError,
    Handle,
    NotJournalable,
    OutsideRun,
    RunFailed,
    Worker,
    Workflow,
    step,
    testing,
    workflow,
)
from replaykit.postgres.database import Database
from replaykit.postgres.transaction import Connections
from tests.crash.rows import Rows
from tests.direct import connections, direct
from tests.postgres.pooler import Pooler
from tests.runtime.shop import nap
from tests.runtime.working import fact, outcome, working

pytestmark = pytest.mark.anyio

TABLES = """
create table orders (id serial primary key, what text, n int, tx xid8 default pg_current_xact_id());
create table stock (what text primary key, left_over int);
insert into stock values ('ink', 10), ('paper', 10);
create table entries (run_id uuid, key text, tx xid8);
create function note_entry() returns trigger language plpgsql as $$
    begin insert into public.entries values (new.run_id, new.key, pg_current_xact_id()); return null; end $$;
create trigger note after insert on replaykit.journal for each row execute function note_entry();
"""


@pytest.fixture
def rows(dsn: str) -> Iterator[Rows]:
    """Looks at the test's database, which has a shop's tables."""
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute(TABLES.encode())
    looker = Rows(dsn)
    yield looker
    looker.close()


CALLS: defaultdict[str, int] = defaultdict(int)
"""How often the bodies of a step were begun, by run and key. Outside of any transaction."""

GATES: defaultdict[str, threading.Event] = defaultdict(threading.Event)
"""What a body waits for, by the run's id."""


def begun() -> int:
    """Say outside that this body has begun; which time it is."""
    info = step.current()
    key = f"{info.run_id} {info.key}"
    CALLS[key] += 1
    return CALLS[key]


def calls(run: Handle[Any], key: str) -> int:
    """How often it was begun."""
    return CALLS[f"{run.id} {key}"]


async def pass_gate() -> None:
    """Wait for the test, which reads in the database that we do."""
    await asyncio.to_thread(GATES[str(step.current().run_id)].wait, 30)


ORDER = "insert into public.orders (what, n) values (%s, %s) returning id"
ORDER_TEXT = text("insert into orders (what, n) values (:what, 1) returning id")

OURS = "datname = current_database() and application_name = 'replaykit:step'"

transactional = step.options(effect="transactional")


async def run(dsn: str, flow: Workflow[..., Any], *args: Any, **settings: Any) -> tuple[Handle[Any], Any]:
    """To its end: the result, or the error it failed with."""
    async with working(dsn, flow, **settings) as (client, _):
        handle = await client.start(flow, *args)
        return handle, await outcome(handle)


def orders(rows: Rows) -> list[tuple[Any, ...]]:
    """What is committed."""
    return rows.ask("select what, n from public.orders order by id")


TOGETHER = "select count(*) from public.orders o join public.entries e on e.tx = o.tx"


# --- every kind of connection -----------------------------------------------------------------------------------------


class Base(orm.DeclarativeBase):
    """Of the tables below."""


class Order(Base):
    """A row of orders."""

    __tablename__ = "orders"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    what: orm.Mapped[str]
    n: orm.Mapped[int]


class OurSession(aio.AsyncSession):
    """A project's own."""


async def over_psycopg(what: str) -> int:
    """psycopg's connection."""
    begun()
    conn = await step.current().connection()
    cursor = await conn.execute(ORDER, (what, 1))
    ((number,),) = await cursor.fetchall()
    return int(number)


async def over_connection(what: str) -> int:
    """SQLAlchemy's."""
    conn = await step.current().connection(aio.AsyncConnection)
    return int((await conn.execute(ORDER_TEXT, {"what": what})).scalar_one())


async def over_session(what: str) -> int:
    """An ORM's session, which nobody flushes."""
    session = await step.current().connection(OurSession)
    order = Order(what=what, n=1)
    session.add(order)
    return 1


async def over_committed_session(what: str) -> int:
    """Whose commit ends a savepoint."""
    session = await step.current().connection(aio.AsyncSession)
    async with session.begin():
        order = Order(what=what, n=1)
        session.add(order)
    await session.commit()
    return order.id


def over_psycopg_sync(what: str) -> int:
    """psycopg's connection, in a thread."""
    begun()
    conn = step.current().connection(psycopg.Connection)
    ((number,),) = conn.execute(ORDER, (what, 1)).fetchall()
    return int(number)


def over_connection_sync(what: str) -> int:
    """SQLAlchemy's, in a thread."""
    conn = step.current().connection(sqlalchemy.Connection)
    return int(conn.execute(ORDER_TEXT, {"what": what}).scalar_one())


def over_session_sync(what: str) -> int:
    """An ORM's session, in a thread, which nobody flushes."""
    session = step.current().connection(orm.Session)
    session.add(Order(what=what, n=1))
    return 1


def around_a_coroutine(what: str) -> Any:
    """A plain function whose coroutine the worker awaits."""
    return over_psycopg(what)


BODIES: tuple[Callable[..., Any], ...] = (
    over_psycopg,
    over_connection,
    over_session,
    over_committed_session,
    over_psycopg_sync,
    over_connection_sync,
    over_session_sync,
    around_a_coroutine,
)


@workflow
async def place(body: str, what: str, times: int = 1) -> int:
    """Calls a body of this file so often."""
    total = 0
    for _ in range(times):
        total += await transactional(globals()[body], what)
    return total


@pytest.mark.parametrize("body", [body.__name__ for body in BODIES])
async def test_what_a_body_writes_is_committed_by_the_transaction_of_its_entry(dsn: str, rows: Rows, body: str) -> None:
    """Over each kind of connection, of async and of sync bodies, one body after another on one connection."""
    _, result = await run(dsn, place, body, "ink", 3)

    assert isinstance(result, int)
    assert orders(rows) == [("ink", 1)] * 3
    assert rows.ask(TOGETHER) == [(3,)]
    assert rows.ask("select count(*) from intents") == [(0,)]


@pytest.mark.parametrize("body", [body.__name__ for body in BODIES])
async def test_what_a_body_wrote_is_gone_when_its_result_cannot_be_recorded(dsn: str, rows: Rows, body: str) -> None:
    """The step has its error, in a transaction of its own, and the table is as it was."""
    handle, result = await run(dsn, spoil, body)

    assert isinstance(result, NotJournalable)
    assert orders(rows) == []
    assert [(e.key, e.outcome) for e in rows.entries(handle.id)] == [("spoilt", "error")]


@workflow
async def spoil(body: str) -> None:
    """A body of this file whose result is none."""
    function = globals()[body]

    if body.endswith("_sync"):

        def spoilt(what: str) -> Any:
            function(what)
            return threading.Lock()

        await transactional(spoilt, "ink")
        return

    async def spoilt_async(what: str) -> Any:
        made = function(what)
        await made
        return threading.Lock()

    await step.options(effect="transactional", name="spoilt")(spoilt_async, "ink")


async def ask_thrice() -> list[int]:
    """One transaction, three faces of it."""
    conn = await step.current().connection()
    session = await step.current().connection(aio.AsyncSession)
    alchemy = await step.current().connection(aio.AsyncConnection)
    assert await step.current().connection() is conn
    assert await step.current().connection(aio.AsyncSession) is session
    await conn.execute(ORDER, ("ink", 1))
    session.add(Order(what="paper", n=2))
    await session.flush()
    found = (await alchemy.execute(text("select n from orders order by n"))).scalars().all()
    return list(found)


@workflow
async def thrice() -> list[int]:
    """One step."""
    return await transactional(ask_thrice)


async def test_a_body_that_asks_again_has_the_same_transaction(dsn: str, rows: Rows) -> None:
    """Whatever kind it asks for: each sees what the others wrote, and all of it is committed at once."""
    _, result = await run(dsn, thrice)

    assert result == [1, 2]
    assert rows.ask(TOGETHER) == [(2,)]


async def as_dicts() -> dict[str, Any]:
    """With the settings of a connection of one's own."""
    conn = await step.current().connection()
    factory: Any = dict_row
    conn.row_factory = factory
    await conn.execute("set search_path = nowhere")
    await conn.execute("create temporary table notes (n int)")
    cursor: Any = None
    for _ in range(8):  # more than it takes until psycopg prepares a statement
        cursor = await conn.execute("select %s::int as n", (step.current().attempt,), prepare=True)
    row: Any = await cursor.fetchone()
    return dict(row)


@workflow
async def dicts() -> list[dict[str, Any]]:
    """One after another, on one connection."""
    return [await transactional(as_dicts) for _ in range(3)]


async def test_nothing_of_a_body_is_left_in_the_connection_of_the_next(dsn: str, rows: Rows) -> None:
    """Settings, temporary tables, prepared statements, row factories: each has a connection as new."""
    handle, result = await run(dsn, dicts, connections=1)

    assert result == [{"n": 1}] * 3
    assert [e.outcome for e in rows.entries(handle.id)] == ["ok"] * 3


async def start_another() -> str:
    """A run that exists if this step's result does."""
    conn = await step.current().connection()
    handle = await step.current().client.options(key="follow-up", conn=conn).start(nap, 0.0)
    return str(handle.id)


@workflow
async def follow_up() -> str:
    """One step."""
    return await transactional(start_another)


async def test_a_run_can_be_started_in_the_transaction(dsn: str, rows: Rows) -> None:
    """`client.start(..., conn=)` takes the body's connection."""
    _, started = await run(dsn, follow_up)

    assert rows.ask("select key, state from runs where id = %s::uuid", started) == [("follow-up", "pending")]


# --- what cannot be asked ---------------------------------------------------------------------------------------------


async def asks_nothing() -> int:
    """Transactional by name."""
    return begun()


async def asks_for_a_list() -> None:
    """No connection."""
    await step.current().connection(list)  # type: ignore[type-var]


async def asks_for_a_sync_one() -> None:
    """In an async body."""
    step.current().connection(orm.Session)


def asks_for_an_async_one() -> Any:
    """In a sync body."""
    step.current().connection(aio.AsyncSession)


async def asks_in_a_thread() -> None:
    """Of its own."""
    info = step.current()
    await asyncio.to_thread(lambda: info.connection(psycopg.Connection))


@workflow
async def ask(body: str, effect: str = "transactional") -> Any:
    """Calls a body of this file."""
    options: dict[str, Any] = {"effect": effect}
    return await step.options(**options)(globals()[body])


async def test_a_body_that_asks_for_no_connection_is_recorded_as_any_other(dsn: str, rows: Rows) -> None:
    """By the worker's writer; no connection is made for it."""
    handle, result = await run(dsn, ask, "asks_nothing")

    assert result == 1
    assert [e.outcome for e in rows.entries(handle.id)] == ["ok"]
    assert connections(dsn, "replaykit:step") == set()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            "asks_for_a_list",
            ConfigurationError,
            "a class is asked for, psycopg's AsyncConnection, or AsyncConnection or",
        ),
        ("asks_for_a_sync_one", ConfigurationError, "connection(Session) in an async body: ask for AsyncSession"),
        ("asks_for_an_async_one", ConfigurationError, "connection(AsyncSession) in a sync body: ask for Session"),
        ("asks_in_a_thread", OutsideRun, "in a thread that the async body of step asks_in_a_thread has begun"),
    ],
)
async def test_what_cannot_be_given_is_said_in_a_sentence(
    dsn: str, rows: Rows, body: str, kind: type[Exception], words: str
) -> None:
    """The step fails with it."""
    _, error = await run(dsn, ask, body)

    assert isinstance(error, kind)
    assert words in str(error)


async def test_a_step_that_is_not_transactional_has_no_connection(dsn: str, rows: Rows) -> None:
    """The sentence names the way out."""
    _, error = await run(dsn, ask, "as_dicts", "repeatable")

    assert isinstance(error, OutsideRun)
    assert "declare it with effect='transactional'" in str(error)


# --- a body that fails ------------------------------------------------------------------------------------------------


async def fails_after(what: str) -> None:
    """Writes, and raises."""
    begun()
    conn = await step.current().connection()
    await conn.execute(ORDER, (what, 1))
    raise LookupError("sold out")


def fails_after_sync(what: str) -> None:
    """The same in a thread."""
    begun()
    step.current().connection(psycopg.Connection).execute(ORDER, (what, 1))
    raise LookupError("sold out")


@pytest.mark.parametrize("body", ["fails_after", "fails_after_sync"])
async def test_a_body_that_raises_leaves_nothing_but_its_error(dsn: str, rows: Rows, body: str) -> None:
    """It was called once: an error of its own is no reason to call it again."""
    handle, error = await run(dsn, place, body, "ink")

    assert isinstance(error, LookupError)
    assert orders(rows) == []
    assert [e.outcome for e in rows.entries(handle.id)] == ["error"]
    assert calls(handle, body) == 1
    assert connections(dsn, "replaykit:step") == set()


async def improves(enough: int) -> int:
    """A result that is good enough only later; each try writes."""
    info = step.current()
    conn = await info.connection()
    await conn.execute(ORDER, ("try", info.attempt))
    if info.attempt == 1:
        raise ConnectionError("at first nothing works")
    return info.attempt


@workflow
async def retried() -> int:
    """Rejects the second result."""
    retry = AsyncRetrying(stop=stop_after_attempt(5), wait=wait_fixed(0.01), retry=_below(3))
    return await step.options(effect="transactional", retry=retry)(improves, 3)


def _below(enough: int) -> Any:
    return retry_if_exception_type(ConnectionError) | retry_if_result(lambda n: n is not None and n < enough)


async def test_of_tries_that_are_retried_nothing_is_left(dsn: str, rows: Rows) -> None:
    """One raised, one was rejected: only the third one's row stands, with the entry."""
    handle, result = await run(dsn, retried)

    assert result == 3
    assert orders(rows) == [("try", 3)]
    assert rows.ask(TOGETHER) == [(1,)]
    assert [e.attempt for e in rows.entries(handle.id)] == [3]


async def takes_long() -> None:
    """Writes, and waits in the database."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("late", 1))
    await conn.execute("select pg_sleep(60)")


def takes_long_sync() -> None:
    """The same in a thread."""
    conn = step.current().connection(psycopg.Connection)
    conn.execute(ORDER, ("late", 1))
    try:
        conn.execute("select pg_sleep(60)")
    finally:
        begun()
        with pytest.raises(OutsideRun, match="whose body is over"):
            conn.execute(ORDER, ("too late", 1))


@workflow
async def hurried(body: str) -> str:
    """Gives up soon, and the step goes on from that."""
    try:
        await step.options(effect="transactional", timeout=0.3)(globals()[body])
    except TimeoutError:
        await transactional(over_psycopg, "after")
        return "timed out"
    return "in time"


@pytest.mark.parametrize("body", ["takes_long", "takes_long_sync"])
async def test_a_body_whose_time_is_up_leaves_nothing(dsn: str, rows: Rows, body: str) -> None:
    """Its statement is ended, in the database too, and its connection, if it cannot be used again, is closed."""
    async with working(dsn, hurried, connections=1) as (client, _):
        handle = await client.start(hurried, body)
        assert await outcome(handle) == "timed out"
        sleeping = f"select 1 from pg_stat_activity where {OURS} and query like '%%pg_sleep(60)%%' and state = 'active'"
        await fact(lambda: not rows.ask(sleeping), "nobody sleeps")
        if body == "takes_long_sync":
            await fact(lambda: calls(handle, body) == 1, "the thread has ended")

    assert orders(rows) == [("after", 1)]
    assert [(e.outcome) for e in rows.entries(handle.id)] == ["timeout", "ok"]


# --- who ends the transaction -----------------------------------------------------------------------------------------


async def commits() -> None:
    """By psycopg's method."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("early", 1))
    await conn.commit()


def rolls_back_sync() -> None:
    """By SQLAlchemy's method, over psycopg's."""
    conn = step.current().connection(sqlalchemy.Connection)
    conn.execute(ORDER_TEXT, {"what": "early"})
    conn.commit()


async def commits_in_sql() -> None:
    """By a statement."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("early", 1))
    await conn.execute("commit")
    await conn.execute(ORDER, ("later", 1))


async def commits_and_chains() -> None:
    """By a statement that begins another."""
    conn = await step.current().connection()
    await conn.execute("commit and chain")
    await conn.execute(ORDER, ("later", 1))


def commits_in_sql_sync() -> None:
    """In a thread; and swallows what it is told."""
    conn = step.current().connection(psycopg.Connection)
    with pytest.raises(psycopg.ProgrammingError, match="the body has ended its transaction"):
        conn.execute("rollback")
    conn.execute(ORDER, ("later", 1))


@pytest.mark.parametrize(
    ("body", "words", "left"),
    [
        ("commits", "commit() in the body of a transactional step", []),
        ("rolls_back_sync", "commit() in the body of a transactional step", []),
        ("commits_in_sql", "has ended its transaction (COMMIT or ROLLBACK in SQL)", [("early", 1)]),
        ("commits_and_chains", "has ended its transaction (COMMIT or ROLLBACK in SQL)", []),
        ("commits_in_sql_sync", "has ended its transaction (COMMIT or ROLLBACK in SQL)", []),
    ],
)
async def test_a_body_cannot_end_its_transaction(
    dsn: str, rows: Rows, body: str, words: str, left: list[tuple[Any, ...]]
) -> None:
    """Methods are refused; a statement that did it fails the step, and what came after it is rolled back."""
    handle, error = await run(dsn, ask, body)

    assert words in str(error)
    assert orders(rows) == left
    assert [e.outcome for e in rows.entries(handle.id)] == ["error"]


async def closes() -> int:
    """As one does with connections of one's own."""
    async with await step.current().connection() as conn:
        await conn.execute(ORDER, ("ink", 1))
    await conn.close()
    return 1


async def test_a_body_may_close_its_connection_as_if_it_were_its_own(dsn: str, rows: Rows) -> None:
    """`async with` and `close()` end nothing."""
    _, result = await run(dsn, ask, "closes")

    assert result == 1
    assert rows.ask(TOGETHER) == [(1,)]


async def swallows() -> str:
    """An error of the database, after which nothing counts."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("ink", 1))
    try:
        await conn.execute("insert into stock values ('ink', 1)")
    except psycopg.errors.UniqueViolation:
        return "it was there"
    return "new"


async def swallows_in_a_savepoint() -> str:
    """The same, properly."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("ink", 1))
    try:
        async with conn.transaction():
            await conn.execute("insert into stock values ('ink', 1)")
    except psycopg.errors.UniqueViolation:
        return "it was there"
    return "new"


async def test_an_error_of_the_database_that_was_swallowed_fails_the_step(dsn: str, rows: Rows) -> None:
    """With a sentence that names the savepoint, with which it goes."""
    _, error = await run(dsn, ask, "swallows")
    assert "connection.transaction()" in str(error)
    assert orders(rows) == []

    _, result = await run(dsn, ask, "swallows_in_a_savepoint")
    assert result == "it was there"
    assert rows.ask(TOGETHER) == [(1,)]


async def breaks_a_deferred_rule() -> None:
    """What is found out at the end alone."""
    conn = await step.current().connection()
    await conn.execute("create table twins (a int unique deferrable initially deferred)")
    await conn.execute("insert into twins values (1), (1)")


async def test_a_deferred_constraint_is_the_steps_own_error(dsn: str, rows: Rows) -> None:
    """It is checked before anybody is told that the body has returned."""
    handle, error = await run(dsn, ask, "breaks_a_deferred_rule")

    assert "UniqueViolation" in f"{type(error).__name__} {error!r}"
    assert [e.outcome for e in rows.entries(handle.id)] == ["error"]
    assert rows.ask("select to_regclass('public.twins')") == [(None,)]


LEAKED: list[asyncio.Task[Any]] = []


async def leaves_a_task() -> None:
    """Which still uses the connection."""
    conn = await step.current().connection()
    LEAKED.append(asyncio.create_task(conn.execute("select pg_sleep(60)")))
    await asyncio.sleep(0.05)


async def test_a_connection_that_is_still_in_use_when_the_body_returns(dsn: str, rows: Rows) -> None:
    """Fails the step, whose statement is ended."""
    LEAKED.clear()
    _, error = await run(dsn, ask, "leaves_a_task")

    assert "its connection is still in use" in str(error)
    (leaked,) = LEAKED
    with pytest.raises((psycopg.errors.QueryCanceled, psycopg.OperationalError, OutsideRun)):
        await leaked


async def narrows() -> str:
    """Settings for its own statements, and a role that may see nothing of the journal."""
    conn = await step.current().connection()
    await conn.execute(ORDER, ("ink", 1))
    await conn.execute("set local statement_timeout = '1ms'; set local search_path = nowhere")
    await conn.execute("create role nobody_yet")
    await conn.execute("set local role nobody_yet")
    return "done"


async def test_what_a_body_sets_for_itself_does_not_reach_the_entry(dsn: str, rows: Rows) -> None:
    """Role, time-out, search path."""
    try:
        _, result = await run(dsn, ask, "narrows")
    finally:
        rows.ask("drop role if exists nobody_yet")

    assert result == "done"
    assert rows.ask(TOGETHER) == [(1,)]


# --- conflicts --------------------------------------------------------------------------------------------------------


async def sell_strictly(what: str) -> int:
    """Reads, waits for the test at its first try, and writes what it has read less one."""
    conn = await step.current().connection()
    await conn.execute("set transaction isolation level repeatable read")
    ((left,),) = await (await conn.execute("select left_over from stock where what = %s", (what,))).fetchall()
    if begun() == 1:
        await pass_gate()
    await conn.execute("update stock set left_over = %s where what = %s", (left - 1, what))
    return int(left)


def sell_strictly_sync(what: str) -> int:
    """The same in a thread, by an ORM's session."""
    info = step.current()
    info.connection(psycopg.Connection).execute("set transaction isolation level repeatable read")
    session = info.connection(orm.Session)
    left = session.execute(text("select left_over from stock where what = :what"), {"what": what}).scalar_one()
    if begun() == 1:
        GATES[str(info.run_id)].wait(30)
    update = text("update stock set left_over = :left where what = :what")
    try:
        session.execute(update, {"left": left - 1, "what": what})
    except Exception as error:
        raise LookupError("an error of its own") from error
    return int(left)


@workflow
async def sell(body: str, what: str) -> int:
    """One step."""
    return await transactional(globals()[body], what)


@pytest.mark.parametrize("body", ["sell_strictly", "sell_strictly_sync"])
async def test_a_serialization_failure_in_the_body_runs_it_again(dsn: str, rows: Rows, body: str) -> None:
    """At once, as the same attempt; also where the body has wrapped the error in one of its own."""
    async with working(dsn, sell) as (client, _):
        handle = await client.start(sell, body, "ink")
        await fact(lambda: calls(handle, body) == 1, "it has read")
        rows.ask("update public.stock set left_over = 5 where what = 'ink'")
        GATES[str(handle.id)].set()
        assert await outcome(handle) == 5

    assert calls(handle, body) == 2
    assert rows.ask("select left_over from public.stock where what = 'ink'") == [(4,)]
    assert [(e.outcome, e.attempt) for e in rows.entries(handle.id)] == [("ok", 1)]


async def always_too_late(what: str) -> None:
    """Somebody is always faster."""
    conn = await step.current().connection()
    await conn.execute("set transaction isolation level repeatable read")
    await conn.execute("select * from stock")
    begun()
    async with await psycopg.AsyncConnection.connect(conn.info.dsn, autocommit=True) as other:
        await other.execute("update stock set left_over = left_over + 1 where what = %s", (what,))
    await conn.execute("update stock set left_over = 0 where what = %s", (what,))


async def test_a_conflict_that_never_ends_is_the_steps_error(dsn: str, rows: Rows) -> None:
    """After so many tries."""
    handle, error = await run(dsn, sell, "always_too_late", "ink")

    assert isinstance(error, psycopg.errors.SerializationFailure)
    assert calls(handle, "always_too_late") == 10


async def lock_both(first: str, second: str) -> int:
    """Locks two rows, the second when the test lets it: its neighbour goes the other way round."""
    conn = await step.current().connection()
    lock = "select left_over from stock where what = %s for update"
    await conn.execute(lock, (first,))
    if begun() == 1:
        await pass_gate()
    await conn.execute(lock, (second,))
    await conn.execute(ORDER, (first, 1))
    return 1


@workflow
async def both(first: str, second: str) -> int:
    """One step."""
    return await transactional(lock_both, first, second)


async def test_of_two_that_deadlock_both_get_through(dsn: str, rows: Rows) -> None:
    """The one that the database ends runs again, after the other."""
    async with working(dsn, both) as (client, _):
        one, other = await client.start(both, "ink", "paper"), await client.start(both, "paper", "ink")
        await fact(lambda: calls(one, "lock_both") == calls(other, "lock_both") == 1, "each holds a lock")
        for handle in (one, other):
            GATES[str(handle.id)].set()
        assert [await outcome(one), await outcome(other)] == [1, 1]

    assert sorted(orders(rows)) == [("ink", 1), ("paper", 1)]
    assert calls(one, "lock_both") + calls(other, "lock_both") == 3


async def doctor(name: str) -> str:
    """Goes off duty if another is on: what two serializable ones must not do at once. Both wait for the test."""
    conn = await step.current().connection()
    await conn.execute("set transaction isolation level serializable")
    ((on,),) = await (await conn.execute("select count(*) from doctors where on_duty")).fetchall()
    if begun() == 1:
        await pass_gate()
    if on < 2:
        return "stays"
    await conn.execute("update doctors set on_duty = false where name = %s", (name,))
    return "leaves"


@workflow
async def leave(name: str) -> str:
    """The step that reads and writes, and one more."""
    said = await transactional(doctor, name)
    await step(asks_nothing)
    return said


async def test_a_serialization_failure_at_the_commit_runs_the_body_again(dsn: str, rows: Rows) -> None:
    """The journal is read again: no entry is there. The second time the body sees what the other has done."""
    rows.ask("create table public.doctors (name text primary key, on_duty bool)")
    rows.ask("insert into public.doctors select 'd' || n, n <= 2 from generate_series(1, 3000) n")
    rows.ask("analyze public.doctors")
    async with working(dsn, leave) as (client, _):
        handles = [await client.start(leave, name) for name in ("d1", "d2")]
        await fact(lambda: all(calls(h, "doctor") == 1 for h in handles), "both have read")
        for handle in handles:
            GATES[str(handle.id)].set()
        assert sorted([await outcome(h) for h in handles]) == ["leaves", "stays"]

    assert rows.ask("select count(*) from public.doctors where on_duty") == [(1,)]
    assert sum(calls(h, "doctor") for h in handles) >= 3
    for handle in handles:
        assert [(e.key, e.outcome) for e in rows.entries(handle.id)] == [("doctor", "ok"), ("asks_nothing", "ok")]


# --- the connection, the fence, the lock ------------------------------------------------------------------------------


async def loses_its_connection(what: str) -> int:
    """The first time, in the middle."""
    conn = await step.current().connection()
    await conn.execute(ORDER, (what, 1))
    if begun() == 1:
        mine = await (await conn.execute("select pg_backend_pid()")).fetchone()
        async with await psycopg.AsyncConnection.connect(conn.info.dsn, autocommit=True) as other:
            await other.execute("select pg_terminate_backend(%s)", mine)
    await conn.execute(ORDER, (what, 2))
    return 1


async def test_a_body_whose_connection_is_lost_runs_again(dsn: str, rows: Rows) -> None:
    """Nothing of it had been committed."""
    handle, result = await run(dsn, place, "loses_its_connection", "ink", 1)

    assert result == 1
    assert orders(rows) == [("ink", 1), ("ink", 2)]
    assert calls(handle, "loses_its_connection") == 2


async def test_idle_connections_that_were_lost_are_replaced(dsn: str, rows: Rows) -> None:
    """The database was restarted between two steps: the second body does not see it."""
    async with working(dsn, place) as (client, _):
        assert await outcome(await client.start(place, "over_psycopg", "ink")) == 1
        end = f"select pg_terminate_backend(pid) from pg_stat_activity where {OURS}"
        await fact(lambda: rows.ask(end), "an idle connection is ended")
        handle = await client.start(place, "over_psycopg", "ink")
        assert await outcome(handle) == 2

    assert calls(handle, "over_psycopg") == 1


async def waits(what: str) -> int:
    """Writes, and waits for the test."""
    conn = await step.current().connection()
    await conn.execute(ORDER, (what, begun()))
    await pass_gate()
    return 1


async def test_a_body_whose_run_was_taken_over_commits_nothing(dsn: str, rows: Rows) -> None:
    """The fence is in the same transaction: rows of a worker that has lost its lease are rolled back."""
    async with working(dsn, place) as (client, _):
        handle = await client.start(place, "waits", "ink")
        await fact(lambda: calls(handle, "waits") == 1, "it has written")
        rows.ask("update runs set lease_token = gen_random_uuid(), worker = gen_random_uuid()")
        GATES[str(handle.id)].set()
        left = f"select 1 from pg_stat_activity where {OURS} and state <> 'idle'"
        await fact(lambda: not rows.ask(left), "its transaction has ended")

    assert orders(rows) == []
    assert rows.entries(handle.id) == []


async def test_a_run_that_somebody_has_locked_is_committed_when_they_let_go(dsn: str, rows: Rows) -> None:
    """Longer than the lock time-out: the transaction stays open, and the body does not run again."""
    async with working(dsn, place) as (client, _):
        handle = await client.start(place, "waits", "ink")
        await fact(lambda: calls(handle, "waits") == 1, "it has written")
        with psycopg.connect(dsn) as other:
            other.execute("select 1 from replaykit.runs for update")
            GATES[str(handle.id)].set()
            tried = f"select 1 from pg_stat_activity where {OURS} and state like '%%aborted%%'"
            await fact(lambda: rows.ask(tried), "a try has timed out")
            assert rows.entries(handle.id) == []
        assert await outcome(handle) == 1

    assert orders(rows) == [("ink", 1)]
    assert rows.ask(TOGETHER) == [(1,)]


@workflow
async def give_up() -> str:
    """Cancels its await of a body that has begun, and goes on."""
    waiting = asyncio.ensure_future(transactional(waits, "ink"))
    await step(gate_is_near)
    waiting.cancel()
    try:
        await waiting
    except asyncio.CancelledError:
        return await step(after_all)
    return "not cancelled"


async def gate_is_near() -> None:
    """Until the other body has written."""
    info = step.current()
    while not CALLS[f"{info.run_id} waits"]:
        await asyncio.sleep(0.01)


async def after_all() -> str:
    """Lets it go on."""
    GATES[str(step.current().run_id)].set()
    return "gave up"


async def test_a_body_whose_await_was_cancelled_goes_on_and_is_recorded(dsn: str, rows: Rows) -> None:
    """The barrier: its outcome is known, and its rows are there, before the run ends."""
    handle, result = await run(dsn, give_up)

    assert result == "gave up"
    assert orders(rows) == [("ink", 1)]
    assert rows.ask(TOGETHER) == [(1,)]
    assert ("waits", "ok") in [(e.key, e.outcome) for e in rows.entries(handle.id)]


@workflow
async def crowd(number: int) -> int:
    """Bodies side by side."""
    return sum(await asyncio.gather(*(transactional(over_psycopg, str(n)) for n in range(number))))


async def test_bodies_side_by_side_take_turns_with_the_connections(dsn: str, rows: Rows) -> None:
    """Each entry in its own body's transaction, however many there are; no more connections than allowed."""
    handle, result = await run(dsn, crowd, 25, connections=2)

    assert result == 25 * 26 // 2
    assert rows.ask(TOGETHER) == [(25,)]
    assert rows.ask("select count(distinct tx) from public.entries") == [(25,)]
    assert [e.seq for e in rows.entries(handle.id)] == list(range(1, 26))


async def test_a_drained_worker_rolls_back_what_has_not_ended(dsn: str, rows: Rows) -> None:
    """Its body runs again elsewhere."""
    async with working(dsn, place) as (client, worker):
        handle = await client.start(place, "waits", "ink")
        await fact(lambda: calls(handle, "waits") == 1, "it has written")
        await worker.stop(grace_seconds=0.1)
        assert orders(rows) == []
        GATES[str(handle.id)].set()
        async with Worker(client, workflows=[place]):
            assert await outcome(handle) == 1

    assert orders(rows) == [("ink", 2)]
    assert rows.ask(TOGETHER) == [(1,)]


async def test_through_a_pooler_too(dsn: str, rows: Rows) -> None:
    """Which gives a connection to whoever begins a transaction: nothing is prepared, nothing is kept."""
    with Pooler(direct(dsn)) as pooled:
        _, result = await run(pooled, place, "over_committed_session", "ink", 3)

    assert isinstance(result, int)
    assert rows.ask(TOGETHER) == [(3,)]


async def says_much() -> str:
    """What quotes, escapes and formats could stumble over."""
    await (await step.current().connection()).execute(ORDER, ("ink", 1))
    return STUMBLING


STUMBLING = "'; commit; -- \\ \\' \" %s %(units)s %% $1 \u00fc \U0001f4d2 {schema} \n"


async def test_any_result_goes_through_the_message_as_it_is(dsn: str, rows: Rows) -> None:
    """It is a piece of text in a statement there."""
    _, result = await run(dsn, ask, "says_much")

    assert result == STUMBLING
    assert rows.ask(TOGETHER) == [(1,)]


async def only_reads() -> int:
    """And forbids its transaction to write."""
    begun()
    conn = await step.current().connection()
    await conn.execute("set transaction read only")
    return 1


async def test_a_commit_that_the_database_refuses_again_and_again_is_the_steps_error(dsn: str, rows: Rows) -> None:
    """After so many tries, each of which ran the body: nothing was committed."""
    handle, error = await run(dsn, ask, "only_reads")

    assert isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
    assert calls(handle, "only_reads") == 10
    assert [e.outcome for e in rows.entries(handle.id)] == ["error"]


@workflow
async def two(what: str) -> int:
    """One step after another; the second one waits."""
    return await transactional(over_psycopg, what) + await transactional(waits, what)


async def test_a_transactional_step_clears_a_suspect(dsn: str, rows: Rows) -> None:
    """Its entry is progress like any other."""
    async with Client(dsn) as client:
        handle = await client.start(two, "ink")
        rows.ask("update runs set suspect = true")
        async with Worker(client, workflows=[two]):
            await fact(lambda: calls(handle, "waits") == 1, "the second step waits")
            await fact(lambda: rows.ask("select 1 from runs where not suspect"), "it is no suspect any more")
            GATES[str(handle.id)].set()
            assert await outcome(handle) == 2


async def test_a_body_that_goes_on_has_no_say_over_a_connection_that_is_the_next_ones(dsn: str) -> None:
    """What it was lent is of no use to it once its step no longer waits."""
    connections = Connections(Database(dsn, name="step"), 1)
    transaction = await connections.begin()
    lent = await transaction.lend(None)
    await transaction.roll_back()
    following = await connections.begin()

    with pytest.raises(OutsideRun, match="whose body is over"):
        await lent.execute("select 1")

    await following.roll_back()
    await connections.close()


async def test_a_closed_pool_gives_nothing(dsn: str) -> None:
    """A thread that outlives its worker gets a sentence."""
    connections = Connections(Database(dsn, name="step"), 1)
    await connections.close()

    with pytest.raises(OutsideRun, match="the worker has stopped"):
        await connections.begin()


# --- without a database -----------------------------------------------------------------------------------------------


class Fake:
    """What a test gives instead of a connection."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def commit(self) -> None:
        """Makes it an async one."""

    async def execute(self, query: str, params: Any) -> Any:
        """Remembers."""
        self.told.append(params)
        return self

    async def fetchall(self) -> list[tuple[int]]:
        """One row."""
        return [(7,)]


async def test_in_memory_bodies_get_the_tests_own_connection() -> None:
    """Without one they get a sentence that names the ways out."""
    fake = Fake()
    async with testing.Client(connection=fake) as client:
        assert await (await client.start(place, "over_psycopg", "ink")).result() == 7
    assert fake.told == [("ink", 1)]

    async with testing.Client() as client:
        handle = await client.start(place, "over_psycopg", "ink")
        with pytest.raises(RunFailed) as failed:
            await handle.result()
    assert "testing.Client(connection=...)" in str(failed.value.__cause__)

"""A caller's own connection, borrowed for a few statements in the caller's own transaction.

Nothing of it is changed: no commit, no setting, no LISTEN, nothing prepared, no row factory. psycopg's connections are
taken as they are, those that SQLAlchemy keeps inside its own are unwrapped.

What is to be said is a *conversation*: a generator that yields statements and is sent their rows. It knows neither kind of
connection; `talk` and `talk_async` obey it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from uuid import UUID

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from replaykit.errors import ConfigurationError
from replaykit.postgres.database import VERSION, VERSION_TABLE, Database
from replaykit.postgres.runs import START_BORROWED, START_BORROWED_READ, Started, StartRow, start_runs
from replaykit.postgres.schema import Bound, check_schema, quote_name
from replaykit.replay.entries import State

if TYPE_CHECKING:
    import sqlalchemy
    from sqlalchemy import orm
    from sqlalchemy.ext import asyncio as aio

__all__ = ["Borrowable", "Borrower", "Conversation", "check_borrowable", "insert_run", "is_async"]

_Sync: TypeAlias = "psycopg.Connection[Any] | sqlalchemy.Connection | orm.Session | orm.scoped_session[Any]"
_Async: TypeAlias = (
    "psycopg.AsyncConnection[Any] | aio.AsyncConnection | aio.AsyncSession | aio.async_scoped_session[Any]"
)
Borrowable: TypeAlias = "_Sync | _Async"
"""What `conn=` takes."""

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]
Conversation: TypeAlias = Generator[Bound, Rows, T]
"""What is said over a connection: yields statements, is sent their rows, returns what it was for."""

_CANCEL_SECONDS: Final = 0.1  # between two requests to end a statement: the first may come before there is one
_LOOKS_MAX: Final = 10  # at a key that is taken whenever we insert and gone whenever we look

_SYNC = (("sqlalchemy.engine", "Connection"), ("sqlalchemy.orm", "Session"), ("sqlalchemy.orm", "scoped_session"))
_ASYNC = tuple(("sqlalchemy.ext.asyncio", name) for name in ("AsyncConnection", "AsyncSession", "async_scoped_session"))


def check_borrowable(conn: object) -> None:
    """See that a run can be inserted over it.

    Raises:
        ConfigurationError: it is none of the connections and sessions that are known.
    """
    if conn is None:
        raise ConfigurationError("conn=None: there is no connection yet; Django opens its own with ensure_connection()")
    if not isinstance(conn, psycopg.Connection | psycopg.AsyncConnection) and not _is_any(conn, _SYNC + _ASYNC):
        kind = type(conn)
        raise ConfigurationError(
            f"conn= takes a connection of psycopg, or a connection or session of SQLAlchemy over psycopg,"
            f" not {kind.__module__}.{kind.__qualname__}"
        )


def is_async(conn: object) -> bool:
    """Whether it belongs to an event loop."""
    return isinstance(conn, psycopg.AsyncConnection) or _is_any(conn, _ASYNC)


def insert_run(row: StartRow) -> Conversation[Started]:
    """Insert a run, or find the one that holds its key."""
    params = start_runs([row])[0][1]
    for _ in range(_LOOKS_MAX):
        if (yield START_BORROWED, params):
            return Started(row.id, row.id, row.workflow, True, State.PENDING)
        for run_id, workflow, state_text in (yield START_BORROWED_READ, params):
            name = bytes.fromhex(_text(workflow)).decode()
            return Started(row.id, UUID(_text(run_id)), name, False, State(_text(state_text)))
    raise RuntimeError(f"key {row.key!r} is taken by runs that are deleted at once")


class Borrower:
    """Holds conversations over callers' connections.

    Args:
        schema: the schema that replaykit's tables live in.
    """

    def __init__(self, schema: str) -> None:
        self._schema = check_schema(schema)
        # Looked at once: a caller's connection stays on its database.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def talk(
        self, conn: object, conversation: Conversation[T], opened: list[psycopg.Connection[Any]] | None = None
    ) -> T:
        """Hold a conversation in this thread.

        Args:
            conn: of the sync kinds.
            conversation: what to say.
            opened: gets the connection as soon as it is known.

        Raises:
            ConfigurationError: the connection cannot be used.
            SchemaMismatch: its database has not the tables that this release needs.
        """
        raw = _unwrapped(conn)
        if opened is not None:
            opened.append(raw)
        _refuse_unusable(raw)
        database = Database(raw.info.dsn, self._schema)
        whole = self._after_a_look(raw, database, conversation)
        with _in_plain_words():
            try:
                bound = next(whole)
                while True:
                    with psycopg.Cursor(raw, row_factory=tuple_row) as cursor:
                        cursor.execute(database.text(bound[0]), bound[1], prepare=False)
                        bound = whole.send(cursor.fetchall() if cursor.description else [])
            except StopIteration as end:
                result: T = end.value
                return result

    async def talk_async(self, conn: object, conversation: Conversation[T]) -> T:
        """Hold a conversation without blocking the event loop; of a sync connection in a thread.

        A caller that is cancelled leaves with a connection on which nothing runs any more (what ran was ended, which
        fails the transaction: psycopg's own way).
        """
        if not is_async(conn):
            return await self._talk_in_thread(conn, conversation)
        raw = await _unwrapped_async(conn)
        _refuse_unusable(raw)
        database = Database(raw.info.dsn, self._schema)
        whole = self._after_a_look(raw, database, conversation)
        with _in_plain_words():
            try:
                bound = next(whole)
                while True:
                    async with psycopg.AsyncCursor(raw, row_factory=tuple_row) as cursor:
                        await cursor.execute(database.text(bound[0]), bound[1], prepare=False)
                        bound = whole.send(await cursor.fetchall() if cursor.description else [])
            except StopIteration as end:
                result: T = end.value
                return result

    async def _talk_in_thread(self, conn: object, conversation: Conversation[T]) -> T:
        opened: list[psycopg.Connection[Any]] = []
        talking = asyncio.ensure_future(asyncio.to_thread(self.talk, conn, conversation, opened))
        try:
            return await asyncio.shield(talking)
        except asyncio.CancelledError:
            while not talking.done():
                for raw in opened:
                    with contextlib.suppress(psycopg.Error):
                        await asyncio.to_thread(raw.cancel_safe)
                await asyncio.wait([talking], timeout=_CANCEL_SECONDS)
            talking.exception()  # seen: its caller has left
            raise

    def _after_a_look(self, raw: Any, database: Database, conversation: Conversation[T]) -> Conversation[T]:
        """The conversation, on a connection whose database is known: a table that is missing would fail the transaction."""
        if raw not in self._known:
            revision = None
            if (yield VERSION_TABLE, {"table": f"{quote_name(self._schema)}.alembic_version"})[0][0]:
                rows = yield VERSION, {}
                revision = _text(rows[0][0]) if rows else None
            database.require(revision)
            self._known.add(raw)
        return (yield from conversation)


def _is_any(conn: object, kinds: tuple[tuple[str, str], ...]) -> bool:
    """Without importing SQLAlchemy: whoever has such an object has imported it."""
    return any(isinstance(conn, getattr(sys.modules[module], name)) for module, name in kinds if module in sys.modules)


def _unwrapped(conn: Any) -> psycopg.Connection[Any]:
    """psycopg's connection, in a transaction that SQLAlchemy knows of: else its `commit()` would do nothing."""
    if isinstance(conn, psycopg.Connection):
        return conn
    if is_async(conn):
        raise ConfigurationError(
            f"conn= is async ({type(conn).__name__}): await Client.start with it, not SyncClient's"
        )
    if _is_any(conn, _SYNC[2:]):
        conn = conn()
    if _is_any(conn, _SYNC[1:2]):
        conn = conn.connection()
    if conn.closed:
        raise ConfigurationError("conn= is closed: start the run before its connection is given back")
    raw = _of_psycopg(conn.connection.driver_connection, psycopg.Connection)
    if not conn.in_transaction():
        conn.begin()
    return raw


async def _unwrapped_async(conn: Any) -> psycopg.AsyncConnection[Any]:
    if isinstance(conn, psycopg.AsyncConnection):
        return conn
    if _is_any(conn, _ASYNC[2:]):
        conn = conn()
    if _is_any(conn, _ASYNC[1:2]):
        conn = await conn.connection()
    if conn.closed:
        raise ConfigurationError("conn= is closed: start the run before its connection is given back")
    raw = _of_psycopg((await conn.get_raw_connection()).driver_connection, psycopg.AsyncConnection)
    if not conn.in_transaction():
        await conn.begin()
    return raw


C = TypeVar("C")


def _of_psycopg(driver: object, wanted: type[C]) -> C:
    if isinstance(driver, wanted):
        return driver
    kind = type(driver)
    raise ConfigurationError(
        f"conn= runs on {kind.__module__}.{kind.__qualname__}: runs are inserted over psycopg alone, as"
        f" create_engine('postgresql+psycopg://...') has it"
    )


def _refuse_unusable(raw: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if raw.closed or raw.broken:
        raise ConfigurationError("conn= is closed: start the run before its connection is given back")
    if raw.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ConfigurationError("conn= is in pipeline mode: start the run outside of `with conn.pipeline()`")
    if raw.info.transaction_status == TransactionStatus.INERROR:
        raise ConfigurationError("conn= is in a failed transaction, which can only be rolled back")


@contextlib.contextmanager
def _in_plain_words() -> Iterator[None]:
    """Errors leave as psycopg's own, so that those who try again by class or SQLSTATE do; one gets a sentence that helps."""
    try:
        yield
    except psycopg.errors.SerializationFailure as error:
        raise psycopg.errors.SerializationFailure(
            "the run's key was taken by a transaction that ended after this one's snapshot: roll back and try again, as"
            " with any serialization failure (under READ COMMITTED the run would have been found)"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # SQL_ASCII

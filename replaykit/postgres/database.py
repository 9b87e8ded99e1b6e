"""Connections, pipelines, what may be retried: the only file that executes.

Errors of psycopg leave here as themselves; `is_transient` says whether trying again can help, `is_refusal` whether the
database refused what it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.events import log
from replaykit.limits import LOCK_TIMEOUT_SECONDS
from replaykit.postgres.schema import REVISION, REVISIONS, Bound, Statement, check_schema, quote_name

__all__ = [
    "Connection",
    "Database",
    "Snapshot",
    "SyncConnection",
    "cut_off",
    "describe_dsn",
    "first_line",
    "is_lock_timeout",
    "is_refusal",
    "is_transient",
    "parse_dsn",
]

Row = tuple[Any, ...]
T = TypeVar("T")


CONNECT_TIMEOUT_SECONDS: Final = 10
"""How long one try to connect may take."""

DEAD_AFTER_SECONDS: Final = 15
"""Silence after which the kernel gives a connection up: well below a lease, well above a pause of a healthy network."""

LEAVE_SECONDS: Final = 5.0
"""How long a caller that is cancelled waits, behind a pooler, for its statement to end: longer than that waits for a lock."""

BYTES_PER_SECOND_MIN: Final = 250_000
"""What a statement carries gets so much longer than that to be sent and answered: a large value takes its time."""

PAGE_ROWS: Final = 2_000
"""Rows of a snapshot that are in memory at a time, of each statement."""

_TRANSIENT: Final = frozenset(
    {
        "25006",  # read_only_sql_transaction: the primary has become a standby
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "53100",  # disk_full
        "53200",  # out_of_memory
        "53300",  # too_many_connections
        "53400",  # configuration_limit_exceeded
        "55P03",  # lock_not_available: lock_timeout
        "57014",  # query_canceled: a statement_timeout, an operator
        "57P01",  # admin_shutdown
        "57P02",  # crash_shutdown
        "57P03",  # cannot_connect_now
        "57P04",  # database_dropped
        "57P05",  # idle_session_timeout
        "58000",  # system_error
        "58030",  # io_error
    }
)

# data exceptions, constraints, program limits (a document too deep, a row too wide)
_REFUSING_CLASSES: Final = frozenset({"22", "23", "54"})

_PIDS: Final = "select pg_backend_pid()"

# Dedicated connections only (a pooler would hand the settings to strangers). The planner's choice for a table that was
# empty when a statement was prepared must still be right when it holds a million rows: without sequential scans every
# plan of ours goes by an index.
_SESSION: Final = (
    "select set_config('lock_timeout', %s, false), set_config('enable_seqscan', 'off', false),"
    " set_config('timezone', 'UTC', false)"
)
_TRANSACTION: Final = "select set_config('lock_timeout', %s, true)"

# A migration ran under a prepared statement ("cached plan must not change result type"): psycopg, which reads the answer
# to this, prepares anew; without it every retry would fail alike.
_FORGET_PLANS: Final = "deallocate all"


class Database:
    """Where one process finds its database, and how: makes connections, remembers nothing about them.

    Args:
        dsn: URL or `key=value` string, as libpq takes it.
        schema: the schema that holds replaykit's tables.
        name: appears as `replaykit:<name>` in `pg_stat_activity.application_name`.

    Raises:
        ConfigurationError: no schema can have that name.
    """

    def __init__(self, dsn: str, schema: str = "replaykit", *, name: str = "client") -> None:
        self.dsn = dsn
        self.schema = check_schema(schema)
        self.name = name
        self._numbered: dict[str, tuple[bytes, list[str]]] = {}
        self._texts: dict[str, bytes] = {}

    async def connect(self, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Connection:
        """A dedicated autocommit connection.

        Args:
            lock_timeout_seconds: how long its statements wait for a lock that somebody else holds.

        Raises:
            DatabaseUnreachable: with the URL, without the password.
        """
        lock_timeout = _milliseconds(lock_timeout_seconds)
        try:
            raw = await psycopg.AsyncConnection.connect(**self.arguments())
        except (psycopg.Error, OSError) as error:
            raise self._unreachable(error) from error
        try:
            row = await (await _to_its_end(raw, raw.execute(_PIDS), 0.0)).fetchone()
            pooled = row is None or row[0] != raw.info.backend_pid
            if pooled:
                raw.prepare_threshold = None
            else:
                await raw.execute(_SESSION, (lock_timeout,))
        except BaseException as error:
            raw.pgconn.finish()  # a cancelled caller waits for nothing more
            if isinstance(error, psycopg.Error):
                raise self._unreachable(error) from error
            raise
        return Connection(self, raw, pooled, lock_timeout)

    async def connect_plain(self) -> tuple[psycopg.AsyncConnection[Row], bool]:
        """A connection as its user has configured the database, without a setting of ours, for bodies of steps; and whether
        it goes through a pooler.

        Raises:
            DatabaseUnreachable: with the URL, without the password.
        """
        try:
            raw = await psycopg.AsyncConnection.connect(**self.arguments())
        except (psycopg.Error, OSError) as error:
            raise self._unreachable(error) from error
        try:
            row = await (await _to_its_end(raw, raw.execute(_PIDS, prepare=False), 0.0)).fetchone()
        except BaseException as error:
            raw.pgconn.finish()
            if isinstance(error, psycopg.Error):
                raise self._unreachable(error) from error
            raise
        return raw, row is None or row[0] != raw.info.backend_pid

    def connect_sync(self) -> SyncConnection:
        """The same for threads and for processes without an event loop."""
        try:
            raw = psycopg.connect(**self.arguments())
        except (psycopg.Error, OSError) as error:
            raise self._unreachable(error) from error
        try:
            row = raw.execute(_PIDS).fetchone()
            pooled = row is None or row[0] != raw.info.backend_pid
            if pooled:
                raw.prepare_threshold = None
            else:
                raw.execute(_SESSION, (_milliseconds(LOCK_TIMEOUT_SECONDS),))
        except psycopg.Error as error:
            raw.close()
            raise self._unreachable(error) from error
        return SyncConnection(self, raw, pooled)

    def numbered(self, statement: Statement) -> tuple[bytes, list[str]]:
        """The statement's text with `$1` for parameters, as libpq takes it, and their names in that order."""
        known = self._numbered.get(statement.name)
        if known is None:
            names: list[str] = []

            def number(found: re.Match[str]) -> str:
                if found[1] not in names:
                    names.append(found[1])
                return f"${names.index(found[1]) + 1}"

            plain = re.sub(r"%\((\w+)\)s", number, self.text(statement).decode()).replace("%%", "%")
            known = self._numbered[statement.name] = (plain.encode(), names)
        return known

    async def check(self, *, need: bool = True) -> str | None:
        """The schema's revision, after a look at what would void a promise.

        Args:
            need: raise unless the schema is the one that this release needs; else only say what is there.

        Raises:
            SchemaMismatch: no schema, an older or a newer one.
            DatabaseUnreachable: no connection.
            ConfigurationError: the role may not look.
        """
        conn = await self.connect()
        try:
            (settings,) = await conn.run(DURABILITY)
            for name, value in zip(("synchronous_commit", "fsync", "full_page_writes"), settings, strict=True):
                if value == "off":
                    log.warning("commits_not_durable", setting=name, value=value)
            revision: str | None = None
            if (await conn.run(VERSION_TABLE, {"table": f"{quote_name(self.schema)}.alembic_version"}))[0][0]:
                rows = await conn.run(VERSION)
                revision = rows[0][0] if rows else None
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._forbidden(error) from error
        finally:
            await conn.close()
        if need:
            self.require(revision)
        return revision

    def text(self, statement: Statement) -> bytes:
        """The statement's text for this schema."""
        text = self._texts.get(statement.name)
        if text is None:
            # A percent sign in the schema's name would be taken for a parameter.
            text = statement.text.replace("{schema}", quote_name(self.schema).replace("%", "%%")).encode()
            self._texts[statement.name] = text
        return text

    def require(self, revision: str | None) -> None:
        """See that a schema's revision is the one that this release needs.

        Raises:
            SchemaMismatch: it is another, or none.
        """
        if revision == REVISION:
            return
        where = f"{describe_dsn(self.dsn)}, schema {self.schema!r}"
        if revision is None:
            raise SchemaMismatch(f"{where}: not set up; run `replaykit db migrate`")
        if revision in REVISIONS:
            raise SchemaMismatch(
                f"{where}: at revision {revision}, this release needs {REVISION}; run `replaykit db migrate`"
            )
        raise SchemaMismatch(
            f"{where}: at revision {revision}, newer than {REVISION} of this release; upgrade replaykit"
        )

    def arguments(self) -> dict[str, Any]:
        """What psycopg.connect gets; what the dsn says wins."""
        defaults: dict[str, Any] = {
            "application_name": f"replaykit:{self.name}",
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "keepalives_idle": max(1, int(DEAD_AFTER_SECONDS // 3)),
            "keepalives_interval": max(1, int(DEAD_AFTER_SECONDS // 3)),
            "keepalives_count": 2,
            "tcp_user_timeout": int(DEAD_AFTER_SECONDS * 1000),
        }
        given = parse_dsn(self.dsn)
        return {**{k: v for k, v in defaults.items() if k not in given}, **given, "autocommit": True}

    def _forbidden(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"{describe_dsn(self.dsn)}, schema {self.schema!r}: {first_line(error)}")

    def _unreachable(self, error: Exception) -> DatabaseUnreachable:
        return DatabaseUnreachable(f"cannot reach {describe_dsn(self.dsn)}: {first_line(error)}")


class Connection:
    """One connection for one task at a time; every `run` is a transaction of its own.

    Attributes:
        pooled: it goes through a pooler: nothing is prepared, it cannot listen.
    """

    def __init__(self, database: Database, raw: psycopg.AsyncConnection[Row], pooled: bool, lock_timeout: str) -> None:
        self._database = database
        self._raw = raw
        self._lock_timeout = lock_timeout
        self.pooled = pooled
        self._prepare = None if pooled else True
        self._asked_at: float | None = None  # when the statement that has no answer yet was sent, at the latest
        self._watched = False
        self._prepared: set[str] = set()
        self._twin: int | None = None  # of libpq's descriptor
        self._reading = False  # whether it is registered with the loop, by `_wait`
        self._waiter: asyncio.Future[list[PGresult]] | None = None
        self._generator: PQGen[list[PGresult]] | None = None  # what it waits for
        self._process = os.getpid()

    async def run(self, statement: Statement, params: dict[str, Any] | None = None) -> list[Row]:
        """Execute and commit; the rows that it returns."""
        if self.pooled:
            return (await self.run_all([(statement, params or {})]))[0]
        cursor = self._raw.cursor()
        self._stop_reading()
        self._ask(params)
        try:
            await cursor.execute(self._database.text(statement), params or {}, prepare=self._prepare)
        except psycopg.errors.FeatureNotSupported:
            await self._forget_plans()
            raise
        finally:
            self._asked_at = None
        return await cursor.fetchall() if cursor.description else []

    async def wrote(self, statement: Statement, params: dict[str, Any]) -> bool:
        """Execute and commit a statement whose parameters are all text, ids or null; whether it returned a row.

        For the one statement that a lone step waits for: libpq's own calls, without the cursor, the adaptation and the
        rows that `run` has, which cost as much as the commit's way to the disk.
        """
        if self.pooled:
            return bool(await self.run(statement, params))
        text, names = self._database.numbered(statement)
        pgconn = self._raw.pgconn
        self._ask(params)
        try:
            if statement.name not in self._prepared:
                pgconn.send_prepare(statement.name.encode(), text)
                self._result(await self._wait(generators.execute(pgconn)))
                self._prepared.add(statement.name)
            values = [None if value is None else str(value).encode() for value in map(params.__getitem__, names)]
            pgconn.send_query_prepared(statement.name.encode(), values)
            return self._result(await self._wait(generators.execute(pgconn))).ntuples > 0
        except psycopg.errors.FeatureNotSupported:
            await self._forget_plans()
            raise
        finally:
            self._asked_at = None

    async def _wait(self, generator: PQGen[list[PGresult]]) -> list[PGresult]:
        """Drive one of psycopg's generators. The socket stays registered from one statement to the next: telling the
        selector twice a statement costs more than the statement's way through libpq.

        What is registered is a twin of libpq's descriptor. libpq closes its own the moment it finds the connection lost,
        and the next socket that the process opens may get the same number.
        """
        loop = asyncio.get_running_loop()
        if self._twin is None:
            self._twin = os.dup(self._raw.pgconn.socket)
        try:
            wanted = next(generator)
        except StopIteration as done:
            results: list[PGresult] = done.value
            return results
        self._generator, self._waiter = generator, loop.create_future()
        try:
            if not self._reading:
                self._reading = True
                loop.add_reader(self._twin, self._is_ready, Ready.R)
            if wanted & Wait.W:  # a value larger than the socket's buffer
                loop.add_writer(self._twin, self._is_ready, Ready.W)
            return await self._waiter
        finally:
            self._generator = self._waiter = None
            if wanted & Wait.W:
                loop.remove_writer(self._twin)

    def _is_ready(self, ready: Ready) -> None:
        """Read at once, not when the waiter has its turn: before that the loop looks at the socket again, and would find the
        same bytes there."""
        generator, waiter = self._generator, self._waiter
        if generator is None or waiter is None or waiter.done():
            if ready is Ready.R:  # nobody asked: a notice, or the server says good-bye; whoever asks next reads it
                self._stop_reading()
            return
        try:
            wanted = generator.send(ready)
        except StopIteration as done:
            waiter.set_result(done.value)
        except Exception as error:
            waiter.set_exception(error)
        else:
            if ready is Ready.W and not wanted & Wait.W and self._twin is not None:  # all of it is sent
                waiter.get_loop().remove_writer(self._twin)

    def _stop_reading(self) -> None:
        """Leave the socket to psycopg, or to nobody."""
        if self._reading and self._twin is not None:
            self._reading = False
            with contextlib.suppress(Exception):  # the loop is closed
                asyncio.get_running_loop().remove_reader(self._twin)

    async def _forget_plans(self) -> None:
        self._prepared.clear()
        self._stop_reading()
        await self._raw.execute(_FORGET_PLANS)

    def _result(self, results: list[PGresult]) -> PGresult:
        result = results[-1]
        if result.status not in (psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK):
            error = psycopg.errors.error_from_result(result, encoding="utf-8")
            raise error
        return result

    async def run_all(self, bound: Sequence[Bound]) -> list[list[Row]]:
        """Execute several in one transaction and one round trip, each with a younger snapshot than the one before."""
        sent = self._send_all(bound)
        return await (_to_its_end(self._raw, sent, LEAVE_SECONDS) if self.pooled else sent)

    async def _send_all(self, bound: Sequence[Bound]) -> list[list[Row]]:
        text = self._database.text
        self._stop_reading()
        self._ask(*(params for _, params in bound))
        try:
            async with self._raw.pipeline():
                if self.pooled:
                    await self._raw.execute(_TRANSACTION, (self._lock_timeout,))
                cursors = [await self._raw.execute(text(s), params, prepare=self._prepare) for s, params in bound]
        except psycopg.errors.FeatureNotSupported:
            await self._forget_plans()
            raise
        finally:
            self._asked_at = None
        return [await cursor.fetchall() if cursor.description else [] for cursor in cursors]

    async def listen(self, channel: str) -> None:
        """Subscribe to hints. A pooler would accept it and deliver nothing: refused."""
        self._stop_reading()
        if self.pooled:
            raise ConfigurationError("a connection through a pooler cannot listen; poll instead")
        await self._raw.execute(f"listen {quote_name(channel)}".encode())

    async def wait_notify(self, timeout: float) -> bool:
        """Wait for a hint, at most `timeout` seconds; False if none came."""
        async for _ in self._raw.notifies(timeout=timeout, stop_after=1):
            return True
        return False

    async def ask_alive(self, seconds: float) -> None:
        """See that the server answers on this connection; its caller sees a lost one if it does not within `seconds`."""
        watch = asyncio.get_running_loop().call_later(seconds, self.cut)
        try:
            await self.run(ALIVE)
        finally:
            watch.cancel()

    def _ask(self, *sent: dict[str, Any] | None) -> None:
        """A statement goes out: someone looks after it. One timer for many statements, because most take a millisecond."""
        loop = asyncio.get_running_loop()
        size = 0
        for params in sent:
            for value in (params or {}).values():
                if type(value) is str:
                    size += len(value)
        self._asked_at = loop.time() + size / BYTES_PER_SECOND_MIN
        if not self._watched:
            self._watched = True
            loop.call_later(DEAD_AFTER_SECONDS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        asked_at = self._asked_at
        if asked_at is None or self._raw.closed:
            self._watched = False
            return
        left = asked_at + DEAD_AFTER_SECONDS - loop.time()
        if left <= 0:
            self.cut()
        # Not later than that, though a large value's time is longer: the statement after it may be another.
        loop.call_later(min(left, DEAD_AFTER_SECONDS) if left > 0 else DEAD_AFTER_SECONDS, self._look, loop)

    def cut(self) -> None:
        """End a statement that has no answer: its caller sees a lost connection.

        A peer may acknowledge every byte and never answer (a proxy that lost its backend); no time-out of the kernel
        notices. None of our statements takes that long.
        """
        cut_off(self._raw.pgconn)

    async def close(self) -> None:
        """Close; never raises, may be called twice."""
        if self._process != os.getpid():
            return  # forked: the good-bye would end the connection of the parent, who shares the socket
        self._stop_reading()
        twin, self._twin = self._twin, None
        if twin is not None:
            os.close(twin)
        await self._raw.close()

    @property
    def closed(self) -> bool:
        """Closed by us, or known to be broken."""
        return self._raw.closed or self._raw.broken

    @property
    def backend_pid(self) -> int:
        """Of the server process, as `pg_stat_activity.pid` has it."""
        return self._raw.info.backend_pid


class SyncConnection:
    """The same without an event loop."""

    def __init__(self, database: Database, raw: psycopg.Connection[Row], pooled: bool) -> None:
        self._database = database
        self._raw = raw
        self.pooled = pooled
        self._prepare = None if pooled else True

    def run(self, statement: Statement, params: dict[str, Any] | None = None) -> list[Row]:
        """Execute and commit; the rows that it returns."""
        if self.pooled:
            return self.run_all([(statement, params or {})])[0]
        try:
            cursor = self._raw.execute(self._database.text(statement), params or {}, prepare=self._prepare)
        except psycopg.errors.FeatureNotSupported:
            self._raw.execute(_FORGET_PLANS)
            raise
        return cursor.fetchall() if cursor.description else []

    def run_all(self, bound: Sequence[Bound]) -> list[list[Row]]:
        """Execute several in one transaction and one round trip."""
        text = self._database.text
        try:
            with self._raw.pipeline():
                if self.pooled:
                    self._raw.execute(_TRANSACTION, (_milliseconds(LOCK_TIMEOUT_SECONDS),))
                cursors = [self._raw.execute(text(s), params, prepare=self._prepare) for s, params in bound]
        except psycopg.errors.FeatureNotSupported:
            self._raw.execute(_FORGET_PLANS)
            raise
        return [cursor.fetchall() if cursor.description else [] for cursor in cursors]

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """All that is read of it is of one moment, also what is too much to be read at once.

        Raises:
            DatabaseUnreachable: the connection was lost meanwhile.
            ConfigurationError: the role may not read that.
        """
        try:
            with self._raw.transaction():
                self._raw.execute("set transaction isolation level repeatable read, read only")
                yield Snapshot(self._database, self._raw)
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._database._forbidden(error) from error
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            raise self._database._unreachable(error) from error

    def cut(self) -> None:
        """End a statement that has no answer, from another thread."""
        cut_off(self._raw.pgconn)

    def close(self) -> None:
        """Close; never raises, may be called twice."""
        self._raw.close()

    @property
    def closed(self) -> bool:
        """Closed by us, or known to be broken."""
        return self._raw.closed or self._raw.broken

    @property
    def backend_pid(self) -> int:
        """Of the server process, as `pg_stat_activity.pid` has it."""
        return self._raw.info.backend_pid


class Snapshot:
    """One moment of the database: rows come in pages, those of several statements side by side."""

    def __init__(self, database: Database, raw: psycopg.Connection[Row]) -> None:
        self._database = database
        self._raw = raw
        self._cursors = 0

    def stream(self, statement: Statement, params: dict[str, Any] | None = None) -> Iterator[Row]:
        """The rows of a statement."""
        self._cursors += 1
        with self._raw.cursor(f"replaykit_{self._cursors}") as cursor:
            cursor.itersize = PAGE_ROWS
            cursor.execute(self._database.text(statement), params or {})
            yield from cursor


# What would void durability, as the session sees it.
DURABILITY = Statement(
    "settings-read-durability",
    "select current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')",
)

# Anything that the server has to answer.
ALIVE = Statement("alive", "select 1")

# Whether alembic has ever worked in this schema.
VERSION_TABLE = Statement("alembic_version-read-exists", "select to_regclass(%(table)s) is not null")

# The schema's revision.
VERSION = Statement("alembic_version-read", "select version_num from {schema}.alembic_version")


async def _to_its_end(raw: psycopg.AsyncConnection[Row], statement: Coroutine[Any, Any, T], seconds: float) -> T:
    """What comes of the statement; a caller that is cancelled waits for it, so long, and then hangs up.

    Left to itself psycopg would ask the server to end it, on a connection of its own. PgBouncer 1.18 may end itself at
    such a request (its issue 801), for all whom it serves; and our statements are short.
    """
    task = asyncio.ensure_future(statement)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            if not task.done():
                cut_off(raw.pgconn)
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: its caller has left
        raise


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"  # 0 would mean for ever


def cut_off(pgconn: psycopg.pq.abc.PGconn) -> None:
    """End a connection from any thread, whatever its own is doing: who waits for an answer sees a lost connection."""
    with contextlib.suppress(Exception):  # closed meanwhile
        twin = socket.socket(fileno=os.dup(pgconn.socket))
        twin.shutdown(socket.SHUT_RDWR)
        twin.close()


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may succeed later: connection or server were at fault, not what it was given."""
    if isinstance(error, DatabaseUnreachable | OSError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if state == "0A000":
        return "cached plan" in str(error)  # a migration ran under a prepared statement
    return state in _TRANSIENT or state.startswith("08")


def is_lock_timeout(error: BaseException) -> bool:
    """Whether a row was locked by someone outside for longer than a batch waits."""
    return isinstance(error, psycopg.errors.LockNotAvailable)


def is_refusal(error: BaseException) -> bool:
    """Whether the database refused the values: cut the batch to find whose they are; trying again cannot help."""
    if isinstance(error, UnicodeEncodeError):
        return True  # a lone surrogate, refused by psycopg before it is sent
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)  # NUL in a text, refused by psycopg before it is sent
    return error.sqlstate[:2] in _REFUSING_CLASSES


def parse_dsn(dsn: str) -> dict[str, Any]:
    """The parts of a URL or connection string, by libpq's names.

    Raises:
        ConfigurationError: it is none, or a piece of its password would be taken for a host, port or database. The
            sentence quotes nothing of it; libpq's may quote the whole.
    """
    try:
        given = conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeEncodeError) as error:
        raise ConfigurationError("the database URL is not one that Postgres understands: " + _cause(error)) from None
    scheme, is_url, rest = dsn.partition("://")
    before, _, after = rest.partition("?")[0].partition("/")
    port = str(given.get("port") or "0")
    if (is_url and scheme.isalpha() and (before.count("@") > 1 or "@" in after)) or not re.fullmatch(r"[\d,]+", port):
        raise ConfigurationError(
            "the database URL is not one that Postgres understands: in user and password / is written %2F and @ is %40"
        )
    return given


def describe_dsn(dsn: str) -> str:
    """The database for a sentence, as a URL without its password."""
    try:
        given = parse_dsn(dsn)
    except ConfigurationError:
        return "the database"
    host = given.get("host") or given.get("hostaddr") or "localhost"
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{user}{host}{port}/{given.get('dbname', '')}"


def first_line(error: BaseException) -> str:
    """The database's own words, cut to a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _cause(error: Exception) -> str:
    return "it is neither a URL nor key=value pairs" if "missing" in str(error) else "a part of it cannot be read"

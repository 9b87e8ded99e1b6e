"""Alembic from an installed wheel: `upgrade` for an empty or an older schema, `sql` for those who run scripts by hand.

The scripts lie in `migrations/` of the repository and travel in the wheel as `replaykit/_migrations`. Any number of
processes may call `upgrade` at once: one works, the others wait and find it done.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
import time
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event
from sqlalchemy import exc as sa_errors

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.events import log
from replaykit.postgres.database import describe_dsn, first_line, parse_dsn
from replaykit.postgres.schema import REVISION, REVISIONS, check_schema, quote_name

__all__ = ["current_revision", "sql", "upgrade"]

POLL_SECONDS: Final = 0.1
"""Time between two tries for the lock that another migrating process holds."""

LOCK_SECONDS: Final = 0.5
"""How long a change waits for a table that a transaction of somebody's still uses: whoever comes after it waits as long,
workers too. Then it is taken back and tried again."""

PAUSE_SECONDS_MAX: Final = 10.0
"""Longest time between two such tries. The first is as long as the wait itself, so that workers get on."""

_alembic = threading.Lock()  # alembic's `context` and `op` are proxies of the whole process


def upgrade(dsn: str, schema: str = "replaykit") -> bool:
    """Bring `schema` to the revision of this release; False if it was there already.

    Needs no DDL rights when there is nothing to do, nor the right to create a schema that exists.

    Raises:
        SchemaMismatch: the schema is newer than this release.
        ConfigurationError: the connection goes through a pooler, or the role may not create.
        DatabaseUnreachable: no connection, or it was lost: the next try does what is left.
    """
    check_schema(schema)
    with _connect(dsn) as conn:
        _refuse_pooler(conn, dsn)
        if current_revision(conn, schema) == REVISION:
            return False
        # Never block on pg_advisory_lock(): a waiter holds a snapshot, CREATE INDEX CONCURRENTLY would wait for it, and
        # the two deadlock (POSTGRES.md 7). The end of the connection gives the lock back.
        key = _lock_key(schema)
        while conn.execute("select pg_try_advisory_lock(%s)", (key,)).fetchone() != (True,):
            time.sleep(POLL_SECONDS)
        try:
            return _upgrade(conn, schema)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(f"this role may not create schema {schema!r}: {first_line(error)}") from None
        except sa_errors.SQLAlchemyError as error:
            if conn.closed:
                raise DatabaseUnreachable(
                    f"{describe_dsn(dsn)}: the connection was lost in the middle; migrate again"
                ) from error
            if not isinstance(error, sa_errors.DBAPIError):
                raise
            raise ConfigurationError(
                f"schema {schema!r} could not be migrated: {first_line(error.orig or error)}"
            ) from error


def sql(schema: str = "replaykit", *, since: str | None = None) -> str:
    """The migration as a script, from revision `since` (None: from nothing) to this release's."""
    check_schema(schema)
    if since is not None and since not in REVISIONS:
        raise ConfigurationError(f"revision {since!r} is unknown; there are {', '.join(REVISIONS)}")
    out = io.StringIO()
    with _alembic, _config(schema) as config:
        config.output_buffer = out
        command.upgrade(config, f"{since}:head" if since else "head", sql=True)
    return out.getvalue()


def current_revision(conn: psycopg.Connection, schema: str) -> str | None:
    """The revision that the database holds; None without a schema of ours."""
    table = f"{quote_name(schema)}.alembic_version"
    if conn.execute("select to_regclass(%s)", (table,)).fetchone() == (None,):
        return None
    row = conn.execute(f"select version_num from {table}".encode()).fetchone()
    return row[0] if row else None


def _upgrade(conn: psycopg.Connection, schema: str) -> bool:
    there = current_revision(conn, schema)
    if there == REVISION:
        return False
    if there is not None and there not in REVISIONS:
        raise SchemaMismatch(
            f"schema {schema!r} is at revision {there}, newer than {REVISION} of this release: upgrade replaykit"
        )
    name = quote_name(schema)
    if conn.execute("select 1 from pg_namespace where nspname = %s", (schema,)).fetchone() is None:
        conn.execute(f"create schema {name}".encode())
    # Whatever role or database have set: building an index takes its time, and keeps nobody waiting.
    conn.execute(f"set search_path to {name}; set statement_timeout to 0; set lock_timeout to 0".encode())
    pause = LOCK_SECONDS
    while True:
        try:
            _run(conn, schema)
            return True
        except sa_errors.OperationalError as error:
            if not isinstance(error.orig, psycopg.errors.LockNotAvailable):
                raise
        conn.rollback()
        conn.autocommit = True
        log.warning("migration_waits", schema=schema, pids=_in_the_way(conn, schema), retrying=True)
        time.sleep(pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)


def _run(conn: psycopg.Connection, schema: str) -> None:
    """What is missing, each revision in a transaction of its own."""
    conn.autocommit = False
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: conn, poolclass=sa.pool.StaticPool)
    event.listen(engine, "begin", _limit_locks)
    with _alembic, _config(schema) as config, engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
    conn.rollback()
    conn.autocommit = True


def _limit_locks(connection: sa.Connection) -> None:
    """Of a transaction; what is done outside of one (indexes that are built concurrently) is not limited."""
    connection.exec_driver_sql(f"set local lock_timeout to '{LOCK_SECONDS * 1000:.0f}ms'")


def _in_the_way(conn: psycopg.Connection, schema: str) -> list[int]:
    """Whose transactions have used a table of the schema for longer than a change waits."""
    rows = conn.execute(
        "select distinct a.pid from pg_locks l join pg_class c on c.oid = l.relation join pg_stat_activity a on a.pid = l.pid"
        " where c.relnamespace = %s::regnamespace and a.datname = current_database() and a.pid <> pg_backend_pid()"
        " and a.xact_start < clock_timestamp() - %s * interval '1 second' order by 1",
        (quote_name(schema), LOCK_SECONDS),
    ).fetchall()
    return [pid for (pid,) in rows]


@contextlib.contextmanager
def _config(schema: str) -> Iterator[Config]:
    with _script_location() as scripts:
        config = Config()  # no alembic.ini is shipped
        config.set_main_option("script_location", str(scripts).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["schema"] = schema
        yield config


@contextlib.contextmanager
def _script_location() -> Iterator[Path]:
    """The folder with `env.py`: of the wheel, else of the checkout."""
    packaged = files("replaykit").joinpath("_migrations")
    if packaged.is_dir():
        with as_file(packaged) as path:
            yield path
        return
    checkout = Path(__file__).resolve().parents[2] / "migrations"
    if not (checkout / "env.py").is_file():
        raise ConfigurationError("this installation of replaykit has no migrations: reinstall it")
    yield checkout


def _connect(dsn: str) -> psycopg.Connection:
    parse_dsn(dsn)
    try:
        return psycopg.connect(dsn, autocommit=True, connect_timeout=10, application_name="replaykit:migrate")
    except psycopg.Error as error:
        raise DatabaseUnreachable(f"cannot reach {describe_dsn(dsn)}: {first_line(error)}") from error


def _refuse_pooler(conn: psycopg.Connection, dsn: str) -> None:
    """A session lock and search_path mean nothing when every transaction may run on another backend."""
    if conn.execute("select pg_backend_pid()").fetchone() != (conn.info.backend_pid,):
        raise ConfigurationError(
            f"{describe_dsn(dsn)} is a connection pooler: migrate through a direct connection to the server"
        )


def _lock_key(schema: str) -> int:
    return int.from_bytes(hashlib.sha256(f"replaykit:migrate:{schema}".encode()).digest()[:8], "big", signed=True)

"""Databases that live for one test: each is a copy of a migrated one, which is made once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

from replaykit.postgres.database import Database, SyncConnection
from replaykit.postgres.migrate import upgrade
from replaykit.postgres.schema import Statement, quote_name

__all__ = ["copy_of", "make_template", "with_database"]

_LEAVE_SECONDS: Final = 1.0

IS_TEMPLATE = Statement(
    "databases-read-template", "select exists (select from pg_database where datname = %(name)s and datistemplate)"
)

# `drop database ... with (force)` alone would look again only after 100 ms if a connection is just closing.
END_SESSIONS = Statement(
    "sessions-end-of-database", "select pg_terminate_backend(pid) from pg_stat_activity where datname = %(name)s"
)


def make_template(url: str, name: str, schema: str = "replaykit") -> None:
    """Make a migrated database to copy from, unless it is there. One caller at a time.

    Args:
        url: of any database of the server.
        name: of the database to be.
        schema: the schema that replaykit's tables live in.
    """
    with _connected(url) as connection:
        if connection.run(IS_TEMPLATE, {"name": name}) == [(True,)]:
            return
        _run(connection, f"drop database if exists {quote_name(name)} with (force)")
        _run(connection, f"create database {quote_name(name)}")
        upgrade(with_database(url, name), schema)
        _run(connection, f"alter database {quote_name(name)} is_template true")


@contextlib.contextmanager
def copy_of(url: str, template: str) -> Iterator[str]:
    """The URL of a copy of `template`, which is dropped at the end whoever is still connected.

    Args:
        url: of any database of the server.
        template: as `make_template` made it.
    """
    name = f"test_{uuid4().hex[:12]}"
    with _connected(url) as connection:
        # Faster than the default (wal_log) where the server is not durable: its checkpoints wait for no disk.
        _run(connection, f"create database {quote_name(name)} template {quote_name(template)} strategy file_copy")
        try:
            yield with_database(url, name)
        finally:
            deadline = time.monotonic() + _LEAVE_SECONDS
            while connection.run(END_SESSIONS, {"name": name}) and time.monotonic() < deadline:
                time.sleep(0.001)
            _run(connection, f"drop database {quote_name(name)} with (force)")


def with_database(url: str, name: str) -> str:
    """The same server's URL for another database."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def _run(connection: SyncConnection, text: str) -> None:
    connection.run(Statement(text, text))  # named by its text: it holds a name, and there is one of each


@contextlib.contextmanager
def _connected(url: str) -> Iterator[SyncConnection]:
    connection = Database(url, name="testing").connect_sync()
    try:
        yield connection
    finally:
        connection.close()

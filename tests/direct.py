"""With `pytest --pgbouncer` a test's own looks at the database go past the pooler: what it tests goes through it."""

from __future__ import annotations

import os
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["BEHIND", "connections", "direct", "hang_up", "pooled"]

BEHIND: Final = "REPLAYKIT_TEST_BEHIND_POOLER"
"""The variable that holds the pooler's port and the URL of the server behind it."""

OURS: Final = "replaykit:"
"""What the names of replaykit's own connections begin with."""


def pooled() -> bool:
    """Whether there is a pooler."""
    return BEHIND in os.environ


def direct(dsn: str) -> str:
    """The URL of the same database without the pooler."""
    if not leads_through(dsn):
        return dsn
    return make_conninfo(os.environ[BEHIND].partition(" ")[2], dbname=conninfo_to_dict(dsn)["dbname"])


def leads_through(dsn: str) -> bool:
    """Whether that URL is of a database behind the pooler."""
    if not pooled():
        return False
    given = conninfo_to_dict(dsn)
    return (given.get("host"), str(given.get("port"))) == ("127.0.0.1", os.environ[BEHIND].partition(" ")[0])


def connections(dsn: str, name: str = OURS) -> set[int]:
    """The clients of the database whose names begin so: their server processes; behind a pooler, where these are nobody's,
    their ports."""
    if leads_through(dsn):
        database = conninfo_to_dict(dsn)["dbname"]
        with _console(dsn) as console:
            cursor = console.execute("show clients")
            at = {column.name: place for place, column in enumerate(cursor.description or ())}
            return {
                int(row[at["port"]])
                for row in cursor.fetchall()
                if row[at["database"]] == database and row[at["application_name"]].startswith(name)
            }
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute(
            "select pid from pg_stat_activity where datname = current_database() and starts_with(application_name, %s)",
            [name],
        )
        return {row[0] for row in rows}


def hang_up(dsn: str, name: str = OURS) -> None:
    """End the connections of the clients whose names begin so; a pooler ends all that it has to the database."""
    if leads_through(dsn):
        database = conninfo_to_dict(dsn)["dbname"]
        with _console(dsn) as console:
            console.execute(f"kill {database}".encode())
            console.execute(f"resume {database}".encode())
        return
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(pid, 10000) from unnest(%s) pid", [[*connections(dsn, name)]])


def _console(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(make_conninfo(dsn, dbname="pgbouncer"), autocommit=True)

"""One throw-away Postgres for the whole run, and a database of its own for each test that asks for one.

The server is the embedded one, shared by all xdist workers; `REPLAYKIT_PG_BIN` tests against another version.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from replaykit.runtime.embedded import EmbeddedPostgres
from replaykit.runtime.embedded_server import flocked, is_held, read_state

HOME_VARIABLE = "REPLAYKIT_TEST_HOME"
"""Tells the workers of xdist the home that their controller made."""

TEMPLATE = "replaykit_template"


@pytest.fixture(scope="session")
def server_dsn() -> Iterator[str]:
    """URL of a server that the whole run shares. Its data are not safe at a crash of the machine."""
    with EmbeddedPostgres(os.environ[HOME_VARIABLE], linger=1.0, durable=False) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def template_database(server_dsn: str) -> str:
    """Name of a migrated database to copy from; the first worker that needs it makes it."""
    from replaykit.postgres.migrate import upgrade

    with flocked(Path(os.environ[HOME_VARIABLE]) / "template.lock", fcntl.LOCK_EX):
        with psycopg.connect(server_dsn, autocommit=True) as connection:
            known = connection.execute(
                "select datistemplate from pg_database where datname = %s", [TEMPLATE]
            ).fetchone()
            if known == (True,):
                return TEMPLATE
            connection.execute(f"drop database if exists {TEMPLATE} with (force)")
            connection.execute(f"create database {TEMPLATE}")
        upgrade(with_database(server_dsn, TEMPLATE), schema="replaykit")
        with psycopg.connect(server_dsn, autocommit=True) as connection:
            connection.execute(f"alter database {TEMPLATE} is_template true")
    return TEMPLATE


@pytest.fixture
def dsn(server_dsn: str, template_database: str) -> Iterator[str]:
    """URL of a fresh, migrated database (schema `replaykit`) for one test."""
    yield from fresh_database(server_dsn, template_database)


@pytest.fixture
def empty_dsn(server_dsn: str) -> Iterator[str]:
    """URL of a fresh database with nothing in it, for one test."""
    yield from fresh_database(server_dsn, "template1")


def fresh_database(server_dsn: str, template: str) -> Iterator[str]:
    """Copy a database, yield its URL, and drop it whoever is still connected."""
    name = sql.Identifier(f"test_{uuid.uuid4().hex[:12]}")
    with psycopg.connect(server_dsn, autocommit=True) as connection:
        # file_copy is about 1.5 times as fast here as the default, wal_log: the server is not durable, so the
        # checkpoints that it needs write no disk.
        connection.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(name, sql.Identifier(template))
        )
    yield with_database(server_dsn, name.as_string().strip('"'))
    with psycopg.connect(server_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(name))


def with_database(url: str, name: str) -> str:
    """The same server's URL for another database."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def pytest_configure(config: pytest.Config) -> None:
    """Make the run's home: not in pytest's own folder, which is closed to the user that root's server runs as."""
    if is_controller(config):
        home = Path(tempfile.mkdtemp(prefix="replaykit-test-"))
        home.chmod(0o755)
        os.environ[HOME_VARIABLE] = str(home)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the run's server and remove its home."""
    if is_controller(config) and (home := os.environ.pop(HOME_VARIABLE, None)):
        remove_home(Path(home))


def is_controller(config: pytest.Config) -> bool:
    """Whether this process runs the whole test run, and is not a worker of xdist."""
    return not hasattr(config, "workerinput")


def remove_home(home: Path) -> None:
    """Stop the server of an embedded home, if one runs, and remove all of its files."""
    state = read_state(home)
    if state is not None and state["status"] == "ready" and is_held(home / "supervisor.lock"):
        os.kill(state["supervisor"], signal.SIGTERM)
    deadline = time.monotonic() + 30
    while is_held(home / "supervisor.lock") and time.monotonic() < deadline:
        time.sleep(0.01)
    if (home / "data").is_symlink():  # root's server, whose user could not enter the home
        shutil.rmtree((home / "data").resolve().parent, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)

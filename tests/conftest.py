"""One throw-away Postgres for the whole run, and a database of its own for each test that asks for one.

The server is the embedded one, shared by all xdist workers; `REPLAYKIT_PG_BIN` tests against another version.
`pytest --pgbouncer` puts PgBouncer in transaction mode before it: what cannot work then is listed, with its reason, in
docs/reference/pgbouncer.md, and a run that skips anything else on that account, or not all of that, fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import structlog
from psycopg import sql

from replaykit.runtime.embedded import EmbeddedPostgres
from replaykit.runtime.embedded_server import flocked, is_held, read_state
from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows
from tests.direct import BEHIND
from tests.failed import FAILED, has_failed

HOME_VARIABLE = "REPLAYKIT_TEST_HOME"
"""Tells the workers of xdist the home that their controller made."""

TEMPLATE = "replaykit_template"

MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 * 1024**3

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers for the fixtures whether their test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> Iterator[None]:
    """Whoever configures it, an example or the command line, does so for one test: events go where it is unconfigured."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


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


@pytest.fixture(scope="session")
def server_connection(server_dsn: str) -> Iterator[Connection]:
    """A connection that makes and drops the databases."""
    with psycopg.connect(server_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def through(request: pytest.FixtureRequest, server_dsn: str) -> Iterator[Callable[[str], str]]:
    """What makes of a database's URL the one that tests get."""
    if not request.config.getoption("--pgbouncer"):
        yield str
        return
    from tests.faults.pgbouncer import PgBouncer

    with PgBouncer(server_dsn) as pooler:
        os.environ[BEHIND] = f"{pooler.port} {server_dsn}"
        yield pooler.through
    del os.environ[BEHIND]


@pytest.fixture
def dsn(
    server_dsn: str, server_connection: Connection, template_database: str, through: Callable[[str], str]
) -> Iterator[str]:
    """URL of a fresh, migrated database (schema `replaykit`) for one test."""
    with fresh_database(server_connection, template_database) as name:
        yield through(with_database(server_dsn, name))


@pytest.fixture
def rows(dsn: str) -> Iterator[Rows]:
    """Looks at the test's database."""
    looker = Rows(dsn)
    yield looker
    looker.close()


@pytest.fixture
def outside() -> Iterator[Outside]:
    """Counts what bodies do."""
    with Outside() as server:
        yield server


@pytest.fixture
def crew(request: pytest.FixtureRequest, tmp_path: Path, dsn: str, outside: Outside) -> Iterator[Crew]:
    """Starts `replaykit worker` processes; none is left at the end, and a failed test shows what they wrote."""
    hired = Crew(tmp_path, dsn, outside.address)
    try:
        yield hired
    finally:
        hired.close()
        if has_failed(request):
            print(hired.logs())


@pytest.fixture
def empty_dsn(server_dsn: str, server_connection: Connection) -> Iterator[str]:
    """URL of a fresh database with nothing in it, for one test; never by way of a pooler, which migrations refuse."""
    with fresh_database(server_connection, "template1") as name:
        yield with_database(server_dsn, name)


@contextlib.contextmanager
def fresh_database(connection: Connection, template: str) -> Iterator[str]:
    """Copy a database, yield its name, and drop it whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    # file_copy is about 1.5 times as fast here as the default, wal_log: the server is not durable, so the checkpoints
    # that it needs wait for no disk.
    connection.execute(
        sql.SQL("create database {} template {} strategy file_copy").format(
            sql.Identifier(name), sql.Identifier(template)
        )
    )
    try:
        yield name
    finally:
        # `drop database ... with (force)` alone would look again only after 100 ms if a connection is just closing.
        leave = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
        deadline = time.monotonic() + 1
        while connection.execute(leave, [name]).fetchone() and time.monotonic() < deadline:
            time.sleep(0.001)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def with_database(url: str, name: str) -> str:
    """The same server's URL for another database."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine may enter, for one test."""
    folder = make_open_folder()
    yield folder
    shutil.rmtree(folder)


def make_open_folder() -> Path:
    """Make a folder for servers. pytest's own are closed to the user that root's server runs as.

    In memory where there is enough of it: on a disk that others keep busy, making a database takes ten times as long.
    """
    in_memory = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    if in_memory:
        info = os.statvfs(MEMORY)
        in_memory = info.f_bavail * info.f_frsize >= MEMORY_BYTES_MIN and not info.f_flag & os.ST_NOEXEC
    folder = Path(tempfile.mkdtemp(prefix="replaykit-test-", dir=MEMORY if in_memory else None))
    folder.chmod(0o755)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """One of ours."""
    parser.addoption("--pgbouncer", action="store_true", help="put PgBouncer in transaction mode before the database")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With PgBouncer, skip what docs/reference/pgbouncer.md lists."""
    if config.getoption("--pgbouncer"):
        from tests.faults.pgbouncer import reasons

        known = reasons()
        for item in items:
            id = item.nodeid.partition("[")[0]
            if reason := known.get(item.nodeid, known.get(id)):
                item.add_marker(pytest.mark.skip(reason=f"PgBouncer: {reason}"))


def pytest_configure(config: pytest.Config) -> None:
    """Make the run's home."""
    if config.getoption("--pgbouncer"):
        from tests.faults.listed import Listed
        from tests.faults.pgbouncer import find_pgbouncer, reasons

        if find_pgbouncer() is None:
            raise pytest.UsageError("--pgbouncer: it is not installed (Debian: apt-get install pgbouncer)")
        if is_controller(config):
            config.pluginmanager.register(Listed(reasons(), whole=runs_all(config)))
    if is_controller(config):
        os.environ[HOME_VARIABLE] = str(make_open_folder())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the run's server and remove its home."""
    if is_controller(config) and (home := os.environ.pop(HOME_VARIABLE, None)):
        remove_home(Path(home))


def runs_all(config: pytest.Config) -> bool:
    """Whether no test was left out by name, mark or place."""
    narrowed = any(config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "ignore", "lf"))
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not narrowed


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

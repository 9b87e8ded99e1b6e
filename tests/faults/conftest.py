"""Servers of a test's own, a wire to them, a mix of runs under way."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.conftest import make_open_folder, with_database
from tests.crash.outside_calls import Calls
from tests.faults.load import Load
from tests.faults.server import Own
from tests.faults.wire import Wire

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers for the fixtures whether their test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="module")
def own_server() -> Iterator[Own]:
    """One whose postmaster may be killed, for the tests of a file."""
    folder = make_open_folder()
    server = Own(folder / "server")
    try:
        server.start()
        yield server
    finally:
        server.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_dsn(own_server: Own) -> Iterator[str]:
    """A migrated database on it, for one test. It goes with the server."""
    if not own_server.answers():
        own_server.restart()
    name, template = f"test_{uuid.uuid4().hex[:12]}", own_server.dsn.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(with_database(own_server.dsn, "postgres"), autocommit=True) as connection:
        connection.execute(f"create database {name} template {template}".encode())
    yield with_database(own_server.dsn, name)


Loads = Callable[..., Load]


@pytest.fixture
def loads(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loads]:
    """Makes the load of a test; a failed test shows what the workers wrote, and the seed."""
    with Calls() as calls:
        made: list[Load] = []

        def make(dsn: str | Callable[[], str], wire_dsn: str, env: dict[str, str] | None = None) -> Load:
            seed = random.randrange(10**6)
            where = dsn if callable(dsn) else lambda: dsn
            load = Load(tmp_path, where, wire_dsn, calls, seed=seed, env=env)
            print(f"seed {seed}")
            made.append(load)
            return load

        try:
            yield make
        finally:
            for load in made:
                load.close()
                if request.node.stash.get(FAILED, False):
                    print(load.crew.logs())


@pytest.fixture
def wire(own_dsn: str) -> Iterator[Wire]:
    """A wire to the test's database."""
    with Wire(own_dsn) as made:
        yield made

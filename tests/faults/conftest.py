"""Servers of a test's own, a wire to them, a mix of runs under way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.outside_calls import Calls
from tests.failed import has_failed
from tests.faults.load import Load
from tests.faults.server import Own, one_server
from tests.faults.wire import Wire


@pytest.fixture(scope="module")
def own_server() -> Iterator[Own]:
    """One whose postmaster may be killed, for the tests of a file."""
    with one_server() as server:
        yield server


@pytest.fixture
def own_dsn(own_server: Own) -> str:
    """A migrated database on it, for one test. It goes with the server."""
    if not own_server.answers():
        own_server.restart()
    return own_server.database()


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
                if has_failed(request):
                    print(load.crew.logs())


@pytest.fixture
def wire(own_dsn: str) -> Iterator[Wire]:
    """A wire to the test's database."""
    with Wire(own_dsn) as made:
        yield made

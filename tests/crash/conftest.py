"""The world outside, a crew of workers, and a look at the database, for the tests that kill."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.conftest import Connection, fresh_database, with_database
from tests.crash.crew import Crew
from tests.crash.effects_house import House, opened
from tests.crash.outside import Outside
from tests.crash.rows import Rows


@pytest.fixture
def outside() -> Iterator[Outside]:
    """Counts what bodies do."""
    with Outside() as server:
        yield server


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers for the fixtures whether their test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def crew(request: pytest.FixtureRequest, tmp_path: Path, dsn: str, outside: Outside) -> Iterator[Crew]:
    """Starts `replaykit worker` processes; none is left at the end, and a failed test shows what they wrote."""
    hired = Crew(tmp_path, dsn, outside.address)
    try:
        yield hired
    finally:
        hired.close()
        if request.node.stash.get(FAILED, False):
            print(hired.logs())


@pytest.fixture
def rows(dsn: str) -> Iterator[Rows]:
    """Looks at the test's database."""
    looker = Rows(dsn)
    yield looker
    looker.close()


@pytest.fixture
def own_house(request: pytest.FixtureRequest, tmp_path: Path, dsn: str) -> Iterator[House]:
    """For the effects of one test, which hires its workers itself."""
    with opened(tmp_path, dsn) as house:
        yield house
        tell_logs(request, house)


@pytest.fixture(scope="module")
def shared_house(
    tmp_path_factory: pytest.TempPathFactory, server_dsn: str, server_connection: Connection, template_database: str
) -> Iterator[House]:
    """For the effects of a file's tests, each of which kills a worker: as many others stand by, and new ones come."""
    with (
        fresh_database(server_connection, template_database) as name,
        opened(tmp_path_factory.mktemp("house"), with_database(server_dsn, name)) as house,
    ):
        house.hire(children=2)
        yield house


@pytest.fixture
def house(request: pytest.FixtureRequest, shared_house: House) -> Iterator[House]:
    """The file's, with two workers."""
    yield shared_house
    tell_logs(request, shared_house)


def tell_logs(request: pytest.FixtureRequest, house: House) -> None:
    """Of a test that failed."""
    if request.node.stash.get(FAILED, False):
        print(house.crew.logs())

"""The world outside, a crew of workers, and a look at the database, for the tests that kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Connection, fresh_database, with_database
from tests.crash.effects_house import House, opened
from tests.failed import has_failed


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
    if has_failed(request):
        print(house.crew.logs())

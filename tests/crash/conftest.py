"""The world outside, a crew of workers, and a look at the database, for the tests that kill."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.crash.crew import Crew
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

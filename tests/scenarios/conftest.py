"""Async tests run on asyncio; what they look at the database with is closed at their end. And the world outside."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows
from tests.replay import drive

FAILED = pytest.StashKey[bool]()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def executions_leave() -> Iterator[None]:
    """Those that a test drove by hand leave memory when it ends."""
    yield
    while drive.begun:
        drive.begun.pop().leave()


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

"""Async tests run on asyncio; what they look at the database with is closed at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.rows import Rows
from tests.replay import drive


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

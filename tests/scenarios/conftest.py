"""Async tests run on asyncio; what they look at the database with is closed at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.rows import Rows


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def rows(dsn: str) -> Iterator[Rows]:
    """Looks at the test's database."""
    looker = Rows(dsn)
    yield looker
    looker.close()

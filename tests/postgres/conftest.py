"""A store for each test of a statement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres.store import Store


@pytest.fixture
def store(dsn: str) -> Iterator[Store]:
    """A migrated database with one live worker."""
    store = Store(dsn)
    yield store
    store.close()

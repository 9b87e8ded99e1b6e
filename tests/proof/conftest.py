"""One database and one nursery for all workflows that are killed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from replaykit import Workflow
from replaykit.testing import CrashReport, Nursery, checker, crash_everywhere
from tests.conftest import Connection, fresh_database, with_database
from tests.direct import direct
from tests.proof.own_flows import TABLE


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Makes the processes."""
    with Nursery() as made:
        yield made


@pytest.fixture(scope="session")
def proof_dsn(
    server_dsn: str, server_connection: Connection, template_database: str, through: Callable[[str], str]
) -> Iterator[str]:
    """A database with a table of its user's. What all runs leave in it is checked once they are over."""
    with fresh_database(server_connection, template_database) as name:
        dsn = through(with_database(server_dsn, name))
        with psycopg.connect(direct(dsn), autocommit=True) as connection:
            connection.execute(TABLE.encode())
        yield dsn
        assert checker.main([dsn]) == 0


@pytest.fixture
def crash(proof_dsn: str, nursery: Nursery) -> Callable[..., CrashReport]:
    """`crash_everywhere` on that database; rows that a run's bodies have written there are compared too."""

    def rows_of(run: UUID) -> dict[str, int]:
        with psycopg.connect(direct(proof_dsn)) as connection:
            found = connection.execute("select what, count(*) from public.booked where run = %s group by what", [run])
            return dict(sorted(found.fetchall()))

    def crashed(workflow: Workflow[..., Any], *args: Any, **options: Any) -> CrashReport:
        return crash_everywhere(workflow, *args, dsn=proof_dsn, nursery=nursery, effects=rows_of, **options)

    return crashed

"""Scenarios of the kind fork-threads: connections that were opened before a fork."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from replaykit import Client, Worker
from tests.scenarios.forked import RUNS, counted
from tests.scenarios.stage import python

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", ["SyncClient", "Client"])
async def test_b182_a_client_that_was_opened_before_a_fork_works_in_the_children(dsn: str, kind: str) -> None:
    """Four children start 50 runs with it; the parent's own connection is still good afterwards."""
    said = await asyncio.to_thread(python, "-m", "tests.scenarios.forked", kind, REPLAYKIT_DATABASE_URL=dsn)
    assert said.code == 0, said.err
    ids = [uuid.UUID(text) for text in said.out.split()]
    async with Client(dsn) as client, Worker(client, workflows=[counted]):
        results = [await client.handle(run_id, counted).result(timeout=30) for run_id in ids]

    assert len(set(ids)) == RUNS + 2
    assert sorted(results) == [2 * n for n in (*range(RUNS), 100, 101)]

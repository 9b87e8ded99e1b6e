"""A client and a worker for the length of a test, and what becomes of its runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from replaykit import Client, Handle, RunFailed, RunHeld, Worker, Workflow
from replaykit.limits import Settings
from tests.runtime.facts import eventually

__all__ = ["fact", "outcome", "working"]


@asynccontextmanager
async def working(dsn: str, *flows: Workflow[..., Any], **settings: Any) -> AsyncIterator[tuple[Client, Worker]]:
    """A client and a worker."""
    async with Client(dsn) as client, Worker(client, workflows=flows, settings=Settings(**settings)) as worker:
        yield client, worker


async def outcome(handle: Handle[Any]) -> Any:
    """The result, the error of the run, or that it is held."""
    try:
        return await handle.result(timeout=30)
    except RunFailed as failed:
        return failed.__cause__
    except RunHeld as held:
        return held


async def fact(look: Callable[[], Any], what: str) -> Any:
    """Wait for it without blocking the worker."""
    return await asyncio.to_thread(eventually, look, what)

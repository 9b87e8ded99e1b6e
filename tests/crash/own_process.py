"""A process of one's own with a `Worker` in it, as a web application has: no parent, no children."""

from __future__ import annotations

import asyncio
import sys

from replaykit import Worker
from replaykit.limits import Settings
from tests.crash.workflows import chain, gated


async def main(dsn: str) -> None:
    """Work until SIGTERM."""
    worker = Worker(dsn, workflows=[chain, gated], settings=Settings(lease_seconds=1.5))
    working = asyncio.create_task(worker.run())
    print(worker.worker_id, flush=True)
    await working


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

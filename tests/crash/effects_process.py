"""A process of one's own with a `Worker` in it, for steps with an effect: nothing ends it when its lease does."""

from __future__ import annotations

import asyncio
import sys

from replaykit import Worker
from replaykit.limits import Settings
from tests.crash.effects_flows import acting, lifespan


async def main(dsn: str, lease_seconds: float) -> None:
    """Work until SIGTERM."""
    worker = Worker(dsn, workflows=[acting], lifespan=lifespan, settings=Settings(lease_seconds=lease_seconds))
    working = asyncio.create_task(worker.run())
    print(worker.worker_id, flush=True)
    await working


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))

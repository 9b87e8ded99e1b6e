"""Clients that were opened before a fork: `python -m tests.scenarios.forked` prints the ids of the runs it started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from replaykit import Client, SyncClient, step, workflow

__all__ = ["counted"]

CHILDREN = 4
RUNS = 50


async def double(n: int) -> int:
    """A step."""
    return 2 * n


@workflow
async def counted(n: int) -> int:
    """One step."""
    return await step(double, n)


def in_children(start: Callable[[int], str]) -> list[str]:
    """What the calls of four forked children returned, 50 in all."""
    pipes = []
    for child in range(CHILDREN):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.write(writing, " ".join(start(n) for n in range(child, RUNS, CHILDREN)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        pipes.append((pid, reading))
    ids: list[str] = []
    for pid, reading in pipes:
        with os.fdopen(reading) as stream:
            ids += stream.read().split()
        status = os.waitpid(pid, 0)[1]
        if status:
            sys.exit(f"a child ended with {os.waitstatus_to_exitcode(status)}")
    return ids


def with_sync_client() -> list[str]:
    """Opened before the fork, used in parent and children, and in the parent again."""
    client = SyncClient()

    def start(n: int) -> str:
        return str(client.start(counted, n).id)

    return [start(100), *in_children(start), start(101)]


def with_client() -> list[str]:
    """The same; each child has a loop of its own."""
    client = Client()
    with asyncio.Runner() as runner:

        async def start(n: int) -> str:
            return str((await client.start(counted, n)).id)

        def start_in_child(n: int) -> str:
            asyncio.events._set_running_loop(None)
            return asyncio.run(start(n))

        return [runner.run(start(100)), *in_children(start_in_child), runner.run(start(101))]


if __name__ == "__main__":
    print(" ".join({"SyncClient": with_sync_client, "Client": with_client}[sys.argv[1]]()))

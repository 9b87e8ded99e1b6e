"""A client's process that starts one run: `python -m tests.scenarios.starting DSN client|conn`. It is killed in the middle."""

from __future__ import annotations

import asyncio
import sys

import psycopg

from replaykit import Client
from tests.crash.workflows import chain


async def main(dsn: str, how: str) -> None:
    """By the client's own connection, or inside of a transaction of the caller's."""
    async with Client(dsn) as client:
        if how == "client":
            await client.options(key=how).start(chain, 1, 0.0, 0.0)
            return
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await client.options(key=how, conn=conn).start(chain, 1, 0.0, 0.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))

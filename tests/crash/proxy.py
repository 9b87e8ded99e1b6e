"""A wire between workers and their database that can be cut, lose answers, or stand still."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Wire"]


class Wire:
    """A proxy on a local port, in a thread, for the length of a `with`.

    Attributes:
        dsn: leads to the same database, over this wire.
        lost: answers that were lost so far.
    """

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._socket = f"{given['host']}/.s.PGSQL.{given.get('port') or 5432}"
        self._dsn = dsn
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._ready = threading.Event()
        self._flows = asyncio.Event()
        self._losing = 0
        self._transports: set[asyncio.WriteTransport] = set()
        self.lost = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        self.dsn = make_conninfo(self._dsn, host="127.0.0.1", port=str(self._port), sslmode="disable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def lose_answers(self, number: int) -> None:
        """The next answers of the database never arrive: its connection breaks instead. What was asked is done."""
        self._loop.call_soon_threadsafe(setattr, self, "_losing", number)

    def freeze(self) -> None:
        """Nothing passes, no connection breaks: a network that swallows packets."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def thaw(self) -> None:
        """What was on its way arrives, late; also of processes that are gone."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for transport in list(self._transports):
            transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer.transport, far_writer.transport}
        self._transports |= ends
        with contextlib.suppress(asyncio.CancelledError):  # the end of the test
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer, answers=True))
        self._transports -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                if answers and self._losing > 0:
                    self._losing -= 1
                    self.lost += 1
                    break
                writer.write(data)
                await writer.drain()
        await self._flows.wait()
        writer.close()

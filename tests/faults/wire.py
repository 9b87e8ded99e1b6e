"""A network between workers and their database that does everything a network may do.

It reads the protocol as far as it must to know which requests commit something that matters, so that it can lose exactly
such a request, or exactly its acknowledgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Lose", "Wire"]

# Entries, intents, starts, claims, ends, what people ask; not heartbeats and looks.
_COMMITS: Final = re.compile(
    rb"insert into \S*(journal|runs|mailbox)|update \S*runs|\.(start|cancel|retry|resolve)\(", re.IGNORECASE
)
_READY: Final = b"Z\x00\x00\x00\x05"


class Lose(StrEnum):
    """What of a commit gets lost, with its connection."""

    REQUEST = "request"  # the server never sees it
    WIRE = "wire"  # the server gets it, and has nobody to answer to
    ANSWER = "answer"  # the server has done it and said so


@dataclass(slots=True, eq=False)
class Link:
    """One connection: its two ends, and what its client asks."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    matters: re.Pattern[bytes]
    unread: bytes = b""
    started: bool = False
    writes: dict[bytes, bool] = field(default_factory=dict)  # by name of a prepared statement
    commits: bool = False  # what was asked since the last boundary
    mattered: bool = False  # what was ever asked
    swallows: bool = False
    forgotten: bool = False
    tail: bytes = b""

    def cut(self) -> None:
        """Both ends."""
        self.near.transport.abort()
        self.far.transport.abort()

    def read(self, data: bytes) -> bool:
        """Look at what the client sends; True if a request that commits something is whole now."""
        self.unread += data
        found = False
        while True:
            head = 1 if self.started else 0
            if len(self.unread) < head + 4:
                return found
            length = head + int.from_bytes(self.unread[head : head + 4], "big")
            if len(self.unread) < length:
                return found
            message, self.unread = self.unread[:length], self.unread[length:]
            if not self.started:
                self.started = True
                continue
            found |= self._take(message[:1], message[5:])

    def _take(self, kind: bytes, body: bytes) -> bool:
        if kind == b"P":  # Parse
            name, _, rest = body.partition(b"\0")
            self.writes[name] = self.matters.search(rest.partition(b"\0")[0]) is not None
        elif kind == b"B":  # Bind
            self.commits |= self.writes.get(body.partition(b"\0")[2].partition(b"\0")[0], False)
        elif kind == b"Q":
            self.commits |= self.matters.search(body) is not None
        if kind not in b"QS":
            return False
        commits, self.commits = self.commits, False
        self.mattered |= commits
        return commits


class Wire:
    """A proxy on a local port, in a thread, for the length of a `with`.

    Attributes:
        dsn: leads to the same database, over this wire.
        lost: how many commits lost what.
        links_cut: how many connections were cut.
        refused: how many were not made.

    Args:
        dsn: of the server.
        seed: of the connections that `cut` chooses.
        matters: what the statements hold that `lose` is for.
    """

    def __init__(self, dsn: str, *, seed: int | None = None, matters: re.Pattern[bytes] = _COMMITS) -> None:
        self._dsn = dsn
        self._matters = matters
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._ready = threading.Event()
        self._flows = asyncio.Event()
        self._links: set[Link] = set()
        self._losing: deque[Lose] = deque()
        self._refuses = False
        self._delay = 0.0
        self._chance = random.Random(seed)
        self.lost: Counter[Lose] = Counter()
        self.links_cut = 0
        self.refused = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        self.dsn = make_conninfo(
            self._dsn, host="127.0.0.1", port=str(self._port), sslmode="disable", gssencmode="disable"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    # ------------------------------------------------------------------ what it does to whom it connects

    @property
    def port(self) -> int:
        """On 127.0.0.1."""
        return int(self._port)

    def lose(self, what: Lose, number: int = 1) -> None:
        """The next commits lose that, and their connections."""
        self._do(lambda: self._losing.extend([what] * number))

    def waits_to_lose(self) -> int:
        """How many of them have not come yet."""
        return len(self._losing)

    def cut(self, share: float = 1.0) -> None:
        """Connections break, a random share of them."""

        def cut() -> None:
            for link in [link for link in self._links if self._chance.random() < share]:
                link.cut()
                self.links_cut += 1

        self._do(cut)

    def forget(self, *, only_mattered: bool = False) -> None:
        """What comes over the connections that there are (or those which asked what matters) is swallowed from now on, both
        ways; new ones work: a firewall that has forgotten them."""

        def forget() -> None:
            for link in self._links:
                link.forgotten = link.mattered or not only_mattered

        self._do(forget)

    def refuse(self, refuses: bool = True) -> None:
        """Nobody can connect; who is connected stays so."""
        self._do(lambda: setattr(self, "_refuses", refuses))

    def freeze(self) -> None:
        """Nothing passes, no connection breaks: a network that swallows packets."""
        self._do(self._flows.clear)

    def thaw(self) -> None:
        """What was on its way arrives, late; also of processes that are gone."""
        self._do(self._flows.set)

    def delay(self, seconds: float) -> None:
        """Each packet takes longer."""
        self._do(lambda: setattr(self, "_delay", seconds))

    def lead_to(self, dsn: str) -> None:
        """From now on to another server; who is connected to the old one is cut off."""

        def lead() -> None:
            self._dsn = dsn
            for link in list(self._links):
                link.cut()

        self._do(lead)

    def heal(self) -> None:
        """All is well again."""
        self._do(self._losing.clear)
        self.delay(0.0)
        self.refuse(False)
        self.thaw()

    # ------------------------------------------------------------------ the thread

    def _do(self, what: Callable[[], Any]) -> None:
        done = threading.Event()

        def do() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(do)
        assert done.wait(30), "the wire's thread does not turn"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, backlog=512)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for _ in range(5):  # what was accepted just now becomes a link first
            await asyncio.sleep(0)
        for link in list(self._links):
            link.cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._lead(reader, writer)
        except asyncio.CancelledError:  # the end of the test
            writer.transport.abort()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        if self._refuses:
            self.refused += 1
            writer.transport.abort()
            return
        given = conninfo_to_dict(self._dsn)
        host, port = str(given["host"]), int(given.get("port") or 5432)
        try:
            if host.startswith("/"):
                far_reader, far_writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            else:
                far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, far_writer, self._matters)
        self._links.add(link)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the end of the test
                await asyncio.gather(self._asks(link, reader), self._answers(link, far_reader))
        finally:
            link.cut()
            self._links.discard(link)

    async def _asks(self, link: Link, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passes()
                if link.forgotten:
                    continue
                what = self._losing.popleft() if link.read(data) and self._losing else None
                if what is not None:
                    self.lost[what] += 1
                if what is Lose.REQUEST:
                    link.cut()
                    return
                link.swallows = link.swallows or what is Lose.ANSWER
                link.far.write(data)
                await link.far.drain()
                if what is Lose.WIRE:
                    link.far.close()  # after what was written; the answer finds nobody
                    link.near.transport.abort()
                    return
        link.far.close()

    async def _answers(self, link: Link, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passes()
                if link.forgotten:
                    continue
                if link.swallows:
                    link.tail = (link.tail + data)[-6:]
                    if link.tail.startswith(_READY):
                        link.cut()
                        return
                    continue
                link.near.write(data)
                await link.near.drain()
        link.near.close()

    async def _passes(self) -> None:
        await self._flows.wait()
        if self._delay:
            await asyncio.sleep(self._chance.uniform(0, 2 * self._delay))

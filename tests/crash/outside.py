"""The world outside of replaykit: a small HTTP server that remembers who called it, for which step, from when to when.

A call is an interval. It begins when the server reads `POST /begin/RUN/KEY/PID` and ends with `POST /end` on the same
connection, or when that connection closes, whatever closed it: the kernel closes those of a process that is killed.
One thread, no timers: what the kernel has to say is looked at before anything is concluded.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import unquote

__all__ = ["Call", "Outside", "is_scheduled"]

OK: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
REFUSED: Final = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass(slots=True, eq=False)
class Call:
    """One call of a body: by whom, and from when to when (`time.time`, which Postgres on this machine shares)."""

    run: str
    key: str
    pid: int
    began: float
    ended: float | None = None
    completed: bool = False  # by its end call; else its connection was closed


@dataclass(slots=True)
class Peer:
    """One connection."""

    socket: socket.socket
    unread: bytes = b""
    call: Call | None = None


@dataclass(slots=True)
class Gate:
    """Bodies that pass it wait until it is opened."""

    open: bool = False
    waiting: list[Peer] = field(default_factory=list)


class Outside:
    """The server, in a thread, for the length of a `with`.

    Attributes:
        overlaps: pairs of calls of one step of one run that were open at the same moment, made by processes that both
            lived and were not stopped then.
    """

    def __init__(self) -> None:
        self.overlaps: list[tuple[Call, Call]] = []
        self._calls: list[Call] = []
        self._open: defaultdict[tuple[str, str], list[Peer]] = defaultdict(list)
        self._gates: defaultdict[str, Gate] = defaultdict(Gate)
        self._excused: set[int] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._server.setblocking(False)
        self._wakeup, self._waker = socket.socketpair()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="outside", daemon=True)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._waker.send(b"x")
        self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Peer):
                key.data.socket.close()
        self._selector.close()
        for one in (self._server, self._wakeup, self._waker):
            one.close()

    # ------------------------------------------------------------------ what tests ask

    def calls(self, run: str | None = None, key: str | None = None) -> list[Call]:
        """The calls so far, of that run and step."""
        with self._lock:
            return [c for c in self._calls if run in (None, c.run) and key in (None, c.key)]

    @property
    def count(self) -> int:
        """How many calls have begun."""
        return len(self._calls)

    def begun(self) -> Counter[tuple[str, str]]:
        """How often each step of each run was called."""
        return Counter((c.run, c.key) for c in self.calls())

    def busy(self, pid: int | None = None) -> int:
        """Calls that are open now, by that process."""
        with self._lock:
            peers = (peer for peers in self._open.values() for peer in peers)
            return sum(1 for peer in peers if peer.call is not None and pid in (None, peer.call.pid))

    def open_gate(self, name: str) -> None:
        """Let pass all that wait there, and all that come."""
        with self._lock:
            gate = self._gates[name]
            gate.open = True
            waiting, gate.waiting = gate.waiting, []
            for peer in waiting:
                self._answer(peer, OK)

    def excuse(self, pid: int) -> None:
        """From now on that process's calls overlap nothing: it is about to be stopped and continued."""
        with self._lock:
            self._excused.add(pid)

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if isinstance(key.data, Peer):
                    with self._lock:
                        self._read(key.data)
                elif key.fileobj is self._server:
                    self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _read(self, peer: Peer) -> None:
        if peer.socket.fileno() < 0:
            return  # found closed while another's call was looked at
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._hang_up(peer)
            return
        *requests, peer.unread = (peer.unread + data).split(b"\r\n\r\n")
        for request in requests:
            self._handle(peer, request.split(b" ")[1].decode())

    def _handle(self, peer: Peer, path: str) -> None:
        match path.split("/")[1:]:
            case ["begin", run, key, pid]:
                self._begin(peer, Call(run, unquote(key), int(pid), time.time()))
                self._answer(peer, OK)
            case ["end"]:
                self._end(peer, completed=True)
                self._answer(peer, OK)
            case ["gate", name]:
                gate = self._gates[name]
                if gate.open:
                    self._answer(peer, OK)
                else:
                    gate.waiting.append(peer)
            case _:
                self._answer(peer, REFUSED)

    def _begin(self, peer: Peer, call: Call) -> None:
        for other in list(self._open.get((call.run, call.key), ())):
            if _has_closed(other.socket):
                self._hang_up(other)
                continue
            assert other.call is not None
            pids = other.call.pid, call.pid
            if not self._excused.intersection(pids) and all(is_scheduled(pid) for pid in pids):
                self.overlaps.append((other.call, call))
        peer.call = call
        self._calls.append(call)
        self._open[call.run, call.key].append(peer)

    def _end(self, peer: Peer, *, completed: bool) -> None:
        call, peer.call = peer.call, None
        if call is not None:
            call.ended = time.time()
            call.completed = completed
            peers = self._open[call.run, call.key]
            peers.remove(peer)
            if not peers:
                del self._open[call.run, call.key]

    def _hang_up(self, peer: Peer) -> None:
        self._end(peer, completed=False)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _answer(self, peer: Peer, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            peer.socket.send(answer)


def _has_closed(connection: socket.socket) -> bool:
    """Whether the other end is gone, as far as the kernel knows at this moment."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_scheduled(pid: int) -> bool:
    """Whether a process lives and may run: not dead, not a zombie, not stopped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "XZTt"

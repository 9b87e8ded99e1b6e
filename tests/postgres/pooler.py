"""Looks like a connection pooler: passes bytes on and names another server process than the one that works."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_KEY_DATA = b"K"
_CANCEL = struct.pack("!II", 16, 80_877_102)


class Pooler:
    """A proxy before a server's unix socket that changes the pid in BackendKeyData, as transaction pooling does.

    Only what detection rests on is imitated: which backend runs a statement does not change here.

    Attributes:
        cancels: requests to end a statement; none has an effect, for they name that process.
    """

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._target = f"{given['host']}/.s.PGSQL.{given.get('port', 5432)}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.cancels = 0
        self._dsn = make_conninfo(
            dsn, host="127.0.0.1", port=self._listener.getsockname()[1], sslmode="disable", gssencmode="disable"
        )

    def __enter__(self) -> str:
        threading.Thread(target=self._accept, daemon=True).start()
        return self._dsn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in (self._listener, *self._sockets):
            opened.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            self._sockets += [client, server]
            for source, to, changes in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=(source, to, changes), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, changes: bool) -> None:
        try:
            buffer = b""
            while data := source.recv(65536):
                self.cancels += data.startswith(_CANCEL)
                if changes:
                    buffer += data
                    data, changes, buffer = _with_another_pid(buffer)
                to.sendall(data)
        except OSError:
            pass
        finally:
            for side in (source, to):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        return f"<Pooler {self._target}>"


def _with_another_pid(buffer: bytes) -> tuple[bytes, bool, bytes]:
    """Whole messages of the start, the key data changed: what to send, whether more is to be looked at, the rest."""
    out = b""
    while len(buffer) >= 5:
        length = 1 + struct.unpack("!I", buffer[1:5])[0]
        if len(buffer) < length:
            return out, True, buffer
        message, buffer = buffer[:length], buffer[length:]
        if message[:1] == _KEY_DATA:
            (pid,) = struct.unpack("!I", message[5:9])
            return out + message[:5] + struct.pack("!I", pid + 100_000) + message[9:] + buffer, False, b""
        out += message
    return out, True, buffer

"""A small HTTP server that stands for the world outside: it counts the requests it gets, and knows a repeated one.

    python receiver.py 8765

POST a document with an `Idempotency-Key` header: a key that it has seen is answered from memory, as payment services
do. GET answers with the counts.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class Receiver(ThreadingHTTPServer):
    """Counts requests (`received`) and different idempotency keys (`distinct`)."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.received = 0
        self._ids: dict[str, str] = {}  # by idempotency key
        self._lock = Lock()

    @property
    def url(self) -> str:
        """Where to post to."""
        return f"http://127.0.0.1:{self.server_port}/documents"

    @property
    def distinct(self) -> int:
        """How many different idempotency keys came."""
        return len(self._ids)

    def accept(self, idempotency_key: str) -> str:
        """Take one request; returns the id of its document, the same for the same key."""
        with self._lock:
            self.received += 1
            return self._ids.setdefault(idempotency_key, f"document-{len(self._ids) + 1}")

    def start(self) -> None:
        """Serve from a thread, until `shutdown()`."""
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    @property
    def receiver(self) -> Receiver:
        """The server that this connection came to."""
        assert isinstance(self.server, Receiver)
        return self.server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.headers.get("Idempotency-Key")
        if key is None:
            self.answer(400, {"error": "an Idempotency-Key header is needed"})
        else:
            self.answer(200, {"id": self.receiver.accept(key)})

    def do_GET(self) -> None:
        self.answer(200, {"received": self.receiver.received, "distinct": self.receiver.distinct})

    def answer(self, status: int, body: dict[str, object]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the counts say all."""


if __name__ == "__main__":
    receiver = Receiver(int(sys.argv[1]) if len(sys.argv) > 1 else 8765)
    print(f"receiving at {receiver.url}", flush=True)
    try:
        receiver.serve_forever()
    except KeyboardInterrupt:
        print(f"received {receiver.received}, distinct {receiver.distinct}")

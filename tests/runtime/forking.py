"""A parent that starts runs, forks, and goes on, while its child starts runs of its own. Told on stdout as JSON.

python -m tests.runtime.forking DSN idle|awaiting
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import warnings
from typing import Any

from replaykit import SyncClient
from tests.direct import connections
from tests.runtime.shop import checkout


def child(client: SyncClient, dsn: str) -> dict[str, Any]:
    """What a forked web worker does: the module's client, at once, from several threads."""
    started: list[str] = []
    threads = [
        threading.Thread(target=lambda: started.append(str(client.start(checkout, "child").id))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = client.handle(started[0]).info().workflow
    client.close()
    gc.collect()
    return {"started": len(set(started)), "known": known}


def main(dsn: str, what: str) -> None:
    logging.getLogger("replaykit").setLevel(logging.ERROR)  # the tests' server is not durable
    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later say that a fork with threads is risky: it is
    client = SyncClient(dsn)
    client.start(checkout, "parent")
    waiting = client.options(key="awaited").start(checkout, "parent")
    if what == "awaiting":  # a connection in the middle of something, a task that holds all of the client's
        threading.Thread(target=waiting.result, daemon=True).start()
        while len(connections(dsn)) < 2:
            pass
    before = connections(dsn)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(child(client, dsn)).encode())
        sys.exit(0)  # not os._exit: all that is freed at an interpreter's end is freed
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    of_child = json.loads(os.read(reader, 10_000))
    after = connections(dsn)
    handle = client.start(checkout, "parent")
    print(
        json.dumps(
            {
                "child": of_child,
                "child's exit": status,
                "connections kept": before <= after,
                "parent goes on": handle.created and client.handle("awaited").info().state == "pending",
                "same connections": before <= connections(dsn),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

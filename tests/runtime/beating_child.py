"""A process with a heartbeat and no worker: DSN, behaviour, lease in seconds."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import uuid

from replaykit.limits import Settings
from replaykit.postgres.database import Database
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.heartbeat import Heartbeat


def hog() -> None:
    """A step's body as users write them: this pattern takes longer than the universe has."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def watch_for_valid_after_a_stop(heartbeat: Heartbeat, lease_seconds: float) -> None:
    """Says so if the lease is valid although the process was stopped for longer."""
    before = time.monotonic()
    while True:
        now = time.monotonic()
        if now - before > lease_seconds and heartbeat.valid():
            print("valid after a stop", flush=True)
        before = now


def main() -> None:
    """`stuck`: bodies and a loop that does not tick; `frozen`: such a loop without bodies; `busy`: bodies; `idle`; `hog`;
    `watchful`: busy, and looks."""
    dsn, behaviour, lease = sys.argv[1:]
    lease_seconds = float(lease)
    worker_id = uuid.uuid4()
    heartbeat = Heartbeat(
        Database(dsn, name="beating"),
        worker_id,
        settings=Settings(lease_seconds=lease_seconds),
        clock=DatabaseClock(),
        register={
            "hostname": "here",
            "pid": 1,
            "lease_seconds": lease_seconds,
            "queues": [],
            "workflows": {},
            "version": "0",
            "python": "3",
        },
        snapshot=lambda: ([], {}),
        on_lost=lambda: None,
        exit_on_expiry=True,
        busy=lambda: behaviour not in ("idle", "frozen"),
    )
    heartbeat.start()
    print(json.dumps({"worker": str(worker_id)}), flush=True)
    if behaviour == "hog":
        hog()
    if behaviour == "watchful":
        threading.Thread(target=watch_for_valid_after_a_stop, args=(heartbeat, lease_seconds), daemon=True).start()
    while True:
        if behaviour not in ("stuck", "frozen"):
            heartbeat.tick()
        time.sleep(0.01)


if __name__ == "__main__":
    main()

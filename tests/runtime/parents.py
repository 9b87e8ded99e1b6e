"""A real parent with real children, for tests: started, listened to, and gone at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replaykit.runtime.supervisor import WorkerConfig
from tests.runtime.facts import eventually, lives_in

ROOT = Path(__file__).resolve().parents[2]


class Parent:
    """A parent process; its events so far are `events`."""

    def __init__(self, config: WorkerConfig) -> None:
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.run_parent", str(writing)],
            pass_fds=[writing],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # which its children are of, and nobody else
        )
        os.close(writing)
        self._events = os.fdopen(reading)
        self.events: list[dict[str, Any]] = []
        self.stderr = ""
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()
        assert self.process.stdin is not None
        self.process.stdin.write(config.model_dump_json() + "\n")
        self.process.stdin.close()

    def seen(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of that name with these fields, so far."""
        return [e for e in list(self.events) if e["event"] == event and fields.items() <= e.items()]

    def wait_for(self, event: str, times: int = 1, **fields: Any) -> dict[str, Any]:
        """The n-th event of that name with these fields."""

        def found() -> list[dict[str, Any]]:
            return self.seen(event, **fields)[times - 1 :]

        try:
            return eventually(found, f"{event} {fields} x {times}")[0]
        except AssertionError as error:
            error.add_note("\n".join([*(str(e) for e in self.events), self.stderr]))
            raise

    def signal(self, number: int) -> None:
        """Sends the parent a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The parent's exit code, after all that it said has been read."""
        code = self.process.wait(60)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Lets go of its pipes, when nobody writes to them any more."""
        self.wait()
        self._events.close()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def child_pids(self) -> list[int]:
        """Of all children ever started."""
        return sorted({e["pid"] for e in [*self.seen("child_started"), *self.seen("spare_started")]})

    def _read_events(self) -> None:
        for line in self._events:
            self.events.append({**json.loads(line), "t": time.monotonic()})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line


@contextmanager
def running(config: WorkerConfig) -> Iterator[Parent]:
    """A parent for the length of a test; whatever is left of it is killed."""
    parent = Parent(config)
    try:
        yield parent
    finally:
        if parent.process.poll() is None:
            parent.process.kill()
        parent.process.wait()
        for pid in parent.child_pids():  # before the pipes are read to their end: children hold them too
            if lives_in(pid, parent.process.pid):
                os.kill(pid, signal.SIGKILL)
        parent.close()

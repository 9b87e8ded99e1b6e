"""Real `replaykit worker` processes for tests: started, listened to, killed, and gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.crash.workflows import OUTSIDE
from tests.runtime.facts import eventually, lives_in

__all__ = ["MODULE", "Crew", "WorkerProcess"]

ROOT: Final = Path(__file__).resolve().parents[2]
MODULE: Final = "tests.crash.workflows"
COMMAND: Final = "import sys; from replaykit.interfaces.cli import main; sys.argv[0] = 'replaykit'; main()"


class WorkerProcess:
    """One `replaykit worker`: a parent with children. Its log is a file of JSON lines."""

    def __init__(self, log: Path, module: str, env: Mapping[str, str], flags: tuple[str, ...]) -> None:
        self._log = log
        self._read = 0
        self._events: list[dict[str, Any]] = []
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "worker", module, "--log-format", "json", *flags],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # which its children are of, and nobody else
            )

    @property
    def pid(self) -> int:
        """The parent's."""
        return self.process.pid

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The log's lines of that event with these fields, so far."""
        with self._log.open("rb") as stream:
            stream.seek(self._read)
            lines = stream.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._read += len(line)
            if line.startswith(b"{"):
                self._events.append(json.loads(line))
        return [e for e in self._events if e["event"] == name and fields.items() <= e.items()]

    def text(self) -> str:
        """The whole log."""
        return self._log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Pids of the children that live, the spare one that has no work yet among them."""
        started = {e["pid"] for event in ("child_started", "spare_started") for e in self.events(event)}
        return [pid for pid in started if lives_in(pid, self.pid)]

    def ready(self) -> list[int]:
        """Pids of the children that live and claim."""
        return [e["pid"] for e in self.events("child_ready") if lives_in(e["pid"], self.pid)]

    def wait_ready(self, children: int = 1) -> list[int]:
        """Pids of that many children that claim."""
        try:
            eventually(lambda: len(self.ready()) >= children, f"{children} children are ready")
        except AssertionError as error:
            error.add_note(self.text())
            raise
        return self.ready()

    def wait_ordinary(self) -> int:
        """The pid of a child that claims runs which nobody suspects; on a busy machine there may be solo children, too."""
        return eventually(
            lambda: [pid for pid in self.ready() if self.events("child_started", pid=pid, solo=False)],
            "a child is ready that is no solo child",
        )[0]

    def worker_id(self, pid: int) -> str:
        """The id under which that child holds leases."""
        (event,) = self.events("child_started", pid=pid)
        return str(event["worker"])

    def kill(self) -> None:
        """SIGKILL the parent alone."""
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """SIGKILL parent and children as one: the parent is stopped first, so that it hands nothing back."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill()


class Crew:
    """The workers of a test. `env` is added to their environment."""

    def __init__(
        self, folder: Path, dsn: str, outside: str, *, module: str = MODULE, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._module = module
        self._env = {OUTSIDE: outside, **(env or {})}
        self.dsn = dsn
        self.workers: list[WorkerProcess] = []

    def hire(self, *flags: str, env: Mapping[str, str] | None = None) -> WorkerProcess:
        """Start a `replaykit worker` with these flags, `env` added to its environment."""
        log = self._folder / f"worker-{len(self.workers)}.log"
        all = {**self._env, "REPLAYKIT_DATABASE_URL": self.dsn, **(env or {})}
        worker = WorkerProcess(log, self._module, all, flags)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        """Kill whatever is left, by pid."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        for worker in self.workers:  # only now: a living parent would have gone on to start children
            for pid in worker.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """The last lines of every log."""
        return "\n".join(f"--- {w._log.name}\n{w.text()[-4000:]}" for w in self.workers)

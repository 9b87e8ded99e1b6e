"""A `replaykit` that runs in a process of its own, with what it says on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.runtime.facts import eventually

__all__ = ["ROOT", "Running"]

ROOT = Path(__file__).resolve().parents[2]


class Running:
    """A command that goes on until it is ended.

    Attributes:
        said: its stderr so far.
    """

    def __init__(self, *arguments: str, dsn: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYKIT_")}
        environment |= {"PYTHONPATH": str(ROOT), "REPLAYKIT_DATABASE_URL": dsn, **variables}
        program = "from replaykit.interfaces.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def until(self, words: str, times: int = 1) -> None:
        """Wait until it has said this, so often."""
        eventually(lambda: self.said.count(words) >= times or self.process.poll() is not None, words)
        assert self.said.count(words) >= times, self.said

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its lines of JSON; each line has to be one."""
        return [json.loads(line) for line in self.said.splitlines()]

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Tell it to end, wait, and return its exit code; once or more often."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

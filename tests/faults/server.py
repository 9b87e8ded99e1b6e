"""Postgres servers of a test's own: killed, stopped at once, started again; a standby that is promoted; a disk that is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from replaykit.postgres.migrate import upgrade
from replaykit.runtime.embedded import find_binaries
from replaykit.runtime.embedded_server import Cluster, Server, end_orphans, find_postmaster
from tests.conftest import make_open_folder, with_database
from tests.runtime.facts import eventually

__all__ = ["Own", "can_mount", "one_server", "small_disk"]

SETTINGS: Final = {
    "checkpoint_timeout": "30s",
    "max_wal_senders": "4",
    "wal_keep_size": "64MB",
    "shared_buffers": "32MB",
}


class Own:
    """A server with a migrated database, in a folder of its own (which others may enter).

    Args:
        folder: new, or that of a standby.
        settings: for its configuration file.
        disk: where its data lie, if not in the folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None, *, disk: Path | None = None) -> None:
        folder.mkdir(mode=0o755, exist_ok=True)
        folder.chmod(0o755)
        self.folder = folder
        self._settings = {**SETTINGS, **(settings or {})}
        self._cluster = Cluster(folder, find_binaries(), durable=True)
        if disk is not None and not (folder / "data").exists():
            (folder / "data").symlink_to(disk / "data")
        self._server: Server | None = None

    @property
    def dsn(self) -> str:
        """URL of its database."""
        return self._cluster.dsn

    def database(self) -> str:
        """URL of a copy of its database, which it makes. It goes with the server."""
        name, template = f"test_{uuid.uuid4().hex[:12]}", self.dsn.rpartition("/")[2].partition("?")[0]
        with psycopg.connect(with_database(self.dsn, "postgres"), autocommit=True) as connection:
            connection.execute(f"create database {name} template {template}".encode())
        return with_database(self.dsn, name)

    def start(self, *, migrate: bool = True) -> None:
        """Start it for the first time."""
        self._cluster.prepare()
        with (self._cluster.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())
        self.restart()
        if migrate:
            upgrade(self.dsn, schema="replaykit")

    def restart(self) -> None:
        """Start it again; what is left of the one before is ended."""
        self.end()
        self._server = self._cluster.start_server()
        try:
            eventually(self.answers, "the server answers", 60)
        except AssertionError as error:
            error.add_note(self._cluster.log_tail())
            raise

    def answers(self) -> bool:
        """Whether one can connect and read."""
        try:
            with psycopg.connect(self.dsn, connect_timeout=2) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.Error:
            return False

    def lives(self) -> bool:
        """Whether its postmaster runs."""
        return find_postmaster(self._cluster.data) is not None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """SIGKILL of the postmaster, or SIGQUIT: an immediate stop; returns when no process of it is left."""
        pid = find_postmaster(self._cluster.data)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        self.end()

    def end(self) -> None:
        """Whatever is left of it."""
        server, self._server = self._server, None
        pid = find_postmaster(self._cluster.data)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)
        if server is not None and server.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(20)
        end_orphans(self._cluster.data)

    def ask(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def dump(self, path: Path) -> None:
        """All that its database holds, as SQL; of a server that is gone what pg_dump said of it."""
        with path.open("wb") as file:
            subprocess.run([self._cluster.bin_dir / "pg_dump", "-d", self.dsn], stdout=file, stderr=file, timeout=60)

    # ------------------------------------------------------------------ a standby

    def standby(self, folder: Path, *, disk: Path | None = None) -> Own:
        """Another server that follows this one; from now on a commit here is acknowledged once it is there as well."""
        other = Own(folder, self._settings, disk=disk)
        cluster, mine = other._cluster, self._cluster
        cluster.bin_dir = mine.bin_dir
        cluster.data = cluster.choose_base() / "data"
        cluster.own_folder(cluster.data)
        command: list[str | Path] = [
            mine.bin_dir / "pg_basebackup",
            "-D",
            cluster.data,
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
        ]
        source = f"host='{mine.sockets}' user=postgres application_name=standby"
        cluster.run_once([*command, "-d", source])
        other.start(migrate=False)
        self.ask("alter system set synchronous_standby_names = 'standby'")
        self.ask("select pg_reload_conf()")
        follows = "select 1 from pg_stat_replication where sync_state = 'sync' and state = 'streaming'"
        eventually(lambda: self.ask(follows), "the standby follows", 60)
        return other

    def promote(self) -> None:
        """The standby becomes the primary."""
        self.ask("select pg_promote(true, 60)")
        eventually(lambda: self.ask("select pg_is_in_recovery()") == [(False,)], "the standby is promoted", 60)


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


class Disk:
    """A small file system that can be filled.

    Attributes:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """No byte is left."""
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while ballast.write(b"\0" * size) == size:
                        pass

    def empty(self) -> None:
        """There is room again."""
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """A tmpfs of that size. Root only."""
    folder.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "replaykit-test", folder], check=True)
    try:
        yield Disk(folder)
    finally:
        deadline = time.monotonic() + 20
        while subprocess.run(["umount", folder], capture_output=True).returncode and time.monotonic() < deadline:
            time.sleep(0.1)


@contextlib.contextmanager
def one_server() -> Iterator[Own]:
    """One that may be killed."""
    folder = make_open_folder()
    server = Own(folder / "server")
    try:
        server.start()
        yield server
    finally:
        server.end()
        shutil.rmtree(folder, ignore_errors=True)

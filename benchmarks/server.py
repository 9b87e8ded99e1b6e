"""The server under test: one embedded Postgres at its default, durable settings, and a database for each measurement."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from replaykit.postgres.migrate import upgrade
from replaykit.runtime.embedded import EmbeddedPostgres

__all__ = ["database", "query", "run_part", "scratch", "server"]

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A fresh server in a temporary folder; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="replaykit-bench-") as folder:
        Path(folder).chmod(0o755)
        home = Path(folder) / "pg"
        with EmbeddedPostgres(home, linger=0.0) as dsn:
            yield dsn
        end = time.monotonic() + 300  # what a million runs have left is written down first
        while (home / "server.json").exists() and time.monotonic() < end:
            time.sleep(0.05)


def scratch(dsn: str, name: str) -> str:
    """An empty database of that name, and its URL."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'drop database if exists "{name}" with (force)'.encode())
        connection.execute(f'create database "{name}"'.encode())
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


def database(dsn: str, name: str) -> str:
    """The same with replaykit's schema."""
    url = scratch(dsn, name)
    upgrade(url)
    return url


def query(dsn: str, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Rows of one statement."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(text.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def run_part(name: str, *arguments: str, python: str = sys.executable, timeout: float = 600) -> list[dict[str, Any]]:
    """Run `python -m benchmarks.<name>` in a process of its own; it prints one JSON object a line."""
    done = subprocess.run(
        [python, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmarks.{name} {' '.join(arguments[:1])} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

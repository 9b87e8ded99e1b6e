"""A process that uses embedded Postgres and does what test_embedded.py tells it, one JSON line each way.

Usage: embedded_client.py HOME LINGER_SECONDS durable|throw-away
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psycopg

from replaykit.runtime.embedded import EmbeddedPostgres

RETRY_SECONDS = 30.0


def main(home: str, linger: str, durable: str) -> None:
    """Open the home, then obey until stdin ends. A Ctrl-C is told and survived."""
    with EmbeddedPostgres(home, linger=float(linger), durable=durable == "durable") as dsn:
        answer({"dsn": dsn})
        held: list[psycopg.Connection[Any]] = []
        while True:
            try:
                line = sys.stdin.readline()
                if not line:
                    return
                obey(dsn, json.loads(line), held)
            except KeyboardInterrupt:
                answer("interrupted")


def obey(dsn: str, order: dict[str, Any], held: list[psycopg.Connection[Any]]) -> None:
    """Carry out one order and answer it."""
    match order["do"]:
        case "query":
            answer(query(dsn, order["sql"]))
        case "start and leave":  # a statement whose end nobody waits for
            connection = psycopg.connect(dsn, autocommit=True)
            held.append(connection)
            connection.pgconn.send_query(order["sql"].encode())
            answer(connection.info.backend_pid)
        case "write for ever":
            with psycopg.connect(dsn, autocommit=True) as connection:
                number = 0
                while True:
                    connection.execute("insert into t values (%s)", [number])
                    answer(number)
                    number += 1
        case "fork and exit":  # the child goes on reading orders
            if os.fork() != 0:
                os._exit(0)
            answer(os.getpid())


def query(dsn: str, sql: str) -> list[Any]:
    """Rows of a statement on a new connection; tried again while the server is on its way back."""
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                cursor = connection.execute(sql.encode())
                return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def answer(value: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

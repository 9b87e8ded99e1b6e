"""A database, a world outside and workers for the tests of effects: made once for a file, or for one test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

import psycopg

from replaykit import Client, Workflow
from tests.crash.crew import ROOT, Crew, WorkerProcess
from tests.crash.effects_flows import TABLE
from tests.crash.effects_points import FOLDER, Points
from tests.crash.outside_calls import Calls
from tests.crash.rows import Rows
from tests.direct import direct
from tests.runtime.facts import eventually, lives

__all__ = ["House", "OwnProcess", "kill", "opened"]

MODULE: Final = "tests.crash.effects_flows"
LIFESPAN: Final = ("--lifespan", f"{MODULE}:lifespan")
ENDED: Final = ("succeeded", "failed", "cancelled", "held")


class OwnProcess:
    """A process with a `Worker` in it, which it has begun: `id`."""

    def __init__(self, dsn: str, points: Path, lease_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.effects_process", dsn, str(lease_seconds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), FOLDER: str(points)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.id = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        """Its process's."""
        return self.process.pid


class House:
    """What such a test works with.

    Attributes:
        calls: the server outside.
        rows: looks at the database.
        points: where workers stop.
    """

    def __init__(self, folder: Path, dsn: str, calls: Calls) -> None:
        self.dsn = dsn
        self.calls = calls
        self.rows = Rows(dsn)
        self.points = Points(folder)
        self.crew = Crew(folder, dsn, calls.address, module=MODULE, env={FOLDER: str(folder)})
        self._accounts = itertools.count(1)
        self._own: list[OwnProcess] = []

    def hire(self, *flags: str, children: int = 1) -> WorkerProcess:
        """A `replaykit worker` that is ready."""
        worker = self.crew.hire(*LIFESPAN, "--processes", str(children), *flags)
        worker.wait_ready(children)
        return worker

    def hire_own(self, lease_seconds: float = 30.0) -> OwnProcess:
        """A process of one's own with a `Worker` in it: with no parent, nothing ends it when its lease does."""
        own = OwnProcess(self.dsn, self.points.folder, lease_seconds)
        self._own.append(own)
        return own

    def account(self, **how: Any) -> str:
        """A part of the world that no other test has; the name of it."""
        name = f"account-{next(self._accounts)}"
        self.calls.behave(name, **how)
        return name

    def start(self, workflow: Workflow[..., Any], *args: Any) -> UUID:
        """A run."""

        async def started(client: Client) -> UUID:
            return (await client.start(workflow, *args)).id

        return cast(UUID, self.ask(started))

    def ask(self, what: Callable[[Client], Awaitable[Any]]) -> Any:
        """Do something as a client."""

        async def asked() -> Any:
            async with Client(self.dsn) as client:
                return await what(client)

        return asyncio.run(asked())

    def state(self, run: UUID) -> str:
        """Where a run is."""
        return str(self.rows.ask("select state from runs where id = %s", run)[0][0])

    def reason(self, run: UUID) -> str:
        """Why it is held."""
        return str(self.rows.ask("select reason from runs where id = %s", run)[0][0])

    def wait_ended(self, run: UUID) -> str:
        """The state of a run that has ended, or is held."""
        try:
            eventually(lambda: self.state(run) in ENDED, f"run {run} has ended")
        except AssertionError as error:
            error.add_note(str(self.rows.ask("select state, waiting_for, recoveries from runs where id = %s", run)))
            raise
        return self.state(run)

    def result(self, run: UUID) -> Any:
        """What it returned."""
        return self.rows.ask("select output from payloads where run_id = %s", run)[0][0]

    def error(self, run: UUID) -> str:
        """What it failed with, as JSON text."""
        (error,) = self.rows.ask("select error from payloads where run_id = %s", run)[0]
        return json.dumps(error)

    def intents(self, run: UUID) -> list[tuple[str, int, str]]:
        """Key, attempt and state of its intents."""
        query = "select key, attempt, state from intents where run_id = %s order by written_at, key, attempt"
        return [(key, attempt, state) for key, attempt, state in self.rows.ask(query, run)]

    def in_doubt(self, run: UUID) -> list[str]:
        """Keys of what a person is asked about."""
        return [key for (key,) in self.rows.ask("select key from in_doubt where run_id = %s order by key", run)]

    def journal(self, run: UUID) -> list[tuple[str, str]]:
        """Key and outcome of its entries."""
        query = "select key, outcome from journal where run_id = %s order by seq"
        return [(key, outcome) for key, outcome in self.rows.ask(query, run)]

    def close(self) -> None:
        """Kill whatever is left."""
        self.crew.close()
        for own in self._own:
            with own.process:
                own.process.kill()
        self.rows.close()


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not lives(pid), f"{pid} is dead")


@contextlib.contextmanager
def opened(folder: Path, dsn: str) -> Iterator[House]:
    """A house without workers."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        connection.execute(TABLE)
    with Calls() as calls:
        house = House(folder, dsn, calls)
        try:
            yield house
        finally:
            house.close()

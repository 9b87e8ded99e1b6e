"""What the database says: runs, journals, leases. And runs started as a user starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import psycopg

from replaykit import Client, Handle, Workflow
from replaykit.postgres.journal import ENTRY_COLUMNS, parse_entry
from replaykit.replay.entries import Entry
from replaykit.replay.execution import Execution
from tests.direct import direct
from tests.runtime.facts import eventually

__all__ = ["Rows", "replay_in_process", "start"]


class Rows:
    """One connection for looking; a new one after the database was lost."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def ask(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """Rows of a query; tables without a schema are replaykit's."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(direct(self.dsn), autocommit=True, options="-c search_path=replaykit")
        cursor = self._connection.execute(query.encode(), params)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close it."""
        if self._connection is not None:
            self._connection.close()

    def states(self) -> dict[str, int]:
        """How many runs are in each state."""
        return dict(self.ask("select state, count(*) from runs group by 1"))

    def ended(self) -> int:
        """How many runs have ended, or stopped for a person."""
        return int(self.ask("select count(*) from runs where state not in ('pending', 'running', 'waiting')")[0][0])

    def wait_ended(self, runs: int, seconds: float = 60.0) -> None:
        """Until so many runs have ended."""
        try:
            eventually(lambda: self.ended() >= runs, f"{runs} runs have ended", seconds)
        except AssertionError as error:
            error.add_note(
                str(self.ask("select id, state, worker, recoveries, reason from runs where state <> 'succeeded'")[:20])
            )
            error.add_note(str(self.ask("select id, pid, expires_at - now(), stopped_at from workers")))
            raise

    def outputs(self, runs: Iterable[UUID]) -> dict[UUID, tuple[str, Any]]:
        """State and result of each run."""
        rows = self.ask(
            "select id, state, output from runs join payloads on run_id = id where id = any(%s)", list(runs)
        )
        return {run: (state, output) for run, state, output in rows}

    def entries(self, run: UUID) -> list[Entry]:
        """A run's journal."""
        rows = self.ask(f"select {ENTRY_COLUMNS} from journal j where run_id = %s order by seq", run)
        return [parse_entry(row) for row in rows]

    def journals(self) -> dict[UUID, list[tuple[Any, ...]]]:
        """Every column of every journal, as text, by run."""
        found: dict[UUID, list[tuple[Any, ...]]] = {}
        for run, *row in self.ask(
            "select run_id, seq, key, name, kind, outcome, attempt, input::text, output::text, error::text, digest,"
            " idempotency_key, started_at, at, recorded_at, due_at, worker, write_id from journal order by run_id, seq"
        ):
            found.setdefault(run, []).append(tuple(row))
        return found

    def recorded(self) -> dict[tuple[str, str], float]:
        """When each step of each run was written, by the database's clock."""
        query = "select run_id, key, extract(epoch from recorded_at)::float8 from journal where kind = 'step'"
        return {(str(run), key): at for run, key, at in self.ask(query)}

    def recoveries(self) -> int:
        """Of all runs together."""
        return int(self.ask("select coalesce(sum(recoveries), 0) from runs")[0][0])


def start(dsn: str, workflow: Workflow[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[UUID]:
    """Start a run for each tuple of arguments, as a client does; they are durable on return."""

    async def started() -> list[UUID]:
        async with Client(dsn) as client:
            handles: list[Handle[Any]] = await asyncio.gather(*(client.start(workflow, *args) for args in calls))
        return [handle.id for handle in handles]

    return asyncio.run(started())


def replay_in_process(rows: Rows, workflow: Workflow[..., Any], run: UUID) -> Execution:
    """The run's function on its journal alone, with no worker and no body."""
    ((input, seed, started_at),) = rows.ask(
        "select input::text, seed, (extract(epoch from started_at) * 1000000)::bigint"
        " from runs join payloads on run_id = id where id = %s",
        run,
    )
    args, kwargs = workflow.info.decode_arguments(input, {})
    execution = Execution(workflow.fn, args, kwargs, info=workflow.info, run_id=run, seed=seed, started_at=started_at)
    execution.start()
    execution.replay(rows.entries(run))
    return execution

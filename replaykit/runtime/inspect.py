"""What the command line shows: runs, one run and what belongs to it, workers. It reads; rows are dicts by SQL name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from replaykit.errors import RunNotFound
from replaykit.postgres.database import Database, SyncConnection, is_transient
from replaykit.postgres.leases import live_workflows, parse_workflows
from replaykit.postgres.onlookers import (
    find_observations,
    parse_rows,
    run_intents,
    shown_attempts,
    shown_in_doubt,
    shown_in_flight,
    shown_journal,
    shown_journal_ends,
    shown_observations,
    shown_open_attempts,
    shown_requests,
    shown_run,
    shown_runs,
    shown_tried,
    shown_undone,
    shown_workers,
)
from replaykit.postgres.runs import find_run, parse_runs
from replaykit.replay.failures import error_words
from replaykit.runtime.target import Target

__all__ = ["Inspector", "error_words"]

Row = dict[str, Any]
T = TypeVar("T")

FIRST_ENTRIES: Final = 20
"""Of a long journal a person sees how it began,"""

LAST_ENTRIES: Final = 180
"""and what came last: together a few screens, whatever its length."""

LAST_TRIES: Final = 50
"""So many of the tries of steps that have ended."""

LAST_REQUESTS: Final = 20
"""So many of what people asked of it."""

FIRST_DOUBTS: Final = 20
"""So many of its calls in doubt: who has said what became of them sees the next."""

FIRST_UNDONE: Final = 200
"""So many of what it has undone."""


class Inspector:
    """Looks at a database without an event loop; opens at first use, again after the connection was lost.

    Raises, from each method:
        DatabaseUnreachable: no connection.
        SchemaMismatch: the schema is not this release's.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._database: Database | None = None
        self._connection: SyncConnection | None = None

    def runs(self, *, state: str | None = None, workflow: str | None = None, limit: int | None = 50) -> list[Row]:
        """Rows of `runs`, newest first; all of them if `limit` is None."""
        return self._ask(lambda c: parse_rows(c.run(*shown_runs(state=state, workflow=workflow, limit=limit))))

    def progress(self, *, state: str | None = None, workflow: str | None = None, limit: int = 20) -> list[Row]:
        """The newest runs, each with `in_flight`: the keys of the steps whose bodies run now."""

        def ask(connection: SyncConnection) -> list[Row]:
            runs = parse_rows(connection.run(*shown_runs(state=state, workflow=workflow, limit=limit)))
            running = [UUID(run["id"]) for run in runs if run["state"] == "running"]
            bodies = parse_rows(connection.run(*shown_in_flight(running))) if running else []
            for run in runs:
                run["in_flight"] = [body["key"] for body in bodies if body["run_id"] == run["id"]]
            return runs

        return self._ask(ask)

    def find(self, reference: str) -> UUID:
        """The id of the run that an id, the last 6 or more characters of one, or a key means.

        Raises:
            RunNotFound: no run, or more than one.
        """
        found = self._ask(lambda c: parse_runs(c.run(*find_run(reference))))
        if not found:
            raise RunNotFound(f"no run has the id or key {reference!r}")
        if len(found) > 1:
            raise RunNotFound(f"more than one run's id ends with {reference!r}: give more of it")
        return found[0].id

    def observed(self, what: str) -> list[Row]:
        """Who has observed `KIND:VALUE`, or a value under any kind: `run_id`, `key`, `attempt`, `kind`, `value`,
        `observed_at`, and the run's `workflow`, `run_key` and `state`, in the order in which it was told."""
        return self._ask(lambda c: parse_rows(c.run(*find_observations(what.replace("\0", "\\0")))))

    def run(self, run_id: UUID | str) -> Row:
        """The row of `runs`, with `input`, `output` and `error`."""
        return self._one(self._ask(lambda c: parse_rows(c.run(*shown_run(UUID(str(run_id)))))), run_id)

    def show(self, run_id: UUID) -> Row:
        """All of one run, of one moment: `run`, `journal`, `intents`, `attempts`, `observations`, `requests`."""
        bounds = [
            shown_run(run_id),
            shown_journal(run_id),
            run_intents(run_id),
            shown_attempts(run_id),
            shown_observations(run_id),
            shown_requests(run_id),
        ]
        runs, journal, intents, attempts, observations, requests = self._ask(
            lambda c: [parse_rows(rows) for rows in c.run_all(bounds)]
        )
        answers = {entry["mailbox_id"]: entry["seq"] for entry in journal if entry["mailbox_id"] is not None}
        for request in requests:
            request["entry"] = answers.get(request["id"])  # of a word on a step, too
        return {
            "run": self._one(runs, run_id),
            "journal": journal,
            "intents": intents,
            "attempts": attempts,
            "observations": observations,
            "requests": requests,
        }

    def drawn(self, run_id: UUID, *, every: bool = False) -> Row:
        """What is drawn of one run: `run`, `journal`, `attempts` of steps that have not ended, `in_flight` bodies,
        `tried` (failed tries of steps that have ended), the last `requests`, its `doubts` (of a held run with what it has
        `observed` and `undone`), and of a pending run `known`, the workflows
        that live workers have, and `claimed`, the queues that they take its workflow from.

        Args:
            run_id: which.
            every: the whole journal; else its first and last entries if it is long.
        """
        journal_of = shown_journal(run_id)
        if not every:
            journal_of = shown_journal_ends(run_id, first=FIRST_ENTRIES, last=LAST_ENTRIES)
        bounds = [
            shown_run(run_id),
            journal_of,
            shown_open_attempts(run_id),
            shown_in_flight([run_id]),
            shown_requests(run_id, LAST_REQUESTS),
            shown_in_doubt(run_id, FIRST_DOUBTS),
        ]
        runs, journal, attempts, in_flight, requests, doubts = self._ask(
            lambda c: [parse_rows(rows) for rows in c.run_all(bounds)]
        )
        run = self._one(runs, run_id)
        again = [entry["key"] for entry in journal if entry["kind"] == "step" and entry["attempt"] > 1]
        tried = self._ask(lambda c: parse_rows(c.run(*shown_tried(run_id, again, LAST_TRIES)))) if again else []
        observed: list[Row] = []
        undone: list[Row] = []
        if run["state"] == "held":
            of_it = [shown_observations(run_id), shown_undone(run_id, FIRST_UNDONE)]
            observed, undone = self._ask(lambda c: [parse_rows(rows) for rows in c.run_all(of_it)])
        pending = run["state"] == "pending"
        return {
            "run": run,
            "journal": journal,
            "attempts": attempts,
            "tried": tried,
            "in_flight": in_flight,
            "requests": requests,
            "doubts": doubts,
            "observed": observed,
            "undone": undone,
            "known": sorted(self.workflows()) if pending else None,
            "claimed": self.queues(run["workflow"]) if pending else None,
        }

    def workers(self, *, stopped: bool = False) -> list[Row]:
        """Rows of `workers`, oldest first, each with `state` and how many runs it has (`running`)."""
        return self._ask(lambda c: parse_rows(c.run(*shown_workers(stopped=stopped))))

    def workflows(self) -> dict[str, Any]:
        """What live workers have: names with their input schemas."""
        return self._ask(lambda c: parse_workflows(c.run(*live_workflows())))

    def queues(self, workflow: str) -> list[str]:
        """The queues that live workers take this workflow's runs from."""
        live = [worker for worker in self.workers() if worker["state"] == "live" and workflow in worker["workflows"]]
        return sorted({queue for worker in live for queue in worker["queues"]})

    def check(self) -> None:
        """Connect, and see that the schema is this release's."""
        self._ask(lambda connection: None)

    def _one(self, runs: Sequence[Row], run_id: UUID | str) -> Row:
        if not runs:
            raise RunNotFound(f"no run has the id {run_id}")
        return runs[0]

    def _ask(self, question: Callable[[SyncConnection], T]) -> T:
        for last in (False, True):
            if self._connection is None:
                self._connection = self._connect()
            try:
                return question(self._connection)
            except Exception as error:
                if last or not is_transient(error):
                    raise
                self.close()
        raise AssertionError  # the second turn returns or raises

    def _connect(self) -> SyncConnection:
        if self._database is None:
            database = Database(self._target.open(), self._target.schema, name="cli")
            asyncio.run(database.check())
            self._database = database
        return self._database.connect_sync()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A database with a worker in it, and the moments between two transactions, for the tests of the statements."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql

from replaykit.postgres import journal, leases, runs
from replaykit.postgres.database import Database, SyncConnection
from replaykit.postgres.schema import Bound
from replaykit.replay.entries import Change, ClaimedRun, Entry, Intent, Unit, Verdict
from replaykit.runtime.ids import new_id
from tests.direct import direct, pooled

T = TypeVar("T")

NOW = 1_800_000_000_000_000  # microseconds: some moment in 2027

PATIENCE_SECONDS = 20.0


class Store:
    """One database, a connection for statements, one for looking, and threads for what blocks."""

    def __init__(self, dsn: str, schema: str = "replaykit") -> None:
        self.database = Database(dsn, schema, name="test")
        self.connection = self.database.connect_sync()
        self.admin = psycopg.connect(direct(dsn), autocommit=True)
        self.admin.execute(sql.SQL("set search_path to {}").format(sql.Identifier(schema)))
        self.threads = ThreadPoolExecutor(max_workers=24)
        self.worker = self.register()
        self._opened: list[SyncConnection | Transaction] = []

    def close(self) -> None:
        """Close what was opened; what still blocks is let go first."""
        for opened in self._opened:
            opened.close()
        self.threads.shutdown(cancel_futures=True)
        self.connection.close()
        self.admin.close()

    def run(self, bound: Bound) -> list[tuple[Any, ...]]:
        """Execute one statement on the store's own connection."""
        return self.connection.run(*bound)

    def connect(self) -> SyncConnection:
        """One more connection; closed with the store."""
        connection = self.database.connect_sync()
        self._opened.append(connection)
        return connection

    def transaction(self) -> Transaction:
        """A transaction that stays in flight until the test says."""
        transaction = Transaction(self.database)
        self._opened.append(transaction)
        return transaction

    def register(self, lease_seconds: float = 3_600.0) -> UUID:
        """A worker's row."""
        worker = uuid.uuid4()
        self.run(
            leases.insert_worker(
                worker,
                hostname="host",
                pid=1,
                lease_seconds=lease_seconds,
                queues=["default"],
                workflows={"wf": {}},
                version="0",
                python="3",
            )
        )
        return worker

    def start(self, workflow: str = "wf", input: str = "{}", **options: Any) -> UUID:
        """A pending run's id."""
        row = runs.StartRow(new_id(), workflow, input, **options)
        return runs.parse_started(self.connection.run_all(runs.start_runs([row])))[row.id].id

    def claim(
        self, limit: int = 100, worker: UUID | None = None, workflows: Sequence[str] = ("wf",)
    ) -> list[ClaimedRun]:
        """Take runs under a new token."""
        token = uuid.uuid4()
        bounds = runs.claim(
            queue="default", workflows=workflows, worker=worker or self.worker, token=token, limit=limit
        )
        return runs.parse_claim(self.connection.run_all(bounds), token)

    def claim_suspects(self, groups: Sequence[int], worker: UUID | None = None) -> list[ClaimedRun]:
        """Take suspects under a new token, so many together as `groups` says."""
        token = uuid.uuid4()
        bounds = runs.claim(
            queue="default", workflows=["wf"], worker=worker or self.worker, token=token, suspects=groups
        )
        return runs.parse_claim(self.connection.run_all(bounds), token)

    def claim_after(self, run_id: UUID) -> ClaimedRun:
        """Claim all that is pending, which must be that run."""
        (claimed,) = self.claim()
        assert claimed.id == run_id
        return claimed

    def running(self) -> ClaimedRun:
        """A run that was started and claimed."""
        return self.claim_after(self.start())

    def write(self, *units: Unit) -> dict[UUID, Verdict]:
        """Write as one batch."""
        return journal.parse_verdicts(self.run(journal.write_units(units)))

    def write_one(self, unit: Unit) -> Verdict:
        """Write by the one-row statement; where it writes nothing the other one says why, as in the writer."""
        verdicts = journal.parse_verdicts(self.run(journal.write_entry(unit)))
        return verdicts[unit.run_id] if verdicts else self.write(unit)[unit.run_id]

    def write_lone(self, unit: Unit) -> Verdict:
        """Write as the writer does a unit that came alone."""
        bound = journal.write_lone(unit)
        assert bound is not None
        verdicts = journal.parse_verdicts(self.run(bound))
        return verdicts[unit.run_id] if verdicts else self.write(unit)[unit.run_id]

    def stands(self, *units: Unit) -> set[UUID]:
        """The runs whose units stand, says the second statement."""
        return journal.parse_recheck(self.run(journal.recheck(units)))

    def expire(self, worker: UUID) -> None:
        """Let a worker's lease run out."""
        self.admin.execute("update workers set expires_at = now() - interval '1 s' where id = %s", [worker])

    def raise_wakes(self, run_id: UUID) -> None:
        """What a sender does to the run's row."""
        self.admin.execute("update runs set wakes = wakes + 1 where id = %s", [run_id])

    def row(self, run_id: UUID, columns: str) -> tuple[Any, ...]:
        """Columns of the run's row."""
        found = self.admin.execute(f"select {columns} from runs where id = %s".encode(), [run_id]).fetchone()
        assert found is not None
        return found

    def seqs(self, run_id: UUID) -> list[int]:
        """What the journal holds."""
        return [
            row[0] for row in self.admin.execute("select seq from journal where run_id = %s order by seq", [run_id])
        ]

    def intents(self, run_id: UUID, columns: str = "key, attempt, state") -> list[tuple[Any, ...]]:
        """Columns of its intents, by key and attempt."""
        text = f"select {columns} from intents where run_id = %s order by key, attempt"
        return self.admin.execute(text.encode(), [run_id]).fetchall()

    def in_thread(self, work: Callable[[], T]) -> Future[T]:
        """Start what is going to block."""
        return self.threads.submit(work)

    def wait_blocked(self, pid: int) -> None:
        """Return once that server process waits for a lock of another one; behind a pooler, whose pids mean nothing, any."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            row = self.admin.execute(
                "select cardinality(pg_blocking_pids(pid)) > 0 and wait_event_type = 'Lock'"
                " from pg_stat_activity where (%s and datname = current_database()) or pid = %s"
                " order by 1 desc limit 1",
                [pooled(), pid],
            ).fetchone()
            if row == (True,):
                return
        raise AssertionError(f"backend {pid} never waited for a lock")


class Transaction:
    """A connection on which a statement has run and nothing is committed yet."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._raw = psycopg.connect(direct(database.dsn))

    @property
    def pid(self) -> int:
        """Its server process."""
        return self._raw.info.backend_pid

    def run(self, bound: Bound) -> list[tuple[Any, ...]]:
        """Execute, commit nothing."""
        statement, params = bound
        cursor = self._raw.execute(self._database.text(statement), params)
        return cursor.fetchall() if cursor.description else []

    def execute(self, text: str, *params: Any) -> None:
        """Execute other SQL; {schema} is replaced."""
        self._raw.execute(text.replace("{schema}", f'"{self._database.schema}"').encode(), params)

    def commit(self) -> None:
        """Let the others go on."""
        self._raw.commit()

    def rollback(self) -> None:
        """As if it had never been."""
        self._raw.rollback()

    def close(self) -> None:
        """Roll back and close."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def step(seq: int, output: str | None = "1", **fields: Any) -> Entry:
    """An entry of a step's outcome."""
    return Entry(
        **{
            "seq": seq,
            "key": f"s{seq}",
            "name": "s",
            "kind": "step",
            "outcome": "ok",
            "at": NOW + seq,
            "output": output,
            "started_at": NOW,
            **fields,
        }
    )


def timer(seq: int) -> Entry:
    """An entry of a timer that fired."""
    return step(seq, None, key="~timer", name="timer", kind="timer", due_at=NOW, started_at=None)


def intent(key: str = "charge", attempt: int = 1, **fields: Any) -> Intent:
    """An intent of an irreversible step."""
    return Intent(
        **{
            "key": key,
            "attempt": attempt,
            "name": key,
            "effect": "irreversible",
            "idempotency_key": f"rk1_{key}",
            "input": '{"cents": 1200}',
            "written_at": NOW,
            **fields,
        }
    )


def unit(run: ClaimedRun, *entries: Entry, change: Change | None = None, **fields: Any) -> Unit:
    """A unit of that run under its token, with a fresh write_id."""
    return Unit(run_id=run.id, token=run.token, write_id=uuid.uuid4(), entries=list(entries), change=change, **fields)

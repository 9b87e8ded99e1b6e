"""Scenarios of the kind migration: many at once, one that is killed, one that finds others at work, a role that may not."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from alembic import command
from structlog.testing import capture_logs

from replaykit import Client, Worker, step, workflow
from replaykit.errors import ConfigurationError, DatabaseUnreachable
from replaykit.postgres.migrate import _config, current_revision, upgrade
from replaykit.postgres.schema import REVISION
from tests.conftest import Connection, fresh_database, with_database
from tests.direct import direct
from tests.runtime.facts import eventually
from tests.scenarios.stage import ROOT, replaykit

SLOW = pytest.mark.slow


class Migrator:
    """A process that migrates."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.migrating"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def begin(self, dsn: str) -> None:
        """Tell it to."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{dsn}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """What it says next; what it complained of if it says nothing."""
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout.readline().strip() or self.process.stderr.read()


@contextlib.contextmanager
def migrators(number: int) -> Iterator[list[Migrator]]:
    """That many, which have imported what they need."""
    made = [Migrator() for _ in range(number)]
    try:
        for one in made:
            assert one.hear() == "ready"
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate()


def assert_whole(dsn: str) -> None:
    """The schema is this release's, once."""
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select version_num from replaykit.alembic_version").fetchall() == [(REVISION,)]
        assert conn.execute("select count(*) from pg_index where not indisvalid").fetchone() == (0,)
        assert conn.execute("select count(*) from pg_constraint where not convalidated").fetchone() == (0,)


# ------------------------------------------------------------------ many at once


@pytest.mark.parametrize(("processes", "times"), [(5, 4), pytest.param(20, 20, marks=SLOW)])
def test_b046_many_processes_migrate_an_empty_database_once(
    server_dsn: str, server_connection: Connection, processes: int, times: int
) -> None:
    """All come up, one of them has worked. Twenty fresh processes: tests/postgres/test_migrate.py."""
    with migrators(processes) as crew:
        for _ in range(times):
            with fresh_database(server_connection, "template1") as name:
                dsn = with_database(server_dsn, name)
                for one in crew:
                    one.begin(dsn)
                assert sorted(one.hear() for one in crew) == ["False"] * (processes - 1) + ["True"]
                assert_whole(dsn)


def test_b047_replicas_that_boot_together_leave_a_schema_for_later_boots(empty_dsn: str) -> None:
    """Three, then one, then again three: the version has one row, whoever wrote it."""
    with migrators(3) as crew:
        for one in crew:
            one.begin(empty_dsn)
        assert sorted(one.hear() for one in crew) == ["False", "False", "True"]
        for boot in ([crew[0]], crew):
            for one in boot:
                one.begin(empty_dsn)
            assert {one.hear() for one in boot} == {"False"}
    assert_whole(empty_dsn)


STOPS = """
create function public.stop_here() returns event_trigger language plpgsql as $$
begin
    if tg_tag = '{tag}' then perform pg_advisory_lock_shared(47); end if;
end $$;
create event trigger stops on ddl_command_end execute function public.stop_here();
"""


@pytest.mark.parametrize("tag", ["CREATE SCHEMA", "CREATE TABLE", "CREATE VIEW", "CREATE FUNCTION"])
def test_b047_a_process_that_is_killed_in_mid_migration_leaves_nothing_half_made(empty_dsn: str, tag: str) -> None:
    """The next one does it, whole; what was begun is rolled back, the lock is free."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn, migrators(2) as (killed, heir):
        conn.execute(STOPS.format(tag=tag).encode())
        conn.execute("select pg_advisory_lock(47)")
        killed.begin(empty_dsn)
        stands = "select from pg_locks where locktype = 'advisory' and objid = 47 and not granted"
        eventually(lambda: conn.execute(stands).fetchall(), "it is in the middle")
        killed.process.kill()
        heir.begin(empty_dsn)
        conn.execute("drop event trigger stops")
        conn.execute("select pg_advisory_unlock(47)")

        assert heir.hear() == "True"
    assert_whole(empty_dsn)


# ------------------------------------------------------------------ others at work


@pytest.fixture
def first_release(empty_dsn: str) -> str:
    """A schema of revision 0001."""
    out = io.StringIO()
    with _config("replaykit") as config:
        config.output_buffer = out
        command.upgrade(config, "0001", sql=True)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(out.getvalue().encode())
    return empty_dsn


FILL = """
insert into replaykit.runs (id, workflow, state, started_at, finished_at, protocol)
    select gen_random_uuid(), 'wf', 'succeeded', now(), now(), 1 from generate_series(1, {runs});
insert into replaykit.journal (run_id, seq, key, name, kind, outcome, output, at, write_id)
    select id, 1, 'a', 'a', 'step', 'ok', '1', now(), gen_random_uuid() from replaykit.runs;
"""


class OldWorker:
    """Writes as one does, all the time; a write that has to wait for longer than `seconds` is an error."""

    def __init__(self, dsn: str, seconds: float) -> None:
        self._dsn = dsn
        self._seconds = seconds
        self._over = threading.Event()
        self.writes = 0

    def work(self) -> None:
        """Until told to stop."""
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            conn.execute(f"set lock_timeout to '{self._seconds:g}s'".encode())
            while not self._over.is_set():
                conn.execute(
                    "with new as (insert into replaykit.runs (id, workflow, state, available_at)"
                    " values (gen_random_uuid(), 'wf', 'pending', now()) returning id)"
                    " insert into replaykit.journal (run_id, seq, key, name, kind, outcome, output, at, write_id)"
                    " select id, 1, 'a', 'a', 'step', 'ok', '1', now(), gen_random_uuid() from new"
                )
                conn.execute("update replaykit.runs set wakes = wakes + 1 where state = 'pending'")
                self.writes += 1

    def __enter__(self) -> OldWorker:
        self._threads = ThreadPoolExecutor(1)
        self._working = self._threads.submit(self.work)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._working.result(60)
        self._threads.shutdown()


@pytest.mark.parametrize("runs", [20_000, pytest.param(2_000_000, marks=SLOW)])
def test_b049_an_upgrade_keeps_workers_waiting_for_a_moment_at_most(first_release: str, runs: int) -> None:
    """Although somebody's old transaction uses the tables, before which a change of them must wait: it lets others pass,
    and tells who is in its way. Indexes are built beside the writes."""
    with psycopg.connect(first_release, autocommit=True) as conn:
        conn.execute(FILL.format(runs=runs).encode())
    with (
        ThreadPoolExecutor() as threads,
        psycopg.connect(first_release) as old,
        OldWorker(first_release, seconds=3) as worker,
        capture_logs() as logs,
    ):
        old.execute("select from replaykit.runs limit 1")
        upgrading = threads.submit(upgrade, first_release)
        try:
            eventually(lambda: waits(logs) >= 3 or upgrading.done(), "it has let others pass")
            written = worker.writes
            eventually(lambda: worker.writes > written + 10, "and they write")
        finally:
            old.rollback()
        assert upgrading.result(600)

        written = worker.writes
        eventually(lambda: worker.writes > written + 10, "they go on")
        in_the_way = [e["pids"] for e in logs if e["event"] == "migration_waits"]
        assert sum(old.info.backend_pid in pids for pids in in_the_way) >= 3  # later ones may meet a writer
    assert_whole(first_release)


def waits(logs: Any) -> int:
    """How often a migration has told that it waits."""
    return sum(e["event"] == "migration_waits" for e in logs)


BUILDING = """
select pid from pg_stat_activity where datname = current_database() and query like 'create index concurrently%'
    and wait_event_type = 'Lock'
"""


@pytest.mark.parametrize(
    ("how", "error"), [("pg_cancel_backend", ConfigurationError), ("pg_terminate_backend", DatabaseUnreachable)]
)
def test_b050_an_index_whose_build_failed_is_built_anew(first_release: str, how: str, error: type[Exception]) -> None:
    """It is left behind and no use; the revision is not written. A time-out that the database sets for all does not end
    the build."""
    with psycopg.connect(first_release, autocommit=True) as conn:
        conn.execute(FILL.format(runs=10).encode())
        for setting in ("lock_timeout", "statement_timeout"):
            conn.execute(f"alter database \"{conn.info.dbname}\" set {setting} to '100ms'".encode())
    with (
        ThreadPoolExecutor() as threads,
        psycopg.connect(first_release) as old,
        psycopg.connect(first_release, autocommit=True) as conn,
    ):
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")  # a snapshot, for which a build waits
        first = threads.submit(upgrade, first_release)
        eventually(lambda: conn.execute("select from pg_index where not indisvalid").fetchall(), "an index is begun")
        since = conn.execute("select clock_timestamp()").fetchone()
        longer = "select clock_timestamp() > %s + interval '0.5 seconds'"
        eventually(lambda: conn.execute(longer, since).fetchone() == (True,), "longer than the time-outs")
        ((pid,),) = eventually(lambda: conn.execute(BUILDING.encode()).fetchall(), "it still waits")
        conn.execute(f"select {how}(%s)".encode(), [pid])
        with pytest.raises(error, match=r"could not be migrated|migrate again"):
            first.result(60)

        assert conn.execute("select count(*) from pg_index where not indisvalid").fetchone() == (1,)
        assert current_revision(conn, "replaykit") == "0001"
        old.rollback()
        assert upgrade(first_release)
    assert_whole(first_release)


# ------------------------------------------------------------------ a role that may not


async def answer() -> int:
    """A body."""
    return 42


@workflow
async def asks() -> int:
    """One step."""
    return await step(answer)


NO_DDL = """
create function public.refuse_ddl() returns event_trigger language plpgsql as $$
begin raise exception 'DDL: %', tg_tag; end $$;
create event trigger no_ddl on ddl_command_start execute function public.refuse_ddl();
"""


@pytest.fixture
def limited(dsn: str) -> Iterator[str]:
    """URL for a role that may do what docs/how-to/your-own-postgres.md grants, and nothing else."""
    role = f"worker_{uuid.uuid4().hex[:8]}"
    page = (ROOT / "docs" / "how-to" / "your-own-postgres.md").read_text(encoding="utf-8")
    grants = [line.strip().replace("worker_role", role) for line in page.splitlines() if "to worker_role" in line]
    assert len(grants) == 3
    with psycopg.connect(direct(dsn), autocommit=True) as conn:
        conn.execute(f"create role {role} login".encode())
        try:
            conn.execute(f'revoke create, temporary on database "{conn.info.dbname}" from public'.encode())
            for grant in grants:
                conn.execute(grant.encode())
            conn.execute(NO_DDL)
            yield direct(dsn).replace("postgres@", f"{role}@", 1)
        finally:
            conn.execute("drop event trigger no_ddl")
            conn.execute(f"drop owned by {role}; drop role {role}".encode())


@pytest.mark.anyio
async def test_b052_a_role_without_ddl_starts_everything(limited: str) -> None:
    """Client, worker, command line, also `db migrate` where there is nothing to do: none of them tries to create."""
    with psycopg.connect(limited) as conn, pytest.raises(psycopg.errors.Error):
        conn.execute("create schema another")
    async with Client(limited) as client, Worker(limited, workflows=[asks]):
        handle = await client.start(asks)
        assert await handle.result(timeout=30) == 42
        held = await client.options(queue="nobody's").start(asks)
        await held.cancel()

    assert not upgrade(limited)
    for words in (["db", "migrate"], ["runs"], ["show", str(handle.id)], ["workers"]):
        said = replaykit(limited, *words)
        assert said.code == 0, said

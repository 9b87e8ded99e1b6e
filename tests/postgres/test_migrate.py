"""Migrating: many at once do it once, an installed wheel needs no checkout, and what cannot work says why."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic import command

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.postgres.migrate import _config, current_revision, sql, upgrade
from replaykit.postgres.schema import REVISION
from tests.direct import direct
from tests.postgres.pooler import Pooler
from tests.runtime.facts import eventually

ROOT = Path(__file__).resolve().parents[2]

UPGRADE = "import sys; from replaykit.postgres.migrate import upgrade; print(upgrade(sys.argv[1]))"


def test_twenty_processes_at_once_migrate_once(empty_dsn: str) -> None:
    """One works, the others wait and find it done."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, empty_dsn],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(20)
    ]
    results = [(*process.communicate(timeout=240), process.returncode) for process in processes]

    assert [code for _, _, code in results] == [0] * 20, results
    assert sorted(out for out, _, _ in results) == ["False\n"] * 19 + ["True\n"]
    with psycopg.connect(empty_dsn) as conn:
        assert current_revision(conn, "replaykit") == REVISION
        assert conn.execute("select count(*) from replaykit.alembic_version").fetchone() == (1,)


@pytest.fixture(scope="session")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel installed in it, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (
        "import sys; from hatchling.builders.wheel import WheelBuilder;"
        " print(next(WheelBuilder('.').build(directory=sys.argv[1])))"
    )
    wheel = run([sys.executable, "-c", build, str(folder)], ROOT).strip().splitlines()[-1]
    site = folder / "site"
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), wheel], folder)
    return site


def test_an_installed_wheel_migrates_an_empty_database(wheel_site: Path, empty_dsn: str) -> None:
    """With no checkout at hand."""
    code = "import replaykit; print(replaykit.__file__); " + UPGRADE
    out = run([sys.executable, "-c", code, empty_dsn], wheel_site.parent, PYTHONPATH=str(wheel_site)).splitlines()

    assert Path(out[0]).is_relative_to(wheel_site)
    assert out[1] == "True"
    with psycopg.connect(empty_dsn) as conn:
        assert current_revision(conn, "replaykit") == REVISION


def test_a_wheel_carries_its_migrations_and_no_folder_of_that_name(wheel_site: Path) -> None:
    """A `site-packages/migrations` would be everyone's."""
    assert (wheel_site / "replaykit" / "_migrations" / "env.py").is_file()
    assert (wheel_site / "replaykit" / "_migrations" / "script.py.mako").is_file()
    assert sorted(p.name for p in wheel_site.iterdir() if "dist-info" not in p.name and p.name != "bin") == [
        "replaykit"
    ]


def test_the_script_for_people_who_run_scripts_makes_the_same(empty_dsn: str, tmp_path: Path) -> None:
    """`replaykit db sql`: one transaction, no function of alembic needed."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(sql("by_hand").encode())
        assert current_revision(conn, "by_hand") == REVISION
    upgrade(empty_dsn, "by_alembic")

    with psycopg.connect(empty_dsn) as conn:
        made = [
            conn.execute(
                "select table_name, column_name, udt_name, column_default from information_schema.columns"
                " where table_schema = %s order by 1, 2",
                [schema],
            ).fetchall()
            for schema in ("by_hand", "by_alembic")
        ]
        functions = conn.execute(
            "select proconfig from pg_proc where proname = 'start' order by pronamespace"
        ).fetchall()
    assert made[0] == made[1]
    assert {str(f[0]) for f in functions} == {"['search_path=by_hand']", "['search_path=by_alembic']"}


@pytest.fixture
def first_release(empty_dsn: str) -> str:
    """A schema of revision 0001 with a run that works, written by that release."""
    out = io.StringIO()
    with _config("replaykit") as config:
        config.output_buffer = out
        command.upgrade(config, "0001", sql=True)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(out.getvalue().encode())
        conn.execute(
            "insert into replaykit.runs (id, workflow, state, started_at, protocol, worker, lease_token) values"
            " (gen_random_uuid(), 'wf', 'running', now(), 1, gen_random_uuid(), gen_random_uuid())"
        )
        conn.execute(ENTRY, [1])
    return empty_dsn


ENTRY = """
insert into replaykit.journal (run_id, seq, key, name, kind, outcome, output, at, write_id)
select id, %s, 'a', 'a', 'step', 'ok', '1', now(), gen_random_uuid() from replaykit.runs
"""

BUILDING = """
select from pg_stat_activity where datname = current_database() and query like 'create index concurrently%%'
    and wait_event_type = 'Lock'
"""


def test_a_schema_with_runs_is_upgraded_while_workers_write(first_release: str) -> None:
    """The indexes are built beside them: a build that must wait for somebody's old transaction keeps nobody waiting."""
    with (
        psycopg.connect(first_release) as old,
        psycopg.connect(first_release, autocommit=True) as conn,
        ThreadPoolExecutor() as threads,
    ):
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        upgrading = threads.submit(upgrade, first_release)
        try:
            eventually(lambda: conn.execute(BUILDING).fetchall(), "an index is being built")
            conn.execute("set lock_timeout = '5s'")
            conn.execute(ENTRY, [2])
            conn.execute("update replaykit.runs set wakes = wakes + 1")
        finally:
            old.rollback()

        assert upgrading.result(60)
        assert current_revision(conn, "replaykit") == REVISION
        assert conn.execute("select count(*) from replaykit.journal").fetchone() == (2,)
        assert conn.execute("select count(*) from pg_index where not indisvalid").fetchone() == (0,)
        assert conn.execute("select count(*) from pg_constraint where not convalidated").fetchone() == (0,)


@pytest.fixture
def second_release(first_release: str) -> str:
    """The same at revision 0002, its run held, with a request to cancel and one to retry."""
    out = io.StringIO()
    with _config("replaykit") as config:
        config.output_buffer = out
        command.upgrade(config, "0001:0002", sql=True)
    with psycopg.connect(first_release, autocommit=True) as conn:
        conn.execute(out.getvalue().encode())
        conn.execute(
            "update replaykit.runs set state = 'held', reason = 'why', lease_token = null, worker = null;"
            " select replaykit.cancel(id, 'ada') from replaykit.runs"
        )
    return first_release


def test_a_schema_of_the_release_before_gets_effects_and_keeps_its_rows(second_release: str) -> None:
    """Nothing that stands is changed, and a worker's write does not wait for it."""
    tables = ("runs", "journal", "mailbox", "attempts")

    def rows(conn: psycopg.Connection) -> list[list[tuple[str, ...]]]:
        return [conn.execute(f"select t::text from replaykit.{table} t".encode()).fetchall() for table in tables]

    with psycopg.connect(second_release) as old, psycopg.connect(second_release, autocommit=True) as conn:
        before = rows(conn)
        old.execute(ENTRY, [2])

        assert upgrade(second_release)
        old.rollback()

        assert rows(conn) == before
        assert current_revision(conn, "replaykit") == REVISION
        assert conn.execute("select count(*) from replaykit.in_doubt").fetchone() == (0,)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has written no intent"):
            conn.execute("select replaykit.resolve(id, 'a', not_landed => true) from replaykit.runs")
        conn.execute("update replaykit.runs set state = 'failed', finished_at = now()")
        assert conn.execute("select replaykit.retry(id) from replaykit.runs").fetchone() == ("pending",)


def test_the_scripts_of_each_step_together_make_what_one_script_makes(second_release: str) -> None:
    """`replaykit db sql --from`."""
    with psycopg.connect(second_release, autocommit=True) as conn:
        conn.execute(sql(since="0002").encode())
        conn.execute(sql("at_once").encode())

        made = [
            conn.execute(
                "select c.relname, a.attname, format_type(a.atttypid, null), col_description(c.oid, a.attnum),"
                " obj_description(c.oid) from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0"
                " where c.relnamespace = %s::regnamespace order by 1, a.attnum",
                [schema],
            ).fetchall()
            for schema in ("replaykit", "at_once")
        ]
    assert made[0] == made[1]


def test_an_upgrade_that_was_interrupted_is_done_again(first_release: str) -> None:
    """Its changes stand already; the revision was not written."""
    assert upgrade(first_release)
    with psycopg.connect(first_release, autocommit=True) as conn:
        conn.execute("update replaykit.alembic_version set version_num = '0001'")

    assert upgrade(first_release)
    assert not upgrade(first_release)


def test_an_unknown_revision_for_a_script_is_refused() -> None:
    """With the names there are."""
    with pytest.raises(ConfigurationError, match="revision 'x' is unknown; there are 0001"):
        sql(since="x")


def test_a_newer_schema_is_left_alone(dsn: str) -> None:
    """By an older release."""
    with psycopg.connect(direct(dsn), autocommit=True) as conn:
        conn.execute("update replaykit.alembic_version set version_num = '9999'")

    with pytest.raises(SchemaMismatch, match="revision 9999, newer than"):
        upgrade(direct(dsn))


def test_a_role_that_may_not_create_is_told_so(empty_dsn: str) -> None:
    """And leaves nothing half-made."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create role nothing login")
        try:
            limited = empty_dsn.replace("postgres@", "nothing@", 1)
            assert limited != empty_dsn
            with pytest.raises(ConfigurationError, match="permission denied"):
                upgrade(limited)
            conn.execute("create schema replaykit")
            conn.execute("grant usage on schema replaykit to nothing")
            with pytest.raises(ConfigurationError, match="permission denied"):
                upgrade(limited)
            assert current_revision(conn, "replaykit") is None
        finally:
            conn.execute("drop owned by nothing; drop role nothing")


def test_a_pooler_is_refused(empty_dsn: str) -> None:
    """A session lock through it would lock nothing."""
    with Pooler(empty_dsn) as pooled, pytest.raises(ConfigurationError, match="is a connection pooler"):
        upgrade(pooled)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 64])
def test_a_schema_name_that_postgres_would_cut_is_refused(empty_dsn: str, name: str) -> None:
    """Before anything is made."""
    with pytest.raises(ConfigurationError, match="schema name"):
        upgrade(empty_dsn, name)


def test_no_server_is_a_sentence_without_the_password() -> None:
    """With the URL that was tried."""
    with pytest.raises(DatabaseUnreachable) as caught:
        upgrade("postgresql://me:s3cret@127.0.0.1:1/app")

    assert "postgresql://me@127.0.0.1:1/app" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """A command's output; it must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

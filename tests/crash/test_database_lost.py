"""The database goes away and comes back: runs go on without an operator, and nothing that was written is lost."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from replaykit.postgres.migrate import upgrade
from replaykit.runtime.embedded import EmbeddedPostgres
from tests.conftest import remove_home
from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_kill import assert_a_kill_repeats_one_body_at_most, assert_completed_steps_ran_once
from tests.crash.workflows import chain
from tests.runtime.facts import eventually

RUNS, STEPS = 12, 60


@pytest.fixture
def home() -> Iterator[Path]:
    """The home of a server of one's own."""
    folder = Path(tempfile.mkdtemp(prefix="replaykit-crash-"))
    folder.chmod(0o755)
    yield folder
    remove_home(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_dsn(home: Path) -> Iterator[str]:
    """A migrated database on it; the fixture's hold makes that the server is restarted whenever it dies."""
    with EmbeddedPostgres(home, linger=1.0, durable=True) as dsn:
        upgrade(dsn, schema="replaykit")
        yield dsn


def postmaster(home: Path) -> int:
    """Its pid."""
    return int((home / "data" / "postmaster.pid").read_text().split()[0])


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGKILL])
def test_runs_go_on_after_the_server_died(
    home: Path, own_dsn: str, tmp_path: Path, outside: Outside, how: signal.Signals
) -> None:
    """An immediate stop, or kill -9 of the postmaster, with commits in flight: what was written stands, and goes on."""
    crew, rows = Crew(tmp_path, own_dsn, outside.address), Rows(own_dsn)
    try:
        crew.hire("--lease-seconds", "3", "--processes", "2").wait_ready(2)
        started = start(own_dsn, chain, [(STEPS, 0.0, 0.04)] * RUNS)
        for _ in range(2):
            calls = outside.count + 10 * RUNS
            eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
            before = rows.journals()
            dead = postmaster(home)
            os.kill(dead, how)
            rows.close()
            eventually(lambda: is_back(own_dsn, home, dead), "the server is back")  # noqa: B023
            after = rows.journals()
            assert {run: after[run][: len(entries)] for run, entries in before.items()} == before
        rows.wait_ended(RUNS)

        assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(STEPS))))
        assert_completed_steps_ran_once(outside, rows)
        assert_a_kill_repeats_one_body_at_most(outside)
        assert outside.overlaps == []
    finally:
        rows.close()
        crew.close()
        print(crew.logs())


def is_back(dsn: str, home: Path, dead: int) -> bool:
    """Whether another postmaster answers."""
    try:
        if postmaster(home) == dead:
            return False
        psycopg.connect(dsn).close()
    except (OSError, ValueError, IndexError, psycopg.Error):
        return False
    return True


def test_terminated_connections_repeat_nothing(crew: Crew, outside: Outside, rows: Rows) -> None:
    """Every backend ended again and again: a process that lives keeps what its bodies returned, and writes it."""
    worker = crew.hire("--processes", "2")
    children = worker.wait_ready(2)
    started = start(crew.dsn, chain, [(STEPS, 0.0, 0.04)] * RUNS)

    for _ in range(8):
        calls = outside.count + 4 * RUNS
        eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
        rows.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
    rows.wait_ended(RUNS)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(STEPS))))
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0
    assert sorted(worker.ready()) == sorted(children)

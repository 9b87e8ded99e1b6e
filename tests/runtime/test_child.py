"""Real children with real workers in them: killed, stopped, orphaned, drained, with bodies running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from replaykit import Client, Workflow
from replaykit.limits import Settings
from replaykit.runtime.child import _orphaned
from replaykit.runtime.heartbeat import EXIT_LEASE_LOST
from replaykit.runtime.supervisor import WorkerConfig
from tests.direct import direct
from tests.runtime.facts import eventually, lives
from tests.runtime.parents import Parent, running
from tests.runtime.slow_flows import blocks, waits


def config(dsn: str, *modules: str, processes: int = 1, lifespan: str | None = None, **settings: Any) -> WorkerConfig:
    """A configuration of real children that execute `slow_flows`."""
    return WorkerConfig(
        dsn=dsn,
        modules=modules or ("tests.runtime.slow_flows",),
        processes=processes,
        lifespan=lifespan,
        settings=Settings(**settings),
    )


def start(dsn: str, workflow: Workflow[[str], int], folder: Path) -> UUID:
    """A run of it; its id."""

    async def started() -> UUID:
        client = Client(dsn)
        try:
            return (await client.start(workflow, str(folder))).id
        finally:
            await client.aclose()

    return asyncio.run(started())


def row(dsn: str, run_id: UUID, columns: str = "state, recoveries") -> tuple[Any, ...]:
    """Columns of the run's row."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        found = connection.execute(f"select {columns} from replaykit.runs where id = %s".encode(), (run_id,)).fetchone()
    assert found is not None
    return found


def journal(dsn: str, run_id: UUID) -> list[tuple[Any, ...]]:
    """Who wrote what."""
    query = "select key, outcome, output::text, worker from replaykit.journal where run_id = %s order by seq"
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        return connection.execute(query, (run_id,)).fetchall()


def begun(folder: Path, other_than: int = 0) -> int:
    """The process in which a body has begun."""

    def process() -> int:
        pids = [int(path.name.rpartition("-")[2]) for path in folder.glob("begun-*")]
        return next((pid for pid in pids if pid != other_than), 0)

    return eventually(process, "a body begins")


def await_end(parent: Parent, dsn: str, run_id: UUID) -> None:
    """Waits until the run has succeeded."""
    try:
        eventually(lambda: row(dsn, run_id, "state") == ("succeeded",), "the run succeeds")
    except AssertionError as error:
        error.add_note(f"{row(dsn, run_id, 'state, reason')}\n{parent.events}\n{parent.stderr}")
        raise


def test_a_run_goes_on_after_kill_9_of_its_child(dsn: str, tmp_path: Path) -> None:
    """At once: its lease of 600 s has not ended."""
    with running(config(dsn, lease_seconds=600)) as parent:
        run_id = start(dsn, waits, tmp_path)
        first = begun(tmp_path)

        os.kill(first, signal.SIGKILL)

        second = begun(tmp_path, other_than=first)
        (tmp_path / "go").touch()
        await_end(parent, dsn, run_id)
        assert journal(dsn, run_id)[0][2] == str(second)
        assert row(dsn, run_id) == ("succeeded", 1)


@pytest.mark.parametrize("workflow", [waits, blocks])
def test_sigterm_lets_bodies_finish(dsn: str, tmp_path: Path, workflow: Workflow[[str], int]) -> None:
    """And records what they returned; the run, if it is not over, is handed back."""
    with running(config(dsn)) as parent:
        run_id = start(dsn, workflow, tmp_path)
        pid = begun(tmp_path)

        parent.signal(signal.SIGTERM)
        parent.wait_for("workers_stopping")
        (tmp_path / "go").touch()

        assert parent.wait() == 0
        assert [entry[1:3] for entry in journal(dsn, run_id)] == [("ok", str(pid))]
        assert row(dsn, run_id, "worker, recoveries") == (None, 0)


@pytest.mark.parametrize("workflow", [waits, blocks])
def test_after_the_grace_period_runs_are_handed_back(dsn: str, tmp_path: Path, workflow: Workflow[[str], int]) -> None:
    """A body that goes on ends with its process."""
    with running(config(dsn, grace_seconds=0.2)) as parent:
        run_id = start(dsn, workflow, tmp_path)
        pid = begun(tmp_path)

        parent.signal(signal.SIGTERM)

        assert parent.wait() == 0
        assert not lives(pid)
        assert journal(dsn, run_id) == []
        assert row(dsn, run_id) == ("pending", 0)


def test_an_orphan_hands_back_its_runs_and_is_gone_in_two_seconds(dsn: str, tmp_path: Path) -> None:
    """The parent was killed with -9: its pipe tells."""
    with running(config(dsn, lease_seconds=600)) as parent:
        run_id = start(dsn, waits, tmp_path)
        pid = begun(tmp_path)

        parent.signal(signal.SIGKILL)
        killed_at = time.monotonic()

        eventually(lambda: not lives(pid), "the child is gone")
        assert time.monotonic() - killed_at < 2.5
        assert row(dsn, run_id) == ("pending", 0)


def test_an_orphan_with_a_sync_body_leaves_its_lease_to_run_out(dsn: str, tmp_path: Path) -> None:
    """The body may act until the very end: nobody else may begin before."""
    with running(config(dsn, lease_seconds=600)) as parent:
        run_id = start(dsn, blocks, tmp_path)
        pid = begun(tmp_path)

        parent.signal(signal.SIGKILL)
        killed_at = time.monotonic()

        eventually(lambda: not lives(pid), "the child is gone")
        assert time.monotonic() - killed_at < 2.5
        assert row(dsn, run_id, "state") == ("running",)


@pytest.mark.parametrize("workflow", [waits, blocks])
def test_a_second_sigint_does_not_wait_for_bodies(dsn: str, tmp_path: Path, workflow: Workflow[[str], int]) -> None:
    """Ctrl-C twice; the parent is there to hand back what the child could not."""
    with running(config(dsn, grace_seconds=600, lease_seconds=600)) as parent:
        run_id = start(dsn, workflow, tmp_path)
        pid = begun(tmp_path)

        def pressed() -> bool:
            parent.signal(signal.SIGINT)
            return bool(parent.seen("workers_stopping", stage="abandoning"))

        eventually(pressed, "the parent abandons its children")
        assert parent.wait() in (0, 1)  # 1: a third one was sent before the second was seen
        assert not lives(pid)
        assert row(dsn, run_id) == ("pending", 0)


def test_a_child_stopped_past_its_lease_and_continued_writes_nothing(dsn: str, tmp_path: Path) -> None:
    """The run finishes once, elsewhere."""
    with running(config(dsn, lease_seconds=1.5)) as parent:
        run_id = start(dsn, waits, tmp_path)
        first = begun(tmp_path)
        stopped = UUID(parent.wait_for("child_ready", pid=first)["worker"])
        with running(config(dsn, lease_seconds=1.5)) as other:
            other.wait_for("child_ready")
            os.kill(first, signal.SIGSTOP)

            second = begun(tmp_path, other_than=first)
            (tmp_path / "go").touch()
            await_end(other, dsn, run_id)
            os.kill(first, signal.SIGCONT)
            parent.wait_for("child_ended", pid=first)

            (entry,) = journal(dsn, run_id)
            assert entry[2] == str(second)
            assert entry[3] != stopped
            assert row(dsn, run_id) == ("succeeded", 1)


def test_a_module_that_does_not_import_ends_the_worker_with_its_traceback(dsn: str, tmp_path: Path) -> None:
    """The user's, not ours, and once."""
    (tmp_path / "broken_flows.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    with running(config(dsn, str(tmp_path / "broken_flows.py"), processes=2)) as parent:
        assert parent.wait() == 2

        assert parent.stderr.count("return 1 / 0") == 1
        assert "replaykit/runtime" not in parent.stderr


def test_a_lifespan_that_fails_ends_the_worker_with_its_traceback(dsn: str) -> None:
    """Nothing was claimed yet."""
    with running(config(dsn, lifespan="tests.runtime.slow_flows:broken_lifespan")) as parent:
        assert parent.wait() == 2

        assert "the lifespan tests.runtime.slow_flows:broken_lifespan failed" in parent.stderr
        assert "ConnectionRefusedError: no redis here" in parent.stderr
        assert "replaykit/runtime" not in parent.stderr


def test_a_database_that_is_not_there_is_one_sentence_and_may_be_tried_again() -> None:
    """With the URL, without the password; the exit code is none that tells a supervisor to leave it. A worker meets it when
    the database goes away between its parent's look and its children's."""
    with running(config("postgresql://someone:sesame@127.0.0.1:1/nowhere")) as parent:
        assert parent.wait() == 1

        assert "someone@127.0.0.1:1/nowhere" in parent.stderr
        assert "sesame" not in parent.stderr
        assert "Traceback" not in parent.stderr


def test_a_schema_that_is_not_there_yet_is_one_sentence_and_may_be_tried_again(empty_dsn: str) -> None:
    """Somebody may migrate it meanwhile."""
    with running(config(empty_dsn, processes=2)) as parent:
        assert parent.wait() == 1

        assert parent.stderr.count("db migrate") == 1


def test_an_orphan_ends_although_it_cannot_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under libfaketime, when the clock is moved meanwhile."""
    ended: list[int] = []

    def fail(_: float) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(time, "sleep", fail)
    monkeypatch.setattr(os, "_exit", ended.append)
    loop = asyncio.new_event_loop()
    loop.close()
    with contextlib.suppress(OSError):
        _orphaned(loop, asyncio.Event())

    assert ended == [EXIT_LEASE_LOST]

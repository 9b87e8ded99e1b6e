"""Long journals and wide ones: read in pages, cut into batches, killed in between."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from uuid import UUID

from replaykit import Workflow
from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import quiet_chain, quiet_fan
from tests.runtime.facts import eventually, lives


def finish_in_spite_of_kills(crew: Crew, rows: Rows, workflow: Workflow[[int], int], steps: int) -> UUID:
    """Kills the child whenever a tenth to a third of the journal has been added."""
    worker = crew.hire("--processes", "2")
    worker.wait_ready(2)
    (run,) = start(crew.dsn, workflow, [(steps,)])
    written = 0
    while rows.ended() == 0:
        more = random.randrange(steps // 10, steps // 3)
        eventually(lambda: rows.ended() or last_seq(rows) >= written + more, "the journal grows")  # noqa: B023
        for (pid,) in rows.ask("select pid from workers join runs on worker = workers.id where state = 'running'"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not lives(pid), "the child is dead")  # noqa: B023
        written = last_seq(rows)
    return run


def last_seq(rows: Rows) -> int:
    """The length of the only journal."""
    return int(rows.ask("select coalesce(max(seq), 0) from journal")[0][0])


def test_a_long_run_goes_on_where_it_was(crew: Crew, outside: Outside, rows: Rows) -> None:
    """3,000 steps one after another: a journal of several pages, replayed after each kill."""
    run = finish_in_spite_of_kills(crew, rows, quiet_chain, 3_000)

    assert rows.outputs([run]) == {run: ("succeeded", 3_000 * 2_999 // 2)}
    assert rows.ask("select count(*), count(distinct key) from journal") == [(3_000, 3_000)]
    assert rows.ask("select recoveries >= 3 from runs") == [(True,)]


def test_a_wide_run_goes_on_where_it_was(crew: Crew, outside: Outside, rows: Rows) -> None:
    """3,000 steps side by side: more than a batch holds."""
    run = finish_in_spite_of_kills(crew, rows, quiet_fan, 3_000)

    assert rows.outputs([run]) == {run: ("succeeded", 3_000 * 2_999 // 2)}
    assert rows.ask("select count(*), count(distinct key) from journal") == [(3_000, 3_000)]

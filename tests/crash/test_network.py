"""The network between worker and database: answers that are lost, a wire that stands still past the lease."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator

import pytest

from tests.crash.crew import Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_stopped import has_lost, written_by
from tests.crash.workflows import chain, gated, gated_sync
from tests.faults.wire import Lose, Wire
from tests.runtime.facts import eventually, lives

RUNS, STEPS = 12, 60


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    """A wire to the test's database, which may lose the answer to anything."""
    with Wire(dsn, matters=re.compile(b"")) as made:
        yield made


def test_a_lost_answer_repeats_nothing(crew: Crew, outside: Outside, rows: Rows, wire: Wire) -> None:
    """A commit whose acknowledgement never came is recognised: no conflict, no lease lost, no body called twice."""
    crew.dsn = wire.dsn
    worker = crew.hire("--processes", "2")
    children = worker.wait_ready(2)
    started = start(rows.dsn, chain, [(STEPS, 0.0, 0.04)] * RUNS)

    while wire.lost.total() < 30:
        lost, calls = wire.lost.total(), outside.count + random.randrange(RUNS)
        eventually(lambda: outside.count >= calls, "bodies are called")  # noqa: B023
        wire.lose(Lose.ANSWER)
        eventually(lambda: wire.lost.total() > lost, "an answer is lost")  # noqa: B023
    rows.wait_ended(RUNS)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(STEPS))))
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0
    assert sorted(worker.ready()) == sorted(children)


def test_a_worker_cut_off_ends_its_bodies_before_others_begin_them(
    crew: Crew, outside: Outside, rows: Rows, wire: Wire
) -> None:
    """It leaves before its lease does, threads and all; what it had sent arrives after the takeover, and is refused."""
    heir = crew.hire("--lease-seconds", "2")
    (heirs_child,) = heir.wait_ready()
    os.kill(heir.pid, signal.SIGSTOP)  # so that it takes no run before the other one has all of them
    os.kill(heirs_child, signal.SIGSTOP)
    crew.dsn = wire.dsn
    cut_off = crew.hire("--lease-seconds", "2")
    (child,) = cut_off.wait_ready()
    incarnation = cut_off.worker_id(child)
    started = start(rows.dsn, gated, [("gate", 1, 1)] * 10) + start(rows.dsn, gated_sync, [("gate",)] * 10)
    eventually(lambda: outside.busy(child) == 20, "all bodies run")
    eventually(lambda: len(rows.recorded()) == 10, "what has ended is written")
    for pid in (heirs_child, heir.pid):
        os.kill(pid, signal.SIGCONT)

    wire.freeze()
    eventually(lambda: has_lost(rows, incarnation), "the runs are taken")
    frozen = written_by(rows, incarnation)
    eventually(lambda: outside.busy(heir.wait_ready()[0]) == 20, "the bodies run elsewhere")
    assert not lives(child)
    wire.thaw()
    outside.open_gate("gate")
    rows.wait_ended(20)

    assert {state for state, _ in rows.outputs(started).values()} == {"succeeded"}
    assert outside.overlaps == []
    assert written_by(rows, incarnation) == frozen


def test_a_database_out_of_reach_for_longer_than_the_lease(
    crew: Crew, outside: Outside, rows: Rows, wire: Wire
) -> None:
    """For all workers alike: nobody takes anything from anybody, no body is repeated, nobody has to do anything."""
    crew.dsn = wire.dsn
    worker = crew.hire("--lease-seconds", "4", "--processes", "2")
    children = worker.wait_ready(2)
    started = start(rows.dsn, chain, [(STEPS, 0.0, 0.04)] * RUNS)
    eventually(lambda: outside.count >= 2 * RUNS, "bodies are called")

    wire.freeze()
    expired = "select 1 from workers having bool_and(expires_at < now() - interval '2 seconds')"
    eventually(lambda: rows.ask(expired), "all leases have been over for a while")
    wire.thaw()
    rows.wait_ended(RUNS)

    assert rows.outputs(started) == dict.fromkeys(started, ("succeeded", sum(range(STEPS))))
    assert set(outside.begun().values()) == {1}
    assert rows.recoveries() == 0
    assert sorted(worker.ready()) == sorted(children)

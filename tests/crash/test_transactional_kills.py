"""Transactional steps whose worker is killed, stopped or cut off: what the body wrote and the step's entry always agree."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.crash.crew import Crew
from tests.crash.ledger import DISAGREE, LEDGER, MODULE, TABLES, book, book_seen, book_slowly
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.test_stopped import LEASE, has_lost
from tests.direct import direct
from tests.faults.wire import Lose, Wire
from tests.runtime.facts import eventually, lives

RUNS, STEPS = 8, 30


@pytest.fixture
def rows(dsn: str) -> Iterator[Rows]:
    """Looks at the test's database, which has a ledger."""
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute(TABLES.encode())
    looker = Rows(dsn)
    yield looker
    looker.close()


@pytest.fixture
def crew(request: pytest.FixtureRequest, tmp_path: Path, rows: Rows, outside: Outside) -> Iterator[Crew]:
    """Workers of the ledger's workflows."""
    hired = Crew(tmp_path, rows.dsn, outside.address, module=MODULE)
    try:
        yield hired
    finally:
        hired.close()


@pytest.mark.parametrize("kills", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_rows_and_journal_agree_whenever_the_worker_is_killed(crew: Crew, rows: Rows, kills: int) -> None:
    """Looked at after each kill, in one snapshot: no line without an entry, no entry without a line; at the end each step has
    one line (S30)."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    worker = crew.hire("--processes", "2", "--connections", "4")
    worker.wait_ready(2)

    started: list[Any] = []
    killed = 0
    while killed < kills:
        started += start(crew.dsn, book, [(STEPS,)] * RUNS)
        while killed < kills and rows.ended() < len(started):
            killed += kill_a_child(crew, rows, chance)
            assert rows.ask(DISAGREE) == []
        rows.wait_ended(len(started), seconds=120)

    assert rows.ask(DISAGREE) == []
    assert set(rows.outputs(started).values()) == {("succeeded", sum(range(STEPS)))}
    lines = len(started) * STEPS
    assert rows.ask(LEDGER) == [(lines, lines, lines)]
    # A kill between two steps of a run is a recovery too; most of these were in the middle of one.
    ((recoveries,),) = rows.ask("select sum(recoveries) from runs")
    print(f"{kills} kills, {recoveries} recoveries of {len(started)} runs, {lines} lines")
    assert recoveries >= kills / 2


def kill_a_child(crew: Crew, rows: Rows, chance: random.Random) -> int:
    """Kills one that writes, a random moment after some line was committed; 0 if there was none."""
    (worker,) = crew.workers
    ((before,),) = rows.ask("select count(*) from public.ledger")
    wanted = before + chance.randrange(RUNS)
    written = "select count(*) >= %s from public.ledger"
    eventually(lambda: rows.ask(written, wanted)[0][0] or not rows.ask(BUSY), "lines are written, or nobody writes")
    busy = [pid for (pid,) in rows.ask(BUSY) if pid in worker.ready()]
    if not busy:
        return 0
    victim = chance.choice(busy)
    time.sleep(chance.uniform(0, 0.01))  # a body takes as long
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not lives(victim), "the child is dead")
    return 1


BUSY = "select distinct w.pid from workers w join runs r on r.worker = w.id where r.state = 'running'"


def test_a_stopped_body_keeps_nobody_waiting_and_writes_nothing_when_it_goes_on(
    crew: Crew, outside: Outside, rows: Rows
) -> None:
    """Its run is taken over while its transaction is open. Then it goes on, and finds that it was fenced off."""
    stopped = crew.hire(*LEASE)
    (child,) = stopped.wait_ready()
    incarnation = stopped.worker_id(child)
    (run,) = start(crew.dsn, book_slowly, [("gate",)])
    eventually(lambda: outside.calls(str(run), "enter_slowly"), "the body has written")
    (heir,) = crew.hire(*LEASE).wait_ready()

    outside.excuse(child)
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: has_lost(rows, incarnation), "the run is taken")
    eventually(lambda: len(outside.calls(str(run))) == 2, "the body runs elsewhere")
    outside.open_gate("gate")
    os.kill(child, signal.SIGCONT)
    rows.wait_ended(1)
    eventually(lambda: not lives(child), "the stopped process has left")

    assert rows.ask("select pid from public.ledger") == [(heir,)]
    assert rows.ask(DISAGREE) == []
    assert rows.outputs([run]) == {run: ("succeeded", "gate")}


# --- the connection is cut exactly there ------------------------------------------------------------------------------


COMMIT = re.compile(rb"; commit\0")
"""The end of the message with which a body's transaction is committed."""


@pytest.mark.parametrize(("what", "bodies"), [(Lose.REQUEST, 2), (Lose.ANSWER, 1)])
def test_a_connection_that_breaks_at_the_commit(
    crew: Crew, outside: Outside, rows: Rows, what: Lose, bodies: int
) -> None:
    """Nobody knows whether it was committed: the journal does. The body runs again only if its entry is not there."""
    with Wire(rows.dsn, matters=COMMIT) as wire:
        wire.lose(what)
        crew.dsn = wire.dsn
        crew.hire().wait_ready()
        (run,) = start(rows.dsn, book_seen, [(3,)])
        rows.wait_ended(1)

    assert wire.lost == {what: 1}
    assert rows.outputs([run]) == {run: ("succeeded", 3)}
    assert rows.ask(LEDGER) == [(1, 1, 1)]
    assert rows.ask(DISAGREE) == []
    assert len(outside.calls(str(run), "enter_seen")) == bodies
    assert rows.recoveries() == 0

"""The rows in memory are guarded as the database's are: who does not hold the token writes nothing."""

from __future__ import annotations

from uuid import UUID, uuid4

from replaykit.postgres.runs import StartRow
from replaykit.replay.entries import (
    ClaimedRun,
    Entry,
    Finish,
    Hold,
    Kind,
    Outcome,
    Park,
    Release,
    State,
    Unit,
    Verdict,
)
from replaykit.testing.memory import Memory, Row


def one_claimed() -> tuple[Memory, Row, ClaimedRun]:
    """A run that somebody holds, at moment 0."""
    memory = Memory()
    memory.start(StartRow(id=UUID(int=1), workflow="w", input="{}"), 0)
    (run,) = memory.claim(0)
    return memory, memory.rows[run.id], run


def entry(seq: int) -> Entry:
    return Entry(seq, "a", "a", Kind.STEP, Outcome.OK, 0)


def unit(run: ClaimedRun, **what: object) -> Unit:
    return Unit(run.id, run.token, uuid4(), **what)  # type: ignore[arg-type]


def test_another_token_writes_nothing() -> None:
    """After a new token the old one is fenced, its entries and its change of state alike."""
    memory, row, run = one_claimed()
    fresh = memory.renew(run.id, run.token)

    verdict, _ = memory.write(unit(run, entries=[entry(1)], change=Finish(State.SUCCEEDED)), 0)

    assert verdict is Verdict.FENCED
    assert (row.journal, row.state) == ([], State.RUNNING)
    assert fresh is not None and memory.write(unit(fresh, entries=[entry(1)]), 0)[0] is Verdict.OK
    assert memory.renew(run.id, run.token) is None


def test_a_timers_entry_is_stale_when_mail_came() -> None:
    """A unit that names the mailbox's state is refused when the state has moved on."""
    memory, row, run = one_claimed()
    memory.cancel(run.id, None, 0)

    assert memory.write(unit(run, entries=[entry(1)], wakes=run.wakes), 0)[0] is Verdict.STALE
    assert row.journal == []
    assert memory.write(unit(run, entries=[entry(1)]), 0)[0] is Verdict.OK


def test_an_entry_goes_to_its_own_place() -> None:
    """A second entry of one seq, or a hole, is a conflict."""
    memory, row, run = one_claimed()
    memory.write(unit(run, entries=[entry(1)]), 0)

    assert memory.write(unit(run, entries=[entry(1)]), 0)[0] is Verdict.CONFLICT
    assert memory.write(unit(run, entries=[entry(3)]), 0)[0] is Verdict.CONFLICT
    assert len(row.journal) == 1


def test_a_park_that_mail_overtook_is_pending() -> None:
    """Also a hold; a park until a moment that has passed; and what is handed back."""
    for change, expected in (
        (Park("timer", 5, 0), State.WAITING),
        (Park("timer", 0, 0), State.PENDING),
        (Park("timer", None, 0), State.WAITING),
        (Hold("why", 0), State.HELD),
        (Release(), State.PENDING),
    ):
        memory, row, run = one_claimed()
        memory.write(unit(run, change=change), 0)
        assert (row.state, row.token) == (expected, None)

    for change in (Park("timer", 5, 0), Hold("why", 0)):
        memory, row, run = one_claimed()
        memory.cancel(run.id, None, 0)
        memory.write(unit(run, change=change), 0)
        assert row.state == State.PENDING


def test_a_run_that_has_ended_is_nobodys() -> None:
    """Its token is gone; it is neither claimed nor cancelled."""
    memory, row, run = one_claimed()
    memory.write(unit(run, change=Finish(State.SUCCEEDED, "1")), 7)

    assert (row.state, row.output, row.finished_at) == (State.SUCCEEDED, "1", 7)
    assert memory.claim(8) == []
    assert memory.cancel(run.id, None, 8) is State.SUCCEEDED
    assert memory.write(unit(run, entries=[entry(1)]), 8)[0] is Verdict.FENCED


def test_claims_come_in_the_order_of_the_queue() -> None:
    """Smaller priority first, then the earlier one; a put-off start waits for its moment."""
    memory = Memory()
    for number, (priority, delay) in enumerate([(5, 0), (1, 0), (1, 0), (0, 10)], 1):
        memory.start(StartRow(UUID(int=number), "w", "{}", priority=priority, delay=delay), number)

    assert [run.id.int for run in memory.claim(5)] == [2, 3, 1]
    assert memory.next_due() == 14
    memory.promote(14)
    assert [run.id.int for run in memory.claim(14)] == [4]

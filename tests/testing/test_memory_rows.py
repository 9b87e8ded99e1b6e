"""The rows in memory are guarded as the database's are: who does not hold the token writes nothing."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

import pytest

from replaykit import NotResolvable, NotRetryable
from replaykit.postgres.runs import StartRow
from replaykit.replay.entries import (
    ClaimedRun,
    Closing,
    Effect,
    Entry,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    Observation,
    Outcome,
    Park,
    Release,
    State,
    Unit,
    Verdict,
)
from replaykit.runtime.words import Word
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


def intent(attempt: int = 1, key: str = "a", **fields: object) -> Intent:
    return Intent(key, attempt, "a", Effect.IRREVERSIBLE, "k", "{}", 0, **fields)  # type: ignore[arg-type]


UNKNOWN = Closing("a", 1, IntentState.UNKNOWN, resolved=False, evidence='{"error": {"type": "E"}}')


def test_intents_stand_or_fall_with_their_unit() -> None:
    """A fenced unit leaves none; what stands is handed over by the next claim, but for what landed."""
    memory, row, run = one_claimed()
    fresh = memory.renew(run.id, run.token)
    assert fresh is not None
    memory.write(unit(run, intents=[intent()], observations=[Observation("a", 1, "ticket", "1", 0)]), 0)
    assert (row.intents, row.observations) == ({}, [])

    memory.write(unit(fresh, intents=[intent(), intent(key="b")]), 0)
    memory.write(unit(fresh, entries=[entry(1)], closings=[Closing("a", 1, IntentState.LANDED)]), 0)
    memory.write(unit(fresh, observations=[Observation("b", 1, "ticket", "1", 0)] * 2), 0)
    memory.release(run.id, 0)

    (again,) = memory.claim(0)
    assert again.intents == [intent(key="b")]
    assert again.observations == [Observation("b", 1, "ticket", "1", 0)]


def test_what_is_known_of_a_call_grows() -> None:
    """Each closing adds to the evidence; the claim's copy is its own."""
    memory, row, run = one_claimed()
    memory.write(unit(run, intents=[intent()], closings=[UNKNOWN]), 0)
    memory.write(unit(run, closings=[Closing("a", 1, IntentState.UNKNOWN, False, evidence='{"misfit": 3}')]), 0)

    (known,) = row.intents.values()
    assert json.loads(known.evidence or "") == {"error": {"type": "E"}, "misfit": 3}
    memory.release(run.id, 0)
    (again,) = memory.claim(0)
    again.intents[0].state = IntentState.LANDED
    assert known.state == IntentState.UNKNOWN


def test_a_word_on_a_run_that_has_ended_closes_its_call() -> None:
    """No worker would; of a run that was cancelled as it stood, what was open is in doubt."""
    memory, row, run = one_claimed()
    memory.write(unit(run, intents=[intent()]), 0)
    memory.end_cancelled(run, 5)
    (known,) = row.intents.values()
    assert (known.state, known.resolved) == (IntentState.UNKNOWN, False)

    assert memory.resolve(run.id, "a", Word(not_landed=True, comment="no trace"), "ada", 7) is State.CANCELLED

    assert (known.state, known.resolved) == (IntentState.NOT_LANDED, True)
    assert json.loads(known.evidence or "") == {"comment": "no trace"}
    assert memory.resolve(run.id, "a", Word(not_landed=True), None, 8) is State.CANCELLED
    with pytest.raises(NotResolvable, match="has a word already: ada said not_landed at 1970-01-01 00:00:00 UTC"):
        memory.resolve(run.id, "a", Word(landed="1"), None, 8)


def test_a_call_that_is_in_doubt_again_takes_another_word() -> None:
    """A value that did not fit counts no more, nor a word after which the call was made and is in doubt once more."""
    memory, _, run = one_claimed()
    memory.write(unit(run, intents=[intent()], closings=[UNKNOWN], change=Hold("why", run.wakes)), 0)
    memory.resolve(run.id, "a", Word(landed='"no number"'), "ada", 1)
    (run,) = memory.claim(1)
    misfit = Closing("a", 1, IntentState.UNKNOWN, False, evidence=json.dumps({"misfit": run.mail[-1].id}))
    memory.write(unit(run, closings=[misfit], change=Hold("why", run.wakes)), 1)

    memory.resolve(run.id, "a", Word(), "ada", 2)
    with pytest.raises(NotResolvable, match="has a word already: ada said fail"):
        memory.resolve(run.id, "a", Word(landed="1"), "bob", 2)
    (run,) = memory.claim(2)
    failed = Closing("a", 1, IntentState.UNKNOWN, True, "ada", json.dumps({"mailbox_id": run.mail[-1].id}))
    memory.write(unit(run, closings=[failed]), 2)
    with pytest.raises(NotResolvable, match="has a word already: ada said fail"):
        memory.resolve(run.id, "a", Word(landed="1"), "bob", 2)
    memory.write(unit(run, closings=[UNKNOWN], change=Hold("why", run.wakes)), 2)

    assert memory.resolve(run.id, "a", Word(landed="1"), "bob", 3) is State.PENDING


def test_a_failed_run_that_has_undone_something_is_not_retried() -> None:
    """It would go on as if that stood. A held one is in the middle of it."""
    for change, refused in ((Finish(State.FAILED, None, "{}"), True), (Hold("why", 0), False)):
        memory, _, run = one_claimed()
        undo = Entry(1, "~undo:a", "give_back", Kind.STEP, Outcome.OK, 0)
        memory.write(unit(run, entries=[undo], change=change), 0)
        if refused:
            with pytest.raises(NotRetryable, match="has undone a, and would go on as if that stood: fork it, or start"):
                memory.retry(run.id, None, None, 0)
        else:
            assert memory.retry(run.id, None, None, 0) is State.PENDING

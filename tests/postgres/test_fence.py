"""One writer a run: the statement that writes is the one that checks. Each race is held open by a real transaction."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from replaykit.postgres import journal, leases, runs
from replaykit.postgres.database import is_refusal, is_transient
from replaykit.replay.entries import Attempt, Finish, Hold, Park, Release, State, Unit, Verdict
from tests.postgres.store import NOW, Store, intent, step, timer, unit


def test_a_write_under_the_token_stands(store: Store) -> None:
    """The plain case, by both statements."""
    run = store.running()

    assert store.write(unit(run, step(1), step(2))) == {run.id: Verdict.OK}
    assert store.write_one(unit(run, step(3))) is Verdict.OK
    assert store.seqs(run.id) == [1, 2, 3]


def test_a_write_of_another_token_writes_nothing(store: Store) -> None:
    """Entries, the end and the note of a worker that lost its lease."""
    run = store.running()
    stranger = uuid.uuid4()

    for late in (
        Unit(run.id, stranger, uuid.uuid4(), [step(1)]),
        Unit(run.id, stranger, uuid.uuid4(), [step(1)], Finish(State.SUCCEEDED, "1")),
        Unit(run.id, stranger, uuid.uuid4(), [], Park("timer", None, 0)),
        Unit(run.id, stranger, uuid.uuid4(), note="diverged"),
    ):
        assert store.write(late) == {run.id: Verdict.FENCED}
    assert store.write_one(Unit(run.id, stranger, uuid.uuid4(), [step(1)])) is Verdict.FENCED
    assert store.seqs(run.id) == []
    assert store.row(run.id, "state, reason, lease_token") == ("running", None, run.token)


def test_a_try_shares_the_fate_of_its_unit(store: Store) -> None:
    """A worker that lost its lease, or whose entries do not stand, has tried nothing."""
    run, tried = store.running(), Attempt("s1", 1, NOW, NOW, NOW, 1, NOW, error="{}")
    store.write(unit(run, step(1)))
    store.raise_wakes(run.id)

    for written, verdict in (
        (Unit(run.id, uuid.uuid4(), uuid.uuid4(), attempts=[tried]), Verdict.FENCED),
        (unit(run, step(1), attempts=[tried]), Verdict.CONFLICT),
        (unit(run, timer(2), attempts=[tried], wakes=0), Verdict.STALE),
    ):
        assert store.write(written) == {run.id: verdict}
        assert store.admin.execute("select from attempts").fetchall() == []


@pytest.mark.parametrize("one", [True, False])
def test_a_writer_that_meets_a_takeover_in_flight_waits_and_is_fenced(store: Store, one: bool) -> None:
    """The takeover has not committed when the old owner writes; after its commit nothing of the old owner stands."""
    run = store.running()
    takeover = store.transaction()
    takeover.run(runs.renew_token(run.id, run.token, uuid.uuid4()))
    old = store.connect()
    late = unit(run, step(1))

    bound = journal.write_entry(late) if one else journal.write_units([late])
    writing = store.in_thread(lambda: old.run(*bound))
    store.wait_blocked(old.backend_pid)
    takeover.commit()

    assert journal.parse_verdicts(writing.result()) == ({} if one else {run.id: Verdict.FENCED})
    assert store.seqs(run.id) == []


@pytest.mark.parametrize("one", [True, False])
def test_a_writer_that_meets_a_takeover_rolled_back_writes(store: Store, one: bool) -> None:
    """Waiting for a lock is no reason to lose the lease."""
    run = store.running()
    takeover = store.transaction()
    takeover.run(leases.release_worker(store.worker, recovered=True))
    old = store.connect()
    written = unit(run, step(1))

    bound = journal.write_entry(written) if one else journal.write_units([written])
    writing = store.in_thread(lambda: old.run(*bound))
    store.wait_blocked(old.backend_pid)
    takeover.rollback()

    assert journal.parse_verdicts(writing.result()) == {run.id: Verdict.OK}
    assert store.seqs(run.id) == [1]


def test_a_takeover_that_meets_a_writer_in_flight_waits_and_the_next_owner_sees_its_row(store: Store) -> None:
    """Whoever releases the run waits for the write; the claim after it reads the row."""
    run = store.running()
    writer = store.transaction()
    writer.run(journal.write_units([unit(run, step(1))]))
    parent = store.connect()

    releasing = store.in_thread(lambda: parent.run(*leases.release_worker(store.worker, recovered=True)))
    store.wait_blocked(parent.backend_pid)
    writer.commit()

    assert leases.parse_released(releasing.result()).runs == 1
    (again,) = store.claim(worker=store.register())
    assert [e.seq for e in again.entries] == [1]
    assert again.recoveries == 1


def test_a_sweep_passes_by_a_writer_in_flight_and_takes_the_run_next_time(store: Store) -> None:
    """The reaper never blocks; the worker's row is marked, so the next sweep knows."""
    run = store.running()
    store.expire(store.worker)
    writer = store.transaction()
    writer.run(journal.write_units([unit(run, step(1))]))

    first = leases.parse_reaped(store.run(leases.reap_expired()))
    writer.commit()
    second = leases.parse_reaped(store.run(leases.reap_expired()))

    assert (first.workers, first.runs, second.workers, second.runs) == (1, 0, 0, 1)
    assert store.write(unit(run, step(2))) == {run.id: Verdict.FENCED}


def test_a_new_token_fences_a_late_attempt_of_the_old_one(store: Store) -> None:
    """A write may still lie in a socket buffer when its worker gives it up: after the renewal it finds no lease."""
    run = store.running()
    late = unit(run, step(1))

    assert store.run(runs.renew_token(run.id, run.token, uuid.uuid4())) == [(0,)]

    assert store.write(late) == {run.id: Verdict.FENCED}
    assert store.write_one(late) is Verdict.FENCED


def test_a_renewal_waits_for_the_attempt_in_flight(store: Store) -> None:
    """So that the journal read after it is the journal."""
    run = store.running()
    attempt = store.transaction()
    attempt.run(journal.write_units([unit(run, step(1))]))
    owner = store.connect()
    token = uuid.uuid4()

    renewing = store.in_thread(lambda: owner.run(*runs.renew_token(run.id, run.token, token)))
    store.wait_blocked(owner.backend_pid)
    attempt.commit()

    assert renewing.result() == [(0,)]
    page = journal.parse_page(store.run(journal.read_journal(run.id, token, 0)))
    assert page is not None
    assert [e.seq for e in page] == [1]
    assert journal.parse_page(store.run(journal.read_journal(run.id, run.token, 0))) is None


def test_each_run_of_a_batch_gets_a_verdict_of_its_own(store: Store) -> None:
    """A good unit, a fenced one, a stale one and a conflict in one statement; only the good one leaves a trace."""
    for _ in range(4):
        store.start()
    good, fenced, stale, conflict = store.claim()
    store.write(unit(conflict, step(1)))

    verdicts = store.write(
        unit(good, step(1), step(2), change=Finish(State.SUCCEEDED, '"done"')),
        Unit(fenced.id, uuid.uuid4(), uuid.uuid4(), [step(1)], Finish(State.SUCCEEDED, "1")),
        unit(stale, step(1), change=Finish(State.SUCCEEDED, "1"), wakes=7),
        unit(conflict, step(1), change=Finish(State.SUCCEEDED, "1")),
    )

    assert verdicts == {
        good.id: Verdict.OK,
        fenced.id: Verdict.FENCED,
        stale.id: Verdict.STALE,
        conflict.id: Verdict.CONFLICT,
    }
    assert [store.seqs(r.id) for r in (good, fenced, stale, conflict)] == [[1, 2], [], [], [1]]
    states = [store.row(r.id, "state")[0] for r in (good, fenced, stale, conflict)]
    assert states == ["succeeded", "running", "running", "running"]


def test_a_unit_of_which_a_part_stands_is_refused_whole(store: Store) -> None:
    """Two writes of our own under one token, overlapping: our defect, and no half of a unit may stand."""
    run, neighbour = store.running(), store.running()
    store.write(unit(run, step(1), step(2)))

    with pytest.raises(psycopg.DataError, match="1 of 2 entries went in") as caught:
        store.write(unit(neighbour, step(1)), unit(run, step(2), step(3)))

    assert is_refusal(caught.value)
    assert (store.seqs(run.id), store.seqs(neighbour.id)) == ([1, 2], [])


def test_two_batches_that_share_runs_lock_them_in_one_order(store: Store) -> None:
    """However their units are ordered: no deadlock."""
    for _ in range(2):
        store.start()
    a, b = store.claim()
    first = store.transaction()
    first.run(journal.write_units([unit(a, step(1))]))
    low, high = sorted((a, b), key=lambda r: r.id)
    one, two = store.connect(), store.connect()

    writing = [
        store.in_thread(lambda c=c, order=order: c.run(*journal.write_units(order)))  # type: ignore[misc]
        for c, order in (
            (one, [unit(high, step(5)), unit(low, step(5))]),
            (two, [unit(low, step(6)), unit(high, step(6))]),
        )
    ]
    first.commit()

    for done in writing:
        assert set(journal.parse_verdicts(done.result()).values()) == {Verdict.OK}


def test_a_row_that_someone_outside_locks_costs_a_batch_its_lock_timeout_and_not_its_rows(store: Store) -> None:
    """An operator's open transaction: the batch fails as transient, and each unit can go alone."""
    for _ in range(2):
        store.start()
    free, locked = store.claim()
    operator = store.transaction()
    operator.execute("update {schema}.runs set priority = 5 where id = %s", locked.id)
    store.admin.execute("select 1")
    impatient = store.connect()
    impatient._raw.execute("set lock_timeout = '50ms'")
    units = [unit(free, step(1)), unit(locked, step(1))]

    with pytest.raises(psycopg.errors.LockNotAvailable) as caught:
        impatient.run(*journal.write_units(units))

    assert is_transient(caught.value)
    assert not is_refusal(caught.value)
    assert store.write(units[0]) == {free.id: Verdict.OK}
    operator.commit()
    assert store.write(units[1]) == {locked.id: Verdict.OK}


def test_entries_carry_the_worker_that_holds_the_run(store: Store) -> None:
    """`journal.worker` comes from the locked row, not from what the writer says of itself."""
    run = store.running()
    store.write(unit(run, step(1)))
    store.write_one(unit(run, step(2)))

    assert store.admin.execute("select distinct worker from journal").fetchall() == [(store.worker,)]


def test_an_end_is_written_with_its_entries(store: Store) -> None:
    """State, time, result, and the lease given back, in the statement of the last entry."""
    run = store.running()

    store.write(unit(run, step(1), change=Finish(State.FAILED, error='{"type": "ValueError"}')))

    assert store.row(run.id, "state, finished_at is not null, lease_token, worker") == ("failed", True, None, None)
    result = runs.parse_results(store.run(runs.run_results([run.id])))[run.id]
    assert (result.state, result.output, result.error) == (State.FAILED, None, '{"type": "ValueError"}')


def test_an_ended_run_takes_no_more(store: Store) -> None:
    """The first end wins; the lease is gone with it."""
    run = store.running()
    store.write(unit(run, change=Finish(State.SUCCEEDED, "1")))

    for late in (unit(run, step(1)), unit(run, change=Finish(State.FAILED, error="2")), unit(run, change=Release())):
        assert store.write(late) == {run.id: Verdict.FENCED}
    assert store.row(run.id, "state") == ("succeeded",)


def test_a_released_run_is_claimed_again_without_a_recovery(store: Store) -> None:
    """A shutdown is no fault of the run."""
    run = store.running()

    assert store.write(unit(run, step(1), change=Release())) == {run.id: Verdict.OK}

    (again,) = store.claim()
    assert (again.id, again.recoveries, again.started_at, again.seed) == (run.id, 0, run.started_at, run.seed)
    assert again.token != run.token


def test_a_note_is_seen_while_the_run_still_holds_its_lease(store: Store) -> None:
    """The reason of a run that will be held is written at once; the hold comes with its last body's entry."""
    run = store.running()

    assert store.write(unit(run, step(1), note="charge: journal 3, code 4")) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, reason, lease_token") == ("running", "charge: journal 3, code 4", run.token)

    assert store.write(unit(run, step(2), change=Hold("diverged", 0))) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, reason, lease_token") == ("held", "diverged", None)


def test_a_run_can_be_held_at_once_under_its_token_only(store: Store) -> None:
    """Whatever the reason quotes."""
    run = store.running()

    assert store.run(runs.hold_run(run.id, uuid.uuid4(), "no")) == []
    assert store.run(runs.hold_run(run.id, run.token, "a\0b \ud800 ü")) == [(run.id,)]
    assert store.row(run.id, "state, reason, worker") == ("held", "a\\u0000b \\ud800 ü", None)


def test_a_run_that_others_have_written_to_meanwhile_is_not_held_but_looked_at(store: Store) -> None:
    """They may have asked it to end."""
    run = store.running()
    store.raise_wakes(run.id)

    assert store.run(runs.hold_run(run.id, run.token, "no", run.wakes)) == [(run.id,)]
    assert store.row(run.id, "state, reason, worker, lease_token") == ("pending", None, None, None)


def test_a_token_is_renewed_and_a_run_cancelled_by_its_holder_alone(store: Store) -> None:
    """The renewal may be sent twice: its answer may have been lost."""
    run, stranger, fresh = store.running(), uuid.uuid4(), uuid.uuid4()
    store.write(unit(run, intents=[intent()]))

    assert store.run(runs.renew_token(run.id, stranger, fresh)) == []
    assert store.run(runs.cancel_run(run.id, stranger)) == []
    assert store.row(run.id, "state, lease_token") == ("running", run.token)
    assert store.intents(run.id) == [("charge", 1, "open")]
    for _ in range(2):
        assert store.run(runs.renew_token(run.id, run.token, fresh)) == [(run.wakes,)]
    assert store.run(runs.cancel_run(run.id, run.token)) == []
    assert store.run(runs.cancel_run(run.id, fresh)) == [(run.id,)]
    assert store.row(run.id, "state, lease_token") == ("cancelled", None)


def test_a_reason_that_quotes_what_postgres_does_not_store_is_readable(store: Store) -> None:
    """It may hold anything that a run was given: told while the run still has its lease, and when it is held."""
    run = store.running()

    assert store.write(unit(run, note="a\0b \ud800 ü")) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, reason") == ("running", "a\\u0000b \\ud800 ü")
    assert store.write(unit(run, change=Hold("c\0d \udc00 é", 0))) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, reason") == ("held", "c\\u0000d \\udc00 é")

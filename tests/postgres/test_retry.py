"""A retried write recognises its own: the acknowledgement was lost, the commit was not."""

from __future__ import annotations

import uuid

import pytest

from replaykit.postgres import journal, runs
from replaykit.replay.entries import Finish, Hold, Park, Release, State, Unit, Verdict
from tests.postgres.store import NOW, Store, step, timer, unit


def test_a_retried_unit_of_entries_recognises_its_own(store: Store) -> None:
    """It comes back as a conflict, and the second statement says that it stands."""
    run = store.running()
    written = unit(run, step(1), step(2))
    store.write(written)

    assert store.write(written) == {run.id: Verdict.CONFLICT}
    assert store.stands(written) == {run.id}


def test_a_retried_single_entry_recognises_its_own(store: Store) -> None:
    """The same by the one-row statement, and across the two."""
    run = store.running()
    written = unit(run, step(1))
    store.write_one(written)

    assert store.write_one(written) is Verdict.CONFLICT
    assert store.write(written) == {run.id: Verdict.CONFLICT}
    assert store.stands(written) == {run.id}


@pytest.mark.parametrize(
    "change",
    [Finish(State.SUCCEEDED, "1"), Finish(State.FAILED, error="{}"), Park("timer", NOW, 0), Hold("x", 0), Release()],
)
@pytest.mark.parametrize("entries", [0, 2])
def test_a_retried_change_recognises_its_own(store: Store, change: Finish, entries: int) -> None:
    """The lease went with the first try and the retry is fenced: a lost acknowledgement is not a lost lease."""
    run = store.running()
    written = unit(run, *[step(i + 1) for i in range(entries)], change=change)
    store.write(written)

    assert store.write(written) == {run.id: Verdict.FENCED}
    assert store.stands(written) == {run.id}


def test_a_retried_timer_recognises_its_own_although_the_mailbox_has_moved(store: Store) -> None:
    """STALE, too, is provisional."""
    run = store.running()
    written = unit(run, timer(1), wakes=0)
    store.write(written)
    store.raise_wakes(run.id)

    assert store.write(written) == {run.id: Verdict.STALE}
    assert store.stands(written) == {run.id}


@pytest.mark.parametrize("one", [True, False])
def test_a_retry_that_races_its_own_first_attempt_recognises_it(store: Store, one: bool) -> None:
    """The socket was dropped, the backend lives: the retry waits for its commit and is judged by an old snapshot."""
    run = store.running()
    written = unit(run, step(1))
    bound = journal.write_entry(written) if one else journal.write_units([written])
    first = store.transaction()
    assert first.run(bound) == [(run.id, "ok")]
    second = store.connect()

    retrying = store.in_thread(lambda: second.run(*bound))
    store.wait_blocked(second.backend_pid)
    first.commit()

    assert journal.parse_verdicts(retrying.result()) == ({} if one else {run.id: Verdict.CONFLICT})
    assert journal.parse_recheck(second.run(*journal.recheck([written]))) == {run.id}
    assert store.seqs(run.id) == [1]


def test_a_retry_of_an_end_that_races_its_own_first_attempt_recognises_it(store: Store) -> None:
    """The same with a change: the token is gone when the lock comes."""
    run = store.running()
    written = unit(run, step(1), change=Finish(State.SUCCEEDED, "1"))
    first = store.transaction()
    first.run(journal.write_units([written]))
    second = store.connect()

    retrying = store.in_thread(lambda: second.run(*journal.write_units([written])))
    store.wait_blocked(second.backend_pid)
    first.commit()

    assert journal.parse_verdicts(retrying.result()) == {run.id: Verdict.FENCED}
    assert journal.parse_recheck(second.run(*journal.recheck([written]))) == {run.id}


def test_a_retry_whose_first_attempt_is_rolled_back_writes(store: Store) -> None:
    """Nothing was lost but the connection."""
    run = store.running()
    written = unit(run, step(1))
    first = store.transaction()
    first.run(journal.write_units([written]))
    second = store.connect()

    retrying = store.in_thread(lambda: second.run(*journal.write_units([written])))
    store.wait_blocked(second.backend_pid)
    first.rollback()

    assert journal.parse_verdicts(retrying.result()) == {run.id: Verdict.OK}
    assert store.seqs(run.id) == [1]


def test_a_first_attempt_that_arrives_after_its_retry_changes_nothing(store: Store) -> None:
    """A proxy may deliver late: the second copy of a unit finds its rows, or no lease."""
    run = store.running()
    written = unit(run, step(1), change=Park("timer", None, 0))
    store.write(written)
    before = store.row(run.id, "runs.*::text")

    assert store.write(written) == {run.id: Verdict.FENCED}
    assert store.row(run.id, "runs.*::text") == before
    assert store.seqs(run.id) == [1]


def test_another_write_at_that_seq_is_a_conflict(store: Store) -> None:
    """Under our own token, another write_id: a defect of ours, and the second statement says so."""
    run = store.running()
    store.write(unit(run, step(1)))
    other = unit(run, step(1))

    assert store.write(other) == {run.id: Verdict.CONFLICT}
    assert store.stands(other) == set()


def test_a_fenced_unit_that_never_stood_does_not_stand(store: Store) -> None:
    """Nor does one whose run ended by another write."""
    run = store.running()
    store.write(unit(run, step(1), change=Finish(State.SUCCEEDED, "1")))

    assert (
        store.stands(
            unit(run, step(1)),
        )
        == set()
    )
    assert store.stands(unit(run, change=Finish(State.SUCCEEDED, "1"))) == set()
    assert store.stands(Unit(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), change=Release())) == set()


def test_a_retried_start_finds_its_own_run_and_made_it(store: Store) -> None:
    """Ids are made before the first sending."""
    from replaykit.runtime.ids import new_id

    rows = [runs.StartRow(new_id(), "wf", "{}", key="order-1"), runs.StartRow(new_id(), "wf", "{}")]
    first = runs.parse_started(store.connection.run_all(runs.start_runs(rows)))
    again = runs.parse_started(store.connection.run_all(runs.start_runs(rows)))

    assert first == again
    assert all(started.created for started in again.values())
    assert store.admin.execute("select count(*) from runs").fetchone() == (2,)


def test_a_retried_claim_hands_over_what_its_first_try_took(store: Store) -> None:
    """The same token: no run is left under a lease that nobody knows of."""
    run_id = store.start()
    token = uuid.uuid4()
    bounds = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token)
    store.connection.run_all(bounds)

    again = runs.parse_claim(store.connection.run_all(bounds), token)

    assert [r.id for r in again] == [run_id]

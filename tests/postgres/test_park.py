"""Parking and holding against wakes, in either order, and timers that a message overtakes: no wake-up is lost."""

from __future__ import annotations

import pytest

from replaykit.postgres import journal
from replaykit.replay.entries import Change, Hold, Park, Unit, Verdict
from tests.postgres.store import NOW, Store, step, timer, unit

FAR = NOW + 365 * 86_400_000_000

SEND = """
insert into {schema}.mailbox (run_id, kind, name, body, raised) values (%s, 'signal', 'go', '1', true)
"""

RAISE = """
update {schema}.runs set wakes = wakes + 1, state = case when state = 'waiting' then 'pending' else state end,
    waiting_for = null, available_at = case when state = 'waiting' then now() else available_at end
where id = %s
"""


def test_a_parked_run_waits_and_says_for_what_until_when(store: Store) -> None:
    """No worker, no lease; the view tells people."""
    run = store.running()

    assert store.write(unit(run, step(1), change=Park("timer", FAR, 0))) == {run.id: Verdict.OK}

    assert store.row(run.id, "state, waiting_for, lease_token, worker") == ("waiting", "timer", None, None)
    (line,) = store.admin.execute(
        "select run_id, waiting_for, extract(epoch from until) * 1000000 from waiting"
    ).fetchall()
    assert line == (run.id, "timer", FAR)


@pytest.mark.parametrize("until", [None, 10**18])
def test_a_park_without_end_is_until_something_comes(store: Store, until: int | None) -> None:
    """Also one beyond the calendar."""
    run = store.running()

    store.write(unit(run, change=Park("signal", until, 0)))

    assert store.row(run.id, "state, available_at = 'infinity'") == ("waiting", True)
    assert store.admin.execute("select until from waiting").fetchone() == (None,)


def test_a_park_whose_time_has_come_is_pending_at_once(store: Store) -> None:
    """One turn of promotion less; the due time is kept: the run's clock is never below it."""
    run = store.running()

    store.write(unit(run, change=Park("timer", 1_000_000, 0)))

    assert store.row(run.id, "state, waiting_for") == ("pending", None)
    (again,) = store.claim()
    assert (again.id, again.floor) == (run.id, 1_000_000)


@pytest.mark.parametrize("change", [Park("signal", None, 0), Park("timer", FAR, 0), Hold("needs a person", 0)])
def test_a_wake_before_the_park_makes_the_run_pending(store: Store, change: Change) -> None:
    """What came after the executor's last look is looked at by the next owner."""
    run = store.running()
    store.raise_wakes(run.id)

    assert store.write(unit(run, change=change)) == {run.id: Verdict.OK}

    assert store.row(run.id, "state, waiting_for, reason, available_at <= now()") == ("pending", None, None, True)


@pytest.mark.parametrize("change", [Park("signal", None, 0), Hold("needs a person", 0)])
def test_a_wake_in_flight_when_the_run_parks_is_not_lost(store: Store, change: Change) -> None:
    """The sender holds the row: the park waits, and sees what the sender left."""
    run = store.running()
    sender = store.transaction()
    sender.execute(SEND, run.id)
    sender.execute(RAISE, run.id)
    owner = store.connect()

    parking = store.in_thread(lambda: owner.run(*journal.write_units([unit(run, step(1), change=change)])))
    store.wait_blocked(owner.backend_pid)
    sender.commit()

    assert journal.parse_verdicts(parking.result()) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, lease_token") == ("pending", None)


def test_a_park_in_flight_when_a_wake_comes_is_woken(store: Store) -> None:
    """The sender waits for the park, and finds the run waiting."""
    run = store.running()
    owner = store.transaction()
    owner.run(journal.write_units([unit(run, change=Park("signal", None, 0))]))
    sender = store.transaction()

    def send() -> None:
        sender.execute(RAISE, run.id)
        sender.commit()

    sending = store.in_thread(send)
    store.wait_blocked(sender.pid)
    owner.commit()
    sending.result()

    assert store.row(run.id, "state, wakes") == ("pending", 1)


@pytest.mark.parametrize("one", [True, False])
def test_a_timer_that_a_message_overtook_is_refused_as_stale(store: Store, one: bool) -> None:
    """The mailbox moved after the executor made the entry: it must read and decide again."""
    run = store.running()
    late = unit(run, timer(1), wakes=0)
    store.raise_wakes(run.id)

    verdict = store.write_one(late) if one else store.write(late)[run.id]

    assert verdict is Verdict.STALE
    assert store.seqs(run.id) == []
    fresh = unit(run, timer(1), wakes=1)
    assert (store.write_one(fresh) if one else store.write(fresh)[run.id]) is Verdict.OK


@pytest.mark.parametrize("one", [True, False])
def test_a_timer_that_meets_a_message_in_flight_is_stale(store: Store, one: bool) -> None:
    """The message was acknowledged first: the timer must not beat it."""
    run = store.running()
    sender = store.transaction()
    sender.execute(SEND, run.id)
    sender.execute(RAISE, run.id)
    owner = store.connect()
    late = unit(run, timer(1), wakes=0)
    bound = journal.write_entry(late) if one else journal.write_units([late])

    writing = store.in_thread(lambda: owner.run(*bound))
    store.wait_blocked(owner.backend_pid)
    sender.commit()

    assert journal.parse_verdicts(writing.result()) == ({} if one else {run.id: Verdict.STALE})


def test_a_stale_unit_leaves_no_change_either(store: Store) -> None:
    """Entries and park stand or fall together."""
    run = store.running()
    store.raise_wakes(run.id)

    assert store.write(unit(run, timer(1), change=Park("timer", FAR, 0), wakes=0)) == {run.id: Verdict.STALE}
    assert store.row(run.id, "state, lease_token") == ("running", run.token)


def test_a_step_does_not_care_for_the_mailbox(store: Store) -> None:
    """Only timers race messages."""
    run = store.running()
    store.raise_wakes(run.id)

    assert store.write(Unit(run.id, run.token, unit(run).write_id, [step(1)])) == {run.id: Verdict.OK}

"""What a worker knows of its own lease: the pure part of the heartbeat, on times that the tests make up."""

from __future__ import annotations

from replaykit.runtime.heartbeat import Lease


def beats(lease: Lease, first: float, last: float, period: float = 6.0) -> None:
    """Successful requests, one a period."""
    at = first
    while at <= last:
        lease.renewed(at)
        at += period


def test_a_lease_is_trusted_from_the_moment_the_request_was_sent() -> None:
    """Its answer may have been long on its way; the last part is not trusted at all."""
    lease = Lease(30.0, 6.0)

    lease.renewed(100.0)

    assert lease.valid(127.9)
    assert not lease.valid(128.0)


def test_a_lease_not_yet_taken_is_not_valid() -> None:
    """Before the first answer nothing may begin."""
    assert not Lease(30.0, 6.0).valid(0.0)


def test_a_failed_request_leaves_the_lease_as_it_was() -> None:
    """The database still has the old end of it."""
    lease = Lease(30.0, 6.0)
    lease.renewed(100.0)

    lease.broken()

    assert lease.valid(120.0)


def test_a_lost_lease_is_invalid_at_once() -> None:
    """Someone else has the runs."""
    lease = Lease(30.0, 6.0)
    lease.renewed(100.0)

    lease.lost()

    assert not lease.valid(100.1)


def test_a_worker_may_reap_after_one_whole_lease_of_heartbeats() -> None:
    """Then the database was there long enough for everyone else to say a word."""
    lease = Lease(30.0, 6.0)
    beats(lease, 0.0, 24.0)

    assert not lease.may_reap(29.9)
    beats(lease, 30.0, 30.0)
    assert lease.may_reap(30.0)


def test_a_failed_heartbeat_takes_the_permission_for_one_lease() -> None:
    """Others may have lost theirs for the same reason."""
    lease = Lease(30.0, 6.0)
    beats(lease, 0.0, 60.0)
    lease.broken()

    assert not lease.may_reap(61.0)
    beats(lease, 62.0, 86.0)
    assert not lease.may_reap(91.9)
    beats(lease, 92.0, 92.0)
    assert lease.may_reap(92.0)


def test_a_silence_between_two_heartbeats_takes_the_permission_too() -> None:
    """A stopped process, or a stuck loop, has not seen what happened to the database meanwhile."""
    lease = Lease(30.0, 6.0)
    beats(lease, 0.0, 60.0)

    lease.renewed(76.0)

    assert not lease.may_reap(76.0)


def test_a_worker_that_has_just_been_continued_may_not_reap() -> None:
    """Its last heartbeat is too long ago to know anything."""
    lease = Lease(30.0, 6.0)
    beats(lease, 0.0, 60.0)

    assert lease.may_reap(61.0)
    assert not lease.may_reap(90.0)

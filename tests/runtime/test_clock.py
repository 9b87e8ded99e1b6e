"""The database's clock, kept locally: never ahead, never back."""

from __future__ import annotations

import time

import pytest

from replaykit.runtime.clock import DatabaseClock, lease_clock


def test_the_estimate_never_runs_ahead_of_the_database() -> None:
    """Local time is added since the arrival of an answer that was older than that."""
    for database_us in range(1_000_000_000, 1_000_001_000):
        clock = DatabaseClock()
        received = time.monotonic()
        clock.observe(database_us, received)
        read = clock.now()

        assert read <= database_us + (time.monotonic() - received) * 1_000_000


def test_the_estimate_advances_with_local_time() -> None:
    """Between two answers it is as old as the way from the database."""
    clock = DatabaseClock()

    clock.observe(5_000_000, time.monotonic() - 2)

    assert clock.now() >= 7_000_000 - 2


def test_the_estimate_never_goes_back() -> None:
    """A slow answer, or a server whose clock was set back, stops it until time has caught up."""
    clock = DatabaseClock()
    clock.observe(9_000_000, time.monotonic())
    before = clock.now()

    clock.observe(1_000_000, time.monotonic())

    assert clock.now() >= before


def test_without_an_answer_there_is_no_time() -> None:
    """A guess by the local wall clock would be written into journals."""
    with pytest.raises(RuntimeError, match="not known yet"):
        DatabaseClock().now()


def test_the_lease_clock_runs() -> None:
    """It is used for differences only."""
    assert lease_clock() <= lease_clock()

"""Database time without a round trip: what the database said last, plus the local monotonic clock since."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["DatabaseClock", "lease_clock"]


class DatabaseClock:
    """An estimate of the database's clock that never goes back and never runs ahead (DESIGN 4, Time).

    An answer is older than the moment it arrives, so adding the local time since the arrival can only fall short.
    The newest answer counts, not the largest: after a failover or a step of the server's clock the old one would lie.
    """

    def __init__(self) -> None:
        # The heartbeat thread observes, the host loop reads, several times a step: each touches one attribute at a time.
        self._offset_us: int | None = None
        self._last_us = 0

    def observe(self, database_us: int, received_monotonic: float) -> None:
        """Takes a database time in microseconds and the `time.monotonic()` at which it had arrived."""
        self._offset_us = database_us - int(received_monotonic * 1_000_000) - 1

    def now(self) -> int:
        """Microseconds since 1970 by the database's clock, or a little less."""
        offset_us = self._offset_us
        if offset_us is None:
            raise RuntimeError("the database's time is not known yet: nothing was read from it")
        now_us = int(time.monotonic() * 1_000_000) + offset_us
        if now_us > self._last_us:
            self._last_us = now_us
        return self._last_us


def lease_clock() -> float:
    """Seconds on a clock that runs on while this process, or on Linux the whole machine, is suspended.

    `time.monotonic()` stands still while a laptop sleeps; the lease in the database does not.
    """
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)

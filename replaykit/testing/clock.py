"""Virtual time: stands still until somebody moves it."""

from __future__ import annotations

import datetime as dt
from typing import Final

from typing_extensions import override

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import Moment
from replaykit.runtime.clock import DatabaseClock

__all__ = ["VirtualClock", "moment_of"]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class VirtualClock(DatabaseClock):
    """The clock of runs that execute in memory.

    Args:
        start: an aware moment; None: the real time at which it was made.

    Raises:
        ConfigurationError: a moment without a time zone.
    """

    def __init__(self, start: dt.datetime | None = None) -> None:
        super().__init__()
        if start is None:
            start = dt.datetime.now(dt.UTC)
        if not isinstance(start, dt.datetime) or start.utcoffset() is None:
            raise ConfigurationError(f"now={start!r}: a moment needs a time zone, such as datetime(..., tzinfo=UTC)")
        self._now_us = _microseconds(start)

    @override
    def now(self) -> int:
        """Microseconds since 1970."""
        return self._now_us

    def move(self, to_us: int) -> None:
        """Never back."""
        self._now_us = max(self._now_us, to_us)

    def after(self, moment: Moment) -> int:
        """Microseconds since 1970 of a moment, or of so many seconds from now on; never before now.

        Raises:
            ConfigurationError: a moment without a time zone, or what is no number of seconds.
        """
        if isinstance(moment, dt.datetime):
            if moment.utcoffset() is None:
                raise ConfigurationError(f"{moment!r}: a moment needs a time zone, such as datetime(..., tzinfo=UTC)")
            return max(self._now_us, _microseconds(moment))
        try:
            wait = moment if isinstance(moment, dt.timedelta) else dt.timedelta(seconds=moment)
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(f"{moment!r}: a time is seconds, a timedelta or an aware moment") from None
        return self._now_us + max(0, wait // dt.timedelta(microseconds=1))


def moment_of(us: int) -> dt.datetime:
    """The aware moment of microseconds since 1970."""
    return _EPOCH + dt.timedelta(microseconds=us)


def _microseconds(moment: dt.datetime) -> int:
    return (moment - _EPOCH) // dt.timedelta(microseconds=1)

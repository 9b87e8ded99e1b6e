"""`timeout=` of a step: how long a try may take, what is recorded when it takes longer, and how an async body is stopped.

A duration is for each try, from the moment its body begins. A moment is the deadline of all of them: a try that would begin
after it times out without a body.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any, Final

from replaykit.replay.outcomes import BodyOutcome, timeout_outcome
from replaykit.replay.requests import CallStep

__all__ = ["TimeIsUp", "microseconds", "seconds_left", "timed_out", "until"]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SECONDS_MAX: Final = 1e9  # what every event loop's clock holds
_MICROSECOND: Final = dt.timedelta(microseconds=1)


class TimeIsUp(Exception):
    """A body was cancelled because its own `timeout=` ran out. A body that raises TimeoutError itself has an error."""


def microseconds(moment: dt.datetime) -> int:
    """Since 1970, of an aware moment."""
    return (moment - _EPOCH) // _MICROSECOND


def seconds_left(timeout: float | dt.timedelta | dt.datetime, now: int) -> float:
    """Of a body that begins now (microseconds); zero or less: it has none."""
    if isinstance(timeout, dt.datetime):
        return (microseconds(timeout) - now) / 1_000_000
    seconds = timeout.total_seconds() if isinstance(timeout, dt.timedelta) else float(timeout)
    return min(seconds, _SECONDS_MAX)


def timed_out(call: CallStep, attempt: int, started_at: int) -> BodyOutcome:
    """What is recorded of a try whose time ran out; its error is the builtin TimeoutError."""
    timeout = call.timeout
    assert timeout is not None
    limit = timeout if isinstance(timeout, dt.datetime) else seconds_left(timeout, 0)
    return timeout_outcome(call, attempt, limit, started_at)


async def until(deadline: float, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await a body until a deadline on the event loop's clock, as `asyncio.timeout` does: at the deadline it is cancelled, and
    what it makes of that (a result, an error of its own) still counts.

    Raises:
        TimeIsUp: it was cancelled by the deadline.
    """
    try:
        async with asyncio.timeout_at(deadline):
            try:
                return await function(*args, **kwargs)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                failed = error  # past the scope: it could not tell the body's TimeoutError from its own
    except TimeoutError:
        raise TimeIsUp from None
    try:
        raise failed
    finally:
        del failed  # else it and this frame would hold each other

"""A person's verbs on a run, over a client's line: sent, waited for, refused in a sentence."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from replaykit.errors import ConfigurationError, DatabaseUnreachable
from replaykit.limits import CLIENT_RETRY_SECONDS
from replaykit.postgres.database import is_lock_timeout
from replaykit.postgres.mailbox import parse_state, refusal
from replaykit.postgres.schema import Bound
from replaykit.replay.entries import State
from replaykit.runtime.line import Line

__all__ = ["ask", "checked_accept", "checked_by", "checked_comment", "checked_key"]

_LOCKED_PAUSE_SECONDS: Final = 0.1


async def ask(line: Line, bound: Bound) -> State:
    """The run's state after a request of `replaykit.postgres.mailbox`.

    A transaction that somebody leaves open on the run keeps this request waiting, and no other question of the client.

    Raises:
        RunNotFound: no run has that id.
        NotRetryable: the run is in a state in which it cannot be retried.
        NotResolvable: the call is not in doubt, or has another word already.
        DatabaseUnreachable: no connection, or the run's row was locked for `CLIENT_RETRY_SECONDS`.
    """
    give_up_at = time.monotonic() + CLIENT_RETRY_SECONDS
    while True:
        try:
            (rows,) = await line.run_all([bound], through_locks=False)
            return parse_state(rows)
        except Exception as error:
            refused = refusal(error)
            if refused is not None:
                raise refused from None
            if not is_lock_timeout(error):
                raise
            if time.monotonic() > give_up_at:
                run_id = bound[1]["run_id"]
                raise DatabaseUnreachable(f"run {run_id} is locked by another transaction: ask again later") from error
        await asyncio.sleep(_LOCKED_PAUSE_SECONDS)


def checked_by(by: str | None) -> str | None:
    """Who asks, as Postgres takes it.

    Raises:
        ConfigurationError: no text, or one with NUL or a lone surrogate.
    """
    return None if by is None else _checked("by", by, "who asks is text without NUL")


def checked_comment(comment: str | None) -> str | None:
    """The same of why somebody says so."""
    return None if comment is None else _checked("comment", comment, "a comment is text without NUL")


def checked_key(key: str) -> str:
    """The same of a step's key."""
    return _checked("key", key, "a step's key is text without NUL, such as 'charge#2'")


def _checked(what: str, value: str, way_out: str) -> str:
    if not _is_text(value):
        raise ConfigurationError(f"{what}={value!r}: {way_out}")
    return value


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False


def checked_accept(accept: str | None) -> str | None:
    """What a retry may accept.

    Raises:
        ConfigurationError: something else.
    """
    if accept is not None and accept != "inputs":
        raise ConfigurationError(f"accept={accept!r}: it is 'inputs', or left out")
    return accept

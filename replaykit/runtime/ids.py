"""Ids: of runs (UUIDv7, made by the client so that a start that is sent twice is recognised as one) and of writes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from uuid import UUID, SafeUUID

__all__ = ["new_id", "uuid7", "write_ids"]


def uuid7(unix_us: int, random_bits: int) -> UUID:
    """A UUIDv7 (RFC 9562) of a moment and of chance: equal arguments, equal id.

    The 12 bits after the milliseconds hold the fraction of the millisecond (method 3 of the RFC), so that ids of one
    process sort by time within a millisecond too and land at the right end of the primary key.

    Args:
        unix_us: microseconds since 1970 UTC, at least 0.
        random_bits: its lowest 62 bits are used.
    """
    ms, us = divmod(unix_us, 1000)
    fraction = us * 4096 // 1000
    high = (ms & 0xFFFF_FFFF_FFFF) << 16 | 0x7000 | fraction
    low = 0b10 << 62 | random_bits & (1 << 62) - 1
    return UUID(int=high << 64 | low)


def write_ids() -> Callable[[], UUID]:
    """A maker of ids for writes: 64 bits of chance for this process, then a count. A fourth of the cost of `uuid4`, of
    which each unit would need one."""
    process = int.from_bytes(os.urandom(8)) << 64
    count = itertools.count(int.from_bytes(os.urandom(7)))
    return lambda: _uuid(process | next(count))


def _uuid(number: int) -> UUID:
    """`UUID(int=number)` without its look at the other ways to make one, which takes longer than all the rest of it."""
    made = UUID.__new__(UUID)
    object.__setattr__(made, "int", number)  # a UUID refuses to be changed
    object.__setattr__(made, "is_safe", SafeUUID.unknown)
    return made


def new_id() -> UUID:
    """A new id, now."""
    return uuid7(time.time_ns() // 1000, int.from_bytes(os.urandom(8)))

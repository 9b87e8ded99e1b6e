"""The schema revision that this release needs, a statement as a value, and how names are quoted.

A `Statement`'s text holds `{schema}` where the quoted schema's name goes and psycopg's `%(name)s` for parameters. Its
name is table-verb-guard. Everything is schema-qualified: no session needs a search_path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

__all__ = [
    "REVISION",
    "REVISIONS",
    "Bound",
    "Statement",
    "done_channel",
    "moment",
    "quote_name",
    "us",
    "work_channel",
]

REVISIONS: Final = ("0001",)
"""Every revision that `migrations/` holds, oldest first: tells a schema that is too old from one that is too new."""

REVISION: Final = REVISIONS[-1]
"""The one that this release's statements need."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation on the database, with a name for logs and tests."""

    name: str
    text: str


Bound: TypeAlias = tuple[Statement, dict[str, Any]]
"""A statement with its parameters, ready for `Connection.run`."""


def quote_name(name: str) -> str:
    """The SQL form of a schema's name, whatever characters it holds."""
    return '"' + name.replace('"', '""') + '"'


def us(expression: str) -> str:
    """SQL for a timestamptz as whole microseconds since 1970, which is how times travel in and out of here."""
    return f"(extract(epoch from {expression}) * 1000000)::bigint"


def moment(microseconds: str) -> str:
    """SQL for the timestamptz of a bigint of microseconds since 1970 (exact up to the year 2255)."""
    return f"(timestamptz 'epoch' + {microseconds} * interval '1 microsecond')"


def work_channel(schema: str) -> str:
    """Channel of the hint "there may be work to claim"."""
    return _channel("replaykit_work", schema)


def done_channel(schema: str) -> str:
    """Channel of the hint "a run may have ended"."""
    return _channel("replaykit_done", schema)


def _channel(kind: str, schema: str) -> str:
    channel = f"{kind}:{schema}"
    # Postgres refuses a channel of 64 bytes and more; LISTEN would cut it silently.
    return channel if len(channel.encode()) < 64 else f"{kind}:{hashlib.sha256(schema.encode()).hexdigest()[:32]}"

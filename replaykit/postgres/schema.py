"""The schema revision that this release needs, a statement as a value, and how names are quoted.

A `Statement`'s text holds `{schema}` where the quoted schema's name goes and psycopg's `%(name)s` for parameters. Its
name is table-verb-guard. Everything is schema-qualified: no session needs a search_path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from replaykit.errors import ConfigurationError

__all__ = [
    "REVISION",
    "REVISIONS",
    "Bound",
    "Statement",
    "check_schema",
    "done_channel",
    "moment",
    "quote_name",
    "storable",
    "us",
    "work_channel",
]

REVISIONS: Final = ("0001", "0002", "0003")
"""Every revision that `migrations/` holds, oldest first: tells a schema that is too old from one that is too new."""

REVISION: Final = REVISIONS[-1]
"""The one that this release's statements need."""


def storable(text: str) -> str:
    """Text as Postgres stores it, readable: it takes no NUL, and UTF-8 no lone surrogate. For sentences that quote anything."""
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode()


SCHEMA_BYTES_MAX: Final = 63
"""Postgres cuts a longer name silently (NAMEDATALEN)."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation on the database, with a name for logs and tests."""

    name: str
    text: str


Bound: TypeAlias = tuple[Statement, dict[str, Any]]
"""A statement with its parameters, ready for `Connection.run`."""


def check_schema(name: str) -> str:
    """Return a schema's name, or raise `ConfigurationError` saying why Postgres would refuse it or cut it."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigurationError(f"schema name {name!r}: a name is non-empty text without NUL")
    if name.startswith("pg_"):
        raise ConfigurationError(f"schema name {name!r}: Postgres keeps names that begin with pg_ for itself")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"schema name {name!r} is no text: it holds a lone surrogate") from None
    if size > SCHEMA_BYTES_MAX:
        raise ConfigurationError(f"schema name {name!r} has {size} bytes: Postgres takes at most {SCHEMA_BYTES_MAX}")
    return name


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

"""Names and keys: what a step is called, and what a call to the outside may use to be recognised.

A step key is `scope` + `name` (+ `#n` from the second call of that name in the task's scope on): `charge`, `1/charge#2`.
`key=K` is absolute in the run and stored as `=K`. Keys of other kinds begin with `~`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from uuid import UUID

from replaykit.errors import ConfigurationError
from replaykit.limits import KEY_BYTES_MAX, NAME_BYTES_MAX

__all__ = ["IdempotencyKeys", "absolute_key", "check_name", "check_observation", "idempotency_key", "key_uuid"]

_FORBIDDEN = frozenset("/#@~=\0")
_KEY = re.compile("[0-9a-f]{32}")


def check_name(name: str, of: str) -> str:
    """Return `name` in NFC, or raise `ConfigurationError` saying what is wrong with it.

    Args:
        name: of a workflow, step, signal or child.
        of: what it names, for the sentence: `"step"`, `"workflow"`.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{of} name {name!r}: a name is a non-empty string")
    name = unicodedata.normalize("NFC", name)
    bad = sorted(_FORBIDDEN.intersection(name))
    if bad:
        raise ConfigurationError(
            f"{of} name {name!r} holds {bad[0]!r}: names are free of NUL and / # @ ~ =; give another with name="
        )
    size = _size(name)
    if size is None:
        raise ConfigurationError(f"{of} name {name!r} holds a lone surrogate: give another with name=")
    if size > NAME_BYTES_MAX:
        raise ConfigurationError(
            f"{of} name {name[:40]!r}... has {size} bytes: at most {NAME_BYTES_MAX}; give a shorter one with name="
        )
    return name


def _size(text: str) -> int | None:
    """Bytes of a text in UTF-8; None: it has no such form, because it holds a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def absolute_key(key: str) -> str:
    """The stored form, `=K`, of a `key=K` given by the author."""
    if not isinstance(key, str) or not key or "\0" in key:
        raise ConfigurationError(f"key={key!r}: a step's key is a non-empty string without NUL")
    key = unicodedata.normalize("NFC", key)
    size = _size(key)
    if size is None:
        raise ConfigurationError(f"key={key!r} holds a lone surrogate")
    if size >= KEY_BYTES_MAX:
        raise ConfigurationError(f"key={key[:40]!r}... has {size} bytes: at most {KEY_BYTES_MAX - 1}")
    return f"={key}"


def check_observation(kind: str, id: str, step_key: str) -> None:
    """See that `observe(kind, id)` can be stored, and found as `kind:id`.

    Args:
        kind: what the identifier names.
        id: the identifier.
        step_key: of the step that observes, for the sentence.

    Raises:
        ConfigurationError: what is wrong with which.
    """
    for what, text in (("kind", kind), ("id", id)):
        said = f"observe({kind!r}, {id!r}) in step {step_key}: the {what}"
        if not isinstance(text, str) or not text:
            way_out = (
                f"write str({id!r})" if what == "id" and text not in (None, "") else 'such as observe("ticket", "123")'
            )
            raise ConfigurationError(f"{said} is a non-empty text, {way_out}")
        if "\0" in text:
            raise ConfigurationError(f"{said} holds NUL, which Postgres does not store: leave it out")
        size = _size(text)
        if size is None:
            raise ConfigurationError(f"{said} holds a lone surrogate, which Postgres does not store")
        if size > KEY_BYTES_MAX:
            raise ConfigurationError(
                f"observe() in step {step_key}: the {what} {text[:40]!r}... has {size} bytes: at most {KEY_BYTES_MAX}"
            )
    if ":" in kind:
        raise ConfigurationError(
            f"observe({kind!r}, {id!r}) in step {step_key}: the kind holds ':', which ends it in `replaykit find kind:id`: "
            "write another, such as with '.'"
        )


class IdempotencyKeys:
    """`idempotency_key` for the steps of one run: what they share is hashed once."""

    def __init__(self, run_id: UUID) -> None:
        self._begun = hashlib.sha256(f"replaykit:1:{run_id}:".encode())

    def of(self, key: str) -> str:
        """`idempotency_key(run_id, key)`."""
        digest = self._begun.copy()
        digest.update(key.encode())
        return digest.hexdigest()[:32]


def idempotency_key(run_id: UUID, key: str) -> str:
    """32 hex digits that name one step of one run: the same on every attempt, in every process and release.

    SHA-256 of `replaykit:1:<run id>:<step key>`, the first 128 bits. A try whose input is not that of the step's first try has
    NUL and the digest of its input after the step key (`rewinds.py`): one key never has two inputs.
    """
    return IdempotencyKeys(run_id).of(key)


def key_uuid(key: str) -> UUID:
    """An idempotency key as a UUID: its 128 bits, with RFC 9562's version 8 (an algorithm of one's own) and variant set.

    Raises:
        ConfigurationError: the key is one that a test has chosen, and not 32 hex digits.
    """
    if not _KEY.fullmatch(key):
        raise ConfigurationError(
            f"idempotency_key={key!r} is no 32 hex digits, and so no UUID: choose another in testing.step(idempotency_key=...)"
        )
    return UUID(int=int(key, 16) & ~(0xF << 76) & ~(0x3 << 62) | 0x8 << 76 | 0x2 << 62)

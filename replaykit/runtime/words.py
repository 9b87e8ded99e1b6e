"""A person's word on a call in doubt: from what Python says to what the function `resolve` takes.

Whoever gives it has neither the step nor its annotation. So a value is written as the codecs of closed annotations write
it, by the classes of its parts, and the worker reads it by the step's own: what does not fit is refused there, and another
word may be given.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from replaykit.errors import ConfigurationError, InDoubt, NotJournalable, NotLanded
from replaykit.limits import Settings
from replaykit.replay.answers import Landed
from replaykit.replay.codec import codec_for, tagged
from replaykit.replay.failures import encode_error
from replaykit.replay.jsontext import check_size, compact, escape, parse, unescape
from replaykit.replay.tags import DEPTH_MAX, a, is_plain

__all__ = ["Word", "landed_json", "landed_text", "word_of"]

_PAYLOAD_BYTES_MAX: Final = Settings().payload_bytes_max

_LEAVES: Final = frozenset({type(None), bool, int, str})
_LISTS: Final = frozenset({list, tuple, collections.deque})
_SETS: Final = frozenset({set, frozenset})
_DICTS: Final = frozenset({dict, collections.OrderedDict, collections.defaultdict, collections.Counter})


@dataclass(frozen=True, slots=True)
class Word:
    """What a person says of a call in doubt.

    Attributes:
        landed: it happened; JSON text of what the step returns.
        not_landed: it did not happen.
        error: the step raises this, as `encode_error` writes it; with neither of these three it raises `InDoubt`.
        comment: why.
    """

    landed: str | None = None
    not_landed: bool = False
    error: str | None = None
    comment: str | None = None

    @property
    def said(self) -> str:
        """`landed`, `not_landed` or `fail`."""
        return "landed" if self.landed is not None else "not_landed" if self.not_landed else "fail"

    @property
    def fail(self) -> bool:
        """Nobody knows: the step fails."""
        return self.said == "fail"


def word_of(answer: Landed[Any] | BaseException, comment: str | None = None) -> Word:
    """What `Handle.resolve` was given, as it is sent.

    Args:
        answer: `Landed(value)`, `NotLanded()`, or the error that the step raises.
        comment: why; without one, what `NotLanded` says.

    Raises:
        ConfigurationError: no such answer.
        NotJournalable: the value has no JSON, or is too large.
    """
    if isinstance(answer, Landed):
        text = landed_text(answer.value)
        check_size(text, _PAYLOAD_BYTES_MAX, "the value of Landed(...)")
        return Word(landed=text, comment=comment)
    if isinstance(answer, NotLanded):
        return Word(not_landed=True, comment=comment if comment is not None else str(answer) or None)
    if isinstance(answer, InDoubt) and not answer.args:
        return Word(comment=comment)
    if isinstance(answer, BaseException):
        return Word(error=encode_error(answer), comment=comment)
    raise ConfigurationError(
        f"resolve(..., {answer!r}): a word is Landed(value), NotLanded() or the step's error, an instance"
    )


def landed_text(value: Any) -> str:
    """JSON text of a value, as a step with a closed annotation of its class would record it.

    Raises:
        NotJournalable: a part has no JSON form, or does not come back from it; with its path.
    """
    return tagged.encode(value) if is_plain(value) else escape(compact(_plain(value, "$", 0)))


def _plain(value: Any, path: str, depth: int) -> Any:
    """The value as plain JSON: containers by their members, the rest by the codec of its class."""
    kind = type(value)
    if kind in _LEAVES or (kind is float and math.isfinite(value)):
        return value
    if depth >= DEPTH_MAX:
        raise NotJournalable(f"{path}: nested more than {DEPTH_MAX} deep")
    if kind in _LISTS:
        return [_plain(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)]
    if kind in _SETS:
        return sorted((_plain(item, f"{path}{{}}", depth + 1) for item in value), key=compact)
    if kind in _DICTS:
        return _members(value.items(), path, depth)
    codec = codec_for(kind)
    if codec.__class__ is tagged.__class__:  # no annotation says it, so no step's codec would read it
        raise NotJournalable(f"{path}: {a(value)} has no JSON that a step's annotation reads: give plain JSON")
    try:
        text, _ = codec.encode_checked(value)
    except NotJournalable as error:
        raise NotJournalable(f"{path}{str(error)[1:]}") from None
    return parse(unescape(text))


def _members(items: Iterable[tuple[Any, Any]], path: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in items:
        name = _plain(key, f"{path}[...]", depth + 1)
        if type(name) is int:
            name = str(name)
        if type(name) is not str or name in found:
            why = "is there twice in JSON" if type(name) is str else "is no text in JSON"
            raise NotJournalable(f"{path}: the key {key!r} {why}")
        found[name] = _plain(item, f"{path}[{key!r}]", depth + 1)
    return found


def landed_json(text: str) -> Landed[Any] | None:
    """`Landed` of JSON that somebody wrote; None: it is none, which NaN and infinity are not either."""
    try:
        return Landed(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)

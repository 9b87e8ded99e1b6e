"""JSON text that Postgres stores as `json` and a person can read with `->>`.

That operator fails on a whole row whose text holds `\\u0000`, and a lone surrogate is refused outright. Both are
written behind U+FDD0, a code point that Unicode reserves for inner use: NUL as U+FDD0 U+FDD2, a surrogate as U+FDD0 and
its twin in the private use area, U+FDD0 itself as U+FDD0 U+FDD1. Everything else is the text as any JSON writer would
give it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pydantic_core

from replaykit.errors import NotJournalable

__all__ = [
    "INT_DIGITS_MAX",
    "check_size",
    "compact",
    "escape",
    "has_huge_int",
    "head",
    "merged",
    "parse",
    "sorted_keys",
    "unescape",
]

INT_DIGITS_MAX: Final = 4_300
"""Digits of an int that Python reads back from text, unless its limit is raised."""

_HEAD_CHARS: Final = 200  # of what a sentence quotes

_MARK: Final = "\ufdd0"
_MARKED: Final = "\ufdd0\ufdd1"
_NUL: Final = "\ufdd0\ufdd2"
_TWIN: Final = 0xE000 - 0xD800
_ODD: Final = re.compile("\\\\(?:u0000|.)|\ufdd0|[\ud800-\udfff]", re.DOTALL)
_ESCAPED: Final = re.compile("\ufdd0([\ufdd1\ufdd2\ue000-\ue7ff])")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False).encode


def escape(text: str) -> str:
    """JSON text in the form that Postgres stores and reads."""
    if "\\u0000" not in text and (text.isascii() or (_MARK not in text and not _has_surrogate(text))):
        return text
    return _ODD.sub(_escape_one, text)


def unescape(text: str) -> str:
    """The reverse of `escape`. The result may hold lone surrogates, which only Python's own JSON reader takes."""
    if text.isascii() or _MARK not in text:
        return text
    return _ESCAPED.sub(_unescape_one, text)


def compact(value: Any) -> str:
    """Text of plain JSON, not escaped yet. pydantic's writer is five times as fast; the standard one takes surrogates.

    Raises:
        ValueError: NaN, infinity or an int of more than 4,300 digits.
    """
    try:
        return pydantic_core.to_json(value, inf_nan_mode="strings").decode()
    except pydantic_core.PydanticSerializationError:
        return _encode(value)


def merged(old: str | None, new: str | None) -> str | None:
    """Two JSON objects in the form that Postgres stores, as one; of members that both have, the new one's."""
    if old is None or new is None:
        return old if new is None else new
    return json.dumps({**json.loads(old), **json.loads(new)}, ensure_ascii=False)


def head(text: str | None) -> str:
    """Recorded text as a sentence quotes it: its first characters, and how many there are."""
    if text is None:
        return "nothing"
    return text if len(text) <= _HEAD_CHARS else f"{text[:_HEAD_CHARS]}... ({len(text):,} characters)"


def parse(text: str) -> Any:
    """Plain JSON from unescaped text. Raises ValueError."""
    try:
        return pydantic_core.from_json(text)
    except (ValueError, TypeError):  # lone surrogates
        return json.loads(text)


def has_huge_int(text: str) -> bool:
    """Whether JSON text holds an int that no reader takes. Looks at one character in 4,300: a longer run has one of them."""
    for at in range(INT_DIGITS_MAX, len(text), INT_DIGITS_MAX):
        if text[at] in "0123456789":
            first, last = at, at
            while first > 0 and text[first - 1] in "0123456789":
                first -= 1
            while last + 1 < len(text) and text[last + 1] in "0123456789":
                last += 1
            if last - first >= INT_DIGITS_MAX:
                return _cannot_be_read(text)
    return False


def _cannot_be_read(text: str) -> bool:
    try:
        parse(unescape(text))
    except ValueError:
        return True
    return False  # the digits stand in a string


def sorted_keys(value: Any) -> str:
    """Text of plain JSON with the keys of each object sorted: what is digested."""
    return compact(_sort(value))


def _sort(value: Any) -> Any:
    if type(value) is dict:
        return {key: _sort(value[key]) for key in sorted(value)}
    if type(value) is list:
        return [item if type(item) is str else _sort(item) for item in value]
    return value


def _escape_one(match: re.Match[str]) -> str:
    part = match[0]
    if part == "\\u0000":
        return _NUL
    if part[0] == "\\":
        return part
    return _MARKED if part == _MARK else _MARK + chr(ord(part) + _TWIN)


def _unescape_one(match: re.Match[str]) -> str:
    code = match[1]
    if code == "\ufdd2":
        return "\\u0000"
    return _MARK if code == "\ufdd1" else chr(ord(code) - _TWIN)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def check_size(text: str, bytes_max: int, what: str) -> None:
    """Refuse a value that is too large for a journal.

    Args:
        text: its JSON text.
        bytes_max: `payload_bytes_max`.
        what: what it is, for the sentence: `"the result"`.

    Raises:
        NotJournalable: with both sizes and the way out.
    """
    if len(text) * 4 > bytes_max:
        size = len(text.encode())
        if size > bytes_max:
            raise NotJournalable(
                f"$: {what} has {size:,} bytes, at most {bytes_max:,} are journaled: "
                "store it elsewhere and pass a reference, or raise payload_bytes_max"
            )

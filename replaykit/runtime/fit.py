"""Whether a JSON value fits a JSON schema, as far as pydantic writes them: the check of a start by name.

Only what surely does not fit is refused; keywords that are not known here are passed over, for the worker that has the
workflow decides in the end. Pure.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from replaykit.replay.secrets import IN_SCHEMA, NOT_HANDED_OVER

__all__ = ["misfit"]

_DEPTH_MAX: Final = 200  # the codec's own limit; a schema that refers to itself ends here

_FORMATS: Final[dict[str, Any]] = {
    "date": dt.date,
    "date-time": dt.datetime,
    "time": dt.time,
    "duration": dt.timedelta,
    "uuid": UUID,
}

_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and float(v).is_integer(),
    "number": lambda v: (
        (isinstance(v, int | float) and not isinstance(v, bool)) or v in ("NaN", "Infinity", "-Infinity")
    ),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}

_WORDS: Final = {"null": "null", "boolean": "true or false", "integer": "an integer", "number": "a number"}
_WORDS_MORE: Final = {"string": "a string", "array": "an array", "object": "an object"}


def misfit(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str | None:
    """The first place where a value does not fit, as `.rows[3].cents: an integer is needed, not a string`; None if it fits.
    Nothing fits the place of a secret.

    Never the value itself: it may be a secret, and the sentence stands in logs.

    Args:
        value: parsed JSON.
        schema: a JSON schema.
        definitions: what its `$ref`s name; None: its own `$defs`.
    """
    found = _Check(schema.get("$defs", {}) if definitions is None else definitions).find(value, schema, "", 0)
    return None if found is None else f"{found[0]}: {found[1]}"


class _Check:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def find(self, value: Any, schema: Any, path: str, depth: int) -> tuple[str, str] | None:
        """(path, sentence) of the first misfit."""
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return (path, "nothing is allowed here") if schema is False else None
        if schema.get(IN_SCHEMA):
            return path, NOT_HANDED_OVER
        if "$ref" in schema:
            return self.find(value, self._definitions.get(str(schema["$ref"]).rpartition("/")[2]), path, depth + 1)
        if "const" in schema and value != schema["const"]:
            return path, f"{_shown(schema['const'])} is needed"
        if "enum" in schema and value not in schema["enum"]:
            return path, f"one of {', '.join(map(_shown, schema['enum']))} is needed"
        for each in schema.get("allOf", ()):
            if found := self.find(value, each, path, depth + 1):
                return found
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            return self._find_in_branches(value, branches, schema.get("discriminator"), path, depth)
        if "type" in schema and not self._is_kind(value, schema["type"]):
            return path, f"{_kind_words(schema['type'])} is needed, not {_kind(value)}"
        if isinstance(value, dict):
            return self._find_in_object(value, schema, path, depth)
        if isinstance(value, list):
            return self._find_in_array(value, schema, path, depth)
        if isinstance(value, str):
            return _find_in_string(value, schema, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _find_in_number(value, schema, path)
        return None

    def _is_kind(self, value: Any, kinds: Any) -> bool:
        return any(
            _KINDS[kind](value) if kind in _KINDS else True for kind in ([kinds] if isinstance(kinds, str) else kinds)
        )

    def _find_in_branches(
        self, value: Any, branches: Sequence[Any], tag: Any, path: str, depth: int
    ) -> tuple[str, str] | None:
        misfits = []
        for branch in branches:
            found = self.find(value, branch, path, depth + 1)
            if found is None:
                return None
            misfits.append(found)
        secret = next((found for found in misfits if found[1] == NOT_HANDED_OVER), None)
        if secret is not None:
            return secret
        # The branch that was meant got furthest: `X | None` then speaks of X.
        deepest = max(misfits, key=lambda found: len(found[0]))
        if len(deepest[0]) > len(path) or isinstance(tag, Mapping):
            return deepest
        wanted = dict.fromkeys(words.partition(" is needed")[0] for _, words in misfits)
        return path, f"{' or '.join(wanted)} is needed"

    def _find_in_object(
        self, value: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int
    ) -> tuple[str, str] | None:
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                return f"{path}.{name}", "is missing"
        extra = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        for name, item in value.items():
            below = properties.get(name)
            if below is None:
                below = next((s for pattern, s in patterns.items() if _search(pattern, name)), extra)
                if below is False:
                    return f"{path}.{name}", "is not known"
            if found := self.find(item, below, f"{path}.{name}", depth + 1):
                return found
        return _size(len(value), schema, path, "Properties", "members")

    def _find_in_array(
        self, value: list[Any], schema: Mapping[str, Any], path: str, depth: int
    ) -> tuple[str, str] | None:
        first = schema.get("prefixItems", ())
        rest = schema.get("items", True)
        for number, item in enumerate(value):
            below = first[number] if number < len(first) else rest
            if found := self.find(item, below, f"{path}[{number}]", depth + 1):
                return found
        return _size(len(value), schema, path, "Items", "items")


def _find_in_string(value: str, schema: Mapping[str, Any], path: str) -> tuple[str, str] | None:
    if "pattern" in schema and not _search(schema["pattern"], value):
        return path, f"a string that matches {schema['pattern']} is needed"
    wanted = _FORMATS.get(schema.get("format", ""))
    if wanted is not None:
        try:
            _adapter(wanted).validate_python(value)
        except ValidationError:
            return path, f"a {schema['format']} is needed"
    return _size(len(value), schema, path, "Length", "characters")


def _find_in_number(value: float, schema: Mapping[str, Any], path: str) -> tuple[str, str] | None:
    for keyword, fits, words in (
        ("minimum", value >= schema.get("minimum", -math.inf), "at least"),
        ("maximum", value <= schema.get("maximum", math.inf), "at most"),
        ("exclusiveMinimum", value > schema.get("exclusiveMinimum", -math.inf), "more than"),
        ("exclusiveMaximum", value < schema.get("exclusiveMaximum", math.inf), "less than"),
    ):
        if keyword in schema and not fits:
            return path, f"{words} {schema[keyword]} is needed"
    return None


def _size(size: int, schema: Mapping[str, Any], path: str, suffix: str, noun: str) -> tuple[str, str] | None:
    least, most = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}", math.inf)
    if size < least:
        return path, f"at least {least} {noun} are needed, not {size}"
    if size > most:
        return path, f"at most {most} {noun} are allowed, not {size}"
    return None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _search(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:  # a pattern of another dialect: the worker will say
        return True


def _kind_words(kinds: Any) -> str:
    words = {**_WORDS, **_WORDS_MORE}
    return " or ".join(words.get(kind, str(kind)) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _kind(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return "a fraction"
    return next(_kind_words(kind) for kind, fits in _KINDS.items() if fits(value))


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else _as_json(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _as_json(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, default=str)

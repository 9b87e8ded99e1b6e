"""Values to JSON text and back: lossless, or refused with the path (DESIGN 7).

The codec is chosen by the annotation, never by the value:

- a *closed* annotation (`int`, `list[Order]`, a model) goes through pydantic; the declared type wins, so an int given for
  a float comes back as that float and a member of a StrEnum declared `str` as the plain text: equal, or refused;
- an *open* one (missing, `Any`, `object`, a bare container, containers of those) goes through the tagged codec: JSON as
  it is, and what JSON has no form for as an object with one key that begins with `~`: `{"~tuple": [1, 2]}`.

Nothing is revived by import. The tagged codec finds enums, dataclasses and models among the modules that are loaded.

Text is what Postgres stores as `json` and a person reads with `->>`: NUL and lone surrogates, which make that operator
fail, are written behind U+FDD0, a code point that Unicode reserves for such inner use (`_escape`).
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import ipaddress
import json
import math
import pathlib
import re
import sys
import types
import typing
import uuid
import zoneinfo
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, Final

import pydantic
import pydantic_core
import typing_extensions
from pydantic import BaseModel, ConfigDict, TypeAdapter

from replaykit.errors import NotJournalable

__all__ = ["Codec", "class_named", "codec_for", "name_of", "remember_modules", "tagged"]

DEPTH_MAX: Final = 150
"""Levels of nesting in one value: pydantic's decoder gives up at about 200, and a tag adds a level of its own."""


class Codec:
    """The door of one annotation.

    Attributes:
        stable: the text itself is canonical: equal values have equal texts.
        exact: what encodes without an error also decodes to the very same; no comparison is owed.
    """

    stable: bool = False
    exact: bool = False

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def encode(self, value: Any) -> str:
        """Compact JSON text of `value`.

        Raises:
            NotJournalable: with the path of the part that has no form.
        """
        raise NotImplementedError

    def decode(self, text: str) -> Any:
        """A fresh value from `text`.

        Raises:
            ValueError: the text does not fit the annotation (pydantic's ValidationError is one).
        """
        raise NotImplementedError

    def encode_checked(self, value: Any) -> tuple[str, Any]:
        """`encode(value)` and its decoded twin, which equals `value`; replay will see that twin, so the first run must too.

        Raises:
            NotJournalable: the value has no form, or would come back as another.
        """
        text = self.encode(value)
        return text, self.check(value, text)

    def check(self, value: Any, text: str) -> Any:
        """Decode `text`, the encoding of `value`, and return the twin; `NotJournalable` when it is not equal to `value`."""
        try:
            twin = self.decode(text)
        except Exception as error:
            raise NotJournalable(f"$: {_type_name(value)} does not come back from its own JSON: {_sentence(error)}") from None
        if not (self.exact or self.equal(value, twin)):
            raise NotJournalable(_difference(value, twin))
        return twin

    def equal(self, value: Any, twin: Any) -> bool:
        """Whether `twin` may stand for `value`: equal, of the same class, zones included; NaN and the like by encoding."""
        if not _same_class(value, twin):
            return False
        try:
            if bool(value == twin):
                return self.stable or not _zones_differ(value, twin, 0)
        except Exception:
            return False
        try:
            return _equal_by_parts(value, twin) and self.encode(value) == self.encode(twin)
        except NotJournalable:
            return False

    def canonical(self, text: str) -> str:
        """The form of `text` that is digested: object keys sorted; sets were sorted when they were encoded."""
        if self.stable:
            return text
        return _compact(_sorted(json.loads(text)))

    def from_json(self, value: Any) -> Any:
        """A value of this annotation from plain JSON (a command line, SQL), coerced as pydantic does.

        Raises:
            pydantic.ValidationError: it does not fit.
        """
        return value

    def json_schema(self) -> dict[str, Any]:
        """JSON schema of the annotation; empty when everything fits or none can be made."""
        return {}


# --- text that Postgres can store and read ---------------------------------------------------------------------------

_MARK: Final = "\ufdd0"  # a noncharacter: no text that is meant for interchange holds it
_NUL: Final = _MARK + "\ufdd2"
_MARKED: Final = _MARK + "\ufdd1"
_SURROGATES_AT: Final = 0xE000 - 0xD800  # a lone surrogate is written as U+FDD0 and its twin in the private use area

_ODD = re.compile("\\\\(?:u0000|.)|\ufdd0|[\ud800-\udfff]", re.DOTALL)
_ESCAPED = re.compile("\ufdd0([\ufdd1\ufdd2\ue000-\ue7ff])")


def _escape(text: str) -> str:
    """JSON text without `\\u0000` and lone surrogates, which Postgres refuses to read (`->>`) or to store."""
    if text.isascii():
        if "\\u0000" not in text:
            return text
    elif "\\u0000" not in text and _MARK not in text and not _has_surrogate(text):
        return text
    return _ODD.sub(_escape_one, text)


def _escape_one(match: re.Match[str]) -> str:
    part = match[0]
    if part == "\\u0000":
        return _NUL
    if part[0] == "\\":
        return part
    return _MARKED if part == _MARK else _MARK + chr(ord(part) + _SURROGATES_AT)


def _unescape(text: str) -> str:
    """The reverse of `_escape`."""
    if text.isascii() or _MARK not in text:
        return text
    return _ESCAPED.sub(_unescape_one, text)


def _unescape_one(match: re.Match[str]) -> str:
    code = match[1]
    if code == "\ufdd2":
        return "\\u0000"
    return _MARK if code == "\ufdd1" else chr(ord(code) - _SURROGATES_AT)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_json_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _compact(value: Any) -> str:
    """Compact JSON text of plain JSON: pydantic's writer is five times the standard one, which alone takes surrogates."""
    try:
        return pydantic_core.to_json(value).decode()
    except Exception:
        return _json_encode(value)


def _parse(text: str) -> Any:
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return json.loads(text)  # lone surrogates, which pydantic's parser refuses


def _sorted(value: Any) -> Any:
    if type(value) is dict:
        return {key: _sorted(value[key]) for key in sorted(value)}
    if type(value) is list:
        return [_sorted(item) for item in value]
    return value


# --- scalars: the annotations that most steps have; pydantic's serializer costs 1 us a call, these 0.2 ----------------


class _Int(Codec):
    stable = True
    exact = True
    _load = staticmethod(TypeAdapter(int).validator.validate_json)

    def encode(self, value: Any) -> str:
        if type(value) is int:
            try:
                return repr(value)
            except ValueError:
                raise NotJournalable("$: cannot journal an int of more than 4,300 digits") from None
        if isinstance(value, int):  # True and members of an IntEnum are ints by their own declaration
            return repr(int(value))
        raise NotJournalable(_misfit(value, "int"))

    def decode(self, text: str) -> Any:
        return self._load(text)

    def from_json(self, value: Any) -> Any:
        return _ADAPT_INT.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer"}


class _Bool(_Int):
    _load = staticmethod(TypeAdapter(bool).validator.validate_json)

    def encode(self, value: Any) -> str:
        if value is True:
            return "true"
        if value is False:
            return "false"
        raise NotJournalable(_misfit(value, "bool"))

    def from_json(self, value: Any) -> Any:
        return _ADAPT_BOOL.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class _None(Codec):
    stable = True
    exact = True

    def encode(self, value: Any) -> str:
        if value is None:
            return "null"
        raise NotJournalable(_misfit(value, "None"))

    def decode(self, text: str) -> Any:
        if text != "null":
            raise ValueError("null was expected")
        return None

    def from_json(self, value: Any) -> Any:
        return _ADAPT_NONE.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "null"}


class _Float(Codec):
    stable = True
    exact = True
    _load = staticmethod(
        TypeAdapter(float, config=ConfigDict(ser_json_inf_nan="strings")).validator.validate_json
    )

    def encode(self, value: Any) -> str:
        if type(value) is not float:
            if not isinstance(value, (int, float)):
                raise NotJournalable(_misfit(value, "float"))
            try:
                number = float(value)
            except OverflowError:
                raise NotJournalable("$: cannot journal an int this large as float") from None
            if number != value and number == number:
                raise NotJournalable("$: the int is not the float that it would come back as")
            value = number
        if math.isfinite(value):
            return float.__repr__(value)
        return '"NaN"' if value != value else ('"Infinity"' if value > 0 else '"-Infinity"')

    def decode(self, text: str) -> Any:
        return self._load(text)

    def from_json(self, value: Any) -> Any:
        return _ADAPT_FLOAT.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "number"}


class _Str(Codec):
    stable = True
    exact = True
    _load = staticmethod(TypeAdapter(str).validator.validate_json)
    _dump = staticmethod(json.encoder.encode_basestring)

    def encode(self, value: Any) -> str:
        if type(value) is not str:
            if not (isinstance(value, str) and isinstance(value, enum.Enum)):
                raise NotJournalable(_misfit(value, "str"))
            value = str(value.value)  # a member of a StrEnum equals its text
        return _escape(self._dump(value))

    def decode(self, text: str) -> Any:
        if text.isascii():
            return self._load(text)
        text = _unescape(text)
        try:
            return self._load(text)
        except ValueError:
            value = json.loads(text)  # lone surrogates
            if type(value) is not str:
                raise
            return value

    def from_json(self, value: Any) -> Any:
        return _ADAPT_STR.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string"}


_ADAPT_INT = TypeAdapter[Any](int)
_ADAPT_BOOL = TypeAdapter[Any](bool)
_ADAPT_NONE = TypeAdapter[Any](None)
_ADAPT_FLOAT = TypeAdapter[Any](float)
_ADAPT_STR = TypeAdapter[Any](str)


# --- closed annotations: pydantic -------------------------------------------------------------------------------------

_CONFIG: Final = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")


class _Typed(Codec):
    """A closed annotation: pydantic's serializer with warnings as errors, field names and not aliases."""

    def __init__(self, annotation: Any) -> None:
        super().__init__(annotation)
        self.adapter = _adapter(annotation)
        self._dump = self.adapter.serializer.to_json
        self._load = self.adapter.validator.validate_json
        self._holds_secret = _mentions(self.adapter.core_schema, _is_secret_schema)

    def encode(self, value: Any) -> str:
        if self._holds_secret:
            raise NotJournalable(f"$: {_short(self.annotation)} holds a secret, and secrets are never written")
        try:
            return _escape(self._dump(value, by_alias=False, round_trip=True, warnings="error").decode())
        except Exception as error:
            raise NotJournalable(self._why(value, error)) from None

    def decode(self, text: str) -> Any:
        return self._load(_unescape(text), by_alias=False, by_name=True)

    def from_json(self, value: Any) -> Any:
        return self._load(_compact(value))

    def json_schema(self) -> dict[str, Any]:
        try:
            return self.adapter.json_schema()
        except pydantic.PydanticUserError:
            return {}

    def _why(self, value: Any, error: Exception) -> str:
        """The sentence for a value that pydantic does not serialize; never quotes the value (it may be a secret)."""
        try:
            tagged.encode(value)
        except NotJournalable as found:
            return str(found)
        try:
            self.adapter.validate_python(value, by_alias=False, by_name=True)
        except pydantic.ValidationError as misfit:
            first = misfit.errors(include_input=False, include_url=False, include_context=False)[0]
            return f"{_path(first['loc'])}: does not fit {_short(self.annotation)}: {first['msg']}"
        except Exception:
            pass
        return f"$: cannot journal {_a(value)} as {_short(self.annotation)}: {type(error).__name__}"


class _Opaque(Codec):
    """An annotation that pydantic knows no JSON for (a client, a socket): nothing of it can be journaled."""

    def encode(self, value: Any) -> str:
        raise NotJournalable(f"$: cannot journal {_a(value)}")

    def decode(self, text: str) -> Any:
        raise ValueError(f"{_short(self.annotation)} has no JSON form")

    def from_json(self, value: Any) -> Any:
        raise ValueError(f"{_short(self.annotation)} has no JSON form")


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=_CONFIG)
    except pydantic.PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        return TypeAdapter(annotation)  # a model or dataclass brings its own config


def _is_secret_schema(node: dict[str, Any]) -> bool:
    cls = node.get("cls")
    return isinstance(cls, type) and issubclass(cls, _SECRETS)


_SECRETS: Final = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)


def _mentions(node: Any, wanted: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a part of a core schema is `wanted`."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            if wanted(part):
                return True
            stack.extend(part.values())
        elif isinstance(part, (list, tuple)):
            stack.extend(part)
    return False


# --- open annotations: tags -------------------------------------------------------------------------------------------


class _Tagged(Codec):
    """JSON as it is; what JSON has no form for as an object with one key that begins with `~`."""

    exact = False

    def encode(self, value: Any) -> str:
        try:
            plain = value if _is_plain(value, 0) else _tag(value, "$", 0)
            return _escape(_compact(plain))
        except RecursionError:
            raise NotJournalable("$: cannot journal a value nested this deep") from None
        except (ValueError, UnicodeError) as error:
            raise NotJournalable(f"$: cannot journal {_a(value)}: {_sentence(error)}") from None

    def decode(self, text: str) -> Any:
        value = _parse(_unescape(text))
        return _revive(value) if '"~' in text else value

    def escape(self, text: str) -> str:
        """JSON text made elsewhere in the form that Postgres stores and reads."""
        return _escape(text)

    def unescape(self, text: str) -> str:
        """The reverse of `escape`; only Python's own parser reads every such text."""
        return _unescape(text)

    def revive(self, value: Any) -> Any:
        """A value from parsed JSON with tags, a part of a larger document."""
        return _revive(value)


_LEAVES: Final = frozenset({type(None), bool, int, str})


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON alone says all of `value`, so that no copy is needed: most values, checked before they are copied."""
    kind = type(value)
    if kind in _LEAVES:
        return True
    if kind is float:
        return math.isfinite(value)
    if depth >= DEPTH_MAX:
        return False
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or key[:1] == "~":
                return False
            if type(item) not in _LEAVES and not _is_plain(item, depth + 1):
                return False
        return True
    if kind is list:
        for item in value:
            if type(item) not in _LEAVES and not _is_plain(item, depth + 1):
                return False
        return True
    return False


def _tag(value: Any, path: str, depth: int) -> Any:
    """`value` as plain JSON with tags. Raises NotJournalable with the path."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if depth >= DEPTH_MAX:
        raise NotJournalable(f"{path[:200]}: nested more than {DEPTH_MAX} deep, or a cycle")
    depth += 1
    if kind is list:
        return [_tag(item, f"{path}[{n}]", depth) for n, item in enumerate(value)]
    if kind is dict:
        return _tag_dict(value, path, depth)
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, path, depth)
    if isinstance(value, _SECRETS):
        raise NotJournalable(f"{path}: secrets are never written")
    if isinstance(value, enum.Enum):
        return _tag_enum(value, path)
    if dataclasses.is_dataclass(kind):
        return _tag_dataclass(value, path, depth)
    if isinstance(value, BaseModel):
        return _tag_model(value, path, depth)
    if isinstance(value, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        items = [_tag(item, f"{path}.{name}", depth) for name, item in zip(kind._fields, value, strict=True)]
        return {"~namedtuple": [_class_name(kind, path), items]}
    raise NotJournalable(f"{path}: cannot journal {_a(value)}")


def _tag_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(key) is str and key[:1] != "~" for key in value):
        return {key: _tag(item, f"{path}.{key}", depth) for key, item in value.items()}
    return {"~dict": _tag_pairs(value, path, depth)}


def _tag_pairs(value: Any, path: str, depth: int) -> list[Any]:
    return [[_tag(k, f"{path}.keys()", depth), _tag(v, f"{path}[{_key(k)}]", depth)] for k, v in value.items()]


def _tag_sorted(value: Any, path: str, depth: int) -> list[Any]:
    """Members of a set in the order of their encoding: a set's own order differs between processes."""
    return sorted((_tag(item, f"{path}{{}}", depth) for item in value), key=_json_encode)


def _tag_enum(value: enum.Enum, path: str) -> Any:
    name = _class_name(type(value), path)
    if isinstance(value, enum.Flag):
        return {"~flag": [name, value.value]}
    return {"~enum": [name, value.name]}


def _tag_dataclass(value: Any, path: str, depth: int) -> Any:
    cls = type(value)
    name = _class_name(cls, path)
    names = [field.name for field in dataclasses.fields(cls)]
    extra = set(getattr(value, "__dict__", ())) - set(names)
    for key in sorted(extra):
        if not isinstance(getattr(cls, key, None), functools.cached_property):  # a cache is made again
            raise NotJournalable(f"{path}.{key}: not a field of {cls.__qualname__}, so it would be lost")
    fields = {n: _tag(getattr(value, n), f"{path}.{n}", depth) for n in names if hasattr(value, n)}
    return {"~dataclass": [name, fields]}


def _tag_model(value: BaseModel, path: str, depth: int) -> Any:
    cls = type(value)
    name = _class_name(cls, path)
    parts: list[Any] = [name, {n: _tag(v, f"{path}.{n}", depth) for n, v in value.__dict__.items() if n in cls.model_fields}]
    for key in set(value.__dict__) - set(cls.model_fields):
        if not isinstance(getattr(cls, key, None), functools.cached_property):
            raise NotJournalable(f"{path}.{key}: not a field of {cls.__qualname__}, so it would be lost")
    for more in (value.__pydantic_extra__, value.__pydantic_private__):
        parts.append(None if more is None else {n: _tag(v, f"{path}.{n}", depth) for n, v in more.items()})
    parts.append(sorted(value.__pydantic_fields_set__))
    return {"~model": parts}


def _tag_datetime(value: dt.datetime, path: str, depth: int) -> Any:
    naive = value.replace(tzinfo=None, fold=0).isoformat()
    zone = value.tzinfo
    if zone is None and not value.fold:
        return {"~datetime": naive}
    return {"~datetime": [naive, None if zone is None else _tag_zone(zone, path), value.fold]}


def _tag_time(value: dt.time, path: str, depth: int) -> Any:
    naive = value.replace(tzinfo=None, fold=0).isoformat()
    zone = value.tzinfo
    if zone is None and not value.fold:
        return {"~time": naive}
    return {"~time": [naive, None if zone is None else _tag_zone(zone, path), value.fold]}


def _tag_zone(zone: dt.tzinfo, path: str) -> Any:
    if isinstance(zone, zoneinfo.ZoneInfo):
        if zone.key is None:
            raise NotJournalable(f"{path}: cannot journal a ZoneInfo without a key")
        return zone.key
    if isinstance(zone, (dt.timezone, pydantic_core.TzInfo)):
        offset = zone.utcoffset(None)
        assert offset is not None
        return offset.total_seconds()
    raise NotJournalable(f"{path}: cannot journal {_a(zone)}")


def _tag_pattern(value: re.Pattern[Any], path: str, depth: int) -> Any:
    return {"~pattern": [_tag(value.pattern, path, depth), value.flags]}


def _tag_defaultdict(value: collections.defaultdict[Any, Any], path: str, depth: int) -> Any:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise NotJournalable(f"{path}: cannot journal a defaultdict whose factory is {_short(factory)}")
    return {"~defaultdict": [None if factory is None else factory.__name__, _tag_pairs(value, path, depth)]}


_FACTORIES: Final[dict[str, Any]] = {f.__name__: f for f in (int, float, str, bool, list, dict, set, tuple)}


def _writer_of_text(tag: str) -> Callable[[Any, str, int], Any]:
    return lambda value, path, depth: {tag: str(value)}


def _writer_of_items(tag: str) -> Callable[[Any, str, int], Any]:
    return lambda value, path, depth: {tag: [_tag(item, f"{path}[{n}]", depth) for n, item in enumerate(value)]}


_PATHS: Final = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath)
_ADDRESSES: Final = (
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
)

_WRITERS: Final[dict[type, Callable[[Any, str, int], Any]]] = {
    tuple: _writer_of_items("~tuple"),
    set: lambda v, p, d: {"~set": _tag_sorted(v, p, d)},
    frozenset: lambda v, p, d: {"~frozenset": _tag_sorted(v, p, d)},
    bytes: lambda v, p, d: {"~bytes": b64encode(v).decode()},
    bytearray: lambda v, p, d: {"~bytearray": b64encode(v).decode()},
    complex: lambda v, p, d: {"~complex": [repr(v.real), repr(v.imag)]},
    decimal.Decimal: _writer_of_text("~decimal"),
    fractions.Fraction: _writer_of_text("~fraction"),
    uuid.UUID: _writer_of_text("~uuid"),
    dt.datetime: _tag_datetime,
    dt.time: _tag_time,
    dt.date: lambda v, p, d: {"~date": v.isoformat()},
    dt.timedelta: lambda v, p, d: {"~timedelta": [v.days, v.seconds, v.microseconds]},
    zoneinfo.ZoneInfo: lambda v, p, d: {"~zone": _tag_zone(v, p)},
    dt.timezone: lambda v, p, d: {"~zone": _tag_zone(v, p)},
    range: lambda v, p, d: {"~range": [v.start, v.stop, v.step]},
    re.Pattern: _tag_pattern,
    collections.OrderedDict: lambda v, p, d: {"~ordereddict": _tag_pairs(v, p, d)},
    collections.Counter: lambda v, p, d: {"~counter": _tag_pairs(v, p, d)},
    collections.defaultdict: _tag_defaultdict,
    collections.deque: lambda v, p, d: {"~deque": [v.maxlen, [_tag(i, f"{p}[{n}]", d) for n, i in enumerate(v)]]},
    **{cls: _writer_of_text(f"~{cls.__name__.lower()}") for cls in (*_PATHS, *_ADDRESSES)},
}


def _revive(value: Any) -> Any:
    """Plain JSON with tags to values. Raises ValueError for a tag that is not known."""
    if type(value) is list:
        return [_revive(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        tag, body = next(iter(value.items()))
        if tag[:1] == "~":
            reader = _READERS.get(tag)
            if reader is None:
                raise ValueError(f"unknown tag {tag!r}: written by a later release of replaykit?")
            return reader(body)
    return {key: _revive(item) for key, item in value.items()}


def _revive_enum(body: Any) -> Any:
    cls = _class_of(body[0], enum.Enum)
    return cls[body[1]]  # type: ignore[index]


def _revive_flag(body: Any) -> Any:
    return _class_of(body[0], enum.Flag)(body[1])


def _revive_dataclass(body: Any) -> Any:
    cls = _class_of(body[0], object)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"{body[0]} is no dataclass")
    self = cls.__new__(cls)  # fields are set one by one: neither __init__ nor __post_init__ runs a second time
    given = body[1]
    for field in dataclasses.fields(cls):
        if field.name in given:
            object.__setattr__(self, field.name, _revive(given[field.name]))
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(self, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(self, field.name, field.default_factory())
    return self


def _revive_model(body: Any) -> Any:
    cls = _class_of(body[0], BaseModel)
    _, fields, extra, private, fields_set = body
    self = cls.__new__(cls)
    values = {name: _revive(item) for name, item in fields.items()}
    for name, field in cls.model_fields.items():
        if name not in values and not field.is_required():
            values[name] = field.get_default(call_default_factory=True, validated_data=values)
    object.__setattr__(self, "__dict__", values)
    object.__setattr__(self, "__pydantic_extra__", None if extra is None else {n: _revive(v) for n, v in extra.items()})
    object.__setattr__(self, "__pydantic_private__", None if private is None else {n: _revive(v) for n, v in private.items()})
    object.__setattr__(self, "__pydantic_fields_set__", set(fields_set))
    return self


def _revive_namedtuple(body: Any) -> Any:
    cls = _class_of(body[0], tuple)
    return tuple.__new__(cls, [_revive(item) for item in body[1]])


def _revive_datetime(body: Any) -> Any:
    if isinstance(body, str):
        return dt.datetime.fromisoformat(body)
    naive, zone, fold = body
    return dt.datetime.fromisoformat(naive).replace(tzinfo=_revive_zone(zone), fold=fold)


def _revive_time(body: Any) -> Any:
    if isinstance(body, str):
        return dt.time.fromisoformat(body)
    naive, zone, fold = body
    return dt.time.fromisoformat(naive).replace(tzinfo=_revive_zone(zone), fold=fold)


def _revive_zone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return zoneinfo.ZoneInfo(zone)
    return dt.timezone(dt.timedelta(seconds=zone)) if zone else dt.UTC


def _pairs(body: Any) -> list[tuple[Any, Any]]:
    return [(_revive(key), _revive(item)) for key, item in body]


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "~float": float,
    "~tuple": lambda b: tuple(map(_revive, b)),
    "~set": lambda b: set(map(_revive, b)),
    "~frozenset": lambda b: frozenset(map(_revive, b)),
    "~dict": lambda b: dict(_pairs(b)),
    "~bytes": b64decode,
    "~bytearray": lambda b: bytearray(b64decode(b)),
    "~complex": lambda b: complex(float(b[0]), float(b[1])),
    "~decimal": decimal.Decimal,
    "~fraction": fractions.Fraction,
    "~uuid": uuid.UUID,
    "~datetime": _revive_datetime,
    "~time": _revive_time,
    "~date": dt.date.fromisoformat,
    "~timedelta": lambda b: dt.timedelta(*b),
    "~zone": _revive_zone,
    "~range": lambda b: range(*b),
    "~pattern": lambda b: re.compile(_revive(b[0]), b[1]),
    "~ordereddict": lambda b: collections.OrderedDict(_pairs(b)),
    "~counter": lambda b: collections.Counter(dict(_pairs(b))),
    "~defaultdict": lambda b: collections.defaultdict(None if b[0] is None else _FACTORIES[b[0]], _pairs(b[1])),
    "~deque": lambda b: collections.deque(map(_revive, b[1]), b[0]),
    "~enum": _revive_enum,
    "~flag": _revive_flag,
    "~dataclass": _revive_dataclass,
    "~model": _revive_model,
    "~namedtuple": _revive_namedtuple,
    **{f"~{cls.__name__.lower()}": cls for cls in (*_PATHS, *_ADDRESSES)},
}


# --- classes by name --------------------------------------------------------------------------------------------------

_modules: frozenset[str] | None = None


def remember_modules() -> None:
    """Fix the modules whose classes may be named in the journal: those loaded now, after the worker's own were imported.

    A module that a body imports later is not among them, so that the first run and a replay elsewhere find the same.
    """
    global _modules
    _modules = frozenset(sys.modules)


def name_of(cls: type) -> str:
    """`module.Qualified.Name`, as the journal writes it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: str) -> type | None:
    """The class of that name in a module that is loaded, else None. Imports nothing."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if module not in sys.modules or (_modules is not None and module not in _modules):
            continue
        found: Any = sys.modules[module]
        for part in parts[cut:]:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and name_of(found) == name:
            return found
    return None


def _class_of(name: str, base: type) -> type:
    cls = class_named(name)
    if cls is None or not issubclass(cls, base):
        raise ValueError(f"no class {name} is loaded here")
    return cls


def _class_name(cls: type, path: str) -> str:
    name = name_of(cls)
    if class_named(name) is not cls:
        raise NotJournalable(f"{path}: {name} cannot be found by its name, so it could not come back; define it in a module")
    return name


# --- comparing and explaining -----------------------------------------------------------------------------------------


def _same_class(value: Any, twin: Any) -> bool:
    kind = type(twin)
    if type(value) is kind:
        return True
    # pydantic's twin of a number or text declared as such; an aware moment's zone is compared elsewhere
    return (kind in (int, float, str) and isinstance(value, (int, float, str))) or (
        isinstance(value, kind) and isinstance(value, pathlib.PurePath)
    )


def _equal_by_parts(value: Any, twin: Any) -> bool:
    """Whether `value` holds something that does not equal its own twin by nature: NaN, or a class without `__eq__`."""
    return _odd_leaf(value, 0) and _odd_leaf(twin, 0)


def _odd_leaf(value: Any, depth: int) -> bool:
    if depth > DEPTH_MAX:
        return False
    try:
        if bool(value != value):
            return True
    except Exception:
        return False
    if type(value).__eq__ is object.__eq__:
        return True
    return any(_odd_leaf(part, depth + 1) for _, part in _parts(value))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value with the path of each, below the value's own."""
    if isinstance(value, dict):
        return [(f"[{_key(k)}]" if not isinstance(k, str) else f".{k}", v) for k, v in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [(f"[{n}]", item) for n, item in enumerate(value)]
    if isinstance(value, BaseModel):
        return [(f".{n}", v) for n, v in value.__dict__.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return []


def _zones_differ(value: Any, twin: Any, depth: int) -> bool:
    """Whether an aware moment would lose its zone: two moments of one instant are equal whatever their zones."""
    if isinstance(value, dt.datetime):
        zone = value.tzinfo
        if zone is None or isinstance(zone, (dt.timezone, pydantic_core.TzInfo)):
            return False
        return not (isinstance(twin, dt.datetime) and type(twin.tzinfo) is type(zone) and twin.tzinfo == zone)
    if type(value) in _LEAVES or depth > DEPTH_MAX:
        return False
    mine, other = _parts(value), _parts(twin)
    return any(_zones_differ(a, b, depth + 1) for (_, a), (_, b) in zip(mine, other, strict=False))


def _difference(value: Any, twin: Any) -> str:
    """The sentence for a value that does not come back: the path of the first part that differs, and both types."""
    path = "$"
    for _ in range(DEPTH_MAX):
        if type(value) is not type(twin):
            return f"{path}: {_a(value)} would come back as {_a(twin)}; annotate it with its own type"
        mine, other = _parts(value), _parts(twin)
        if [name for name, _ in mine] != [name for name, _ in other]:
            break
        for (name, part), (_, part_twin) in zip(mine, other, strict=True):
            if not _looks_equal(part, part_twin):
                path, value, twin = path + name, part, part_twin
                break
        else:
            break
    return f"{path}: {_a(value)} would not come back equal"


def _looks_equal(value: Any, twin: Any) -> bool:
    try:
        return type(value) is type(twin) and (value is twin or bool(value == twin)) and not _zones_differ(value, twin, 0)
    except Exception:
        return False


def _misfit(value: Any, declared: str) -> str:
    if isinstance(value, _SECRETS):
        return "$: secrets are never written"
    return f"$: {_a(value)} where {declared} is declared"


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else name_of(cls)


def _a(value: Any) -> str:
    name = _type_name(value)
    if value is None:
        return "None"
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int, float, bool, type(None))) else _type_name(key)


def _short(annotation: Any) -> str:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation.__qualname__
    return repr(annotation).replace("typing.", "")[:200]


def _sentence(error: BaseException) -> str:
    """An error's first line without the values in it."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        return f"{_path(first['loc'])}: {first['msg']}"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}".rstrip(": ")


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


# --- the choice -------------------------------------------------------------------------------------------------------

tagged: Final = _Tagged(Any)

_SCALARS: Final[dict[Any, Codec]] = {
    int: _Int(int),
    bool: _Bool(bool),
    float: _Float(float),
    str: _Str(str),
    None: _None(None),
    type(None): _None(None),
}
_CONTAINERS: Final = frozenset(
    {list, dict, tuple, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter}
) | frozenset(
    getattr(collections.abc, name)
    for name in ("Sequence", "MutableSequence", "Mapping", "MutableMapping", "Set", "MutableSet", "Iterable", "Collection")
)
_cache: dict[Any, Codec] = {}
_CACHE_MAX: Final = 4_096


def codec_for(annotation: Any) -> Codec:
    """The codec of an annotation; the same annotation gives the same codec, whatever the value.

    `inspect.Parameter.empty` and `...` stand for a missing annotation.
    """
    # int | str == str | int, but pydantic tries the members in order: so the text of it is part of the key
    key = annotation if type(annotation) is type else (repr(annotation), annotation)
    try:
        found = _cache.get(key)
    except TypeError:  # an unhashable annotation: Annotated[int, []]
        return _choose(annotation)
    if found is None:
        if len(_cache) >= _CACHE_MAX:
            _cache.clear()
        found = _cache[key] = _choose(annotation)
    return found


def _choose(annotation: Any) -> Codec:
    try:
        if annotation in _SCALARS:
            return _SCALARS[annotation]
    except TypeError:
        pass
    if _is_open(annotation):
        return tagged
    try:
        return _Typed(annotation)
    except (pydantic.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation, TypeError, pydantic_core.SchemaError):
        return _Opaque(annotation)


def _is_open(annotation: Any) -> bool:
    """Whether the annotation leaves a type to the value: Any, object, a bare container, or a container of those."""
    if annotation in (Any, object, typing_extensions.Any, ...) or annotation is _EMPTY or isinstance(annotation, (str, typing.TypeVar)):
        return True
    origin = typing.get_origin(annotation)
    if origin is None:
        return annotation in _CONTAINERS
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _is_open(arguments[0])
    if origin in _CONTAINERS:
        return not arguments or any(_is_open(a) for a in arguments if a is not ...)
    if origin in (typing.Union, types.UnionType):
        return any(map(_is_open, arguments))
    return False


_EMPTY: Final = __import__("inspect").Parameter.empty

"""Values of any type as plain JSON, where the annotation leaves the type open.

JSON stays as it is; what JSON has no form for becomes an object with one key that begins with `~`:
`{"~tuple": [1, 2]}`. An object of the user's with such a key is written as pairs. Enums, dataclasses and models
carry their class's name and are looked up among the modules that are loaded: nothing is imported, and no author's
`__init__` runs.
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
import math
import pathlib
import re
import sys
import uuid
import zoneinfo
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import pydantic_core
from pydantic import BaseModel

from replaykit.errors import NotJournalable
from replaykit.replay import secrets
from replaykit.replay.jsontext import INT_DIGITS_MAX, sorted_keys

__all__ = [
    "DEPTH_MAX",
    "HUGE_INT",
    "a",
    "class_named",
    "is_cache",
    "is_fixed",
    "is_plain",
    "key_text",
    "name_of",
    "remember_modules",
    "revive",
    "slots_beyond",
    "sort_pairs",
    "tag",
]

DEPTH_MAX: Final = 150
"""Levels of nesting in one value: pydantic's parser gives up at about 200, and a tag adds a level of its own."""

HUGE_INT: Final = f"$: cannot journal an int of more than {INT_DIGITS_MAX:,} digits"
"""Why a value with such an int is not journaled."""

_LEAVES: Final = frozenset({type(None), bool, int, str})


class _Refused(Exception):
    """A part has no form; the path to it is put together while the stack unwinds."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []


def tag(value: Any) -> Any:
    """`value` as plain JSON with tags, a copy.

    Raises:
        NotJournalable: a part has no form; the message begins with its path.
    """
    try:
        return _tag(value, 0)
    except _Refused as refused:
        path = "".join(reversed(refused.path))
        raise NotJournalable(f"${path if len(path) <= 200 else path[:200] + '…'}: {refused}") from None
    except RecursionError:
        raise NotJournalable("$: cannot journal a value nested this deep") from None
    except ValueError as error:  # members of a set are sorted by their text
        if "digits" not in str(error):
            raise
        raise NotJournalable(HUGE_INT) from None


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether JSON alone says all of `value`, so that no copy is needed: true of most values, and cheap to see."""
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
            if type(item) not in _LEAVES and not is_plain(item, depth + 1):
                return False
        return True
    return kind is list and all(type(item) in _LEAVES or is_plain(item, depth + 1) for item in value)


def revive(value: Any) -> Any:
    """The value from plain JSON with tags, `value` itself where it has none.

    Raises:
        ValueError: a tag or class that is not known here.
    """
    if type(value) is list:
        return [revive(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        name, body = next(iter(value.items()))
        if name[:1] == "~":
            reader = _READERS.get(name)
            if reader is None:
                raise ValueError(f"unknown tag {name!r}: written by a later release of replaykit?")
            return reader(body)
    return {key: revive(item) for key, item in value.items()}


def sort_pairs(value: Any) -> Any:
    """Plain JSON with tags in canonical order: two equal dicts may differ in the order of their pairs."""
    if type(value) is list:
        return [sort_pairs(item) for item in value]
    if type(value) is not dict:
        return value
    found = {key: sort_pairs(item) for key, item in value.items()}
    for name in ("~dict", "~counter"):
        if len(found) == 1 and type(found.get(name)) is list:
            found[name] = sorted(found[name], key=sorted_keys)
    return found


# --- classes by name --------------------------------------------------------------------------------------------------

_modules: frozenset[str] | None = None
_names: dict[type, str] = {}  # classes that were found by their own name
_NAMES_MAX: Final = 4_096
_RENAMED: Final = {"re.PatternError": "re.error"}  # by 3.13: journals go from one Python to another


def remember_modules() -> None:
    """Fix the modules whose classes the journal may name: those loaded now, after the worker's own were imported.

    A module that a body imports later is not among them, so that the first run and a replay elsewhere find the same.
    """
    global _modules
    _modules = frozenset(sys.modules)
    _names.clear()


def name_of(cls: type) -> str:
    """`module.Qualified.Name`, as the journal writes it: the same in each process and under each Python."""
    module = cls.__module__
    if module == "__main__":
        module = _script() or module
    name = f"{module}.{cls.__qualname__}"
    return _RENAMED.get(name, name)


def _script() -> str | None:
    """The name under which a worker imports the script that runs here; None if it has none, or is that of another module."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = re.split(r"[/\\]", getattr(main, "__file__", None) or "")[-1]
    name: str = spec.name if spec is not None else file.rpartition(".")[0]
    return name if name not in sys.modules and all(part.isidentifier() for part in name.split(".")) else None


def class_named(name: str) -> type | None:
    """The class of that name in a module that is loaded, else None. Imports nothing."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if module in sys.modules:
            found: Any = sys.modules[module] if _modules is None or module in _modules else None
        else:
            found = sys.modules["__main__"] if module == _script() else None
        for part in parts[cut:]:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and name_of(found) == name:
            return found
    return None


def _class_of(name: str, base: type) -> Any:
    cls = class_named(name)
    if cls is None or not issubclass(cls, base):
        raise ValueError(f"no class {name} is loaded here")
    return cls


def _class_name(cls: type) -> str:
    name = _names.get(cls)
    if name is None:
        name = name_of(cls)
        if class_named(name) is not cls:
            raise _Refused(f"{name} cannot be found by its name, so it could not come back: define it in a module")
        if len(_names) >= _NAMES_MAX:
            _names.clear()
        _names[cls] = name
    return name


# --- writing ----------------------------------------------------------------------------------------------------------


def _tag(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if depth >= DEPTH_MAX:
        raise _Refused(f"nested more than {DEPTH_MAX} deep, or a cycle")
    depth += 1
    if kind is list:
        return _tag_items(value, depth)
    if kind is dict:
        if all(type(key) is str and key[:1] != "~" for key in value):
            return _tag_members(value.items(), depth)
        return {"~dict": _tag_pairs(value, depth)}
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, depth)
    return _tag_instance(value, kind, depth)


def _tag_instance(value: Any, kind: type, depth: int) -> Any:
    """An instance of a class that has no writer of its own."""
    if isinstance(value, secrets.SECRETS):
        try:
            return {"~secret": secrets.write(value)}
        except secrets.SecretMet:
            raise _Refused(secrets.REFUSED) from None
    if isinstance(value, enum.Flag):
        return {"~flag": [_class_name(kind), value.value]}
    if isinstance(value, enum.Enum):
        return {"~enum": _tag_member(value, kind)}
    if isinstance(value, BaseModel):
        return _tag_model(value, depth)
    if dataclasses.is_dataclass(kind):
        return _tag_dataclass(value, depth)
    if isinstance(value, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        if value.__dict__ if hasattr(value, "__dict__") else ():
            raise _Refused(f"cannot journal {a(value)} with attributes of its own")
        return {"~namedtuple": [_class_name(kind), _tag_items(value, depth)]}
    raise _Refused(f"cannot journal {a(value)}")


def _tag_member(value: enum.Enum, kind: type) -> list[Any]:
    found = [_class_name(kind), value.name]
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and type(value.value) in _LEAVES:
        found.append(value.value)  # other Pythons may call it by another name: HTTPStatus(413)
    return found


def _tag_items(items: Iterable[Any], depth: int) -> list[Any]:
    found: list[Any] = []
    try:
        for item in items:
            found.append(item if type(item) in _LEAVES else _tag(item, depth))
    except _Refused as refused:
        refused.path.append(f"[{len(found)}]")
        raise
    return found


def _tag_members(members: Iterable[tuple[str, Any]], depth: int) -> dict[str, Any]:
    found = {}
    name = ""
    try:
        for name, item in members:
            found[name] = item if type(item) in _LEAVES else _tag(item, depth)
    except _Refused as refused:
        refused.path.append(f".{name}")
        raise
    return found


def _tag_pairs(value: dict[Any, Any], depth: int) -> list[Any]:
    found: list[Any] = []
    where = ""
    try:
        for key, item in value.items():
            where = f".keys()[{len(found)}]"
            tagged_key = _tag(key, depth)
            where = f"[{key_text(key)}]"
            found.append([tagged_key, _tag(item, depth)])
    except _Refused as refused:
        refused.path.append(where)
        raise
    return found


def _tag_set(value: Any, depth: int) -> list[Any]:
    """Members in the order of their encoding: a set's own order differs between processes."""
    return sorted(_tag_items(value, depth), key=sorted_keys)


def _tag_dataclass(value: Any, depth: int) -> Any:
    cls = type(value)
    names = [field.name for field in dataclasses.fields(cls)]
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    _refuse_extra(cls, attributes.keys() - names)
    _refuse_slots(cls, value)
    members = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return {"~dataclass": [_class_name(cls), _tag_members(members, depth)]}


def _tag_model(value: BaseModel, depth: int) -> Any:
    cls = type(value)
    fields = cls.__pydantic_fields__
    _refuse_extra(cls, set(value.__dict__) - set(fields))
    _refuse_slots(cls, value)
    members = [(name, item) for name, item in value.__dict__.items() if name in fields]
    parts: list[Any] = [_class_name(cls), _tag_members(members, depth)]
    for more in (value.__pydantic_extra__, value.__pydantic_private__):
        parts.append(None if more is None else _tag_members(more.items(), depth))
    parts.append(sorted(value.__pydantic_fields_set__))
    return {"~model": parts}


def _refuse_extra(cls: type, names: set[str]) -> None:
    for name in sorted(names):
        if not is_cache(cls, name):
            refused = _Refused(f"not a field of {cls.__qualname__}, so it would be lost")
            refused.path.append(f".{name}")
            raise refused


def _refuse_slots(cls: type, value: Any) -> None:
    beyond = slots_beyond(cls)
    if beyond:
        _refuse_extra(cls, {name for name in beyond if hasattr(value, name)})


def is_cache(cls: type, name: str) -> bool:
    """Whether an attribute fills itself again, or is what typing leaves on a generic, where no program looks."""
    return name == "__orig_class__" or isinstance(getattr(cls, name, None), functools.cached_property)


@functools.lru_cache(1_024)
def slots_beyond(cls: type) -> tuple[str, ...]:
    """Slots of a class and its bases that are none of its fields, by the names of their attributes."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set[str]()
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if base.__module__ == "pydantic.main":
            continue
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and name.endswith("__"):
                continue
            mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if mangled not in fields:
                found[mangled] = None
    return tuple(found)


def _tag_moment(name: str) -> Callable[[Any, int], Any]:
    def write(value: Any, depth: int) -> Any:
        naive = value.replace(tzinfo=None, fold=0).isoformat()
        if value.tzinfo is None and not value.fold:
            return {name: naive}
        return {name: [naive, None if value.tzinfo is None else _tag_zone(value.tzinfo, depth), value.fold]}

    return write


def _tag_zone(zone: dt.tzinfo, depth: int) -> str | float:
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    if is_fixed(zone):
        offset = zone.utcoffset(None)
        return offset.total_seconds() if offset else 0
    raise _Refused(f"cannot journal {a(zone)}")


def is_fixed(zone: dt.tzinfo | None) -> bool:
    """Whether a zone is no more than its offset: an offset in a moment's text says all of it."""
    if type(zone) is dt.timezone:
        return zone is dt.UTC or zone.tzname(None) == dt.timezone(zone.utcoffset(None)).tzname(
            None
        )  # it may have a name
    return type(zone) is pydantic_core.TzInfo


def _tag_defaultdict(value: collections.defaultdict[Any, Any], depth: int) -> Any:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise _Refused("cannot journal a defaultdict whose factory is not a builtin type")
    return {"~defaultdict": [None if factory is None else getattr(factory, "__name__", ""), _tag_pairs(value, depth)]}


def _writer_of_text(name: str) -> Callable[[Any, int], Any]:
    return lambda value, depth: {name: str(value)}


_FACTORIES: Final[dict[str, Any]] = {f.__name__: f for f in (int, float, str, bool, list, dict, set, tuple)}
_TEXTUAL: Final = (
    pathlib.PurePosixPath,
    pathlib.PosixPath,
    pathlib.PureWindowsPath,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
)
"""Classes whose `str` says all and whose constructor takes it."""

_WRITERS: Final[dict[type, Callable[[Any, int], Any]]] = {
    tuple: lambda v, d: {"~tuple": _tag_items(v, d)},
    set: lambda v, d: {"~set": _tag_set(v, d)},
    frozenset: lambda v, d: {"~frozenset": _tag_set(v, d)},
    bytes: lambda v, d: {"~bytes": b64encode(v).decode()},
    bytearray: lambda v, d: {"~bytearray": b64encode(v).decode()},
    complex: lambda v, d: {"~complex": [repr(v.real), repr(v.imag)]},
    dt.datetime: _tag_moment("~datetime"),
    dt.time: _tag_moment("~time"),
    dt.date: lambda v, d: {"~date": v.isoformat()},
    dt.timedelta: lambda v, d: {"~timedelta": [v.days, v.seconds, v.microseconds]},
    zoneinfo.ZoneInfo: lambda v, d: {"~zone": _tag_zone(v, d)},
    dt.timezone: lambda v, d: {"~zone": _tag_zone(v, d)},
    range: lambda v, d: {"~range": [v.start, v.stop, v.step]},
    re.Pattern: lambda v, d: {"~pattern": [_tag(v.pattern, d), v.flags]},
    collections.OrderedDict: lambda v, d: {"~ordereddict": _tag_pairs(v, d)},
    collections.Counter: lambda v, d: {"~counter": _tag_pairs(v, d)},
    collections.defaultdict: _tag_defaultdict,
    collections.deque: lambda v, d: {"~deque": [v.maxlen, _tag_items(v, d)]},
    **{cls: _writer_of_text(f"~{cls.__name__.lower()}") for cls in _TEXTUAL},
}


# --- reading ----------------------------------------------------------------------------------------------------------


def _revive_member(body: Any) -> Any:
    cls = _class_of(body[0], enum.Enum)
    try:
        return cls[body[1]]
    except KeyError:
        if len(body) < 3:
            raise
        return cls(body[2])


def _revive_dataclass(body: Any) -> Any:
    cls = _class_of(body[0], object)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"{body[0]} is no dataclass")
    # fields are set one by one: neither __init__ nor __post_init__ runs a second time
    self: Any = object.__new__(cast(type[Any], cls))
    given = body[1]
    for field in dataclasses.fields(cls):
        if field.name in given:
            object.__setattr__(self, field.name, revive(given[field.name]))
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(self, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(self, field.name, field.default_factory())
    return self


def _revive_model(body: Any) -> Any:
    cls = _class_of(body[0], BaseModel)
    fields, extra, private, fields_set = body[1:]
    self = cls.__new__(cls)
    values = {name: revive(item) for name, item in fields.items()}
    for name, field in cls.__pydantic_fields__.items():
        if name not in values and not field.is_required():
            values[name] = field.get_default(call_default_factory=True, validated_data=values)
    object.__setattr__(self, "__dict__", values)
    object.__setattr__(self, "__pydantic_extra__", _revive_members(extra))
    object.__setattr__(self, "__pydantic_private__", _revive_members(private))
    object.__setattr__(self, "__pydantic_fields_set__", set(fields_set))
    return self


def _revive_members(members: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if members is None else {name: revive(item) for name, item in members.items()}


def _revive_moment(cls: Any) -> Callable[[Any], Any]:
    def read(body: Any) -> Any:
        if isinstance(body, str):
            return cls.fromisoformat(body)
        naive, zone, fold = body
        return cls.fromisoformat(naive).replace(tzinfo=_revive_zone(zone), fold=fold)

    return read


def _revive_zone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return zoneinfo.ZoneInfo(zone)
    return dt.timezone(dt.timedelta(seconds=zone)) if zone else dt.UTC


def _pairs(body: Any) -> list[tuple[Any, Any]]:
    return [(revive(key), revive(item)) for key, item in body]


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "~float": float,
    "~tuple": lambda b: tuple(map(revive, b)),
    "~set": lambda b: set(map(revive, b)),
    "~frozenset": lambda b: frozenset(map(revive, b)),
    "~dict": lambda b: dict(_pairs(b)),
    "~bytes": b64decode,
    "~bytearray": lambda b: bytearray(b64decode(b)),
    "~complex": lambda b: complex(float(b[0]), float(b[1])),
    "~datetime": _revive_moment(dt.datetime),
    "~time": _revive_moment(dt.time),
    "~date": dt.date.fromisoformat,
    "~timedelta": lambda b: dt.timedelta(*b),
    "~zone": _revive_zone,
    "~range": lambda b: range(*b),
    "~pattern": lambda b: re.compile(revive(b[0]), b[1]),
    "~ordereddict": lambda b: collections.OrderedDict(_pairs(b)),
    "~counter": lambda b: collections.Counter(dict(_pairs(b))),
    "~defaultdict": lambda b: collections.defaultdict(None if b[0] is None else _FACTORIES[b[0]], _pairs(b[1])),
    "~deque": lambda b: collections.deque(map(revive, b[1]), b[0]),
    "~enum": _revive_member,
    "~flag": lambda b: _class_of(b[0], enum.Flag)(b[1]),
    "~namedtuple": lambda b: tuple.__new__(_class_of(b[0], tuple), map(revive, b[1])),
    "~dataclass": _revive_dataclass,
    "~model": _revive_model,
    "~secret": secrets.read,
    **{f"~{cls.__name__.lower()}": cls for cls in _TEXTUAL},
}


# --- naming things in sentences ---------------------------------------------------------------------------------------


def a(value: Any) -> str:
    """`a set`, `an app.models.Order`, `None`: a value named by its class, never quoted (it may be a secret)."""
    if value is None:
        return "None"
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else name_of(cls)
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def key_text(key: Any) -> str:
    """A key of a dict as it stands in a path."""
    if not isinstance(key, (str, int, float, bool, type(None))):
        return a(key)
    try:
        return repr(key)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an int of too many digits, a __repr__ of the author's
        return a(key)

"""Values to JSON text and back: lossless, or refused with the path (DESIGN 7).

The codec is chosen by the annotation, never by the value:

- a *closed* annotation (`int`, `list[Order]`, a model, a union of those) goes through pydantic. The declared type
  wins: an int given for a float comes back as that float, a member of a StrEnum declared `str` as the plain text;
- an *open* one leaves the type to the value: missing, `Any`, `object`, a bare or abstract container (`list`,
  `Sequence[int]`), a container of those, a class that pydantic has no schema for. It goes through tags (`tags.py`).

`Any` in a field of a model, dataclass or TypedDict holds JSON: anything else in it does not come back equal, and is
refused.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import marshal
import math
import re
import types
import typing
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Final, cast

import pydantic
import pydantic_core
import typing_extensions
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from replaykit.errors import NotJournalable, ReplaykitError
from replaykit.replay import secrets
from replaykit.replay.jsontext import INT_DIGITS_MAX, compact, escape, has_huge_int, parse, sorted_keys, unescape
from replaykit.replay.tags import (
    DEPTH_MAX,
    HUGE_INT,
    a,
    is_cache,
    is_fixed,
    is_plain,
    key_text,
    revive,
    slots_beyond,
    sort_pairs,
    tag,
)

__all__ = ["ITERATED", "Codec", "Masked", "codec_for", "misfit", "path_of_secret", "tagged"]


class Codec(ABC):
    """The door of one annotation.

    Attributes:
        stable: the text itself is canonical, for equal values have equal texts.
        exact: what encodes without an error comes back equal, so that no comparison is owed.
        secretive: the annotation has a place for a secret.
        declared: those of `int`, `float` and `str` that the annotation names: an equal value of another class becomes one.
    """

    stable: bool = False
    exact: bool = False
    secretive: bool = False
    declared: frozenset[type] = frozenset((int, float, str))

    @abstractmethod
    def encode(self, value: Any) -> str:
        """Compact JSON text of `value`.

        Raises:
            NotJournalable: with the path of the part that has no form.
        """

    @abstractmethod
    def decode(self, text: str) -> Any:
        """A fresh value from `text`.

        Raises:
            ValueError: the text does not fit the annotation (pydantic's ValidationError is one).
        """

    def encode_checked(self, value: Any) -> tuple[str, Any]:
        """`encode(value)` and its decoded twin, equal to `value`: replays see that twin, so the first run must too.

        Raises:
            NotJournalable: the value has no form, or would come back as another.
        """
        text = self.encode(value)
        return text, self.check(value, text)

    def check(self, value: Any, text: str) -> Any:
        """The twin of `value`, decoded from its encoding. Raises NotJournalable when the two are not equal."""
        try:
            twin = self.decode(text)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what an author's own validator raises, a SystemExit for one
            raise NotJournalable(self.unreadable(value, error)) from None
        self.compare(value, twin)
        return twin

    def unreadable(self, value: Any, error: BaseException) -> str:
        """The sentence for a value whose text `decode` refuses with `error`."""
        return f"$: {a(value)} does not come back from its own JSON ({misfit(error)}){_open_instead(value)}"

    def compare(self, value: Any, twin: Any) -> None:
        """Raise NotJournalable, with the path of the first part that differs, unless `twin` may stand for `value`."""
        if not self.exact and not self.equal(value, twin):
            raise NotJournalable(_difference(value, twin, self.declared))

    def emptied(self, value: Any) -> str | None:
        """The path of a generator inside `value` that `encode` has read, so that it is empty now; None if there is none."""
        return None

    def mask(self, value: Any) -> tuple[str, Masked] | None:
        """The text of a value that holds secrets, each as `***`, and the value itself to be made anew for a body.

        None when it holds something else that has no form.
        """
        found: list[Any] = []
        try:
            with secrets.kept(found):
                numbered = self.encode(value)
            met = set(map(id, found))
            if any(id(secret) not in met for _, secret in _found_in(value, _is_secret)):
                return None  # a serializer of the author's writes it
            with secrets.masked():
                return self.encode(value), Masked(self, numbered, found)
        except NotJournalable:
            return None

    def equal(self, value: Any, twin: Any) -> bool:
        """Whether `twin` may stand for `value`: equal and of the same classes, or of those that were declared."""
        return _same(value, twin, 0, self.declared) and not _hides(value, twin, self.declared)

    def alike(self, value: Any, other: Any) -> bool:
        """Whether two decoded values mean the same, in all that their records tell apart."""
        return self.equal(value, other)

    def canonical(self, text: str) -> str:
        """The form of `text` that is digested: keys sorted; members of sets were sorted when they were encoded."""
        # One object with one key has nothing to sort; seen in the text, so that equal values take the same way.
        # The text stays escaped: what is digested has no lone surrogates.
        return text if self.stable or text.count(":") <= 1 else sorted_keys(parse(text))

    @abstractmethod
    def from_json(self, value: Any) -> Any:
        """A value of this annotation from plain JSON (a command line, SQL), coerced as pydantic does.

        Raises:
            pydantic.ValidationError: it does not fit.
        """

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """JSON schema of the annotation; empty when everything fits, or none can be made."""


class Masked:
    """A value whose secrets were kept beside its text; a new one is made for each body."""

    __slots__ = ("_codec", "_secrets", "_text")

    def __init__(self, codec: Codec, text: str, found: list[Any]) -> None:
        self._codec = codec
        self._text = text
        self._secrets = found

    def fresh(self) -> Any:
        """The value, its secrets included. Raises ValueError as the codec's `decode` does."""
        with secrets.kept(self._secrets):
            return self._codec.decode(self._text)


# --- the choice -------------------------------------------------------------------------------------------------------

_cache: dict[Any, Codec] = {}
_CACHE_MAX: Final = 4_096


def codec_for(annotation: Any) -> Codec:
    """The codec of an annotation, the same for every value. `inspect.Parameter.empty` stands for a missing one."""
    # int | str == str | int, but pydantic tries members in order: so the text of an annotation is part of its key
    key = annotation if type(annotation) is type else (repr(annotation), annotation)
    try:
        found = _cache.get(key)
    except TypeError:  # unhashable: Annotated[int, []]
        return _choose(annotation)
    if found is None:
        if len(_cache) >= _CACHE_MAX:
            _cache.clear()
        found = _cache[key] = _choose(annotation)
    return found


def _choose(annotation: Any) -> Codec:
    for known, codec in _SCALARS:
        if annotation is known:
            return codec
    if _is_open(annotation):
        return _Tagged(annotation)
    try:
        return _Typed(annotation)
    except (pydantic.PydanticUserError, pydantic_core.SchemaError, NameError, TypeError):
        return _Tagged(annotation)  # no schema for it (a client), or not this one (typing.TypedDict on 3.11)


_CONCRETE: Final = (
    list,
    dict,
    tuple,
    set,
    frozenset,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
_ABSTRACT: Final = tuple(
    getattr(collections.abc, name)
    for name in (
        *("Sequence", "MutableSequence", "Mapping", "MutableMapping", "Set", "MutableSet"),
        *("Iterable", "Iterator", "Collection", "Container", "Reversible", "Hashable", "Sized"),
    )
)
_ANYTHING: Final = (Any, typing_extensions.Any, object, inspect.Parameter.empty, typing.Hashable)


def _is_open(annotation: Any) -> bool:
    """Whether the annotation leaves a type to the value."""
    if any(annotation is one for one in _ANYTHING) or isinstance(annotation, (str, typing.TypeVar)):
        return True
    origin = typing.get_origin(annotation)
    if origin is None:
        return any(annotation is one for one in (*_CONCRETE, *_ABSTRACT))
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _is_open(arguments[0])
    if origin in _ABSTRACT:
        return True
    if origin in _CONCRETE:
        # typing.List has an origin and no arguments; tuple[()] has neither, and is closed
        return (not arguments and annotation != tuple[()]) or any(_is_open(x) for x in arguments if x is not ...)
    if origin in (typing.Union, types.UnionType):
        return any(map(_is_open, arguments))
    return False


# --- open annotations: tags -------------------------------------------------------------------------------------------


class _Tagged(Codec):
    """JSON as it is, and tags for what JSON has no form for."""

    declared = frozenset()

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._adapter: TypeAdapter[Any] | None = None
        self._opaque: type[Any] | None = None  # a class that pydantic has no schema for

    def encode(self, value: Any) -> str:
        plain = value if is_plain(value) else tag(value)
        try:
            text = escape(compact(plain))
        except ValueError:
            raise NotJournalable(HUGE_INT) from None
        if len(text) > INT_DIGITS_MAX and has_huge_int(text):
            raise NotJournalable(HUGE_INT)
        return text

    def decode(self, text: str) -> Any:
        value = parse(unescape(text))
        if '"~' not in text:
            return value
        try:
            return revive(value)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"a tag that cannot be read: {type(error).__name__}") from None

    def canonical(self, text: str) -> str:
        if '"~' in text:
            return sorted_keys(sort_pairs(parse(text)))
        return super().canonical(text)

    def equal(self, value: Any, twin: Any) -> bool:
        return _same(value, twin, 0, self.declared)  # a tag keeps the class and whatever `==` does not see

    def alike(self, value: Any, other: Any) -> bool:
        return super().equal(value, other)

    def from_json(self, value: Any) -> Any:
        adapter = self._schema()
        if adapter is not None:
            return adapter.validate_json(compact(value), by_alias=False, by_name=True)
        if self._opaque is not None and not isinstance(value, self._opaque):
            raise ValueError(f"{_short(self._opaque)} has no JSON form")
        return value

    def json_schema(self) -> dict[str, Any]:
        adapter = self._schema()
        return {} if adapter is None else _json_schema(adapter)

    def _schema(self) -> TypeAdapter[Any] | None:
        """What pydantic makes of the annotation, for those who give plain JSON: a list for a tuple."""
        if any(self._annotation is one for one in _ANYTHING) or isinstance(self._annotation, (str, typing.TypeVar)):
            return None
        if self._adapter is None:
            try:
                self._adapter = TypeAdapter(self._annotation)
            except (pydantic.PydanticUserError, pydantic_core.SchemaError, NameError, TypeError):
                if type(self._annotation) is type:
                    self._opaque = cast(type[Any], self._annotation)
                self._annotation = Any
        return self._adapter


tagged: Final = _Tagged(Any)
"""The codec of values whose annotation says nothing of them: each part carries a tag of what it is."""


# --- closed annotations: pydantic -------------------------------------------------------------------------------------

_CONFIG: Final[pydantic_core.CoreConfig] = {
    "ser_json_bytes": "base64",
    "val_json_bytes": "base64",
    "ser_json_inf_nan": "strings",
}
_READS_SECRET: Final = {"type": "no-info", "function": secrets.read}
_OPAQUE_KEYS: Final = frozenset({"metadata", "default", "default_factory", "cls", "expected", "members"})
_BY_NAME: Final = ("fields", "choices")  # dicts whose keys are the author's: a field may be called `default`
_OPEN_SCHEMAS: Final = frozenset({"any", "is-instance", "is-subclass", "callable", "function-plain"})
_LIKE_OPAQUE: Final = '{"~type"'
_UNFIT: Final = re.compile(r"<(iterator|part) (\d+)>")

ITERATED: Final = "an iterator can be read only once, and recording it would leave none of it: give a list or a tuple"
"""Why a value with an iterator is not journaled."""

# Schemas whose JSON is the same for equal values.
_PLAIN_SCHEMAS: Final = frozenset(
    (
        *("none", "bool", "int", "float", "complex", "decimal", "str", "bytes", "date", "timedelta", "uuid"),
        *("url", "multi-host-url", "literal", "enum", "list", "tuple", "set", "frozenset", "nullable", "union"),
        *("tagged-union", "model", "model-fields", "model-field", "dataclass", "dataclass-args", "dataclass-field"),
        *("default", "definitions", "definition-ref", "chain", "lax-or-strict", "json-or-python", "is-instance"),
        *("function-after", "function-before", "function-wrap", "to-string", "format"),
    )
)


# Schemas of values made of builtins alone, of which marshal sees everything.
_BUILTIN_SCHEMAS: Final = frozenset(("none", "bool", "int", "float", "str", "list", "tuple", "dict", "nullable"))


class _Typed(Codec):
    """A closed annotation: pydantic's serializer with warnings as errors, and field names, not aliases."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._adapter = adapter = TypeAdapter(annotation)
        if not isinstance(adapter.core_schema, dict):
            adapter.rebuild(raise_errors=True)  # a model that waits for a name to be defined
        schema = _prepare(adapter.core_schema)
        nodes = list(_nodes(schema))
        kinds = {node["type"] for node in nodes}
        self.secretive = any((n.get("function") or {}) == _READS_SECRET for n in nodes)
        self.declared = _declared(nodes, kinds)
        self._authored = any(map(_is_authored, nodes))
        self.stable = kinds <= _PLAIN_SCHEMAS and not any(map(_is_unordered, nodes))
        self._builtin = kinds <= _BUILTIN_SCHEMAS and not any("serialization" in node for node in nodes)
        self._dump = _serializer(schema).to_json
        self._load = _validator(schema).validate_json

    def encode(self, value: Any) -> str:
        if type(value) is types.GeneratorType:  # pydantic would read it to its end
            raise NotJournalable(f"$: cannot journal {a(value)}")
        if self._authored and secrets.is_refusing() and (path := path_of_secret(value)) is not None:
            raise NotJournalable(f"${path}: {secrets.REFUSED}")
        try:
            text = escape(self._dump(value, by_alias=False, round_trip=True, warnings="error").decode())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what an author's own serializer raises
            raise NotJournalable(self._why(value, error)) from None
        if text.startswith(_LIKE_OPAQUE):
            text = f"{{ {text[1:]}"  # a dict of the user's: a space tells it from an argument that has no record
        if len(text) > INT_DIGITS_MAX and has_huge_int(text):
            raise NotJournalable(HUGE_INT)
        return text

    def encode_checked(self, value: Any) -> tuple[str, Any]:
        found = self._encode_builtins(value) if self._builtin else None
        return found if found is not None else super().encode_checked(value)

    def _encode_builtins(self, value: Any) -> tuple[str, Any] | None:
        """`encode_checked` for what is made of builtins and comes back the same in marshal's eyes; None for all else, which is
        for `encode` to judge. Of what comes back the same pydantic has nothing to warn: asking it to costs five times what
        the JSON of a small value does.
        """
        try:
            seen = marshal.dumps(value, _MARSHAL_VERSION)  # refuses other classes, generators too, before they are read
            text = escape(self._dump(value, by_alias=False, round_trip=True, warnings=False).decode())
            if len(text) > INT_DIGITS_MAX or text.startswith(_LIKE_OPAQUE):
                return None
            twin = self.decode(text)
        except Exception:
            return None
        return (text, twin) if marshal.dumps(twin, _MARSHAL_VERSION) == seen else None

    def decode(self, text: str) -> Any:
        return self._load(unescape(text), by_alias=False, by_name=True)

    def from_json(self, value: Any) -> Any:
        if self.secretive:  # what others wrote may hold one in clear; a record never does
            return self._adapter.validate_json(compact(value), by_alias=False, by_name=True)
        return self._load(compact(value), by_alias=False, by_name=True)

    def json_schema(self) -> dict[str, Any]:
        return _json_schema(self._adapter)

    def emptied(self, value: Any) -> str | None:
        return next((path for path, one in _found_in(value, _is_generator) if one is not value), None)

    def _why(self, value: Any, error: BaseException) -> str:
        """The sentence for a value that pydantic does not serialize. Never quotes the value: it may be a secret."""
        said = _said(error)
        if "SecretMet" in said:
            return f"${path_of_secret(value) or ''}: {secrets.REFUSED}"
        unfit = _UNFIT.search(said)
        at = next(_found_in(value, lambda one: id(one) == int(unfit[2])), None) if unfit else None
        where = f"${at[0]}" if at else "$"
        if unfit and unfit[1] == "iterator":
            return f"{where}: {ITERATED}"
        try:
            tag(value)
        except NotJournalable as found:
            return str(found)
        if unfit and at:
            return f"{where}: {a(at[1])} where Any holds JSON: annotate it with its own type{_open_instead(value)}"
        try:
            self._adapter.validate_python(value, by_alias=False, by_name=True)
        except pydantic.ValidationError as found:
            return f"{misfit(found)} (declared {_short(self._annotation)})"
        except Exception:
            pass  # a validator of the author's that raises something of its own says no more than the first error
        if "surrogate" in said:
            return f"$: cannot journal text with a lone surrogate inside of {_short(self._annotation)}"
        return f"$: cannot journal {a(value)} as {_short(self._annotation)} ({type(error).__name__})"


def _prepare(schema: Any, extra: bool = False, shared: dict[str, Any] | None = None) -> Any:
    """A core schema as our codec needs it.

    Our config is in every model and dataclass, which else bring their own; sets are sorted; a secret is never given to
    an author's serializer; what is left open holds JSON; and no iterator is read.

    Args:
        schema: a part of a core schema.
        extra: the model around it takes extra fields.
        shared: definitions by their name.
    """
    if isinstance(schema, dict):
        if shared is None:
            shared = {node["ref"]: node for node in _nodes(schema) if "ref" in node}
        if secrets.is_secret_schema(schema):
            return secrets.core_schema_of(schema)
        kind = schema.get("type")
        if kind in ("model", "typed-dict", "dataclass"):
            found = schema.get("extra_behavior") or (schema.get("config") or {}).get("extra_fields_behavior")
            extra = found == "allow"
        made = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                made[key] = {name: _prepare(part, extra, shared) for name, part in value.items()}
            else:
                made[key] = value if key in _OPAQUE_KEYS else _prepare(value, extra, shared)
        return _with_writer(made, schema, extra, shared) if isinstance(kind, str) else made
    if isinstance(schema, list):
        return [_prepare(item, extra, shared) for item in schema]
    if isinstance(schema, tuple):
        return tuple(_prepare(item, extra, shared) for item in schema)
    return schema


def _with_writer(made: dict[str, Any], schema: dict[str, Any], extra: bool, shared: dict[str, Any]) -> dict[str, Any]:
    """A prepared part of a core schema with the serializer that it needs."""
    kind = made["type"]
    writer = made.get("serialization")
    if isinstance(writer, dict):
        by_author = str(writer.get("type")).startswith("function") and _holds_secret(schema, shared, set())
        if (
            by_author or writer.get("type") == "any"
        ):  # SerializeAsAny: the instance's own serializer, whatever it writes
            del made["serialization"]
    if kind in ("model", "dataclass", "typed-dict"):
        made["config"] = {**made.get("config", {}), **_CONFIG}
    if kind in ("model-fields", "typed-dict") and (made.get("extra_behavior") == "allow" or extra):
        made.setdefault("extras_schema", _JSON_ONLY)
    if "serialization" in made:
        return made
    if kind == "generator":
        made["serialization"] = {"type": "function-plain", "function": _unread}
    elif (
        kind in _OPEN_SCHEMAS or (kind == "list" and "items_schema" not in made) or (kind == "dict" and _is_bare(made))
    ):
        made["serialization"] = _JSON_ONLY["serialization"]
    elif kind in ("set", "frozenset"):
        inner = {"items_schema": _JSON_ONLY, **{key: value for key, value in made.items() if key != "ref"}}
        made["serialization"] = {
            "type": "function-wrap",
            "function": _sorted_members,
            "schema": inner,
            "when_used": "json",
        }
    return made


def _is_bare(schema: dict[str, Any]) -> bool:
    return "keys_schema" not in schema and "values_schema" not in schema


def _holds_secret(schema: Any, shared: dict[str, Any], seen: set[str]) -> bool:
    """Whether a part of a core schema has a place for a secret in it."""
    for node in _nodes(schema):
        if secrets.is_secret_schema(node):
            return True
        name = node.get("schema_ref")
        if isinstance(name, str) and name not in seen and name in shared:
            seen.add(name)
            if _holds_secret(shared[name], shared, seen):
                return True
    return False


def _is_authored(node: dict[str, Any]) -> bool:
    """Whether a serializer of the author's writes this part."""
    writer = node.get("serialization")
    if not isinstance(writer, dict) or not str(writer.get("type", "")).startswith("function"):
        return False
    module = str(getattr(writer.get("function"), "__module__", ""))
    return module.partition(".")[0] not in ("pydantic", "pydantic_core") and not module.startswith("replaykit.replay.")


def _declared(nodes: list[dict[str, Any]], kinds: set[str]) -> frozenset[type]:
    """The classes that an equal value of another may become."""
    literal = {type(one) for node in nodes if node["type"] == "literal" for one in node.get("expected") or ()}
    found: set[type] = {kind for kind in (int, float, str) if kind.__name__ in kinds}
    if str in literal:
        found.add(str)  # a member of a StrEnum is that text
    if int in literal and "bool" in kinds:
        found.discard(int)  # pydantic reads true as a literal 1
    return frozenset(found)


class _Unfit(ValueError):
    """A part has no JSON in its place; the message has its identity, for pydantic passes on nothing else."""


def _unread(value: Any) -> Any:
    raise _Unfit(f"<iterator {id(value)}>")


def _json_only(value: Any) -> Any:
    """`value`, where an annotation leaves a type open: no class that JSON would hide, and no secret."""
    kind = type(value)
    if kind in _AS_JSON:
        return value
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                _json_only(key)
            if type(item) not in _AS_JSON:
                _json_only(item)
    elif kind in (list, tuple, set, frozenset, collections.deque):
        for item in value:
            if type(item) not in _AS_JSON:
                _json_only(item)
    elif isinstance(value, secrets.SECRETS):
        raise secrets.SecretMet("secrets are never written")
    else:
        raise _Unfit(f"<{'iterator' if isinstance(value, Iterator) else 'part'} {id(value)}>")
    return value


def _sorted_members(value: Any, encode: Any) -> Any:
    """A set's own order differs between processes: its members go in the order of their encoding."""
    return sorted(encode(value), key=sorted_keys)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of a core schema that have a type, the schema itself first."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                for part in value.values():
                    yield from _nodes(part)
            elif key not in _OPAQUE_KEYS:
                yield from _nodes(value)
    elif isinstance(schema, (list, tuple)):
        for item in schema:
            yield from _nodes(item)


def _is_unordered(node: dict[str, Any]) -> bool:
    """Whether the JSON of a part may differ for equal values although its type's does not."""
    writer = node.get("serialization")
    if isinstance(writer, dict) and str(writer.get("type", "")).startswith("function"):
        return writer.get("function") is not _sorted_members
    extra = node.get("extra_behavior") or (node.get("config") or {}).get("extra_fields_behavior")
    return extra == "allow"


def _serializer(schema: Any) -> pydantic_core.SchemaSerializer:
    try:  # a model's own finished serializer would be taken, and with it the model's own config
        return pydantic_core.SchemaSerializer(schema, _CONFIG, _use_prebuilt=False)
    except TypeError:  # pydantic before 2.12 has no such argument
        return pydantic_core.SchemaSerializer(schema, _CONFIG)


def _validator(schema: Any) -> pydantic_core.SchemaValidator:
    try:
        return pydantic_core.SchemaValidator(schema, _CONFIG, _use_prebuilt=False)
    except TypeError:
        return pydantic_core.SchemaValidator(schema, _CONFIG)


class _WithSecrets(GenerateJsonSchema):
    """Marks the places of secrets: those who start a run by name know its workflow by this schema alone."""

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        found = super().generate_inner(schema)
        is_secret = secrets.is_secret_schema(schema.get("lax_schema", schema))  # pydantic's own wrap it
        return {**found, secrets.IN_SCHEMA: True} if is_secret else found


def _json_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    try:
        return adapter.json_schema(by_alias=False, schema_generator=_WithSecrets)
    except (pydantic.PydanticUserError, pydantic_core.PydanticOmit):
        return {}


_JSON_ONLY: Final = {"type": "any", "serialization": {"type": "function-plain", "function": _json_only}}


# --- scalars: what most steps have; a call of pydantic's serializer costs 1 us, of these 0.1 to 0.3 -------------------


class _Scalar(Codec):
    """A closed annotation of one scalar, with the same JSON as pydantic's."""

    stable = True
    exact = True

    def __init__(self, annotation: Any) -> None:
        self._adapter = TypeAdapter(annotation)
        self._load = self._adapter.validator.validate_json

    def decode(self, text: str) -> Any:
        return self._load(text)

    def from_json(self, value: Any) -> Any:
        return self._adapter.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        return _json_schema(self._adapter)


class _Int(_Scalar):
    def encode(self, value: Any) -> str:
        if type(value) is not int and not _may_stand_for(value, 0, self.declared):
            raise NotJournalable(_misplaced(value, "int"))
        try:
            return int.__repr__(value)  # of True and of an IntEnum's member, too
        except ValueError:
            raise NotJournalable(HUGE_INT) from None


class _Bool(_Scalar):
    def encode(self, value: Any) -> str:
        if value is True:
            return "true"
        if value is False:
            return "false"
        raise NotJournalable(_misplaced(value, "bool"))


class _None(_Scalar):
    def encode(self, value: Any) -> str:
        if value is None:
            return "null"
        raise NotJournalable(_misplaced(value, "None"))


class _Float(_Scalar):
    def encode(self, value: Any) -> str:
        if type(value) is not float:
            if not _may_stand_for(value, 0.0, self.declared):
                raise NotJournalable(_misplaced(value, "float"))
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if number != value and value == value:
                raise NotJournalable("$: an int that no float equals, where float is declared")
            value = number
        if math.isfinite(value):
            return float.__repr__(value)
        return '"NaN"' if value != value else ('"Infinity"' if value > 0 else '"-Infinity"')


class _Str(_Scalar):
    _dump = staticmethod(json.encoder.encode_basestring)

    def encode(self, value: Any) -> str:
        if type(value) is not str:
            if not (isinstance(value, str) and isinstance(value, enum.Enum)):
                raise NotJournalable(_misplaced(value, "str"))
            value = str.__str__(value)  # a member of a StrEnum equals its text
        return escape(self._dump(value))

    def decode(self, text: str) -> Any:
        if text.isascii():
            return self._load(text)
        text = unescape(text)
        try:
            return self._load(text)
        except ValueError:
            value = json.loads(text)  # lone surrogates, which pydantic refuses
            if type(value) is not str:
                raise
            return value


def _misplaced(value: Any, declared: str) -> str:
    if isinstance(value, secrets.SECRETS):
        return f"$: {secrets.REFUSED}"
    return f"$: {a(value)} where {declared} is declared"


_SCALARS: Final[tuple[tuple[Any, Codec], ...]] = (
    (int, _Int(int)),
    (str, _Str(str)),
    (bool, _Bool(bool)),
    (float, _Float(float)),
    (None, _None(None)),
    (type(None), _None(None)),
)


# --- comparing and explaining -----------------------------------------------------------------------------------------


def _same(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    """Whether `twin` equals `value`, part by part where `==` can't tell: NaN, and classes without a comparison."""
    if not _may_stand_for(value, twin, declared) or depth > DEPTH_MAX:
        return False
    try:
        if value == twin:
            return True
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False  # an array, for one, has no truth
    if isinstance(value, (float, decimal.Decimal)):
        return bool(value != value and twin != twin)
    if isinstance(value, complex):
        return _same(value.real, twin.real, depth, declared) and _same(value.imag, twin.imag, depth, declared)
    if isinstance(value, enum.Enum):
        return False
    if isinstance(value, (set, frozenset)):
        return len(value) == len(twin) and _nan_apart(value) == _nan_apart(twin)
    if isinstance(value, dict):
        return _same_members(value, twin, depth + 1, declared)
    if not isinstance(value, _COMPARED_BY_PARTS) and not _by_identity(value) and not _is_plain_dataclass(type(value)):
        return False
    mine, other = _parts(value), _parts(twin)
    if not mine or [name for name, _ in mine] != [name for name, _ in other]:
        return _by_identity(value) and not mine and not other
    return all(_same(x, y, depth + 1, declared) for (_, x), (_, y) in zip(mine, other, strict=True))


def _same_members(value: dict[Any, Any], twin: dict[Any, Any], depth: int, declared: frozenset[type]) -> bool:
    """Dicts by their keys, which are compared as values too; keys that no lookup finds (NaN) by their order."""
    if len(value) != len(twin):
        return False
    pairs = [(item, twin[key]) for key, item in value.items() if key in twin]
    if len(pairs) < len(value):
        lost, other = [key for key in value if key not in twin], [key for key in twin if key not in value]
        if len(lost) != len(other) or not all(map(_same, lost, other, repeat(depth), repeat(declared))):
            return False
        pairs += [(value[key], twin[twin_key]) for key, twin_key in zip(lost, other, strict=True)]
    return all(_same(x, y, depth, declared) for x, y in pairs)


def _is_plain_dataclass(cls: type[Any]) -> bool:
    return dataclasses.is_dataclass(cls) and bool(_compares_all(cls))


def _by_identity(value: Any) -> bool:
    """Whether its class has no `__eq__` of its own."""
    own: Any = type(value).__eq__
    return own is object.__eq__


_COMPARED_BY_PARTS: Final = (list, tuple, collections.deque, BaseModel)


def _may_stand_for(value: Any, twin: Any, declared: frozenset[type]) -> bool:
    kind = type(twin)
    if type(value) is kind:
        return True
    if kind not in declared:
        return False
    if kind is float or kind is int:
        if not isinstance(value, int) and not (kind is float and isinstance(value, float)):
            return False
        return isinstance(value, enum.Enum) or not getattr(value, "__dict__", None)  # a unit of its own would be lost
    return kind is str and isinstance(value, str) and isinstance(value, enum.Enum)


def _nan_apart(members: Any) -> tuple[frozenset[Any], int]:
    proper = frozenset(x for x in members if x == x)
    return proper, len(members) - len(proper)


# Of equal values of these classes nothing is left to see; float and int are told apart by their class.
_ATOMS: Final[frozenset[type]] = frozenset(
    (int, str, float, bool, type(None), bytes, dt.date, dt.timedelta, decimal.Decimal, uuid.UUID)
)
_AS_JSON: Final = frozenset((*_ATOMS, dt.datetime, dt.time, complex))  # what pydantic writes by its class
_MARSHAL_VERSION: Final = 2  # without references, which tell shared parts from equal ones


_Walk = Callable[[Any, Any, int, frozenset[type]], bool]


def _hides(value: Any, twin: Any, declared: frozenset[type]) -> bool:
    """`_loses`, with a way of C speed for values made of builtins alone: marshal refuses subclasses."""
    if type(value) in _ATOMS and type(value) is type(twin):
        return False
    if type(value) in (list, dict, tuple) and _same_builtins(value, twin):
        return False
    return _loses(value, twin, 0, declared)


def _same_builtins(value: Any, twin: Any) -> bool:
    try:
        return marshal.dumps(value, _MARSHAL_VERSION) == marshal.dumps(twin, _MARSHAL_VERSION)
    except ValueError:  # some other class
        return False


def _loses(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    """Whether equal values differ in what `==` does not see.

    That is the class of a part (a named tuple in a list of tuples), a zone, a fold, a deque's maxlen, a default factory,
    and whatever a class leaves out of its comparison.
    """
    kind = type(value)
    if kind is not type(twin):
        return not _may_stand_for(value, twin, declared)
    if kind in _ATOMS or depth > DEPTH_MAX:
        return False
    walk = _walk_of(kind)  # type: ignore[arg-type]
    return walk is not None and walk(value, twin, depth + 1, declared)


@functools.lru_cache(1_024)
def _walk_of(kind: type[Any]) -> _Walk | None:
    """How parts of a value of this class are compared; None when it has none that we know of."""
    for base, walk in _WALKS:
        if issubclass(kind, base):
            return walk
    return _loses_fields if dataclasses.is_dataclass(kind) else None


def _loses_moment(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    zones = value.tzinfo, twin.tzinfo
    return value.fold != twin.fold or not (zones[0] is zones[1] or (is_fixed(zones[0]) and is_fixed(zones[1])))


def _loses_items(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    kinds = list(map(type, value))
    if kinds == list(map(type, twin)):
        if _ATOMS.issuperset(kinds):
            return False
        one = kinds[0]
        alike = _is_flat(one) and kinds.count(one) == len(kinds)  # many of one model
        if alike and _same_builtins([item.__dict__ for item in value], [item.__dict__ for item in twin]):
            return False
    return any(_loses(x, y, depth, declared) for x, y in zip(value, twin, strict=True))


def _loses_queue(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    return value.maxlen != twin.maxlen or _loses_items(value, twin, depth, declared)


def _loses_members(value: dict[Any, Any], twin: dict[Any, Any], depth: int, declared: frozenset[type]) -> bool:
    names = list(value)
    if names != list(twin) and all(name in twin for name in names):  # equal, in another order
        by_value = {name: name for name in twin}
        twin = {by_value[name]: twin[name] for name in names}
    if _loses_items(names, list(twin), depth, declared):
        return True
    return _loses_items(list(value.values()), list(twin.values()), depth, declared)


def _loses_factory(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    return value.default_factory is not twin.default_factory or _loses_members(value, twin, depth, declared)


def _loses_set(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    by_value = {item: item for item in twin}
    return any(_loses(item, by_value.get(item, item), depth, declared) for item in value)


def _loses_fields(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    if _is_flat(type(value)) and _same_builtins(value.__dict__, twin.__dict__):  # type: ignore[arg-type]
        return False
    mine, other = _fields(value), _fields(twin)
    if mine.keys() != other.keys():
        return True
    compares_all: bool = _compares_all(type(value))  # type: ignore[arg-type]
    if not compares_all and not all(_same(item, other[name], depth, declared) for name, item in mine.items()):
        return True
    return _loses_members(mine, other, depth, declared)


def _loses_sign(value: Any, twin: Any, depth: int, declared: frozenset[type]) -> bool:
    pairs = (value.real, twin.real), (value.imag, twin.imag)
    return any(x == x and math.copysign(1, x) != math.copysign(1, y) for x, y in pairs)


_WALKS: Final[tuple[tuple[type, _Walk], ...]] = (
    (dt.datetime, _loses_moment),
    (dt.time, _loses_moment),
    (complex, _loses_sign),
    (collections.defaultdict, _loses_factory),
    (dict, _loses_members),
    (list, _loses_items),
    (tuple, _loses_items),
    (collections.deque, _loses_queue),
    (set, _loses_set),
    (frozenset, _loses_set),
    (BaseModel, _loses_fields),
)


@functools.lru_cache(1_024)
def _compares_all(cls: type[Any]) -> bool:
    """Whether `==` of a model or dataclass sees each of its fields."""
    if issubclass(cls, BaseModel):
        return cls.__eq__ is BaseModel.__eq__
    made = getattr(cls.__eq__, "__code__", None)  # dataclasses compile theirs from text
    return made is not None and made.co_filename == "<string>" and all(f.compare for f in dataclasses.fields(cls))


@functools.lru_cache(1_024)
def _is_flat(cls: type[Any]) -> bool:
    """Whether instances are their `__dict__` and nothing more."""
    if issubclass(cls, BaseModel):
        extra = cls.model_config.get("extra") == "allow" or cls.__private_attributes__
        return not extra and _compares_all(cls)
    return dataclasses.is_dataclass(cls) and not hasattr(cls, "__slots__") and _compares_all(cls)


def _is_made_anew(cls: type, name: str) -> bool:
    """Whether an attribute that is no field is back when the class has made the value again."""
    return name == "_sa_instance_state" or is_cache(cls, name)  # SQLAlchemy's own, on each row of a SQLModel


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a model or dataclass, and what else was set on it: extra fields, private attributes; no cached_property."""
    cls = type(value)
    beyond = slots_beyond(cls)  # type: ignore[arg-type]
    more = {name: getattr(value, name) for name in beyond if hasattr(value, name)} if beyond else {}
    if not isinstance(value, BaseModel):
        found = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        own: dict[str, Any] = getattr(value, "__dict__", {})
        if own.keys() - found.keys():
            more |= {name: item for name, item in own.items() if name not in found and not _is_made_anew(cls, name)}
        return found | more if more else found
    found = cast(Any, value).__dict__  # a model's own, not its class'
    fields = cls.__pydantic_fields__
    if len(found) > len(fields):
        found = {name: item for name, item in found.items() if name in fields or not _is_made_anew(cls, name)}
    extra, private = value.__pydantic_extra__, value.__pydantic_private__
    return {**found, **(extra or {}), **(private or {}), **more} if extra or private or more else found


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value, each with its place as it stands in a path."""
    if isinstance(value, dict):
        return [(f".{key}" if type(key) is str else f"[{key_text(key)}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [(f"[{n}]", item) for n, item in enumerate(value)]
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return [(f".{name}", item) for name, item in _fields(value).items()]
    found = [(f".{name}", getattr(value, name)) for name in slots_beyond(type(value)) if hasattr(value, name)]  # type: ignore[arg-type]
    return found + [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]


_OTHERS_MAX: Final = 10_000
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, collections.deque, BaseModel)
_NOT_WALKED: Final[tuple[type, ...]] = (
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    enum.Enum,
    str,
    bytes,
    int,
    float,
    *_ATOMS,
)


def _found_in(value: Any, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """What is wanted among the parts of a value, each with its path.

    All containers and models are walked, and 10,000 objects of other classes: a client may refer to half the process.
    """
    seen: dict[int, Any] = {}  # keeps the parts, so that no identity is used twice
    others = 0
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, one = waiting.pop()
        if wanted(one):
            yield path, one
            continue
        if isinstance(one, _NOT_WALKED) or id(one) in seen:
            continue
        seen[id(one)] = one
        if not isinstance(one, _CONTAINERS) and not dataclasses.is_dataclass(one):
            others += 1
            if others > _OTHERS_MAX:
                continue
        parts = [(f"[{n}]", part) for n, part in enumerate(one)] if isinstance(one, (set, frozenset)) else _parts(one)
        if isinstance(one, dict):
            parts += [(f".keys()[{n}]", key) for n, key in enumerate(one) if type(key) is not str]
        waiting += [(path + name, part) for name, part in reversed(parts)]


def _is_secret(value: Any) -> bool:
    return isinstance(value, secrets.SECRETS)


def _is_generator(value: Any) -> bool:
    return isinstance(value, types.GeneratorType)


def _difference(value: Any, twin: Any, declared: frozenset[type]) -> str:
    """The sentence for a value that does not come back: the path of the first part that differs, and how."""
    path, whole = "", value
    for _ in range(DEPTH_MAX):
        if not _may_stand_for(value, twin, declared):
            return f"${path}: {a(value)} would come back as {a(twin)}: annotate it with its own type"
        mine, other = _parts(value), _parts(twin)
        names = [name for name, _ in other]
        if isinstance(value, dt.datetime) or [name for name, _ in mine] != names:
            lost = [] if isinstance(value, dict) else [name for name, _ in mine if name not in names]
            if lost:
                return f"${path}{lost[0]}: not a field of {type(value).__qualname__}, so it would be lost"
            break
        for (name, part), (_, part_twin) in zip(mine, other, strict=True):
            if not _same(part, part_twin, 0, declared) or _loses(part, part_twin, 0, declared):
                path, value, twin = path + name, part, part_twin
                break
        else:
            break
    if isinstance(value, (dt.datetime, dt.time)):
        return (
            f"${path}: {a(value)} would lose its zone or fold: keep UTC or a fixed offset, or leave the annotation open"
        )
    return f"${path}: {a(value)} would not come back equal{_open_instead(whole)}"


def _open_instead(value: Any) -> str:
    """The way out for a value that its annotation loses, where tags would keep it."""
    try:
        kept = tagged.equal(value, tagged.decode(tagged.encode(value)))
    except (NotJournalable, ValueError):
        return ""
    return ": an open annotation (Any) at the door would keep it" if kept else ""


def path_of_secret(value: Any) -> str | None:
    """The path of the first secret in a value (`.order.card`), None when it has none."""
    return next((path for path, _ in _found_in(value, _is_secret)), None)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an author's own __str__
        return ""


def misfit(error: BaseException) -> str:
    """One sentence for JSON or a value that does not fit: path and reason, without the value."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        return f"${path}: {first['msg']}"
    if isinstance(error, ReplaykitError):  # names what and where by itself
        return str(error)
    if type(error) is not ValueError:
        return f"$: {type(error).__name__}"
    said = _said(error)
    return said if said.startswith("$") else f"$: {said}"


def _short(annotation: Any) -> str:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation.__qualname__
    return repr(annotation).replace("typing.", "")[:200]

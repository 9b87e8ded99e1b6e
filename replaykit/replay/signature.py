"""A function as the journal sees it: its name, its parameters bound, encoded and digested, its result.

An input is recorded as one JSON object by parameter name, in the order of the signature, with what the call gave and
not the defaults it left: a parameter that is added later with a default changes no recorded input. `*args` stand under
their name as a list, `**kwargs` as an object.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from replaykit.errors import ConfigurationError, NotJournalable
from replaykit.replay.codec import ITERATED, Codec, Masked, codec_for, misfit
from replaykit.replay.secrets import NOT_HANDED_OVER, REFUSED
from replaykit.replay.tags import a, name_of

__all__ = [
    "GROWN_CHARS_MIN",
    "BoundInput",
    "FunctionInfo",
    "GrowingInputs",
    "describe",
    "same_input",
    "shorten_input",
]

_EMPTY: Final = inspect.Parameter.empty
_CALL: Final = '{"~call":'  # a start by name that nobody could bind (SQL's start()): args and kwargs as they were given
_OPAQUE: Final = "~type"  # {"~type": "httpx.AsyncClient"}: an argument that can't be journaled, by its type's name
_SHORTENED: Final = "~sha256"  # {"~sha256": ..., "size": ..., "head": ...}: an input too large to be kept
_SHORTENED_TEXT: Final = f'{{"{_SHORTENED}"'
_HEAD_CHARS: Final = 200
_GROWING_MAX: Final = 16  # steps of a run whose last input is remembered

GROWN_CHARS_MIN: Final = 1_024
"""An input that begins as the last one of its step did, this far at least, is recorded by what is new in it."""


@dataclass(slots=True)
class BoundInput:
    """The arguments of one call.

    Attributes:
        text: JSON object by parameter name, as recorded.
        digest: SHA-256, hex, of its canonical form without the live arguments; a secret counts as `***`.
        live: arguments that are more than their record, by parameter: those that can't be journaled (recorded as their
            type's name) and those that hold secrets (recorded with `***`).
        given: the caller's own arguments, while they are still to be compared with their twins.
    """

    text: str
    digest: str
    live: dict[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)


class FunctionInfo:
    """What replaykit needs to know of a function. Made by `describe`, once a function.

    Attributes:
        name: `charge`, `Class.method` for methods; None for lambdas, partials and nameless callables.
        is_async: calling it gives a coroutine.
        line: `file:line` of its definition, for sentences.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = _name(fn)
        self.line = _line(fn)
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(_call_of(fn))
        self.label = self.name or f"the callable at {self.line}"
        _refuse_generators(fn, self)
        self._signature = _signature(fn)
        hints = _hints(fn)
        parameters = list(self._signature.parameters.values())
        self._codecs = {p.name: _parameter_codec(p, hints.get(p.name, _EMPTY)) for p in parameters}
        self._parameters = {p.name: p for p in parameters}
        self.result = codec_for(hints.get("return", _EMPTY))
        plain = []
        for p in parameters:
            if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                break
            plain.append(p)
        # the fast path: positional arguments alone, and no keyword-only parameter is required
        needs_more = any(p.kind is p.KEYWORD_ONLY and p.default is _EMPTY for p in parameters)
        needs_more = needs_more or any(codec.secretive for codec in self._codecs.values())
        self._prefixes = {p.name: f"{json.dumps(p.name, ensure_ascii=False)}:" for p in parameters}
        self._plain = [(p.name, self._prefixes[p.name], self._codecs[p.name]) for p in plain]
        self._plain_max = -1 if needs_more else len(plain)
        self._plain_min = sum(1 for p in plain if p.default is _EMPTY)
        self._stable = all(codec.stable for codec in self._codecs.values())
        self._exact = all(codec.exact for codec in self._codecs.values())
        self._only: str | None = f"{{{self._plain[0][1]}" if len(parameters) == 1 and plain else None

    # --- what a call gave ---

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool = False) -> BoundInput:
        """Bind, encode and digest the arguments of a call.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            strict: every argument must be journalable, checked here (a step with an effect, a run's input).

        Raises:
            TypeError: the call does not fit the signature; names and counts only, never values.
            NotJournalable: with strict, for the first argument that can't be journaled (`$.order.rows[3]: ...`).
        """
        if kwargs or strict or not self._plain_min <= len(args) <= self._plain_max:
            return self._bind_any(self._given(args, kwargs), strict)
        try:
            if len(args) == 1:
                _, prefix, codec = self._plain[0]
                part = codec.encode(args[0])
                text = canonical = f"{{{prefix}{part}}}"
                if not codec.stable:
                    canonical = f"{{{prefix}{codec.canonical(part)}}}"
            else:
                parts = [codec.encode(value) for (_, _, codec), value in zip(self._plain, args, strict=False)]
                text = canonical = _join(self._plain, parts)
                if not self._stable:
                    stable = [codec.canonical(part) for (_, _, codec), part in zip(self._plain, parts, strict=False)]
                    canonical = _join(self._plain, stable)
        except NotJournalable:
            return self._bind_any(self._given(args, kwargs), strict)
        given = None if self._exact else {name: value for (name, _, _), value in zip(self._plain, args, strict=False)}
        return BoundInput(text, sha256(canonical.encode()).hexdigest(), {}, given)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.label}(): {error}") from None

    def _bind_any(self, given: Mapping[str, Any], strict: bool) -> BoundInput:
        parts: list[str] = []
        canonical: list[str] = []
        live: dict[str, Any] = {}
        for name, value in given.items():
            codec = self._codecs[name]
            prefix = self._prefixes[name]
            try:
                text = codec.encode(value)
                if strict and not codec.exact:
                    codec.check(value, text)
            except NotJournalable as error:
                found = codec.mask(value) if str(error).endswith(REFUSED) else None
                if strict:
                    where = f"$.{name}{str(error)[1:]}"
                    raise NotJournalable(f"{where.partition(': ')[0]}: {NOT_HANDED_OVER}" if found else where) from None
                if found is not None:
                    text, live[name] = found
                    parts.append(prefix + text)
                    canonical.append(prefix + codec.canonical(text))
                    continue
                if isinstance(value, _OF_A_RUN):
                    raise NotJournalable(
                        f"$.{name}: {a(value)} belongs to the run's own tasks, and a body is none of them: what it put there "
                        "would be missing in a replay. Pass values, and let the body return its own"
                    ) from None
                if (path := codec.emptied(value)) is not None:
                    raise NotJournalable(f"$.{name}{path}: {ITERATED}") from None
                live[name] = value
                parts.append(f"{prefix}{json.dumps({_OPAQUE: name_of(type(value))})}")
            else:
                parts.append(prefix + text)
                canonical.append(prefix + codec.canonical(text))
        digest = sha256(f"{{{','.join(canonical)}}}".encode()).hexdigest()
        return BoundInput(f"{{{','.join(parts)}}}", digest, live, None if strict else given)

    def fresh_arguments(self, bound: BoundInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, decoded for its body and compared with the caller's own.

        Raises:
            NotJournalable: one would come back as another. Only for a value that encodes: a replay never asks.
        """
        given = bound.given
        if given is None:
            return self.decode_arguments(bound.text, bound.live)
        values: dict[str, Any] = {}
        for name, text in _split(bound.text).items():
            codec = self._codecs[name]
            live = bound.live.get(name)
            if name in bound.live and not isinstance(live, Masked):
                values[name] = live
                continue
            try:
                twin = live.fresh() if isinstance(live, Masked) else codec.decode(text)
            except Exception as error:
                raise NotJournalable(f"$.{name}{codec.unreadable(given[name], error)[1:]}") from None
            if not codec.exact and not codec.equal(given[name], twin):
                self._check_unchanged(name, given[name], text, twin)
            values[name] = twin
        return self._call(values)

    def _check_unchanged(self, name: str, value: Any, text: str, twin: Any) -> None:
        """Raise for a value that is lost; keep silent for one that the caller changed between the call and the body."""
        codec = self._codecs[name]
        try:
            found = codec.mask(value) or (codec.encode(value),)
            if text == found[0]:
                codec.compare(value, twin)
        except NotJournalable as error:
            raise NotJournalable(f"$.{name}{str(error)[1:]}") from None

    def decode_arguments(self, text: str, live: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh arguments from a recorded input, ready for `fn(*args, **kwargs)`.

        Args:
            text: a recorded input.
            live: what could not be journaled, by parameter.

        Raises:
            ValueError: the input does not fit today's annotations, or was too large to be kept.
        """
        if text.startswith(_CALL):
            call: Any = json.loads(text)["~call"]
            if isinstance(call, list):
                call = {"args": call}
            bound = self.validate_input(call.get("args", []), call.get("kwargs", {}))
            return self.decode_arguments(bound.text, bound.live)
        only = self._only
        if only is not None and not live and text.startswith(only):
            try:
                return (self._plain[0][2].decode(text[len(only) : -1]),), {}
            except ValueError as error:
                raise ValueError(_unreadable(self._plain[0][0], error)) from None
        values: dict[str, Any] = {}
        for name, part in _split(text).items():
            if name in live:
                one = live[name]
                values[name] = one.fresh() if type(one) is Masked else one
            elif name in self._codecs:
                try:
                    values[name] = self._codecs[name].decode(part)
                except ValueError as error:
                    raise ValueError(_unreadable(name, error)) from None
            elif name == _SHORTENED:
                raise ValueError(f"{self.label}(): the input was too large to be kept; its digest alone is recorded")
            else:
                raise ValueError(f"{self.label}() has no parameter {name!r}, which the recorded input holds")
        return self._call(values)

    def decode_input(self, text: str) -> dict[str, Any]:
        """A recorded input as a dict by parameter name, for `StepInfo.input`.

        Live arguments are left out. Where a secret was there is a `Secret` that was never written.
        """
        values: dict[str, Any] = {}
        for name, part in _split(text).items():
            codec = self._codecs.get(name)
            if codec is None or _opaque(part) is not None:
                continue
            try:
                values[name] = codec.decode(part)
            except Exception:
                if not codec.secretive:
                    raise
                # a validator of the author's asked for the secret: without it there is no such value
        return values

    def opaque_arguments(self, bound: BoundInput) -> list[str]:
        """Names of the arguments that are recorded as their type's name alone."""
        return [name for name in bound.live if _opaque(_split(bound.text).get(name, "")) is not None]

    def _call(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_name = False  # after a gap the rest can only be given by name
        for name, p in self._parameters.items():
            if name not in values:
                by_name = by_name or p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            elif p.kind is p.VAR_POSITIONAL:
                args.extend(values[name])
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(values[name])
            elif p.kind is p.KEYWORD_ONLY or by_name:
                kwargs[name] = values[name]
            else:
                args.append(values[name])
        return tuple(args), kwargs

    # --- what it gave back ---

    def encode_result(self, value: Any) -> tuple[str, Any]:
        """JSON text of a result by the return annotation, and its twin: what the first run gets, as replays will.

        Raises:
            NotJournalable: with the path.
        """
        return self.result.encode_checked(value)

    def refused_result(self, error: NotJournalable) -> NotJournalable:
        """The same refusal, with whose result it is of: its own line is one of ours."""
        return NotJournalable(f"{error} (the result of {self.label})")

    def decode_result(self, text: str) -> Any:
        """A fresh result from a recorded one. Raises ValueError when it does not fit today's annotation."""
        return self.result.decode(text)

    # --- for those who call by name ---

    def schema(self) -> dict[str, Any]:
        """JSON schema of the input as an object by parameter name.

        `positional` lists the parameters that may be given by place. A parameter that no schema can be made for has an
        empty one, which everything fits.
        """
        found: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
        found["positional"] = []
        shared: dict[str, Any] = {}  # the definitions that the parameters' schemas refer to
        for name, p in self._parameters.items():
            schema = dict(self._codecs[name].json_schema())
            shared.update(schema.pop("$defs", {}))
            if p.kind is p.VAR_KEYWORD:
                found["additionalProperties"] = schema.get("additionalProperties", True)
                continue
            found["properties"][name] = schema
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                found["positional"].append(name)
            if p.default is _EMPTY and p.kind is not p.VAR_POSITIONAL:
                found["required"].append(name)
        if shared:
            found["$defs"] = shared
        return found

    def validate_input(self, args: list[Any], kwargs: dict[str, Any]) -> BoundInput:
        """Bind arguments that come as plain JSON, coerced by annotation.

        Raises:
            ConfigurationError: they don't fit, with the path (`checkout: $.order.rows[3].cents: ...`).
        """
        try:
            given = self._given(tuple(args), kwargs)
        except TypeError as error:
            raise ConfigurationError(str(error)) from None
        values: dict[str, Any] = {}
        for name, value in given.items():
            try:
                values[name] = self._codecs[name].from_json(list(value) if type(value) is tuple else value)
            except ValueError as error:
                raise ConfigurationError(f"{self.label}: $.{name}{misfit(error)[1:]}") from None
        try:
            return self._bind_any(values, True)
        except NotJournalable as error:
            raise ConfigurationError(f"{self.label}: {error}") from None


def _unreadable(name: str, error: ValueError) -> str:
    return f"$.{name}{misfit(error)[1:]}"


def same_input(info: FunctionInfo, recorded: str, bound: BoundInput) -> bool:
    """Whether a recorded input whose digest differs still means the same by today's annotations (DESIGN 4, Divergence).

    Both are decoded and compared as values with the defaults filled in, so that a field or parameter that was added
    with a default is no divergence. An input that was too large to be kept has its digest alone: False.
    """
    try:
        mine, theirs = _split(bound.text), _split(recorded)
        for name, p in info._parameters.items():
            codec = info._codecs[name]
            a, b = mine.get(name), theirs.get(name)
            if a is None and b is None:
                continue
            if a is not None and b is not None and (a == b or (_opaque(a) and _opaque(b))):
                continue
            value = codec.decode(a) if a is not None else _default(p)
            other = codec.decode(b) if b is not None else _default(p)
            if not codec.alike(value, other):
                return False
        return all(name in info._parameters for name in theirs)
    except Exception:  # of an author's validator, too: what today's annotations can't read is not the same
        return False


def shorten_input(bound: BoundInput, bytes_max: int) -> str:
    """The text to record for a plain step: the input itself, or its digest, size in bytes and head if it is larger."""
    return bound.text if _fits(bound.text, bytes_max) else _shortened(bound)


def _fits(text: str, bytes_max: int) -> bool:
    return len(text) * 4 <= bytes_max or len(text.encode()) <= bytes_max


def _shortened(bound: BoundInput, **more: Any) -> str:
    size, head = len(bound.text.encode()), bound.text[:_HEAD_CHARS]
    return json.dumps({_SHORTENED: bound.digest, "size": size, "head": head, **more}, ensure_ascii=False)


class GrowingInputs:
    """The inputs of one run as they are recorded: of one that grows from call to call, only what is new.

    An agent passes all that was said to each of its turns. Whole, the inputs of n turns would take n * n space. An input
    that begins as the last one of the same step did is kept as digest, size, head, `after` (the digest of that last one),
    `same` (how many characters it begins with alike) and `then` (the rest).
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._last: dict[str, tuple[str, str]] = {}  # by step: digest and whole text

    def record(self, name: str, bound: BoundInput) -> str:
        """The text to record for the next call of a step."""
        text = bound.text
        if len(text) < GROWN_CHARS_MIN:
            return shorten_input(bound, self._bytes_max)
        if not _fits(text, self._bytes_max):
            return _shortened(bound)
        after, before = self._last.get(name, ("", ""))
        self._keep(name, bound.digest, text)
        same = _shared(text, before)
        return text if same < GROWN_CHARS_MIN else _shortened(bound, after=after, same=same, then=text[same:])

    def record_whole(self, name: str, bound: BoundInput) -> str:
        """The text to record for a call whose input is kept in full: of a step with an effect."""
        if len(bound.text) >= GROWN_CHARS_MIN:
            self._keep(name, bound.digest, bound.text)
        return bound.text

    def whole(self, name: str, digest: str | None, text: str) -> str:
        """A recorded input as it was, for the next entry of a journal; as it is recorded if that is all there is."""
        if text.startswith(_SHORTENED_TEXT):
            found = json.loads(text)
            after, before = self._last.get(name, ("", ""))
            if not after or found.get("after") != after:
                return text
            text = before[: found["same"]] + found["then"]
        if len(text) >= GROWN_CHARS_MIN:
            self._keep(name, digest or "", text)
        return text

    def _keep(self, name: str, digest: str, text: str) -> None:
        if name not in self._last and len(self._last) >= _GROWING_MAX:
            self._last.clear()
        self._last[name] = (digest, text)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _join(parameters: list[tuple[str, str, Codec]], texts: list[str]) -> str:
    return f"{{{','.join([prefix + text for (_, prefix, _), text in zip(parameters, texts, strict=False)])}}}"


def _default(p: inspect.Parameter) -> Any:
    if p.kind is p.VAR_POSITIONAL:
        return ()
    if p.kind is p.VAR_KEYWORD:
        return {}
    if p.default is _EMPTY:
        raise LookupError(p.name)
    return p.default


def _opaque(text: str) -> str | None:
    if not text.startswith('{"~type"'):
        return None
    found = json.loads(text)
    return found[_OPAQUE] if len(found) == 1 else None


_scan = json.JSONDecoder().raw_decode
_skip = re.compile(r"[ \t\n\r]*").match


def _split(text: str) -> dict[str, str]:
    """The members of a JSON object as texts, undecoded. Raises ValueError for anything else."""
    at = _space(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("a recorded input is a JSON object")
    parts: dict[str, str] = {}
    at = _space(text, at + 1)
    if text[at : at + 1] == "}":
        return parts
    while True:
        name, at = _scan(text, at)
        at = _space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a recorded input is a JSON object")
        start = _space(text, at + 1)
        _, at = _scan(text, start)
        parts[name] = text[start:at]
        at = _space(text, at)
        if text[at : at + 1] == "}":
            return parts
        at = _space(text, at + 1)


def _space(text: str, at: int) -> int:
    match = _skip(text, at)
    return match.end() if match else at


# --- describing a function --------------------------------------------------------------------------------------------

_OF_A_RUN: Final = (
    asyncio.Future,
    asyncio.Queue,
    asyncio.Event,
    asyncio.Lock,
    asyncio.Condition,
    asyncio.Semaphore,
    asyncio.Barrier,
)
"""What the tasks of a run share, and no body may."""

_ATTRIBUTE: Final = "__replaykit__"
_unattached: dict[int, tuple[Any, FunctionInfo]] = {}
_UNATTACHED_MAX: Final = 1_024


def describe(fn: Callable[..., Any]) -> FunctionInfo:
    """What replaykit needs to know of `fn`, made once and kept on the function.

    Raises:
        TypeError: `fn` is not callable, or a generator function.
    """
    kept = getattr(fn, "__dict__", None)
    if kept is not None:
        found = kept.get(_ATTRIBUTE)
        if found is not None and found[0] is fn:  # functools.wraps copies __dict__: it may be another function's
            return found[1]  # type: ignore[no-any-return]
    return _describe(fn)


def _describe(fn: Any) -> FunctionInfo:
    if not callable(fn):
        raise TypeError(f"a function is needed, not a {type(fn).__qualname__}")
    if inspect.ismethod(fn):
        return _describe_method(fn)
    known = _unattached.get(id(fn))
    if known is not None and known[0] is fn:
        return known[1]
    info = FunctionInfo(fn)
    try:
        if isinstance(fn, type):
            raise TypeError  # an attribute of a class would be inherited
        setattr(fn, _ATTRIBUTE, (fn, info))
    except (AttributeError, TypeError):
        if len(_unattached) >= _UNATTACHED_MAX:
            _unattached.clear()
        _unattached[id(fn)] = (fn, info)
    return info


def _describe_method(method: Any) -> FunctionInfo:
    """A bound method is a new object each time: what is known of it is kept on its function, by class."""
    function = method.__func__
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    kept: tuple[Any, dict[type, FunctionInfo]] | None = getattr(function, "__dict__", {}).get(f"{_ATTRIBUTE}methods")
    if kept is None or kept[0] is not function:
        kept = (function, {})
        try:
            setattr(function, f"{_ATTRIBUTE}methods", kept)
        except (AttributeError, TypeError):
            return FunctionInfo(method)
    info = kept[1].get(owner)
    if info is None:
        info = kept[1][owner] = FunctionInfo(method)
    return info


def _name(fn: Any) -> str | None:
    if inspect.ismethod(fn):
        owner = fn.__self__ if isinstance(fn.__self__, type) else type(fn.__self__)
        return f"{owner.__name__}.{fn.__name__}"
    name = getattr(fn, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>" or isinstance(fn, functools.partial):
        return None
    path = getattr(fn, "__qualname__", name).split(".")
    if len(path) > 1 and path[-2] != "<locals>" and path[-1] == name:
        return f"{path[-2]}.{name}"
    return name


def _line(fn: Any) -> str:
    inner = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code = getattr(inner, "__code__", None) or getattr(_call_of(inner), "__code__", None)
    if code is None:
        return f"{getattr(inner, '__module__', None) or '?'}:0"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _call_of(obj: Any) -> Any:
    """The function behind the call of an object."""
    return getattr(type(obj), "__call__", None)  # noqa: B004 - the function itself is wanted, not whether there is one


def _refuse_generators(fn: Any, info: FunctionInfo) -> None:
    for candidate in (fn, _call_of(fn)):
        if inspect.isasyncgenfunction(candidate):
            raise TypeError(
                f"{info.label} ({info.line}) is an async generator function: a step has one result; "
                "collect its items in an async function and return them"
            )
        if inspect.isgeneratorfunction(candidate):
            raise TypeError(
                f"{info.label} ({info.line}) is a generator function: a step has one result; return a list of its items"
            )


def _signature(fn: Any) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (ValueError, TypeError):  # some builtins have none
        return inspect.Signature(
            [
                inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            ]
        )


def _hints(fn: Any) -> dict[str, Any]:
    """Annotations by parameter name, and `return`; one that can't be evaluated counts as missing."""
    target = inspect.unwrap(fn)
    while isinstance(target, functools.partial):
        target = inspect.unwrap(target.func)
    if isinstance(target, type):
        own = {
            name: hint
            for name, hint in _evaluate(inspect.getattr_static(target, "__init__")).items()
            if name != "return"
        }
        return {**own, "return": target}
    if not (inspect.isroutine(target)):
        target = _call_of(target)
    return _evaluate(target)


def _evaluate(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:
        pass
    raw = getattr(target, "__annotations__", {})
    scope = getattr(inspect.unwrap(target), "__globals__", {})
    found: dict[str, Any] = {}
    for name, annotation in raw.items():  # one by one: a name imported under TYPE_CHECKING spoils only its own
        try:
            holder = type("_", (), {"__annotations__": {"x": annotation}})
            found[name] = typing.get_type_hints(holder, scope, include_extras=True)["x"]
        except Exception:
            continue
    return found


def _parameter_codec(p: inspect.Parameter, annotation: Any) -> Codec:
    if p.kind is p.VAR_POSITIONAL:
        return codec_for(tuple if annotation is _EMPTY else tuple[annotation, ...])
    if p.kind is p.VAR_KEYWORD:
        return codec_for(dict if annotation is _EMPTY else dict[str, annotation])
    return codec_for(annotation)

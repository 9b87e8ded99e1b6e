"""Kinds of values and exceptions, each with what becomes of it: the rows of docs/reference/values.md."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import math
import pathlib
import re
import subprocess
import typing as t
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import sqlalchemy.exc
import typing_extensions as te
from pydantic import BaseModel, ConfigDict, Field, SecretBytes, SecretStr

from replaykit.replay.secrets import Secret


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    X = "x"


class Right(enum.Flag):
    R = 1
    W = 2


class Mixed(enum.Enum):
    I = 1  # noqa: E741
    S = "1"


class Pair(enum.Enum):
    P = (1, 2)


class Outer:
    class Phase(enum.Enum):
        DONE = "done"


@dataclasses.dataclass
class Point:
    a: int
    b: tuple[int, ...] = ()


@dataclasses.dataclass
class PointMore(Point):
    c: str = "sub"


@dataclasses.dataclass
class LaterField:
    a: int
    b: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class WithInitVar:
    a: int
    iv: dataclasses.InitVar[int] = 3
    b: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, iv: int) -> None:
        self.b = self.a + iv


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: int


@dataclasses.dataclass(eq=False)
class ByIdentity:
    a: float


class Typed(te.TypedDict):
    a: int
    d: te.NotRequired[dt.date]


class Named(t.NamedTuple):
    a: int
    b: str = "x"


Untyped = collections.namedtuple("Untyped", "a b")


class M(BaseModel):
    a: int


class MoreM(M):
    extra: str = "e"


class Aliased(BaseModel):
    user_id: int = Field(alias="userId")


class WrittenAliased(BaseModel):
    user_id: int = Field(serialization_alias="uid")


class Excluding(BaseModel):
    a: int
    b: int = Field(default=0, exclude=True)


class Private(BaseModel):
    a: int
    _p: int = 0


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Defaults(BaseModel):
    a: int = 1
    b: int = 2


class HoldsSecret(BaseModel):
    k: SecretStr


class MaybeSecret(BaseModel):
    k: SecretStr | None = None


@dataclasses.dataclass
class Uncompared:
    a: int
    b: int = dataclasses.field(default=0, init=False, compare=False)


class OwnEquality(BaseModel):
    a: int
    _p: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnEquality)

    __hash__ = None  # type: ignore[assignment]


class HoldsBytes(BaseModel):
    raw: bytes
    ratio: float
    tags: set[str] = set()


T = t.TypeVar("T")


class Box(BaseModel, t.Generic[T]):
    v: T


@dataclasses.dataclass
class PlainBox(t.Generic[T]):
    v: T


class Cat(BaseModel):
    kind: t.Literal["cat"] = "cat"
    n: int


class Dog(BaseModel):
    kind: t.Literal["dog"] = "dog"
    n: int


class A1(BaseModel):
    x: int


class B1(BaseModel):
    x: int


class Text(str):
    __slots__ = ()


UserId = t.NewType("UserId", str)
UTC = dt.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
Dec = decimal.Decimal


def with_(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


# Expected: "exact" (the same, classes included), "declared" (equal, of the class that was declared), or the beginning
# of the sentence that refuses it.
KINDS: list[tuple[str, Any, Any, str]] = [
    ("tuple[int, ...]", tuple[int, ...], (1, 2), "exact"),
    ("tuple[int, str]", tuple[int, str], (1, "a"), "exact"),
    ("tuple[()]", tuple[()], (), "exact"),
    ("bare tuple", tuple, (1, (2,)), "exact"),
    ("set[int]", set[int], {1, 2}, "exact"),
    ("frozenset[str]", frozenset[str], frozenset({"a"}), "exact"),
    ("set[tuple]", set[tuple[int, int]], {(1, 2)}, "exact"),
    ("set[Decimal]", set[Dec], {Dec("1.0")}, "exact"),
    ("bytes of text", bytes, b"abc", "exact"),
    ("bytes of no text", bytes, b"\xff\x00", "exact"),
    ("bytearray", bytearray, bytearray(b"\xff"), "exact"),
    ("Decimal 1.10", Dec, Dec("1.10"), "exact"),
    ("Decimal NaN", Dec, Dec("NaN"), "$: a decimal.Decimal does not come back"),
    ("Decimal sNaN", Dec, Dec("sNaN"), "$: a decimal.Decimal does not come back"),
    ("Decimal Infinity", Dec, Dec("Infinity"), "$: a decimal.Decimal does not come back"),
    ("Decimal -0.00", Dec, Dec("-0.00"), "exact"),
    ("Decimal 1E+5", Dec, Dec("1E+5"), "exact"),
    ("Decimal of 40 digits", Dec, Dec("1." + "1" * 40), "exact"),
    ("datetime naive", dt.datetime, dt.datetime(2024, 1, 1, 1, 2, 3, 456), "exact"),
    ("datetime UTC", dt.datetime, dt.datetime(2024, 1, 1, tzinfo=UTC), "exact"),
    ("datetime +02:00", dt.datetime, dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))), "exact"),
    ("datetime ZoneInfo", dt.datetime, dt.datetime(2024, 1, 1, tzinfo=BERLIN), "$: a datetime.datetime would lose"),
    (
        "datetime fold",
        dt.datetime,
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
        "$: a datetime.datetime would lose",
    ),
    ("datetime fold, naive", dt.datetime, dt.datetime(2024, 10, 27, 2, fold=1), "$: a datetime.datetime would lose"),
    (
        "datetime offset with seconds",
        dt.datetime,
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=3661))),
        "$: a datetime.datetime would lose",
    ),
    (
        "datetime named zone",
        dt.datetime,
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
        "$: a datetime.datetime would lose",
    ),
    ("datetime ZoneInfo inside", list[dt.datetime], [dt.datetime(2024, 1, 1, tzinfo=BERLIN)], "$[0]: a datetime.dat"),
    ("datetime year 1", dt.datetime, dt.datetime(1, 1, 1), "exact"),
    ("date", dt.date, dt.date(2024, 1, 1), "exact"),
    ("time UTC", dt.time, dt.time(1, 2, tzinfo=UTC), "exact"),
    ("time ZoneInfo", dt.time, dt.time(1, 2, tzinfo=BERLIN), "$: a datetime.time would lose"),
    ("timedelta", dt.timedelta, dt.timedelta(days=-1, microseconds=1), "exact"),
    ("timedelta large", dt.timedelta, dt.timedelta(days=100000, microseconds=1), "exact"),
    ("timedelta max", dt.timedelta, dt.timedelta.max, "exact"),
    ("Enum of int", Color, Color.RED, "exact"),
    ("Enum of str", Color, Color.BLUE, "exact"),
    ("Enum nested in a class", Outer.Phase, Outer.Phase.DONE, "exact"),
    ("IntEnum", Number, Number.ONE, "exact"),
    ("StrEnum", Word, Word.X, "exact"),
    ("Flag", Right, Right.R | Right.W, "exact"),
    ("Enum 1 and '1'", Mixed, Mixed.S, "exact"),
    ("Enum of tuple", Pair, Pair.P, "$: a "),
    ("UUID", uuid.UUID, uuid.UUID(int=5), "exact"),
    ("Path", pathlib.Path, pathlib.Path("/a"), "exact"),
    ("IPv4Address", ipaddress.IPv4Address, ipaddress.IPv4Address("1.2.3.4"), "exact"),
    ("Pattern with flags", re.Pattern, re.compile("a", re.I), "$: a re.Pattern would not come back equal"),
    ("complex", complex, 1 + 2j, "exact"),
    ("Fraction", fractions.Fraction, fractions.Fraction(1, 3), "exact"),
    ("range", range, range(3), "exact"),
    ("ZoneInfo", zoneinfo.ZoneInfo, zoneinfo.ZoneInfo("UTC"), "exact"),
    ("dataclass", Point, Point(1, (2,)), "exact"),
    ("dataclass, field set later", LaterField, with_(LaterField(1), b=7), "$.b: an int would not come back equal"),
    ("dataclass, InitVar", WithInitVar, WithInitVar(1, 9), "$.b: an int would not come back equal"),
    ("dataclass, frozen slots kw_only", Frozen, Frozen(a=1), "exact"),
    ("dataclass, subclass for base", Point, PointMore(1, (2,), "keep"), "$: a shop.PointMore would come back as"),
    ("TypedDict", Typed, {"a": 1, "d": dt.date(2024, 1, 1)}, "exact"),
    ("TypedDict, extra key", Typed, {"a": 1, "zz": 9}, "$: a dict would not come back equal"),
    ("NamedTuple", Named, Named(1, "q"), "exact"),
    ("namedtuple, untyped", Untyped, Untyped(1, (2, 3)), "$[1]: a tuple would come back as a list"),
    ("NamedTuple in a list", list[Named], [Named(1)], "exact"),
    ("dict[int, str]", dict[int, str], {1: "a"}, "exact"),
    ("dict[bool, int]", dict[bool, int], {True: 1}, "exact"),
    ("dict[float, int]", dict[float, int], {1.5: 1, float("inf"): 2}, "exact"),
    ("dict[tuple, int]", dict[tuple[int, int], int], {(1, 2): 3}, "$: a dict does not come back"),
    ("dict[Enum, int]", dict[Color, int], {Color.RED: 1}, "$: a dict does not come back"),
    ("dict[UUID, int]", dict[uuid.UUID, int], {uuid.UUID(int=1): 1}, "exact"),
    ("dict[date, int]", dict[dt.date, int], {dt.date(2024, 1, 1): 1}, "exact"),
    ("dict[None | str], colliding", dict[str | None, int], {None: 1, "None": 2}, "$: a dict would not come back equal"),
    ("dict[int | str], colliding", dict[int | str, int], {1: 1, "1": 2}, "$: a dict would not come back equal"),
    ("dict[bytes, int]", dict[bytes, int], {b"\xff": 1}, "exact"),
    ("dict[NewType, int]", dict[UserId, int], {UserId("u"): 1}, "exact"),
    ("dict[Decimal, int]", dict[Dec, int], {Dec("1.0"): 1}, "exact"),
    ("float nan", float, math.nan, "exact"),
    ("float inf", float, math.inf, "exact"),
    ("float -0.0", float, -0.0, "exact"),
    ("float 1e16", float, 1e16, "exact"),
    ("float 1.0", float, 1.0, "exact"),
    ("list[float] with nan", list[float], [math.nan, 1.0], "exact"),
    ("int 2**70", int, 2**70, "exact"),
    ("int of 5,001 digits", int, 10**5000, "$: cannot journal an int of more than 4,300 digits"),
    ("int, negative and large", int, -(2**63) - 1, "exact"),
    ("int, given True", int, True, "declared"),
    ("float, given int", float, 3, "declared"),
    ("float, given an int no float equals", float, 2**53 + 1, "$: an int that no float equals"),
    ("int, given IntEnum", int, Number.ONE, "declared"),
    ("str, given StrEnum", str, Word.X, "declared"),
    ("str, given a subclass", str, Text("q"), "$: a shop.Text where str is declared"),
    ("str with NUL", str, "a\0b", "exact"),
    ("str, half an emoji", str, "ok\ud83d", "exact"),
    ("list[str], half an emoji", list[str], ["ok\ud83d"], "$: cannot journal text with a lone surrogate"),
    ("nested", list[dict[str, list[tuple[int, Dec]]]], [{"a": [(1, Dec("1.0"))]}], "exact"),
    ("Optional, None", Point | None, None, "exact"),
    ("int | str, '1'", int | str, "1", "exact"),
    ("int | str, 1", int | str, 1, "exact"),
    ("float | int, 1", float | int, 1, "exact"),
    ("float | int, 1.0", float | int, 1.0, "exact"),
    ("bool | int, 1", bool | int, 1, "exact"),
    ("str | date, date", str | dt.date, dt.date(2024, 1, 1), "$: a datetime.date would come back as a str"),
    ("str | date, text of a date", str | dt.date, "2024-01-01", "exact"),
    ("str | UUID", str | uuid.UUID, uuid.UUID(int=1), "exact"),
    ("str | Decimal", str | Dec, Dec("1.0"), "$: a decimal.Decimal would come back as a str"),
    ("str | bytes", str | bytes, b"x", "$: a bytes would come back as a str"),
    ("bytes | str, text", bytes | str, "x", "exact"),
    ("list | tuple", list[int] | tuple[int, ...], (1, 2), "$: a tuple would come back as a list"),
    ("set | list", set[int] | list[int], {1}, "$: a set would come back as a list"),
    ("models of one shape", A1 | B1, B1(x=1), "$: a shop.B1 would come back as a shop.A1"),
    ("models told apart by a literal", Cat | Dog, Dog(n=1), "exact"),
    ("model | dict", M | dict[str, int], {"a": 1}, "$: a dict would come back as a shop.M"),
    ("dataclass | model", Point | M, M(a=1), "$: a shop.M would come back as a shop.Point"),
    ("StrEnum | str, text", Word | str, "x", "exact"),
    ("str | StrEnum, member", str | Word, Word.X, "declared"),
    ("datetime | date", dt.datetime | dt.date, dt.date(2024, 1, 1), "exact"),
    ("timedelta | str", dt.timedelta | str, "P1D", "$: a str would come back as a datetime.timedelta"),
    ("int | float, 2.0", int | float, 2.0, "exact"),
    ("model", M, M(a=1), "exact"),
    ("model, subclass for base", M, MoreM(a=1, extra="keep"), "$: a shop.MoreM would come back as"),
    ("models, subclass in a list", list[M], [MoreM(a=1, extra="keep")], "$[0]: a shop.MoreM would come back as"),
    ("model, alias", Aliased, Aliased(userId=1), "exact"),
    ("model, serialization_alias", WrittenAliased, WrittenAliased(user_id=1), "exact"),
    ("model, excluded field", Excluding, Excluding(a=1, b=5), "$.b: an int would not come back equal"),
    ("model, private attribute", Private, with_(Private(a=1), _p=7), "$._p: an int would not come back equal"),
    ("model, extra of tuple", Extra, Extra(a=1, z=(1, 2)), "$.z: a tuple would come back as a list"),  # type: ignore[call-arg]
    ("model, defaults", Defaults, Defaults(b=3), "exact"),
    ("model, bytes and nan", HoldsBytes, HoldsBytes(raw=b"\xff", ratio=math.nan), "exact"),
    ("model, secret", HoldsSecret, HoldsSecret(k=SecretStr("s3cret")), "$.k: secrets are never written"),
    ("model, constructed wrongly", M, M.model_construct(a="nope"), "$"),
    ("model with a tuple in its generic", Box[tuple[int, ...]], Box[tuple[int, ...]](v=(1, 2)), "exact"),
    ("model, generic left open", Box, Box(v=(1, 2)), "$.v: a tuple would come back as a list"),
    ("dataclass with a set in its generic", PlainBox[set[int]], PlainBox({1}), "exact"),
    ("dataclass, generic left open", PlainBox, PlainBox((1, 2)), "$.v: a tuple would come back as a list"),
    ("dataclass without `__eq__`", ByIdentity, ByIdentity(1.5), "exact"),
    ("Any, tuple", Any, (1, 2), "exact"),
    ("Any, datetime", Any, dt.datetime(2024, 1, 1), "exact"),
    ("Any, set", Any, {1}, "exact"),
    ("Any, bytes", Any, b"x", "exact"),
    ("Any, dataclass", Any, Point(1), "exact"),
    ("Any, model", Any, M(a=1), "exact"),
    ("Any, secret", Any, {"k": SecretStr("s3cret")}, "$.k: secrets are never written"),
    ("bare dict, tuple", dict, {"a": (1, 2)}, "exact"),
    ("dict[str, Any], datetime", dict[str, Any], {"a": dt.datetime(2024, 1, 1)}, "exact"),
    ("bare dict, int key", dict, {1: 2}, "exact"),
    ("bare list, set", list, [{1}], "exact"),
    ("object, dataclass", object, Point(1), "exact"),
    ("list[Any], nan", list[Any], [math.nan], "exact"),
    ("None, given a value", None, 5, "$: an int where None is declared"),
    ("Sequence[int], tuple", t.Sequence[int], (1, 2), "exact"),
    ("Iterable[int], list", t.Iterable[int], [1, 2], "exact"),
    ("Iterable[int], generator", t.Iterable[int], (i for i in [1, 2]), "$: cannot journal a generator"),
    ("Mapping", t.Mapping[str, int], {"a": 1}, "exact"),
    ("deque with maxlen", collections.deque[int], collections.deque([1], maxlen=3), "$: a collections.deque would not"),
    ("defaultdict", t.DefaultDict[str, int], collections.defaultdict(int, a=1), "exact"),  # noqa: UP006
    ("Counter", t.Counter[str], collections.Counter("aab"), "exact"),
    ("OrderedDict", t.OrderedDict[str, int], collections.OrderedDict(a=1), "exact"),
    ("Callable", t.Callable, len, "$: cannot journal a builtin_function_or_method"),
    ("type", type[int], int, "$: cannot journal a type"),
    ("class of text", Text, Text("q"), "$: cannot journal a shop.Text"),
    (
        "NamedTuple for a tuple, in a list",
        list[tuple[int, str]],
        [Named(1)],
        "$[0]: a shop.Named would come back as a tuple",
    ),
    (
        "Counter for a dict, in a list",
        list[dict[str, int]],
        [collections.Counter("a")],
        "$[0]: a collections.Counter would",
    ),
    ("subclass of str, in a list", list[str], [Text("q")], "$[0]: a shop.Text would come back as a str"),
    (
        "dataclass, field left out of `==`",
        Uncompared,
        with_(Uncompared(1), b=3),
        "$.b: an int would not come back equal",
    ),
    ("model, `==` of its own", OwnEquality, with_(OwnEquality(a=1), _p=3), "$._p: an int would not come back equal"),
    ("int | IntEnum, member, in a list", list[int | Number], [Number.ONE], "declared"),
    ("model, no secret given", MaybeSecret, MaybeSecret(), "exact"),
    ("Secret", Secret[str], Secret("s3cret"), "$: secrets are never written"),
    ("SecretBytes in a dict", dict[str, SecretBytes], {"k": SecretBytes(b"s3cret")}, "$.k: secrets are never written"),
    ("Literal", t.Literal["a", 1], 1, "exact"),
]


# --- exceptions -------------------------------------------------------------------------------------------------------


class ApiError(Exception):
    def __init__(self, status: int, *, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__("slot")
        self.code = code


class OwnNew(Exception):
    def __new__(cls, *, code: int) -> OwnNew:
        return super().__new__(cls)

    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code


class OwnOSError(OSError):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(2, why, path)
        self.why = why


class Denied(Exception):
    def __init__(self, user: str, token: Secret[str]) -> None:
        super().__init__(f"{user} is denied")
        self.token = token


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


REQUEST = httpx.Request("GET", "http://shop.test/")

ERRORS: list[tuple[str, BaseException]] = [
    ("an `__init__` with keywords", ApiError(402, detail="no")),
    ("attributes in slots", Slotted(7)),
    ("a `__new__` of its own", OwnNew(code=1)),
    ("a subclass of OSError", OwnOSError("/p", "gone")),
    ("FileNotFoundError", FileNotFoundError(2, "No", "/x")),
    ("KeyError", KeyError("k")),
    ("UnicodeDecodeError", raised(lambda: b"\xff".decode())),
    ("UnicodeEncodeError", UnicodeEncodeError("ascii", "é", 0, 1, "r")),
    ("json.JSONDecodeError", raised(lambda: json.loads("{"))),
    ("pydantic.ValidationError", raised(lambda: M(a="x"))),  # type: ignore[arg-type]
    (
        "httpx.HTTPStatusError",
        httpx.HTTPStatusError("bad", request=REQUEST, response=httpx.Response(500, request=REQUEST)),
    ),
    ("httpx.ConnectTimeout", httpx.ConnectTimeout("t")),
    ("subprocess.CalledProcessError", subprocess.CalledProcessError(1, ["x"], b"o")),
    ("psycopg.errors.UniqueViolation", psycopg.errors.UniqueViolation("dup")),
    (
        "psycopg.OperationalError, of a connect",
        raised(lambda: psycopg.connect("host=127.0.0.1 port=1 connect_timeout=1")),
    ),
    (
        "sqlalchemy.exc.IntegrityError",
        sqlalchemy.exc.IntegrityError("insert", {"a": 1}, psycopg.errors.UniqueViolation("dup")),
    ),
    ("ExceptionGroup", ExceptionGroup("g", [ValueError(1), KeyError(2)])),
    ("TimeoutError", TimeoutError()),
    ("AttributeError", raised(lambda: getattr(None, "foo"))),  # noqa: B009
    ("NameError", NameError("no x", name="x")),
    ("ImportError", ImportError("m", name="n")),
    ("text with NUL and half an emoji", ValueError("a\0b\ud83d")),
    ("an attribute that is a secret", Denied("me", Secret("s3cret"))),
    ("StopIteration", StopIteration(5)),
    ("SystemExit", SystemExit(3)),
    ("KeyboardInterrupt", KeyboardInterrupt()),
    ("GeneratorExit", GeneratorExit()),
    ("asyncio.CancelledError", asyncio.CancelledError("x")),
]


def sentence(error: BaseException) -> str:
    """The words of a refusal; this module stands in them as the reader's own would."""
    return str(error).replace(f"{__name__}.", "shop.")


def same(a: Any, b: Any) -> bool:
    """Equal in every respect that a program can see, classes and zones included: stricter than `==`."""
    if type(a) is not type(b):
        return False
    if isinstance(a, BaseModel):
        return same(a.__dict__, b.__dict__) and same(a.__pydantic_private__, b.__pydantic_private__)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, Dec):
        return bool(a.as_tuple() == b.as_tuple())
    if isinstance(a, dict):
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, (dt.datetime, dt.time)):
        named = [z.key if isinstance(z, zoneinfo.ZoneInfo) else None for z in (a.tzinfo, b.tzinfo)]
        return a == b and a.utcoffset() == b.utcoffset() and a.fold == b.fold and named[0] == named[1]
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, collections.deque):
        return list(a) == list(b) and a.maxlen == b.maxlen
    return bool(a == b)

"""Values come back as they were, or are refused with the path: no kind is silently changed (DESIGN 7)."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import inspect
import ipaddress
import json
import math
import pathlib
import re
import socket
import subprocess
import sys
import typing as t
import uuid
import zoneinfo
from typing import Any

import pytest
import typing_extensions as te
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from replaykit.errors import NotJournalable
from replaykit.replay.codec import codec_for, tagged
from replaykit.replay.tags import DEPTH_MAX


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


def _with(value: Any, **attributes: Any) -> Any:
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
    ("dataclass, field set later", LaterField, _with(LaterField(1), b=7), "$.b: an int would not come back equal"),
    ("dataclass, InitVar", WithInitVar, WithInitVar(1, 9), "$.b: an int would not come back equal"),
    ("dataclass, frozen slots kw_only", Frozen, Frozen(a=1), "exact"),
    ("dataclass, subclass for base", Point, PointMore(1, (2,), "keep"), "$: a test_codec.PointMore would come back as"),
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
    ("str, given a subclass", str, Text("q"), "$: a test_codec.Text where str is declared"),
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
    ("list | tuple", list[int] | tuple[int, ...], (1, 2), "$: a tuple would come back as a list"),
    ("set | list", set[int] | list[int], {1}, "$: a set would come back as a list"),
    ("models of one shape", A1 | B1, B1(x=1), "$: a test_codec.B1 would come back as a test_codec.A1"),
    ("models told apart by a literal", Cat | Dog, Dog(n=1), "exact"),
    ("model | dict", M | dict[str, int], {"a": 1}, "$: a dict would come back as a test_codec.M"),
    ("dataclass | model", Point | M, M(a=1), "$: a test_codec.M would come back as a test_codec.Point"),
    ("StrEnum | str, text", Word | str, "x", "exact"),
    ("str | StrEnum, member", str | Word, Word.X, "declared"),
    ("datetime | date", dt.datetime | dt.date, dt.date(2024, 1, 1), "exact"),
    ("timedelta | str", dt.timedelta | str, "P1D", "$: a str would come back as a datetime.timedelta"),
    ("int | float, 2.0", int | float, 2.0, "exact"),
    ("model", M, M(a=1), "exact"),
    ("model, subclass for base", M, MoreM(a=1, extra="keep"), "$: a test_codec.MoreM would come back as"),
    ("models, subclass in a list", list[M], [MoreM(a=1, extra="keep")], "$[0]: a test_codec.MoreM would come back as"),
    ("model, alias", Aliased, Aliased(userId=1), "exact"),
    ("model, serialization_alias", WrittenAliased, WrittenAliased(user_id=1), "exact"),
    ("model, excluded field", Excluding, Excluding(a=1, b=5), "$.b: an int would not come back equal"),
    ("model, private attribute", Private, _with(Private(a=1), _p=7), "$._p: an int would not come back equal"),
    ("model, extra of tuple", Extra, Extra(a=1, z=(1, 2)), "$.z: a tuple would come back as a list"),  # type: ignore[call-arg]
    ("model, defaults", Defaults, Defaults(b=3), "exact"),
    ("model, bytes and nan", HoldsBytes, HoldsBytes(raw=b"\xff", ratio=math.nan), "exact"),
    ("model, secret", HoldsSecret, HoldsSecret(k=SecretStr("s3cret")), "$: HoldsSecret holds a secret"),
    ("model, constructed wrongly", M, M.model_construct(a="nope"), "$"),
    ("model with a tuple in its generic", Box[tuple[int, ...]], Box[tuple[int, ...]](v=(1, 2)), "exact"),
    ("model, generic left open", Box, Box(v=(1, 2)), "$.v: a tuple would come back as a list"),
    ("dataclass with a set in its generic", PlainBox[set[int]], PlainBox({1}), "exact"),
    ("dataclass, generic left open", PlainBox, PlainBox((1, 2)), "$.v: a tuple would come back as a list"),
    ("dataclass without __eq__", ByIdentity, ByIdentity(1.5), "exact"),
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
    ("class of text", Text, Text("q"), "$: cannot journal a test_codec.Text"),
    ("Literal", t.Literal["a", 1], 1, "exact"),
]


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


@pytest.mark.parametrize(("annotation", "value", "expected"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
def test_a_value_comes_back_or_is_refused(annotation: Any, value: Any, expected: str) -> None:
    """Each kind of value under its annotation: exact, equal and of the declared class, or a sentence with the path."""
    codec = codec_for(annotation)

    if expected not in ("exact", "declared"):
        with pytest.raises(NotJournalable, match="^" + re.escape(expected)) as refused:
            codec.encode_checked(value)

        assert "s3cret" not in str(refused.value)
        return
    text, twin = codec.encode_checked(value)
    json.loads(text)

    assert same(value, twin) is (expected == "exact")
    assert expected == "exact" or (twin == value and type(twin) is not type(value))
    assert same(twin, codec.decode(text))


KEPT_BY_TAGS = [
    math.nan,
    (1, {2: "x"}, {3, 4}, dt.datetime(2024, 1, 1), 1.0),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=3661))),
    dt.time(1, 2, tzinfo=BERLIN),
    [dt.timedelta.max, dt.date(1, 1, 1), UTC, BERLIN],
    {1: "a", "1": "b", None: 0, (1, 2): 3, Color.RED: 4, b"k": 5},
    {"~tuple": [1]},
    {"~": "~", "a": {"~x": None}},
    Dec("-0.00"),
    [Dec("NaN"), complex(math.inf, -0.0)],
    collections.deque([1, (2,)], maxlen=3),
    collections.defaultdict(list, {"a": [1]}),
    collections.Counter("aab"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    [Color.RED, Number.ONE, Word.X, Right.R | Right.W, Pair.P, Outer.Phase.DONE],
    [Point(1, (2,)), PointMore(1), Frozen(a=1), _with(LaterField(1), b=7), WithInitVar(1, 9)],
    [M(a=1), MoreM(a=1), Aliased(userId=1), Excluding(a=1, b=5), _with(Private(a=1), _p=7), Extra(a=1, z=(1, 2))],  # type: ignore[call-arg]
    [Named(1), Untyped(1, (2, 3))],
    [bytearray(b"\xff"), b"\0", range(1, 9, 2), fractions.Fraction(1, 3), re.compile("a", re.I)],
    [pathlib.Path("/a"), pathlib.PurePosixPath("b"), ipaddress.ip_address("::1"), ipaddress.ip_network("10.0.0.0/8")],
    "a\0b\ud83d\ufdd0\\u0000\\",
    {"k\0": "\ud83d\ude00", "\ufdd0\ufdd2": "😀"},
    10**4000,
]


@pytest.mark.parametrize("value", KEPT_BY_TAGS, ids=lambda value: type(value).__name__)
def test_an_open_annotation_keeps_every_type(value: Any) -> None:
    """What no annotation names is written with tags and comes back with its own class, zone, fold and attributes."""
    text, twin = tagged.encode_checked(value)

    assert same(value, twin)
    assert same(twin, tagged.decode(text))


def test_a_refusal_names_the_path_and_never_the_value() -> None:
    """The sentence leads to the part that has no form."""
    with socket.socket() as conn, pytest.raises(NotJournalable) as refused:
        tagged.encode({"rows": [0, 1, 2, {"conn": conn, "password": "s3cret"}]})

    assert str(refused.value) == "$.rows[3].conn: cannot journal a socket.socket"


def test_a_refusal_inside_of_a_model_names_the_path() -> None:
    """A closed annotation is searched for the same path."""
    box = Box[list[M]](v=[M(a=1), M.model_construct(a="s3cret")])

    with pytest.raises(NotJournalable) as refused:
        codec_for(Box[list[M]]).encode(box)

    assert "s3cret" not in str(refused.value)
    assert str(refused.value).startswith("$")


@pytest.mark.parametrize("annotation", [Any, list, list[Any], dict[str, Any], list[list[int]]])
def test_a_cycle_is_refused(annotation: Any) -> None:
    """A value that holds itself gives one clean error under every codec."""
    cycle: list[Any] = []
    cycle.append(cycle)

    with pytest.raises(NotJournalable):
        codec_for(annotation).encode_checked(cycle)


def test_a_value_too_deep_is_refused_by_the_first_run() -> None:
    """Depth is checked when a value is written: nothing is stored that a replay can't read."""
    deep: Any = None
    for _ in range(10_000):
        deep = {"a": deep}
    fits: Any = None
    for _ in range(DEPTH_MAX):
        fits = [fits]

    with pytest.raises(NotJournalable, match="deep"):
        tagged.encode(deep)
    assert tagged.encode_checked(fits)[1] == fits


def test_a_class_that_cannot_be_found_is_refused() -> None:
    """A class of a function's own is unknown to the next process, so its instances are not written."""

    @dataclasses.dataclass
    class Local:
        a: int

    with pytest.raises(NotJournalable, match="cannot be found by its name"):
        tagged.encode([Local(1)])


def test_an_attribute_that_is_no_field_is_refused() -> None:
    """What would be lost is not dropped in silence."""
    with pytest.raises(NotJournalable, match=r"^\$\.more: not a field of Point"):
        tagged.encode(_with(Point(1), more=2))


def test_nothing_is_revived_by_import() -> None:
    """A tag that names a class of a module that isn't loaded is an error, and the module stays unloaded."""
    assert "this" not in sys.modules

    with pytest.raises(ValueError, match="no class"):
        tagged.decode('{"~dataclass":["this.Evil",{}]}')
    with pytest.raises(ValueError, match="unknown tag"):
        tagged.decode('{"~reduce":["os.system","true"]}')

    assert "this" not in sys.modules


def test_a_field_that_was_added_with_a_default_reads_old_records() -> None:
    """Both codecs fill in what the record does not hold."""
    assert codec_for(Point).decode('{"a":1}') == Point(1)
    assert tagged.decode('{"~dataclass":["test_codec.Point",{"a":1}]}') == Point(1)
    assert tagged.decode('{"~model":["test_codec.Defaults",{"a":5},null,null,["a"]]}') == Defaults(a=5)


def test_text_can_be_stored_and_read_by_postgres() -> None:
    """No text holds a NUL escape or a lone surrogate, which `->>` and `json` refuse; an escaped backslash stays."""
    for codec, value in ((codec_for(str), "a\0b\ud83d"), (codec_for(list[str]), ["\0"]), (tagged, {"\0": "\ud83d"})):
        text = codec.encode(value)

        assert "\\u0000" not in text
        text.encode()
        assert codec.decode(text) == value
    assert codec_for(str).encode("\\u0000") == '"\\\\u0000"'


def test_equal_values_have_one_canonical_form() -> None:
    """The digest does not see the order of keys and members, but sees the order of a list."""
    pairs: list[tuple[Any, Any, Any]] = [
        (dict[str, int], {"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Any, {"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}),
        (Any, {1: "a", 2: "b"}, {2: "b", 1: "a"}),
        (Extra, Extra(a=1, b=1, c=2), Extra(a=1, c=2, b=1)),  # type: ignore[call-arg]
    ]
    for annotation, one, other in pairs:
        codec = codec_for(annotation)
        assert codec.canonical(codec.encode(one)) == codec.canonical(codec.encode(other))
    ordered = codec_for(list[int])
    assert ordered.canonical(ordered.encode([1, 2])) != ordered.canonical(ordered.encode([2, 1]))


def test_members_of_a_set_are_written_in_one_order() -> None:
    """Processes with other hash seeds write the same text for one set."""
    program = (
        "from replaykit.replay.codec import codec_for\n"
        "words = {f'word{n}' for n in range(20)}\n"
        "print(codec_for(set[str]).encode(words), codec_for(set).encode(words))\n"
        "print(codec_for(list[set[str]]).encode([words]))\n"
    )
    root = pathlib.Path(inspect.getfile(codec_for)).parents[2]
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(seen) == 1


def test_the_order_of_a_union_is_part_of_the_annotation() -> None:
    """`int | str` equals `str | int` to Python, but not to the codec."""
    assert codec_for(str | dt.date) is not codec_for(dt.date | str)
    assert codec_for(list[int]) is codec_for(list[int])


def test_typing_typed_dict_is_kept() -> None:
    """On 3.11 pydantic knows only typing_extensions' TypedDict; a value of typing's own goes through tags there."""
    old = t.TypedDict("old", {"a": tuple[int, ...]})  # noqa: UP013
    value = {"a": (1, 2)}

    assert codec_for(old).encode_checked(value)[1] == value


# --- any value at all -------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.characters(min_codepoint=0xD7FF, max_codepoint=0xE000),
    st.sampled_from(["\0", "~", "~tuple", "\ufdd0", "\ufdd0\ufdd2", '"~', "\\"]),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(UTC) | st.just(BERLIN)),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.sampled_from([*Color, *Number, *Word, *Mixed]),
)
hashables = st.recursive(
    scalars.filter(lambda v: v == v),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(hashables, max_size=3),
        st.dictionaries(st.text(max_size=3) | hashables, inner, max_size=4),
        st.builds(Box, v=inner),
        st.builds(PlainBox, inner),
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_any_untyped_value_comes_back_the_same(value: Any) -> None:
    """Round trip over nested untyped data: the same value, and a text that Postgres stores."""
    text, twin = tagged.encode_checked(value)

    assert same(value, twin)
    assert "\\u0000" not in text.replace("\\\\", "")
    text.encode()
    assert tagged.canonical(text) == tagged.canonical(tagged.encode(twin))


def _of(generic: Any, *arguments: Any) -> Any:
    return generic[arguments]


@dataclasses.dataclass(frozen=True)
class _Boxed:
    annotation: Any

    def __call__(self, value: Any) -> Any:
        return _of(Box, self.annotation).model_construct(v=value)


def _annotated() -> st.SearchStrategy[tuple[Any, Any]]:
    leaves: list[tuple[Any, st.SearchStrategy[Any]]] = [
        (int, st.integers()),
        (bool, st.booleans()),
        (float, st.floats()),
        (str, st.text()),
        (bytes, st.binary()),
        (Dec, st.decimals(allow_nan=False, allow_infinity=False)),
        (dt.datetime, st.datetimes(timezones=st.none() | st.just(UTC))),
        (dt.timedelta, st.timedeltas()),
        (uuid.UUID, st.uuids()),
        (Color, st.sampled_from(Color)),
        (M, st.builds(M, a=st.integers())),
        (Point, st.builds(Point, st.integers(), st.lists(st.integers(), max_size=2).map(tuple))),
        (Any, values),
    ]

    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            inner.map(lambda pair: (_of(list, pair[0]), st.lists(pair[1], max_size=3))),
            inner.map(lambda pair: (_of(dict, str, pair[0]), st.dictionaries(st.text(), pair[1], max_size=3))),
            inner.map(lambda pair: (_of(tuple, pair[0], int), st.tuples(pair[1], st.integers()))),
            inner.map(lambda pair: (pair[0] | None, st.none() | pair[1])),
            inner.map(lambda pair: (_of(Box, pair[0]), pair[1].map(_Boxed(pair[0])))),
        )

    pairs = st.recursive(st.sampled_from(leaves), wrap, max_leaves=3)
    return pairs.flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


@given(_annotated())
@settings(max_examples=150, deadline=None)
def test_an_annotated_value_comes_back_the_same_or_is_refused(pair: tuple[Any, Any]) -> None:
    """Round trip over nested annotations: the same value or a refusal, and the first run's value is a replay's."""
    annotation, value = pair
    codec = codec_for(annotation)
    try:
        text, twin = codec.encode_checked(value)
    except NotJournalable:
        return

    assert same(value, twin)
    assert same(twin, codec.decode(text))
    text.encode()

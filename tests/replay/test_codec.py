"""Values come back as they were, or are refused with the path: no kind is silently changed (DESIGN 7)."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import fractions
import functools
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
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.errors import NotJournalable
from replaykit.replay.codec import Codec, codec_for, tagged
from replaykit.replay.jsontext import head, merged
from replaykit.replay.tags import DEPTH_MAX
from tests.replay.kinds import (
    BERLIN,
    KINDS,
    UTC,
    Aliased,
    Box,
    Color,
    Dec,
    Defaults,
    Excluding,
    Extra,
    Frozen,
    LaterField,
    M,
    Mixed,
    MoreM,
    Named,
    Number,
    Outer,
    Pair,
    PlainBox,
    Point,
    PointMore,
    Private,
    Right,
    Untyped,
    WithInitVar,
    Word,
    same,
    sentence,
    with_,
)


@pytest.mark.parametrize(("annotation", "value", "expected"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
def test_a_value_comes_back_or_is_refused(annotation: Any, value: Any, expected: str) -> None:
    """Each kind of value under its annotation: exact, equal and of the declared class, or a sentence with the path."""
    codec = codec_for(annotation)

    if expected not in ("exact", "declared"):
        with pytest.raises(NotJournalable) as refused:
            codec.encode_checked(value)

        assert sentence(refused.value).startswith(expected)
        assert "s3cret" not in str(refused.value)
        return
    text, twin = codec.encode_checked(value)
    json.loads(text)

    assert same(value, twin) is (expected == "exact")
    assert expected == "exact" or twin == value
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
    [Point(1, (2,)), PointMore(1), Frozen(a=1), with_(LaterField(1), b=7), WithInitVar(1, 9)],
    [M(a=1), MoreM(a=1), Aliased(userId=1), Excluding(a=1, b=5), with_(Private(a=1), _p=7), Extra(a=1, z=(1, 2))],  # type: ignore[call-arg]
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
        tagged.encode(with_(Point(1), more=2))


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
    assert tagged.decode('{"~dataclass":["tests.replay.kinds.Point",{"a":1}]}') == Point(1)
    assert tagged.decode('{"~model":["tests.replay.kinds.Defaults",{"a":5},null,null,["a"]]}') == Defaults(a=5)


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


_BUILTINS = [
    dict[str, int],
    dict[int, str],
    list[float],
    list[bool | None],
    tuple[int, str],
    tuple[float, ...],
    dict[str, list[float | None]],
    t.Annotated[list[int], pydantic.Field(min_length=1)],
    dict[str, t.Annotated[str, pydantic.Field(max_length=3)]],
]
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | st.sampled_from([Word.X, Number.ONE, Decimal(1), b"x", bytearray(b"x"), "~type", "\ufdd0", "\0"])
)
_JSON_LIKE = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(_SCALARS.filter(lambda x: not isinstance(x, bytearray)), max_size=2)
        | st.dictionaries(_SCALARS.filter(lambda x: not isinstance(x, bytearray)), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(_BUILTINS), _JSON_LIKE)
@settings(max_examples=300, deadline=None)
def test_the_quick_way_of_builtins_says_what_the_other_says(annotation: Any, value: Any) -> None:
    """Whatever is given for containers of builtins: the same text and the same value, or the same sentence."""
    codec = codec_for(annotation)

    def outcome(encode: Callable[[Any], tuple[str, Any]]) -> tuple[str, Any]:
        try:
            return encode(value)
        except NotJournalable as refused:
            return str(refused), None

    text, twin = outcome(codec.encode_checked)
    slow_text, slow_twin = outcome(functools.partial(Codec.encode_checked, codec))

    assert text == slow_text
    assert same(twin, slow_twin)


# --- JSON text that people read ---------------------------------------------------------------------------------------


def test_what_is_known_grows_by_what_is_said_later() -> None:
    """Of a member that both have the later one counts; nothing is lost where only one says something."""
    assert merged('{"a": 1, "b": "é"}', '{"a": 2}') == '{"a": 2, "b": "é"}'
    assert (merged('{"a": 1}', None), merged(None, '{"a": 1}'), merged(None, None)) == ('{"a": 1}', '{"a": 1}', None)


def test_a_sentence_quotes_the_beginning_of_a_long_text_and_says_how_long_it_is() -> None:
    """A short one whole; what was not recorded is told as such."""
    assert (head(None), head("null"), head("x" * 200)) == ("nothing", "null", "x" * 200)
    assert head("x" * 1_201) == f"{'x' * 200}... (1,201 characters)"

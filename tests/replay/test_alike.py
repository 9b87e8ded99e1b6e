"""What a record tells apart is told apart: keys, hidden fields, classes; and nothing of a value is lost unseen (DESIGN 7)."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import datetime as dt
import http
import math
import typing as t
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

import pytest
import typing_extensions as te
from pydantic import BaseModel, ConfigDict

from replaykit.errors import NotJournalable
from replaykit.replay.codec import ITERATED, codec_for
from replaykit.replay.signature import FunctionInfo, describe, same_input
from tests.replay.kinds import Mixed, Number, Word


@dataclasses.dataclass
class Order:
    """Equal by its number alone."""

    id: int
    total: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and self.id == other.id

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Unseen:
    a: int
    b: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass
class Place:
    x: int


class SlottedBase:
    __slots__ = ("_SlottedBase__own", "hidden")


@dataclasses.dataclass
class OnSlots(SlottedBase):
    x: int


class Shape(BaseModel):
    x: int = 0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: Any = None
    default: Any = None
    items: list = []  # type: ignore[type-arg]
    members: dict = {}  # type: ignore[type-arg]
    some: set = set()  # type: ignore[type-arg]


class OpenDict(te.TypedDict):
    x: Any


class Lazy(BaseModel):
    rows: collections.abc.Iterable[int]


@dataclasses.dataclass
class LazyParts:
    rows: collections.abc.Iterable[int]


@dataclasses.dataclass
class Rows:
    rows: list[list[int]]


class Cents(int):
    """An int that may have a unit."""


def taking(annotation: Any) -> FunctionInfo:
    def take(x):  # type: ignore[no-untyped-def]
        raise AssertionError

    take.__annotations__ = {"x": annotation}
    return describe(take)


def alike(annotation: Any, value: Any, other: Any) -> bool:
    """Whether an input with `value` that is recorded counts as one with `other`."""
    info = taking(annotation)
    return same_input(info, info.bind((value,), {}).text, info.bind((other,), {}))


DAYS = dt.date(2020, 1, 1), dt.date(2031, 12, 31)


@pytest.mark.parametrize(
    ("annotation", "value", "other"),
    [
        (dict[dt.date, int], {DAYS[0]: 5}, {DAYS[1]: 5}),
        (dict[uuid.UUID, int], {uuid.UUID(int=1): 5}, {uuid.UUID(int=2): 5}),
        (dict[Decimal, list[int]], {Decimal(1): [5]}, {Decimal(2): [5]}),
        (dict[str, dict[dt.date, int]], {"a": {DAYS[0]: 5}}, {"a": {DAYS[1]: 5}}),
        (Any, {(1, 2): 5}, {(3, 4): 5}),
        (Any, {Decimal(1): {DAYS[0]: 1}}, {Decimal(1): {DAYS[1]: 1}}),
        (Any, {DAYS[0]: math.nan}, {DAYS[1]: math.nan}),
        (Any, {Number.ONE: 5}, {1: 5}),
        (Any, [True], [1]),
        (Any, [1], [1.0]),
        (Any, Order(1, 5), Order(1, 900)),
        (Any, [Unseen(1, 1)], [Unseen(1, 2)]),
        (Order, Order(1, 5), Order(1, 900)),
        (Unseen, Unseen(1, 1), Unseen(1, 2)),
        (Any, collections.deque([1], 3), collections.deque([1], 4)),
        (dict[str, str], {"~type": "x"}, {"~type": "y"}),
    ],
)
def test_another_input_is_another(annotation: Any, value: Any, other: Any) -> None:
    """Also where only a key differs, or what the class leaves out of its `==`."""
    assert not alike(annotation, value, other)
    assert alike(annotation, value, value)


def test_the_order_of_keys_and_nan_make_no_other_input() -> None:
    """Typed and untyped."""
    for annotation in (dict[dt.date, float], Any):
        assert alike(annotation, {DAYS[0]: 1.5, DAYS[1]: math.nan}, {DAYS[1]: math.nan, DAYS[0]: 1.5})
    assert alike(Any, {math.nan: 1}, {math.nan: 1})
    assert not alike(Any, {math.nan: 1}, {math.nan: 2})


def test_keys_that_change_their_member_are_refused() -> None:
    """Two members of an enum whose JSON keys are one text: the key would come back as the other."""
    codec = codec_for(dict[Mixed, int])

    assert codec.encode_checked({Mixed.S: 7})[1] == {Mixed.S: 7}
    with pytest.raises(NotJournalable):
        codec.encode_checked({Mixed.I: 7})


def lost(annotation: Any, value: Any) -> str:
    with pytest.raises(NotJournalable) as refused:
        codec_for(annotation).encode_checked(value)
    with pytest.raises(NotJournalable):
        taking(annotation).bind((value,), {}, strict=True)
    return str(refused.value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Number.ONE, ""),
        (Word.X, ""),
        ([Number.ONE], "[0]"),
        ({"k": Word.X}, ".k"),
        ({Word.X: 1}, ".keys()[0]"),
        (Cents(5), ""),
    ],
)
def test_what_any_in_a_field_would_change_is_refused(value: Any, path: str) -> None:
    """A member of an enum and a class of int are no plain text and number; no annotation said that they may become one."""
    for annotation, whole, where in (
        (Open, Open(x=value), ".x"),
        (Open, Open(default=value), ".default"),
        (Open, Open(items=[value]), ".items[0]"),
        (Open, Open(members={"a": value}), ".members.a"),
        (Open, Open(more=value), ".more"),  # type: ignore[call-arg]
        (OpenDict, {"x": value}, ".x"),
    ):
        assert lost(annotation, whole).startswith(f"${where}{path}: ")


def test_any_in_a_field_still_holds_json() -> None:
    """All of it, members of a bare set in the order of their text."""
    value = Open(x=[None, True, 1.5, {"a": "b"}], items=[1, {"k": None}], members={"b": 1, "a": 2}, some={3, 1})
    info = taking(Open)

    assert codec_for(Open).encode_checked(value)[1] == value
    other = value.model_copy(update={"members": {"a": 2, "b": 1}})
    assert info.bind((value,), {}).digest == info.bind((other,), {}).digest


def test_a_class_stands_only_for_one_that_is_declared() -> None:
    """True for a literal 1, a number with a unit for a number: refused; a plain one is the declared number."""
    priced = Cents(5)
    priced.unit = "EUR"  # type: ignore[attr-defined]

    for annotation in (t.Literal["a", 1] | bool, t.Literal["a", 1] | bool | int):
        assert lost(annotation, True).startswith("$: a bool would come back as an int")
    assert lost(int, priced).startswith("$: ")
    assert lost(float, priced).startswith("$: ")
    assert lost(list[int], [priced]).startswith("$[0]: ")
    assert codec_for(list[int]).encode_checked([Cents(5), Number.ONE])[1] == [5, 1]


def test_a_sign_that_would_be_lost_is_refused() -> None:
    """Of a part of a complex number; without an annotation it is kept."""
    value = complex(-0.0, math.nan)

    assert lost(complex, value).startswith("$: a complex would not come back equal")
    assert math.copysign(1, codec_for(Any).encode_checked(value)[1].real) == -1


def test_an_attribute_that_is_no_field_is_refused_with_its_name() -> None:
    """Set on a dataclass or model, or in a slot of a base: it would be gone in the body and after a crash."""
    place, shape, slotted = Place(1), Shape(x=1), OnSlots(1)
    for one in (place, shape):
        attributes: dict[str, Any] = vars(cast(Any, one))
        attributes["more"] = 7
    slotted.hidden = 7  # type: ignore[attr-defined]

    for value, name in ((place, "more"), (shape, "more"), (slotted, "hidden")):
        for annotation in (Any, type(value)):
            assert lost(annotation, value).startswith(f"$.{name}: not a field of {type(value).__name__}")
        assert lost(list[type(value)], [value]).startswith(f"$[0].{name}: ")  # type: ignore[misc]
    for value in (Place(1), Shape(x=1), OnSlots(1)):
        assert codec_for(type(value)).encode_checked(value)[1] == value


def test_what_a_library_keeps_on_a_row_is_no_loss() -> None:
    """SQLModel's rows carry a state of SQLAlchemy's, which their class makes anew."""
    row = Shape(x=1)
    attributes: dict[str, Any] = vars(cast(Any, row))
    attributes["_sa_instance_state"] = object()

    assert codec_for(Shape).encode_checked(row)[1].x == 1


def test_an_iterator_is_never_read() -> None:
    """A field of an iterable is refused, and what the caller holds still has all its items."""
    lazy, parts = Lazy(rows=[1, 2]), LazyParts(iter([1, 2]))
    numbers: Iterator[int] = (n for n in (1, 2))

    assert lost(Lazy, lazy) == f"$.rows: {ITERATED}"
    assert lost(LazyParts, parts) == f"$.rows: {ITERATED}"
    assert lost(Open, Open(x=numbers)) == f"$.x: {ITERATED}"
    assert lost(list[int], numbers) == "$: cannot journal a generator"
    for annotation, value in ((Lazy, lazy), (LazyParts, parts), (list[int], numbers)):
        assert taking(annotation).bind((value,), {}).live["x"] is value
    assert list(lazy.rows) == list(parts.rows) == list(numbers) == [1, 2]


def test_a_generator_that_was_read_is_not_handed_on() -> None:
    """Deep inside of a list that was declared, pydantic reads it: the body must not get what is left, nothing."""
    for annotation, value, path in (
        (list[list[int]], [(n for n in (1, 2))], "[0]"),
        (Rows, Rows([(n for n in (1, 2))]), ".rows[0]"),  # type: ignore[list-item]
    ):
        with pytest.raises(NotJournalable) as refused:
            taking(annotation).bind((value,), {})
        assert str(refused.value) == f"$.x{path}: {ITERATED}"


def test_a_dict_with_the_key_of_a_record_is_a_dict() -> None:
    """`{"~type": ...}` stands for an argument without a record; a user's own dict of that look is read as what it is."""
    info = taking(dict[str, str])
    bound = info.bind(({"~type": "x"},), {})

    assert bound.live == {}
    assert info.decode_input(bound.text) == {"x": {"~type": "x"}}
    assert info.fresh_arguments(bound) == (({"~type": "x"},), {})


def test_a_number_that_no_reader_takes_is_refused_as_a_key_too() -> None:
    """With a sentence, wherever it stands."""
    huge = 10**5_000
    for value in ({huge: 1}, {huge: object()}, {huge}, frozenset([huge]), {(huge, 1)}, {"a": {huge: 1}}):
        with pytest.raises(NotJournalable):
            codec_for(Any).encode_checked(value)
    with pytest.raises(NotJournalable):
        codec_for(dict[int, int]).encode_checked({huge: 1})


def test_a_member_of_the_standard_library_is_found_by_its_value() -> None:
    """HTTPStatus(413) has another name under 3.13: a journal goes from one Python to another."""
    text = codec_for(Any).encode(http.HTTPStatus(413))
    name = http.HTTPStatus(413).name

    assert codec_for(Any).decode(text.replace(name, "NAME_OF_A_LATER_PYTHON")) is http.HTTPStatus(413)
    assert codec_for(Any).decode(text.replace(",413]", "]")) is http.HTTPStatus(413)  # as it was written before
    with pytest.raises(ValueError, match="tag"):
        codec_for(Any).decode(codec_for(Any).encode(Number.ONE).replace("ONE", "TWO"))

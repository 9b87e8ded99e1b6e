"""Whether JSON fits the schemas that pydantic makes of annotations, and the sentences for what does not."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from replaykit.replay.signature import describe
from replaykit.runtime.fit import misfit


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Row:
    cents: int
    note: str = ""


class Order(BaseModel):
    id: uuid.UUID
    rows: list[Row]
    paid: dt.date | None = None
    colour: Colour = Colour.RED


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Tree(BaseModel):
    below: list[Tree] = []


ORDER = {"id": "0f5cb0e4-95bf-4b0a-b2b3-6a3f0b1f6a11", "rows": [{"cents": 5}]}


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 5),
        (int, 5.0),
        (float, 5),
        (float, "NaN"),
        (float, float("inf")),
        (bool, True),
        (str, ""),
        (None, None),
        (Any, {"a": [1]}),
        (int | None, None),
        (list[int], []),
        (tuple[int, str], [1, "a"]),
        (dict[str, int], {"a": 1}),
        (dict[int, int], {"1": 1}),
        (Colour, "blue"),
        (dt.datetime, "2030-01-02T03:04:05Z"),
        (dt.timedelta, "P1D"),
        (Order, ORDER),
        (Order, {**ORDER, "paid": "2030-01-02", "more": 1}),
        (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "dog", "name": "x"}),
        (Tree, {"below": [{"below": []}]}),
        (Annotated[str, Field(pattern="^a+$", max_length=3)], "aa"),
        (Annotated[int, Field(gt=0, le=5)], 5),
    ],
)
def test_what_pydantic_takes_fits(annotation: Any, value: Any) -> None:
    """No start is refused that the worker would take."""

    schema = TypeAdapter(annotation).json_schema()

    TypeAdapter(annotation).validate_python(value)
    assert misfit(value, schema) is None


@pytest.mark.parametrize(
    ("annotation", "value", "sentence"),
    [
        (int, "x", ": an integer is needed, not a string"),
        (int, True, ": an integer is needed, not true or false"),
        (int, 5.5, ": an integer is needed, not a fraction"),
        (bool, 1, ": true or false is needed, not an integer"),
        (int | None, "x", ": an integer or null is needed"),
        (list[int], [1, "x"], "[1]: an integer is needed, not a string"),
        (list[int], {}, ": an array is needed, not an object"),
        (tuple[int, str], [1, 2], "[1]: a string is needed, not an integer"),
        (tuple[int, str], [1], ": at least 2 items are needed, not 1"),
        (dict[str, int], {"a": "x"}, ".a: an integer is needed, not a string"),
        (Colour, "green", ': one of "red", "blue" is needed'),
        (Order, {**ORDER, "rows": [{"cents": "x"}]}, ".rows[0].cents: an integer is needed, not a string"),
        (Order, {"id": ORDER["id"]}, ".rows: is missing"),
        (Order, {**ORDER, "id": "x"}, ".id: a uuid is needed"),
        (Order, {**ORDER, "paid": "soon"}, ".paid: a date or null is needed"),
        (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "cat", "lives": "x"}, None),
        (Tree, {"below": [{"below": [1]}]}, ".below[0].below[0]: an object is needed, not an integer"),
        (Annotated[str, Field(pattern="^a+$")], "b", ": a string that matches ^a+$ is needed"),
        (Annotated[str, Field(max_length=1)], "bb", ": at most 1 characters are allowed, not 2"),
        (Annotated[int, Field(gt=0)], 0, ": more than 0 is needed"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(annotation: Any, value: Any, sentence: str | None) -> None:
    """The first place where it does not, and what would."""

    found = misfit(value, TypeAdapter(annotation).json_schema())

    assert found is not None
    assert sentence is None or found == sentence


def test_a_keyword_that_is_not_known_refuses_nothing() -> None:
    """The worker that has the workflow decides in the end."""

    assert misfit(5, {"type": "integer", "not": {}, "if": {}, "type_of_tomorrow": 1}) is None
    assert misfit(5, {"type": "of tomorrow"}) is None


def test_parameters_share_the_definitions_of_their_function() -> None:
    """A function's schema has one `$defs` for all its parameters."""

    async def place(order: Order, *more: Row) -> None: ...

    schema = describe(place).schema()

    assert (
        misfit({**ORDER, "rows": [1]}, schema["properties"]["order"], schema["$defs"])
        == ".rows[0]: an object is needed, not an integer"
    )
    assert (
        misfit([{"cents": None}], schema["properties"]["more"], schema["$defs"])
        == "[0].cents: an integer is needed, not null"
    )

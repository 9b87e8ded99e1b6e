"""A call is bound by parameter name, encoded by annotation and digested; a body gets values of its own (DESIGN 7)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import typing as t
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from replaykit.errors import ConfigurationError, NotJournalable
from replaykit.replay.signature import describe, same_input, shorten_input

if t.TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]


class Row(BaseModel):
    cents: int
    note: str = ""


class Order(BaseModel):
    id: str
    rows: list[Row] = []


class Client:
    """What no journal can hold."""


async def charge(card: str, cents: int) -> Order:
    raise AssertionError


def anything(a, /, b: Order, *more: int, flag: bool = False, **named: Row):  # type: ignore[no-untyped-def]
    raise AssertionError


def with_client(client: Client, order: Order, later: Unknown | None = None) -> None:
    raise AssertionError


def one(x: int) -> int:
    return x


class Service:
    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate

    async def quote(self, cents: int) -> float:
        return cents * self.rate

    @classmethod
    def make(cls, rate: float) -> Service:
        return cls(rate)

    @staticmethod
    def plain(x: int) -> int:
        return x

    async def __call__(self, x: int) -> int:
        return x


class Special(Service):
    pass


def test_an_input_is_an_object_by_parameter_name() -> None:
    """Recorded as JSON in the order of the signature, `*args` as a list, `**kwargs` as an object."""
    info = describe(anything)

    bound = info.bind((1, Order(id="o"), 2, 3), {"z": Row(cents=1), "flag": True})

    assert json.loads(bound.text) == {
        "a": 1,
        "b": {"id": "o", "rows": []},
        "more": [2, 3],
        "flag": True,
        "named": {"z": {"cents": 1, "note": ""}},
    }
    assert info.decode_arguments(bound.text, {}) == ((1, Order(id="o"), 2, 3), {"z": Row(cents=1), "flag": True})


def test_one_call_has_one_input_however_it_is_spelled() -> None:
    """Positional, by name and in another order: the same text and digest."""
    info = describe(charge)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("c", 5), {}),
        (("c",), {"cents": 5}),
        ((), {"cents": 5, "card": "c"}),
    ]

    bound = [info.bind(args, kwargs) for args, kwargs in calls]

    assert {b.text for b in bound} == {'{"card":"c","cents":5}'}
    assert {b.digest for b in bound} == {hashlib.sha256(b'{"card":"c","cents":5}').hexdigest()}


def test_a_body_gets_values_of_its_own() -> None:
    """A mutation in the body can't reach the caller's object: it would show in the first run only."""
    info = describe(anything)
    order = Order(id="o")

    (_, fresh), _ = info.fresh_arguments(info.bind(([1], order), {}))

    assert fresh == order
    assert fresh is not order


def test_an_argument_that_cannot_be_journaled_is_live() -> None:
    """A client is recorded as its type's name, left out of the digest, and handed to the body as it is."""
    info = describe(with_client)
    client = Client()

    bound = info.bind((client, Order(id="o")), {})

    assert json.loads(bound.text)["client"] == {"~type": "test_signature.Client"}
    assert bound.live == {"client": client}
    assert bound.digest == info.bind((Client(), Order(id="o")), {}).digest
    assert bound.digest != info.bind((client, Order(id="p")), {}).digest
    assert info.fresh_arguments(bound)[0][0] is client
    assert info.decode_arguments(bound.text, bound.live)[0] == (client, Order(id="o"))
    assert info.decode_input(bound.text) == {"order": Order(id="o")}


def test_an_effect_takes_no_live_argument() -> None:
    """Strict binding refuses with the path, and checks that each argument comes back."""
    info = describe(anything)

    with pytest.raises(NotJournalable, match=r"^\$\.a: cannot journal a test_signature\.Client"):
        info.bind((Client(), Order(id="o")), {}, strict=True)

    class Sub(Order):
        more: int = 1

    with pytest.raises(NotJournalable, match=r"^\$\.b: .* would come back as a test_signature\.Order"):
        info.bind((1, Sub(id="o")), {}, strict=True)


def test_an_argument_that_would_change_is_refused_before_its_body() -> None:
    """Bound without a check, for a replay owes none; refused when the body is about to start."""

    class Sub(Order):
        more: int = 1

    info = describe(with_client)
    bound = info.bind((Client(), Sub(id="o")), {})

    with pytest.raises(NotJournalable, match=r"^\$\.order: "):
        info.fresh_arguments(bound)


def test_a_list_that_grew_after_the_call_is_no_mistake() -> None:
    """The body gets the argument as it was when the step was called."""

    def fill(rows: list[Row]) -> None:
        raise AssertionError

    info = describe(fill)
    rows = [Row(cents=1)]
    bound = info.bind((rows,), {})
    rows.append(Row(cents=2))

    assert info.fresh_arguments(bound) == (([Row(cents=1)],), {})


def test_a_call_that_does_not_fit_names_no_values() -> None:
    """The sentence has names and counts: an argument may be a password."""
    info = describe(charge)

    with pytest.raises(TypeError, match=r"^charge\(\): missing a required argument: 'cents'$"):
        info.bind(("s3cret",), {})
    with pytest.raises(TypeError) as refused:
        info.bind(("s3cret", 1, "s3cret"), {})
    assert "s3cret" not in str(refused.value)


def test_a_default_is_not_recorded_and_means_the_same_as_its_value() -> None:
    """A parameter or field that is added with a default diverges from no recorded input."""

    def before(x: int) -> None:
        raise AssertionError

    def after(x: int, y: str = "new") -> None:
        raise AssertionError

    def take(order: Order) -> None:
        raise AssertionError

    recorded = describe(before).bind((1,), {}).text
    assert same_input(describe(after), recorded, describe(after).bind((1,), {}))
    assert same_input(describe(after), recorded, describe(after).bind((1, "new"), {}))
    assert not same_input(describe(after), recorded, describe(after).bind((1, "old"), {}))
    assert not same_input(describe(after), recorded, describe(after).bind((2,), {}))
    assert not same_input(describe(before), describe(after).bind((1, "new"), {}).text, describe(before).bind((1,), {}))
    assert same_input(describe(take), '{"order":{"id":"o"}}', describe(take).bind((Order(id="o"),), {}))
    assert not same_input(describe(take), '{"order":{"ident":"o"}}', describe(take).bind((Order(id="o"),), {}))


def test_nan_is_the_same_input_as_nan() -> None:
    """Compared as values, NaN included."""

    def scale(x: float, more: Any = None) -> None:
        raise AssertionError

    info = describe(scale)

    assert same_input(info, '{ "x" : "NaN", "more": [1] }', info.bind((math.nan, [1]), {}))


def test_half_an_emoji_has_a_digest() -> None:
    """Text that UTF-8 has no form for is digested as it is stored."""

    def say(words: Any) -> None:
        raise AssertionError

    info = describe(say)
    bound = info.bind(({"b": "\ud83d", "a": "\0"},), {})

    assert bound.digest == info.bind(({"a": "\0", "b": "\ud83d"},), {}).digest
    assert info.fresh_arguments(bound) == (({"a": "\0", "b": "\ud83d"},), {})


def test_live_arguments_are_not_compared() -> None:
    """The client of another process is another object; a value in its place is a difference."""
    info = describe(with_client)
    recorded = info.bind((Client(), Order(id="o")), {}).text

    assert same_input(info, recorded, info.bind((Client(), Order(id="o")), {}))
    assert not same_input(info, recorded, info.bind((None, Order(id="o")), {}))


def test_a_large_input_is_kept_as_digest_size_and_head() -> None:
    """Up to the limit it is kept whole; beyond it can't be compared as a value."""
    info = describe(one)
    bound = info.bind((10**300,), {})

    short = json.loads(shorten_input(bound, 100))

    assert shorten_input(bound, 400) == bound.text
    assert short == {"~sha256": bound.digest, "size": len(bound.text), "head": bound.text[:200]}
    assert not same_input(info, json.dumps(short), info.bind((1,), {}))
    with pytest.raises(ValueError, match="too large to be kept"):
        info.decode_arguments(json.dumps(short), {})


def test_a_result_goes_through_its_annotation() -> None:
    """The first run gets the decoded twin; what isn't declared is refused."""
    info = describe(charge)
    order = Order(id="o", rows=[Row(cents=1)])

    text, twin = info.encode_result(order)

    assert twin == order == info.decode_result(text)
    assert twin is not order
    with pytest.raises(NotJournalable):
        info.encode_result({"id": "o"})
    assert describe(anything).encode_result((1, {2})) == ('{"~tuple":[1,{"~set":[2]}]}', (1, {2}))


def test_names_and_colours() -> None:
    """`__name__`, `Class.method` for methods, nothing for what has no name of its own."""
    service = Service()
    wrapped: Callable[..., Any] = functools.wraps(one)(lambda x: x)
    expected: list[tuple[Callable[..., Any], str | None, bool]] = [
        (charge, "charge", True),
        (one, "one", False),
        (service.quote, "Service.quote", True),
        (Special().quote, "Special.quote", True),
        (Service.quote, "Service.quote", True),
        (Service.make, "Service.make", False),
        (Service.plain, "Service.plain", False),
        (Service, "Service", False),
        (service, None, True),
        (lambda x: x, None, False),
        (functools.partial(charge, "c"), None, True),
        (wrapped, "one", False),
        (len, "len", False),
    ]

    assert [(describe(f).name, describe(f).is_async) for f, _, _ in expected] == [e[1:] for e in expected]


def test_a_method_is_bound_without_its_self() -> None:
    """Two instances share what is known; self is not part of the input."""
    one_service, other = Service(1.0), Service(2.0)

    assert describe(one_service.quote) is describe(other.quote)
    assert describe(one_service.quote).bind((5,), {}).text == '{"cents":5}'
    assert describe(one_service).bind((5,), {}).text == '{"x":5}'
    assert describe(functools.partial(charge, "c")).bind((), {"cents": 5}).text == '{"cents":5}'


def test_a_wrapper_is_not_taken_for_what_it_wraps() -> None:
    """functools.wraps copies attributes: what is known of a function is kept with its identity."""
    info = describe(one)

    @functools.wraps(one)
    def wrapper(x: int) -> int:
        return one(x)

    assert describe(wrapper) is not info
    assert describe(wrapper) is describe(wrapper)
    assert describe(one) is info


def test_generators_are_refused_with_their_line() -> None:
    """A step has one result: an async generator is told so when it is first seen."""

    async def stream() -> AsyncIterator[int]:
        yield 1

    def items() -> Iterator[int]:
        yield 1

    class Streams:
        async def __call__(self) -> AsyncIterator[int]:
            yield 1

    for fn in (stream, items, Streams()):
        with pytest.raises(TypeError, match=r"test_signature\.py:\d+\) is an? (async )?generator function"):
            describe(fn)
    with pytest.raises(TypeError, match="a function is needed"):
        describe(5)  # type: ignore[arg-type]


def test_the_line_is_that_of_the_definition() -> None:
    """For sentences: file and line, through wrappers and partials."""
    line = f"{__file__}:{one.__code__.co_firstlineno}"

    assert describe(one).line == line
    assert describe(functools.partial(one, 1)).line == line


def test_an_annotation_that_cannot_be_evaluated_spoils_only_its_own_parameter() -> None:
    """A name imported under TYPE_CHECKING leaves its parameter open; the others keep their codecs."""
    info = describe(with_client)

    assert info.bind((None, Order(id="o"), (1, 2)), {}).text == (
        '{"client":null,"order":{"id":"o","rows":[]},"later":{"~tuple":[1,2]}}'
    )


def test_plain_json_is_coerced_by_annotation() -> None:
    """A start by name: models from objects, tuples from lists, a sentence with the path for what doesn't fit."""

    def run(order: Order, pair: tuple[int, int] = (1, 2), *, note: Any = None, **more: float) -> None:
        raise AssertionError

    info = describe(run)

    bound = info.validate_input([{"id": "o", "rows": [{"cents": "5"}]}, [3, 4]], {"note": {"~x": 1}, "z": 1})

    assert info.decode_arguments(bound.text, {}) == (
        (Order(id="o", rows=[Row(cents=5)]), (3, 4)),
        {"note": {"~x": 1}, "z": 1.0},
    )
    with pytest.raises(ConfigurationError, match=r"^run: \$\.order\.rows\[0\]\.cents: Input should be a valid integer"):
        info.validate_input([{"id": "o", "rows": [{"cents": "s3cret"}]}], {})
    with pytest.raises(ConfigurationError, match=r"^run\(\): missing a required argument: 'order'"):
        info.validate_input([], {})
    with pytest.raises(ConfigurationError, match=r"^with_client: \$\.client: "):
        describe(with_client).validate_input([5, {"id": "o"}], {})


def test_the_schema_tells_callers_what_fits() -> None:
    """An object by parameter name, with what its parameters refer to, and the order of the positional ones."""
    schema = describe(anything).schema()

    assert schema["positional"] == ["a", "b"]
    assert schema["required"] == ["a", "b"]
    assert schema["properties"]["a"] == {}
    assert schema["properties"]["more"] == {"type": "array", "items": {"type": "integer"}}
    assert schema["additionalProperties"] == {"$ref": "#/$defs/Row"}
    assert "Row" in schema["$defs"]
    json.dumps(schema)
    assert describe(with_client).schema()["properties"]["client"] == {}


def test_a_dataclass_in_a_call_keeps_its_type() -> None:
    """Nested containers of dataclasses come back as such."""

    @dataclasses.dataclass
    class Point:
        a: int

    def move(points: list[Point], by: dict[str, Point]) -> None:
        raise AssertionError

    move.__annotations__ = {"points": list[Point], "by": dict[str, Point], "return": None}
    info = describe(move)
    bound = info.bind(([Point(1)],), {"by": {"x": Point(2)}})

    assert info.fresh_arguments(bound) == (([Point(1)], {"x": Point(2)}), {})

"""A person's word on a call in doubt: what a value becomes on its way to a step whose annotation nobody here knows."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import uuid
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, Field, SecretStr

from replaykit.errors import ConfigurationError, InDoubt, NotJournalable, NotLanded
from replaykit.replay.answers import Landed, Unknown
from replaykit.replay.codec import codec_for
from replaykit.replay.failures import decode_error
from replaykit.replay.secrets import Secret
from replaykit.runtime.words import Word, landed_json, landed_text, word_of

AT = dt.datetime(2030, 1, 1, 12, tzinfo=dt.UTC)


@dataclasses.dataclass
class Receipt:
    """What a step returns."""

    card: str
    cents: int
    at: dt.datetime = AT


class Bill(BaseModel):
    """With an alias, a Decimal, and a place for anything."""

    receipt: Receipt
    total: decimal.Decimal = Field(alias="sum")
    note: Any = None


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


RECEIPT = Receipt("visa", 5)
BILL = Bill(receipt=RECEIPT, sum=decimal.Decimal("1.10"))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (None, None),
        (5, int),
        (5, float),
        ("a\0\ud800é", str),
        ({"a": [1, None, {"~b": 2.5}]}, dict[str, list[int | dict[str, float] | None]]),
        (RECEIPT, Receipt),
        (BILL, Bill),
        ([RECEIPT], list[Receipt]),
        ((1, RECEIPT), tuple[int, Receipt]),
        ({"a": RECEIPT}, dict[str, Receipt]),
        ({1: b"\xff\0"}, dict[int, bytes]),
        ({AT.date(): 1}, dict[dt.date, int]),
        ({Colour.RED}, set[Colour]),
        (frozenset({1, 2}), frozenset[int]),
        (deque([AT]), deque[dt.datetime]),
        (OrderedDict(b=AT, a=AT), OrderedDict[str, dt.datetime]),
        (Counter("aab"), Counter[str]),
        (Point(1, 2), Point),
        (Colour.RED, Colour),
        (uuid.UUID(int=7), uuid.UUID),
        (decimal.Decimal("1.10"), decimal.Decimal),
        (dt.timedelta(seconds=1.5), dt.timedelta),
        (b"\xff", bytes),
        (math.inf, float),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_the_annotation_of_the_step_reads_the_value(value: Any, annotation: Any) -> None:
    """As if the step had returned it."""
    text = landed_text(value)

    assert codec_for(annotation).decode(text) == value


@pytest.mark.parametrize("value", [None, 1, "a\0", 2.5, [1, {"a": None}], {"a": "\ud800"}])
def test_a_step_without_an_annotation_gets_plain_json_as_it_is(value: Any) -> None:
    """Only classes are lost there, which JSON does not name."""
    assert codec_for(Any).decode(landed_text(value)) == value


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (Secret("s3cret"), r"^\$: secrets are never written"),
        ({"keys": [SecretStr("s3cret")]}, r"^\$\['keys'\]\[0\]: secrets are never written"),
        (object(), r"^\$: an object has no JSON that a step's annotation reads: give plain JSON"),
        ([print], r"^\$\[0\]: a builtin_function_or_method has no JSON"),
        ({1: "a", "1": "b"}, r"^\$: the key '1' is there twice in JSON"),
        ({(1, 2): 3}, r"^\$: the key \(1, 2\) is no text in JSON"),
        (Bill(receipt=RECEIPT, sum=decimal.Decimal(1), note=RECEIPT), r"^\$\.\w+: .*Receipt where Any holds JSON"),
        ((one for one in [1]), r"^\$: a generator has no JSON"),
        (10**5000, r"^\$: "),
    ],
    ids=range(9),
)
def test_what_no_annotation_reads_is_refused(value: Any, sentence: str) -> None:
    """In a sentence that begins with the part's path, and never quotes a secret."""
    with pytest.raises(NotJournalable, match=sentence) as refused:
        landed_text(value)
    assert "s3cret" not in str(refused.value)


def test_what_holds_itself_is_refused() -> None:
    """Its JSON would have no end."""
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(NotJournalable, match="nested more than"):
        landed_text(endless)


def test_the_three_words() -> None:
    """It happened, it did not, the step fails; with a comment or, of NotLanded, with what it says."""
    landed = word_of(Landed({"a": 1}), "seen")
    assert (json.loads(landed.landed or ""), landed.not_landed, landed.fail) == ({"a": 1}, False, False)
    assert (landed.error, landed.comment) == (None, "seen")
    assert word_of(Landed(None)).landed == "null"
    assert word_of(NotLanded()) == Word(not_landed=True)
    assert word_of(NotLanded("no such charge")).comment == "no such charge"
    assert word_of(NotLanded("no such charge"), "asked the bank").comment == "asked the bank"
    failed = word_of(ValueError("gone"))
    assert failed.fail
    rebuilt = decode_error(failed.error or "")
    assert (type(rebuilt), str(rebuilt)) == (ValueError, "gone")
    assert (word_of(InDoubt()).fail, word_of(InDoubt()).error) == (True, None)
    assert word_of(InDoubt("the bank is closed")).error is not None


@pytest.mark.parametrize("answer", [None, 5, ValueError, Landed, NotLanded, Unknown("who knows")])
def test_anything_else_is_no_word(answer: Any) -> None:
    """A class is no error that happened; Unknown says nothing."""
    with pytest.raises(ConfigurationError, match=r"a word is Landed\(value\), NotLanded\(\) or the step's error"):
        word_of(answer)


def test_a_value_that_is_too_large_is_refused() -> None:
    """As a step's result would be."""
    with pytest.raises(NotJournalable, match=r"the value of Landed\(\.\.\.\) has 16,777,218 bytes"):
        word_of(Landed("x" * 16_777_216))


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        (" 1.5 ", float, 1.5),
        ('"12345678901234567890.10"', decimal.Decimal, decimal.Decimal("12345678901234567890.10")),
        (r'"a\u0000\ud800\u00e9\n"', str, "a\0\ud800é\n"),
        ('{"~tuple": [1]}', Any, (1,)),
        ('{"card": "visa", "cents": 5}', Receipt, RECEIPT),
    ],
    ids=range(5),
)
def test_json_that_somebody_wrote_is_read_by_the_annotation(text: str, annotation: Any, value: Any) -> None:
    """With tags, as a journal holds them, for a step without one."""
    answer = landed_json(text)
    assert answer is not None

    got = codec_for(annotation).decode(word_of(answer).landed or "")

    assert (got, repr(got)) == (value, repr(value))


@pytest.mark.parametrize("text", ["", "{", "yes", "NaN", "-Infinity", "1 2", "[" * 100_000])
def test_what_is_no_json_is_no_answer(text: str) -> None:
    assert landed_json(text) is None

"""Every kind of value at every door, the tables of the docs, and what many turns store (DESIGN 7)."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import itertools
import json
import random
import typing as t
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import typing_extensions as te
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from replaykit.errors import NotJournalable, StepFailed
from replaykit.limits import Settings
from replaykit.replay.calls import Workflow, step, workflow
from replaykit.replay.codec import codec_for
from replaykit.replay.failures import decode_error, encode_error
from replaykit.replay.outcomes import error_outcome, timeout_outcome
from replaykit.replay.requests import CallStep
from replaykit.replay.signature import FunctionInfo, GrowingInputs, describe
from tests.replay import values_table
from tests.replay.kinds import (
    ERRORS,
    KINDS,
    UTC,
    Cat,
    Color,
    Dec,
    Dog,
    Frozen,
    M,
    Named,
    Number,
    PlainBox,
    Point,
    Typed,
    Word,
    same,
    sentence,
)
from tests.replay.test_driver import claim

OPEN = [(label, Any, value) for label, _, value, _ in KINDS]
TYPED = [(label, annotation, value) for label, annotation, value, _ in KINDS]


def function_of(annotation: Any) -> FunctionInfo:
    """What is known of a function with one parameter and a result of that annotation."""

    def passes(x):  # type: ignore[no-untyped-def]
        raise AssertionError

    passes.__annotations__ = {"x": annotation, "return": annotation}
    return describe(passes)


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except NotJournalable as refused:
        return sentence(refused)
    return None


def test_the_tables_of_the_docs_are_what_the_codec_does() -> None:
    """Each kind of value and exception is a row: exact, or refused with its sentence."""
    page = values_table.PAGE.read_text(encoding="utf-8")

    assert page == values_table.written(page), (
        f"{values_table.PAGE.name} is not what the code does: {values_table.WRITE}"
    )


def test_no_row_is_silently_different() -> None:
    """Each cell is exact, equal as declared, or a sentence with a path; each row of the probes is there."""
    rows = [line.split(" | ") for line in values_table.values_table().replace("\\|", "/").splitlines()[2:]]
    cells = [cell.rstrip(" |") for row in rows for cell in row[2:]]

    assert [cell for cell in cells if not cell.startswith(("exact", "equal, as the declared ", "$"))] == []
    assert len(rows) >= 146
    assert len(ERRORS) >= 23


@pytest.mark.parametrize(
    ("annotation", "value"),
    [row[1:] for row in TYPED + OPEN],
    ids=[f"{row[0]}{' (open)' if row[1] is Any else ''}" for row in TYPED + OPEN],
)
def test_a_kind_has_one_fate_at_every_door(annotation: Any, value: Any) -> None:
    """What a result is refused for, an argument and a run's input are; what a result keeps, they keep, and exceptions too."""
    info = function_of(annotation)
    why = refusal(lambda: info.encode_result(value))
    bound = info.bind((value,), {})

    strict = refusal(lambda: info.bind((value,), {}, strict=True))
    assert (strict is None) == (why is None)
    if why is None:
        twin = info.encode_result(value)[1]
        (argument,), _ = info.fresh_arguments(bound)
        (started,), _ = info.decode_arguments(info.bind((value,), {}, strict=True).text, {})
        assert same(twin, argument)
        assert same(twin, started)
        assert info.bind((twin,), {}).digest == bound.digest
        return
    assert strict is not None
    assert strict.startswith("$.x")
    if not bound.live:  # it encodes, and the body is refused where the first run would get another than a replay
        assert refusal(lambda: info.fresh_arguments(bound)) == "$.x" + why[1:]
    elif "secret" in why:
        assert "s3cret" not in bound.text
        assert same(info.fresh_arguments(bound)[0][0], value)
    else:
        assert info.fresh_arguments(bound)[0][0] is value
        assert list(json.loads(bound.text)["x"]) == ["~type"]


@pytest.mark.parametrize("value", [row[2] for row in OPEN], ids=[row[0] for row in OPEN])
def test_an_attribute_of_an_exception_is_kept_or_named(value: Any) -> None:
    """As a value without an annotation: exact, or left out with a note."""
    error = RuntimeError("why")
    error.__dict__["value"] = value

    twin: Any = decode_error(encode_error(error))

    assert type(twin) is RuntimeError
    if refusal(lambda: codec_for(Any).encode_checked(value)) is None:
        assert same(vars(twin)["value"], value)
    else:
        assert not hasattr(twin, "value")
        assert any(".value (" in note for note in twin.__notes__)


# --- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [row[1] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_an_exception_comes_through_three_doors_unchanged(error: BaseException) -> None:
    """A step's error, raised on by the workflow, is the run's, and its reader gets the same as the workflow."""
    first = error_outcome(error, 0).value
    again = decode_error(encode_error(first))

    assert type(again) is type(first)
    assert str(again) == str(first) == str(error)
    assert repr(again.args) == repr(first.args)
    assert getattr(again, "type", None) == getattr(first, "type", None)
    notes = [note for note in getattr(first, "__notes__", ()) if note not in getattr(again, "__notes__", ())]
    assert notes == []


def test_what_was_being_handled_comes_back_as_the_context() -> None:
    """`__context__` where there is no cause; nothing after `raise ... from None`."""

    def fails(**how: Any) -> BaseException:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                if how:
                    raise ValueError("second") from how["cause"]
                raise ValueError("second")  # noqa: B904
        except ValueError as error:
            return decode_error(encode_error(error))

    plain, caused, alone = fails(), fails(cause=OSError(2, "No")), fails(cause=None)

    assert repr(plain.__context__) == "KeyError('first')"
    assert plain.__cause__ is None
    assert repr(caused.__cause__) == "FileNotFoundError(2, 'No')"
    assert alone.__cause__ is alone.__context__ is None


def test_a_group_of_groups_has_a_limit_of_its_own() -> None:
    """A hundred members in all, however they are nested; the rest is counted in a note."""
    group: BaseException = ValueError("leaf")
    for _ in range(6):
        members: list[BaseException] = [group] * 50
        group = BaseExceptionGroup("g", members)

    text = encode_error(group)
    twin = decode_error(text)

    assert len(text) < 100_000
    assert isinstance(twin, ExceptionGroup)
    assert len(twin.exceptions) == 50


class Unspeakable(Exception):
    """Every way to read it raises."""

    def __init__(self, raises: BaseException) -> None:
        super().__init__("x")
        self.__dict__["raises"] = raises

    def __str__(self) -> str:
        raise self.__dict__["raises"]

    __repr__ = __str__


@pytest.mark.parametrize("raises", [ValueError(), SystemExit(3), KeyboardInterrupt(), RecursionError()])
def test_an_exception_that_cannot_say_itself_is_recorded(raises: BaseException) -> None:
    """Its `__str__` and `__repr__` may raise what they like; so may a note."""
    error = Unspeakable(raises)
    error.__notes__ = ["fine", Unspeakable(ValueError())]  # type: ignore[list-item]

    twin = decode_error(encode_error(error))

    assert isinstance(twin, StepFailed)
    assert twin.type == f"{__name__}.Unspeakable"
    assert "no message" in str(twin)
    assert twin.__notes__[0] == "fine"
    assert "notes[1]" in twin.__notes__[1]


def test_a_time_out_is_the_builtin_error() -> None:
    """In the first run and in a replay."""
    call = CallStep("slow", "slow", test_a_time_out_is_the_builtin_error, describe(len), None, None, None)  # type: ignore[arg-type]

    outcome = timeout_outcome(call, 1, 2.5, 0)

    assert outcome.outcome == "timeout"
    assert type(outcome.value) is type(decode_error(outcome.error or "")) is TimeoutError
    assert "2.5 s" in str(outcome.value)


# --- any annotation, any value ----------------------------------------------------------------------------------------

Pair = tuple[Any, st.SearchStrategy[Any]]

LEAVES: list[Pair] = [
    (int, st.integers() | st.booleans() | st.sampled_from(Number)),
    (bool, st.booleans()),
    (float, st.floats() | st.integers(-100, 100)),
    (str, st.text() | st.sampled_from(Word)),
    (bytes, st.binary()),
    (None, st.none()),
    (Dec, st.decimals()),
    (dt.date, st.dates()),
    (dt.datetime, st.datetimes(timezones=st.none() | st.just(UTC) | st.timezones())),
    (dt.time, st.times()),
    (dt.timedelta, st.timedeltas()),
    (uuid.UUID, st.uuids()),
    (Color, st.sampled_from(Color)),
    (Word, st.sampled_from(Word)),
    (t.Literal["a", 1, None], st.sampled_from(["a", 1, None])),
    (M, st.builds(M, a=st.integers())),
    (Cat | Dog, st.builds(Cat, n=st.integers()) | st.builds(Dog, n=st.integers())),
    (Point, st.builds(Point, st.integers(), st.lists(st.integers(), max_size=2).map(tuple))),
    (Frozen, st.builds(Frozen, a=st.integers())),
    (Named, st.builds(Named, st.integers(), st.text())),
    (Typed, st.fixed_dictionaries({"a": st.integers()}, optional={"d": st.dates()})),
    (tuple[int, str], st.builds(Named, st.integers(), st.text()) | st.tuples(st.integers(), st.text())),
    (dict[str, int], st.text(max_size=5).map(collections.Counter) | st.dictionaries(st.text(), st.integers())),
    (Any, st.integers() | st.tuples(st.text(), st.binary()) | st.sets(st.integers())),
    (object, st.dates() | st.builds(M, a=st.integers())),
]
HASHABLE = (int, bool, str, bytes, dt.date, uuid.UUID, Color, Word, Frozen)  # a signaling NaN has no hash


def generic(origin: Any, *arguments: Any) -> Any:
    return origin[arguments[0] if len(arguments) == 1 else arguments]


@st.composite
def pairs(draw: st.DrawFn, depth: int = 3) -> Pair:
    """An annotation and a strategy of values that it may be given, not all of which it keeps."""
    made = draw(st.integers(0, 13)) if depth else 0
    if made < 3:
        return draw(st.sampled_from(LEAVES))
    inner, values = draw(pairs(depth - 1))
    other, others = draw(pairs(depth - 1))
    key, keys = draw(st.sampled_from([leaf for leaf in LEAVES if leaf[0] in HASHABLE]))
    some = st.lists(values, max_size=3)
    kinds: list[Pair] = [
        (generic(list, inner), some),
        (generic(tuple, inner, ...), some.map(tuple)),
        (generic(tuple, inner, other), st.tuples(values, others)),
        (generic(dict, key, inner), st.dictionaries(keys, values, max_size=3)),
        (generic(set, key), st.sets(keys, max_size=3)),
        (generic(frozenset, key), st.frozensets(keys, max_size=3)),
        (t.Union[inner, other], values | others),  # noqa: UP007
        (t.Optional[inner], st.none() | values),  # noqa: UP045
        (generic(collections.deque, inner), st.builds(collections.deque, some, st.none() | st.just(9))),
        (generic(PlainBox, inner), st.builds(PlainBox, values)),
        (te.Annotated[inner, "a note"], values),
    ]
    return kinds[made - 3]


def as_declared(value: Any, twin: Any) -> bool:
    """The same, where an int may stand for itself as a float, and a member of an enum or a bool as its plain value."""
    if type(value) is not type(twin):
        return value == twin and isinstance(value, int | Word) and type(twin) in (int, float, str)
    if isinstance(value, dict):
        kept = {key: key for key in twin}
        return len(value) == len(twin) and all(
            key in kept and as_declared(key, kept[key]) and as_declared(item, twin[key]) for key, item in value.items()
        )
    if isinstance(value, (list, tuple, collections.deque)):
        bounds = getattr(value, "maxlen", None) == getattr(twin, "maxlen", None)
        return bounds and len(value) == len(twin) and all(map(as_declared, value, twin))
    if isinstance(value, (set, frozenset)):
        return len(value) == len(twin) and all(any(as_declared(x, y) for y in twin) for x in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(as_declared(getattr(value, f.name), getattr(twin, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, BaseModel):
        return all(as_declared(x, y) for (_, x), (_, y) in zip(value, twin, strict=True))
    return same(value, twin)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_value_under_a_nested_annotation_is_kept_or_refused(data: st.DataObject) -> None:
    """Whatever the annotation and whether or not the value fits it: equal and of its classes, or NotJournalable."""
    annotation, values = data.draw(pairs())
    value = data.draw(values)
    info = function_of(annotation)
    try:
        text, twin = info.encode_result(value)
    except NotJournalable as refused:
        assert str(refused).startswith("$")
        return

    assert as_declared(value, twin)
    assert same(twin, info.decode_result(text))
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    assert same(twin, info.fresh_arguments(info.bind((value,), {}))[0][0])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_digest_tells_values_apart_and_not_their_order(data: st.DataObject) -> None:
    """Two values have one digest if they are equal but for the order of keys and members, and else two."""
    annotation, values = data.draw(pairs())
    info = function_of(annotation)
    one, other = data.draw(values), data.draw(values)
    try:
        texts = [info.encode_result(value) for value in (one, other)]
    except NotJournalable:
        return
    digests = [info.bind((value,), {}).digest for value in (one, other)]

    assert info.bind((shuffled(one, random.Random(0)),), {}).digest == digests[0]
    if digests[0] == digests[1]:
        assert info.result.equal(texts[0][1], texts[1][1])
    elif texts[0][0] == texts[1][0]:
        raise AssertionError("one text has two digests")


def shuffled(value: Any, dice: random.Random) -> Any:
    """The same value, its dicts and sets built in another order."""
    if type(value) is dict:
        items = [(key, shuffled(item, dice)) for key, item in value.items()]
        dice.shuffle(items)
        return dict(items)
    if type(value) in (set, frozenset):
        members = list(value)
        dice.shuffle(members)
        return type(value)(members)
    if type(value) in (list, tuple):
        return type(value)(shuffled(item, dice) for item in value)
    return value


# --- what many turns store --------------------------------------------------------------------------------------------


def call_model(messages: list[dict[str, str]]) -> dict[str, str]:
    raise AssertionError


class Message(BaseModel):
    role: str
    content: str


def call_typed_model(messages: list[Message], *, model: str) -> Message:
    raise AssertionError


def stored_bytes(turns: int, size: int, *, typed: bool = False) -> int:
    """Bytes of the inputs and outputs of that many turns, each of which asks with all that was said before."""
    info = describe(call_typed_model if typed else call_model)
    options: dict[str, Any] = {"model": "m"} if typed else {}
    inputs = GrowingInputs(Settings().input_bytes_max)
    said: list[Any] = []
    total = 0
    for turn, role in zip(range(turns), itertools.cycle(["user"]), strict=False):
        for speaker in (role, "assistant"):
            words = {"role": speaker, "content": f"{turn}: " + "word " * (size // 5)}
            said.append(Message(**words) if typed else words)
        *asked, answer = said
        text = inputs.record("call_model", info.bind((asked,), options))
        total += len(text.encode()) + len(info.encode_result(answer)[0].encode())
    return total


@pytest.mark.parametrize(
    ("size", "typed"), [(5, False), (50, False), (250, False), (1_000, False), (1_000, True), (4_000, False)]
)
def test_turns_of_a_growing_conversation_are_stored_in_linear_space(size: int, typed: bool) -> None:
    """50, 100 and 200 turns that each pass the whole history: at most 2.1 times the bytes per doubling."""
    stored = [stored_bytes(turns, size, typed=typed) for turns in (50, 100, 200)]

    assert all(later / earlier <= 2.1 for earlier, later in itertools.pairwise(stored)), stored


def test_an_input_that_grew_is_read_whole() -> None:
    """By replaying what was recorded: each input up to `input_bytes_max` is there to be compared; a gap costs the rest alone."""
    info = describe(call_model)
    inputs, reader, late = (GrowingInputs(16_384) for _ in range(3))
    said: list[dict[str, str]] = []
    bound, recorded = [], []
    for turn in range(60):
        said.append({"role": "user", "content": f"{turn} \0\\ é" + "w" * 100})
        bound.append(info.bind((said if turn % 17 else [*said[1:], said[0]],), {}))
        recorded.append(inputs.record("call_model", bound[-1]))
    whole = [reader.whole("call_model", b.digest, text) for b, text in zip(bound, recorded, strict=True)]
    missed = [late.whole("call_model", b.digest, text) for b, text in zip(bound[20:], recorded[20:], strict=True)]

    assert whole == [b.text for b in bound]
    assert sum(map(len, recorded)) < sum(map(len, whole)) / 3
    assert missed[0] == recorded[20]
    assert missed[-1] == bound[-1].text  # turn 51 was recorded whole


class Said(BaseModel):
    content: str


class SaidLater(Said):
    """The same after a deployment: a field with a default came in."""

    speaker: str = "user"


def test_a_conversation_goes_on_after_its_messages_got_a_field() -> None:
    """Inputs that were recorded by what is new in them are compared as whole ones are: the run is not held."""

    def chat(kind: type[Said]) -> Workflow[[], int]:
        async def answer(messages):  # type: ignore[no-untyped-def]
            raise AssertionError

        answer.__annotations__ = {"messages": list[kind], "return": kind}  # type: ignore[valid-type]

        @workflow(name="chat")
        async def talk() -> int:
            said: list[Said] = []
            for turn in range(30):
                said.append(kind(content=f"{turn} " + "w" * 200))
                said.append(await step(answer, said))
            return len(said)

        return talk

    hand = claim(chat(Said))
    for turn in range(29):
        hand.end("answer" if turn == 0 else f"answer#{turn + 1}", Said(content=f"answer {turn}"))
        hand.commit()
    later = claim(chat(SaidLater), hand.journal)

    assert '"then"' in (hand.journal[-1].input or "")
    assert later.driver.execution.hold_reason is None
    assert later.actions() == ["answer#30"]

"""Scenarios of the kind serialization: what goes into the journal comes out of it, or is refused where it goes in."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import enum
import fractions
import inspect
import ipaddress
import json
import pathlib
import re
import threading
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from replaykit import Client, ConfigurationError, NotJournalable, StepFailed, Worker, step, workflow
from replaykit.replay.codec import codec_for
from replaykit.replay.failures import decode_error, encode_error, error_summary
from replaykit.replay.signature import describe
from tests.crash.rows import Rows
from tests.replay import drive
from tests.scenarios import shapes
from tests.scenarios.stage import play, python, replaykit

pytestmark = pytest.mark.anyio


# --- errors -----------------------------------------------------------------------------------------------------------


async def refuse_payment() -> None:
    raise shapes.PaymentError(7)


@workflow
async def block() -> None:
    await step(refuse_payment)


@workflow
async def pays() -> list[Any]:
    try:
        await block()
    except shapes.PaymentError as error:
        return [type(error) is shapes.PaymentError, error.code, str(error)]
    return []


async def test_b100_an_except_clause_sees_the_same_error_in_a_replay(dsn: str) -> None:
    """Same class, same attributes, in the first run and from the journal."""
    played = await play(dsn, pays)

    assert played.first == played.again == [True, 7, "payment refused: 7"]


async def ask_api() -> None:
    try:
        raise LookupError("no such route")
    except LookupError as cause:
        raise shapes.ApiError(502, detail="bad gateway") from cause


@workflow
async def asks(catch: bool) -> list[Any]:
    try:
        await step(ask_api)
    except shapes.ApiError as error:
        if not catch:
            raise
        return [error.status, error.detail, str(error), repr(error.__cause__)]
    return []


async def test_b104_an_error_with_an_init_of_its_own_is_read_everywhere(dsn: str) -> None:
    """In the workflow, by a client, on the command line of a process that does not know its class."""
    caught = await play(dsn, asks, True)
    failed = await play(dsn, asks, False)
    shown = await asyncio.to_thread(replaykit, dsn, "show", str(failed.run_id), "--json")
    shown_to_people = await asyncio.to_thread(replaykit, dsn, "show", str(failed.run_id))

    assert caught.first == caught.again == [502, "bad gateway", "502: bad gateway", "LookupError('no such route')"]
    for error in (failed.first, failed.again):
        assert isinstance(error, shapes.ApiError)
        assert (error.status, error.detail) == (502, "bad gateway")
        assert isinstance(error.__cause__, LookupError)
    assert json.loads(shown.out)["run"]["error"]["attributes"] == {"status": 502, "detail": "bad gateway"}
    assert "502: bad gateway" in shown_to_people.out


async def test_b104_a_class_that_cannot_be_rebuilt_is_a_generic_error_with_all_of_it() -> None:
    """Type name, message, attributes and cause are there."""

    class Local(Exception):
        def __init__(self, status: int, *, detail: str) -> None:
            super().__init__(f"{status}: {detail}")
            self.status = status
            self.detail = detail

    error = Local(502, detail="bad")
    error.__cause__ = LookupError("why")
    again = decode_error(encode_error(error))

    assert isinstance(again, StepFailed)
    assert again.type.endswith("Local")
    assert str(again) == "502: bad"
    assert repr(again.__cause__) == "LookupError('why')"
    assert again.attributes == {"status": 502, "detail": "bad"}
    for _ in range(2):  # also when it is recorded once more, as the error of the run
        again = decode_error(encode_error(again))
    assert isinstance(again, StepFailed)
    assert again.attributes == {"status": 502, "detail": "bad"}
    assert repr(again.__cause__) == "LookupError('why')"


async def test_b106_an_attribute_without_a_form_does_not_mask_the_error() -> None:
    """The error's own words and traceback are stored; what could not be is named."""
    try:
        error = Exception("boom")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        error.knot = shapes.Knot()  # type: ignore[attr-defined]
        raise error
    except Exception as raised:
        text = encode_error(raised)

    again = decode_error(text)
    assert error_summary(text)[1] == str(again) == "boom"
    notes = "\n".join(again.__notes__)
    assert "test_serialization.py" in notes
    assert ".lock (_thread.lock)" in notes


# --- the first run sees what a replay sees ----------------------------------------------------------------------------


async def mixed() -> Any:
    return (1, {2: "x"}, {3, 4}, dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 1.0)


@workflow
async def looks() -> list[Any]:
    value = await step(mixed)
    return [isinstance(value, tuple), value[1][2], 3 in value[2], type(value[3]).__name__, type(value[4]).__name__]


async def test_b101_the_first_run_sees_what_a_replay_sees(dsn: str) -> None:
    """Equal values of equal types, without a crash and after one."""
    played = await play(dsn, looks)

    assert played.first == played.again == [True, "x", True, "datetime", "float"]


async def fill(items: list[int]) -> None:
    items.extend([1, 2, 3])


@workflow
async def fills() -> list[int]:
    items: list[int] = []
    await step(fill, items)
    return items


async def test_b103_a_body_gets_a_copy_of_its_arguments(dsn: str) -> None:
    """What it does to them is lost in the first run already, not only after the first crash."""
    played = await play(dsn, fills)

    assert played.first == played.again == []


# --- refused where it goes in -----------------------------------------------------------------------------------------

acted: list[str] = []


async def return_odd(kind: str) -> Any:
    acted.append(kind)
    odd: dict[str, Callable[[], Any]] = {
        "file": lambda: pathlib.Path(__file__).open(),  # noqa: SIM115
        "lock": threading.Lock,
        "lambda": lambda: lambda: 1,
        "generator": lambda: (n for n in (1, 2)),
    }
    made = odd[kind]()
    if kind == "file":
        made.close()
    return {"items": [0, 1, 2, {kind: made}]}


@workflow
async def returns_odd(kind: str) -> str:
    try:
        await step(return_odd, kind)
    except NotJournalable as refused:
        return str(refused)
    return "recorded"


@pytest.mark.parametrize("kind", ["file", "lock", "lambda", "generator"])
async def test_b107_a_result_without_a_form_is_refused_when_it_is_recorded(dsn: str, kind: str) -> None:
    """The error names the path in the value; the body ran once, and that refusal is its outcome for good."""
    acted.clear()
    played = await play(dsn, returns_odd, kind)

    assert played.first.startswith(f"$.items[3].{kind}: cannot journal ")
    assert played.again == played.first
    assert acted == [kind]
    assert [(entry.key, entry.outcome) for entry in played.entries] == [("return_odd", "error")]


def deep(levels: int) -> Any:
    """Dicts in dicts."""
    value: Any = 1
    for _ in range(levels):
        value = {"d": value}
    return value


def cycle() -> Any:
    """A list in itself."""
    value: list[Any] = []
    value.append(value)
    return value


async def return_deep(kind: str) -> Any:
    makers: dict[str, Callable[[], Any]] = {"cycle": cycle, "knot": shapes.Knot, "deep": lambda: deep(10_000)}
    return makers[kind]()


async def take_anything(value: Any) -> str:
    return "ok"


async def raise_deep(kind: str) -> None:
    error = ValueError("deep")
    error.inside = await return_deep(kind)  # type: ignore[attr-defined]
    raise error


@workflow
async def meets_depth(kind: str) -> list[str]:
    seen = []
    for call in (step(return_deep, kind), step(raise_deep, kind)):
        try:
            await call
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}"[:60])
    return seen


@workflow
async def takes(value: Any) -> str:
    return await step(take_anything, value)


@pytest.mark.parametrize("kind", ["cycle", "knot", "deep"])
async def test_b121_a_value_without_an_end_is_a_clean_error(dsn: str, kind: str) -> None:
    """As a result, in an error, as an input; the worker lives on and does the next run."""
    async with Client(dsn) as client, Worker(client, workflows=[meets_depth, takes]):
        met = await client.start(meets_depth, kind)
        seen = await met.result(timeout=30)
        with pytest.raises(NotJournalable, match=r"^\$\.value"):
            await client.start(takes, await return_deep(kind))
        assert await (await client.start(takes, [1])).result(timeout=30) == "ok"

    assert seen[0].startswith("NotJournalable: $")
    assert seen[1] == "ValueError: deep"


# --- classes ----------------------------------------------------------------------------------------------------------


def through(annotation: Any, value: Any) -> Any:
    """What comes back of a value through the codec of an annotation; the first run's twin is the same."""
    codec = codec_for(annotation)
    text, twin = codec.encode_checked(value)
    again = codec.decode(text)
    assert repr(again) == repr(twin)
    return again


@pytest.mark.parametrize("annotation", [shapes.Job, Any], ids=["annotated", "untyped"])
async def test_b109_a_nested_enum_comes_back_in_a_fresh_process(annotation: Any) -> None:
    """Its member, also in another process; a class that is not there is an error and never None."""
    job = shapes.Job(phase=shapes.Job.Phase.READY, before=[shapes.Job.Phase.READY])
    text = codec_for(annotation).encode(job)

    name = "Any" if annotation is Any else "shapes.Job"
    read = (
        "import sys; from typing import Any; from replaykit.replay.codec import codec_for; "
        f"from tests.scenarios import shapes; job = codec_for({name}).decode(sys.argv[1]); "
        "print(job.phase is shapes.Job.Phase.READY, job.before)"
    )
    assert python("-c", read, text).out == "True [<Phase.READY: 'ready'>]\n"
    if annotation is Any:
        lost = python(
            "-c",
            "import sys; from replaykit.replay.codec import codec_for; codec_for(object).decode(sys.argv[1])",
            text,
        )
        assert "no class tests.scenarios.shapes.Job is loaded here" in lost.err


@pytest.mark.parametrize("untyped", [True, False], ids=["untyped", "annotated"])
@pytest.mark.parametrize(
    "value",
    [shapes.Computed(2), shapes.Frozen(2), shapes.Slotted(2), shapes.KeywordOnly(a=2, b=[3]), shapes.Seeded(2, 5)],
    ids=lambda value: type(value).__name__,
)
async def test_b110_a_dataclass_of_any_kind_comes_back_equal_or_is_refused(value: Any, untyped: bool) -> None:
    """Computed fields, frozen, slots, keyword-only, InitVar."""
    try:
        again = through(Any if untyped else type(value), value)
    except NotJournalable as refused:
        assert isinstance(value, shapes.Seeded)  # made from something that is not kept
        assert str(refused).startswith("$")
    else:
        assert again == value
        assert type(again) is type(value)


class Size(enum.IntEnum):
    S = 1


class Tone(enum.StrEnum):
    LOW = "low"


class Flags(enum.Flag):
    A = 1
    B = 2


class Both(NamedTuple):
    left: int
    right: str


STANDARD: list[Any] = [
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    1 + 2j,
    uuid.UUID(int=1),
    pathlib.Path("a/b"),
    dt.timedelta(days=1, microseconds=1),
    dt.date(2026, 1, 1),
    dt.time(1, 2, 3),
    dt.datetime(2026, 1, 1),
    dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    dt.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    zoneinfo.ZoneInfo("Europe/Berlin"),
    re.compile("a+", re.IGNORECASE),
    range(1, 9, 2),
    ipaddress.ip_address("10.0.0.1"),
    ipaddress.ip_network("fe80::/10"),
    Size.S,
    Tone.LOW,
    Flags.A | Flags.B,
    b"\xff\x00",
    bytearray(b"ab"),
    memoryview(b"ab"),
    frozenset({1, 2}),
    {1, 2},
    (1, "a"),
    Both(1, "a"),
    1.5,
    float("inf"),
    10**40,
    True,
    None,
    "text",
    threading.Lock(),
    Exception("no value"),
]


def doors(annotation: Any, value: Any) -> dict[str, Any]:
    """What becomes of a value as a result, as an argument, as a run's input: the twin, or the refusal's words."""

    async def function(value: Any) -> Any:
        return value

    function.__annotations__ = {"value": annotation, "return": annotation}
    info = describe(function)
    found: dict[str, Any] = {}
    entrances: dict[str, Callable[[], Any]] = {
        "result": lambda: info.encode_result(value)[1],
        "argument": lambda: info.fresh_arguments(info.bind((value,), {}))[0][0],
        "input": lambda: info.decode_arguments(info.bind((value,), {}, strict=True).text, {})[0][0],
    }
    for door, enter in entrances.items():
        try:
            found[door] = enter()
        except NotJournalable as refused:
            found[door] = str(refused)
    return found


@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "annotated"])
@pytest.mark.parametrize("value", STANDARD, ids=lambda value: type(value).__name__)
async def test_b112_a_type_of_the_standard_library_is_treated_alike_at_each_door(value: Any, typed: bool) -> None:
    """Equal of the same class, or refused in the same words. An argument without a form reaches its body as it is."""
    found = doors(type(value) if typed and value is not None else Any, value)

    refused = isinstance(found["result"], str) and found["result"] != value
    if refused:
        words = found["result"].removeprefix("$")
        assert words.startswith(": ")
        assert found["input"] == f"$.value{words}"
        # a body gets a live object as it is, recorded by the name of its type; what would be lost is refused
        assert found["argument"] is value or found["argument"] == f"$.value{words}"
    else:
        for twin in found.values():
            assert twin == value
            assert type(twin) is type(value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (dict[shapes.OrderId, int], {shapes.OrderId("a"): 1}),
        (dict[shapes.TicketId, int], {shapes.TicketId("a"): 1}),
        (dict[int, str], {1: "a"}),
        (dict[int | str, str], {1: "a", "1": "b"}),
        (dict[str | None, int], {None: 1, "None": 2}),
        (dict[shapes.Job.Phase, int], {shapes.Job.Phase.READY: 1}),
        (dict[tuple[int, int], str], {(1, 2): "a"}),
        (Any, {1: "a", "1": "b"}),
        (Any, {True: "a", "True": "b", None: "c", (1, 2): "d", shapes.Job.Phase.READY: "e"}),
        (Any, {shapes.OrderId("a"): 1}),
    ],
    ids=str,
)
async def test_b113_keys_keep_their_type_and_count(annotation: Any, value: dict[Any, Any]) -> None:
    """Or the dict is refused: two keys are never made one, none changes its type."""
    try:
        again = through(annotation, value)
    except NotJournalable as refused:
        assert str(refused).startswith("$")
        return
    assert again == value
    assert [type(key) for key in again] == [type(key) for key in value]


async def make_foos(n: int) -> list[shapes.Foo]:
    return [shapes.Foo(n)]


async def use_foos(
    many: tuple[shapes.Foo, ...], named: dict[str, shapes.Foo], maybe: shapes.Foo | None
) -> dict[str, shapes.Foo]:
    return {"sum": shapes.Foo(sum(foo.double() for foo in (*many, *named.values())) + (maybe.double() if maybe else 0))}


@workflow
async def with_foos(first: list[shapes.Foo]) -> list[shapes.Foo | None]:
    foos = await step(make_foos, first[0].double())
    named = await step(use_foos, tuple(foos), {"a": foos[0]}, foos[0])
    return [*foos, named["sum"], None]


async def test_b115_containers_of_classes_hold_instances(dsn: str) -> None:
    """In the run's input, in arguments, in results: methods of the elements can be called."""
    played = await play(dsn, with_foos, [shapes.Foo(1)])

    assert played.first == played.again == [shapes.Foo(2), shapes.Foo(12), None]


# --- text and numbers -------------------------------------------------------------------------------------------------

ODD_TEXTS = ["a\x00b", "\\u0000", "\\", "ok\ud83d", "\udce9t\udce9", "é☃😀", "\\ud83d"]


async def echo_text(text: str) -> dict[str, Any]:
    return {"value": text, f"key {text}": [text]}


async def raise_text(text: str) -> None:
    raise ValueError(text)


@workflow
async def texts(text: str) -> list[Any]:
    echoed = await step(echo_text, text)
    try:
        await step(raise_text, text)
    except ValueError as error:
        return [echoed, str(error), text]
    return []


@pytest.mark.parametrize("text", ODD_TEXTS[:3], ids=ascii)
async def test_b116_text_with_nul_is_stored_and_read_back(dsn: str, text: str) -> None:
    """As input, argument, result, key and error message, beside the literal text that such an escape would make."""
    played = await play(dsn, texts, text)

    assert played.first == played.again == [{"value": text, f"key {text}": [text]}, text, text]


async def test_b116_a_run_key_with_nul_is_refused(dsn: str) -> None:
    """By name, before anything is sent."""
    async with Client(dsn) as client:
        with pytest.raises(ConfigurationError, match="without NUL"):
            client.options(key="a\x00b")


async def test_b118_half_a_character_is_stored_shown_and_read_back(dsn: str) -> None:
    """And neither form of the command line trips over it."""
    shown = []
    for text in ODD_TEXTS[3:]:
        played = await play(dsn, texts, text)
        assert played.first == played.again == [{"value": text, f"key {text}": [text]}, text, text]
        shown.append(await asyncio.to_thread(replaykit, dsn, "show", str(played.run_id)))
        shown.append(await asyncio.to_thread(replaykit, dsn, "show", str(played.run_id), "--json"))
    for words in (("runs", "--json"), ("runs",)):
        shown.append(await asyncio.to_thread(replaykit, dsn, *words))

    assert [said.code for said in shown] == [0] * len(shown)
    assert "Traceback (most recent" not in "".join(said.err for said in shown)


NUMBERS = [3544790567247868102, 2**53 + 1, 10**40]


async def take_numbers(input: dict[str, int]) -> list[int]:
    return [input["id"], 2**53 + 1, 10**40]


@workflow
async def numbers(input: dict[str, int]) -> list[int]:
    return await step(take_numbers, input)


async def test_b119_whole_numbers_of_any_size_are_exact_everywhere(dsn: str, rows: Rows) -> None:
    """In Python, in the database's text, in what the command line takes and prints."""
    async with Client(dsn) as client, Worker(client, workflows=[numbers]):
        started = await asyncio.to_thread(
            replaykit, dsn, "start", "numbers", f'{{"id": {NUMBERS[0]}}}', "--wait", "--json"
        )
        run_id = json.loads(started.out)["id"]
        result = await client.handle(uuid.UUID(run_id), numbers).result(timeout=30)
    shown = await asyncio.to_thread(replaykit, dsn, "show", run_id, "--json")

    assert result == NUMBERS
    stored = rows.ask("select output::text, input::text from payloads where run_id = %s", run_id)
    assert stored == [(json.dumps(NUMBERS, separators=(",", ":")), f'{{"input":{{"id":{NUMBERS[0]}}}}}')]
    for said in (started.out, shown.out):
        assert [n in said for n in map(str, NUMBERS)] == [True] * 3


async def make_odd_mixture() -> Any:
    return {"text": "bad \udcff", "set": {shapes.Job.Phase.READY}, "bytes": b"\xff", "enum": shapes.Job.Phase.DONE}


@workflow
async def odd_mixture() -> Any:
    return await step(make_odd_mixture)


async def test_b122_odd_text_among_other_types_takes_the_same_codec(dsn: str, rows: Rows) -> None:
    """All of it comes back, and it is written in the one form that every value has."""
    played = await play(dsn, odd_mixture)

    assert played.first == played.again == await make_odd_mixture()
    ((text,),) = rows.ask("select output::text from journal where run_id = %s", played.run_id)
    plain = dict(json.loads(codec_for(Any).encode({**await make_odd_mixture(), "text": "good"})))
    assert {name: value for name, value in json.loads(text).items() if name != "text"} == {
        name: value for name, value in plain.items() if name != "text"
    }


def test_b122_the_codec_is_chosen_by_the_annotation_alone() -> None:
    """One annotation, one codec, whatever the value."""
    assert codec_for(dict[str, Any]) is codec_for(dict[str, Any])
    assert "value" not in inspect.signature(codec_for).parameters


async def test_b107_the_core_alone_refuses_it_as_well() -> None:
    """Without a database: the first run is told at the await."""
    live = drive.begin(returns_odd, "lock")
    live.answer("return_odd", {"items": [threading.Lock()]})

    assert live.result.startswith("$.items[0]: cannot journal ")

"""An exception is recorded whatever it is, and comes back as its own class or as StepFailed (DESIGN 7)."""

from __future__ import annotations

import asyncio
import builtins
import http
import json
import signal
import subprocess
import sys
import types
import urllib.error
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pydantic
import pytest
import sqlalchemy.exc

from replaykit.errors import NotJournalable, StepFailed
from replaykit.limits import ERROR_BYTES_MAX
from replaykit.replay import tags
from replaykit.replay.failures import decode_error, encode_error, error_summary
from replaykit.replay.loop import DO_IN_A_STEP


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


class Formatted(Exception):
    """Its text comes from an attribute."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Hostile(Exception):
    """Nothing about it can be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    @property
    def notes(self) -> str:
        raise RuntimeError("no notes")


class Guarded(Exception):
    """A property of the name of an attribute must not run."""

    def __init__(self) -> None:
        super().__init__("guarded")
        self.__dict__["level"] = 3

    @property
    def level(self) -> int:
        return int(self.__dict__["level"])

    @level.setter
    def level(self, value: int) -> None:
        raise AssertionError("an author's setter ran")


class MyExit(SystemExit):
    pass


class MyGroup(ExceptionGroup[Exception]):
    pass


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def twin_of(error: BaseException) -> BaseException:
    return decode_error(encode_error(error))


def seen(error: BaseException) -> dict[str, Any]:
    """What a program can read of an exception."""
    found: dict[str, Any] = {"str": str(error), "args": repr(error.args)}
    for name in set(dir(error)) - set(dir(Exception())):
        if name.startswith("_"):
            continue
        try:
            value = getattr(error, name)
        except Exception as refused:  # httpx's `request`, before it is set
            value = type(refused)
        if not isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            found[name] = repr(value)
    return found


class Model(pydantic.BaseModel):
    a: int


REQUEST = httpx.Request("GET", "http://example.test/")
HTTP_ERROR = httpx.HTTPStatusError("bad", request=REQUEST, response=httpx.Response(500, request=REQUEST))
INTEGRITY = sqlalchemy.exc.IntegrityError("insert", {"a": 1}, psycopg.errors.UniqueViolation("dup"))

REBUILT = [
    ApiError(402, detail="no"),
    Slotted(7),
    OwnNew(code=1),
    OwnOSError("/p", "gone"),
    Formatted(7),
    Guarded(),
    FileNotFoundError(2, "No", "/x"),
    OSError(2, "No", "/x", None, "/y"),
    ConnectionRefusedError(111, "refused"),
    BlockingIOError(11, "again", 3),
    KeyError("k"),
    raised(lambda: b"\xff".decode()),
    raised(lambda: json.loads("{")),
    raised(lambda: compile("a b", "f", "exec")),
    httpx.ConnectTimeout("t"),
    subprocess.CalledProcessError(1, ["x"], b"o"),
    psycopg.errors.CheckViolation("no"),
    TimeoutError(),
    raised(lambda: getattr(None, "foo")),  # noqa: B009
    NameError("no x", name="x"),
    ImportError("m", name="n", path="/p"),
    UnicodeEncodeError("ascii", "é", 0, 1, "r"),
    ValueError("a\0b\ud83d", {1: (2,)}),
    NotJournalable("$: cannot"),
]


@pytest.mark.parametrize("error", REBUILT, ids=lambda error: type(error).__name__)
def test_an_exception_comes_back_as_its_own_class(error: BaseException) -> None:
    """Class, text, arguments and attributes, without the author's `__init__` or `__new__`."""
    twin = twin_of(error)

    assert type(twin) is type(error)
    if not isinstance(error, psycopg.Error):  # its `diag` belongs to a connection
        assert seen(twin) == seen(error)


REFUSED = [
    (SystemExit(3), "builtins.SystemExit"),
    (MyExit(3), "test_failures.MyExit"),
    (KeyboardInterrupt(), "builtins.KeyboardInterrupt"),
    (GeneratorExit(), "builtins.GeneratorExit"),
    (StopIteration(5), "builtins.StopIteration"),
    (StopAsyncIteration(), "builtins.StopAsyncIteration"),
    (asyncio.CancelledError("x"), "asyncio.exceptions.CancelledError"),
    (raised(lambda: Model(a="x")), "pydantic_core._pydantic_core.ValidationError"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("error", "name"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_control_flow_and_closed_classes_are_step_failed(error: BaseException, name: str) -> None:
    """What would end a task or a worker, and what only its own library can make, is StepFailed with its type's name."""
    twin = twin_of(error)

    assert type(twin) is StepFailed
    assert twin.type == name
    assert str(twin) == str(error)


def test_a_class_that_is_not_loaded_is_step_failed_and_stays_it() -> None:
    """Recorded again (the run fails with it), it keeps the name it stands for and does not become that class."""

    class Local(Exception):
        pass

    twin = twin_of(Local("why"))
    again = twin_of(twin)
    known = twin_of(StepFailed("boom", "builtins.ValueError"))

    assert [type(e) for e in (twin, again, known)] == [StepFailed, StepFailed, StepFailed]
    assert isinstance(again, StepFailed)
    assert again.type.endswith("<locals>.Local")
    assert str(again) == "why"
    assert error_summary(encode_error(twin))[:2] == (again.type, "why")


def test_what_cannot_be_journaled_is_left_out_and_named() -> None:
    """A response stays behind; a note says so, and the text is kept."""
    twin = twin_of(HTTP_ERROR)
    integrity = twin_of(INTEGRITY)
    lone = twin_of(ValueError(Model))

    assert type(twin) is httpx.HTTPStatusError
    assert "replaykit: not recorded: ._request (httpx.Request), .response (httpx.Response)" in twin.__notes__
    assert type(integrity) is sqlalchemy.exc.IntegrityError
    assert str(integrity) == str(INTEGRITY)
    assert integrity.params == {"a": 1}
    assert str(lone) == str(ValueError(Model))


@pytest.mark.parametrize("size", [65_533, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("character", ["E", "\0", "\ud800", "é", '"', "\U0001f600"])
def test_a_long_message_is_cut_and_never_lost(size: int, character: str) -> None:
    """Up to 64 Ki characters it is whole, whatever they need in JSON; above, its head and an ellipsis stand for it."""
    whole = character * size
    kept = whole if size <= 65_536 else character * 65_536 + "…"

    twin = twin_of(ValueError(whole))
    two = twin_of(ValueError(7, whole))
    foreign = decode_error(encode_error(ValueError(whole)).replace("builtins.ValueError", "not.Loaded"))

    assert (type(twin), str(twin), twin.args) == (ValueError, kept, (kept,))
    assert two.args == (7, kept)
    assert (type(foreign), str(foreign)) == (StepFailed, kept)
    cut = f"the end of args[0] ({size:,} characters)"
    assert any(cut in note for note in getattr(twin, "__notes__", ())) == (size > 65_536)


def test_notes_cause_and_traceback_come_back() -> None:
    """The author's notes, then ours; the traceback of the body is a note; the chain of causes is kept short."""

    def fail() -> None:
        error: BaseException = ValueError("0")
        for n in range(1, 10):
            after = ValueError(str(n))
            after.__cause__ = error
            error = after
        error.add_note("by the author")
        raise error

    twin = twin_of(raised(fail))
    chain = [str(twin)]
    link: BaseException | None = twin.__cause__
    while link is not None:
        chain.append(str(link))
        link = link.__cause__

    assert twin.__notes__[0] == "by the author"
    assert twin.__notes__[-1].startswith("Traceback (as recorded):\n")
    assert "in fail" in twin.__notes__[-1]
    assert chain == ["9", "8", "7", "6"]


def test_the_line_is_the_innermost_of_user_code() -> None:
    """Not the line in the library that raised it."""

    def parse() -> None:
        json.loads("{")

    kind, message, line = error_summary(encode_error(raised(parse)))

    assert kind == "json.decoder.JSONDecodeError"
    assert message.startswith("Expecting property name")
    assert line == f"{__file__}:{parse.__code__.co_firstlineno + 1}"


def test_groups_come_back_with_their_members() -> None:
    """Nested, of the author's own class, with members that can't be rebuilt, and cut when there are too many."""
    group = BaseExceptionGroup("g", [ApiError(1, detail="d"), ExceptionGroup("in", [KeyError("k")]), SystemExit(3)])

    twin = twin_of(group)
    own = twin_of(MyGroup("m", [ValueError(1)]))
    many = twin_of(ExceptionGroup("many", [ValueError(n) for n in range(500)]))

    assert isinstance(twin, ExceptionGroup)
    assert twin.message == "g"
    assert [type(e) for e in twin.exceptions] == [ApiError, ExceptionGroup, StepFailed]
    assert type(own) is MyGroup
    assert repr(own.exceptions) == "(ValueError(1),)"
    assert isinstance(many, ExceptionGroup)
    assert len(many.exceptions) == 100
    assert any("members" in note for note in many.__notes__)


def test_encoding_never_raises() -> None:
    """A hostile exception, a cycle of causes, one of a thousand frames and one of 10 MB are recorded all the same."""

    def deep(n: int) -> None:
        deep(n + 1)

    loop = ValueError("loop")
    loop.__cause__ = loop
    huge = ValueError("x" * 10_000_000)
    huge.add_note("y" * 1_000_000)
    cyclic: Any = ApiError(1, detail="d")
    cyclic.me = cyclic
    for error in (Hostile(), loop, huge, cyclic, raised(lambda: deep(0))):
        text = encode_error(error)
        twin = decode_error(text)

        assert len(text) < 300_000
        assert "\\u0000" not in text
        assert type(twin) is (StepFailed if isinstance(error, Hostile) else type(error))


def test_an_error_that_cannot_say_itself_any_more_stays_its_message() -> None:
    """urllib's URLError reads its text from an attribute that cannot be recorded: the message is worth more than the class."""
    refused = urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))

    twin = decode_error(encode_error(refused))
    again = decode_error(encode_error(twin))

    assert type(twin) is StepFailed
    assert str(twin) == str(again) == "<urlopen error [Errno 111] Connection refused>"
    assert twin.type == "urllib.error.URLError"


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"type":5}', '{"type":"x","args":3,"members":"y"}', "\x00"])
def test_reading_never_raises(text: str) -> None:
    """A record that is no record gives StepFailed and an empty summary."""
    assert type(decode_error(text)) is StepFailed
    error_summary(text)


def test_nothing_but_an_exception_is_made() -> None:
    """A recorded type that names a function, another class or a module that isn't loaded is not called."""
    for name in ("os.system", "builtins.int", "subprocess.Popen", "this.Evil", "builtins.eval"):
        twin = decode_error(json.dumps({"type": name, "message": "m", "args": ["true"]}))

        assert type(twin) is StepFailed
        assert twin.type == name
    assert "this" not in sys.modules


def test_only_modules_of_the_start_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a module that a body imported later is StepFailed in the first run, as it may be in a replay."""
    monkeypatch.setattr(tags, "_modules", None)
    tags.remember_modules()
    late = types.ModuleType("late_module")
    cls = type("Late", (Exception,), {"__module__": "late_module", "__qualname__": "Late"})
    late.Late = cls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_module", late)

    assert type(twin_of(cls("x"))) is StepFailed
    assert type(twin_of(ApiError(1, detail="d"))) is ApiError

    monkeypatch.setattr(tags, "_modules", None)
    assert type(twin_of(cls("x"))) is cls


def test_every_builtin_exception_is_recorded() -> None:
    """None of them breaks the recording; each comes back as itself or as StepFailed."""
    unicode: dict[str, tuple[Any, ...]] = {
        "UnicodeDecodeError": ("ascii", b"x", 0, 1, "r"),
        "UnicodeEncodeError": ("ascii", "x", 0, 1, "r"),
        "UnicodeTranslateError": ("x", 0, 1, "r"),
    }
    for name, cls in vars(builtins).items():
        if not (isinstance(cls, type) and issubclass(cls, BaseException)) or issubclass(cls, BaseExceptionGroup):
            continue
        error: BaseException = cls(*unicode.get(name, ("x",)))
        twin = twin_of(error)

        assert type(twin) in (cls, StepFailed), name
        assert str(twin) == str(error), name


def test_a_group_is_summed_up_with_its_first_member() -> None:
    """The innermost: a TaskGroup's own words say nothing of what happened."""

    inner = ExceptionGroup("inner", [ValueError("bad\nmore"), KeyError("k")])
    text = encode_error(ExceptionGroup("outer", [inner, OSError("x")]))

    assert error_summary(text)[1] == "outer (2 sub-exceptions): ValueError: bad\nmore"


def test_what_reached_outside_is_said_whatever_a_library_made_of_it() -> None:
    """The way out stands first, not somewhere in a chain of causes."""

    refusal = RuntimeError(f"loop.getaddrinfo() {DO_IN_A_STEP}")
    error = ConnectionError("All connection attempts failed")
    error.__cause__ = ExceptionGroup("several", [refusal])
    plain = ConnectionError("no route")
    plain.__cause__ = OSError("gone")

    assert error_summary(encode_error(error))[1] == f"All connection attempts failed: RuntimeError: {refusal}"
    assert error_summary(encode_error(plain))[1] == "no route"


def test_a_line_that_is_to_blame_goes_before_the_one_that_raised() -> None:
    """Of a result that is refused no line of the user's is."""

    assert error_summary(encode_error(ValueError("x"), "shop.py:3"))[2] == "shop.py:3"


class Mangled(Exception):
    __slots__ = ("__own", "code")

    def __init__(self) -> None:
        super().__init__("slots")
        self.code = 1
        self.__own = 2

    def own(self) -> int:
        return self.__own


class Exits(Exception):
    """Ends the process when its text is wanted."""

    def __str__(self) -> str:
        raise SystemExit(3)


class ExitsLater(Exception):
    """Says something as it is raised, and ends the process once it has lost what was not recorded."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __str__(self) -> str:
        if not hasattr(self, "client"):
            raise SystemExit(3)
        return "fine"


class ExitsOnRead(Exception):
    def __getattribute__(self, name: str) -> Any:
        if name in ("args", "__dict__", "__notes__"):
            raise SystemExit(3)
        return super().__getattribute__(name)


def test_an_error_of_any_size_has_a_small_record() -> None:
    """Many and large arguments, attributes, notes, members, causes: at most a mebibyte, and a note on what is missing."""
    text = "x" * 60_000
    many = RuntimeError("why", *[text] * 1_000)
    attributes = RuntimeError("why")
    attributes.__dict__.update({f"a{n}": text for n in range(1_000)})
    notes = RuntimeError("why")
    for _ in range(1_000):
        notes.add_note(text)
    odd = RuntimeError("\0" * 65_536, "\ud800" * 65_536, "\U0001f600" * 65_536)
    chained: BaseException = RuntimeError("0", *[text] * 10)
    for n in range(1, 4):
        chained = RuntimeError(str(n), *[text] * 10).with_traceback(chained.__traceback__)
        chained.__cause__ = RuntimeError("below", *[text] * 10)
    for error in (many, attributes, notes, odd, chained, ExceptionGroup("g", [RuntimeError(text, text)] * 100)):
        record = encode_error(error)
        twin = decode_error(record)

        assert len(record.encode()) <= ERROR_BYTES_MAX
        assert type(twin) is type(error)
        assert str(twin)[:1] == str(error)[:1]
    assert len(twin_of(many).args) == 100
    assert any("901 more args" in note for note in twin_of(many).__notes__)
    assert any("900 more attributes" in note for note in twin_of(attributes).__notes__)
    assert any("950 more notes" in note for note in twin_of(notes).__notes__)


def test_no_error_ends_the_worker() -> None:
    """Whatever its class raises when it is read, in the body's process and where it is rebuilt."""
    for error in (Exits("x"), ExitsOnRead("x"), RuntimeError(Exits("x")), ExitsLater(object())):
        twin = twin_of(error)
        assert isinstance(twin, (StepFailed, RuntimeError, ExitsOnRead))
    assert type(twin_of(ExitsLater(object()))) is StepFailed
    assert (
        type(decode_error(encode_error(ValueError("x")).replace("builtins.ValueError", f"{__name__}.Exits")))
        is StepFailed
    )


def test_an_interrupt_from_outside_goes_through() -> None:
    """It strikes while an author's `__str__` runs, and is not taken for what that raises."""

    class Interrupted(Exception):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGINT)
            return "x"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            encode_error(Interrupted())
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_value_without_a_form_costs_only_itself() -> None:
    """A number that no reader takes, as the key of an attribute: the class and all the rest stay."""
    error = RuntimeError("why")
    error.__dict__.update(huge={10**5_000: 1}, fine=5)

    twin = twin_of(error)

    assert type(twin) is RuntimeError
    assert vars(twin)["fine"] == 5
    assert any(".huge (" in note for note in twin.__notes__)


def test_what_a_class_keeps_outside_its_dict_is_kept_or_named() -> None:
    """Private slots, an exit code; the object of an AttributeError is only named."""
    mangled: Any = twin_of(Mangled())
    exited: Any = twin_of(SystemExit(3))
    missed: Any = twin_of(AttributeError("no x", name="x", obj=[1]))

    assert (type(mangled), mangled.code, mangled.own()) == (Mangled, 1, 2)
    assert exited.attributes == {"code": 3}
    assert (type(missed), missed.name, missed.obj) == (AttributeError, "x", None)
    assert any(".obj (builtins.list)" in note for note in missed.__notes__)


def test_a_status_of_another_python_rebuilds_the_class() -> None:
    """HTTPStatus(413) has another name under 3.13; its number says which it is."""
    error = RuntimeError(http.HTTPStatus(413))
    error.__dict__["status"] = http.HTTPStatus(413)

    twin = decode_error(encode_error(error).replace(http.HTTPStatus(413).name, "NAME_OF_A_LATER_PYTHON"))

    assert type(twin) is RuntimeError
    assert twin.args == (http.HTTPStatus(413),)
    assert vars(twin)["status"] is http.HTTPStatus(413)

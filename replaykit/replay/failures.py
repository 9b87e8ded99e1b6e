"""Exceptions to JSON text and back (DESIGN 7).

An exception whose class is loaded in the worker is rebuilt without running its author's `__init__` or `__new__`: the
nearest builtin base makes the object, then `args` and attributes are set. What can't be journaled is left out and named
in a note; the traceback of the body comes back as a note. Everything else becomes `StepFailed`. The first run gets the
rebuilt one too, so that `except` clauses see the same twice.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
import types
from types import TracebackType
from typing import Any, Final

from replaykit.errors import NotJournalable, StepFailed
from replaykit.replay.codec import tagged
from replaykit.replay.jsontext import escape, parse, unescape
from replaykit.replay.loop import DO_IN_A_STEP
from replaykit.replay.tags import class_named, name_of, revive

__all__ = ["decode_error", "encode_error", "error_summary", "error_words"]

_MESSAGE_CHARS_MAX: Final = 64 * 1024  # a message is for people and `except` clauses, a payload is not
_TRACEBACK_CHARS_MAX: Final = 16 * 1024  # its head and tail: enough for both ends of a deep one
_NOTES_MAX: Final = 50
_NOTE_CHARS_MAX: Final = 20 * 1024
_CAUSES_MAX: Final = 3  # the chain is for reading: three links say where it began
_PART_CHARS_MAX: Final = 64 * 1024  # one argument or attribute
_MEMBERS_MAX: Final = 100  # of all exception groups in one error
_DEPTH_MAX: Final = 20  # groups in groups

_STDLIB: Final = traceback.__file__.rpartition("/")[0] + "/"
_OURS: Final = __file__.rpartition("/replay/")[0] + "/"
_RECORDED: Final = "Traceback (as recorded):\n"
_LEFT_OUT: Final = "replaykit: not recorded: "

# Control flow of the interpreter and of asyncio: raised again inside a run they would end the worker or the task.
_CONTROL: Final = (asyncio.CancelledError, StopIteration, StopAsyncIteration)

# What builtin classes keep outside of `__dict__` and `args`.
_BUILTIN_ATTRIBUTES: Final[tuple[tuple[type[BaseException], tuple[str, ...]], ...]] = (
    (ImportError, ("name", "path")),
    (AttributeError, ("name",)),
    (NameError, ("name",)),
    (OSError, ("errno", "strerror", "filename", "filename2")),
)


def encode_error(error: BaseException, line: str = "") -> str:
    """JSON text of an exception. Never raises: what can't be read of it is left out.

    Args:
        error: the exception.
        line: what to blame for it where no line of the user's raised it.

    The object has `type`, `message`, `line` (the innermost line of user code), `args`, and where there are any
    `attributes`, `notes`, `members`, `cause` (what it was raised from) or `context` (what was being handled), `traceback`,
    `left_out` (names of what could not be recorded).
    """
    try:
        found = _describe(error, 0, _CAUSES_MAX, [_MEMBERS_MAX])
        return _dump({**found, "line": line} if line else found)
    except Exception as defect:  # RecursionError, MemoryError, an attribute that raises: the entry is owed all the same
        return _dump(
            {
                "type": _type(error),
                "message": _message(error),
                "left_out": [f"everything else: {type(defect).__name__}"],
            }
        )


def decode_error(text: str) -> BaseException:
    """A fresh exception from its recorded text: of its own class, or `StepFailed`. Never raises."""
    try:
        found = parse(unescape(text))
        return _rebuild(found, 0)
    except Exception as defect:
        kind, message, _ = error_summary(text)
        failed = StepFailed(message, kind)
        failed.add_note(f"{_LEFT_OUT}the record could not be read: {type(defect).__name__}")
        return failed


def error_summary(text: str) -> tuple[str, str, str]:
    """`(type, message, line)` of a recorded error, for people; `line` is empty when it is not known. Never raises."""
    try:
        found = parse(unescape(text))
        return str(found.get("type", "Exception")), error_words(found), str(found.get("line", ""))
    except Exception:
        return "Exception", text[:200], ""


def error_words(found: dict[str, Any]) -> str:
    """The message of a recorded error; of a group that of its first member too, and of one that a library made of an
    attempt to reach outside of the run what the workflow should do instead. Never raises."""
    words = str(found.get("message", ""))
    inner = found
    for _ in range(_DEPTH_MAX + _CAUSES_MAX):
        below = (inner.get("members") or [inner.get("cause") or inner.get("context")])[0]
        if not isinstance(below, dict):
            break
        is_member = bool(inner.get("members"))
        inner, message = below, str(below.get("message", ""))
        leaf = is_member and not below.get("members")
        if (leaf or message.endswith(DO_IN_A_STEP)) and message not in words:
            words += f": {str(below.get('type', 'Exception')).removeprefix('builtins.')}: {message}"
    return words


# --- writing ----------------------------------------------------------------------------------------------------------


def _describe(error: BaseException, depth: int, causes: int, room: list[int]) -> dict[str, Any]:
    left_out: list[str] = []
    message = _message(error)
    found: dict[str, Any] = {"type": _type(error), "message": message, "line": _user_line(error.__traceback__)}
    if isinstance(error, StepFailed):
        found["stands_for"] = True  # it names another class, and stays what it is
    is_group = isinstance(error, BaseExceptionGroup)
    found["args"] = _encode_args(error.args[:1] if is_group else error.args, message, left_out)
    attributes = _attributes(error, left_out)
    if attributes:
        found["attributes"] = attributes
    notes = _notes(error, left_out)
    if notes:
        found["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions[: room[0]] if depth < _DEPTH_MAX else ()
        room[0] -= len(members)
        if members:
            found["members"] = [_describe(member, depth + 1, causes, room) for member in members]
        if len(members) < len(error.exceptions):
            left_out.append(f"{len(error.exceptions) - len(members):,} members")
    name, chained = "cause", error.__cause__
    if chained is None and not error.__suppress_context__:
        name, chained = "context", error.__context__
    if chained is not None and causes > 0:
        found[name] = _describe(chained, depth, causes - 1, room)
    trace = _traceback(error)
    if trace:
        found["traceback"] = trace
    if left_out:
        found["left_out"] = left_out
    return found


def _type(error: BaseException) -> str:
    if isinstance(error, StepFailed):
        return str(error.type)  # it stands for the class it names, also when it is recorded again
    return name_of(type(error))


def _message(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # whatever an author's __str__ raises: a SystemExit here would end the worker
        return "<no message: __str__ raised>"
    return _cut(message)


def _notes(error: BaseException, left_out: list[str]) -> list[str]:
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, (list, tuple)):
        return []
    found = []
    for n, note in enumerate(notes[:_NOTES_MAX]):
        try:
            found.append(str(note)[:_NOTE_CHARS_MAX])
        except Exception:
            left_out.append(f"notes[{n}]")
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS_MAX else text[:_MESSAGE_CHARS_MAX] + "…"


def _encode_args(args: tuple[Any, ...], message: str, left_out: list[str]) -> list[Any]:
    encoded = []
    for n, arg in enumerate(args):
        text = _try_encode(arg)
        if text is None and type(arg) is str:
            if len(arg) > _MESSAGE_CHARS_MAX:
                left_out.append(f"the end of args[{n}] ({len(arg):,} characters)")
            text = tagged.encode(_cut(arg))
        elif text is None:
            left_out.append(f"args[{n}] ({name_of(type(arg))})")
            # a lone argument is what str(error) prints: its text stands for it
            text = tagged.encode(message if len(args) == 1 else f"<{name_of(type(arg))}>")
        encoded.append(parse(unescape(text)))
    return encoded


def _attributes(error: BaseException, left_out: list[str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for cls in type(error).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(error, name):
                named[name] = getattr(error, name)
    for builtin, names in _BUILTIN_ATTRIBUTES:
        if isinstance(error, builtin):
            named.update((name, value) for name in names if (value := getattr(error, name, None)) is not None)
    named.update((name, value) for name, value in vars(error).items() if name != "__notes__")
    if isinstance(error, StepFailed):  # those of the error that it stands for
        named = {name: value for name, value in named.items() if name not in ("type", "attributes")} | error.attributes
    found: dict[str, Any] = {}
    for name, value in named.items():
        text = _try_encode(value)
        if text is None:
            left_out.append(f".{name} ({name_of(type(value))})")
        else:
            found[name] = parse(unescape(text))
    return found


def _try_encode(value: Any) -> str | None:
    """The tagged text of a value that comes back equal and is no payload, else None."""
    try:
        text = tagged.encode_checked(value)[0]
    except NotJournalable:
        return None
    return text if len(text) <= _PART_CHARS_MAX else None


def _user_line(trace: TracebackType | None) -> str:
    """`file:line` of the innermost frame in user code; of the innermost frame at all when none is."""
    line = innermost = ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        innermost = f"{path}:{trace.tb_lineno}"
        if not _foreign(path):
            line = innermost
        trace = trace.tb_next
    return line or innermost


def _foreign(path: str) -> bool:
    return path.startswith((_STDLIB, _OURS, "<")) or "/site-packages/" in path or "/dist-packages/" in path


def _traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not ours, its middle cut out when it is long."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS) and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    text = "".join(traceback.format_tb(trace))
    if len(text) > _TRACEBACK_CHARS_MAX:
        half = _TRACEBACK_CHARS_MAX // 2
        text = f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text


def _dump(found: dict[str, Any]) -> str:
    return escape(json.dumps(found, ensure_ascii=False, separators=(",", ":")))


# --- reading ----------------------------------------------------------------------------------------------------------


def _rebuild(found: dict[str, Any], depth: int) -> BaseException:
    members = [_rebuild(member, depth + 1) for member in found.get("members", ())]
    error = _rebuild_class(found, members) or _step_failed(found, members)
    for note in found.get("notes", ()):
        error.add_note(note)
    left_out = found.get("left_out")
    if left_out:
        error.add_note(_LEFT_OUT + ", ".join(left_out))
    trace = found.get("traceback")
    if trace:
        error.add_note(_RECORDED + trace)
    if "cause" in found:
        error.__cause__ = _rebuild(found["cause"], depth)
    elif "context" in found:
        error.__context__ = _rebuild(found["context"], depth)
    return error


def _step_failed(found: dict[str, Any], members: list[BaseException]) -> BaseException:
    kind, message = str(found["type"]), str(found["message"])
    if members:
        group = ExceptionGroup(str(found["args"][0]) if found.get("args") else message, members)  # type: ignore[type-var]
        group.add_note(f"replaykit: recorded as {kind}")
        return group
    failed = StepFailed(message, kind)
    failed.attributes = {name: _revive_or_leave(value) for name, value in found.get("attributes", {}).items()}
    return failed


def _revive_or_leave(value: Any) -> Any:
    try:
        return revive(value)
    except Exception:  # of a class that is not known here either: as it was recorded
        return value


def _rebuild_class(found: dict[str, Any], members: list[BaseException]) -> BaseException | None:
    """The exception of its own class, or None when that can't be done."""
    cls = None if found.get("stands_for") else class_named(found["type"])
    if cls is None or not issubclass(cls, Exception) or issubclass(cls, _CONTROL):
        return None  # SystemExit, KeyboardInterrupt, GeneratorExit, CancelledError are no Exceptions
    try:
        args = tuple(revive(arg) for arg in found.get("args", ()))
        attributes = {name: revive(value) for name, value in found.get("attributes", {}).items()}
        error = _make(cls, args, attributes, members)
        for name, value in attributes.items():
            _set(error, name, value)
        str(
            error
        )  # what it says may hang on an attribute that could not be recorded (urllib's URLError): then it is none
        return error if type(error) is cls else None
    except Exception:
        return None


def _make(
    cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any], members: list[BaseException]
) -> Exception:
    base: Any = next(b for b in cls.__mro__ if b.__module__ == "builtins")
    if issubclass(cls, ExceptionGroup):
        made: Exception = base.__new__(cls, args[0], members)
        return made
    full = args
    if issubclass(cls, OSError) and len(args) == 2 and "filename" in attributes:  # OSError cuts its args to two
        full = (*args, attributes.pop("filename"))
        if "filename2" in attributes:
            full = (*full, None, attributes.pop("filename2"))
    error: Exception = base.__new__(cls, *full)
    if base is not Exception:
        base.__init__(error, *full)  # a builtin base may keep more than args: UnicodeDecodeError, SyntaxError
    error.args = args
    return error


_KEPT_OUTSIDE: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)  # a slot, an attribute of a builtin


def _set(error: BaseException, name: str, value: Any) -> None:
    if isinstance(inspect.getattr_static(type(error), name, None), _KEPT_OUTSIDE):
        object.__setattr__(error, name, value)
    else:
        error.__dict__[name] = value  # no author's setter runs

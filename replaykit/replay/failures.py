"""Exceptions to JSON text and back (DESIGN 7).

An exception whose class is loaded in the worker is rebuilt without running its author's `__init__` or `__new__`: the
nearest builtin base makes the object, then `args` and attributes are set. What can't be journaled is left out and named
in a note; the traceback of the body comes back as a note. Everything else becomes `StepFailed`. The first run gets the
rebuilt one too, so that `except` clauses see the same twice.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import json
import traceback
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from replaykit.errors import StepFailed
from replaykit.limits import ERROR_BYTES_MAX, ERROR_PARTS_MAX
from replaykit.replay.codec import tagged
from replaykit.replay.jsontext import escape, parse, unescape
from replaykit.replay.loop import DO_IN_A_STEP
from replaykit.replay.tags import class_named, name_of, revive, slots_beyond

__all__ = ["decode_error", "encode_error", "error_summary", "error_words"]

_MESSAGE_CHARS_MAX: Final = 64 * 1024  # a message is for people and `except` clauses, a payload is not
_TRACEBACK_CHARS_MAX: Final = 16 * 1024  # its head and tail: enough for both ends of a deep one
_NOTES_MAX: Final = 50
_NOTE_CHARS_MAX: Final = 20 * 1024
_CAUSES_MAX: Final = 3  # the chain is for reading: three links say where it began
_PART_CHARS_MAX: Final = 64 * 1024  # one argument or attribute
_NAME_CHARS_MAX: Final = 200  # of an attribute or class, where it is left out
_BYTES_OF_CHAR_MAX: Final = 6  # NUL and half an emoji, escaped
_LEAST_CHARS: Final = 200  # of a message, however full the record is: some say what went wrong at all
_MEMBERS_MAX: Final = 100  # of all exception groups in one error
_DEPTH_MAX: Final = 20  # groups in groups

_STDLIB: Final = traceback.__file__.rpartition("/")[0] + "/"
_OURS: Final = __file__.rpartition("/replay/")[0] + "/"
_RECORDED: Final = "Traceback (as recorded):\n"
_LEFT_OUT: Final = "replaykit: not recorded: "

# Control flow of the interpreter and of asyncio: raised again inside a run they would end the worker or the task.
_RAISE: Final = dis.opmap["RAISE_VARARGS"]
_ABSENT: Final = object()

_CONTROL: Final = (asyncio.CancelledError, StopIteration, StopAsyncIteration)

# What builtin classes keep outside of `__dict__` and `args`.
_BUILTIN_ATTRIBUTES: Final[tuple[tuple[type[BaseException], tuple[str, ...]], ...]] = (
    (ImportError, ("name", "path")),
    (AttributeError, ("name",)),
    (NameError, ("name",)),
    (OSError, ("errno", "strerror", "filename", "filename2")),
    (BlockingIOError, ("characters_written",)),
    (SystemExit, ("code",)),
    (StopIteration, ("value",)),
)


class _Room:
    """What is left of the size of one record."""

    __slots__ = ("_bytes", "members")

    def __init__(self) -> None:
        self.members = _MEMBERS_MAX
        self._bytes = ERROR_BYTES_MAX * 7 // 8  # the rest for the names of things, which aren't counted

    def takes(self, text: str) -> bool:
        """Whether a text still fits; it is counted if so."""
        size = _size(text)
        if size > self._bytes:
            return False
        self._bytes -= size
        return True

    def cut(self, text: str, chars_max: int) -> str:
        """As much of a text as fits, a few words at least."""
        chars_max = min(chars_max, max(self._bytes // _BYTES_OF_CHAR_MAX, _LEAST_CHARS))
        if len(text) > chars_max:
            text = f"{text[:chars_max]}…"
        self._bytes = max(0, self._bytes - _size(text))
        return text


def _size(text: str) -> int:
    """Bytes of a text in a record."""
    return len(escape(json.dumps(text, ensure_ascii=False)).encode())


def _asked(call: Callable[[], Any], otherwise: Any) -> Any:
    """What an author's code says, or `otherwise` if it raises: a SystemExit of its own would end the worker."""
    try:
        return call()
    except KeyboardInterrupt as error:
        if _is_from_outside(error):
            raise
    except BaseException:
        pass
    return otherwise


def _is_from_outside(error: KeyboardInterrupt) -> bool:
    """Whether a signal made it, which may strike in any line, and not a `raise` of the author's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    return _foreign(code.co_filename) or code.co_code[trace.tb_lasti] != _RAISE


def encode_error(error: BaseException, line: str = "") -> str:
    """JSON text of an exception, of ERROR_BYTES_MAX at most. Never raises: what can't be read of it is left out.

    Only a KeyboardInterrupt from outside goes through.

    Args:
        error: the exception.
        line: what to blame for it where no line of the user's raised it.

    The object has `type`, `message`, `line` (the innermost line of user code), `args`, and where there are any
    `attributes`, `notes`, `members`, `cause` (what it was raised from) or `context` (what was being handled), `traceback`,
    `left_out` (names of what could not be recorded).
    """
    try:
        found = _describe(error, 0, _CAUSES_MAX, _Room())
        text = _dump({**found, "line": line} if line else found)
        if len(text) * 4 <= ERROR_BYTES_MAX or len(text.encode()) <= ERROR_BYTES_MAX:
            return text
        why = f"more than {ERROR_BYTES_MAX:,} bytes"
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as defect:  # RecursionError, MemoryError, an attribute that raises: the entry is owed all the same
        why = type(defect).__name__
    message = _Room().cut(_message(error), _MESSAGE_CHARS_MAX // 4)
    return _dump({"type": _type(error), "message": message, "left_out": [f"everything else: {why}"]})


def decode_error(text: str) -> BaseException:
    """A fresh exception from its recorded text: of its own class, or `StepFailed`.

    Never raises, but for a KeyboardInterrupt from outside.
    """
    try:
        found = parse(unescape(text))
        return _rebuild(found, 0)
    except KeyboardInterrupt:
        raise
    except BaseException as defect:
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


def _describe(error: BaseException, depth: int, causes: int, room: _Room) -> dict[str, Any]:
    left_out: list[str] = []
    message = room.cut(_message(error), _MESSAGE_CHARS_MAX)
    found: dict[str, Any] = {"type": _type(error), "message": message, "line": _user_line(error.__traceback__)}
    if isinstance(error, StepFailed):
        found["stands_for"] = True  # it names another class, and stays what it is
    is_group = isinstance(error, BaseExceptionGroup)
    trace = _traceback(error)
    if trace and not room.takes(trace):
        left_out.append("the traceback")
        trace = ""
    args = _asked(lambda: tuple(error.args), ())
    found["args"] = _encode_args(args[:1] if is_group else args, message, left_out, room)
    attributes = _attributes(error, left_out, room)
    if attributes:
        found["attributes"] = attributes
    notes = _notes(error, left_out, room)
    if notes:
        found["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions[: room.members] if depth < _DEPTH_MAX else ()
        room.members -= len(members)
        if members:
            found["members"] = [_describe(member, depth + 1, causes, room) for member in members]
        if len(members) < len(error.exceptions):
            left_out.append(f"{len(error.exceptions) - len(members):,} members")
    name, chained = "cause", error.__cause__
    if chained is None and not error.__suppress_context__:
        name, chained = "context", error.__context__
    if chained is not None and causes > 0:
        found[name] = _describe(chained, depth, causes - 1, room)
    if trace:
        found["traceback"] = trace
    if left_out:
        found["left_out"] = left_out
    return found


def _type(error: BaseException) -> str:
    if isinstance(error, StepFailed):
        return str(
            _asked(lambda: str(error.type), "builtins.Exception")
        )  # what it stands for, also when recorded again
    return name_of(type(error))


def _message(error: BaseException) -> str:
    return str(_asked(lambda: str.__str__(str(error)), "<no message: __str__ raised>"))


def _class_of(value: Any) -> str:
    return name_of(type(value))[:_NAME_CHARS_MAX]


def _notes(error: BaseException, left_out: list[str], room: _Room) -> list[str]:
    notes = _asked(lambda: getattr(error, "__notes__", None), None)
    if not isinstance(notes, (list, tuple)):
        return []
    found = []
    for n, note in enumerate(notes[:_NOTES_MAX]):
        text = _asked(lambda note=note: str.__str__(str(note))[:_NOTE_CHARS_MAX], None)  # type: ignore[misc]
        if text is None or not room.takes(text):
            left_out.append(f"notes[{n}]")
        else:
            found.append(text)
    if len(notes) > _NOTES_MAX:
        left_out.append(f"{len(notes) - _NOTES_MAX:,} more notes")
    return found


def _encode_args(args: tuple[Any, ...], message: str, left_out: list[str], room: _Room) -> list[Any]:
    encoded = []
    for n, arg in enumerate(args[:ERROR_PARTS_MAX]):
        text = _try_encode(arg, room)
        if text is None and type(arg) is str:
            kept = room.cut(arg, _MESSAGE_CHARS_MAX)
            if kept != arg:
                left_out.append(f"the end of args[{n}] ({len(arg):,} characters)")
            text = tagged.encode(kept)
        elif text is None:
            left_out.append(f"args[{n}] ({_class_of(arg)})")
            # a lone argument is what str(error) prints: its text stands for it
            text = tagged.encode(message if len(args) == 1 else f"<{_class_of(arg)}>")
        encoded.append(parse(unescape(text)))
    if len(args) > ERROR_PARTS_MAX:
        left_out.append(f"{len(args) - ERROR_PARTS_MAX:,} more args")
    return encoded


def _attributes(error: BaseException, left_out: list[str], room: _Room) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name in slots_beyond(type(error)):  # type: ignore[arg-type]
        value = _asked(lambda name=name: getattr(error, name), _ABSENT)  # type: ignore[misc]
        if value is not _ABSENT:
            named[name] = value
    for builtin, names in _BUILTIN_ATTRIBUTES:
        if isinstance(error, builtin):
            for name in names:
                value = _asked(lambda name=name: getattr(error, name, None), None)  # type: ignore[misc]
                if value is not None:
                    named[name] = value
    own = _asked(lambda: list(vars(error).items()), [])
    named.update((name, value) for name, value in own if name != "__notes__")
    if isinstance(error, StepFailed):  # those of the error that it stands for
        named = {name: value for name, value in named.items() if name not in ("type", "attributes")} | error.attributes
    elif isinstance(error, AttributeError) and error.obj is not None:
        left_out.append(f".obj ({_class_of(error.obj)})")  # as a rule a large thing, of which the message tells enough
    found: dict[str, Any] = {}
    for name, value in list(named.items())[:ERROR_PARTS_MAX]:
        text = _try_encode(value, room) if len(name) <= _NAME_CHARS_MAX else None
        if text is None:
            left_out.append(f".{name[:_NAME_CHARS_MAX]} ({_class_of(value)})")
        else:
            found[name] = parse(unescape(text))
    if len(named) > ERROR_PARTS_MAX:
        left_out.append(f"{len(named) - ERROR_PARTS_MAX:,} more attributes")
    return found


def _try_encode(value: Any, room: _Room) -> str | None:
    """The tagged text of a value that comes back equal, is no payload and still fits, else None."""
    text: str | None = _asked(lambda: tagged.encode_checked(value)[0], None)
    return text if text is not None and len(text) <= _PART_CHARS_MAX and room.takes(text) else None


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
    notes = list(found.get("notes", ()))
    left_out = found.get("left_out")
    if left_out:
        notes.append(_LEFT_OUT + ", ".join(left_out))
    trace = found.get("traceback")
    if trace:
        notes.append(_RECORDED + trace)
    for note in notes:
        BaseException.add_note(error, note)  # an author's own does not run
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
        # what it says may hang on an attribute that could not be recorded (urllib's URLError): then it is none
        speaks = _asked(lambda: str(error), None) is not None
        return error if speaks and type(error) is cls else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # also a SystemExit of its __str__
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

"""How the command line speaks: one sentence on stderr for what goes wrong, tables or JSON on stdout for what was asked.

Everything here is cheap to import; rich comes in when something is drawn.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "STATE_STYLES",
    "ago",
    "as_json",
    "console",
    "duration",
    "error_type",
    "moment",
    "one_line",
    "print_json",
    "printable",
    "say",
    "seconds_between",
]

STATE_STYLES = {
    "pending": "cyan",
    "running": "blue",
    "waiting": "magenta",
    "held": "bold yellow",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "dim",
    "continued": "dim",
}
"""How each state of a run looks, everywhere."""


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _reader_left() -> None:
    """rich would end the program with 1 when the reader of its output leaves; that is no failure of ours."""
    raise BrokenPipeError


def say(sentence: str) -> None:
    """A sentence for the person, on stderr, so that stdout stays what was asked for."""
    click.echo(f"replaykit: {printable(sentence)}", err=True)


def printable(text: str) -> str:
    """Text that a terminal shows and any stream takes: control characters and lone surrogates as Python writes them."""
    return _UNPRINTABLE.sub(lambda odd: odd[0].encode("unicode_escape").decode(), text)


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON text for people and programs; what no stream takes stands escaped, as JSON has it."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    return _SURROGATE.sub(lambda odd: f"\\u{ord(odd[0]):04x}", text)


def print_json(value: Any) -> None:
    """One JSON value on stdout: indented for a person, one line for a program."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(as_json(value, indent))


def console(*, err: bool = False) -> Console:
    """A console on stdout or stderr. Without a terminal lines are not folded at 80 columns: grep should find them."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False, emoji=False)
    if not made.is_terminal:
        made = Console(stderr=err, highlight=False, emoji=False, width=240)
    made.on_broken_pipe = _reader_left  # type: ignore[method-assign]
    return made


def moment(text: str | None) -> dt.datetime | None:
    """A time as SQL and JSON write it."""
    return dt.datetime.fromisoformat(text) if text and text != "infinity" else None


def seconds_between(begin: str | None, end: str | None) -> float | None:
    """Seconds between two times as SQL writes them; None if one is missing."""
    first, last = moment(begin), moment(end)
    return (last - first).total_seconds() if first is not None and last is not None else None


def duration(seconds: float | None) -> str:
    """A length of time in the unit a person would use: `3 ms`, `2.5 s`, `4 min 10 s`, `2 d 3 h`."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def ago(text: str | None, now: dt.datetime | None = None) -> str:
    """How long ago a time was, or in how long it will be."""
    then = moment(text)
    if then is None:
        return ""
    seconds = ((now or dt.datetime.now(dt.UTC)) - then).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def error_type(error: Mapping[str, Any]) -> str:
    """The type of a recorded error as a person writes it."""
    return str(error.get("type", "Exception")).removeprefix("builtins.")


def one_line(value: Any, width: int = 60) -> str:
    """A JSON value in at most `width` characters."""
    text = as_json(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"

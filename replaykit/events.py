"""The facts that the library tells: one event each, by name, without payloads and secrets (docs/reference/events.md).

Where the application has configured structlog they go there; elsewhere to the standard library's logger `replaykit`, with
its usual manners: nothing below a warning, and nothing on stdout. The library itself configures neither. An event that
structlog's chain fails on goes to that logger too: telling raises nothing.

Errors are told here as text: their types, their first lines, the lines of code. What follows the first line may quote
values (Postgres's DETAIL and CONTEXT, pydantic's input_value), and a chain that is given the exception itself may print
the local variables of every frame.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any, Final

import structlog

__all__ = ["brief", "log", "trace"]

_LINE_MAX: Final = 500
_CHAIN_MAX: Final = 5


class _Log:
    """Tells an event with its facts as keywords. A fact that is an exception is told by its type and first line; `exc_info`
    (True, or an exception) adds its traceback as the text `exception`."""

    def debug(self, event: str, **facts: Any) -> None:
        self._tell(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self._tell(logging.INFO, event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._tell(logging.WARNING, event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._tell(logging.ERROR, event, facts)

    def exception(self, event: str, **facts: Any) -> None:
        self._tell(logging.ERROR, event, {"exc_info": True, **facts})

    def _tell(self, level: int, event: str, facts: dict[str, Any]) -> None:
        told = structlog.get_logger("replaykit") if structlog.is_configured() else None
        logger = logging.getLogger("replaykit")
        if told is None and not logger.isEnabledFor(level):
            return
        error = facts.pop("exc_info", None)
        if error is True:
            error = sys.exc_info()[1]
        facts = {name: brief(fact) if isinstance(fact, BaseException) else fact for name, fact in facts.items()}
        if told is not None:
            try:
                told.log(level, event, **facts, **({"exception": trace(error)} if error else {}))
                return
            except Exception as failure:  # the application's chain: it must end no thread of ours, nor lose the event
                facts["log_failure"] = brief(failure)
        words = "".join(f" {name}={value}" for name, value in facts.items())
        with contextlib.suppress(Exception):
            logger.log(level, "%s%s%s", event, words, f"\n{trace(error)}" if error else "")


log: Final = _Log()
"""The library's one voice."""


def trace(error: BaseException) -> str:
    """An exception, its causes and the lines of code it came through, as text without values: no local variables, and of
    each message the first line."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain and len(chain) < _CHAIN_MAX:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nwhich led to\n".join(
        f"Traceback (most recent call last):\n{''.join(traceback.format_tb(link.__traceback__))}{brief(link)}"
        for link in reversed(chain)
    )


def brief(error: BaseException) -> str:
    """An exception's type and the first line of its message: what follows may quote values."""
    name = type(error).__qualname__
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # of the author's own `__str__`
        return name
    return f"{name}: {lines[0][:_LINE_MAX]}" if lines else name

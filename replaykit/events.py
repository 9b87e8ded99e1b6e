"""The facts that the library tells: one event each, by name, without payloads and secrets.

Where the application has configured structlog they go there; elsewhere to the standard library's logger `replaykit`, with
its usual manners: nothing below a warning, and nothing on stdout. The library itself configures neither.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import structlog

__all__ = ["log"]


class _Log:
    """Tells an event with its facts as keywords; `exc_info` as both libraries take it."""

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
        if structlog.is_configured():
            structlog.get_logger("replaykit").log(level, event, **facts)
            return
        logger = logging.getLogger("replaykit")
        if logger.isEnabledFor(level):
            exc_info = facts.pop("exc_info", None)
            told = "".join(f" {name}={value}" for name, value in facts.items())
            logger.log(level, "%s%s", event, told, exc_info=exc_info)


log: Final = _Log()
"""The library's one voice."""

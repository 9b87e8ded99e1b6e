"""The command line's logs. The library itself never configures logging; `replaykit worker` and `replaykit dev` do."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

__all__ = ["only_errors", "setup"]


def only_errors() -> None:
    """For commands that look: what the runtime logs must not stand between the rows (structlog's default is stdout)."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def setup(log_format: str, log_level: str = "info") -> None:
    """Write structlog's and the standard library's records to stderr, in one form.

    Args:
        log_format: `console` for people (colours on a terminal), `json` for programs.
        log_level: the lowest level that is written.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any]
    if log_format == "json":
        last = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, structlog.processors.StackInfoRenderer(), *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write a line: the children of a worker share this stream, and `print` makes two.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    logging.getLogger("alembic").setLevel(max(level, logging.WARNING))  # ten lines about a schema that is made once
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)

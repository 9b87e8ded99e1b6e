"""The command line's logs. The library itself never configures logging; `replaykit worker` and `replaykit dev` do."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Final

import structlog

from replaykit import drop_replayed

__all__ = ["SETUP", "only_errors", "setup"]

SETUP: Final = "replaykit.interfaces.logs:setup"
"""What the children of a worker load and call."""


def only_errors() -> None:
    """For commands that look: what the runtime logs must not stand between the rows (structlog's default is stdout)."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def setup(log_format: str, log_level: str = "info") -> None:
    """Write structlog's and the standard library's records to stderr, in one form, each with its run, step and attempt.

    What a workflow's code has told before it does not tell again. Tracebacks are written without the values of local
    variables: they may hold secrets.

    Args:
        log_format: `console` for people (colours on a terminal), `json` for programs: one object a line.
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
        last = [
            structlog.processors.format_exc_info,
            structlog.processors.UnicodeDecoder(),
            structlog.processors.JSONRenderer(serializer=_as_json),
        ]
    else:
        last = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    structlog.configure(
        processors=[drop_replayed, *shared, structlog.processors.StackInfoRenderer(), *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write a line: the children of a worker share this stream, and `print` makes two.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(drop_replayed)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    for chatty in ("alembic", "watchfiles"):  # ten lines about a schema that is made once; "1 change detected"
        logging.getLogger(chatty).setLevel(max(level, logging.WARNING))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _as_json(facts: dict[str, Any], **options: Any) -> str:
    """One line of JSON as every parser reads it, whatever a workflow or a body logs: a log line must not fail a step."""
    try:
        return json.dumps(facts, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, NaN, a cycle
        return json.dumps({str(name): fact if isinstance(fact, str) else repr(fact) for name, fact in facts.items()})

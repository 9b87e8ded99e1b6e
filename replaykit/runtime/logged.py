"""What a log record says of the run it comes from, and which records are not told again.

    run_id, workflow            bound where a workflow's code runs
    run_id, workflow, step, attempt     bound where a step's body runs

They stand in structlog's own context variables, so that an application that has `structlog.contextvars.merge_contextvars`
in its chain sees them with nothing of ours in it; for the standard library's records `drop_replayed` puts them on.
"""

from __future__ import annotations

import contextvars
import logging
from asyncio import events
from collections.abc import MutableMapping
from typing import Any, Final
from uuid import UUID

import structlog

from replaykit.replay.loop import RunLoop

__all__ = ["bind_body", "drop_replayed", "run_context"]

# structlog makes the variable of a name when it is first bound and hands it out in the token: setting it directly costs a
# fifth of `bind_contextvars`, and a body is bound for each step.
_MADE: Final = contextvars.Context().run(
    structlog.contextvars.bind_contextvars, run_id="", workflow="", step="", attempt=0
)
_RUN_ID, _WORKFLOW, _STEP, _ATTEMPT = (_MADE[name].var for name in ("run_id", "workflow", "step", "attempt"))

_ABSENT: Final = "-"


def run_context(run_id: UUID, workflow: str) -> contextvars.Context:
    """The context that a run's code starts in: empty, but for what its log records say of it."""
    context = contextvars.Context()
    context.run(_RUN_ID.set, str(run_id))
    context.run(_WORKFLOW.set, workflow)
    return context


def bind_body(key: str, attempt: int) -> None:
    """Let the log records of a body name its step and attempt. Called in the body's context, a copy of its run's."""
    _STEP.set(key)
    _ATTEMPT.set(attempt)


class _DropReplayed:
    """Silent where a workflow's code runs that has run before, or that has left memory; never in a step's body.

    A structlog processor (put it first) and a `logging` filter (put it on a handler) in one. As a filter it also sets the
    attributes `run_id`, `workflow`, `step` and `attempt` of each record that has none of that name, for formats such as
    `%(run_id)s %(step)s %(message)s`; `-` where there is none.
    """

    def __call__(self, logger: Any, method: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """As structlog calls a processor. Raises structlog.DropEvent for what has been told before."""
        if _told_before():
            raise structlog.DropEvent
        return event_dict

    def filter(self, record: logging.LogRecord) -> bool:
        """As `logging` asks a filter: False for what has been told before."""
        if _told_before():
            return False
        for name, variable in _NAMED:
            if not hasattr(record, name):
                value = variable.get(_ABSENT)
                setattr(record, name, _ABSENT if value is Ellipsis else value)  # structlog's word for unbound
        return True

    def __repr__(self) -> str:
        return "replaykit.drop_replayed"


_NAMED: Final = (("run_id", _RUN_ID), ("workflow", _WORKFLOW), ("step", _STEP), ("attempt", _ATTEMPT))

drop_replayed: Final = _DropReplayed()
"""Keeps log records of a workflow's code to one each: silent while it is replayed and while it leaves memory. A structlog
processor and a filter for `logging` in one; `replaykit worker` and `dev` attach it, an application with its own `Worker` does."""


def _told_before() -> bool:
    # Bodies run on the worker's loop or in a thread without one: only a workflow's code runs on a run's own loop.
    loop = events._get_running_loop()
    if type(loop) is not RunLoop:
        return False
    return loop.gone or bool(getattr(loop.execution, "replaying", False))

"""One step's body by itself: `with testing.step(): await charge(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import CURRENT_STEP, StepInfo
from replaykit.replay.execution import current_execution
from replaykit.replay.keys import idempotency_key as key_of

__all__ = ["step"]


@contextmanager
def step(
    *, resources: Any = None, idempotency_key: str | None = None, attempt: int = 1, client: Any = None
) -> Iterator[StepInfo]:
    """Code in this block is a step's body: `step.current()` answers, and `step(fn, ...)` is a plain call.

    Args:
        resources: `step.current().resources`.
        idempotency_key: `step.current().idempotency_key`; None: 32 hex digits of its own.
        attempt: `step.current().attempt`.
        client: `step.current().client`.

    Raises:
        ConfigurationError: in a workflow's own code.
    """
    if current_execution() is not None:
        raise ConfigurationError("testing.step() inside of a workflow: it runs a body alone, without a workflow")
    run_id = uuid4()
    key = idempotency_key if idempotency_key is not None else key_of(run_id, "alone")
    info = StepInfo(run_id, "alone", attempt, key, dict, resources, client)
    before = CURRENT_STEP.set(info)
    try:
        yield info
    finally:
        CURRENT_STEP.reset(before)

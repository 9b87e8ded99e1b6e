"""One step's body by itself: `with testing.step(): await charge(...)`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import CURRENT_STEP, StepInfo
from replaykit.replay.execution import EPOCH, current_execution
from replaykit.replay.keys import idempotency_key as key_of
from replaykit.testing.lending import connector

__all__ = ["step"]


@contextmanager
def step(
    *,
    resources: Any = None,
    idempotency_key: str | None = None,
    attempt: int = 1,
    client: Any = None,
    input: Mapping[str, Any] | None = None,
    written_at: dt.datetime | None = None,
    observed: Sequence[tuple[str, str]] = (),
    connection: Any = None,
) -> Iterator[StepInfo]:
    """Code in this block is a step's body, or its reconciler: `step.current()` answers, and `step(fn, ...)` is a plain call.

    What the body observes comes to stand in `.observed` of the `StepInfo` that this gives.

    Args:
        resources: `step.current().resources`.
        idempotency_key: `step.current().idempotency_key`; None: 32 hex digits of its own.
        attempt: `step.current().attempt`.
        client: `step.current().client`.
        input: `step.current().input`, which a reconciler asks for.
        written_at: `step.current().written_at`, an aware moment.
        observed: what earlier attempts have observed, as `(kind, id)`.
        connection: what `step.current().connection()` gives, whatever class it asks for; the test commits it or rolls it back.
            None: the step is not transactional.

    Raises:
        ConfigurationError: in a workflow's own code; `written_at` without a time zone.
    """
    if current_execution() is not None:
        raise ConfigurationError("testing.step() inside of a workflow: it runs a body alone, without a workflow")
    if written_at is not None and written_at.utcoffset() is None:
        raise ConfigurationError(
            f"written_at={written_at!r}: a moment needs a time zone, such as datetime(..., tzinfo=UTC)"
        )
    run_id = uuid4()
    key = idempotency_key if idempotency_key is not None else key_of(run_id, "alone")
    side = _Alone(
        None if written_at is None else (written_at - EPOCH) // dt.timedelta(microseconds=1),
        None if connection is None else connector(connection),
        list(observed),
    )
    info = StepInfo(run_id, "alone", attempt, key, lambda: dict(input or {}), resources, client, side)
    before = CURRENT_STEP.set(info)
    try:
        yield info
    finally:
        CURRENT_STEP.reset(before)


class _AtOnce:
    """The commit of an observation that nobody has to wait for."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()

    def result(self, timeout: float | None = None) -> None:
        return None


@dataclass(slots=True)
class _Alone:
    """Behind the `StepInfo` of a body without a run (calls.EffectSide)."""

    written_at: int | None
    connect: Callable[[type[Any] | None], Any] | None
    seen: list[tuple[str, str]]

    def observed(self) -> Sequence[tuple[str, str]]:
        return self.seen

    def observe(self, kind: str, id: str) -> _AtOnce:
        self.seen.append((kind, id))
        return _AtOnce()

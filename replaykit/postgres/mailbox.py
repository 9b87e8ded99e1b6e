"""What people ask of a run: to end, to go on. Each is one call of a function of the schema, which everybody may call.

The functions (migration 0002) wait for whoever has the run's row, decide by what they left, and tell the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg

from replaykit.errors import NotRetryable, ReplaykitError, RunNotFound
from replaykit.postgres.schema import Bound, Statement
from replaykit.replay.entries import State

__all__ = ["cancel", "parse_state", "refusal", "retry"]

CANCEL = Statement("runs-ask-cancel", "select {schema}.cancel(%(run_id)s, %(by)s)")

RETRY = Statement("runs-ask-retry", "select {schema}.retry(%(run_id)s, %(accept)s, %(by)s)")


def cancel(run_id: UUID, by: str | None = None) -> Bound:
    """Ask a run to end; `parse_state` reads its state after that. Repeatable.

    Args:
        run_id: which.
        by: who asks, for people.
    """
    return CANCEL, {"run_id": run_id, "by": by}


def retry(run_id: UUID, accept: str | None = None, by: str | None = None) -> Bound:
    """Ask a failed or held run to go on; `parse_state` reads its state after that.

    Repeatable as long as no worker has taken the run: then the run is refused, for it is neither failed nor held.

    Args:
        run_id: which.
        accept: "inputs": recorded results stand although the code now asks with other inputs.
        by: who asks, for people.
    """
    return RETRY, {"run_id": run_id, "accept": accept, "by": by}


def parse_state(rows: Sequence[tuple[Any, ...]]) -> State:
    """The run's state after the request."""
    return State(rows[0][0])


def refusal(error: BaseException) -> ReplaykitError | None:
    """What a function's refusal means to whoever asked; None: it is no refusal."""
    if not isinstance(error, psycopg.Error) or error.diag.message_primary is None:
        return None
    sentence = error.diag.message_primary.partition(": ")[2]  # without the function's name
    if isinstance(error, psycopg.errors.NoDataFound):
        return RunNotFound(sentence)
    if isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState):
        return NotRetryable(sentence)
    return None

"""What people ask of a run: to end, to go on, to believe them. Each is one call of a function of the schema, which everybody
may call.

The functions (migrations 0002 and 0003) wait for whoever has the run's row, decide by what they left, and tell the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg

from replaykit.errors import ConfigurationError, NotResolvable, NotRetryable, ReplaykitError, RunNotFound
from replaykit.postgres.schema import Bound, Statement
from replaykit.replay.entries import State

__all__ = ["cancel", "parse_state", "refusal", "resolve", "retry"]

CANCEL = Statement("runs-ask-cancel", "select {schema}.cancel(%(run_id)s, %(by)s)")

RETRY = Statement("runs-ask-retry", "select {schema}.retry(%(run_id)s, %(accept)s, %(by)s)")

RESOLVE = Statement(
    "runs-ask-resolve",
    "select {schema}.resolve(%(run_id)s, %(key)s::text, %(landed)s::json, %(not_landed)s::boolean, %(fail)s::boolean,"
    " %(by)s::text, %(comment)s::text, %(error)s::json)",
)


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


def resolve(
    run_id: UUID,
    key: str,
    *,
    landed: str | None = None,
    not_landed: bool = False,
    fail: bool = False,
    by: str | None = None,
    comment: str | None = None,
    error: str | None = None,
) -> Bound:
    """Say what became of a call in doubt; `parse_state` reads the run's state after that. Repeatable: the same word again
    is that word. Exactly one of `landed`, `not_landed` and `fail`.

    Args:
        run_id: which run.
        key: of the step.
        landed: it happened; JSON text of what the step returns, as the codec writes it ("null" for None).
        not_landed: it did not happen.
        fail: nobody knows; the step fails.
        by: who says so, for people.
        comment: why, for people.
        error: with `fail`: JSON text of what `encode_error` made of the step's error; without it, it is `InDoubt`.
    """
    return RESOLVE, {
        "run_id": run_id,
        "key": key,
        "landed": landed,
        "not_landed": not_landed,
        "fail": fail,
        "by": by,
        "comment": comment,
        "error": error,
    }


def parse_state(rows: Sequence[tuple[Any, ...]]) -> State:
    """The run's state after the request."""
    return State(rows[0][0])


def refusal(error: BaseException) -> ReplaykitError | None:
    """What a function's refusal means to whoever asked; None: it is no refusal."""
    if not isinstance(error, psycopg.Error) or error.diag.message_primary is None:
        return None
    function, _, sentence = error.diag.message_primary.partition(": ")
    if isinstance(error, psycopg.errors.NoDataFound):
        return RunNotFound(sentence)
    if isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState):
        return NotResolvable(sentence) if function == "resolve" else NotRetryable(sentence)
    if isinstance(error, psycopg.errors.InvalidParameterValue) and function == "resolve":
        return ConfigurationError(sentence)
    return None

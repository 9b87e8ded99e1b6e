"""Durable execution for Python: plain async functions that survive crashes, journaled in Postgres.

    from replaykit import Client, Worker, step, workflow

What a workflow's module needs is small; the runtime (psycopg, structlog) is imported when it is first asked for, so
that `replaykit --help` and a module that only declares workflows start fast (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaykit.errors import (
    ConfigurationError,
    DatabaseUnreachable,
    InDoubt,
    KeyConflict,
    NotJournalable,
    NotLanded,
    NotResolvable,
    NotRetryable,
    OutsideRun,
    ReplaykitError,
    ResultRejected,
    RunCancelled,
    RunFailed,
    RunHeld,
    RunNotFound,
    SchemaMismatch,
    StepFailed,
    WorkflowUnknown,
)

if TYPE_CHECKING:
    from replaykit.replay.answers import Landed, Unknown
    from replaykit.replay.calls import StepInfo, Workflow, now, rng, saga, sleep, step, uuid4, workflow
    from replaykit.replay.secrets import Secret
    from replaykit.runtime.client import Client, Handle, RunInfo
    from replaykit.runtime.httpx_hook import idempotency_header
    from replaykit.runtime.logged import drop_replayed
    from replaykit.runtime.sync_client import SyncClient, SyncHandle
    from replaykit.runtime.worker import Worker

__all__ = [
    "Client",
    "ConfigurationError",
    "DatabaseUnreachable",
    "Handle",
    "InDoubt",
    "KeyConflict",
    "Landed",
    "NotJournalable",
    "NotLanded",
    "NotResolvable",
    "NotRetryable",
    "OutsideRun",
    "ReplaykitError",
    "ResultRejected",
    "RunCancelled",
    "RunFailed",
    "RunHeld",
    "RunInfo",
    "RunNotFound",
    "SchemaMismatch",
    "Secret",
    "StepFailed",
    "StepInfo",
    "SyncClient",
    "SyncHandle",
    "Unknown",
    "Worker",
    "Workflow",
    "WorkflowUnknown",
    "drop_replayed",
    "idempotency_header",
    "now",
    "rng",
    "saga",
    "sleep",
    "step",
    "uuid4",
    "workflow",
]

# Hidden from type checkers: with a module `__getattr__` in sight they would accept any misspelt name.
if not TYPE_CHECKING:
    _HOMES = {
        "replaykit.replay.answers": ("Landed", "Unknown"),
        "replaykit.replay.calls": ("StepInfo", "Workflow", "now", "rng", "saga", "sleep", "step", "uuid4", "workflow"),
        "replaykit.replay.secrets": ("Secret",),
        "replaykit.runtime.client": ("Client", "Handle", "RunInfo"),
        "replaykit.runtime.httpx_hook": ("idempotency_header",),
        "replaykit.runtime.logged": ("drop_replayed",),
        "replaykit.runtime.sync_client": ("SyncClient", "SyncHandle"),
        "replaykit.runtime.worker": ("Worker",),
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name):
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})

"""The parent of a worker as a process of its own: configuration on stdin, events as JSON on the descriptor in argv."""

from __future__ import annotations

import os
import sys

import structlog

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.runtime.supervisor import EXIT_CONFIGURATION, WorkerConfig, run_workers

if __name__ == "__main__":
    # Not stdout, which the children have too: a line of theirs could stand in the middle of one of ours.
    events = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(events.fileno(), False)
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.PrintLoggerFactory(events)
    )
    try:
        sys.exit(run_workers(WorkerConfig.model_validate_json(sys.stdin.readline())))
    except ConfigurationError as error:  # as the command line says it
        print(f"replaykit: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, DatabaseUnreachable | SchemaMismatch) else EXIT_CONFIGURATION)

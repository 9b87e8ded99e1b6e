"""The parent of a worker as a process of its own, its events as JSON on stdout. The configuration is on stdin."""

from __future__ import annotations

import sys

import structlog

from replaykit.runtime.supervisor import WorkerConfig, run_workers

if __name__ == "__main__":
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    sys.exit(run_workers(WorkerConfig.model_validate_json(sys.stdin.readline())))

"""A workflow whose call cannot be asked about: its first attempt kills the worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from replaykit import InDoubt, step, workflow

FOLDER = "TEST_DEEDS_FOLDER"
"""The variable that names where calls are written down."""


@step.policy(effect="irreversible")
async def launch(what: str) -> str:
    """Acts, and dies the first time."""
    with (Path(os.environ[FOLDER]) / "calls").open("a") as calls:
        calls.write(f"{step.current().idempotency_key}\n")
    if step.current().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"launched as attempt {step.current().attempt}"


@workflow
async def lift_off(what: str) -> str:
    """One launch."""
    try:
        return await step(launch, what)
    except InDoubt:
        return "in doubt"

"""Waiting for facts: with a deadline, never for a fixed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEADLINE_SECONDS = 30.0
"""How long a fact may take on a machine that is busy with other tests."""


def eventually(fact: Callable[[], T], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """The first true value of `fact`; fails naming `what` when it does not come."""
    deadline = time.monotonic() + seconds
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Whether a process runs or could run; a zombie that its new parent has not met yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    if not status.parent.parent.joinpath("self").exists():  # no /proc
        return True
    try:
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ended between opening and reading
        return False


def lives_in(pid: int, session: int) -> bool:
    """Whether it lives, and is of that session: the number of one that has ended may be a stranger's by now, who must not be
    killed in its place."""
    try:
        return lives(pid) and os.getsid(pid) == session
    except ProcessLookupError:
        return False

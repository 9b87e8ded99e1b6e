"""The two pipes between a parent and a child: what the child is told, what it answers, and that the other one lives.

Down the lifeline come two lines of JSON, the configuration and the incarnation, and then nothing: its end of file says
that the parent is gone, whatever killed it, because only the parent holds the other end. Up the status pipe comes a
line for each thing that the parent must know. Neither command line nor environment carry the configuration: both can
be read by others, and the bodies' own children would inherit it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal
from uuid import UUID

from pydantic import BaseModel

from replaykit.runtime.config import WorkerConfig

__all__ = ["ChildEnd", "Incarnation", "Report", "as_line"]

PR_SET_PDEATHSIG: Final = 1
"""prctl(2): the signal that the kernel sends us when the parent's thread that made us ends."""


class Incarnation(BaseModel):
    """One life of one child: its worker id is used once, and never again."""

    worker_id: UUID
    slot: int
    """Which of the parent's children it is, from 0."""

    solo: bool = False
    """It executes suspects only, apart from all other runs, and ends when there are none."""


Word = Literal["ready", "failed", "suspects", "leaving"]


class Report(BaseModel):
    """One line from a child to its parent."""

    kind: Word
    """`ready`: it has registered and claims. `failed`: it cannot start. `suspects`: there are runs to be executed apart.
    `leaving`: its exit is its own decision; without this word before it, exit code 0 is a body's doing."""

    text: str = ""
    """For `failed`: the sentence for the user."""


class ChildEnd:
    """A child's ends of both pipes. `argv` is what `ParentEnd` (supervisor) appended: two numbers and its own pid."""

    def __init__(self, argv: Sequence[str]) -> None:
        lifeline, status, parent_pid = (int(text) for text in argv)
        self._parent_pid = parent_pid
        self._status = status
        for descriptor in (lifeline, status):
            os.set_inheritable(descriptor, False)  # the bodies' own children have no business with them
        self._lines = os.fdopen(lifeline, "rb", buffering=0)

    def die_with_parent(self) -> None:
        """Asks Linux for SIGTERM when the parent dies, a second way beside the pipe; ends us if it has died already."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != self._parent_pid:  # it died before the request was made
            os._exit(0)

    def read_config(self) -> WorkerConfig:
        """The first line. Ends the process if the parent is gone."""
        return WorkerConfig.model_validate_json(self._read_line())

    def read_incarnation(self) -> Incarnation:
        """The second line, which may come much later. Ends the process if the parent is gone."""
        return Incarnation.model_validate_json(self._read_line())

    def report(self, kind: Word, text: str = "") -> None:
        """Tells the parent; a parent that is gone is no error here."""
        line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._status, line) :]
        except OSError:
            pass

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` in a thread of its own when the parent has died or has closed the lifeline."""

        def wait() -> None:
            while self._lines.read(1):
                pass
            on_gone()

        threading.Thread(target=wait, name="replaykit-lifeline", daemon=True).start()

    def _read_line(self) -> bytes:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            os._exit(0)
        return line


def as_line(message: BaseModel) -> bytes:
    """A message as the line that `ChildEnd` and the parent read."""
    return message.model_dump_json().encode() + b"\n"

"""The processes that `crash_everywhere` kills: `python -m replaykit.testing.crash_child`, which only `Nursery` runs.

A nursery has imported replaykit and nothing of the user's. For each socket that its parent sends, it forks a child, which imports
the user's module itself: whatever that keeps is as new as in a process of its own, and costs no import of replaykit's. A child
takes one line with its `Job`, says that it is ready, and works once it gets a second line. It ends itself with SIGKILL at the
commit that its job names; else its parent kills it.

Nobody outlives anybody: a child ends when its parent's end of the socket is closed, or its nursery dies; a nursery, when its
parent's end of its own is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, Final, Literal
from uuid import UUID

from pydantic import BaseModel

from replaykit.errors import ConfigurationError
from replaykit.limits import Settings
from replaykit.postgres.transaction import Commit, Transaction
from replaykit.replay.entries import Finish, Hold, Park, State, Unit, Verdict
from replaykit.runtime import bodies, executor, writer
from replaykit.runtime.lifeline import PR_SET_PDEATHSIG
from replaykit.runtime.modules import load_object, load_workflows
from replaykit.runtime.worker import Worker
from replaykit.testing.counting import COUNTED_IN

__all__ = ["ORDER_BYTES", "Job", "Kill", "Side", "main"]

ORDER_BYTES: Final = 16
"""Of each order to a nursery: a number. With a socket: be the parent of a child that listens there. Without: kill that child."""

Side = Literal["before", "after"]
"""Of a commit."""

_LIKELY: Final = ("replaykit.testing.crashing", "tenacity", "tenacity.asyncio")
"""What the user's modules import of ours, and we with them: it keeps nothing that a run could depend on."""


class Kill(BaseModel, frozen=True):
    """Where a child ends itself."""

    commit: int
    """Which one of this process, from 1."""

    side: Side
    """`before`: it is about to be sent. `after`: it stands, and nobody in the process has heard of it."""


class Job(BaseModel):
    """What a child is to do: one run."""

    path: list[str]
    """`sys.path`."""

    module: str
    """Where the workflow is: a dotted name, or a path to a file."""

    workflow: str
    """Its name."""

    dsn: str
    schema_name: str
    queue: str
    """Of this one run."""

    worker_id: UUID
    settings: Settings
    lifespan: str | None
    counted_in: str
    """The file for `count_effect`."""

    kill: Kill | None
    """None: it works until its parent kills it."""


class Wire:
    """A child's end of its socket: lines of JSON. Used by several threads."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def say(self, kind: str, **what: Any) -> None:
        """Tell the parent; a parent that is gone is no error here. What was said stays said, whatever kills us next."""
        line = json.dumps({"kind": kind, **what}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def hear(self) -> bytes:
        """The next line. Ends the process if the parent is gone."""
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            os._exit(0)
        return line

    def end_with_parent(self) -> None:
        """In a thread of its own: end the process when the parent closes its end, or dies."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                while self._lines.read(1):
                    pass
            os._exit(0)

        threading.Thread(target=wait, name="replaykit-lifeline", daemon=True).start()


# ---------------------------------------------------------------------- a nursery


def main() -> int:
    """Take orders from stdin, until that is closed."""
    children: set[int] = set()
    for name in _LIKELY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as parent:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        while True:
            message, descriptors, _, _ = socket.recv_fds(parent, ORDER_BYTES, 1)
            while message and len(message) < ORDER_BYTES:
                message += parent.recv(ORDER_BYTES - len(message)) or b"\0" * ORDER_BYTES
            children -= _ended(children)
            if not message:
                break
            if not descriptors:
                if int(message) in children:  # ours until we wait for it: its number is nobody else's
                    os.kill(int(message), signal.SIGKILL)
                continue
            (descriptor,) = descriptors
            nursery = os.getpid()
            child = os.fork()
            if child == 0:
                parent.close()
                _be_child(descriptor, nursery)
            os.close(descriptor)
            children.add(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return 0


def _ended(children: set[int]) -> set[int]:
    return {child for child in children if os.waitpid(child, os.WNOHANG)[0]}


def _be_child(descriptor: int, nursery: int) -> None:
    """The rest of a child's life."""
    code = 1
    try:
        _die_with(nursery)
        work(Wire(descriptor))
        code = 0
    except BaseException:
        traceback.print_exc()  # its last words: nothing above prints them
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent dies, beside the end of the socket; end now if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


# ---------------------------------------------------------------------- a child


def work(wire: Wire) -> None:
    """Execute the run of the job that comes, until this process is killed."""
    job = Job.model_validate_json(wire.hear())
    sys.path[:] = job.path
    os.environ[COUNTED_IN] = job.counted_in
    try:
        workflows = load_workflows([job.module])
        if job.workflow not in workflows:
            raise ConfigurationError(
                f"there is no workflow {job.workflow!r} in {job.module}: define it at the module's top level, where another"
                " process finds it, or say where with module="
            )
        lifespan = load_object(job.lifespan) if job.lifespan is not None else None
    except ConfigurationError as error:
        wire.say("failed", text=str(error))
        return
    Hooks(wire, job.kill).install()
    wire.say("ready", pid=os.getpid())
    wire.hear()
    wire.end_with_parent()
    worker = Worker(
        job.dsn,
        workflows=list(workflows.values()),
        queues=[job.queue],
        lifespan=lifespan,
        settings=job.settings,
        schema=job.schema_name,
        worker_id=job.worker_id,
        supervised=True,
        poll_only=True,
    )
    asyncio.run(_serve(worker))


async def _serve(worker: Worker) -> None:
    await worker.start()
    await asyncio.Event().wait()


class Hooks:
    """Tells the parent of each commit and each body, and ends the process where it is to end.

    Args:
        wire: to the parent.
        kill: where; None: nowhere.
    """

    def __init__(self, wire: Wire, kill: Kill | None) -> None:
        self._wire = wire
        self._kill = kill
        self._commits = 0
        self._calls: dict[str, dict[str, Any]] = {}  # by step: what is told of its body

    def install(self) -> None:
        """Put them around all that commits a unit, and all that begins a body, in this process."""
        send, commit, start_body, bind_body = (
            writer._send,
            Transaction.commit,
            executor.Executor._start_body,
            bodies.bind_body,  # type: ignore[attr-defined]
        )

        async def _send(connection: Any, units: list[Unit]) -> dict[UUID, Verdict]:
            number = self._before(units)
            verdicts = await send(connection, units)
            self._after(number, all(verdict is Verdict.OK for verdict in verdicts.values()))
            return verdicts

        async def _commit(transaction: Transaction, unit: Unit) -> Commit:
            number = self._before([unit])
            outcome = await commit(transaction, unit)
            self._after(number, outcome.verdict is Verdict.OK)
            return outcome

        def _start_body(this: executor.Executor, action: Any, started_at: int) -> None:
            call = action.call
            effect = None if call.effect is None else str(call.effect)
            # One that runs ahead of the journal may ask with what a kill takes back.
            self._calls[call.key] = {"effect": effect, "digest": None if call.runs_ahead else call.input.digest}
            start_body(this, action, started_at)

        def _bind_body(key: str, attempt: int) -> None:
            self._wire.say("body", step=key, **self._calls.get(key, {"effect": None, "digest": None}))
            bind_body(key, attempt)

        writer._send = _send
        Transaction.commit = _commit  # type: ignore[method-assign, assignment]
        executor.Executor._start_body = _start_body  # type: ignore[method-assign, assignment]
        bodies.bind_body = _bind_body  # type: ignore[attr-defined]

    def _before(self, units: list[Unit]) -> int:
        self._commits += 1
        self._wire.say("commit", number=self._commits, what="; ".join(map(words_of, units)))
        self._end_at(self._commits, "before")
        return self._commits

    def _after(self, number: int, stands: bool) -> None:
        if stands:
            self._end_at(number, "after")

    def _end_at(self, commit: int, side: Side) -> None:
        if self._kill == Kill(commit=commit, side=side):
            self._wire.say("killed")
            os.kill(os.getpid(), signal.SIGKILL)


def words_of(unit: Unit) -> str:
    """What a unit brings, for people."""
    parts = [f"intent of {intent.key}" for intent in unit.intents]
    parts += [f"a failed try of {attempt.key}" for attempt in unit.attempts]
    parts += [e.key if e.outcome == "ok" else f"{e.key}: {e.outcome}" for e in unit.entries]
    parts += [f"{c.key} {c.state}" for c in unit.closings if all(c.key != e.key for e in unit.entries)]
    parts += [f"{o.kind}:{o.id} seen by {o.key}" for o in unit.observations]
    change = unit.change
    if isinstance(change, Finish):
        parts.append("the end" if change.state == State.SUCCEEDED else f"the end: {change.state}")
    elif isinstance(change, Park):
        parts.append(f"parked: waits for {change.waiting_for}")
    elif isinstance(change, Hold):
        parts.append("held")
    elif change is not None:
        parts.append("released")
    return ", ".join(parts) or "a note"


if __name__ == "__main__":
    sys.exit(main())

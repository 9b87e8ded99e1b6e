"""Drives one execution by hand: a test says which answer comes next, and may replay what came."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replaykit.limits import Settings
from replaykit.replay.calls import Workflow
from replaykit.replay.entries import Entry, Kind, Outcome
from replaykit.replay.execution import Execution
from replaykit.replay.failures import decode_error
from replaykit.replay.outcomes import error_outcome, result_outcome
from replaykit.replay.requests import CallStep, CancelStep

__all__ = ["RUN_ID", "Live", "begin", "begun", "echo", "other", "replay", "step_entry"]

RUN_ID = uuid.UUID(int=5)

begun: list[Execution] = []
"""Executions of the test that runs; `conftest.py` lets them leave."""


async def echo(n: int) -> int:
    return n


async def other(n: int) -> int:
    return n


class Live:
    """An execution and the journal that it has been given.

    Attributes:
        asked: keys of all requests so far, in order; `-key` for those that were given up.
        journal: the entries delivered.
    """

    def __init__(self, workflow: Workflow[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.execution = Execution(
            workflow.fn, args, {}, info=workflow.info, **{"run_id": RUN_ID, "seed": 1, "started_at": 0, **options}
        )
        begun.append(self.execution)
        self.asked: list[str] = []
        self.journal: list[Entry] = []
        self._note(self.execution.start())

    def _note(self, commands: list[Any]) -> None:
        self.asked += [c.key if isinstance(c, CallStep) else f"-{c.key}" for c in commands]
        assert all(isinstance(c, CallStep | CancelStep) for c in commands)

    @property
    def open(self) -> list[str]:
        """Keys of the requests that stand."""
        return [call.key for call in self.execution.open.values() if not call.abandoned]

    def answer(
        self, key: str, value: Any = None, *, raising: BaseException | None = None, at: int | None = None
    ) -> None:
        """Deliver the outcome of a step: a value, or an error."""
        call = self.execution.open[key]
        if raising is None:
            outcome = result_outcome(call.info, value, 0, Settings())
        else:
            outcome = error_outcome(raising, 0)
        self.deliver(
            Entry(
                len(self.journal) + 1,
                key,
                call.name,
                Kind.STEP,
                outcome.outcome,
                self.clock if at is None else at,
                input=call.input.text,
                output=outcome.output,
                error=outcome.error,
                digest=call.input.digest,
            ),
            outcome.value,
        )

    def fire(self) -> None:
        """Deliver the earliest timer."""
        due = self.execution.next_deadline
        assert due is not None, "no timer is set"
        n = self.execution.timers_fired + 1
        at = max(self.clock, due)
        self.deliver(Entry(len(self.journal) + 1, f"~timer#{n}", "timer", Kind.TIMER, Outcome.OK, at, due_at=due))

    def deliver(self, entry: Entry, *value: Any) -> None:
        """Deliver any entry."""
        self.journal.append(replace(entry))
        self._note(self.execution.deliver(entry, *value))

    @property
    def clock(self) -> int:
        """The run's clock, microseconds."""
        return self.execution.loop.clock

    def finish(self, value: Callable[[CallStep], Any] | None = None) -> Any:
        """Answer what is open, oldest first, else fire timers, until the end; the result."""
        for _ in range(1_000):
            if self.execution.ended is not None or self.execution.hold_reason is not None:
                return self.result
            if self.open:
                call = self.execution.open[self.open[0]]
                self.answer(call.key, value(call) if value is not None else json.loads(call.input.text).get("n"))
            else:
                self.fire()
        raise AssertionError("it does not end")

    @property
    def result(self) -> Any:
        """The function's result; raises what it raised."""
        assert self.execution.hold_reason is None, self.execution.hold_reason
        ended = self.execution.ended
        assert ended is not None, f"it waits for {self.open}"
        if ended.error is not None:
            raise decode_error(ended.error)
        assert ended.output is not None
        return self.execution.info.decode_result(ended.output)

    @property
    def reason(self) -> str:
        """Why it is held."""
        assert self.execution.hold_reason is not None, "it is not held"
        return self.execution.hold_reason


def begin(workflow: Workflow[..., Any], *args: Any, **options: Any) -> Live:
    """Start an execution; `options` go to `Execution`."""
    return Live(workflow, args, options)


def replay(workflow: Workflow[..., Any], journal: list[Entry], *args: Any, **options: Any) -> Live:
    """A fresh execution that has been given `journal`."""
    live = Live(workflow, args, options)
    for entry in journal:
        if live.execution.hold_reason is None:
            live.deliver(replace(entry))
    return live


def step_entry(seq: int, key: str, name: str, output: str, **fields: Any) -> Entry:
    """A step's entry as a journal might hold it."""
    return Entry(seq, key, name, Kind.STEP, Outcome.OK, 0, output=output, **fields)

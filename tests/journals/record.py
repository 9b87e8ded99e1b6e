"""Runs a workflow through the real core with a random order of completion, and replays what came of it.

A record is plain JSON: what the code asked for after each entry, the entries, the end. It holds no path of a machine.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
import random
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from replaykit.limits import Settings
from replaykit.replay.actions import CancelBody, StartBody
from replaykit.replay.calls import CURRENT_STEP, StepInfo, Workflow
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import PROTOCOL, ClaimedRun, Entry, Kind, Mail, MailKind, Outcome, Verdict
from replaykit.replay.execution import Execution
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome
from replaykit.replay.requests import CallStep, Command
from replaykit.replay.tags import remember_modules
from tests.journals.dice import take_dice

__all__ = ["Record", "entries_of", "record", "replay"]

Record = dict[str, Any]

START: Final = 1_780_000_000_000_000
SETTINGS: Final = Settings(evict_after_seconds=1e9)  # a run that left memory would need another claim
ROOT: Final = f"{Path(__file__).resolve().parents[2]}/"
CANCELLED: Final = {"is_cancelled", "survives_a_cancel"}
"""Workflows that somebody asks to end, at some moment."""
RETRIED: Final = {"is_retried"}
"""Workflows that somebody takes on once they have failed."""

_PYTHONS: Final = re.compile(r"[^\"\s]*/(?=(?:lib/)?python3\.\d+/)")
_DEFAULTS: Final[dict[str, Any]] = {
    **{f.name: f.default for f in dataclasses.fields(Entry) if f.default is not dataclasses.MISSING},
    "kind": Kind.STEP,
    "outcome": Outcome.OK,
}


class Watched(Execution):
    """Keeps what the code asked for at its start and after each entry."""

    asked: list[list[str]]

    def start(self) -> list[Command]:
        self.asked = []
        commands = super().start()
        self._note(commands)
        return commands

    def _deliver(self, entry: Entry, value: Any) -> None:  # live and replayed entries both come by here
        super()._deliver(entry, value)
        self._note(self._commands)

    def _note(self, commands: list[Command]) -> None:
        self.asked.append(
            [f"{c.key} {c.input.digest[:8]}" if isinstance(c, CallStep) else f"-{c.key}" for c in commands]
        )


def record(workflow: Workflow[..., Any], number: int, begun: Sequence[Entry] = (), chance: str = "") -> Record:
    """Run it, with bodies that end in a random order and after random times.

    Args:
        workflow: the workflow.
        number: its argument; decides with `chance` about the order, the times and what bodies return.
        begun: a journal to go on from, as the next owner of the run does.
        chance: makes another order.
    """
    dice = random.Random(f"{workflow.name} {number}{chance}")
    take_dice(dice)
    remember_modules()
    entries: list[Entry] = list(begun)
    letters: list[Mail] = []
    while True:
        execution = _execution(workflow, number)
        driver = _driver(execution, entries, letters, dice)
        try:
            _drive(driver, entries, letters, dice)
            if driver.phase is Phase.STALE:  # a rewind stands in the journal: it is read again
                continue
            found = _as_record(execution, workflow.name, number, entries)
        finally:
            execution.leave()
        if found["error"] is None or workflow.name not in RETRIED or len(letters) == 9:
            return found
        letters.append(Mail(len(letters) + 1, MailKind.RETRY, '{"from":"failed"}', entries[-1].at))


def _drive(driver: Driver, entries: list[Entry], letters: list[Mail], dice: random.Random) -> None:
    """Until the run is no longer this owner's; what is committed goes to `entries`."""
    in_flight: dict[str, CallStep] = {}
    now = entries[-1].at if entries else START
    driver.replay(dataclasses.replace(entry) for entry in entries)
    driver.begin(now)
    while driver.phase is Phase.ACTIVE:
        for action in driver.take_actions():
            if isinstance(action, StartBody):
                in_flight[action.call.key] = action.call
            elif isinstance(action, CancelBody):
                in_flight.pop(action.key, None)
        unit = driver.next_unit()
        wake = driver.next_wake
        soon = wake is not None and wake <= now + 10_000_000
        if unit is not None and dice.random() < 0.8:
            pass
        elif driver.run.workflow in CANCELLED and not letters and len(entries) > dice.randrange(8):
            letters.append(Mail(1, MailKind.CANCEL, None, now))
            driver.mail(1, letters, now)
        elif in_flight and (not soon or dice.random() < 0.9):
            now += dice.choice((0, 1_000, 400_000, 1_000_000))
            call = in_flight.pop(dice.choice(list(in_flight)))
            driver.body_ended(call.key, _outcome(call, driver.run.id, now), now)
        elif wake is not None and (soon or unit is None):
            now = max(now, wake)
            driver.tick(now)
        if unit is not None:
            entries += unit.entries
            driver.verdict(Verdict.OK, None, now)


def replay(workflow: Workflow[..., Any], found: Record) -> Record:
    """The record that comes of replaying its entries."""
    remember_modules()
    entries = entries_of(found)
    execution = _execution(workflow, found["number"])
    try:
        driver = _driver(execution, entries, [], random.Random(0))
        driver.replay(dataclasses.replace(entry) for entry in entries)
        return _as_record(execution, workflow.name, found["number"], entries)
    finally:
        execution.leave()


def entries_of(found: Record) -> list[Entry]:
    """A record's journal."""
    return [
        Entry(seq=seq, **{"kind": Kind.STEP, "outcome": Outcome.OK, **fields})
        for seq, fields in enumerate(found["entries"], 1)
    ]


def _execution(workflow: Workflow[..., Any], number: int) -> Watched:
    args, kwargs = workflow.info.decode_arguments(f'{{"n":{number}}}', {})
    return Watched(
        workflow.fn,
        args,
        kwargs,
        info=workflow.info,
        run_id=uuid.uuid5(uuid.UUID(int=1), f"{workflow.name} {number}"),
        seed=number * 7_919 + len(workflow.name),
        started_at=START,
    )


def _driver(execution: Watched, entries: list[Entry], letters: list[Mail], dice: random.Random) -> Driver:
    run = ClaimedRun(
        id=execution.run_id,
        token=uuid.UUID(int=2),
        workflow=execution.info.name or "",
        input="{}",
        seed=execution.seed,
        protocol=PROTOCOL,
        started_at=START,
        wakes=len(letters),
        floor=START,
        rewinds=[(entry.seq, entry.to_seq) for entry in entries if entry.to_seq is not None],
        mail=list(letters),
    )
    return Driver(run, execution, new_id=lambda: uuid.UUID(int=dice.getrandbits(128)), settings=SETTINGS)


def _outcome(call: CallStep, run_id: uuid.UUID, now: int) -> BodyOutcome:
    assert call.context is not None
    context: contextvars.Context = call.context.copy()
    context.run(CURRENT_STEP.set, StepInfo(run_id, call.key, 1, call.idempotency_key, dict))
    try:
        args, kwargs = call.info.fresh_arguments(call.input)
        value = context.run(_to_end, call, args, kwargs)
    except BaseException as error:
        return error_outcome(error, now)
    return result_outcome(call.info, value, now, Settings())


def _to_end(call: CallStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = call.function(*args, **kwargs)
    if not call.info.is_async:
        return value
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"the body of {call.name} waits for something")


def _as_record(execution: Watched, name: str, number: int, entries: list[Entry]) -> Record:
    assert execution.hold_reason is None, f"{name} is held: {execution.hold_reason}"
    assert execution.ended is not None, f"{name} has not ended: it waits for {list(execution.open)}"
    found = {
        "workflow": name,
        "number": number,
        "entries": [_fields(entry) for entry in entries],
        "asked": execution.asked,
        "output": execution.ended.output,
        "error": _without_lines(execution.ended.error),
        "cancelled": execution.ended.cancelled,
    }
    clean: Record = json.loads(_without_paths(json.dumps(found)))
    return clean


def _fields(entry: Entry) -> dict[str, Any]:
    """What an entry holds beyond its place and what no replay reads."""
    fields = {name: getattr(entry, name) for name in (f.name for f in dataclasses.fields(Entry))}
    for name in ("seq", "idempotency_key", "started_at"):
        del fields[name]
    return {name: value for name, value in fields.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _without_paths(text: str) -> str:
    return _PYTHONS.sub("", text.replace(ROOT, ""))


def _without_lines(error: str | None) -> Any:
    """Where in its code a run failed is no part of what it did."""
    return None if error is None else _strip(json.loads(error))


def _strip(found: Any) -> Any:
    if isinstance(found, list):
        return [_strip(one) for one in found]
    if isinstance(found, dict):
        return {name: _strip(one) for name, one in found.items() if name not in ("line", "traceback")}
    return found

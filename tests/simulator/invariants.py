"""What must hold of every run, whatever happened to it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from replaykit.replay.entries import Entry, Kind, Outcome, State
from replaykit.replay.keys import idempotency_key
from tests.simulator.database import Row
from tests.simulator.programs import Watched, program

__all__ = ["History", "Mismatch", "check_journal", "check_run", "new_execution"]


class Mismatch(Exception):
    """An invariant is broken."""


@dataclass(frozen=True, slots=True)
class BodyStart:
    """A body was started, or given up, at a worker's word."""

    key: str
    digest: str
    stands: int  # entries that stood in the journal then, as far as the worker may know


@dataclass(slots=True)
class History:
    """What happened to one run outside of its journal."""

    executions: list[Watched] = field(default_factory=list)
    starts: list[BodyStart] = field(default_factory=list)
    cancels: list[BodyStart] = field(default_factory=list)
    outcomes: set[tuple[str, str | None, str | None]] = field(default_factory=set)  # key, output, error


def new_execution(row: Row) -> Watched:
    """An execution of the row's program, not started."""
    args, kwargs = program.info.decode_arguments(row.input, {})
    return Watched(
        program.fn,
        args,
        kwargs,
        info=program.info,
        run_id=row.id,
        seed=row.seed,
        started_at=row.started_at or 0,
        drain_callbacks_max=20_000,
    )


def check_journal(row: Row) -> None:
    """What every commit must leave behind: no hole, each key once, a clock that never goes back, no early timer."""
    entries = [row.journal[seq][0] for seq in sorted(row.journal)]
    if [e.seq for e in entries] != list(range(1, len(entries) + 1)):
        raise Mismatch(f"a hole in the journal: seqs {[e.seq for e in entries]}")
    keys = [e.key for e in entries]
    if len(set(keys)) != len(keys):
        raise Mismatch(f"a key twice in the journal: {sorted(k for k in set(keys) if keys.count(k) > 1)}")
    last = row.started_at or 0
    for e in entries:
        if e.at < last:
            raise Mismatch(f"the clock went back at entry {e.seq} ({e.key})")
        last = e.at
        if e.kind == Kind.TIMER and (e.due_at is None or e.at < e.due_at):
            raise Mismatch(f"a timer fired early: entry {e.seq}, due {e.due_at}, at {e.at}")


def check_run(row: Row, history: History, dice: random.Random) -> None:
    """All that must hold of a run that has ended."""
    check_journal(row)
    entries = row.entries
    final = _replay(row, entries)
    ended = final.ended
    if final.hold_reason is not None:
        raise Mismatch(f"the final replay is held: {final.hold_reason}")
    if ended is None:
        raise Mismatch(f"the run has ended ({row.state}), the final replay of its {len(entries)} entries has not")
    state = State.SUCCEEDED if ended.error is None else State.FAILED
    if (row.state, row.output, row.error) != (state, ended.output, ended.error):
        mine, theirs = row.output or row.error, ended.output or ended.error
        raise Mismatch(f"the run ended {row.state} with {mine}, its replay {state} with {theirs}")
    marks = final.marks
    final.leave()
    for n, execution in enumerate(history.executions):
        _same_marks(f"execution {n} of {len(history.executions)}", execution, marks)
    _check_prefix(row, entries[: dice.randint(0, len(entries))], marks)
    _check_bodies(row, entries, history, marks)


def _replay(row: Row, entries: Iterable[Entry]) -> Watched:
    execution = new_execution(row)
    execution.start()
    for entry in entries:
        due = execution.next_deadline
        if entry.kind == Kind.TIMER and due != entry.due_at:
            raise Mismatch(f"entry {entry.seq} fires a timer due {entry.due_at}, the earliest is due {due}")
        if execution.hold_reason is not None:
            break
        execution.deliver(entry)
    return execution


def _check_prefix(row: Row, entries: list[Entry], marks: list[tuple[Any, Any]]) -> None:
    prefix = _replay(row, entries)
    prefix.committed = len(entries)
    asked = {call.key for call in prefix.net_commands() if hasattr(call, "input")}
    answered = {e.key for e in entries}
    if asked & answered:
        raise Mismatch(f"after {len(entries)} entries the code still asks for answered {sorted(asked & answered)}")
    leave(prefix)
    _same_marks(f"a replay of the first {len(entries)} entries", prefix, marks)


def leave(execution: Watched) -> None:
    """Let it leave memory, and see that nothing comes out of it any more."""
    before = len(execution.marks)
    execution.leave()
    execution.leave()
    if execution.net_commands() or len(execution.marks) != before:
        raise Mismatch("a command came out of an execution that has left memory")


def _same_marks(what: str, execution: Watched, marks: list[tuple[Any, Any]]) -> None:
    """Whether an execution asked for the same and saw the same, after each entry that it shares with the journal."""
    for seq in range(min(execution.committed + 1, len(execution.marks))):
        if seq >= len(marks) or execution.marks[seq] != marks[seq]:
            mine, final = execution.marks[seq], marks[seq] if seq < len(marks) else None
            raise Mismatch(
                f"{what} went another way after entry {seq}: {_shorten(mine)}; the final replay {_shorten(final)}"
            )


def _shorten(mark: Any) -> str:
    text = json.dumps(mark, default=str)
    return text if len(text) <= 600 else f"{text[:600]}..."


def _check_bodies(row: Row, entries: list[Entry], history: History, marks: list[tuple[Any, Any]]) -> None:
    """Bodies were started for what the journal asks for, after the commits that led to it, and their outcomes stand."""
    asked: dict[str, tuple[int, str]] = {}
    given_up: dict[str, int] = {}
    for seq, (commands, _) in enumerate(marks):
        for command in commands:
            if command[0] == "given up":
                given_up[command[1]] = seq
            else:
                asked[command[0]] = (seq, command[2])
    answered = {e.key: e.seq for e in entries}
    for start in history.starts:
        if start.key not in asked:
            raise Mismatch(f"a body of {start.key} was started, the journal never asks for it")
        seq, digest = asked[start.key]
        if digest != start.digest:
            raise Mismatch(f"a body of {start.key} was started with another input than the journal's")
        if start.stands < seq:
            raise Mismatch(
                f"a body of {start.key} was started when entry {seq}, which it follows from, was not committed"
            )
    for stop in history.cancels:
        seq = min(given_up.get(stop.key, 1 << 30), answered.get(stop.key, 1 << 30))
        if stop.stands < seq:
            raise Mismatch(f"the body of {stop.key} was cancelled when entry {seq} was not committed")
    for e in entries:
        if e.kind != Kind.STEP:
            continue
        if e.outcome in (Outcome.OK, Outcome.ERROR) and (e.key, e.output, e.error) not in history.outcomes:
            raise Mismatch(f"entry {e.seq} holds an outcome that no body of {e.key} had")
        if e.idempotency_key != idempotency_key(row.id, e.key) or e.digest != asked[e.key][1]:
            raise Mismatch(f"entry {e.seq} ({e.key}) has another idempotency key or digest than its call")

"""What must hold of every run, whatever happened to it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from replaykit.replay.entries import Attempt, Entry, Kind, Outcome, State
from replaykit.replay.keys import idempotency_key
from tests.simulator.database import Mismatch, Row
from tests.simulator.programs import Watched, program
from tests.simulator.world import World

__all__ = ["History", "Mismatch", "check_journal", "check_run", "leave", "new_execution", "plainly"]


@dataclass(frozen=True, slots=True)
class BodyStart:
    """A body was started, or given up, at a worker's word."""

    key: str
    digest: str
    stands: int  # entries that stood in the journal then, as far as the worker may know
    rewinds: int = 0  # that its execution knew of
    ahead: bool = False  # of a step that may run ahead of the journal


@dataclass(slots=True)
class History:
    """What happened to one run outside of its journal."""

    executions: list[Watched] = field(default_factory=list)
    starts: list[BodyStart] = field(default_factory=list)
    cancels: list[BodyStart] = field(default_factory=list)
    outcomes: set[tuple[str, str | None, str | None]] = field(default_factory=set)  # key, output, error
    landed: set[tuple[str, str]] = field(default_factory=set)  # key, output: what a reconciler or a person has said
    failed: set[str] = field(default_factory=set)  # keys of steps that a person let fail


def new_execution(row: Row, number: int | None = None) -> Watched:
    """An execution of the row's program, or of that number's, not started."""
    text = row.input if number is None else f'{{"number":{number}}}'
    args, kwargs = program.info.decode_arguments(text, {})
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
    keys = [e.key for e in row.delivered(len(entries), row.rewinds)]
    if len(set(keys)) != len(keys):
        raise Mismatch(f"a key twice in the journal: {sorted(k for k in set(keys) if keys.count(k) > 1)}")
    last = row.started_at or 0
    for e in entries:
        if e.at < last:
            raise Mismatch(f"the clock went back at entry {e.seq} ({e.key})")
        last = e.at
        if e.kind == Kind.TIMER and (e.due_at is None or e.at < e.due_at):
            raise Mismatch(f"a timer fired early: entry {e.seq}, due {e.due_at}, at {e.at}")


def check_run(row: Row, history: History, world: World, dice: random.Random) -> None:
    """All that must hold of a run that has ended: of each of its lives, if it was retried after a failure."""
    if row.started_at is None:
        if row.state is not State.CANCELLED or history.executions:
            raise Mismatch(f"a run that nobody began ended {row.state}")
        return
    check_journal(row)
    _check_attempts(row)
    world.check_end(row)
    rewinds = row.rewinds
    if len(row.ends) != len(rewinds) + 1:
        raise Mismatch(f"{len(rewinds)} rewinds, and the run ended {len(row.ends)} times")
    for life in range(len(rewinds) + 1):
        until = rewinds[life][0] - 1 if life < len(rewinds) else len(row.journal)
        _check_life(row, row.delivered(until, rewinds[:life]), history, life, dice)


def _check_life(row: Row, entries: list[Entry], history: History, life: int, dice: random.Random) -> None:
    final = _replay(row, entries)
    ended = final.ended
    if final.hold_reason is not None:
        raise Mismatch(f"the final replay is held: {final.hold_reason}")
    untold = bool(entries) and entries[-1].kind == Kind.CANCEL and entries[-1].output is not None
    if untold and row.ends[life] != (State.CANCELLED, None, None):
        raise Mismatch(f"a request to end that could not be told ended the run with {row.ends[life]}")
    if ended is None and not untold:
        raise Mismatch(f"the run has ended ({row.state}), the final replay of its {len(entries)} entries has not")
    if ended is not None and not untold:
        state = State.CANCELLED if ended.cancelled else State.SUCCEEDED if ended.error is None else State.FAILED
        if row.ends[life] != (state, ended.output, ended.error):
            raise Mismatch(
                f"the run ended with {row.ends[life]}, its replay {state} with {ended.output or ended.error}"
            )
    given_up = [c.key for c in final.open.values() if c.abandoned and c.effect is not None]
    if given_up and not untold:
        raise Mismatch(f"the run has ended, and its journal does not say what became of {given_up}")
    marks = final.marks
    final.leave()
    for n, execution in enumerate(history.executions):
        if execution.rewinds == life:
            _same_marks(f"execution {n} of {len(history.executions)}", execution, marks)
    _check_prefix(row, entries[: dice.randint(0, len(entries))], marks)
    _check_bodies(row, entries, history, life, marks)


def _check_attempts(row: Row) -> None:
    """Tries are counted without a gap for the whole life of the run, and every entry says which one it is."""
    rows: dict[str, list[Attempt]] = {}
    for a in row.attempts:
        rows.setdefault(a.key, []).append(a)
    tried: dict[str, set[int]] = {key: {a.attempt for a in made} for key, made in rows.items()}
    for key, made in rows.items():
        if any(b.tries not in (1, a.tries + 1) for a, b in itertools.pairwise(made)):
            raise Mismatch(f"the tries of {key} are counted {[a.tries for a in made]}")
    for e in row.entries:
        if e.kind == Kind.STEP and e.reuses is None:
            tried.setdefault(e.key, set()).add(e.attempt)
        elif e.reuses is not None:
            was = row.journal[e.reuses][0]
            if (was.key, was.output, was.idempotency_key) != (e.key, e.output, e.idempotency_key):
                raise Mismatch(f"entry {e.seq} repeats entry {e.reuses}, and is not the same")
    for key, attempt in row.intents:
        tried.setdefault(key, set()).add(attempt)
    for key, numbers in tried.items():
        if numbers != set(range(1, len(numbers) + 1)):
            raise Mismatch(f"the attempts of {key} are {sorted(numbers)}")


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


def _check_prefix(row: Row, entries: list[Entry], marks: dict[int, tuple[Any, Any]]) -> None:
    prefix = _replay(row, entries)
    prefix.committed = entries[-1].seq if entries else 0
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


def _same_marks(what: str, execution: Watched, marks: dict[int, tuple[Any, Any]]) -> None:
    """Whether an execution asked for the same and saw the same, after each entry that it shares with the journal."""
    for seq, mark in execution.marks.items():
        if seq <= execution.committed and mark != marks.get(seq):
            mine, final = mark, marks.get(seq)
            raise Mismatch(
                f"{what} went another way after entry {seq}: {_shorten(mine)}; the final replay {_shorten(final)}"
            )


def _shorten(mark: Any) -> str:
    text = json.dumps(mark, default=str)
    return text if len(text) <= 600 else f"{text[:600]}..."


def _check_bodies(
    row: Row, entries: list[Entry], history: History, life: int, marks: dict[int, tuple[Any, Any]]
) -> None:
    """Bodies were started for what the journal asks for, after the commits that led to it, and their outcomes stand."""
    asked: dict[str, tuple[int, str]] = {}
    given_up: dict[str, int] = {}
    for seq, (commands, _) in marks.items():
        for command in commands:
            if command[0] == "given up":
                given_up[command[1]] = seq
            else:
                asked[command[0]] = (seq, command[2])
    answered = {e.key: e.seq for e in entries}
    for start in history.starts:
        if start.rewinds != life or start.ahead:
            continue
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
        if stop.rewinds != life or stop.ahead:
            continue
        seq = min(given_up.get(stop.key, 1 << 30), answered.get(stop.key, 1 << 30))
        if stop.stands < seq:
            raise Mismatch(f"the body of {stop.key} was cancelled when entry {seq} was not committed")
    for e in entries:
        if e.kind != Kind.STEP:
            continue
        _check_outcome(e, history, given_up)
        if e.digest != asked[e.key][1]:
            raise Mismatch(f"entry {e.seq} ({e.key}) has another digest than its call")
        if e.idempotency_key != _key_of(row, e):
            raise Mismatch(f"entry {e.seq} ({e.key}) has another idempotency key than its call")


def plainly(error: str | None) -> str | None:
    """An error's JSON without spaces: what a person's word is recorded with was read and written again."""
    return None if error is None else json.dumps(json.loads(error))


def _check_outcome(e: Entry, history: History, given_up: dict[str, int]) -> None:
    """An entry holds what a body of its step came to, or what somebody said of it."""
    empty = (e.output, e.error) == (None, None)
    if e.outcome == Outcome.CANCELLED and not (empty and given_up.get(e.key, e.seq) < e.seq):
        raise Mismatch(f"entry {e.seq} says that {e.key} was given up, the code did not do that before")
    said = e.outcome == Outcome.OK and (e.key, e.output or "") in history.landed
    if e.outcome == Outcome.CANCELLED or said or (e.key, e.output, plainly(e.error)) in history.outcomes:
        return
    if e.outcome != Outcome.ERROR or "InDoubt" not in (e.error or "") or e.key not in history.failed:
        raise Mismatch(f"entry {e.seq} holds an outcome that no body of {e.key} had")


def _key_of(row: Row, e: Entry) -> str | None:
    """The same for the same call, whatever became of it; another one for another input than that of its first try."""
    if e.name.startswith("cheap"):
        return None
    if e.reuses is not None and row.journal[e.reuses][0].digest != e.digest:
        return row.journal[e.reuses][0].idempotency_key  # a person has accepted its result for another input
    tried = [(a.attempt, 0, a.digest) for a in row.attempts if a.key == e.key]
    entries = [x for x in row.entries if x.key == e.key and x.kind == Kind.STEP and x.reuses is None]
    tried += [(x.attempt, x.seq, x.digest) for x in entries]
    first = min(tried)[2]
    return idempotency_key(row.id, e.key if first == e.digest else f"{e.key}\0{e.digest}")

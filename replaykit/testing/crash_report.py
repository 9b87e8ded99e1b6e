"""What `crash_everywhere` saw: one run as facts, two runs compared, the report for people.

A run's facts are leaves by path: its state, each part of its result, of each entry, how often each thing was done outside. What
two clean runs do not agree on (a moment, a random number that a step drew) says nothing, and is not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final
from uuid import UUID

__all__ = ["Crash", "CrashReport", "Difference", "Ran", "differences", "end_of", "facts", "varying"]

Path = tuple[str, ...]
Facts = Mapping[Path, Any]

_WORDS_MAX: Final = 100
_REASON_MAX: Final = 400
_ABSENT: Final = object()


@dataclass
class Ran:
    """One run, as it was seen to its end.

    Attributes:
        state: `succeeded`, `failed`, `cancelled`, or `held`.
        reason: why it is held.
        result: JSON text, or None.
        error: JSON text, or None.
        entries: of the journal, in order.
        doubts: keys of the steps that it waits with for a person.
        effects: how often each thing was done: by step (None: outside of a step) and name.
        outside: what the caller's own `effects=` says.
        begun: how often the body of each step began.
        declared: by step, its `effect=`.
        inputs: by step, the digests of what its body was called with (None: it may be called with several).
        commits: what each commit of its first process brought.
        kills: how many of its processes were killed where they were to be.
        broken: entries that stood when it was killed, and do not stand as they did.
    """

    run_id: UUID
    state: str = ""
    reason: str | None = None
    result: str | None = None
    error: str | None = None
    entries: list[Entry] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    effects: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    outside: Any = None
    begun: Counter[str] = field(default_factory=Counter)
    declared: dict[str, str | None] = field(default_factory=dict)
    inputs: dict[str, set[str | None]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    kills: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One line of a journal, without its times."""

    seq: int
    kind: str
    key: str
    name: str
    outcome: str
    digest: str | None
    output: str | None
    error: str | None


@dataclass(frozen=True)
class Difference:
    """What a run that was killed did otherwise than a clean one.

    Attributes:
        path: which fact.
        words: a sentence.
    """

    path: Path
    words: str


@dataclass(frozen=True)
class Crash:
    """One kill and what became of the run.

    Attributes:
        run_id: the run, whose rows still stand in the database.
        commit: at which commit of the run's first process, from 1; 0: at none, its process had executed a run of it before.
        side: `before` the commit was sent, or `after` it stood and before anybody in the process had heard of it.
        what: what the commit brings.
        kills: how many processes were killed; 0: this run made fewer commits.
        repeated: steps whose bodies began more often than in a clean run.
        in_doubt: steps with which it waited for a person, who gave a word (`resolve=`).
        held: why it is held, if it is.
        differences: all that is not as in a clean run.
    """

    run_id: UUID
    commit: int
    side: str
    what: str
    kills: int
    repeated: tuple[str, ...]
    in_doubt: tuple[str, ...]
    held: str | None
    differences: tuple[Difference, ...]

    @property
    def reached(self) -> bool:
        """Whether the run came that far."""
        return self.kills > 0

    @property
    def where(self) -> str:
        """In words."""
        if self.commit == 0:
            return "never, in a process that had executed a run of it before"
        return f"{self.side} commit {self.commit} ({self.what})"


@dataclass(frozen=True)
class CrashReport:
    """What `crash_everywhere` found.

    Attributes:
        workflow: its name.
        commits: what each commit of a clean run brings.
        crashes: one for each place and side.
        ignored: what was not compared: two clean runs do not agree on it, or `ignore=` names it.
        end: what a clean run comes to: `succeeded`, or another state and why.
    """

    workflow: str
    commits: tuple[str, ...]
    crashes: tuple[Crash, ...]
    ignored: tuple[str, ...]
    end: str = "succeeded"

    @property
    def ok(self) -> bool:
        """Whether the workflow comes to the same end wherever its process is killed."""
        return not any(crash.differences for crash in self.crashes)

    @property
    def killed(self) -> int:
        """How many processes were killed."""
        return sum(crash.kills for crash in self.crashes)

    @property
    def repeated(self) -> dict[str, int]:
        """Steps whose bodies ran again after a kill, and in how many runs. To run again is no fault of a step by itself."""
        return dict(Counter(step for crash in self.crashes for step in crash.repeated))

    def raise_if_not_ok(self) -> None:
        """The last line of a test.

        Raises:
            AssertionError: a kill made a difference; the message is the report.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        kills = f"{self.workflow}: killed {self.killed} times at {len(self.commits)} commits"
        if self.ok:
            lines = [f"{kills}: always the same end" + (f", {self.end}" if self.end != "succeeded" else "")]
        else:
            bad = sum(bool(crash.differences) for crash in self.crashes)
            lines = [f"{kills}: {bad} of {len(self.crashes)} runs {'comes' if bad == 1 else 'come'} to another end"]
        by_words: dict[str, list[str]] = {}
        for crash in self.crashes:
            for difference in crash.differences:
                where = crash.where if crash.reached or crash.commit == 0 else "never"
                by_words.setdefault(difference.words, []).append(where)
        for words, places in by_words.items():
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            lines += [f"  {words}", f"      killed {', '.join(places[:3])}{more}"]
        if self.repeated:
            again = ", ".join(f"{step} ({times})" for step, times in self.repeated.items())
            lines.append(f"  bodies that ran again, and in how many runs: {again}")
        asked = Counter(step for crash in self.crashes for step in crash.in_doubt)
        if asked:
            lines.append(f"  asked a person: {', '.join(f'{step} ({times})' for step, times in asked.items())}")
        if self.ignored:
            lines.append(f"  not compared: {', '.join(self.ignored)}")
        return "\n".join(lines)


def end_of(ran: Ran) -> str:
    """What a run has come to, in words."""
    error = _parsed(ran.error)
    told = isinstance(error, dict) and f"{error.get('type')}: {error.get('message')}"
    why = told or ran.reason
    return f"{ran.state}: {_short(why, _REASON_MAX)}" if why else ran.state


# ---------------------------------------------------------------------- facts


def facts(ran: Ran) -> Facts:
    """All that is compared of a run."""
    found: dict[Path, Any] = {("state",): ran.state}
    _leaves(found, ("result",), _parsed(ran.result))
    _leaves(found, ("error",), _parsed(ran.error))
    seen: Counter[tuple[str, str]] = Counter()
    for entry in ran.entries:
        seen[entry.kind, entry.key] += 1
        nth = seen[entry.kind, entry.key]
        at = ("journal", entry.key if nth == 1 else f"{entry.key} ({nth})")
        found[at] = f"{entry.kind} {entry.name}"
        found[*at, "outcome"] = entry.outcome
        found[*at, "input"] = entry.digest
        _leaves(found, (*at, "output"), _parsed(entry.output))
        _leaves(found, (*at, "error"), _parsed(entry.error))
    for (step, what), times in ran.effects.items():
        found["effects", step or "", what] = times
    _leaves(found, ("outside",), ran.outside)
    return found


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _leaves(found: dict[Path, Any], path: Path, value: Any) -> None:
    """A container's own leaf is its shape, so that one which varies stands for all that is in it."""
    if isinstance(value, Mapping):
        found[path] = f"an object of {sorted(map(str, value))}"
        for key, part in value.items():
            _leaves(found, (*path, str(key)), part)
    elif isinstance(value, (list, tuple)):
        found[path] = f"a list of {len(value)}"
        for number, part in enumerate(value):
            _leaves(found, (*path, str(number)), part)
    else:
        found[path] = value


def varying(one: Facts, other: Facts) -> frozenset[Path]:
    """Paths of what two clean runs do not agree on."""
    return frozenset(path for path in {**one, **other} if one.get(path, _ABSENT) != other.get(path, _ABSENT))


# ---------------------------------------------------------------------- differences


def differences(
    clean: Ran, ran: Ran, *, vary: frozenset[Path], ignore: Sequence[str] = (), declared: Mapping[str, str | None]
) -> tuple[Difference, ...]:
    """What a run did otherwise than a clean one.

    Args:
        clean: that one.
        ran: the run.
        vary: paths that say nothing.
        ignore: patterns of step keys, or `result`.
        declared: by step, its `effect=`.
    """
    own, theirs = facts(clean), facts(ran)
    paths = [
        path
        for path in {**own, **theirs}
        if own.get(path, _ABSENT) != theirs.get(path, _ABSENT)
        and not any(path[:n] in vary for n in range(1, len(path) + 1))
        and not ignores(ignore, path)
    ]
    found = [Difference(("journal",), words) for words in ran.broken]
    found += [
        Difference(
            ("input", key),
            f"{key} was called with one input before the kill and with another after it: the workflow's own code takes something"
            " from its process (a random number, the time, a set's order); take it from a step, or from rng(), now(), uuid4()",
        )
        for key, digests in ran.inputs.items()
        if len(digests - {None}) > 1 and not ignores(ignore, ("journal", key))
    ]
    if ("state",) in paths:  # what follows from it needs no words
        paths = [path for path in paths if path == ("state",) or (path[0] == "effects" and path in theirs)]
        if ran.state == "held":  # it stands half-way: what it has not done yet is no news
            paths = [p for p in paths if p[0] != "effects" or theirs[p] > own.get(p, 0)]
    told: set[Path] = set()
    for path in paths:
        if any(path[:n] in told for n in range(1, len(path))):
            continue
        told.add(path)
        found.append(Difference(path, _words(path, own, theirs, ran, declared)))
    return tuple(found)


def ignores(patterns: Iterable[str], path: Path) -> bool:
    """Whether one of them names that fact's step, or the result."""
    if path[0] in ("result", "error"):
        return "result" in patterns
    return path[0] in ("journal", "effects") and any(fnmatchcase(path[1], pattern) for pattern in patterns)


def _words(path: Path, own: Facts, theirs: Facts, ran: Ran, declared: Mapping[str, str | None]) -> str:
    was, now = own.get(path, _ABSENT), theirs.get(path, _ABSENT)
    match path:
        case ("state",):
            if now == "held" and ran.doubts:
                return (
                    f"the run waits for a person: {', '.join(ran.doubts)} may or may not have happened; give it reconcile=, or"
                    " give the test resolve= if a person is to be asked"
                )
            why = f": {_short(ran.reason or ran.error or '', _REASON_MAX)}" if now != "succeeded" else ""
            return f"the run is {now}, a clean one {was}{why}"
        case ("effects", step, what):
            return _effect_words(step, what, was, now, declared)
        case ("journal", key):
            if now is _ABSENT:
                return f"{key} has no entry, which it has in a clean run"
            return f"{key} has an entry ({now}), which it has not in a clean run ({'none' if was is _ABSENT else was})"
        case ("journal", key, "input", *_):
            return f"{key} got another input than in a clean run"
        case ("journal", key, *rest):
            return f"{key}: its {_place(rest)} is {_value(now)}, in a clean run {_value(was)}"
        case ("outside", *rest):
            return f"effects={_place(rest) and ' ' + _place(rest)} says {_value(now)}, of a clean run {_value(was)}"
    return f"the run's {_place(path)} is {_value(now)}, of a clean run {_value(was)}"


def _effect_words(step: str, what: str, was: Any, now: Any, declared: Mapping[str, str | None]) -> str:
    before, after = (0 if n is _ABSENT else n for n in (was, now))
    times = f"{what!r} happened {after} {'time' if after == 1 else 'times'}, in a clean run {before}"
    if not step:
        return f"{times}, by the workflow's own code: a replay does it again; do it in a step"
    if after < before:
        return f"{times}, in step {step}"
    effect = declared.get(step)
    if effect is None or effect == "repeatable":
        return (
            f"{times}, in step {step}, whose body ran again: declare its effect= (idempotent, if the other side knows its key;"
            " irreversible, with reconcile=, if not)"
        )
    if effect == "idempotent":
        return f"{times}, in step {step}, which is declared idempotent: the other side took a second call of one key for another"
    if effect == "transactional":
        return f"{times}, in step {step}, which is transactional: what its body does elsewhere is not rolled back"
    return f"{times}, in step {step}, which is declared {effect}: did its reconcile= say that it had not?"


def _place(path: Sequence[str]) -> str:
    return ".".join(path)


def _value(value: Any) -> str:
    return "absent" if value is _ABSENT else _short(json.dumps(value, ensure_ascii=False, default=repr))


def _short(text: str, longest: int = _WORDS_MAX) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}…"

"""Where the tries of a run's steps stand: which is the next of each, and when it may begin.

The decision to try again is a row of `attempts`, committed before the next try begins: so no crash makes a step forget how
often it was tried, and a back-off needs no process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replaykit.replay.entries import Attempt
from replaykit.replay.requests import CallStep

__all__ = ["NextTry", "Tries"]


@dataclass(slots=True)
class NextTry:
    """A step that failed and is to be tried again."""

    call: CallStep
    attempt: int
    next_at: int
    committed: bool = False  # its row stands
    lingering: bool = False  # the thread of the try before, whose time ran out, still runs


class Tries:
    """The tries of one run.

    Args:
        attempts: the last row of each step.
    """

    def __init__(self, attempts: Iterable[Attempt]) -> None:
        self.waiting: dict[str, NextTry] = {}
        self.rows: list[Attempt] = []  # not sent yet
        self._last = {a.key: a for a in attempts}
        self.known = bool(self._last)  # whether any step has failed tries

    def last(self, key: str, before: int = 0, since: int = 0) -> Attempt | None:
        """The last failed try within the step's budget, which a rewind began anew after so many attempts, at that moment."""
        row = self._last.get(key)
        return row if row is not None and row.attempt > before and row.ended_at >= since else None

    def count(self, key: str) -> int:
        """How many failed tries of it have a row."""
        row = self._last.get(key)
        return row.attempt if row is not None else 0

    def first_digest(self, key: str) -> str | None:
        """The digest of the input of its first try, if that failed and was tried again."""
        row = self._last.get(key)
        return row.first_digest if row is not None else None

    def record(self, row: Attempt) -> None:
        """A try failed, and another one was decided."""
        row.first_digest = self.first_digest(row.key) or (row.digest if row.attempt == 1 else None)
        self._last[row.key] = row
        self.known = True
        self.rows.append(row)

    def adopt(self, rows: Iterable[Attempt]) -> None:
        """Rows that a dropped driver had not committed; those that stand after all are passed over by the database."""
        for row in rows:
            if self.count(row.key) < row.attempt:
                self.record(row)

    def wait(self, call: CallStep, row: Attempt, *, committed: bool, lingering: bool = False) -> None:
        """The step waits for its next try."""
        self.waiting[call.key] = NextTry(call, row.attempt + 1, row.next_at, committed, lingering)

    def sent(self) -> list[Attempt]:
        """The rows to send now."""
        rows, self.rows = self.rows, []
        return rows

    def committed(self, rows: Iterable[Attempt]) -> None:
        """These rows stand."""
        for row in rows:
            waits = self.waiting.get(row.key)
            if waits is not None and waits.attempt == row.attempt + 1:
                waits.committed = True

    def due(self, now: int) -> list[NextTry]:
        """Those that may begin; they wait no longer."""
        due = [w for w in self.waiting.values() if w.committed and not w.lingering and w.next_at <= now]
        for waits in due:
            del self.waiting[waits.call.key]
        return due

    @property
    def lingering(self) -> bool:
        """Whether a thread still runs that a try waits for: the run must not leave before it has ended."""
        return any(waits.lingering for waits in self.waiting.values())

    @property
    def next_at(self) -> int | None:
        """Microseconds since 1970 of the earliest try."""
        return min((w.next_at for w in self.waiting.values()), default=None)

    @property
    def next_due(self) -> int | None:
        """The same of those that only wait for their time."""
        return min((w.next_at for w in self.waiting.values() if w.committed and not w.lingering), default=None)

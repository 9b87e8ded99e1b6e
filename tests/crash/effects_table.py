"""The tables of docs/reference/crash-matrix.md: what tests found, cell by cell, and the page that says it.

A test compares its own cell. `REPLAYKIT_WRITE_TABLES=1` rewrites it instead, and the rows and columns around it.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from tests.crash.effects_house import House

__all__ = ["Found", "Table", "found"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "crash-matrix.md"
WRITE: Final = "REPLAYKIT_WRITE_TABLES"
COMMAND: Final = f"{WRITE}=1 python -m pytest tests/crash/test_effect_matrix.py"


@dataclass(frozen=True)
class Found:
    """What was found of a run's one step that acts, once the run had ended.

    Attributes:
        state: the run's.
        attempts: of each call that reached the server, in order.
        effects: how often it was done.
        asked: how often the reconciler asked the server.
        intents: the state of each of its intents, by attempt.
        in_doubt: whether a person is asked.
        keys: how many idempotency keys the server saw.
    """

    state: str
    attempts: tuple[int, ...] = ()
    effects: int = 0
    asked: int = 0
    intents: tuple[str, ...] = ()
    in_doubt: bool = False
    keys: int = 1

    @property
    def words(self) -> str:
        """For the page."""
        said = [
            f"{_number(len(self.attempts), 'call')}, {_number(self.effects, 'effect')}",
            {"succeeded": "", "held": "**held**", "failed": "error raised"}[self.state],
            "asked" if self.asked else "",
        ]
        return "; ".join(word for word in said if word)


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def found(house: House, run: UUID, account: str, *, in_rows: bool = False) -> Found:
    """What there is to be found; `in_rows`: the effects are rows, and the server only counts the calls."""
    log = house.calls.log(account)
    rows = house.rows.ask("select count(*) from public.effects where account = %s", house.calls.url(account))[0][0]
    return Found(
        house.state(run),
        tuple(call.attempt for call in log.calls),
        int(rows) if in_rows else len(log.effects),
        len(log.asked),
        tuple(state for _, _, state in house.intents(run)),
        house.in_doubt(run) == ["act"],
        len(Counter(call.key for call in log.calls)),
    )


class Table:
    """One table of the page.

    Args:
        name: of its marks.
        rows: the names of its rows.
        columns: the heads of its columns.
    """

    def __init__(self, name: str, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.name = name
        self._mark = f"<!-- {name}: made by {COMMAND} -->\n"
        self._rows = list(rows)
        self._columns = list(columns)

    def check(self, row: str, column: str, words: str) -> None:
        """The page says so."""
        if os.environ.get(WRITE):
            self._write(row, column, words)
        before = self._read(PAGE.read_text(encoding="utf-8"))[1]
        assert before.get((row, column)) == words, f"{PAGE.name} is not what was found: {COMMAND}"

    def check_frame(self) -> None:
        """The page has these rows and columns, and no others."""
        if os.environ.get(WRITE):
            self._write("", "", "")
        told = self._read(PAGE.read_text(encoding="utf-8"))[1]
        assert set(told) == {(row, column) for row in self._rows for column in self._columns}

    def _write(self, row: str, column: str, words: str) -> None:
        with PAGE.open("r+", encoding="utf-8") as page:
            fcntl.flock(page, fcntl.LOCK_EX)  # several tests at once
            before, cells, after = self._read(page.read())
            cells[row, column] = words
            lines = [["policy", *self._columns], ["---"] * (len(self._columns) + 1)]
            lines += [[name, *(cells.get((name, column), "") for column in self._columns)] for name in self._rows]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            page.seek(0)
            page.truncate()
            page.write(f"{before}{self._mark}{table}\n<!-- end -->{after}")

    def _read(self, page: str) -> tuple[str, dict[tuple[str, str], str], str]:
        """What is before the table, its cells, what is after it."""
        before, mark, rest = page.partition(self._mark)
        table, end, after = rest.partition("\n<!-- end -->")
        assert mark and end, f"{PAGE.name} has no mark {self._mark.strip()}"
        heads, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        cells = {(line[0], head): cell for line in lines for head, cell in zip(heads[1:], line[1:], strict=True)}
        return before, cells, after

"""`pytest --pgbouncer` skips exactly what docs/reference/pgbouncer.md lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.faults.pgbouncer import PAGE, reasons

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_on_the_page_is_there() -> None:
    """Each id names a test, or all parameters of one; no line is cut off."""
    listed = reasons()
    files = sorted({id.partition("::")[0] for id in listed})
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--no-header", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ids = {line for line in told.stdout.splitlines() if "::" in line}
    known = ids | {id.partition("[")[0] for id in ids}

    assert set(listed) - known == set()
    assert PAGE.read_text(encoding="utf-8").count("\n| `tests/") == len(listed)


def test_exactly_what_is_on_the_page_is_skipped(request: pytest.FixtureRequest) -> None:
    """With the option each of them has the mark, with its reason, and no other test has it."""
    listed = reasons()

    class Option:
        def getoption(self, name: str) -> bool:
            return name == "--pgbouncer"

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid
            self.marks: list[pytest.MarkDecorator] = []

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark)

    parametrized = [Item(f"{id}[x]") for id in listed if "[" not in id]
    others = [Item(f"{id}_too") for id in listed if "[" not in id]
    items = [*map(Item, listed), *parametrized]
    pytest_collection_modifyitems(Option(), [*items, *others])  # type: ignore[arg-type, list-item]

    assert all(len(item.marks) == 1 for item in items)
    assert {item.marks[0].kwargs["reason"] for item in items} == {f"PgBouncer: {why}" for why in listed.values()}
    assert not any(item.marks for item in others)
    if request.config.getoption("--pgbouncer"):
        mine = [item for item in request.session.items if any(item.nodeid.startswith(id) for id in listed)]
        assert all(item.get_closest_marker("skip") for item in mine)

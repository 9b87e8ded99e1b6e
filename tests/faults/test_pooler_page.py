"""`pytest --pgbouncer` skips exactly what docs/reference/pgbouncer.md lists, or fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.faults.listed import Listed
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


def test_exactly_what_is_on_the_page_is_skipped() -> None:
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


LISTED = ["tests/a.py::test_one", "tests/a.py::test_two[x]"]
"""A page."""

RUN = {
    "tests/a.py::test_one[1]": "PgBouncer: nobody listens",
    "tests/a.py::test_one[2]": "PgBouncer: nobody listens",
    "tests/a.py::test_two[x]": "PgBouncer: nothing is prepared",
    "tests/a.py::test_two[y]": "",
    "tests/a.py::test_three": "needs root",
}
"""Its tests, and why each was skipped."""


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({}, None),
        ({"tests/a.py::test_two[y]": "behind a pooler"}, "test_two[y] was skipped, and the page does not list it"),
        ({"tests/a.py::test_one[2]": ""}, "test_one[2] is on the page, and was not skipped"),
        ({"tests/a.py::test_one[2]": "needs root"}, "test_one[2] is on the page, and was not skipped"),
        ({"tests/a.py::test_two[x]": None}, "test_two[x] is on the page, and there is no such test"),
    ],
    ids=["alike", "one too many", "one that ran", "another reason", "gone"],
)
def test_a_run_that_differs_from_the_page_fails(changed: dict[str, str | None], complaint: str | None) -> None:
    """Whatever xdist's workers have heard of; a run of a part says nothing of what it has left out."""
    tests = {id: why for id, why in {**RUN, **changed}.items() if why is not None}
    whole, part = Listed(LISTED, whole=True), Listed(LISTED, whole=False)
    for judge in (whole, part):
        judge.pytest_xdist_node_collection_finished(list(tests))
        for id, why in tests.items():
            judge.pytest_runtest_logreport(report(id, why))

    assert whole.complaints() == ([] if complaint is None else [f"tests/a.py::{complaint}"])
    assert part.complaints() == ([] if "tests/a.py::test_two[x]" not in tests else whole.complaints())


def report(id: str, why: str) -> pytest.TestReport:
    """Of a test that was skipped, for that reason, or has passed."""
    skipped = ("file.py", 1, f"Skipped: {why}") if why else None
    return pytest.TestReport(
        id, ("file.py", 1, id), {}, "skipped" if why else "passed", skipped, "setup", duration=0.0, start=0.0, stop=0.0
    )


def test_the_exit_code_says_it(tmp_path: Path) -> None:
    """With xdist and without: two tests, of which one is skipped though no page lists it."""
    (tmp_path / "conftest.py").write_text(
        "from tests.faults.listed import Listed\n\n\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(Listed([], whole=True))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\ndef test_passes():\n    pass\n\n\n"
        "@pytest.mark.skip(reason='PgBouncer: so we hope')\ndef test_skipped():\n    pass\n"
    )
    for flags in ([], ["-n", "1"], ["--deselect", "test_it.py::test_skipped"]):
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

        assert told.returncode == (0 if "--deselect" in flags else 1), told.stdout
        assert ("test_skipped was skipped, and the page does not list it" in told.stdout) == (told.returncode == 1)

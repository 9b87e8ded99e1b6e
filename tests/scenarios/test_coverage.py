"""Every scenario of the kinds taken on so far has a test of its name, or a line that says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "scenarios.md"
KINDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("kinds.json").read_text())
"""By kind: ids and titles."""


def ids_of_tests() -> set[str]:
    """The ids that tests are named after."""
    names = [name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def test_(b\d{3})_", file.read_text())]
    return {name.upper() for name in names}


def explained() -> dict[str, str]:
    """The ids that the page has a line for in its first table, with that line."""
    first = PAGE.read_text().split("\n## ")[1]
    return {line[2:6]: line for line in first.splitlines() if re.match(r"\| B\d{3} \|", line)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_scenario_has_a_test_or_a_reason(kind: str) -> None:
    """By its id."""
    missing = {name: title for name, title in KINDS[kind].items() if name not in ids_of_tests() | explained().keys()}
    assert missing == {}


def test_the_page_explains_only_what_is_not_tested() -> None:
    """Each line names a scenario of these kinds, by its title, and what takes its place."""
    titles = {name: title for kind in KINDS.values() for name, title in kind.items()}
    for name, line in explained().items():
        assert titles[name] in line
        assert name not in ids_of_tests()
        assert len(line.split("|")[3].split()) > 5, "a reason has more words"

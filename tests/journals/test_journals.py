"""Journals written under each Python replay under this one: same keys, same results, same ends (S30)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.journals.record import record, replay
from tests.journals.workflows import WORKFLOWS

FILES = [Path(__file__).with_name(f"py{version}.json") for version in ("311", "312", "313")]


def runs_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return runs


@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_journal_of_another_python_replays(path: Path, name: str) -> None:
    """The code asks for the same after each entry, and ends as it did."""
    found = [run for run in runs_of(path) if run["workflow"] == name]

    assert found
    for run in found:
        again = replay(WORKFLOWS[name], run)
        for seq, (then, today) in enumerate(zip(run["asked"], again["asked"], strict=True)):
            assert today == then, f"after entry {seq} of run {run['number']}"
        assert again == run


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_this_python_writes_is_what_the_others_wrote(name: str) -> None:
    """Also going on from a journal is the same: bodies that end alike make the same journal under each Python."""
    here = record(WORKFLOWS[name], 1)
    for path in FILES:
        (there,) = [run for run in runs_of(path) if run["workflow"] == name and run["number"] == 1]
        assert here["asked"] == there["asked"]
        assert here["output"] == there["output"]


def test_each_python_has_its_journals_of_the_same_runs() -> None:
    """Three files, each with every workflow; small, and without a path of the machine that wrote them."""
    names = {path.stem: sorted((run["workflow"], run["number"]) for run in runs_of(path)) for path in FILES}

    assert names["py311"] == names["py312"] == names["py313"]
    assert {name for name, _ in names["py311"]} == set(WORKFLOWS)
    for path in FILES:
        text = path.read_text()
        assert path.stem == "py{}{}".format(*json.loads(text)["python"].split("."))
        assert len(text) < 300_000
        assert re.findall(r"(?<![\w.])/(?:home|root|tmp|usr|work|opt|Users)\b[^\"]*", text) == []

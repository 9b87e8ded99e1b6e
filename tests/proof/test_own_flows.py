"""Workflows of our own, killed before and after every commit: always the same end (issue "Proof", part 1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replaykit.testing import CrashReport
from tests.proof.own_flows import CASES, Case

EACH = [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.slow) for c in CASES]


@pytest.mark.parametrize("case", EACH)
def test_a_workflow_comes_to_the_same_end_wherever_its_process_is_killed(
    case: Case, crash: Callable[..., CrashReport]
) -> None:
    """Result, journal, what was done outside, rows: as without a kill."""

    report = crash(case.workflow, *case.args, **(case.options or {}))
    print(report)

    report.raise_if_not_ok()
    assert report.killed > 0

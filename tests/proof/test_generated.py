"""Generated workflows, killed before and after every commit: always the same end (issue "Proof", part 1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replaykit.testing import CrashReport
from tests.proof import generated
from tests.proof.generated import program, tree

NUMBERS = range(50)
QUICK = (3, 17)
EACH = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NUMBERS]


@pytest.mark.parametrize("number", EACH)
def test_a_random_workflow_comes_to_the_same_end_wherever_its_process_is_killed(
    number: int, crash: Callable[..., CrashReport]
) -> None:
    """Result, journal, what was done outside, rows: as without a kill."""
    check(crash(program, number), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS[::4])
def test_a_random_workflow_comes_to_the_same_end_if_the_process_that_takes_over_is_killed_as_well(
    number: int, crash: Callable[..., CrashReport]
) -> None:
    """In the middle of its recovery; a third one goes on."""
    check(crash(program, number, twice=True), number)


def check(report: CrashReport, number: int) -> None:
    print(tree(number))
    print(report)
    report.raise_if_not_ok()
    assert report.killed > 0


def test_random_workflows_have_every_construct_and_every_kind_of_step() -> None:
    """The fifty together."""

    words = str([tree(number) for number in NUMBERS])

    wanted = {*generated._KINDS, *generated._LEAVES, *generated.CALLS, *generated.OWING}
    assert sorted(each for each in wanted if f"'{each}'" not in words) == []

"""Each way in which code and journal can disagree is a hold, with a sentence that names both; and the docs show them."""

from __future__ import annotations

import pytest

from tests.replay.divergences import BEGIN, CASES, DOC, END, Case, reason_of, table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title.replace(" ", "_"))
def test_the_run_is_held_with_a_sentence(case: Case) -> None:
    """It never goes on, fails or succeeds on a guess; the sentence leads to a line or an entry."""
    reason = reason_of(case)

    assert reason is not None
    assert "\n" not in reason
    assert any(word in reason for word in ("entry ", "step ", "key=", "callbacks", "resolve", "thread"))


def test_the_docs_show_the_sentences() -> None:
    """If this fails: `python -m tests.replay.divergences --write`."""
    shown = DOC.read_text().split(BEGIN)[1].split(END)[0].strip()

    assert shown == table()

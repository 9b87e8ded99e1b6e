"""`make soak` with what it cannot take."""

from __future__ import annotations

import pytest

from tests.faults import soak


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "abc"])
def test_no_time_at_all_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence, and before any server is started."""
    with pytest.raises(SystemExit) as left:
        soak.main(["--minutes", minutes])

    assert left.value.code == 2
    assert "error: argument --minutes: " in capsys.readouterr().err

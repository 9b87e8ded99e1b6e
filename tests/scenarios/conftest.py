"""What a test drove by hand leaves memory with it; a file for what bodies say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replay import drive


@pytest.fixture(autouse=True)
def executions_leave() -> Iterator[None]:
    """Those that a test drove by hand leave memory when it ends."""
    yield
    while drive.begun:
        drive.begun.pop().leave()


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """The world outside: a line for each body."""
    path = tmp_path / "said"
    path.touch()
    return path

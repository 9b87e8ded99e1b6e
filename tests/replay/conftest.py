"""Executions of a test leave memory when it ends, as a worker's do: none is left to the garbage collector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replay import drive


@pytest.fixture(autouse=True)
def executions_leave() -> Iterator[None]:
    yield
    while drive.begun:
        drive.begun.pop().leave()

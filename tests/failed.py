"""Whether a fixture's test has failed: known only after it, and only to a hook (`conftest.py`)."""

from __future__ import annotations

import pytest

__all__ = ["FAILED", "has_failed"]

FAILED = pytest.StashKey[bool]()
"""Set by the hook. In a module of its own: pytest's copy of conftest.py is another one than what tests import."""


def has_failed(request: pytest.FixtureRequest) -> bool:
    """To be asked by a fixture, after its test."""
    return bool(request.node.stash.get(FAILED, False))

"""`replaykit` on the test's database, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import structlog

from replaykit.interfaces.cli import run

__all__ = ["Cli", "Said", "sentences"]


class Said(NamedTuple):
    """What a command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs `replaykit` on the test's database, in this process."""
    monkeypatch.setenv("REPLAYKIT_DATABASE_URL", dsn)

    def say(*arguments: str) -> Said:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    yield say
    structlog.reset_defaults()  # the command line has sent logs to this test's stderr


def sentences(text: str) -> list[str]:
    """Of stderr."""
    return text.splitlines()

"""`replaykit dev MODULE --reload`: new code takes over, runs in flight survive, broken code ends nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from replaykit import Client
from replaykit.errors import ConfigurationError
from replaykit.interfaces.cli import run
from replaykit.interfaces.reload import _Changes, _folder
from tests.interfaces.running import ROOT, Running
from tests.runtime.facts import eventually

BEFORE = """
from pathlib import Path
from replaykit import step, workflow
from later import finish

async def begin(folder: str) -> str:
    (Path(folder) / "begun").touch()
    return "old"

async def wait(folder: str) -> str:
    import asyncio
    while not (Path(folder) / "go").exists():
        await asyncio.sleep(0.01)
    return "waited"

@workflow
async def pair(folder: str) -> list[str]:
    return [await step(begin, folder), await step(wait, folder), await step(finish)]
"""

LATER = "def finish() -> str:\n    return {word!r}\n"


class Dev(Running):
    """A `dev --reload` of a module."""

    def __init__(self, module: Path, dsn: str) -> None:
        super().__init__("dev", str(module), "--reload", "--grace-seconds", "0", dsn=dsn)

    def change(self, file: Path, source: str) -> None:
        """Write the file, and again until it was seen: nothing tells when the watching has begun."""
        seen = self.said.count("has changed")

        def noticed() -> bool:
            file.write_text(source)
            return self.said.count("has changed") > seen

        eventually(noticed, f"{file} has changed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A module whose last step stands in a second one."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "pairs.py").write_text(BEFORE)
    (tmp_path / "code" / "later.py").write_text(LATER.format(word="old code"))
    return tmp_path / "code"


@pytest.fixture
def dev(folder: Path, dsn: str) -> Iterator[Dev]:
    running = Dev(folder / "pairs.py", dsn)
    yield running
    running.end()


def test_a_run_in_flight_goes_on_with_the_new_code(dev: Dev, folder: Path, tmp_path: Path, dsn: str) -> None:
    """Its finished step is not run again, its waiting one is handed over, its next one is the new code's."""

    async def through() -> Any:
        async with Client(dsn) as client:
            handle = await client.options(key="p").start("pair", str(tmp_path))
            await asyncio.to_thread(eventually, (tmp_path / "begun").exists, "the first step")
            await asyncio.to_thread(dev.change, folder / "later.py", LATER.format(word="the new code"))
            await asyncio.to_thread(dev.until, "child_ready", 2)
            (tmp_path / "go").touch()
            return await handle.result(timeout=60)

    dev.until("child_ready")

    assert asyncio.run(through()) == ["old", "waited", "the new code"]
    assert dev.end() == 0


def test_broken_code_ends_nothing(dev: Dev, folder: Path) -> None:
    """The error is said with its line; the next change is tried."""

    dev.until("child_ready")
    dev.change(folder / "later.py", "def finish( -> str: ...\n")
    dev.until("waiting for the next change")

    assert "SyntaxError" in dev.said and "later.py" in dev.said

    dev.change(folder / "later.py", LATER.format(word="mended"))
    dev.until("child_ready", 2)

    assert dev.end() == 0


def test_code_that_is_broken_at_the_start_is_waited_for(folder: Path, dsn: str) -> None:
    """And Ctrl-C ends the waiting."""

    (folder / "pairs.py").write_text("x = 1 / 0\n")
    dev = Dev(folder / "pairs.py", dsn)
    dev.until("waiting for the next change")

    assert "ZeroDivisionError" in dev.said
    assert dev.end() == 130
    assert 'Traceback (most recent call last):\n  File "<string>"' not in dev.said


def test_on_a_terminal_the_runs_are_drawn_below_what_is_said(folder: Path, tmp_path: Path, dsn: str) -> None:
    """By children and parent alike; Ctrl-C ends both."""

    (tmp_path / "go").touch()
    parent, terminal = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "REPLAYKIT_DATABASE_URL": dsn,
        "TERM": "xterm",
        "COLUMNS": "150",
    }
    program = "from replaykit.interfaces.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "dev", str(folder / "pairs.py"), "--reload", "--log-level", "debug"],
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(parent, seen))
    reader.start()

    async def through() -> Any:
        async with Client(dsn) as client:
            return await (await client.start("pair", str(tmp_path))).result(timeout=60)

    try:
        eventually(lambda: b"child_ready" in seen, "the child's events")
        assert asyncio.run(through()) == ["old", "waited", "old code"]
        eventually(lambda: b"succeeded" in seen, "the run in the live view")
    finally:
        child.send_signal(signal.SIGINT)
        code = child.wait(timeout=60)
        reader.join(timeout=10)
        os.close(parent)

    assert code == 0
    assert b"worker_started" in seen  # a child's own line, through the pipe
    assert b"Traceback" not in seen


def read_all(terminal: int, seen: bytearray) -> None:
    with contextlib.suppress(OSError):  # the last writer has closed the terminal
        while data := os.read(terminal, 65_536):
            seen += data


def test_a_change_before_the_worker_runs_is_not_missed() -> None:
    """It rings the bell that the worker is going to hang up."""

    changes, struck = _Changes(), []
    bell = changes.next_bell()
    changes.tell("shop.py")
    bell.hang(lambda: struck.append(1))

    assert struck == [1]
    assert changes.next_bell() is not bell


def test_the_folder_is_the_files_or_the_outermost_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found without an import."""

    monkeypatch.chdir(ROOT)

    assert _folder("tests/runtime/shop.py") == ROOT / "tests" / "runtime"
    assert _folder("tests.runtime.shop") == ROOT / "tests"
    assert _folder("replaykit.runtime.worker") == ROOT / "replaykit"
    with pytest.raises(ConfigurationError, match=r"there is no module 'no_such\.module'"):
        _folder("no_such.module")


def test_without_watchfiles_there_is_a_way_out(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, exit code 2."""

    monkeypatch.setitem(sys.modules, "watchfiles", None)
    monkeypatch.setattr("replaykit.interfaces.reload.setup", lambda *_: None)
    code = run(["dev", str(ROOT / "tests" / "runtime" / "shop.py"), "--reload", "--database-url", dsn])

    assert code == 2
    structlog.reset_defaults()

    assert capsys.readouterr().err == "replaykit: --reload needs watchfiles: pip install 'replaykit[reload]'\n"

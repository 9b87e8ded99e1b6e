"""The public surface is typed: both checkers see the right types in the examples, and each planted mistake."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "typing"
EXAMPLES = FOLDER / "examples.py"
MISTAKES = FOLDER / "mistakes.py"

Checker = Callable[[Path], dict[int, str]]


def mypy(file: Path) -> dict[int, str]:
    """What mypy --strict says of a file, by line."""
    ran = run("-m", "mypy", "--no-error-summary", "--no-pretty", "--hide-error-context", str(file))
    found = re.findall(r"^(.+?):(\d+)(?::\d+)?: error: (.+)$", ran.stdout, re.MULTILINE)
    assert found or ran.returncode == 0, ran.stdout + ran.stderr
    return {int(line): message for path, line, message in found if Path(path).name == file.name}


def pyright(file: Path) -> dict[int, str]:
    """What pyright says of a file, by line."""
    ran = run(str(FOLDER / "run_pyright.py"), "--outputjson", str(file))
    if "SKIPPED" in ran.stdout:
        pytest.skip(ran.stdout.strip())
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found if each["severity"] == "error"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def marked(file: Path) -> set[int]:
    return {number for number, line in enumerate(file.read_text().splitlines(), 1) if "# MISTAKE" in line}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_examples_have_the_types_they_say(checker: Checker) -> None:
    """Each `assert_type` holds: async and sync steps, gather, options, start, handle."""

    assert checker(EXAMPLES) == {}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_every_planted_mistake_is_found(checker: Checker, tmp_path: Path) -> None:
    """Wrong arguments, wrong results and wrong kinds of function are seen before anything runs."""

    # A copy elsewhere: in its own place the project's settings leave the file out.
    found = checker(Path(shutil.copy(MISTAKES, tmp_path)))

    assert set(found) == marked(MISTAKES), found

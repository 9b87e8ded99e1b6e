"""The how-to on testing says what is: its examples are the tutorial's tests, and these pass."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from tests.testing.test_pytest_plugin import ENTRY_POINT

DOCS = Path(__file__).resolve().parents[2] / "docs"
PIPELINE = DOCS / "tutorial" / "pipeline"


def test_the_examples_are_the_tutorials_tests() -> None:
    """Each piece of Python on the page stands in test_pipeline.py, and each test of that file is on the page."""
    page = (DOCS / "how-to" / "test-your-workflows.md").read_text(encoding="utf-8")
    tests = (PIPELINE / "test_pipeline.py").read_text(encoding="utf-8")
    pieces = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    assert [piece for piece in pieces if piece not in tests] == []
    assert re.findall(r"^def (test_\w+)", tests, re.MULTILINE) == re.findall(
        r"^def (test_\w+)", "".join(pieces), re.MULTILINE
    )


def test_the_tutorials_tests_pass(tmp_path: Path) -> None:
    """As a reader runs them, with warnings as errors."""
    known = {point.value for point in importlib.metadata.entry_points(group="pytest11")}
    plugin = [] if ENTRY_POINT in known else ["-p", ENTRY_POINT]
    options = ["-W", "error", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "temp"), *plugin]

    ran = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *options, "test_pipeline.py"],
        cwd=PIPELINE,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "6 passed" in ran.stdout

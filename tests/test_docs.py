"""The docs say what is: links lead somewhere, tables match the code, code and SQL in them run."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import replaykit
from replaykit import Client, Worker
from replaykit.limits import Settings
from tests.direct import direct

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
REPLAYKIT = Path(sys.executable).with_name("replaykit")
SQL_PAGES = [DOCS / "reference" / "sql.md", DOCS / "how-to" / "look-into-a-journal.md"]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language, also those that are indented in a list."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of each line of a page's tables."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files and headings that a page points to exist; what stands in a block of code is no link."""

    broken = []
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


def test_the_index_leads_to_every_page() -> None:
    """docs/README.md names each page of the docs."""

    index = (DOCS / "README.md").read_text(encoding="utf-8")
    missing = [
        str(page.relative_to(DOCS))
        for page in sorted(DOCS.rglob("*.md"))
        if page != DOCS / "README.md" and f"({page.relative_to(DOCS)})" not in index
    ]

    assert missing == []


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """Name, variable, default and reason of each setting, from limits.py."""

    expected = [[f"`{name}`", variable(name), default(name), reason] for name, reason in setting_reasons().items()]

    assert [row for row in rows(DOCS / "reference" / "settings.md") if row[0].startswith("`")] == expected


def setting_reasons() -> dict[str, str]:
    """What limits.py says below each setting, by name."""
    tree = ast.parse((ROOT / "replaykit" / "limits.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings").body
    return {
        ast.unparse(node.target): " ".join(str(after.value.value).split())
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def variable(name: str) -> str:
    return f"`REPLAYKIT_{name.upper()}`"


def default(name: str) -> str:
    value = Settings.model_fields[name].default
    return "lease / 5" if value is None else f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def test_the_page_of_python_names_all_that_is_exported() -> None:
    """Each name of `replaykit.__all__` has a line, and each name with a line of its own exists."""

    page = " ".join(row[0] for row in rows(DOCS / "reference" / "python.md"))
    named = set(re.findall(r"\w+", page))

    assert [name for name in replaykit.__all__ if name not in named] == []


def test_the_page_of_the_command_line_names_every_command_and_option() -> None:
    """What `--help` lists is on the page, and the page lists nothing else."""
    import click

    from replaykit.interfaces.cli import cli

    def walk(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from walk(command, f"{path}{name} ")
            else:
                yield f"{path}{name}", command

    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    found = re.findall(r"^## `replaykit ([a-z ]+)[^`]*`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    sections = {name.strip(): text for name, text in found}
    commands = dict(walk(cli, ""))
    settings = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    missing = [
        f"{name}: {option}"
        for name, command in commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option not in settings and option not in sections.get(name, "") + common(page)
    ]

    assert set(sections) == set(commands)
    assert missing == []


def common(page: str) -> str:
    """What stands above the first command: options that many have."""
    return page.partition("\n## ")[0]


def test_the_tutorial_builds_the_pipeline_that_the_demo_runs() -> None:
    """Each piece of Python in the tutorial stands in pipeline.py, and together they are the whole of it."""

    pieces = blocks(DOCS / "tutorial" / "README.md", "python")
    source = (DOCS / "tutorial" / "pipeline" / "pipeline.py").read_text(encoding="utf-8")
    rest = source
    for piece in pieces:
        assert piece in source
        rest = rest.replace(piece, "")

    assert re.sub(r'""".*?"""', "", rest, flags=re.DOTALL).split() == []


@pytest.mark.skipif(not REPLAYKIT.exists(), reason="replaykit is not installed beside this Python; make test does it")
def test_the_demo_publishes_each_document_once() -> None:
    """`make demo`, as it is: killed half-way, finished by another process, counted by journal and receiver alike."""

    demo = DOCS / "tutorial" / "pipeline" / "demo.py"
    ran = subprocess.run([sys.executable, demo], capture_output=True, text=True, timeout=120, check=False)
    documents = len(list(DOCS.rglob("*.md")))

    assert ran.stdout.splitlines()[-1:] == [
        f"published {documents}, received {documents}, distinct {documents}, killed 1"
    ], ran.stdout + ran.stderr
    assert ran.returncode == 0


def test_the_workflow_of_the_front_page_runs(dsn: str, shop: Any) -> None:
    """README's checkout, started as README says, twice under one key: one run."""

    async def run() -> None:
        async with Client(dsn) as client, Worker(client, workflows=[shop.checkout]):
            keyed = client.options(key="order-42")
            first = await keyed.start(shop.checkout, "order-42")
            again = await keyed.start(shop.checkout, "order-42")

            assert await first.result(timeout=30) == "order-42: 8 reserved, risk 0.3"
            assert (first.created, again.created, again.id) == (True, False, first.id)

    asyncio.run(run())


def test_every_query_of_the_docs_answers(dsn: str, shop: Any) -> None:
    """Each block of SQL in the docs runs; the four questions of sql.md give the runs' answers."""

    finished, waiting = asyncio.run(finish_one_start_another(dsn, shop))
    make_it_wait(dsn, waiting)
    doing, returned, waits, wrote, *_ = ask_everything(dsn, finished)

    assert {row["key"]: row["state"] for row in doing} == {"order-1": "succeeded", "order-2": "waiting"}
    assert [(row["seq"], row["outcome"]) for row in returned] == [(2, "ok")]
    assert returned[0]["duration"].total_seconds() >= 0
    assert [row["key"] for row in waits] == ["order-2"]
    assert [row["seq"] for row in wrote] == [1, 2, 3]
    assert len({row["worker"] for row in wrote}) == 1 and wrote[0]["pid"] is not None


async def finish_one_start_another(dsn: str, shop: Any) -> tuple[str, str]:
    """The ids of a run that has succeeded and of one that nobody has claimed."""
    async with Client(dsn) as client:
        async with Worker(client, workflows=[shop.checkout]):
            finished = await client.options(key="order-1").start(shop.checkout, "order-1")
            await finished.result(timeout=30)
        waiting = await client.options(key="order-2").start(shop.checkout, "order-2")
        return str(finished.id), str(waiting.id)


def make_it_wait(dsn: str, run: str) -> None:
    """Leave a run as a long sleep leaves it."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        connection.execute(
            "update replaykit.runs set state = 'waiting', waiting_for = 'timer', started_at = now(), protocol = 1,"
            " available_at = now() + interval '1 day' where id = %s",
            [run],
        )


def ask_everything(dsn: str, run: str) -> list[list[dict[str, Any]]]:
    """The answers to each statement of the docs, in order."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection, connection.cursor(row_factory=dict_row) as cursor:
        statements = [
            statement for page in SQL_PAGES for block in blocks(page, "sql") for statement in block.split(";\n")
        ]
        answers = []
        for statement in filter(str.strip, statements):
            text = statement.replace(":'run'", f"'{run}'").replace(":n", "2").replace(":'key'", "'reserve'")
            answers.append(cursor.execute(text.encode()).fetchall())
        return answers


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """README's module."""
    (tmp_path / "shop.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shop")
    del sys.modules["shop"]

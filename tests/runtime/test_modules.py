"""What a worker is given to import, and what it says when that does not work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaykit.errors import ConfigurationError
from replaykit.runtime.modules import import_module, load_object, load_workflows

FLOW = """
from replaykit import workflow

@workflow
async def {name}(x: int) -> int:
    return x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def refusal(*modules: str) -> str:
    """The sentence with which these modules are refused."""
    with pytest.raises(ConfigurationError) as caught:
        load_workflows(modules)
    return str(caught.value)


def test_a_dotted_name_is_found_from_where_the_user_stands(folder: Path) -> None:
    """As with `python -m`, although a console script has another folder on its path."""
    (folder / "shop_a").mkdir()
    (folder / "shop_a" / "flows.py").write_text(FLOW.format(name="checkout"))

    workflows = load_workflows(["shop_a.flows"])

    assert {name: workflow.module for name, workflow in workflows.items()} == {"checkout": "shop_a.flows"}


def test_a_file_is_imported_under_its_stem_with_its_folder_on_the_path(folder: Path) -> None:
    """So that it finds the modules beside it, and types named in values mean the same everywhere."""
    (folder / "deep").mkdir()
    (folder / "deep" / "beside_b.py").write_text("X = 1\n")
    (folder / "deep" / "flows_b.py").write_text("import beside_b\n" + FLOW.format(name="checkout"))

    workflows = load_workflows(["deep/flows_b.py"])

    assert workflows["checkout"].module == "flows_b"
    assert str(folder / "deep") in sys.path


def test_workflows_imported_from_elsewhere_count(folder: Path) -> None:
    """A module of imports is how an application lists its workflows."""
    (folder / "one_c.py").write_text(FLOW.format(name="checkout"))
    (folder / "all_c.py").write_text("from one_c import checkout, checkout as again\n")

    assert list(load_workflows(["all_c", "one_c"])) == ["checkout"]


def test_two_workflows_of_one_name_are_refused_naming_both(folder: Path) -> None:
    """A run of that name would be replayed by either."""
    (folder / "one_d.py").write_text(FLOW.format(name="checkout"))
    (folder / "two_d.py").write_text(FLOW.format(name="checkout"))

    sentence = refusal("one_d", "two_d")

    assert "two workflows are named 'checkout'" in sentence
    assert "one_d.checkout" in sentence
    assert "two_d.checkout" in sentence


def test_a_module_that_does_not_import_shows_the_users_traceback_without_ours(folder: Path) -> None:
    """What the user wrote is what went wrong."""
    (folder / "broken_e.py").write_text("def f():\n    return 1 / 0\n\nf()\n")

    sentence = refusal("broken_e")

    assert sentence.startswith("the module broken_e does not import:\nTraceback")
    assert "return 1 / 0" in sentence
    assert "ZeroDivisionError: division by zero" in sentence
    assert "importlib" not in sentence
    assert "replaykit/runtime" not in sentence


def test_a_syntax_error_shows_its_line(folder: Path) -> None:
    """It has no frames of the user's at all."""
    (folder / "broken_f.py").write_text("x = = 1\n")

    sentence = refusal("broken_f")

    assert "broken_f.py" in sentence
    assert "SyntaxError" in sentence
    assert "importlib" not in sentence


def test_a_module_that_imports_what_is_missing_shows_where(folder: Path) -> None:
    """It is not the module itself that is missing."""
    (folder / "broken_g.py").write_text("import not_there_at_all\n")

    assert "No module named 'not_there_at_all'" in refusal("broken_g")
    assert "the module broken_g does not import" in refusal("broken_g")


@pytest.mark.parametrize("name", ["nowhere_h", "nowhere_h.flows"])
def test_a_module_that_is_not_there_is_one_sentence(name: str) -> None:
    """No traceback: nobody wrote anything wrong but the name."""
    sentence = refusal(name)

    assert f"there is no module '{name}'" in sentence
    assert "Traceback" not in sentence


def test_a_file_that_is_not_there_is_one_sentence() -> None:
    """The path as it was given."""
    assert refusal("flows/nowhere.py") == "there is no file flows/nowhere.py"


def test_a_module_that_exits_is_refused(folder: Path) -> None:
    """A script without a `__main__` guard must not end the worker quietly."""
    (folder / "script_i.py").write_text("raise SystemExit(3)\n")

    assert "SystemExit: 3" in refusal("script_i")


def test_a_file_named_like_another_module_is_refused(folder: Path) -> None:
    """Python would give the other one."""
    (folder / "json.py").write_text(FLOW.format(name="checkout"))

    assert "give the file another name" in refusal("json.py")


def test_a_module_without_workflows_is_refused(folder: Path) -> None:
    """It was meant to have some."""
    (folder / "empty_j.py").write_text("")

    assert refusal("empty_j") == "there is no workflow in empty_j: decorate an async function with @workflow"


def test_what_is_no_module_name_is_refused() -> None:
    """A dash, a suffix, a typing mistake."""
    assert "neither a module's dotted name nor a path" in refusal("my-flows")


def test_a_lifespan_is_named_by_module_and_name(folder: Path) -> None:
    """`M:NAME`, with M as for workflows."""
    (folder / "life_k.py").write_text("class A:\n    n = 5\n")

    assert load_object("life_k:A.n") == 5
    assert load_object("life_k.py:A.n") == 5


@pytest.mark.parametrize("reference", ["life_l", "life_l:", ":x", "life_l:missing"])
def test_a_lifespan_that_is_not_there_is_refused(folder: Path, reference: str) -> None:
    """In one sentence with what was asked for."""
    (folder / "life_l.py").write_text("")

    with pytest.raises(ConfigurationError, match=reference.rpartition(":")[2] or "life_l"):
        load_object(reference)


def test_a_module_is_imported_once(folder: Path) -> None:
    """By its name and by its path it is the same module."""
    (folder / "once_m.py").write_text("")

    assert import_module("once_m") is import_module("once_m.py")

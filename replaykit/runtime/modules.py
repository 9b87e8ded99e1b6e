"""Imports the modules that a worker was given and collects their workflows.

Only children do this: the parent of a worker never runs a line of the user's (DESIGN 5).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import Workflow

__all__ = ["find_module", "import_module", "load_object", "load_workflows", "users_traceback"]

_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_PYTHONS: Final = str(Path(os.__file__).parent) + os.sep  # importlib, asyncio, contextlib


def load_workflows(modules: Iterable[str]) -> dict[str, Workflow[..., Any]]:
    """Imports each module and returns, by name, the workflows defined in or imported into them.

    Args:
        modules: dotted names, or paths to files.

    Raises:
        ConfigurationError: a module does not import (with the user's traceback), has no workflow, or two different
            workflows have one name.
    """
    found: dict[str, Workflow[..., Any]] = {}
    for name in modules:
        module = import_module(name)
        workflows = [value for value in vars(module).values() if isinstance(value, Workflow)]
        if not workflows:
            raise ConfigurationError(f"there is no workflow in {name}: decorate an async function with @workflow")
        for workflow in workflows:
            other = found.setdefault(workflow.name, workflow)
            if other is not workflow:
                raise ConfigurationError(
                    f"two workflows are named {workflow.name!r}: {_place(other)} and {_place(workflow)}; "
                    "give one another name with @workflow(name=...)"
                )
    return found


def load_object(reference: str) -> Any:
    """What `M:NAME` names, such as a lifespan; M is a dotted name or a path to a file, NAME may have dots.

    Raises:
        ConfigurationError: the text has another form, the module does not import, or has no such name.
    """
    module_name, colon, path = reference.rpartition(":")
    if not colon or not module_name or not path:
        raise ConfigurationError(f"{reference!r} is not of the form MODULE:NAME")
    value: Any = import_module(module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            raise ConfigurationError(f"there is no {path!r} in {module_name}")
        value = getattr(value, part)
    return value


def find_module(name: str) -> None:
    """Look whether there is such a file, or such a module's outermost package, without running a line of the user's.

    Raises:
        ConfigurationError: there is none.
    """
    if name.endswith(".py") or os.sep in name:
        if not Path(name).is_file():
            raise ConfigurationError(f"there is no file {name}")
        return
    first = name.partition(".")[0]
    builtin = first in sys.builtin_module_names
    if first.isidentifier() and not builtin and PathFinder.find_spec(first, [str(Path.cwd()), *sys.path]) is None:
        raise ConfigurationError(f"there is no module {name!r} (No module named {first!r})")


def import_module(name: str) -> ModuleType:
    """Imports a dotted name, or a path to a file under its stem with its folder on `sys.path`.

    Raises:
        ConfigurationError: it does not import; the message ends with the traceback, without our own frames.
    """
    if name.endswith(".py") or os.sep in name:
        return _import_file(Path(name))
    # A console script has its own folder on sys.path, not the one where the user stands, as `python -m` has.
    _put_on_path(Path.cwd())
    return _import_named(name, shown=name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    path = path.resolve()
    stem = path.stem
    if not stem.isidentifier():
        raise ConfigurationError(f"{path.name} cannot be imported: {stem!r} is not a Python name")
    _put_on_path(path.parent)
    module = _import_named(stem, shown=str(path))
    origin = getattr(module, "__file__", None)
    if origin is None or not Path(origin).exists() or not Path(origin).samefile(path):
        where = f"from {origin}" if origin else "with Python"
        raise ConfigurationError(
            f"{path} would be imported as {stem!r}, which already comes {where}: give the file another name"
        )
    return module


def _import_named(name: str, shown: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{shown!r} is neither a module's dotted name nor a path to a .py file")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigurationError(f"there is no module {shown!r} ({error})") from None
        raise ConfigurationError(_sentence(shown, error)) from error
    except (Exception, SystemExit) as error:  # SystemExit: a script without a `__main__` guard
        raise ConfigurationError(_sentence(shown, error)) from error


def _sentence(shown: str, error: BaseException) -> str:
    return f"the module {shown} does not import:\n{users_traceback(error)}"


def users_traceback(error: BaseException) -> str:
    """The error with its traceback, from the first line that is the user's."""
    return "".join(traceback.format_exception(type(error), error, _users_frames(error.__traceback__))).rstrip()


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with the first line that is neither ours nor the import system's."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        pythons = file.startswith("<frozen ") or (file.startswith(_PYTHONS) and "site-packages" not in file)
        if not pythons and not file.startswith(_OURS):
            return trace
        trace = trace.tb_next
    return None


def _put_on_path(folder: Path) -> None:
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)


def _place(workflow: Workflow[..., Any]) -> str:
    return f"{workflow.module}.{getattr(workflow.fn, '__qualname__', workflow.name)}"

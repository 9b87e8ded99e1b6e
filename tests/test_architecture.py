"""The plan of the house, as tests: floors, what the pure part may touch, circles, length (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "replaykit"

BODY_LINES_MAX = 70
"""Lines of a function's body without its docstring (STYLE.md, the last paragraph)."""

# A file may import from its own floor and from lower ones. `face` is replaykit/__init__.py.
FLOORS = {
    "about": 0,
    "errors": 0,
    "events": 0,
    "limits": 0,
    "replay": 1,
    "postgres": 2,
    "runtime": 3,
    "face": 4,
    "interfaces": 5,
    "testing": 5,
}

# Interfaces know the runtime's public face, nothing below it (DESIGN 3).
INTERFACES_KNOW = {"about", "errors", "events", "limits", "runtime", "face", "interfaces"}

# Only these may speak to a database: everything else hands them SQL as values.
PSYCOPG_USERS = {"postgres"}

# What is known by type alone (below TYPE_CHECKING): connection() without a class gives a body psycopg's own.
TYPES_ALONE = {("replaykit.replay.calls", "psycopg"), ("replaykit.replay.calls", "psycopg.rows")}

# All that replay/ may import: nothing that reads a clock, rolls dice, or touches a file, socket, thread or process.
REPLAY_IMPORTS = {
    *(
        "__future__",
        "abc",
        "asyncio",
        "base64",
        "binascii",
        "builtins",
        "collections",
        "contextlib",
        "contextvars",
        "copy",
    ),
    *(
        "dataclasses",
        "datetime",
        "decimal",
        "dis",  # failures.py: an interrupt that an author's `raise` made is told from one of a signal
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "inspect",
        "ipaddress",
    ),
    *("itertools", "json", "keyword", "linecache", "logging", "math", "numbers", "operator", "pathlib", "random", "re"),
    *(
        "marshal",  # codec.py: two values made of builtins alone compared with their classes, at C speed
        "reprlib",
        "struct",
        "sys",
        "textwrap",
        "traceback",
        "types",
        "typing",
        "unicodedata",
        "zoneinfo",
        "importlib",  # libraries.py: the backend of an anyio that the user has imported
        "uuid",
        "warnings",
        "weakref",
    ),
    *("pydantic", "pydantic_core", "tenacity", "typing_extensions"),
}

# Modules that have both a pure part and another one: the names of the pure part.
REPLAY_NAMES = {
    "random": {"Random"},
    "uuid": {"UUID", "uuid5", "NAMESPACE_URL", "NAMESPACE_OID", "SafeUUID"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "linecache": {"getline"},  # quotes the author's line in an error; never decides anything
}

# Names of allowed modules that would let the world in all the same.
REPLAY_FORBIDDEN = {
    *("asyncio.run", "asyncio.Runner", "asyncio.to_thread", "asyncio.new_event_loop", "asyncio.open_connection"),
    *(
        "asyncio.start_server",
        "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
        "asyncio.subprocess",
    ),
    *(
        "datetime.now",
        "datetime.utcnow",
        "datetime.today",
        "date.today",
        "datetime.datetime.now",
        "datetime.date.today",
    ),
    *("sys.exit", "sys.stdout", "sys.stderr", "sys.stdin", "logging.basicConfig", "logging.config"),
}

# Outside of any replay: step() inside a step's body is a plain call, and a sync function must not block the worker.
REPLAY_EXCEPTIONS = {("replaykit.replay.calls", "asyncio.to_thread")}

REPLAY_FORBIDDEN_CALLS = {"open", "input", "print", "breakpoint"}

DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True)
class Source:
    """One file of the package, parsed."""

    module: str
    path: Path
    tree: ast.Module

    @property
    def floor(self) -> str:
        """The folder below replaykit/, or the file's own name, or `face`."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else "face"

    def at(self, node: ast.AST) -> str:
        """`path:line` of a node, to click on."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package."""
    return tuple(read(path) for path in sorted(PACKAGE.rglob("*.py")))


def read(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(module, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def imports(source: Source) -> Iterator[tuple[ast.AST, str, str | None]]:
    """Each import of a file, those in functions and under TYPE_CHECKING too: (node, module, name or None)."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, absolute(source, node), alias.name) for alias in node.names)


def for_types_alone(source: Source, node: ast.AST, module: str) -> bool:
    """Whether an import is one of TYPES_ALONE, where nothing executes it."""
    return (source.module, module) in TYPES_ALONE and any(
        isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING" and node in block.body
        for block in source.tree.body
    )


def absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    if source.path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def own_imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """The files of the package that a file imports, as module names."""
    modules = {each.module for each in sources()}
    for node, module, name in imports(source):
        if module.split(".")[0] == "replaykit":
            deeper = f"{module}.{name}"
            yield node, deeper if deeper in modules else module


def floor_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "face"


def test_every_file_stands_on_a_floor() -> None:
    """A new folder or top-level file needs a place in the drawing first."""

    homeless = [source.module for source in sources() if source.floor not in FLOORS]

    assert homeless == []


def test_imports_only_go_down() -> None:
    """A file imports from its own floor and below, annotations and functions included."""

    upward = [
        f"{source.at(node)} {source.module} imports {module}"
        for source in sources()
        for node, module in own_imports(source)
        if FLOORS[floor_of(module)] > FLOORS[source.floor]
    ]

    assert upward == []


def test_interfaces_know_the_runtime_and_nothing_below() -> None:
    """The command line asks the runtime; it has no statements and no replay of its own."""

    deep = [
        f"{source.at(node)} imports {module}"
        for source in sources()
        if source.floor == "interfaces"
        for node, module in own_imports(source)
        if floor_of(module) not in INTERFACES_KNOW
    ]

    assert deep == []


def test_only_the_postgres_floor_imports_the_driver() -> None:
    """psycopg and SQLAlchemy are known on one floor."""

    users = [
        f"{source.at(node)} imports {module}"
        for source in sources()
        for node, module, _ in imports(source)
        if module.split(".")[0] in {"psycopg", "psycopg_pool", "sqlalchemy", "alembic"}
        and source.floor not in PSYCOPG_USERS
        and not for_types_alone(source, node, module)
    ]

    assert users == []


def test_the_replay_is_pure() -> None:
    """replay/ imports nothing that could let in time, chance or the world."""

    impure = []
    for source in sources():
        if source.floor != "replay":
            continue
        for node, module, name in imports(source):
            top = module.split(".")[0]
            if top not in REPLAY_IMPORTS and top != "replaykit" and not for_types_alone(source, node, module):
                impure.append(f"{source.at(node)} imports {module}")
            if name is not None and name not in REPLAY_NAMES.get(top, {name}):
                impure.append(f"{source.at(node)} imports {name} from {module}")
            if f"{module}.{name}" in REPLAY_FORBIDDEN:
                impure.append(f"{source.at(node)} imports {module}.{name}")
        impure += [
            f"{source.at(node)} uses {used}"
            for node, used in impure_uses(source)
            if (source.module, used) not in REPLAY_EXCEPTIONS
        ]

    assert impure == []


def impure_uses(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Names and calls that read a clock, roll dice or do I/O, although their module is allowed."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            module, _, name = dotted.partition(".")
            names = REPLAY_NAMES.get(module)
            if dotted in REPLAY_FORBIDDEN or (names is not None and name.split(".")[0] not in names):
                yield node, dotted
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REPLAY_FORBIDDEN_CALLS:
            yield node, f"{node.func.id}()"


def test_no_file_imports_itself_through_others() -> None:
    """The arrows between files have no circle, annotations included."""

    arrows = {source.module: {module for _, module in own_imports(source)} for source in sources()}
    circle = find_circle(arrows)

    assert circle == []


def find_circle(arrows: dict[str, set[str]]) -> list[str]:
    """One circle as a list of modules, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(arrows.get(module, ())):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(arrows) if (found := visit(module, []))), [])


def test_no_function_is_longer_than_a_screen() -> None:
    """Bodies have at most 70 lines; the docstring is not counted."""

    folders = ("replaykit", "docs", "benchmarks", "tests", "migrations")
    files = [read(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    long = [
        f"{source.at(node)} {node.name}: {lines} lines"
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := body_lines(node)) > BODY_LINES_MAX
    ]

    assert long == []


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_every_module_says_what_it_is_and_what_it_offers() -> None:
    """Each module with code has a docstring and an `__all__` (ruff keeps it sorted)."""

    silent = []
    for source in sources():
        if source.path.name == "__init__.py" and source.module != "replaykit":
            continue
        if ast.get_docstring(source.tree) is None:
            silent.append(f"{source.at(source.tree)} has no docstring")
        if exported(source) is None:
            silent.append(f"{source.at(source.tree)} has no __all__")

    assert silent == []


def exported(source: Source) -> list[str] | None:
    """The names in a module's `__all__`; None if it has none."""
    for node in source.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            assert isinstance(value, ast.List | ast.Tuple), source.at(node)
            return [str(ast.literal_eval(element)) for element in value.elts]
    return None


def test_every_public_name_has_a_docstring() -> None:
    """What `__all__` names and the module defines is explained where it is defined."""

    silent = [
        f"{source.at(source.tree)} {name}"
        for source in sources()
        for name in exported(source) or ()
        if name not in explained(source) and name not in brought_in(source)
    ]

    assert silent == []


def explained(source: Source) -> set[str]:
    """Module-level names with a docstring: functions, classes, and assignments followed by a string."""
    body = source.tree.body
    found = set()
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and is_string(after):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_string(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def brought_in(source: Source) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def test_the_face_offers_what_it_names() -> None:
    """`from replaykit import X` works for each X in `__all__`, although most are imported when first asked for."""

    import replaykit

    missing = [name for name in replaykit.__all__ if not hasattr(replaykit, name)]

    assert missing == []


def test_nothing_is_a_drawer() -> None:
    """A module is named for what it is; utils and helpers are names for nothing."""

    drawers = [str(source.path.relative_to(ROOT)) for source in sources() if source.path.stem in DRAWERS]

    assert drawers == []


def test_nothing_is_a_stub() -> None:
    """What is not built is not there: no NotImplementedError (the loop's refusals are answers), no markers."""

    stubs = [
        f"{source.at(node)} {node.id}"
        for source in sources()
        if source.path != PACKAGE / "replay" / "loop.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id == "NotImplementedError"
    ]
    markers = [
        f"{source.path.relative_to(ROOT)}:{number} {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.path.read_text(encoding="utf-8").splitlines(), 1)
        if any(marker in line for marker in ("TODO", "FIXME", "XXX"))
    ]

    assert stubs + markers == []

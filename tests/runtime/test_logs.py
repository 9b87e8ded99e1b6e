"""What log records say of their run, which are dropped, and that replaykit's own events hold no values."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import structlog
from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars

from replaykit import Client, Worker, drop_replayed, step, workflow
from replaykit.events import log, trace
from replaykit.interfaces.logs import setup
from replaykit.replay.execution import Execution
from replaykit.runtime.logged import bind_body, run_context
from tests.test_docs import DOCS, blocks, rows

PACKAGE = Path(__file__).resolve().parents[2] / "replaykit"
RUN = UUID(int=7)
SECRET = "s3" + "cret"

MAY_SPEAK = {
    "events.py",
    "runtime/logged.py",  # tells records of others apart, makes none
    "testing/checker.py",  # a program of its own, whose stdout is its report
    "runtime/embedded_server.py",  # a program of its own, whose stderr is its log file
}

plain = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Some of these set up the logs of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    clear_contextvars()


@pytest.fixture
def lines() -> Iterator[Callable[[], list[str]]]:
    """Gives what a handler with the filter has written of `shop`'s records."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(drop_replayed)
    handler.setFormatter(logging.Formatter("%(run_id)s %(workflow)s %(step)s %(attempt)s %(message)s"))
    plain.addHandler(handler)
    plain.setLevel(logging.INFO)
    yield lambda: stream.getvalue().splitlines()
    plain.removeHandler(handler)


async def asynchronous() -> dict[str, Any]:
    plain.info("async body")
    return dict(get_contextvars())


def synchronous() -> dict[str, Any]:
    plain.info("sync body")
    return dict(get_contextvars())


def decorated() -> Any:
    """A plain function that returns a coroutine."""
    return asynchronous()


@workflow
async def tells() -> list[dict[str, Any]]:
    plain.info("workflow")
    bodies = [await step(asynchronous), await step(synchronous), await step(decorated)]
    plain.info("workflow's end")
    return [dict(get_contextvars()), *bodies]


async def finished(dsn: str) -> tuple[str, list[dict[str, Any]]]:
    async with Client(dsn) as client, Worker(client, workflows=[tells]):
        bind_contextvars(request="of the caller")
        handle = await client.start(tells)
        return str(handle.id), await handle.result(timeout=60)


def test_run_step_and_attempt_are_bound_for_structlog(dsn: str) -> None:
    """In each kind of body; in the workflow's code the run and its name; nothing of whoever started the worker."""

    run_id, (inside, *bodies) = asyncio.run(finished(dsn))

    assert inside == {"run_id": run_id, "workflow": "tells"}
    assert bodies == [{**inside, "step": key, "attempt": 1} for key in ("asynchronous", "synchronous", "decorated")]


def test_the_filter_gives_them_to_records_of_logging(dsn: str, lines: Callable[[], list[str]]) -> None:
    """`-` where there is none."""

    plain.info("outside")
    run_id, _ = asyncio.run(finished(dsn))

    assert lines() == [
        "- - - - outside",
        f"{run_id} tells - - workflow",
        f"{run_id} tells asynchronous 1 async body",
        f"{run_id} tells synchronous 1 sync body",
        f"{run_id} tells decorated 1 async body",
        f"{run_id} tells - - workflow's end",
    ]


def test_a_record_keeps_what_its_caller_gave_it() -> None:
    """And a context that was cleared is one without."""

    def shown() -> tuple[Any, ...]:
        record = logging.makeLogRecord({"step": "mine"})
        assert drop_replayed.filter(record)
        return record.__dict__["run_id"], record.__dict__["step"], record.__dict__["attempt"]

    def within() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        bind_body("charge", 2)
        before = shown()
        clear_contextvars()
        return before, shown()

    assert run_context(RUN, "tells").run(within) == ((str(RUN), "mine", 2), ("-", "mine", "-"))


def test_a_replay_is_silent_and_so_is_what_leaves_memory() -> None:
    """By the flag that the driver sets, and the loop's own of being gone."""

    told: list[str] = []
    for replaying in (False, True):
        execution = waiting(told)
        execution.replaying = replaying
        execution.start()
        execution.leave()

    assert told == ["begins"]


def waiting(told: list[str]) -> Execution:
    """A run that logs when it begins and when it is closed."""

    async def waits() -> None:
        try:
            say("begins")
            await step(asynchronous)
        finally:
            say("closed")

    def say(words: str) -> None:
        try:
            drop_replayed(None, "info", {})
        except structlog.DropEvent:
            assert not drop_replayed.filter(logging.makeLogRecord({}))
        else:
            assert drop_replayed.filter(logging.makeLogRecord({}))
            told.append(words)

    flow = workflow(waits)
    return Execution(flow.fn, (), {}, info=flow.info, run_id=RUN, seed=1, started_at=0)


# --- the library's own events -----------------------------------------------------------------------------------------


def failure() -> BaseException:
    """As Postgres and pydantic write them: the first line is a sentence, what follows quotes values."""
    try:
        password = SECRET
        try:
            raise ValueError(f"no such row\nDETAIL: Key (password)=({password})")
        except ValueError as cause:
            raise RuntimeError(f"the row was refused\ninput_value={password!r}") from cause
    except RuntimeError as error:
        return error


def test_errors_are_told_by_type_and_first_line(caplog: pytest.LogCaptureFixture) -> None:
    """To `logging`, when nobody has configured structlog."""

    log.error("row_refused", run_id="7", error=failure(), exc_info=failure())
    (record,) = caplog.records
    message = record.getMessage()

    assert message.startswith("row_refused run_id=7 error=RuntimeError: the row was refused\nTraceback")
    assert "ValueError: no such row\nwhich led to\nTraceback" in message
    assert message.endswith("RuntimeError: the row was refused")
    assert record.exc_info is None
    assert SECRET not in message


def test_structlog_gets_no_exception_whose_frames_it_could_print() -> None:
    """A chain that shows local variables, as structlog's own does, has none to show."""

    stream = io.StringIO()
    structlog.configure(
        processors=[structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    try:
        raise failure()
    except RuntimeError:
        log.exception("row_refused", error=failure())
    told = json.loads(stream.getvalue())

    assert set(told) == {"event", "error", "exception"}
    assert "in failure" in told["exception"]
    assert SECRET not in stream.getvalue()


def test_a_trace_of_causes_that_go_round_in_circles_ends() -> None:
    """At most five links."""

    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first

    assert trace(first).count("ValueError") == 2


def test_nothing_but_events_logs() -> None:
    """One voice: below the interfaces no other file imports structlog or logging, prints, or writes to a stream."""

    loud = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith("interfaces/") or name in MAY_SPEAK:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {module.partition(".")[0] for module in modules} & {"logging", "structlog", "rich"}:
                loud.append(f"{name}:{getattr(node, 'lineno', 0)} imports {modules}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stderr.write", "pprint"):
                loud.append(f"{name}:{node.lineno} {ast.unparse(node.func)}")

    assert loud == []


def events() -> dict[str, tuple[set[str], set[str]]]:
    """Level and facts of each event that the code tells, by name."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            said = re.fullmatch(r"log\.(debug|info|warning|error|exception)|(tell)", ast.unparse(node.func))
            if said is None:
                continue
            levels, facts = found[str(node.args[0].value)]
            name = said[1] or "info, warning"  # `tell` is one of the two
            levels |= {"error"} if name == "exception" else set(name.split(", "))
            facts |= {"exception"} if name == "exception" else set()
            for keyword in node.keywords:
                more = {"signal", "exit_code"}  # what `**_cause(code)` may hold
                facts |= more if keyword.arg is None else {"exception" if keyword.arg == "exc_info" else keyword.arg}
    return found


def test_the_page_of_events_has_each_with_its_level_and_facts() -> None:
    """In order, and nothing else."""

    page = [row for row in rows(DOCS / "reference" / "events.md") if row[0].startswith("`")]
    listed = {row[0].strip("`"): (set(row[1].split(", ")), set(re.findall(r"`(\w+)`", row[2]))) for row in page}

    assert listed == dict(events())
    assert list(listed) == sorted(listed)


TAKEN = {
    "event",
    "level",
    "logger",
    "logger_name",
    "name",
    "timestamp",
    "stack",
    "stack_info",
    "exc_info",
    "positional_args",
}
"""Keys with which structlog's processors do something of their own. Its `exception` is a text, as ours is."""


def test_no_fact_has_a_name_that_loggers_use_themselves() -> None:
    """Neither structlog's processors, nor `logging`, which refuses `extra` with an attribute of its records."""

    taken = TAKEN | set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    assert {name: facts & taken for name, (_, facts) in events().items() if facts & taken} == {}


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_every_event_is_written_in_both_forms(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    """With lists for facts, which nobody may take for texts."""

    setup(log_format)
    for name, (_, facts) in sorted(events().items()):
        log.error(name, **{fact: "text" if fact == "exception" else ["text"] for fact in facts})
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "text"]  # an exception has its own

    assert len(lines) == len(events())
    assert [name for name, line in zip(sorted(events()), lines, strict=True) if name not in line] == []
    assert not any("log_failure" in line for line in lines)


def test_an_event_on_which_structlogs_chain_fails_goes_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    """And raises nothing: it would end a thread of ours."""

    def broken(*_: Any) -> Any:
        raise KeyError("tenant")

    structlog.configure(processors=[broken])
    log.error("row_refused", run_id="7")

    assert caplog.messages == ["row_refused run_id=7 log_failure=KeyError: 'tenant'"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_snippets_of_the_page_about_logs_work(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """structlog's chain and logging's handler, as they are written there, with the fields of a body."""

    logging.getLogger().handlers.clear()
    exec(compile(blocks(DOCS / "how-to" / "logs.md", "python")[number], "logs.md", "exec"), {})

    def body() -> None:
        bind_body("charge", 2)
        structlog.get_logger().info("charged") if number == 0 else plain.warning("charged")

    run_context(RUN, "tells").run(body)
    printed = capsys.readouterr()

    if number == 0:
        told = json.loads(printed.out)
        assert (told["event"], told["run_id"], told["step"], told["attempt"]) == ("charged", str(RUN), "charge", 2)
    else:
        assert printed.err.endswith(f"WARNING {RUN} charge/2 charged\n")

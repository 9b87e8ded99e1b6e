"""The command line's logs: one form for structlog and `logging`, one object a line, no values of local variables."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import structlog

from replaykit.interfaces.logs import setup
from replaykit.runtime.logged import bind_body, run_context

RUN = UUID(int=7)
SECRET = "s3" + "cret"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`setup` is for a whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def from_a_body(*sayings: Any) -> None:
    """Call these where a step's body runs."""

    def body() -> None:
        bind_body("1/charge#2", 3)
        for say in sayings:
            say()

    run_context(RUN, "checkout").run(body)


def fail() -> None:
    password = SECRET
    raise ValueError(f"{len(password)} characters")


def through_structlog() -> None:
    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("refused", cents=5)


def through_logging() -> None:
    try:
        fail()
    except ValueError:
        logging.getLogger("shop").exception("refused")


def test_a_line_of_json_has_event_level_time_run_step_and_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    """Through either library, with the traceback in the same line."""

    setup("json")
    from_a_body(through_structlog, through_logging)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    assert len(lines) == 2
    for line in lines:
        assert (line["event"], line["level"]) == ("refused", "error")
        assert line["timestamp"].endswith("Z")
        assert (line["run_id"], line["workflow"]) == (str(RUN), "checkout")
        assert (line["step"], line["attempt"]) == ("1/charge#2", 3)
        assert line["exception"].endswith("ValueError: 6 characters")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_has_no_values_of_local_variables(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    """In either form."""

    setup(log_format)
    from_a_body(through_structlog, through_logging)
    said = capsys.readouterr().err

    assert said.count("in fail") == 2
    assert SECRET not in said


def test_the_console_names_run_and_step_too(capsys: pytest.CaptureFixture[str]) -> None:
    """For both libraries."""

    setup("console")
    from_a_body(lambda: structlog.get_logger().info("charged"), lambda: logging.getLogger("shop").info("charged"))
    lines = capsys.readouterr().err.splitlines()

    assert len(lines) == 2
    assert all(f"run_id={RUN}" in line and "step=1/charge#2" in line and "attempt=3" in line for line in lines)


@pytest.mark.parametrize(
    "facts",
    [{"n": float("nan")}, {"d": {(1, 2): 3}}, {"o": object()}, {"b": b"\xff"}, {"s": "\ud800"}],
    ids=["nan", "key", "object", "bytes", "surrogate"],
)
def test_a_line_that_json_cannot_hold_is_written_all_the_same(
    capsys: pytest.CaptureFixture[str], facts: dict[str, Any]
) -> None:
    """As text: a log line must not fail the step that writes it."""

    setup("json")
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    structlog.get_logger().info("odd", **facts)
    structlog.get_logger().info("odd", loop=loop)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().err.splitlines()]

    assert [line["event"] for line in lines] == ["odd", "odd"]


def test_nothing_below_the_level_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """By either library."""

    setup("json", "warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("cellar").info("quiet")
    logging.getLogger("cellar").warning("loud")

    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]

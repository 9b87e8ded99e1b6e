"""`replaykit cancel` and `replaykit retry`: what they print and refuse, and what becomes of the runs under a real worker."""

from __future__ import annotations

import io
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.direct import direct
from tests.interfaces.conftest import Cli, sentences
from tests.interfaces.mending import EFFECTS
from tests.interfaces.running import Running
from tests.runtime.facts import eventually

Sql = psycopg.Connection[tuple[Any, ...]]

LOST = """{"type": "builtins.OSError", "message": "the bank is closed"}"""


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """The database beside the command line."""
    with psycopg.connect(direct(dsn), autocommit=True, options="-c search_path=replaykit") as connection:
        yield connection


def failed_run(sql: Sql, key: str | None = None) -> str:
    """A run that has failed, as a worker leaves it."""
    run_id = str(uuid.uuid4())
    sql.execute(
        "insert into runs (id, workflow, key, state, started_at, finished_at, protocol)"
        " values (%s, 'order', %s, 'failed', now(), now(), 1)",
        (run_id, key),
    )
    sql.execute("insert into payloads (run_id, input, error) values (%s, '{}', %s)", (run_id, LOST))
    sql.execute(
        "insert into journal (run_id, seq, key, name, kind, outcome, error, at, write_id)"
        " values (%s, 1, 'pay', 'pay', 'step', 'error', %s, now(), gen_random_uuid())",
        (run_id, LOST),
    )
    return run_id


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# --- what they print --------------------------------------------------------------------------------------------------


def test_cancel_says_the_state_of_each_run_after_it(cli: Cli, sql: Sql) -> None:
    """Named by id, by its end, by key: a line for each; a run that has ended keeps its end."""
    first, second = cli("start", "a").out.strip(), cli("start", "a").out.strip()
    cli("start", "a", "--key", "order-42")
    ended = failed_run(sql)

    said = cli("cancel", first, second[-8:], "order-42", ended)

    assert (said.code, said.err) == (0, "")
    assert [line.split()[1] for line in said.out.splitlines()] == ["cancelled", "cancelled", "cancelled", "failed"]
    assert [line.split()[0] for line in said.out.splitlines()][:2] == [first, second]
    assert len(cli("runs", "--state", "cancelled", "--ids").out.split()) == 3


def test_as_json_there_is_an_object_for_each_run(cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a line, so that a program may read them as they come; of one run it is the whole answer."""
    run_id, lost = cli("start", "a").out.strip(), failed_run(sql)

    assert cli("cancel", run_id, "--json").json == {"id": run_id, "state": "cancelled"}
    assert cli("retry", lost, "--json").json == {"id": lost, "state": "pending"}


def test_ids_come_from_stdin(cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """`replaykit runs --state failed --ids | replaykit retry -` takes all; empty lines are none, no line is no mistake."""
    lost = {failed_run(sql) for _ in range(60)}
    stdin(monkeypatch, "\n" + cli("runs", "--state", "failed", "--ids").out)

    said = cli("retry", "-")

    assert (said.code, said.err) == (0, "")
    assert {tuple(line.split()) for line in said.out.splitlines()} == {(run_id, "pending") for run_id in lost}
    assert cli("runs", "--state", "failed", "--ids").out == ""
    stdin(monkeypatch, "")
    assert cli("retry", "-") == (0, "", "")


def test_one_refusal_is_one_sentence_and_the_others_are_done(cli: Cli, sql: Sql) -> None:
    """On stderr; the exit code is 1."""
    fresh, lost = cli("start", "a").out.strip(), failed_run(sql)

    said = cli("retry", fresh, "nobody", "a\udcff".encode("utf-8", "replace").decode(), lost)

    assert said.code == 1
    assert said.out.splitlines() == [f"{lost} pending"]
    assert sentences(said.err) == [
        f"replaykit: run {fresh} is pending, and only failed and held runs are retried",
        "replaykit: no run has the id or key 'nobody'",
        "replaykit: no run has the id or key 'a?'",
    ]


@pytest.mark.parametrize("line", ["a\0b", "\x1b[31m", "ü" * 2_000])
def test_what_no_run_can_be_called_is_not_found(cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Whatever stdin says."""
    stdin(monkeypatch, line + "\n")

    said = cli("cancel", "-")

    assert (said.code, said.out, len(sentences(said.err))) == (1, "", 1)
    assert "no run has the id or key" in said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cancel"], "Missing argument 'RUN...'"),
        (["retry"], "Missing argument 'RUN...'"),
        (["retry", "x", "--accept", "outputs"], "'outputs' is not 'inputs'"),
        (["cancel", "x", "--accept", "inputs"], "No such option"),
    ],
)
def test_a_mistake_is_one_sentence_and_exits_with_2(cli: Cli, arguments: list[str], sentence: str) -> None:
    """Nothing is asked."""
    said = cli(*arguments)

    assert (said.code, said.out, len(sentences(said.err))) == (2, "", 1)
    assert sentence in said.err


def test_who_asks_is_kept(cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--by` it is the login name."""
    monkeypatch.setenv("LOGNAME", "bob")
    named, unnamed = failed_run(sql), failed_run(sql)

    cli("retry", named, "--by", "ada", "--accept", "inputs")
    cli("retry", unnamed)

    (request,) = cli("show", named, "--json").json["requests"]
    assert (request["kind"], request["sent_by"], request["entry"]) == ("retry", "ada", None)
    assert request["body"] == {"from": "failed", "accept": "inputs", "seq": 1}
    assert [r["sent_by"] for r in cli("show", unnamed, "--json").json["requests"]] == ["bob"]
    assert "asked   retry by ada" in cli("show", named).out
    assert "accepting inputs" in cli("show", named).out


def test_the_error_of_a_retried_run_is_no_news(cli: Cli, sql: Sql) -> None:
    """Until it fails again."""
    lost = failed_run(sql)
    assert "error   OSError: the bank is closed" in cli("show", lost).out

    cli("retry", lost)

    assert "error   " not in cli("show", lost).out
    assert cli("show", lost, "--json").json["run"]["error"] is None


def test_a_request_that_came_too_late_says_so(cli: Cli, sql: Sql) -> None:
    """The run had ended before its code could be told."""
    run_id = failed_run(sql)
    sql.execute("insert into mailbox (run_id, kind, name, sent_by) values (%s, 'cancel', 'cancel', 'ada')", [run_id])

    assert ": it came too late" in cli("show", run_id).out


def test_tries_that_failed_say_when_the_next_one_begins(cli: Cli, sql: Sql) -> None:
    """The last one of each step; those before it are over. An entry that a rewind set aside ends nothing."""
    run_id = failed_run(sql)
    sql.execute("update runs set state = 'waiting', waiting_for = 'retry', finished_at = null")
    for attempt, step in ((1, "pay"), (2, "pay"), (3, "pay"), (1, "ship")):
        sql.execute(
            "insert into attempts (run_id, key, attempt, error, started_at, ended_at, next_at)"
            " values (%s, %s, %s, %s, now(), now(), now() + interval '1 hour')",
            (run_id, step, attempt, LOST),
        )

    lines = [line for line in cli("show", run_id).out.splitlines() if line.startswith("retry")]

    assert [line.split(":")[0] for line in lines] == [
        "retry   pay attempt 2",
        "retry   pay attempt 3",
        "retry   ship attempt 1",
    ]
    assert ["again in" in line for line in lines] == [False, True, True]


# --- what becomes of the runs -----------------------------------------------------------------------------------------


class World:
    """What the runs have done outside."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "effects"
        self.file.touch()

    def mend(self) -> None:
        self.file.with_name("mended").touch()

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.file.read_text().splitlines()]

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(what for what, _ in self.lines))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def worker(dsn: str, world: World) -> Iterator[Running]:
    """A `replaykit worker` that leaves nothing of a run in memory while it sleeps."""
    running = Running(
        "worker", "tests.interfaces.mending", "--evict-after-seconds", "0.05", dsn=dsn, **{EFFECTS: str(world.file)}
    )
    yield running
    running.end()


def started(cli: Cli, workflow: str) -> str:
    return str(cli("start", workflow, '"o1"', "--force").out.strip())


def state_is(sql: Sql, run_id: str, *states: str) -> Callable[[], bool]:
    query = "select state from runs where id = %s"
    return lambda: sql.execute(query, [run_id]).fetchone() in [(state,) for state in states]


def ended(sql: Sql, run_id: str) -> str:
    """The state in which it ends."""
    ends = ("held", "succeeded", "failed", "cancelled")
    eventually(state_is(sql, run_id, *ends), f"run {run_id} has ended")
    row = sql.execute("select state from runs where id = %s", [run_id]).fetchone()
    assert row is not None
    return str(row[0])


def test_a_pending_run_is_never_begun(cli: Cli, sql: Sql, world: World, request: pytest.FixtureRequest) -> None:
    """Cancelled before there was a worker."""
    cancelled, neighbour = started(cli, "order"), started(cli, "order")
    assert cli("cancel", cancelled).out.split() == [cancelled, "cancelled"]
    world.mend()

    request.getfixturevalue("worker")

    assert ended(sql, neighbour) == "succeeded"
    assert world.counts == {"reserve": 1, "pay": 1}
    assert cli("show", cancelled, "--json").json["run"]["started_at"] is None


def test_a_waiting_run_cleans_up_and_ends_cancelled(cli: Cli, sql: Sql, world: World, worker: Running) -> None:
    """It is in no memory: the request brings it back, its `finally` runs as a step, once."""
    run_id = started(cli, "patient")
    eventually(state_is(sql, run_id, "waiting"), "it waits")

    assert cli("cancel", run_id, "--by", "ada").out.split() == [run_id, "pending"]

    assert ended(sql, run_id) == "cancelled"
    assert world.counts == {"reserve": 1, "clean_up": 1}
    journal = cli("show", run_id, "--json").json["journal"]
    assert [(entry["kind"], entry["key"]) for entry in journal] == [
        ("step", "reserve"),
        ("cancel", "~cancel"),
        ("step", "clean_up"),
    ]
    drawn = cli("show", run_id).out
    assert "cancel, asked by ada" in drawn
    assert "asked   " not in drawn
    assert cli("cancel", run_id).out.split() == [run_id, "cancelled"]


def test_a_running_body_is_stopped(cli: Cli, sql: Sql, world: World, worker: Running) -> None:
    """As asyncio stops it; the run ends cancelled, and `runs` lists it so."""
    run_id = started(cli, "busy")
    eventually(lambda: world.counts.get("hang"), "the body runs")

    assert cli("cancel", run_id).out.split() == [run_id, "running"]

    assert ended(sql, run_id) == "cancelled"
    assert world.counts == {"hang": 1, "stopped": 1, "clean_up": 1}
    assert cli("runs", "--state", "cancelled", "--ids").out.split() == [run_id]


def test_a_run_that_catches_the_request_ends_as_it_likes(cli: Cli, sql: Sql, world: World, worker: Running) -> None:
    """Cancelling asks."""
    run_id = started(cli, "stubborn")
    eventually(state_is(sql, run_id, "waiting"), "it waits")
    cli("cancel", run_id)

    assert ended(sql, run_id) == "succeeded"
    assert cli("show", run_id, "--json").json["run"]["output"] == "all the same"


def test_a_failed_run_goes_on_once_the_world_is_mended(
    cli: Cli, sql: Sql, world: World, worker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What succeeded is not run again; what failed is, under the same key; it may fail once more in between."""
    run_id = started(cli, "order")
    assert ended(sql, run_id) == "failed"
    cli("retry", run_id, "--by", "ada")
    eventually(lambda: world.counts["pay"] == 2, "it was tried again")
    assert ended(sql, run_id) == "failed"
    world.mend()
    stdin(monkeypatch, cli("runs", "--state", "failed", "--ids").out)

    assert cli("retry", "-").out.split() == [run_id, "pending"]

    assert ended(sql, run_id) == "succeeded"
    assert world.counts == {"reserve": 1, "pay": 3}
    assert len({key for what, key in world.lines if what == "pay"}) == 1
    shown = cli("show", run_id, "--json").json
    assert (shown["run"]["output"], shown["run"]["error"]) == ("o1 reserved, o1 paid", None)
    assert [(e["kind"], e["outcome"], e["attempt"], e["to_seq"]) for e in shown["journal"]] == [
        ("step", "ok", 1, None),
        ("step", "error", 1, None),
        ("rewind", "ok", 1, 2),
        ("step", "error", 2, None),
        ("rewind", "ok", 1, 4),
        ("step", "ok", 3, None),
    ]
    assert [request["entry"] for request in shown["requests"]] == [3, 5]
    drawn = cli("show", run_id).out
    assert "retried: entry 2 set aside, asked by ada" in drawn
    assert drawn.count("↶ pay") == 2
    assert len(cli("show", run_id, "--json").json["attempts"]) == 0


def test_a_held_run_is_told_if_its_code_can_be(cli: Cli, sql: Sql, world: World, worker: Running) -> None:
    """One that waited for nothing cleans up."""
    run_id = started(cli, "stuck")
    assert ended(sql, run_id) == "held"

    assert cli("cancel", run_id).out.split() == [run_id, "pending"]

    assert ended(sql, run_id) == "cancelled"
    assert world.counts == {"clean_up": 1}


def diverged(cli: Cli, sql: Sql) -> str:
    """A run whose journal holds another input than its code asks with."""
    run_id = started(cli, "patient")
    eventually(state_is(sql, run_id, "waiting"), "it waits")
    with sql.transaction():
        sql.execute("update journal set digest = 'x', input = '{\"order\": \"o2\"}' where run_id = %s", [run_id])
        sql.execute("update runs set state = 'pending', waiting_for = null where id = %s", [run_id])
        sql.execute("select pg_notify('replaykit_work:replaykit', '')")
    assert ended(sql, run_id) == "held"
    return run_id


def test_a_held_run_whose_code_cannot_be_told_ends_as_it_stands(
    cli: Cli, sql: Sql, world: World, worker: Running
) -> None:
    """Nothing of it runs; the entry keeps the reason for which it was held."""
    run_id = diverged(cli, sql)

    assert cli("cancel", run_id, "--by", "ada").out.split() == [run_id, "pending"]

    assert ended(sql, run_id) == "cancelled"
    assert world.counts == {"reserve": 1}
    entry = cli("show", run_id, "--json").json["journal"][-1]
    assert entry["key"] == "~cancel"
    assert "step reserve: the journal holds it with input" in entry["output"]["untold"]
    drawn = cli("show", run_id).out
    assert "cancel, asked by ada; its code could not be told: step reserve" in drawn
    assert "too late" not in drawn


def test_a_held_run_goes_on_with_what_was_recorded(cli: Cli, sql: Sql, world: World, worker: Running) -> None:
    """Once a person accepts its inputs; without that it is held again."""
    run_id = diverged(cli, sql)
    cli("retry", run_id)
    assert ended(sql, run_id) == "held"

    assert cli("retry", run_id, "--accept", "inputs").out.split() == [run_id, "pending"]

    eventually(state_is(sql, run_id, "waiting"), "it waits again")
    assert world.counts == {"reserve": 1}

"""The command line: what it prints, where, its exit codes, and one sentence for each mistake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from replaykit import Client, Worker
from replaykit.interfaces.cli import SETTINGS
from replaykit.interfaces.output import ago, as_json, duration, one_line, printable
from replaykit.interfaces.starting import parse_values
from replaykit.limits import Settings
from replaykit.postgres.onlookers import parse_rows, shown_journal_ends
from replaykit.replay.jsontext import escape
from tests.conftest import remove_home
from tests.direct import direct
from tests.interfaces.conftest import Cli, Said, sentences
from tests.runtime.shop import checkout, guarded, nap, stuck, total

SHOP = str(Path(__file__).resolve().parents[1] / "runtime" / "shop.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def worker(dsn: str) -> Iterator[None]:
    """A live worker with the shop's workflows, on a thread."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with Worker(dsn, workflows=[checkout, guarded, nap, stuck, total]):
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield
    stop.set()
    thread.join()


def process(*arguments: str, dsn: str | None, **variables: str) -> subprocess.Popen[str]:
    """`replaykit` as a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYKIT_")}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    if dsn is not None:
        environment["REPLAYKIT_DATABASE_URL"] = dsn
    program = "from replaykit.interfaces.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(*arguments: str, dsn: str | None, **variables: str) -> Said:
    """What such a process left."""
    child = process(*arguments, dsn=dsn, **variables)
    out, err = child.communicate(timeout=120)
    return Said(child.returncode, out, err)


# --- start ------------------------------------------------------------------------------------------------------------


def test_start_prints_the_id_of_a_pending_run(cli: Cli) -> None:
    """Without a worker there is a warning; the run waits."""

    said = cli("start", "checkout", '"visa"', "cents=7")

    assert said.code == 0
    assert uuid.UUID(said.out.strip()).version == 7
    assert sentences(said.err) == [
        "replaykit: no live worker has the workflow 'checkout': its run will wait for one",
    ]


def test_start_with_wait_prints_the_result(cli: Cli, worker: None) -> None:
    """The result alone on stdout, as JSON; the id, for those who wait, on stderr."""

    said = cli("start", "checkout", '"visa"', "cents=7", "--wait")
    run_id = cli("runs", "--ids").out.strip()

    assert said == (0, '{"card": "visa", "cents": 7}\n', f"replaykit: run {run_id}\n")


def test_text_that_postgres_cannot_hold_is_shown_as_it_was(cli: Cli, worker: None) -> None:
    """NUL, and what a terminal would obey: readable, and in JSON as JSON writes them."""

    said = cli("start", "checkout", r'"a\u0000b\u001b[31m"', "-1", "--wait")
    run_id = cli("runs", "--ids").out.strip()
    drawn, row = cli("show", run_id), cli("show", run_id, "--json")

    for text in (said.err, drawn.out):
        assert r"CardDeclined: a\x00b\x1b[31m: -1" in text
    assert r'{"card": "a\u0000b\u001b[31m", "cents": -1}' in drawn.out
    assert row.json["run"]["error"]["message"] == "a\x00b\x1b[31m: -1"
    assert not {"\ufdd0", "\ufdd2"} & set(said.err + drawn.out + row.out)


def test_a_lone_surrogate_is_read_as_it_was_and_written_so_that_any_stream_takes_it() -> None:
    """In sentences as Python writes it, in JSON as JSON does."""

    (row,) = parse_rows([('{"message": ' + escape(json.dumps("a\ud800\ufdd0", ensure_ascii=False)) + "}",)])

    assert row == {"message": "a\ud800\ufdd0"}
    assert printable(row["message"]) == "a\\ud800\ufdd0"
    assert as_json(row) == '{"message": "a\\ud800\ufdd0"}'
    assert json.loads(as_json(row)) == row


def test_start_as_json_is_an_object_with_id_and_state(cli: Cli, worker: None) -> None:
    """With `--wait` the result, or the error, too; a failed and a held run exit with 1."""

    plain = cli("start", "nap", "60", "--json", "--key", "k")
    good = cli("start", "checkout", '"visa"', "--json", "--wait")
    bad = cli("start", "checkout", '"visa"', "-1", "--json", "--wait")
    held = cli("start", "stuck", "--json", "--wait")

    assert plain.code == 0
    assert set(plain.json) == {"id", "state", "created"}
    assert (plain.json["state"], plain.json["created"]) == ("pending", True)
    assert (good.code, good.json["state"], good.json["result"]) == (0, "succeeded", {"card": "visa", "cents": 5})
    assert (bad.code, bad.json["state"], bad.json["error"]["message"]) == (1, "failed", "visa: -1")
    assert (held.code, held.json["state"]) == (1, "held")
    assert held.json["reason"]


def test_a_start_with_a_delay_waits(cli: Cli, worker: None) -> None:
    """Its state says so; its row has when it begins, its queue and its priority."""

    said = cli("start", "checkout", '"visa"', "--json", "--delay", "3600", "--queue", "slow", "--priority", "-3")
    (run,) = cli("runs", "--json").json
    wrong = cli("start", "checkout", '"visa"', "--delay", "nan")

    assert (said.code, said.json["state"], said.json["created"]) == (0, "waiting", True)
    assert (run["state"], run["waiting_for"], run["queue"], run["priority"]) == ("waiting", "start", "slow", -3)
    assert wrong == (2, "", "replaykit: delay=nan: not a number of seconds\n")
    early = cli("start", "checkout", '"visa"', "--delay", "-3")
    assert (early.code, early.out) == (2, "")
    assert "-3: a run cannot begin before its start" in early.err


def test_a_queue_that_no_live_worker_claims_is_said(cli: Cli, worker: None) -> None:
    """At the start and by `show`: else the run would wait for reasons that nobody sees."""

    said = cli("start", "checkout", '"visa"', "--queue", "nope")
    shown = cli("show", said.out.strip())

    assert (said.code, sentences(said.err)) == (
        0,
        [
            "replaykit: no live worker takes checkout from the queue 'nope' (they take it from default): "
            "its run will wait for one"
        ],
    )
    assert "for a worker: no live worker takes checkout from the queue nope; they take it from default" in shown.out


def test_a_secret_in_clear_is_a_mistake_that_stores_nothing(cli: Cli, worker: None) -> None:
    """The live worker says which parameters are secrets."""

    said = cli("start", "guarded", '"sesame"')

    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("replaykit: $.key: a secret is never written")
    assert "sesame" not in said.err
    assert cli("runs", "--json").json == []


def test_a_failed_run_is_one_sentence_with_the_users_line(cli: Cli, worker: None) -> None:
    """On stderr, after its id; stdout stays empty."""

    said = cli("start", "checkout", '"visa"', "-1", "--wait")

    assert (said.code, said.out) == (1, "")
    assert len(sentences(said.err)) == 2
    assert "CardDeclined: visa: -1" in said.err
    assert "shop.py:" in said.err


def test_a_second_start_under_a_key_says_so(cli: Cli, worker: None) -> None:
    """The id is the first run's."""

    first = cli("start", "nap", "60", "--key", "order-42")
    second = cli("start", "nap", "61", "--key", "order-42")
    other = cli("start", "checkout", '"visa"', "--key", "order-42")

    assert second.code == 0
    assert second.out == first.out
    assert "was there already" in second.err
    assert other.code == 1
    assert sentences(other.err) == [
        f"replaykit: key 'order-42' belongs to run {first.out.strip()} of 'nap', not of 'checkout'"
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chekout", "1"], "no live worker has a workflow 'chekout'; there are checkout, guarded, nap, stuck, total"),
        (["checkout", '"visa"', '"x"'], "checkout: $.cents: an integer is needed, not a string"),
        (["checkout"], "checkout needs 'card'"),
        (["checkout", "visa"], "value 1 is not JSON; text is written '\"...\"'"),
        (["checkout", "card=visa"], "card=... is not JSON; text is written 'card=\"...\"'"),
        (["checkout", "card=1", '"x"'], "arguments by place come first"),
        (["checkout", "--kye", "x"], "no such option: --kye"),
        ([], "Missing argument 'WORKFLOW'"),
    ],
)
def test_a_mistake_at_start_is_one_sentence_and_exits_with_2(
    cli: Cli, worker: None, arguments: list[str], sentence: str
) -> None:
    """Nothing is started, nothing is printed on stdout."""

    said = cli("start", *arguments)

    assert (said.code, said.out) == (2, "")
    assert len(sentences(said.err)) == 1
    assert sentence in said.err
    assert cli("runs", "--json").json == []


def test_force_starts_what_no_live_worker_has(cli: Cli, worker: None) -> None:
    """For a run that is early, not mistyped."""

    said = cli("start", "tomorrow", "--force")

    assert said.code == 0
    assert cli("runs", "--workflow", "tomorrow", "--ids").out == said.out


def test_values_are_json_by_place_and_by_name() -> None:
    """Numbers below zero are no options; what is quoted may hold an equals sign."""

    assert parse_values(["-5", '"a=b"', "[1]", "a=null", 'b="x=y"']) == ([-5, "a=b", [1]], {"a": None, "b": "x=y"})


# --- looking ----------------------------------------------------------------------------------------------------------


def test_runs_lists_by_state_and_workflow(cli: Cli, worker: None) -> None:
    """Newest first; ids, rows with SQL names, or a table."""

    good = cli("start", "checkout", '"visa"', "--wait", "--json").json["id"]
    bad = cli("start", "checkout", '"visa"', "-1", "--wait", "--json").json["id"]

    assert cli("runs", "--ids").out.split() == [bad, good]
    assert cli("runs", "--state", "failed", "--ids").out.split() == [bad]
    assert cli("runs", "--limit", "1", "--ids").out.split() == [bad]
    assert cli("runs", "--workflow", "nap", "--json").json == []
    row = cli("runs", "--state", "succeeded", "--json").json[0]
    contract = {
        "id",
        "workflow",
        "key",
        "state",
        "queue",
        "priority",
        "waiting_for",
        "reason",
        "created_at",
        "started_at",
    }
    contract |= {"finished_at", "parent_id", "forked_from", "recoveries", "worker", "protocol", "seed"}
    assert contract <= set(row)
    assert (row["id"], row["workflow"], row["state"]) == (good, "checkout", "succeeded")
    assert good in cli("runs").out


def test_show_as_json_has_the_whole_run(cli: Cli, worker: None) -> None:
    """`{run, journal, intents, attempts}`, payloads as they are stored."""

    run_id = cli("start", "checkout", '"visa"', "--wait", "--json").json["id"]
    shown = cli("show", run_id, "--json").json

    assert list(shown) == ["run", "journal", "intents", "attempts", "observations", "requests"]
    assert (shown["run"]["input"], shown["run"]["output"]) == ({"card": "visa"}, {"card": "visa", "cents": 5})
    (entry,) = shown["journal"]
    assert (entry["seq"], entry["key"], entry["kind"], entry["outcome"]) == (1, "charge", "step", "ok")
    assert entry["output"] == {"card": "visa", "cents": 5}
    assert (shown["intents"], shown["attempts"], shown["observations"], shown["requests"]) == ([], [], [], [])


def long_run(dsn: str, entries: int) -> str:
    """A run with so many entries; one step of the middle was retried, and one that has not ended."""
    run_id = "11111111-1111-7111-8111-111111111111"
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute("insert into replaykit.runs (id, workflow) values (%s, 'long')", (run_id,))
        sql.execute(
            "insert into replaykit.journal (run_id, seq, key, name, kind, outcome, output, started_at, at, write_id)"
            " select %s, n, 'step#' || n, 'step', 'step', 'ok', to_json(n), now(), now(), gen_random_uuid()"
            " from generate_series(1, %s) n",
            (run_id, entries),
        )
        for key in ("step#100", "open"):
            sql.execute(
                "insert into replaykit.attempts (run_id, key, attempt, error, started_at, ended_at, next_at)"
                """ values (%s, %s, 1, '{"type": "E", "message": "m"}', now(), now(), now())""",
                (run_id, key),
            )
    return run_id


@pytest.mark.parametrize(("entries", "left_out"), [(200, 0), (201, 1), (2_000, 1_800)])
def test_show_draws_the_two_ends_of_a_long_journal(cli: Cli, dsn: str, entries: int, left_out: int) -> None:
    """A line between them says how many are left out; of attempts those of steps that have not ended."""

    said = cli("show", long_run(dsn, entries))
    drawn = [int(line.split()[0]) for line in said.out.splitlines() if "✓ step#" in line]
    lines = [line for line in said.out.splitlines() if "left out" in line]

    assert drawn == [n for n in range(1, entries + 1) if n <= 20 or n > entries - 180]
    assert [line.split() for line in lines] == (
        [["…", *f"{left_out:,} left out: --all draws them".split()]] if left_out else []
    )
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("retry")] == ["open"]


def test_show_with_all_draws_every_entry_and_json_has_them(cli: Cli, dsn: str) -> None:
    """However long the journal is."""

    run_id = long_run(dsn, 2_000)
    every, shown = cli("show", run_id, "--all"), cli("show", run_id, "--json").json

    numbers = [int(line.split()[0]) for line in every.out.splitlines() if "✓ step#" in line]
    assert numbers == [entry["seq"] for entry in shown["journal"]] == list(range(1, 2_001))
    assert "left out" not in every.out
    assert [attempt["key"] for attempt in shown["attempts"]] == ["step#100", "open"]


def test_show_reads_only_what_it_draws(dsn: str) -> None:
    """Two ranges of the primary key, whatever is between them."""

    run_id = uuid.UUID(long_run(dsn, 20_000))
    statement, params = shown_journal_ends(run_id, first=20, last=180)
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute("set enable_seqscan to off")
        text = "explain (analyze, format json) " + statement.text.replace("{schema}", "replaykit")
        row = sql.execute(text.encode(), params).fetchone()
    assert row is not None

    assert sum(rows_read(row[0][0]["Plan"])) < 250


def rows_read(plan: dict[str, Any]) -> Iterator[int]:
    """Rows that the scans of a plan have touched."""
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        yield (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    for part in plan.get("Plans", ()):
        yield from rows_read(part)


def test_show_draws_steps_and_the_error_with_the_users_line(cli: Cli, worker: None) -> None:
    """What a person needs to know why it failed."""

    run_id = cli("start", "checkout", '"visa"', "-1", "--wait", "--json").json["id"]
    said = cli("show", run_id)

    assert said.code == 0
    for part in (
        "checkout",
        run_id,
        "failed",
        "✗ charge",
        "CardDeclined: visa: -1",
        "shop.py:",
        'input {"card": "visa"',
    ):
        assert part in said.out


def test_show_says_what_a_run_waits_for(cli: Cli, worker: None, dsn: str) -> None:
    """And a held one why."""

    held = cli("start", "stuck", "--wait", "--json").json["id"]
    cli("start", "nap", "3600", "--key", "sleepy")
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        until(lambda: sql.execute("select 1 from replaykit.runs where state = 'waiting'").fetchone(), "the nap")

    assert "for timer until" in cli("show", "sleepy").out
    assert cli("show", held, "--json").json["run"]["reason"] in cli("show", held).out.replace("\n        ", "\n")


def test_show_draws_the_tries_of_a_step_above_its_end(cli: Cli, dsn: str) -> None:
    """Each with its error, in their order."""

    run_id = long_run(dsn, 3)
    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute("update replaykit.journal set attempt = 3 where run_id = %s and key = 'step#2'", (run_id,))
        for attempt in (2, 1):
            sql.execute(
                "insert into replaykit.attempts (run_id, key, attempt, error, started_at, ended_at, next_at) values (%s,"
                " 'step#2', %s, %s, now() - %s * interval '1 s', now(), now())",
                (run_id, attempt, json.dumps({"type": "E", "message": f"no {attempt}"}), 3 - attempt),
            )

    lines = [line.split() for line in cli("show", run_id).out.splitlines() if "step#" in line and "retry" not in line]

    assert [(line[0], line[1], line[2]) for line in lines] == [
        ("1", "✓", "step#1"),
        ("↻", "step#2", lines[1][2]),
        ("↻", "step#2", lines[2][2]),
        ("2", "✓", "step#2"),
        ("3", "✓", "step#3"),
    ]
    assert [line[-4:] for line in lines[1:3]] == [["1", "E:", "no", "1"], ["2", "E:", "no", "2"]]


def test_a_run_is_found_by_id_end_of_id_and_key(cli: Cli) -> None:
    """Six characters at least."""

    run_id = cli("start", "nap", "1", "--key", "order-42").out.strip()

    for reference in (run_id, run_id.upper(), run_id[-6:], run_id[-12:], "order-42"):
        assert cli("show", reference, "--json").json["run"]["id"] == run_id
    for reference in (run_id[-5:], str(uuid.uuid4()), "order-43"):
        said = cli("show", reference)
        assert (said.code, said.out) == (1, "")
        assert len(sentences(said.err)) == 1
        assert f"{reference}" in said.err


def test_an_end_that_two_ids_share_is_refused(cli: Cli, dsn: str) -> None:
    """More of the id is needed."""

    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        for first in "12":
            run_id = f"{first}1111111-1111-7111-8111-11111111abcd"
            sql.execute("insert into replaykit.runs (id, workflow) values (%s, 'nap')", (run_id,))

    assert "more than one" in cli("show", "11abcd").err
    assert cli("show", "11111111-1111-7111-8111-11111111abcd").code == 0


def test_workers_lists_who_lives(cli: Cli, worker: None) -> None:
    """With what they have, as a table or rows."""

    (row,) = cli("workers", "--json").json

    assert (row["state"], row["pid"], row["queues"]) == ("live", os.getpid(), ["default"])
    assert sorted(row["workflows"]) == ["checkout", "guarded", "nap", "stuck", "total"]
    assert "checkout" in cli("workers").out


def test_an_empty_list_is_a_sentence(cli: Cli) -> None:
    """And nothing on stdout; as JSON it is an empty list."""

    for command in ("runs", "workers"):
        said = cli(command)
        assert (said.code, said.out) == (0, "")
        assert len(sentences(said.err)) == 1
        assert cli(command, "--json").json == []


# --- the database -----------------------------------------------------------------------------------------------------


def test_a_database_without_the_schema_names_the_command_that_makes_it(
    cli: Cli, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL is never migrated unasked; asked twice it is done once."""

    monkeypatch.setenv("REPLAYKIT_DATABASE_URL", empty_dsn)
    said = cli("runs")
    first, second = cli("db", "migrate", "--json"), cli("db", "migrate", "--json")

    assert said.code == 1
    assert len(sentences(said.err)) == 1
    assert "replaykit db migrate" in said.err
    assert (first.json["changed"], second.json["changed"]) == (True, False)
    assert cli("runs", "--json").json == []


def test_a_newer_schema_asks_for_a_newer_replaykit(cli: Cli, dsn: str) -> None:
    """No command of ours would help."""

    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute("update replaykit.alembic_version set version_num = '9999'")

    said = cli("runs")

    assert said.code == 1
    assert "upgrade replaykit" in said.err


def test_another_schema_is_another_place(cli: Cli, dsn: str) -> None:
    """By flag."""

    assert cli("db", "migrate", "--schema", "o'ther sch%ma", "--database-url", direct(dsn)).code == 0
    started = cli("start", "nap", "1", "--schema", "o'ther sch%ma").out

    assert cli("runs", "--ids", "--schema", "o'ther sch%ma").out == started
    assert cli("runs", "--ids").out == ""


def test_an_unreachable_database_is_one_sentence_without_the_password(cli: Cli) -> None:
    """The flag wins over the variable."""

    said = cli("runs", "--database-url", "postgresql://ann:secret@127.0.0.1:1/app")

    assert (said.code, said.out) == (1, "")
    assert len(sentences(said.err)) == 1
    assert "127.0.0.1:1/app" in said.err
    assert "secret" not in said.err


@pytest.mark.parametrize("command", [("db", "migrate"), ("db", "sql"), ("runs",), ("worker", SHOP)])
@pytest.mark.parametrize("schema", ["", "pg_x", "x" * 64])
def test_a_schema_that_postgres_would_not_take_is_one_sentence(cli: Cli, command: tuple[str, ...], schema: str) -> None:
    """Before the database is asked."""

    said = cli(*command, "--schema", schema)

    assert (said.code, said.out) == (2, "")
    assert len(sentences(said.err)) == 1
    assert said.err.startswith(f"replaykit: schema name '{schema}'")


@pytest.mark.parametrize("command", [("show",), ("start",), ("runs", "--workflow"), ("runs", "--database-url")])
def test_bytes_that_are_no_text_are_one_sentence(cli: Cli, command: tuple[str, ...]) -> None:
    """Python hands them over as lone surrogates, which neither JSON nor Postgres takes."""

    said = cli(*command, os.fsdecode(b"a\xff"))

    assert (said.code, said.out) == (2, "")
    assert sentences(said.err) == ["replaykit: 'a\\udcff' is not text: it holds bytes that are no UTF-8"]


def test_a_url_that_is_no_text_is_one_sentence(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, which no parser has looked at."""

    monkeypatch.setenv("REPLAYKIT_DATABASE_URL", os.fsdecode(b"postgresql://\xff"))

    assert len(sentences(cli("runs").err)) == 1


def test_db_prints_the_url_and_the_script(cli: Cli, dsn: str) -> None:
    """For other programs, and for people who run scripts by hand."""

    assert cli("db", "url").out == f"{dsn}\n"
    assert "CREATE TABLE" in cli("db", "sql").out.upper()
    assert cli("db", "sql", "--from", "nonsense").code == 2


def test_db_psql_hands_its_arguments_on(dsn: str) -> None:
    """And its exit code back."""

    good = finished("db", "psql", "-At", "-c", "select count(*) from replaykit.runs", dsn=dsn)
    bad = finished("db", "psql", "-c", "nonsense", dsn=dsn)

    assert (good.code, good.out) == (0, "0\n")
    assert bad.code == 1


def test_without_a_url_the_embedded_postgres_is_used_and_said_to_be() -> None:
    """It migrates itself; stdout stays clean."""

    home = Path(tempfile.mkdtemp(prefix="replaykit-test-"))
    home.chmod(0o755)
    try:
        said = finished("runs", "--json", dsn=None, REPLAYKIT_HOME=str(home))
    finally:
        remove_home(home)

    assert (said.code, said.out) == (0, "[]\n")
    assert said.err == f"replaykit: no REPLAYKIT_DATABASE_URL: using the embedded Postgres in {home}\n"


# --- worker and dev ---------------------------------------------------------------------------------------------------


def until(fact: Callable[[], Any], what: str) -> Any:
    """The first true value of `fact()`; fails naming `what` after a minute."""
    deadline = time.monotonic() + 60
    while not (value := fact()):
        assert time.monotonic() < deadline, f"not within a minute: {what}"
        time.sleep(0.02)
    return value


def test_worker_executes_runs_until_it_is_told_to_stop(dsn: str, cli: Cli) -> None:
    """Its log is JSON on stderr if asked; SIGTERM ends it with 0."""

    child = process("worker", SHOP, "--log-format", "json", "--queue", "slow", "--lease-seconds", "3", dsn=dsn)
    try:
        until(lambda: [w for w in cli("workers", "--json").json if w["state"] == "live"], "a live worker")
        said = cli("start", "checkout", '"visa"', "--queue", "slow", "--wait")
    finally:
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)

    assert said[:2] == (0, '{"card": "visa", "cents": 5}\n')
    assert (child.returncode, out) == (0, "")
    assert {"event", "level", "timestamp"} <= set(json.loads(err.splitlines()[0]))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "there is no file"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "there is no workflow in"),
    ],
)
@pytest.mark.parametrize("command", ["worker", "dev"])
def test_a_module_that_cannot_be_used_exits_with_2(
    dsn: str, tmp_path: Path, command: str, source: str | None, sentence: str
) -> None:
    """With the user's traceback, not ours."""

    module = tmp_path / "broken.py"
    if source is not None:
        module.write_text(source)
    said = finished(command, str(module), dsn=dsn)

    assert (said.code, said.out) == (2, "")
    assert sentence in said.err
    assert "replaykit/" not in said.err.replace(str(tmp_path), "")
    assert sentence in said.err[said.err.rindex("replaykit: ") :]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_module"], "replaykit: there is no module 'no_such_module' (No module named 'no_such_module')"),
        ([SHOP, "--lifespan", "nowhere"], "replaykit: 'nowhere' is not of the form MODULE:NAME"),
        ([SHOP, "--lifespan", f"{SHOP}:gone"], f"replaykit: there is no 'gone' in {SHOP}"),
    ],
)
def test_a_workers_mistake_is_the_last_word_on_stderr(dsn: str, arguments: list[str], sentence: str) -> None:
    """After the log lines of a parent and children that have ended."""

    said = finished("worker", *arguments, "--processes", "2", dsn=dsn)

    assert (said.code, said.out) == (2, "")
    assert sentences(said.err)[-1] == sentence
    assert said.err.count("replaykit: ") == 1


@pytest.mark.parametrize("module", ["no_such_module", "no_such_file.py", "no.such.module"])
def test_a_module_that_is_not_there_is_the_only_word_on_stderr(dsn: str, module: str) -> None:
    """The parent can see that without a child."""

    said = finished("worker", module, dsn=dsn)

    assert (said.code, said.out) == (2, "")
    assert len(sentences(said.err)) == 1 and module in said.err


def test_a_lifespan_that_fails_is_the_last_word_on_stderr(dsn: str) -> None:
    """With the traceback of the user's lines."""

    said = finished("worker", SHOP, "--lifespan", "tests.runtime.slow_flows:broken_lifespan", dsn=dsn)
    last = said.err[said.err.index("replaykit: ") :]

    assert said.code == 2
    assert last.startswith("replaykit: the lifespan tests.runtime.slow_flows:broken_lifespan failed:\nTraceback")
    assert last.endswith("ConnectionRefusedError: no redis here\n")


@pytest.mark.parametrize("command", ["worker", "dev"])
def test_fewer_than_two_heartbeats_a_lease_are_refused_at_once(cli: Cli, command: str) -> None:
    """With both values, whichever of them was given."""

    said = cli(command, SHOP, "--lease-seconds", "4", "--heartbeat-seconds", "3")

    assert (said.code, said.out) == (2, "")
    assert sentences(said.err)[0].startswith(
        "replaykit: --heartbeat-seconds: heartbeat_seconds (3) must be at most half of lease_seconds (4)"
    )
    assert len(sentences(said.err)) == 1


def test_a_setting_out_of_range_is_named_by_its_flag(cli: Cli) -> None:
    """Before anything is started."""

    said = cli("worker", SHOP, "--lease-seconds", "0.1")

    assert said.code == 2
    assert len(sentences(said.err)) == 1
    assert "--lease-seconds" in said.err


def test_every_setting_has_a_flag_and_a_variable() -> None:
    """`limits.Settings` is the list; the command line keeps its own, so as not to import pydantic for `--help`."""

    kinds = {name: "int" if kind is int else "float" for name, (kind, _) in SETTINGS.items()}

    assert set(kinds) == set(Settings.model_fields)
    assert all(kinds[name] in str(field.annotation) for name, field in Settings.model_fields.items())


@pytest.mark.parametrize("level", [None, "info"])
def test_dev_works_runs_in_this_terminal_and_draws_them(dsn: str, level: str | None) -> None:
    """On a terminal; Ctrl-C ends it. Lines of the log stand above the view if they were asked for."""

    parent, terminal = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "REPLAYKIT_DATABASE_URL": dsn,
        "TERM": "xterm",
        "COLUMNS": "150",
    }
    program = "from replaykit.interfaces.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "dev", SHOP, *(["--log-level", level] if level else [])],
        env=environment,
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    seen = bytearray()
    reader = threading.Thread(target=_read, args=(parent, seen))
    reader.start()
    try:

        async def start() -> Any:
            async with Client(dsn) as client:
                return await (await client.start(checkout, "visa")).result(timeout=60)

        asyncio.run(start())
        until(lambda: b"succeeded" in seen, "the run in the live view")
    finally:
        child.send_signal(signal.SIGINT)
        code = child.wait(timeout=60)
        reader.join(timeout=10)
        os.close(parent)

    assert code == 0
    assert b"running checkout, guarded, nap, stuck, total" in seen
    assert b"Traceback" not in seen
    assert (b"worker_started" in seen) is (level == "info")


def _read(terminal: int, seen: bytearray) -> None:
    with contextlib.suppress(OSError):  # the last writer has closed the terminal
        while data := os.read(terminal, 65_536):
            seen += data


def test_watching_a_run_ends_with_it(cli: Cli, worker: None) -> None:
    """`show --watch` of a run that has ended draws it once."""

    run_id = cli("start", "checkout", '"visa"', "--wait", "--json").json["id"]

    assert "✓ charge" in cli("show", run_id, "--watch").out


# --- the whole --------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_that_is_slow() -> None:
    """A person waits for `--help` and for the shell's completion."""

    program = (
        "import sys; from replaykit.interfaces.cli import run; code = run(['start', '--help']); "
        "slow = {'psycopg', 'pydantic', 'sqlalchemy', 'alembic', 'rich', 'structlog', 'asyncio'} & set(sys.modules); "
        "sys.exit(str(slow) if slow else code)"
    )
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (child.returncode, child.stderr) == (0, "")
    assert "--wait" in child.stdout


def test_a_reader_that_leaves_early_is_no_error(dsn: str, cli: Cli) -> None:
    """`replaykit runs | head -1` ends quietly."""

    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        sql.execute(
            "insert into replaykit.runs (id, workflow) select gen_random_uuid(), 'w' from generate_series(1, 5000)"
        )
    child = process("runs", "--json", "--limit", "5000", dsn=dsn)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()

    assert (child.wait(timeout=60), child.stderr.read()) == (0, "")
    child.stderr.close()


def test_without_arguments_the_help_is_shown(cli: Cli) -> None:
    """And an unknown command is one sentence."""

    assert "Commands:" in cli().out
    said = cli("strat")
    assert said.code == 2
    assert len(sentences(said.err)) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0 ms"),
        (0.0124, "12 ms"),
        (0.9999, "1.0 s"),
        (2.54, "2.5 s"),
        (59.97, "1 min"),
        (250, "4 min 10 s"),
        (7_200, "2 h"),
        (183_600, "2 d 3 h"),
    ],
)
def test_a_duration_is_in_the_unit_that_a_person_would_use(seconds: float | None, text: str) -> None:
    """Two units at most."""

    assert duration(seconds) == text


def test_moments_and_values_are_short() -> None:
    """For a line of a table."""

    assert ago("2999-01-01T00:00:00+00:00").startswith("in ")
    assert ago("2020-01-01T00:00:00+00:00").endswith(" ago")
    assert ago(None) == ""
    assert one_line({"a": "x" * 100}, 20) == '{"a": "xxxxxxxxxxxx…'

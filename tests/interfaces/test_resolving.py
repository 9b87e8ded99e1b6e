"""`replaykit resolve`, `find`, and what `show` says of calls in doubt and of what a saga has undone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json

from tests.direct import direct
from tests.interfaces.conftest import Cli, sentences
from tests.interfaces.launching import FOLDER
from tests.interfaces.running import Running
from tests.runtime.facts import eventually

Sql = psycopg.Connection[tuple[Any, ...]]

ERROR = {"type": "bank.Timeout", "message": "no answer", "line": "shop.py:7"}


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    """The database beside the command line."""
    with psycopg.connect(direct(dsn), autocommit=True, options="-c search_path=replaykit") as connection:
        yield connection


def held_run(sql: Sql, key: str | None = None) -> str:
    """A run that is held, as a worker leaves it."""
    run_id = str(uuid.uuid4())
    sql.execute(
        "insert into runs (id, workflow, key, state, reason, started_at, protocol)"
        " values (%s, 'order', %s, 'held', 'nobody knows', now(), 1)",
        (run_id, key),
    )
    sql.execute("insert into payloads (run_id, input) values (%s, '{}')", (run_id,))
    return run_id


def intent(sql: Sql, run_id: str, key: str = "pay", **columns: Any) -> None:
    """One of its calls: in doubt for a minute and a half."""
    name = key.rpartition(":")[2]
    row = {"run_id": run_id, "key": key, "attempt": 1, "name": name, "effect": "irreversible", "state": "unknown"}
    row |= {"idempotency_key": "k-1", "input": Json({"card": "visa"}), "write_id": uuid.uuid4()}
    row |= {"written_at": "2030-01-01 12:00:00+00", "doubt_at": "2030-01-01 12:01:30+00", **columns}
    sql.execute(
        f"insert into intents ({', '.join(row)}) values ({', '.join(['%s'] * len(row))})".encode(), list(row.values())
    )


def observation(sql: Sql, run_id: str, kind: str, value: str, key: str = "pay") -> None:
    sql.execute(
        "insert into observations (run_id, key, attempt, kind, value, observed_at) values (%s, %s, 1, %s, %s, now())",
        (run_id, key, kind, value),
    )


# --- a word -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "word", "value"),
    [
        (["--landed", '{"cents": 5}'], "landed", {"cents": 5}),
        (["--landed", "null"], "landed", None),
        (["--landed", '"\\u0000"'], "landed", "\ufdd0\ufdd2"),
        (["--not-landed"], "not_landed", None),
        (["--fail"], "fail", None),
    ],
)
def test_the_run_goes_on_and_the_word_is_kept(
    cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch, option: list[str], word: str, value: Any
) -> None:
    """Who said it, without `--by` the login name, and why; found by id, by its end, by key."""
    monkeypatch.setenv("LOGNAME", "bob")
    run_id = held_run(sql, key="order-42")
    intent(sql, run_id)

    said = cli("resolve", run_id[-8:], "pay", *option, "--by", "ada", "--comment", "saw it")

    assert said == (0, f"{run_id} pending\n", "")
    assert sql.execute("select body, sent_by from mailbox").fetchall() == [
        ({"key": "pay", "attempt": 1, "word": word, "value": value, "error": None, "comment": "saw it"}, "ada")
    ]
    assert cli("resolve", "order-42", "pay", *option, "--json").json == {"id": run_id, "state": "pending"}
    (request,) = cli("show", run_id, "--json").json["requests"]
    assert (request["kind"], request["sent_by"], request["name"]) == ("resolve", "ada", "pay")
    drawn = cli("show", run_id).out
    assert "asked   resolve of pay by ada (" in drawn
    said_so = f"{word.replace('_', ' ')} with " if word == "landed" else word.replace("_", " ")
    assert f" ago): {said_so}" in drawn
    assert "(saw it)" in drawn
    assert "doubt   " not in drawn


def test_the_login_name_is_who_says_it(cli: Cli, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the other verbs."""
    monkeypatch.setenv("LOGNAME", "bob")
    run_id = held_run(sql)
    intent(sql, run_id)

    cli("resolve", run_id, "pay", "--fail")

    assert sql.execute("select sent_by, body ->> 'comment' from mailbox").fetchall() == [("bob", None)]


def test_another_word_is_refused_and_names_the_first(cli: Cli, sql: Sql) -> None:
    """One sentence, exit code 1."""
    run_id = held_run(sql)
    intent(sql, run_id)
    cli("resolve", run_id, "pay", "--not-landed", "--by", "ada")

    said = cli("resolve", run_id, "pay", "--fail", "--by", "bob")

    assert (said.code, said.out, len(sentences(said.err))) == (1, "", 1)
    assert f"replaykit: 'pay' of run {run_id} has a word already: ada said not_landed at " in said.err


def test_what_is_not_there_takes_no_word(cli: Cli, sql: Sql) -> None:
    """A run, a call of it."""
    run_id = held_run(sql)

    for arguments, sentence in (
        (("nobody", "pay"), "no run has the id or key 'nobody'"),
        ((run_id, "pay"), f"'pay' of run {run_id} has written no intent: the view in_doubt lists what is in doubt"),
    ):
        said = cli("resolve", *arguments, "--fail")
        assert (said.code, said.out, said.err) == (1, "", f"replaykit: {sentence}\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "say exactly one of --landed JSON, --not-landed and --fail"),
        (["--fail", "--not-landed"], "say exactly one of --landed JSON, --not-landed and --fail"),
        (["--fail", "--landed", "1"], "say exactly one of --landed JSON, --not-landed and --fail"),
        (["--landed"], "Option '--landed' requires an argument"),
        (["--landed", "s3cret"], "--landed is not JSON; text is written --landed '\"...\"'"),
        (["--landed", "NaN"], "--landed is not JSON"),
        (["--landed", "[" * 200 + "]" * 200], "nested more than"),
        (["--landed", "1" * 5000], "--landed is not JSON"),
        (["--fail", "--unknown"], "No such option"),
    ],
    ids=range(9),
)
def test_a_mistake_is_one_sentence_and_exits_with_2(cli: Cli, sql: Sql, options: list[str], sentence: str) -> None:
    """Nothing is asked, and the value is not repeated: it may be a secret."""
    run_id = held_run(sql)
    intent(sql, run_id)

    said = cli("resolve", run_id, "pay", *options)

    assert (said.code, said.out, len(sentences(said.err))) == (2, "", 1)
    assert sentence in said.err
    assert "s3cret" not in said.err
    assert sql.execute("select * from mailbox").fetchall() == []


# --- find -------------------------------------------------------------------------------------------------------------


def test_an_identifier_is_found_in_every_run(cli: Cli, sql: Sql) -> None:
    """By kind and value, and by the value alone; a value may have a colon of its own."""
    first, second = held_run(sql, key="order-42"), held_run(sql)
    observation(sql, first, "ticket", "123", key="=K")
    observation(sql, second, "invoice", "123")
    observation(sql, second, "arn", "aws:s3")

    (row,) = cli("find", "ticket:123", "--json").json
    assert {name: row[name] for name in ("run_id", "key", "attempt", "kind", "value", "workflow", "run_key")} == {
        "run_id": first,
        "key": "=K",
        "attempt": 1,
        "kind": "ticket",
        "value": "123",
        "workflow": "order",
        "run_key": "order-42",
    }
    assert row["observed_at"]
    assert [r["kind"] for r in cli("find", "123", "--json").json] == ["ticket", "invoice"]
    assert [r["run_id"] for r in cli("find", "aws:s3", "--json").json] == [second]
    assert [r["run_id"] for r in cli("find", "arn:aws:s3", "--json").json] == [second]
    head, line = cli("find", "ticket:123").out.splitlines()
    assert head.split() == ["run", "step", "try", "kind", "value", "observed"]
    assert line.split()[:5] == [first, "=K", "1", "ticket", "123"]


@pytest.mark.parametrize("what", ["ticket:124", "ticket:", ":123", "", "ticket"])
def test_nothing_that_was_observed_is_said_so(cli: Cli, sql: Sql, what: str) -> None:
    """No mistake: the list is empty."""
    observation(sql, held_run(sql), "ticket", "123")

    assert cli("find", what) == (0, "", f"replaykit: no step has observed {what}\n")
    assert cli("find", what, "--json").json == []


# --- show -------------------------------------------------------------------------------------------------------------


def test_a_call_in_doubt_is_drawn_with_all_that_a_person_needs(cli: Cli, sql: Sql) -> None:
    """When it may have landed, by what it is found outside, and the commands to copy."""
    run_id = held_run(sql)
    intent(sql, run_id, "1/pay#2", evidence=Json({"error": ERROR}))
    intent(sql, run_id, "done", state="landed", doubt_at=None, resolved_at="2030-01-01 12:00:01+00")
    observation(sql, run_id, "ticket", "123", key="1/pay#2")

    drawn = cli("show", run_id).out

    lines = [line.strip() for line in drawn.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("doubt"))
    assert lines[start].startswith("doubt   1/pay#2 (attempt 1, irreversible) may have landed between 2030-01-01 ")
    assert "(1 min 30 s, " in lines[start]
    assert lines[start + 1 : start + 8] == [
        "idempotency key k-1",
        'input {"card": "visa"}',
        "observed ticket:123",
        "it ended with bank.Timeout: no answer (shop.py:7)",
        f"replaykit resolve {run_id} '1/pay#2' --landed JSON   # it happened, and the step returns this",
        f"replaykit resolve {run_id} '1/pay#2' --not-landed   # it did not: its error is raised",
        f"replaykit resolve {run_id} '1/pay#2' --fail   # nobody knows: the step raises InDoubt",
    ]
    assert drawn.count("doubt   ") == 1


def test_an_open_call_of_a_held_run_is_in_doubt(cli: Cli, sql: Sql) -> None:
    """Its worker died; until when it may have landed is not known. A key that begins like an option can be copied, too."""
    run_id = held_run(sql)
    intent(sql, run_id, "-x", state="open", doubt_at=None)

    drawn = cli("show", run_id).out

    assert "doubt   -x (attempt 1, irreversible) may have landed after 2030-01-01 " in drawn
    assert f"replaykit resolve --not-landed -- {run_id} -x   # it did not: the body runs again" in drawn
    said = cli("resolve", "--not-landed", "--", run_id, "-x")
    assert said.out == f"{run_id} pending\n"
    assert "doubt   " not in cli("show", run_id).out


def test_what_was_and_was_not_undone_is_drawn(cli: Cli, sql: Sql) -> None:
    """Of a held run: the entries of its undoings, and the one that failed, with the way out."""
    run_id = held_run(sql)
    for seq, (key, outcome) in enumerate((("pay", "ok"), ("ship#2", "ok"), ("post", "error")), 1):
        sql.execute(
            "insert into journal (run_id, seq, key, name, kind, outcome, error, at, write_id)"
            " values (%s, %s, %s, 'give_back', 'step', %s, %s, now(), gen_random_uuid())",
            (run_id, seq, f"~undo:{key}", outcome, Json(ERROR) if outcome == "error" else None),
        )
    intent(sql, run_id, "~undo:reserve", name="release", effect="repeatable", evidence=Json({"error": ERROR}))

    drawn = cli("show", run_id).out

    assert "undone  pay by give_back (entry 1)" in drawn
    assert "undone  ship#2 by give_back (entry 2)" in drawn
    assert "not     undone: post, give_back (entry 3) failed" in drawn
    assert "doubt   reserve is not undone: release failed " in drawn
    assert "it ended with bank.Timeout: no answer (shop.py:7)" in drawn
    assert f"replaykit retry {run_id}   # release runs again" in drawn
    assert f"replaykit resolve {run_id} '~undo:reserve' --landed null   # it is undone: go on" in drawn
    assert f"replaykit resolve {run_id} '~undo:reserve' --fail   # it cannot be undone: go on with the rest" in drawn


def test_json_has_all_of_it(cli: Cli, sql: Sql) -> None:
    """Intents and observations by their SQL names."""
    run_id = held_run(sql)
    intent(sql, run_id)
    observation(sql, run_id, "ticket", "123")

    shown = cli("show", run_id, "--json").json

    assert list(shown) == ["run", "journal", "intents", "attempts", "observations", "requests"]
    (row,) = shown["intents"]
    assert (row["key"], row["state"], row["idempotency_key"], row["input"]) == (
        "pay",
        "unknown",
        "k-1",
        {"card": "visa"},
    )
    assert [(o["key"], o["kind"], o["value"]) for o in shown["observations"]] == [("pay", "ticket", "123")]


# --- under a real worker ----------------------------------------------------------------------------------------------


@pytest.fixture
def worker(dsn: str, tmp_path: Path) -> Iterator[Running]:
    running = Running("worker", "tests.interfaces.launching", dsn=dsn, **{FOLDER: str(tmp_path)})
    yield running
    running.end()


def state_of(sql: Sql, run_id: str) -> str:
    row = sql.execute("select state from runs where id = %s", [run_id]).fetchone()
    return str(row[0]) if row is not None else ""


@pytest.mark.parametrize(
    ("option", "output", "calls"),
    [
        (["--landed", '"seen"'], "seen", 1),
        (["--not-landed"], "launched as attempt 2", 2),
        (["--fail"], "in doubt", 1),
    ],
    ids=["landed", "not landed", "fail"],
)
def test_a_worker_dies_in_the_call_and_a_person_says_what_became_of_it(
    cli: Cli, sql: Sql, worker: Running, tmp_path: Path, option: list[str], output: str, calls: int
) -> None:
    """The command that `show` gives; the run goes on at once."""
    run_id = cli("start", "lift_off", '"moon"', "--force").out.strip()
    eventually(lambda: state_of(sql, run_id) == "held", "it is held")
    assert f"replaykit resolve {run_id} launch --landed JSON" in cli("show", run_id).out

    cli("resolve", run_id, "launch", *option, "--by", "ada")

    eventually(lambda: state_of(sql, run_id) == "succeeded", "it has ended")
    shown = cli("show", run_id, "--json").json
    assert shown["run"]["output"] == output
    assert shown["requests"][0]["entry"] == (None if calls == 2 else 1)
    assert calls == 2 or "says ada" in cli("show", run_id).out
    keys = (tmp_path / "calls").read_text().split()
    assert (len(keys), len(set(keys))) == (calls, 1)

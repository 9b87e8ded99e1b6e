"""The checker finds nothing in a healthy database, and each fault that is planted in one."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from replaykit.testing import checker
from tests.conftest import Connection, fresh_database, with_database
from tests.crash.rows import Rows
from tests.faults.healthy import Healthy, dump, make

Lines = list[dict[str, Any]]

RUN = "run_id = (select id from runs where key = '{}')"


def of(key: str) -> str:
    """SQL: rows of the run of that key."""
    return RUN.format(key)


@pytest.fixture(scope="module")
def healthy(server_dsn: str, server_connection: Connection, template_database: str) -> Iterator[Healthy]:
    """The one that is copied."""
    with fresh_database(server_connection, template_database) as name:
        yield make(with_database(server_dsn, name))


@pytest.fixture
def copy(server_dsn: str, server_connection: Connection, healthy: Healthy) -> Iterator[Healthy]:
    """A database with everything in it, for one test."""
    with fresh_database(server_connection, healthy.dsn.rpartition("/")[2].partition("?")[0]) as name:
        copied = Healthy(with_database(server_dsn, name))
        copied.calls, copied.acknowledged = deepcopy(healthy.calls), deepcopy(healthy.acknowledged)
        yield copied


def look(tmp_path: Path, database: Healthy) -> int:
    """The checker's exit code."""
    for name, lines in (("calls", database.calls), ("acknowledged", database.acknowledged)):
        (tmp_path / name).write_text(dump(lines))
    files = ["--calls", str(tmp_path / "calls"), "--acknowledged", str(tmp_path / "acknowledged")]
    return checker.main([database.dsn, *files])


def test_a_healthy_database_breaks_no_rule(copy: Healthy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Effects, doubts, words, sagas, rewinds, cancels, tries, timers, cheap steps: all of it is allowed."""
    code = look(tmp_path, copy)

    said = capsys.readouterr().out
    assert (code, said.count("\n")) == (0, 1), said
    assert said.endswith("calls: no rule is broken\n")


def test_it_is_a_command(copy: Healthy, tmp_path: Path) -> None:
    """It exits with 1 and a line for each broken rule; with 2 and a sentence where it cannot look."""
    rows = Rows(copy.dsn)
    rows.ask("update payloads set output = null where " + of("plain"))
    rows.close()

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "replaykit.testing.checker", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    found = ran(copy.dsn)
    assert found.returncode == 1, found.stderr
    assert [line.partition(":")[0] for line in found.stdout.splitlines()[:-1]] == ["state"]
    assert found.stdout.splitlines()[-1].endswith("1 times a rule is broken")
    nowhere = ran(copy.dsn, "--schema", "elsewhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "not set up" in nowhere.stderr.splitlines()[-1]
    (tmp_path / "calls").write_text('{"run": 3, "key": "a"}\n')
    unread = ran(copy.dsn, "--calls", str(tmp_path / "calls"))
    assert (unread.returncode, unread.stdout) == (2, "")
    assert "line 1: run is 3" in unread.stderr


INTENT = (
    "insert into intents (run_id, key, attempt, name, effect, idempotency_key, input, state, written_at, resolved_at, write_id)"
    " select run_id, {key}, {attempt}, name, effect, idempotency_key, input, 'landed', written_at, resolved_at, write_id"
    " from intents where {where}"
)

PLANTED: list[tuple[str, str, str]] = [
    ("key-once", "two entries of one step", f"update journal set key = 'note' where key = 'note#2' and {of('plain')}"),
    ("reuse", "a result of another step", f"update journal set reuses = 1 where reuses is not null and {of('sent')}"),
    (
        "reuse",
        "a repeated result that is another",
        f"""update journal set output = '"forged"' where reuses is not null and {of("sent")}""",
    ),
    (
        "reuse",
        "a step that ran again although its result was set aside only",
        f"update journal set reuses = null where reuses is not null and {of('sent')}",
    ),
    (
        "open-intent",
        "an open intent of a run that succeeded",
        f"update intents set state = 'open', resolved_at = null where key = 'charge' and {of('pays')}",
    ),
    (
        "open-intent",
        "a question about a run that succeeded",
        "update intents set state = 'unknown', resolved_at = null, resolved_by = null, doubt_at = now()"
        f" where {of('wired')}",
    ),
    (
        "entry-of-intent",
        "a result of a call that did not land",
        f"update intents set state = 'not_landed' where key = 'charge' and {of('pays')}",
    ),
    (
        "entry-of-intent",
        "a call that landed without a result",
        INTENT.format(key="'lost'", attempt="1", where=f"key = 'reserve' and {of('pays')}"),
    ),
    (
        "entry-of-intent",
        "an intent that was written after its entry",
        f"update intents set written_at = written_at + interval '1 h' where key = 'charge' and {of('pays')}",
    ),
    (
        "second-intent",
        "a second call after the first landed",
        INTENT.format(key="key", attempt="2", where=f"key = 'charge' and {of('pays')}"),
    ),
    ("undo", "an undoing that its step does not know of", f"update intents set state = 'landed' where {of('tours')}"),
    (
        "undo",
        "an undoing of what was not done",
        f"update journal set key = '~undo:boat' where key = '~undo:hotel' and {of('tours')}",
    ),
    ("linear", "a hole", f"delete from journal where seq = 2 and {of('plain')}"),
    (
        "linear",
        "a clock that goes back",
        f"update journal set at = at - interval '1 day' where seq = 3 and {of('plain')}",
    ),
    (
        "timer",
        "a timer before its deadline",
        f"update journal set due_at = at + interval '1 s' where kind = 'timer' and {of('plain')}",
    ),
    (
        "timer",
        "an entry before the start",
        "update runs set started_at = started_at + interval '1 day' where key = 'plain'",
    ),
    (
        "one-key",
        "two steps of one key",
        f"update journal set idempotency_key = (select idempotency_key from journal where key = 'note' and {of('plain')})"
        f" where key = 'note#2' and {of('plain')}",
    ),
    (
        "one-key",
        "an intent of another key than its entry",
        f"update intents set idempotency_key = 'another' where key = 'charge' and {of('pays')}",
    ),
    (
        "one-key",
        "two intents of one key",
        "update intents i set idempotency_key = o.idempotency_key from intents o"
        f" where i.key = 'charge#3' and o.key = 'charge' and i.run_id = o.run_id and i.{of('pays')}",
    ),
    ("writers", "a second writer", f"update journal set worker = gen_random_uuid() where seq = 2 and {of('plain')}"),
    (
        "after-the-end",
        "an entry after the end",
        f"update journal set recorded_at = recorded_at + interval '1 day' where seq = 1 and {of('plain')}",
    ),
    (
        "after-the-end",
        "an entry of a run that was never started",
        "update journal set run_id = (select id from runs where key = 'never') where seq = 1 and " + of("plain"),
    ),
    (
        "leased",
        "a worker that nobody knows",
        "update runs set state = 'running', waiting_for = null, lease_token = gen_random_uuid(), worker = gen_random_uuid()"
        " where key = 'asleep'",
    ),
    (
        "letter",
        "an answer without a letter",
        f"update journal set mailbox_id = 999999 where kind = 'cancel' and {of('woken')}",
    ),
    ("letter", "an answer of another kind", f"update mailbox set kind = 'signal' where {of('woken')}"),
    (
        "letter",
        "an answer before the letter",
        f"update mailbox set sent_at = now() + interval '1 h' where {of('woken')}",
    ),
    (
        "letter",
        "a word that is answered twice",
        f"update journal set mailbox_id = (select id from mailbox where {of('sent')}), kind = 'step', to_seq = null"
        f" where kind = 'rewind' and {of('sent')}; update journal j set mailbox_id = (select id from mailbox where {of('sent')})"
        f" where reuses is null and kind = 'step' and {of('sent')}",
    ),
    ("letter", "a word that is not there", f"delete from mailbox where kind = 'resolve' and {of('wired')}"),
    (
        "unheard",
        "a request to go on of a run that ended",
        "insert into mailbox (run_id, kind, name, body) select id, 'retry', 'retry', '{\"from\": \"failed\"}' from runs"
        " where key = 'tours'",
    ),
    ("unheard", "a cancel that nobody asked for", f"delete from mailbox where {of('later')}"),
    ("asleep", "a timer that nobody sets", "update runs set available_at = 'infinity' where key = 'asleep'"),
    ("state", "a success without output", f"update payloads set output = null where {of('plain')}"),
    ("state", "a failure without error", f"update payloads set error = null where {of('tours')}"),
    ("state", "a run without payloads", f"delete from payloads where {of('never')}"),
    ("try-order", "a try after the result", f"update attempts set attempt = 9 where attempt = 2 and {of('plain')}"),
    ("orphan", "a journal of no run", "delete from runs where key = 'plain'"),
    ("orphan", "payloads of no run", "insert into payloads (run_id, input) values (gen_random_uuid(), '{}')"),
    ("lost-start", "a run that is gone", "delete from runs where key = 'never'"),
    ("lost-entry", "an entry that is gone", f"delete from journal where seq = 1 and {of('asleep')}"),
    (
        "lost-end",
        "an end that is gone",
        "update runs set state = 'pending', finished_at = null where key = 'plain'",
    ),
    ("lost-letter", "a request that is gone", f"delete from mailbox where {of('woken')}"),
]


@pytest.mark.parametrize(("rule", "sql"), [(r, s) for r, _, s in PLANTED], ids=[f"{r}: {w}" for r, w, _ in PLANTED])
def test_a_planted_row_is_found(
    copy: Healthy, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, sql: str
) -> None:
    """It exits with 1 and names the rule."""
    rows = Rows(copy.dsn)
    for statement in sql.split("; "):
        rows.ask(statement.replace("%", "%%"))
    rows.close()

    code = look(tmp_path, copy)

    found = capsys.readouterr().out
    assert (code, rule in named(found)) == (1, True), found


def named(said: str) -> set[str]:
    """The rules that it names."""
    return {line.partition(":")[0] for line in said.splitlines()[:-1]}


def call_of(lines: Lines, key: str) -> dict[str, Any]:
    """The first call of that step."""
    return next(line for line in lines if line["key"] == key)


def late(calls: Lines) -> None:
    """A body is called an hour after its entry."""
    calls.append({**call_of(calls, "note"), "at": call_of(calls, "note")["at"] + 3600})


def many(calls: Lines) -> None:
    """A body is called without end."""
    calls += [{**call_of(calls, "note"), "at": None}] * 5


def unannounced(calls: Lines) -> None:
    """An attempt that no intent knows."""
    call_of(calls, "reserve")["attempt"] = 7


def undeclared(calls: Lines) -> None:
    """An attempt is made as another kind of call than its intent says."""
    call_of(calls, "reserve")["effect"] = "irreversible"


def hasty(calls: Lines) -> None:
    """An attempt is made before its intent is written."""
    call_of(calls, "charge")["at"] -= 1


def early(calls: Lines) -> None:
    """A body is called before its run is started."""
    call_of(calls, "note")["at"] -= 3600


def twice(calls: Lines) -> None:
    """An irreversible attempt is called twice."""
    calls.append(dict(call_of(calls, "charge")))


def twice_done(calls: Lines) -> None:
    """Two attempts of an irreversible step land."""
    calls.append({**call_of(calls, "charge"), "attempt": 2})


def undone(calls: Lines) -> None:
    """What is said to have landed did not."""
    call_of(calls, "charge")["did"] = False


def done(calls: Lines) -> None:
    """What is said not to have landed did."""
    call_of(calls, "charge#3")["did"] = True


def renamed(calls: Lines) -> None:
    """A call bears another step's key."""
    call_of(calls, "charge")["idempotency_key"] = call_of(calls, "reserve")["idempotency_key"]


def of_nobody(calls: Lines) -> None:
    """A call of a run that is not there."""
    call_of(calls, "note")["run"] = str(uuid.uuid4())


PLANTED_CALLS: list[tuple[str, Callable[[Lines], None]]] = [
    ("call-after-entry", late),
    ("too-many-calls", many),
    ("call-without-intent", unannounced),
    ("call-without-intent", undeclared),
    ("call-without-intent", hasty),
    ("timer", early),
    ("two-calls", twice),
    ("two-calls", twice_done),
    ("landed-unsaid", undone),
    ("landed-unsaid", done),
    ("one-key", renamed),
    ("call-of-nobody", of_nobody),
]


@pytest.mark.parametrize(("rule", "plant"), PLANTED_CALLS)
def test_a_planted_call_is_found(
    copy: Healthy, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, plant: Callable[[Lines], None]
) -> None:
    """It exits with 1 and names the rule."""
    plant(copy.calls)

    code = look(tmp_path, copy)

    found = capsys.readouterr().out
    assert (code, rule in named(found)) == (1, True), found


def test_a_call_that_is_excused_is_left_out(copy: Healthy, tmp_path: Path) -> None:
    """Of a process that was stopped past its lease and continued: nothing can prevent it."""
    late(copy.calls)
    copy.calls[-1]["excused"] = True

    assert look(tmp_path, copy) == 0


def test_every_rule_has_a_fault_that_breaks_it() -> None:
    """And is on the page."""
    planted = {rule for rule, _, _ in PLANTED} | {rule for rule, _ in PLANTED_CALLS}

    assert planted == set(checker.RULES)
    assert all(f"    {rule} " in (checker.__doc__ or "") for rule in checker.RULES)


def test_help_lists_the_rules_and_what_the_files_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody needs to look into the source."""
    with pytest.raises(SystemExit):
        checker.main(["--help"])

    said = capsys.readouterr().out
    assert all(f"    {rule} " in said for rule in checker.RULES)
    assert '"letter": "cancel", "number": 1}' in said


RUN_ID = str(uuid.uuid4())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("x", "line 1 is no JSON object: 'x'"),
        ({"key": "a"}, "line 1 has no run"),
        ({"run": 3, "key": "a"}, "line 1: run is 3, and no run's id"),
        ({"run": RUN_ID}, "line 1 has no key"),
        ({"run": RUN_ID, "key": "a", "did": "yes"}, 'line 1: did is "yes", and no true or false'),
        ({"run": RUN_ID, "key": "a", "at": float("inf")}, "line 1: at is Infinity, and no moment"),
        ({"run": RUN_ID, "key": "a", "attempt": True}, "line 1: attempt is true, and no whole number"),
        ({"run": RUN_ID, "key": "a", "effect": "grave"}, 'line 1: effect is "grave", and no effect='),
        ({"run": RUN_ID, "key": "a", "effects": "irreversible"}, "line 1: 'effects' is none of run, key, attempt"),
    ],
)
def test_a_call_that_cannot_be_read_is_told(line: Any, sentence: str) -> None:
    """A name that is not known would be a check that is not made."""
    with pytest.raises(ValueError, match=sentence):
        checker.read_calls([line if isinstance(line, str) else json.dumps(line)])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"run": RUN_ID, "seq": 1}, "line 2: an entry has both, seq and key"),
        ({"run": RUN_ID, "seq": 1.5, "key": "a"}, "line 2: seq is 1.5, and no whole number"),
        ({"run": RUN_ID, "state": "asleep"}, 'line 2: state is "asleep", and no state'),
        ({"run": RUN_ID, "letter": "love"}, 'line 2: letter is "love", and no kind of a letter'),
        ({"run": RUN_ID, "number": 2}, "line 2: number is of a letter"),
    ],
)
def test_an_acknowledgement_that_cannot_be_read_is_told(line: dict[str, Any], sentence: str) -> None:
    """With its line."""
    with pytest.raises(ValueError, match=sentence):
        checker.read_acknowledged([json.dumps({"run": RUN_ID}), json.dumps(line)])


def test_what_is_null_in_a_line_is_not_said() -> None:
    """An outside server need not know everything."""
    ((call,),) = checker.read_calls([json.dumps({"run": RUN_ID, "key": "a", "at": None, "effect": None})]).values()

    assert (call.key, call.at, call.effect, call.excused) == ("a", None, None, False)


def test_a_role_that_may_not_read_is_told(copy: Healthy, capsys: pytest.CaptureFixture[str]) -> None:
    """It could not look: exit code 2, not that of a broken rule."""
    rows, role = Rows(copy.dsn), f"reader_{uuid.uuid4().hex[:12]}"
    rows.ask(f"create role {role} login")
    try:
        rows.ask(f"grant usage on schema replaykit to {role}")
        rows.ask(f"grant select on all tables in schema replaykit to {role}")
        dsn = make_conninfo(copy.dsn, user=role)
        able = checker.main([dsn])
        rows.ask(f"revoke select on intents from {role}")
        blind = checker.main([dsn])
        rows.ask(f"revoke usage on schema replaykit from {role}")
        outside = checker.main([dsn])
    finally:
        rows.ask(f"drop owned by {role}")
        rows.ask(f"drop role {role}")
        rows.close()

    assert (able, blind, outside) == (0, 2, 2)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition("': ")[2] for line in told] == [
        "permission denied for table intents",
        "permission denied for schema replaykit",
    ]

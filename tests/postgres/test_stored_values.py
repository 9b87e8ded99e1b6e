"""Values are stored exactly as the text they came as, or refused, and a refusal is told from an outage."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from replaykit.postgres import journal, runs
from replaykit.postgres.database import is_refusal, is_transient
from replaykit.replay.entries import Entry, Finish, State, Verdict
from replaykit.runtime.ids import new_id
from tests.postgres.store import Store, step, unit

ODD = {
    "NUL": '"a\\u0000b"',
    "lone surrogate": '["\\ud800", "\\udc00x"]',
    "huge int": "1" * 5_000,
    "beyond a float": "[1e400, -1e-400]",
    "order, doubles and spaces": '{"zeta": 1,  "a" : 2, "a":3}',
    "floats": "[1.0, 1e16, -0.0, 5e-324, 0.1]",
    "deep": "[" * 500 + "]" * 500,
    "not ascii": '"ü \U0001f600 \u2028"',
    "quotes and backslashes": '"\\"\\\\ \\n \\/ {schema} %s %(x)s %%"',
    "null": "null",
    "long": '"' + "x" * 300_000 + '"',
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_a_value_is_stored_exactly_as_its_text(store: Store, text: str) -> None:
    """By the batch, by the one-row statement, as input of a start, as result, as error; read by page and claim."""
    run_id = store.start(input=text)
    (run,) = store.claim()
    odd = {"input": text, "output": text}
    store.write(unit(run, step(1, **odd), step(2, None, outcome="error", error=text)))
    store.write_one(unit(run, step(3, **odd)))
    store.write_one(unit(run, step(4, None, outcome="error", error=text)))

    page = journal.parse_page(store.run(journal.read_journal(run_id, run.token, 0)))
    assert page is not None
    assert run.input == text
    assert [(e.input, e.output, e.error) for e in page] == [(text, text, None), (None, None, text)] * 2

    store.write(unit(run, change=Finish(State.SUCCEEDED, output=text)))
    assert runs.parse_results(store.run(runs.run_results([run_id])))[run_id].output == text


def test_an_entry_comes_back_as_it_went_in(store: Store) -> None:
    """Every field, by both statements."""
    run = store.running()
    full = step(
        1,
        '{"a": 1}',
        key="1/charge#2",
        name="charge",
        outcome="error",
        error='"e"',
        attempt=3,
        input="[]",
        digest="ab",
        idempotency_key="cd",
        at=1_800_000_000_000_001,
    )
    bare = step(2, None, outcome="timeout", started_at=None)
    store.write(unit(run, full, bare))
    full_too, bare_too = step(3, **_fields(full)), step(4, **_fields(bare))
    store.write_one(unit(run, full_too))
    store.write_one(unit(run, bare_too))

    page = journal.parse_page(store.run(journal.read_journal(run.id, run.token, 0)))

    assert page == [full, bare, full_too, bare_too]


@pytest.mark.parametrize(
    "entry",
    [
        step(1, "{not json"),
        step(1, "[" * 200_000 + "]" * 200_000),
        step(1, key="a\0b"),
        step(1, name="\ud800"),
        step(1, kind="wish"),
        step(0),
        step(1, outcome="error"),
        step(1, due_at=1),
    ],
    ids=["no json", "too deep", "NUL in a key", "surrogate in a name", "kind", "seq", "error without error", "due_at"],
)
def test_what_the_database_refuses_is_a_refusal_of_its_unit_alone(store: Store, entry: Entry) -> None:
    """The batch fails whole; each unit alone stands or is refused with the database's words."""
    good, bad = store.running(), store.running()
    good_unit, bad_unit = unit(good, step(1)), unit(bad, entry)

    for attempt in (
        lambda: store.write(good_unit, bad_unit),
        lambda: store.write(bad_unit),
        lambda: store.write_one(bad_unit),
    ):
        with pytest.raises((psycopg.Error, UnicodeEncodeError)) as caught:
            attempt()
        assert is_refusal(caught.value)
        assert not is_transient(caught.value)

    assert store.write(good_unit) == {good.id: Verdict.OK}
    assert store.seqs(bad.id) == []


def test_a_refused_input_starts_nothing(store: Store) -> None:
    """Neither it nor, in the same commit, its neighbours: the client sends them one by one then."""
    rows = [runs.StartRow(new_id(), "wf", "{}"), runs.StartRow(new_id(), "wf", "{not json")]

    with pytest.raises(psycopg.DataError) as caught:
        store.connection.run_all(runs.start_runs(rows))

    assert is_refusal(caught.value)
    assert store.admin.execute("select count(*) from runs").fetchone() == (0,)


def test_odd_values_do_not_break_what_people_read(store: Store) -> None:
    """Views pass payloads on as they are."""
    run = store.running()
    store.write(unit(run, *(step(i + 1, text) for i, text in enumerate(ODD.values()))))

    rows = store.admin.execute("select output::text from timeline order by seq").fetchall()

    assert [row[0] for row in rows] == list(ODD.values())


def _fields(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Entry.__slots__ if name != "seq"}

"""Starts are durable, share a commit, and are idempotent by key, from Python and from SQL."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psycopg
import pytest

from replaykit.postgres import runs
from replaykit.replay.entries import Finish, State
from replaykit.runtime.ids import new_id
from tests.postgres.store import Store, unit


def start_all(store: Store, *rows: runs.StartRow) -> list[runs.Started]:
    """In one commit; what was found or made for each."""
    found = runs.parse_started(store.connection.run_all(runs.start_runs(rows)))
    return [found[row.id] for row in rows]


def start_sql(store: Store, workflow: str, input: Any, key: str | None = None) -> uuid.UUID:
    """By the function, as an application's own transaction does."""
    row = store.admin.execute(
        "select start(%s, %s::json, %s)", [workflow, input if isinstance(input, str) else json.dumps(input), key]
    ).fetchone()
    assert row is not None
    run_id = row[0]
    assert isinstance(run_id, uuid.UUID)
    return run_id


def test_starts_of_one_batch_are_pending_with_their_inputs(store: Store) -> None:
    """Each with its own queue and priority."""
    rows = [runs.StartRow(new_id(), "wf", f'{{"n": {n}}}', queue=f"q{n}", priority=n) for n in range(3)]

    started = start_all(store, *rows)

    assert [(s.id, s.created, s.state) for s in started] == [(r.id, True, State.PENDING) for r in rows]
    assert store.admin.execute(
        "select queue, priority, input::text from runs join payloads on run_id = id order by 1"
    ).fetchall() == [(f"q{n}", n, f'{{"n": {n}}}') for n in range(3)]


def test_a_key_finds_the_run_that_holds_it_whatever_its_input_and_state(store: Store) -> None:
    """Inputs are not compared; an ended run keeps its key."""
    first = store.start(key="order-1", input="1")
    (claimed,) = store.claim()
    store.write(unit(claimed, change=Finish(State.SUCCEEDED, "1")))

    (again,) = start_all(store, runs.StartRow(new_id(), "wf", "2", key="order-1"))

    assert (again.id, again.created, again.workflow, again.state) == (first, False, "wf", State.SUCCEEDED)
    assert store.admin.execute("select input::text from payloads").fetchall() == [("1",)]


def test_a_key_of_another_workflow_is_told_by_that_workflows_name(store: Store) -> None:
    """The caller raises the error that names both."""
    first = store.start(workflow="pay", key="order-1")

    (found,) = start_all(store, runs.StartRow(new_id(), "ship", "{}", key="order-1"))

    assert (found.id, found.created, found.workflow) == (first, False, "pay")


def test_one_key_twice_in_a_batch_makes_one_run(store: Store) -> None:
    """And both are told of it."""
    rows = [runs.StartRow(new_id(), "wf", "{}", key="k") for _ in range(2)]

    started = start_all(store, *rows)

    assert {s.id for s in started} <= {r.id for r in rows}
    assert len({s.id for s in started}) == 1
    assert sorted(s.created for s in started) == [False, True]


def test_a_start_that_meets_another_of_its_key_in_flight_finds_it(store: Store) -> None:
    """It waits for the other's commit, and looks with a younger snapshot."""
    mine, other = (runs.StartRow(new_id(), "wf", "{}", key="k") for _ in range(2))
    first = store.transaction()
    for bound in runs.start_runs([other]):
        first.run(bound)
    second = store.connect()

    starting = store.in_thread(lambda: second.run_all(runs.start_runs([mine])))
    store.wait_blocked(second.backend_pid)
    first.commit()

    found = runs.parse_started(starting.result())[mine.id]
    assert (found.id, found.created) == (other.id, False)


def test_a_start_that_meets_another_of_its_key_rolled_back_is_made(store: Store) -> None:
    """Nobody else has the key then."""
    mine, other = (runs.StartRow(new_id(), "wf", "{}", key="k") for _ in range(2))
    first = store.transaction()
    for bound in runs.start_runs([other]):
        first.run(bound)
    second = store.connect()

    starting = store.in_thread(lambda: second.run_all(runs.start_runs([mine])))
    store.wait_blocked(second.backend_pid)
    first.rollback()

    assert runs.parse_started(starting.result())[mine.id].created


def test_twenty_starts_of_one_key_at_once_make_one_run(store: Store) -> None:
    """Each on a connection of its own, in batches that share other keys, too."""
    connections = [store.connect() for _ in range(20)]
    batches = [[runs.StartRow(new_id(), "wf", "{}", key=f"k{n}") for n in (i % 3, 3)] for i in range(20)]

    starting = [
        store.in_thread(lambda c=c, b=b: runs.parse_started(c.run_all(runs.start_runs(b))))  # type: ignore[misc]
        for c, b in zip(connections, batches, strict=True)
    ]
    found = [(row.key, s.result()[row.id]) for s, batch in zip(starting, batches, strict=True) for row in batch]

    assert len({(key, started.id) for key, started in found}) == 4
    assert sum(started.created for _, started in found) == 4


@pytest.mark.parametrize(
    "input", [[], [1, "ü"], {"args": [1]}, {"kwargs": {"x": 1}}, {"args": [], "kwargs": {}}, {}, '["a\\u0000b", 1e400]']
)
def test_a_start_from_sql_keeps_its_input_for_the_worker_to_bind(store: Store, input: Any) -> None:
    """Under `~call`, which no parameter can be named: the worker knows the parameters, SQL does not."""
    run_id = start_sql(store, "wf", input)

    (run,) = store.claim()

    text = input if isinstance(input, str) else json.dumps(input)
    assert (run.id, run.input) == (run_id, f'{{"~call":{text}}}')
    assert run_id.version == 7


def test_a_start_from_sql_is_idempotent_by_key(store: Store) -> None:
    """The same run; another workflow's key is an error that names both."""
    run_id = start_sql(store, "pay", [1], "order-1")

    assert start_sql(store, "pay", [2], "order-1") == run_id
    with pytest.raises(
        psycopg.errors.UniqueViolation, match=f"key 'order-1' belongs to run {run_id} of workflow pay, not of ship"
    ):
        start_sql(store, "ship", [1], "order-1")
    assert store.admin.execute("select count(*) from runs").fetchone() == (1,)


def test_a_start_from_sql_that_meets_another_of_its_key_in_flight_finds_it(store: Store) -> None:
    """Two applications, one order."""
    first = store.transaction()
    first.execute("select {schema}.start('wf', '[]', 'k')")
    second = store.transaction()

    starting = store.in_thread(lambda: second.execute("select {schema}.start('wf', '[]', 'k')"))
    store.wait_blocked(second.pid)
    first.commit()
    starting.result()
    second.commit()

    assert store.admin.execute("select count(*) from runs").fetchone() == (1,)


def test_a_start_from_sql_is_part_of_the_callers_transaction(store: Store) -> None:
    """The order and its run, both or none."""
    caller = store.transaction()
    caller.execute("select {schema}.start('wf', '[]')")
    caller.rollback()

    assert store.admin.execute("select count(*) from runs").fetchone() == (0,)


@pytest.mark.parametrize("input", ["1", '"x"', "null", '{"args": [], "arguments": []}', '{"x": 1}'])
def test_a_start_from_sql_with_an_input_of_another_form_is_refused(store: Store, input: str) -> None:
    """With a sentence."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="start: input"):
        start_sql(store, "wf", input)


def test_a_start_from_sql_works_from_any_search_path(store: Store) -> None:
    """Its own path is pinned; a caller's table of our name is not ours."""
    store.admin.execute("create schema app")
    store.admin.execute("create table app.runs (id uuid)")
    store.admin.execute("set search_path to app")

    row = store.admin.execute("select replaykit.start('wf', '[]')").fetchone()

    assert row is not None
    assert [r.id for r in store.claim()] == [row[0]]

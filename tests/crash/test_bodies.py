"""What a body may do and know, in a real worker."""

from __future__ import annotations

from replaykit.replay.keys import idempotency_key
from tests.crash.crew import MODULE, Crew
from tests.crash.outside import Outside
from tests.crash.rows import Rows, start
from tests.crash.workflows import chain, gated, heavy, misbehaving, telling
from tests.runtime.facts import eventually


def test_a_body_knows_its_step_and_has_the_resources(crew: Crew, rows: Rows) -> None:
    """Async and in a thread: `step.current()` and what the lifespan yielded in this process."""
    crew.hire("--lifespan", f"{MODULE}:lifespan").wait_ready()
    (run,) = start(crew.dsn, telling, [()])
    rows.wait_ended(1)

    ((state, told),) = rows.outputs([run]).values()
    assert state == "succeeded"
    assert told == [
        {
            "run_id": str(run),
            "key": key,
            "attempt": 1,
            "idempotency_key": idempotency_key(run, key),
            "input": {},
            "of_this_process": True,
        }
        for key in ("tell", "tell_sync")
    ]


def test_a_body_cannot_end_the_worker(crew: Crew, rows: Rows) -> None:
    """SystemExit, a value that no journal holds: that step's error. A coroutine of a sync function is awaited."""
    """SystemExit, a value no journal holds, a coroutine from a sync function: each is that step's error."""
    worker = crew.hire()
    (child,) = worker.wait_ready()
    (run,) = start(crew.dsn, misbehaving, [()])
    rows.wait_ended(1)

    ((state, seen),) = rows.outputs([run]).values()
    assert state == "succeeded"
    assert seen["leave"].startswith("StepFailed builtins.SystemExit: ")
    assert seen["leave_sync"] == seen["leave"]
    assert seen["hand_out_socket"].startswith("NotJournalable ")
    assert "sockets" in seen["hand_out_socket"]
    assert seen["around"] == "xxx"
    assert worker.ready() == [child]
    assert [entry.outcome for entry in rows.entries(run)] == ["error", "error", "error", "ok"]


def test_a_value_of_five_megabytes_is_recorded(crew: Crew, rows: Rows) -> None:
    """Below `payload_bytes_max` a value is as good as any other."""
    crew.hire().wait_ready()
    (run,) = start(crew.dsn, heavy, [(5_000_000,)])
    rows.wait_ended(1)

    assert rows.outputs([run]) == {run: ("succeeded", 5_000_000)}
    assert rows.ask("select octet_length(output::text) from journal where run_id = %s", run) == [(5_000_002,)]


def test_polling_alone_finds_work(crew: Crew, rows: Rows) -> None:
    """NOTIFY is a hint: without LISTEN runs are found all the same."""
    crew.hire("--poll-only", "--poll-seconds", "0.2").wait_ready()
    started = start(crew.dsn, chain, [(3, 0.0, 0.01)] * 5)
    rows.wait_ended(5)

    assert set(rows.outputs(started).values()) == {("succeeded", 3)}
    listening = "select count(*) from pg_stat_activity where query ilike 'listen%%' and datname = current_database()"
    assert rows.ask(listening) == [(0,)]


def test_a_long_body_is_a_row(crew: Crew, outside: Outside, rows: Rows) -> None:
    """View in_flight has a body that is older than one heartbeat: which step, where, since when."""
    worker = crew.hire("--lease-seconds", "2")
    (child,) = worker.wait_ready()
    (run,) = start(crew.dsn, gated, [("gate",)])

    query = "select run_id, key, attempt, worker::text, pid, since < now() from in_flight"
    eventually(lambda: rows.ask(query), "the body is seen")

    assert rows.ask(query) == [(run, "pass_gate", 1, worker.worker_id(child), child, True)]
    (health,) = rows.ask("select health from workers where pid = %s", child)[0]
    assert (health["runs"], health["bodies"]) == (1, 1)
    beat = rows.ask("select heartbeat_at from workers where pid = %s", child)
    eventually(lambda: rows.ask("select heartbeat_at from workers where pid = %s", child) > beat, "another heartbeat")
    outside.open_gate("gate")
    rows.wait_ended(1)
    assert rows.ask(query) == []

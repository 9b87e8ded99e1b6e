"""A worker's row is the lease of all its runs: heartbeats, releases, sweeps. Only the database's clock decides."""

from __future__ import annotations

import uuid

import pytest

from replaykit.postgres import journal, leases, runs
from replaykit.replay.entries import Verdict
from tests.postgres.store import Store, step, unit


def test_a_heartbeat_renews_the_lease_and_tells_the_databases_time(store: Store) -> None:
    """For its lease_seconds from now on."""
    worker = store.register(lease_seconds=60)
    store.expire(worker)

    now = leases.parse_clock(store.run(leases.heartbeat(worker)))

    assert now is not None
    row = store.admin.execute(
        "select extract(epoch from expires_at - heartbeat_at), extract(epoch from heartbeat_at) * 1000000 - %s"
        " from workers where id = %s",
        [now, worker],
    ).fetchone()
    assert row is not None
    assert float(row[0]) == pytest.approx(60, abs=0.01)
    assert abs(float(row[1])) < 10_000


@pytest.mark.parametrize("end", ["reaped", "stopped", "released", "gone"])
def test_a_heartbeat_of_a_dead_row_finds_nothing(store: Store, end: str) -> None:
    """The process must drop all its runs; its row never comes to life again."""
    worker = store.register()
    match end:
        case "reaped":
            store.expire(worker)
            store.run(leases.reap_expired())
        case "stopped":
            store.run(leases.stop_worker(worker))
        case "released":
            store.run(leases.release_worker(worker, recovered=True))
        case _:
            store.admin.execute("delete from workers where id = %s", [worker])

    assert leases.parse_clock(store.run(leases.heartbeat(worker))) is None


def test_a_repeated_registration_is_one_row(store: Store) -> None:
    """A lost acknowledgement; but a row that was found dead stays so."""
    bound = leases.insert_worker(
        uuid.uuid4(), hostname="h", pid=2, lease_seconds=5, queues=["a"], workflows={}, version="0", python="3"
    )

    assert leases.parse_clock(store.run(bound)) is not None
    assert leases.parse_clock(store.run(bound)) is not None
    store.run(leases.stop_worker(bound[1]["id"]))
    assert leases.parse_clock(store.run(bound)) is None


@pytest.mark.parametrize("recovered", [True, False])
def test_a_release_hands_all_runs_back_at_once(store: Store, recovered: bool) -> None:
    """After waitpid: a death counts as a recovery of each, a clean exit does not; others' runs are left alone."""
    mine, others = store.start(), store.start()
    dead = store.register()
    (run,) = store.claim(worker=dead, limit=1)
    (other,) = store.claim()
    assert (run.id, other.id) == (mine, others)

    released = leases.parse_released(store.run(leases.release_worker(dead, recovered=recovered)))
    again = leases.parse_released(store.run(leases.release_worker(dead, recovered=recovered)))

    assert (released.runs, again.runs) == (1, 0)
    assert store.row(mine, "state, lease_token, worker, recoveries") == ("pending", None, None, int(recovered))
    assert store.row(others, "state, worker") == ("running", store.worker)


def test_a_sweep_takes_only_leases_that_ran_out(store: Store) -> None:
    """By the database's clock."""
    store.start()
    silent = store.register()
    (run,) = store.claim(worker=silent)
    before = leases.parse_reaped(store.run(leases.reap_expired()))
    store.expire(silent)

    after = leases.parse_reaped(store.run(leases.reap_expired()))

    assert (before.workers, before.runs, after.workers, after.runs) == (0, 0, 1, 1)
    assert store.row(run.id, "state, recoveries") == ("pending", 1)


def test_a_sweep_is_limited_and_goes_on_next_time(store: Store) -> None:
    """Runs of a worker that was found dead before are handed back all the same."""
    silent = store.register()
    store.connection.run_all(runs.start_runs([runs.StartRow(uuid.uuid4(), "wf", "{}") for _ in range(5)]))
    store.claim(worker=silent)
    store.expire(silent)

    turns = [leases.parse_reaped(store.run(leases.reap_expired(2))) for _ in range(4)]

    assert [t.runs for t in turns] == [2, 2, 1, 0]
    assert sum(t.workers for t in turns) == 1


def test_a_claim_in_flight_when_its_worker_is_reaped_is_handed_back_by_the_next_sweep(store: Store) -> None:
    """The claim commits after the sweep looked: its run would be held by a worker that nobody expects to die."""
    run_id = store.start()
    zombie = store.register()
    claiming = store.transaction()
    for bound in runs.claim(queue="default", workflows=["wf"], worker=zombie, token=uuid.uuid4()):
        claiming.run(bound)
    store.expire(zombie)

    first = leases.parse_reaped(store.run(leases.reap_expired()))
    claiming.commit()
    second = leases.parse_reaped(store.run(leases.reap_expired()))

    assert (first.workers, first.runs, second.runs) == (1, 0, 1)
    assert store.row(run_id, "state") == ("pending",)


def test_two_sweeps_at_once_hand_each_run_back_once(store: Store) -> None:
    """Two workers notice the same death."""
    silent = store.register()
    (run,) = [store.claim(worker=silent)[0] for _ in [store.start()]]
    store.expire(silent)
    first = store.transaction()
    first.run(leases.reap_expired())

    second = leases.parse_reaped(store.run(leases.reap_expired()))
    first.commit()

    assert (second.workers, second.runs) == (0, 0)
    assert store.row(run.id, "state, recoveries") == ("pending", 1)


def test_a_reaped_worker_that_comes_back_writes_nothing(store: Store) -> None:
    """SIGSTOP past the lease, SIGCONT: entries, heartbeats and claims all fail."""
    zombie = store.register()
    store.start()
    (run,) = store.claim(worker=zombie)
    store.expire(zombie)
    store.run(leases.reap_expired())
    (again,) = store.claim()

    assert store.write(unit(run, step(1))) == {run.id: Verdict.FENCED}
    assert leases.parse_clock(store.run(leases.heartbeat(zombie))) is None
    assert store.claim(worker=zombie) == []
    assert store.write(unit(again, step(1))) == {run.id: Verdict.OK}


def test_stopped_workers_are_forgotten_after_a_while_but_not_with_runs(store: Store) -> None:
    """People read the rows of yesterday."""
    old, young, holder = store.register(), store.register(), store.register()
    store.start()
    store.claim(worker=holder)
    for worker in (old, young, holder):
        store.run(leases.stop_worker(worker))
    store.admin.execute("update workers set stopped_at = now() - interval '2 days' where id = any(%s)", [[old, holder]])

    assert store.run(leases.prune_workers(86_400)) == [(old,)]


def test_live_workers_say_which_workflows_there_are(store: Store) -> None:
    """The dead don't."""
    for name, dead in (("a", False), ("b", True), ("c", False)):
        worker = store.register()
        store.admin.execute("update workers set workflows = %s where id = %s", [f'{{"{name}": {{"x": 1}}}}', worker])
        if dead:
            store.expire(worker)

    found = leases.parse_workflows(store.run(leases.live_workflows()))

    assert found == {"wf": {}, "a": {"x": 1}, "c": {"x": 1}}


def test_bodies_in_flight_are_rows(store: Store) -> None:
    """What the heartbeat says, as far as the database agrees that the run is the worker's."""
    run = store.running()
    body = {"run_id": str(run.id), "key": "charge", "attempt": 2, "since": 1_800_000_000_000_001}
    lie = body | {"run_id": str(uuid.uuid4())}
    store.run(leases.heartbeat(store.worker, in_flight=[body, lie], health={"backlog_bytes": 3}))

    rows = store.admin.execute(
        "select run_id, key, attempt, (extract(epoch from since) * 1000000)::bigint, worker from in_flight"
    ).fetchall()

    assert rows == [(run.id, "charge", 2, 1_800_000_000_000_001, store.worker)]
    assert store.admin.execute("select health->>'backlog_bytes' from workers").fetchone() == ("3",)


def test_the_timeline_says_which_worker_wrote_it_and_how_long_it_took(store: Store) -> None:
    """One line an entry, with the host while the worker's row is kept."""
    run = store.running()
    store.run(journal.write_units([unit(run, step(1, '"r"', at=1_800_000_002_500_000))]))

    rows = store.admin.execute(
        "select workflow, seq, key, outcome, extract(epoch from duration)::float, output::text, hostname, pid"
        " from timeline"
    ).fetchall()

    assert rows == [("wf", 1, "s1", "ok", 2.5, '"r"', "host", 1)]

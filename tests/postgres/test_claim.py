"""A claim takes each run once, in order, with a young journal, and sleepers cost it nothing."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from replaykit.limits import CLAIM_BYTES_MAX
from replaykit.postgres import journal, leases, runs
from replaykit.postgres.runs import HEAD_ENTRIES
from replaykit.replay.entries import PROTOCOL, Finish, Park, Release, State
from tests.postgres.store import NOW, Store, step, unit


def test_a_claim_hands_over_all_that_a_run_needs(store: Store) -> None:
    """Input, seed, clock, and the journal from its start."""
    run_id = store.start(input='{"x": 1}', key="order-1")

    (run,) = store.claim()

    assert (run.id, run.workflow, run.input, run.key, run.queue) == (run_id, "wf", '{"x": 1}', "order-1", "default")
    assert (run.protocol, run.wakes, run.recoveries, run.last_seq, run.entries) == (PROTOCOL, 0, 0, 0, [])
    assert run.seed > 0
    assert run.floor <= run.started_at
    assert store.row(run_id, "state, worker, lease_token") == ("running", store.worker, run.token)


def test_a_second_claim_keeps_what_the_first_one_set(store: Store) -> None:
    """started_at, protocol and seed are for life."""
    run = store.running()
    store.write(unit(run, step(1), change=Release()))

    (again,) = store.claim()

    assert (again.started_at, again.protocol, again.seed) == (run.started_at, run.protocol, run.seed)
    assert [e.seq for e in again.entries] == [1]


def test_a_claim_takes_by_priority_then_by_age(store: Store) -> None:
    """Smaller first."""
    late = store.start(priority=5)
    old = store.start()
    young = store.start()
    urgent = store.start(priority=-1)

    assert [r.id for r in store.claim(limit=3)] == [urgent, old, young]
    assert [r.id for r in store.claim()] == [late]


def test_a_claim_takes_only_its_queue_its_workflows_and_protocols_it_knows(store: Store) -> None:
    """The others are for other workers."""
    store.start(queue="other")
    store.start(workflow="unknown")
    foreign = store.start()
    store.admin.execute("update runs set started_at = now(), protocol = 999 where id = %s", [foreign])
    mine = store.start()

    assert [r.id for r in store.claim()] == [mine]


def test_a_claim_passes_by_a_suspect(store: Store) -> None:
    """It is for a claim of its own."""
    run_id = store.start()
    store.admin.execute("update runs set suspect = true where id = %s", [run_id])

    assert store.claim() == []


def test_a_run_that_was_due_earlier_goes_first_whichever_was_started_first(store: Store) -> None:
    """Its age is counted from the moment since which it could go on."""
    old, young = store.start(), store.start()
    store.admin.execute("update runs set available_at = available_at + interval '1 s' where id = %s", [old])

    assert [r.id for r in store.claim(limit=1)] == [young]
    assert [r.id for r in store.claim()] == [old]


@pytest.mark.parametrize("end", ["expired", "stopped", "pruned"])
def test_a_worker_whose_row_is_dead_takes_nothing(store: Store, end: str) -> None:
    """A process that was stopped past its lease and continued must not begin with a claim."""
    store.start()
    worker = store.register()
    match end:
        case "expired":
            store.expire(worker)
        case "stopped":
            store.run(leases.stop_worker(worker))
        case _:
            store.admin.execute("delete from workers where id = %s", [worker])

    assert store.claim(worker=worker) == []
    assert len(store.claim()) == 1
    store.admin.execute("update runs set state = 'pending', lease_token = null, worker = null, suspect = true")
    assert store.claim_suspects((), worker) == []
    assert len(store.claim_suspects(())) == 1


def test_twenty_claimers_at_once_take_each_run_once(store: Store) -> None:
    """SKIP LOCKED: nobody waits, nobody takes what another has."""
    rows = [runs.StartRow(uuid.uuid4(), "wf", "{}") for _ in range(400)]
    store.connection.run_all(runs.start_runs(rows))
    connections = [store.connect() for _ in range(20)]

    def claim_all(number: int) -> list[uuid.UUID]:
        taken: list[uuid.UUID] = []
        while True:
            token = uuid.uuid4()
            bounds = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token, limit=7)
            claimed = runs.parse_claim(connections[number].run_all(bounds), token)
            if not claimed:
                return taken
            taken += [run.id for run in claimed]

    claiming = [store.in_thread(partial(claim_all, number)) for number in range(20)]
    taken = [run_id for done in claiming for run_id in done.result()]
    taken += [run.id for run in store.claim(limit=400)]  # what was locked by a claim that was rolled back: none

    assert len(taken) == len(set(taken)) == 400


def test_a_claim_in_flight_is_passed_by(store: Store) -> None:
    """The next claim takes the next run without waiting."""
    first, second = store.start(), store.start()
    other = store.transaction()
    for bound in runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=uuid.uuid4(), limit=1):
        other.run(bound)

    assert [r.id for r in store.claim()] == [second]
    other.rollback()
    assert [r.id for r in store.claim()] == [first]


def test_a_claim_reads_the_journal_with_a_snapshot_younger_than_its_taking(store: Store) -> None:
    """Between the begin of the taking statement and the reading, the last owner writes and leaves.

    The taking statement is held up after its snapshot by a lock on the worker's row that it looks at; the owner's
    commits lie in between. The reading statement sees them; fused into the taking one it would not (see the next test).
    """
    run = store.running()
    entered = store.transaction()
    token = uuid.uuid4()
    take, *reads = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token)
    entered.run(take)  # nothing is pending yet: the transaction has begun, its first snapshot is taken

    store.write(unit(run, step(1)))
    store.write(unit(run, step(2), change=Release()))

    entered.run(take)
    results = [[], *(entered.run(read) for read in reads)]
    entered.commit()

    (claimed,) = runs.parse_claim(results, token)
    assert [e.seq for e in claimed.entries] == [1, 2]
    assert claimed.last_seq == 2


def test_a_fused_claim_would_hand_over_an_old_journal(store: Store) -> None:
    """Why there are two statements: the same reads inside the taking statement miss what was committed under way."""
    run = store.running()
    store.write(unit(run, step(1), change=Release()))
    take, *_ = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=uuid.uuid4())
    slow = take[0].text.replace("with cand as", "with gate as materialized (select pg_advisory_lock(1)), cand as")
    slow = slow.replace("and (protocol is null", "and (select count(*) from gate) = 1 and (protocol is null")
    fused = (
        slow.replace("{schema}", "replaykit")
        + " returning (select max(seq) from replaykit.journal j where j.run_id = id)"
    )
    store.admin.execute("select pg_advisory_lock(1)")
    claimer = store.transaction()
    params = take[1]

    claiming = store.in_thread(lambda: claimer._raw.execute(fused.encode(), params).fetchone())
    store.wait_blocked(claimer.pid)
    (owner,) = store.claim()
    store.write(unit(owner, step(2), change=Release()))
    store.admin.execute("select pg_advisory_unlock(1)")

    assert claiming.result() == (1,)
    assert store.seqs(run.id) == [1, 2]


def test_a_long_journal_comes_as_a_head_and_in_pages(store: Store) -> None:
    """One statement never carries 100,000 entries, and a long run delays no other of its claim."""
    long, short = store.start(), store.start()
    first = {r.id: r for r in store.claim()}
    total = HEAD_ENTRIES + 250
    store.write(unit(first[long], *(step(i + 1) for i in range(total)), change=Release()))
    store.write(unit(first[short], step(1), change=Release()))

    claimed = {r.id: r for r in store.claim()}
    run = claimed[long]
    assert [e.seq for e in run.entries] == list(range(1, HEAD_ENTRIES + 1))
    assert run.last_seq == total
    assert len(claimed[short].entries) == 1

    read = len(run.entries)
    while page := journal.parse_page(store.run(journal.read_journal(long, run.token, read, 100))):
        assert [e.seq for e in page] == list(range(read + 1, read + 1 + len(page)))
        read += len(page)
    assert read == total
    assert page == []


def test_a_claim_and_a_page_are_cut_by_bytes(store: Store) -> None:
    """Never to nothing: a page has at least one entry, whatever its size."""
    run = store.running()
    incompressible = '"' + uuid.uuid4().hex * 100_000 + '"'
    store.write(unit(run, *(step(i + 1, incompressible) for i in range(4))))
    stored = store.admin.execute("select sum(pg_column_size(output)) / 4 from journal").fetchone()
    assert stored is not None
    one = int(stored[0])

    statement, params = journal.read_journal(run.id, run.token, 0)
    assert params["bytes"] == CLAIM_BYTES_MAX
    seqs = {
        budget: [row[0] for row in store.connection.run(statement, params | {"bytes": budget})]
        for budget in (1, 2 * one + 10, 100 * one)
    }

    assert seqs == {1: [1], 2 * one + 10: [1, 2], 100 * one: [1, 2, 3, 4]}


def test_sleepers_cost_a_claim_nothing(store: Store) -> None:
    """Buffers of a claim with 1,000 and with 100,000 waiting runs: equal, but for the depth of primary keys."""
    sleep(store, 1_000)
    idle = claim_buffers(store)
    for _ in range(3):
        store.start()
    busy = claim_buffers(store)

    sleep(store, 99_000)
    store.admin.execute("update runs set state = 'held', waiting_for = null, reason = 'x' where state = 'pending'")
    idle_crowded = claim_buffers(store)
    for _ in range(3):
        store.start()
    busy_crowded = claim_buffers(store)

    assert idle_crowded <= idle + 1  # index entries of the rows that were pending are still to be vacuumed
    assert busy_crowded <= busy + 3 * 3, (busy, busy_crowded)


def sleep(store: Store, count: int) -> None:
    """So many runs that wait, each for a time of its own."""
    store.admin.execute(
        "with r as (insert into runs (id, workflow, state, waiting_for, available_at)"
        " select gen_random_uuid(), 'wf', 'waiting', 'timer', now() + g * interval '1 minute'"
        " from generate_series(1, %s) g returning id) insert into payloads (run_id, input) select id, '{}' from r",
        [count],
    )
    store.admin.execute("vacuum analyze runs, journal, payloads, workers")


def claim_buffers(store: Store) -> int:
    """Shared buffers that the three statements of a claim touch; rolled back."""
    total = 0
    with store.transaction() as explaining:
        explaining.execute("set local enable_seqscan = off")
        for statement, params in runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=uuid.uuid4()):
            text = b"explain (analyze, buffers, format json) " + store.database.text(statement)
            ((plan,),) = explaining._raw.execute(text, params).fetchall()
            total += plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
    return total


def test_due_runs_are_promoted_in_turns(store: Store) -> None:
    """At most so many at once; the rest and the next due time are told."""
    for at in (1, 2, 3):
        run_id = store.start(available_at=NOW)
        store.admin.execute("update runs set available_at = to_timestamp(%s) where id = %s", [at, run_id])
    store.start(available_at=NOW)
    store.write(unit(store.claim_after(store.start()), change=Park("signal", None, 0)))

    first = runs.parse_promoted(store.run(runs.promote_due(2)))
    due = "select extract(epoch from available_at)::int from runs where state = 'waiting' and available_at <= now()"
    assert store.admin.execute(due).fetchall() == [(3,)]
    second = runs.parse_promoted(store.run(runs.promote_due(2)))
    third = runs.parse_promoted(store.run(runs.promote_due(2)))

    assert [p.count for p in (first, second, third)] == [2, 1, 0]
    assert {p.next_due_at for p in (first, second, third)} == {NOW}
    assert [r.floor for r in store.claim()] == [1_000_000, 2_000_000, 3_000_000]


def test_a_run_is_promoted_no_moment_before_its_time(store: Store) -> None:
    """Not even one that is nearly due."""
    run_id = store.start(delay=60_000_000)
    store.start(available_at=NOW)

    promoted = runs.parse_promoted(store.run(runs.promote_due()))

    assert promoted.count == 0 and promoted.next_due_at is not None
    assert 0 < promoted.next_due_at - promoted.now <= 60_000_000
    assert store.row(run_id, "state") == ("waiting",)


def test_a_run_started_with_a_delay_waits_for_its_start(store: Store) -> None:
    """Waiting for `start`; its clock is not below the moment it was promised."""
    run_id = store.start(delay=60_000_000)

    assert store.row(run_id, "state, waiting_for, available_at - created_at > '59 s'") == ("waiting", "start", True)
    assert store.claim() == []


def test_results_tell_ended_runs_from_others(store: Store) -> None:
    """For clients that wait."""
    run = store.running()
    waiting = store.start(delay=60_000_000)
    store.write(unit(run, change=Finish(State.SUCCEEDED, '"r"')))
    missing = uuid.uuid4()

    found = runs.parse_results(store.run(runs.run_results([run.id, waiting, missing])))

    assert (found[run.id].state, found[run.id].output) == (State.SUCCEEDED, '"r"')
    assert (found[waiting].state, found[waiting].output) == (State.WAITING, None)
    assert missing not in found


def test_a_run_is_found_by_id_key_or_the_end_of_its_id(store: Store) -> None:
    """A key that looks like an id is found, too, but an id goes first."""
    keyed = store.start(key="order-1")
    by_uuid = store.start(key=str(uuid.uuid4()))
    key = store.row(by_uuid, "key")[0]

    def find(ref: str) -> list[uuid.UUID]:
        return [row.id for row in runs.parse_runs(store.run(runs.find_run(ref)))]

    assert find(str(keyed)) == [keyed]
    assert find("order-1") == [keyed]
    assert find(str(keyed)[-6:].upper()) == [keyed]
    assert find(key) == [by_uuid]
    assert find("order-2") == find(str(uuid.uuid4())) == find("abc") == []


def test_an_end_of_an_id_that_two_runs_share_finds_both(store: Store) -> None:
    """So that the caller can say that more of it is needed."""
    for head in ("a", "b"):
        store.admin.execute(
            "insert into runs (id, workflow) values (%s, 'wf')", [head * 8 + "-0000-7000-8000-000000abcdef"]
        )

    assert len(runs.parse_runs(store.run(runs.find_run("abcdef")))) == 2

"""Recoveries without progress make a run a suspect, and more of them make it held: decided by the statement that takes the
run back, for each run by itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from replaykit.limits import FRUITLESS_MAX
from replaykit.postgres import journal, leases, runs
from replaykit.replay.entries import Attempt, ClaimedRun, Finish, Park, State
from tests.postgres.store import NOW, Store, step, unit

End = Callable[[Store, UUID], Any]


def dies(store: Store, worker: UUID, **options: Any) -> leases.Released:
    """A parent saw it die, and hands its runs back."""
    return leases.parse_released(store.run(leases.release_worker(worker, recovered=True, **options)))


def falls_silent(store: Store, worker: UUID, **options: Any) -> leases.Reaped:
    """Its lease runs out, and a sweep finds it."""
    store.expire(worker)
    return leases.parse_reaped(store.run(leases.reap_expired(**options)))


def claim_any(store: Store, worker: UUID) -> list[ClaimedRun]:
    """What is free, suspects too, all at once."""
    suspects = store.claim_suspects([100] * 20, worker)
    return suspects + store.claim(worker=worker)


def recover(store: Store, end: End, times: int, *, recoveries_max: int = 5) -> None:
    """So many times: a new worker takes all that is free, and ends."""
    for _ in range(times):
        worker = store.register()
        claim_any(store, worker)
        end(store, worker, recoveries_max=recoveries_max)  # type: ignore[call-arg]


@pytest.mark.parametrize("end", [dies, falls_silent])
def test_recoveries_without_progress_make_a_suspect(store: Store, end: End) -> None:
    """Which no normal claim takes."""
    run_id = store.start()

    recover(store, end, FRUITLESS_MAX - 1)
    before = store.row(run_id, "state, fruitless, suspect, recoveries")
    recover(store, end, 1)

    assert before == ("pending", FRUITLESS_MAX - 1, False, FRUITLESS_MAX - 1)
    assert store.row(run_id, "state, fruitless, suspect") == ("pending", FRUITLESS_MAX, True)
    assert store.claim() == []


@pytest.mark.parametrize("end", [dies, falls_silent])
@pytest.mark.parametrize("recoveries_max", [1, 5])
def test_after_recoveries_max_as_a_suspect_a_run_is_held(store: Store, end: End, recoveries_max: int) -> None:
    """With a reason that says how often, how the last one ended, and what to do."""
    run_id = store.start()

    recover(store, end, FRUITLESS_MAX + recoveries_max - 1, recoveries_max=recoveries_max)
    before = store.row(run_id, "state")
    recover(store, end, 1, recoveries_max=recoveries_max)

    assert before == ("pending",)
    state, reason, worker, token = store.row(run_id, "state, reason, worker, lease_token")
    assert (state, worker, token) == ("held", None, None)
    assert reason.startswith(f"{FRUITLESS_MAX + recoveries_max} worker processes in a row have ended")
    assert reason.endswith(f"; once the code is right: replaykit retry {run_id}")
    assert "\n" not in reason


def test_the_reason_says_how_the_process_ended_and_that_the_run_was_alone(store: Store) -> None:
    """What its parent saw; the parent also knows that a suspect's process had nothing else in it."""
    run_id = store.start()
    recover(store, dies, 7)
    worker = store.register()
    claim_any(store, worker)

    released = dies(store, worker, how="was killed by SIGKILL")

    assert released.held == (run_id,)
    assert store.row(run_id, "reason") == (
        "8 worker processes in a row have ended while they executed this run and before it got any further,"
        " the last 3 of them with no other run beside it; the last one was killed by SIGKILL;"
        f" once the code is right: replaykit retry {run_id}",
    )


def test_the_reason_of_a_lease_that_ran_out_says_so(store: Store) -> None:
    """Nobody saw how the process ended."""
    run_id = store.start()
    recover(store, falls_silent, 8)

    assert "; the last one fell silent, and its lease ran out; " in store.row(run_id, "reason")[0]


@pytest.mark.parametrize("end", [dies, falls_silent])
def test_an_entry_under_the_claim_is_progress(store: Store, end: End) -> None:
    """However often the process dies: the run gets there in the end."""
    run_id = store.start()
    for turn in range(1, 6):
        recover(store, end, FRUITLESS_MAX - 1)
        worker = store.register()
        (run,) = store.claim(worker=worker)
        store.write(unit(run, step(turn)))
        end(store, worker)
        assert store.row(run_id, "fruitless, suspect") == (0, False)

    assert store.row(run_id, "recoveries") == (15,)


def test_an_entry_of_an_earlier_claim_is_none(store: Store) -> None:
    """Another worker wrote it."""
    run_id = store.start()
    first = store.register()
    (run,) = store.claim(worker=first)
    store.write(unit(run, step(1)))
    dies(store, first)

    recover(store, dies, 1)

    assert store.row(run_id, "fruitless") == (1,)


def test_an_entry_that_is_on_its_way_when_the_process_dies_is_progress(store: Store) -> None:
    """The release waits for the write in flight, and judges by what it brings."""
    run_id = store.start()
    recover(store, dies, FRUITLESS_MAX - 1)
    worker = store.register()
    (run,) = store.claim(worker=worker)
    writing = store.transaction()
    writing.run(journal.write_units([unit(run, step(1))]))

    parent = store.connect()
    released = store.in_thread(
        lambda: parent.run_all([leases.lock_runs(worker), leases.release_worker(worker, recovered=True)])
    )
    store.wait_blocked(parent.backend_pid)
    writing.commit()

    assert leases.parse_released(released.result(20)[-1]).runs == 1
    assert store.row(run_id, "state, fruitless, suspect") == ("pending", 0, False)


@pytest.mark.parametrize("change", [Park("timer", NOW, 0), Finish(State.SUCCEEDED, "1")], ids=["park", "end"])
def test_a_suspect_that_parks_or_ends_is_one_no_more(store: Store, change: Park | Finish) -> None:
    """It got further."""
    run_id = store.start()
    recover(store, dies, FRUITLESS_MAX)
    (run,) = store.claim_suspects([])

    store.write(unit(run, change=change))

    assert store.row(run_id, "fruitless, suspect") == (0, False)


def test_a_suspect_that_got_further_goes_back_to_the_others(store: Store) -> None:
    """Under its token only."""
    run_id = store.start()
    recover(store, dies, FRUITLESS_MAX)
    (run,) = store.claim_suspects([])

    assert store.run(runs.clear_suspect(run_id, uuid.uuid4())) == []
    assert store.row(run_id, "fruitless, suspect") == (FRUITLESS_MAX, True)
    assert store.run(runs.clear_suspect(run_id, run.token)) == [(run_id,)]
    assert store.row(run_id, "state, fruitless, suspect") == ("running", 0, False)


def test_releases_never_count(store: Store) -> None:
    """B131: a deploy interrupts, four times and more, and takes no attempt and no recovery."""
    run_id = store.start()
    for _ in range(20):
        worker = store.register()
        (run,) = store.claim(worker=worker)
        assert run.attempts == []
        store.run(leases.release_worker(worker, recovered=False))

    assert store.row(run_id, "state, recoveries, fruitless, suspect") == ("pending", 0, 0, False)


def test_a_claim_that_was_on_its_way_when_its_worker_stopped_does_not_count(store: Store) -> None:
    """The sweep finds its run later, under a worker that had said that it was done."""
    run_id = store.start()
    leaving = store.register()
    claiming = store.transaction()
    for bound in runs.claim(queue="default", workflows=["wf"], worker=leaving, token=uuid.uuid4()):
        claiming.run(bound)
    store.run(leases.release_worker(leaving, recovered=False))
    claiming.commit()

    assert leases.parse_reaped(store.run(leases.reap_expired())).runs == 1
    assert store.row(run_id, "state, recoveries, fruitless") == ("pending", 0, 0)


def test_lost_leases_take_nothing_from_a_steps_retries(store: Store) -> None:
    """B124: they are counted apart; the tries that failed stand as they stood."""
    run_id = store.start()
    worker = store.register()
    (run,) = store.claim(worker=worker)
    failed = Attempt("s1", 1, NOW, NOW, NOW, 1, NOW, 0.0, error='{"type": "ValueError"}')
    store.write(unit(run, attempts=[failed]))
    falls_silent(store, worker)

    recover(store, falls_silent, FRUITLESS_MAX + 1)
    (again,) = store.claim_suspects([])

    assert [(a.key, a.attempt, a.tries) for a in again.attempts] == [("s1", 1, 1)]
    assert store.row(run_id, "state, reason, recoveries") == ("running", None, FRUITLESS_MAX + 2)


@pytest.mark.parametrize("end", [dies, falls_silent])
def test_b127_a_run_over_its_limit_does_not_keep_the_others(store: Store, end: End) -> None:
    """Of 20 runs of one dead worker the 7th has used up its recoveries: it is held, and 19 go on."""
    started = [store.start() for _ in range(20)]
    store.admin.execute("update runs set fruitless = 7 where id = %s", [started[6]])
    worker = store.register()
    assert len(store.claim(worker=worker)) == 20

    ended = end(store, worker)

    assert (ended.runs, ended.held) == (20, (started[6],))
    assert [store.row(run_id, "state")[0] for run_id in started] == ["pending"] * 6 + ["held"] + ["pending"] * 13
    assert len(store.claim()) == 19


def test_a_held_run_starts_anew_when_a_person_retries_it(store: Store) -> None:
    """With all its chances."""
    run_id = store.start()
    recover(store, dies, 8)
    assert store.row(run_id, "state") == ("held",)

    store.admin.execute("select retry(%s)", [run_id])

    assert store.row(run_id, "state, fruitless, suspect, reason") == ("pending", 0, False, None)
    assert len(store.claim()) == 1


def test_suspects_are_claimed_in_ever_smaller_groups_in_the_end_alone(store: Store) -> None:
    """Those that died least often first, the oldest first; so that one poison run does not make a thousand others wait
    for each other."""
    started = [store.start() for _ in range(12)]
    store.admin.execute("update runs set suspect = true, fruitless = 3")
    store.admin.execute("update runs set fruitless = 4 where id = any(%s)", [started[:3]])
    store.admin.execute("update runs set fruitless = 5 where id = any(%s)", [started[3:5]])
    groups = leases.suspect_groups(5)

    first, second, third, fourth, fifth = (
        [run.id for run in store.claim_suspects(size)] for size in ([4, 2], [4, 2], [4, 2], [4, 2], groups)
    )

    assert (first, second) == (started[5:9], started[9:])
    assert (third, fourth) == (started[:2], started[2:3])
    assert fifth == started[3:4]
    assert [len(store.claim_suspects([])) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize(("recoveries_max", "groups"), [(1, ()), (3, ()), (4, (100,)), (5, (100, 10)), (9, (100, 10))])
def test_before_a_run_is_held_it_was_alone_several_times(recoveries_max: int, groups: tuple[int, ...]) -> None:
    """Nobody is held for a neighbour's deeds, however small the limit."""
    assert leases.suspect_groups(recoveries_max) == groups


def test_a_look_for_due_runs_sees_suspects_that_somebody_here_could_run(store: Store) -> None:
    """Of these queues and workflows."""

    def seen(queues: list[str], workflows: list[str]) -> bool:
        return runs.parse_promoted(store.run(runs.promote_due(10, queues, workflows))).suspects

    store.start()
    before = seen(["default"], ["wf"])
    store.admin.execute("update runs set suspect = true")

    assert not before
    assert seen(["other", "default"], ["wf", "another"])
    assert not seen(["other"], ["wf"])
    assert not seen(["default"], ["another"])
    assert not runs.parse_promoted(store.run(runs.promote_due())).suspects

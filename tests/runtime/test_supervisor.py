"""The parent of a worker, with real processes: it respawns, releases, drains, loses patience, and leaves no orphans."""

from __future__ import annotations

import os
import signal
import time
import uuid
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from replaykit.limits import SUSPECT_PROCESSES_MAX, Settings
from replaykit.runtime.heartbeat import EXIT_LOOP_STUCK
from replaykit.runtime.supervisor import DOUBLE_SIGINT_SECONDS, WorkerConfig, how_it_ended, respawn_delay
from tests.direct import direct, pooled
from tests.runtime.facts import eventually, lives
from tests.runtime.parents import Parent, running


def config(dsn: str, behaviour: str, processes: int = 1, **settings: Any) -> WorkerConfig:
    """A configuration whose children are fake and behave so."""
    return WorkerConfig(
        dsn=dsn,
        modules=(behaviour,),
        processes=processes,
        settings=Settings(**settings),
        child_module="tests.runtime.fake_child",
    )


def give_run(dsn: str, worker_id: str) -> uuid.UUID:
    """A run that is running under that worker."""
    run_id = uuid.uuid4()
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        connection.execute(
            "insert into replaykit.runs (id, workflow, state, worker, lease_token, started_at, protocol, seed)"
            " values (%s, 'flow', 'running', %s, %s, now(), 1, 1)",
            (run_id, worker_id, uuid.uuid4()),
        )
    return run_id


def run_row(dsn: str, run_id: uuid.UUID) -> tuple[Any, ...]:
    """State, worker and recoveries of a run."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        row = connection.execute(
            "select state, worker, recoveries from replaykit.runs where id = %s", (run_id,)
        ).fetchone()
    assert row is not None
    return row


def interrupt_until(parent: Parent, stage: str) -> None:
    """Presses Ctrl-C until the parent is that far, as slowly as counts: one more would meet a parent that has ended."""
    pressed_at = 0.0

    def pressed() -> bool:
        nonlocal pressed_at
        if parent.seen("workers_stopping", stage=stage):
            return True
        if time.monotonic() - pressed_at > 1.5 * DOUBLE_SIGINT_SECONDS:
            pressed_at = time.monotonic()
            parent.signal(signal.SIGINT)
        return False

    eventually(pressed, stage)


def test_a_dead_childs_runs_are_released_at_once(dsn: str) -> None:
    """When waitpid returns, not when a lease of 30 s ends; and the death counts, for it may be a run's fault."""
    with running(config(dsn, "fine")) as parent:
        child = parent.wait_for("child_ready")
        run_id = give_run(dsn, child["worker"])

        os.kill(child["pid"], signal.SIGKILL)

        killed_at = time.monotonic()
        eventually(lambda: run_row(dsn, run_id) == ("pending", None, 1), "the run is released")
        assert time.monotonic() - killed_at < 10
        assert parent.wait_for("child_ended")["signal"] == "SIGKILL"


def test_a_dead_child_is_replaced_under_a_new_id(dsn: str) -> None:
    """The old id may still be somebody's lease."""
    with running(config(dsn, "fine")) as parent:
        first = parent.wait_for("child_ready")
        os.kill(first["pid"], signal.SIGKILL)

        second = parent.wait_for("child_ready", times=2)

        assert second["worker"] != first["worker"]


def test_a_dead_child_is_replaced_by_a_spare_that_has_imported_everything(dsn: str) -> None:
    """Half a second less in which its runs wait; and another spare takes its place in turn."""
    with running(config(dsn, "fine")) as parent:
        first, spare = parent.wait_for("child_ready"), parent.wait_for("spare_started")
        assert run_row(dsn, give_run(dsn, first["worker"]))[0] == "running"

        os.kill(first["pid"], signal.SIGKILL)

        second = parent.wait_for("child_ready", times=2)
        assert second["pid"] == spare["pid"]
        assert parent.wait_for("spare_started", times=2)["pid"] not in (first["pid"], second["pid"])


def test_a_spare_that_dies_is_replaced_and_releases_nothing(dsn: str) -> None:
    """It has no id yet."""
    with running(config(dsn, "fine")) as parent:
        parent.wait_for("child_ready")
        os.kill(parent.wait_for("spare_started")["pid"], signal.SIGKILL)

        parent.wait_for("spare_started", times=2)

        assert len(parent.seen("child_ready")) == 1
        assert not parent.seen("runs_released")


def test_a_clean_exit_is_no_recovery(dsn: str) -> None:
    """What a child left behind on request is nobody's fault."""
    with running(config(dsn, "fine")) as parent:
        run_id = give_run(dsn, parent.wait_for("child_ready")["worker"])

        parent.signal(signal.SIGTERM)

        assert parent.wait() == 0
        assert run_row(dsn, run_id) == ("pending", None, 0)


def test_an_exit_code_of_0_that_was_not_announced_is_a_recovery(dsn: str) -> None:
    """A body's `os._exit(0)` looks like a clean exit, but no child leaves without a word."""
    with running(config(dsn, "vanishing")) as parent:
        child = parent.wait_for("child_ready")
        run_id = give_run(dsn, child["worker"])
        parent.wait_for("child_started", solo=True)  # it told of suspects, last of all

        os.kill(child["pid"], signal.SIGUSR1)

        eventually(lambda: run_row(dsn, run_id) == ("pending", None, 1), "the run is released")


def test_suspects_get_children_of_their_own_whose_deaths_delay_nobody(dsn: str) -> None:
    """They are replaced at once, however quickly they die, as long as there are suspects; the others stay as they are."""
    with running(config(dsn, "suspicious")) as parent:
        first = parent.wait_for("child_ready")

        parent.wait_for("child_ended", times=8, exit_code=9)

        assert len(parent.seen("child_started", solo=False)) == 1
        assert lives(first["pid"])
        slots = {event["child"] for event in parent.seen("child_started", solo=True)}
        assert slots <= set(range(1, 1 + SUSPECT_PROCESSES_MAX))
        parent.signal(signal.SIGTERM)
        assert parent.wait() == 0
        assert not any(lives(pid) for pid in parent.child_pids())


def test_a_solo_child_that_finds_no_suspects_leaves_and_is_not_missed(dsn: str) -> None:
    """Until some child tells of suspects again; and the end of a solo child that had no work is no recovery."""
    with running(config(dsn, "relieved")) as parent:
        first = parent.wait_for("child_ready")
        solo = parent.wait_for("child_started", solo=True)
        parent.wait_for("runs_released", worker=solo["worker"], recovered=False)

        os.kill(first["pid"], signal.SIGKILL)
        parent.wait_for("child_ready", times=3)

        parent.wait_for("child_started", times=2, solo=True)


def test_the_end_of_a_process_has_words() -> None:
    """For the reason of a run that is held."""
    assert how_it_ended(9) == "ended with exit code 9"
    assert how_it_ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert how_it_ended(-signal.SIGKILL) == "was killed by SIGKILL, as when memory runs out"
    assert how_it_ended(EXIT_LOOP_STUCK) == "blocked its event loop until its lease ended"


def test_sigterm_ends_all_children_and_then_the_parent(dsn: str) -> None:
    """It is passed on, and nothing is left running."""
    with running(config(dsn, "fine", processes=3)) as parent:
        parent.wait_for("child_ready", times=3)

        parent.signal(signal.SIGTERM)

        assert parent.wait() == 0
        assert [pid for pid in parent.child_pids() if lives(pid)] == []
        assert len(parent.seen("child_started")) == 3


def test_a_second_sigint_closes_the_lifelines_and_a_third_kills(dsn: str) -> None:
    """A person who presses Ctrl-C again does not want to wait."""
    with running(config(dsn, "stubborn", lease_seconds=600)) as parent:
        pid = parent.wait_for("child_ready")["pid"]

        parent.signal(signal.SIGINT)
        parent.wait_for("workers_stopping", stage="draining")
        for stage in ("abandoning", "killing"):  # one too soon after the last counts as the same
            interrupt_until(parent, stage)

        assert parent.wait() == 1
        assert not lives(pid)


def test_a_child_deaf_to_sigterm_is_killed_in_the_end(dsn: str) -> None:
    """After the grace period, the lease, and two margins."""
    with running(config(dsn, "stubborn", grace_seconds=0, lease_seconds=0.5)) as parent:
        pid = parent.wait_for("child_ready")["pid"]

        parent.signal(signal.SIGTERM)

        assert parent.wait() == 1
        assert not lives(pid)


def test_a_second_sigterm_changes_nothing(dsn: str) -> None:
    """systemd sends it to the whole group, and the parent passes it on."""
    with running(config(dsn, "stubborn", lease_seconds=600)) as parent:
        parent.wait_for("child_ready")

        parent.signal(signal.SIGTERM)
        parent.wait_for("workers_stopping", stage="draining")
        parent.signal(signal.SIGTERM)
        parent.signal(signal.SIGINT)

        parent.wait_for("workers_stopping", stage="abandoning")
        assert len(parent.seen("workers_stopping", stage="draining")) == 1


def test_a_child_that_cannot_start_ends_the_parent_with_its_sentence_once(dsn: str) -> None:
    """However many children found out; trying again would change nothing."""
    with running(config(dsn, "refused", processes=3)) as parent:
        assert parent.wait() == 2

        assert parent.stderr.count("there is no module 'flows'") == 1
        assert len(parent.child_pids()) <= 3


def test_children_that_die_quickly_are_tried_again_ever_more_slowly(dsn: str) -> None:
    """But they are tried again: what was wrong may pass."""
    with running(config(dsn, "broken")) as parent:
        parent.wait_for("child_started", times=4)

        parent.signal(signal.SIGTERM)

        assert parent.wait() == 0


def test_the_back_off_doubles_and_has_an_end() -> None:
    """After a first quick death none; a child that had been ready is replaced sooner."""
    assert [respawn_delay(n, ready=False) for n in range(5)] == [0.0, 0.0, 0.1, 0.2, 0.4]
    assert respawn_delay(1000, ready=False) == 30.0
    assert respawn_delay(1000, ready=True) == 1.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_the_parent(dsn: str, number: signal.Signals) -> None:
    """The lifeline ends with the parent, whatever killed it."""
    with running(config(dsn, "fine", processes=2)) as parent:
        parent.wait_for("child_ready", times=2)

        parent.signal(number)

        parent.wait()
        eventually(lambda: not any(lives(pid) for pid in parent.child_pids()), "the children are gone", seconds=2)


def test_the_dsn_is_neither_on_the_command_line_nor_in_the_environment(dsn: str) -> None:
    """Both can be read by others, and the environment is inherited by what bodies start."""
    if not os.path.exists("/proc/self/environ"):
        pytest.skip("needs /proc")
    with running(config(make_conninfo(dsn, password="sesame"), "fine")) as parent:
        pid = parent.wait_for("child_ready")["pid"]

        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                assert b"sesame" not in file.read()


def test_runs_are_released_when_the_database_is_back(dsn: str, server_dsn: str) -> None:
    """A database that is away delays the release, not the next child."""
    with running(config(dsn, "fine")) as parent:
        first = parent.wait_for("child_ready")
        run_id = give_run(dsn, first["worker"])
        name = conninfo_to_dict(dsn)["dbname"]
        with psycopg.connect(server_dsn, autocommit=True) as admin:
            admin.execute(f"alter database {name} allow_connections false".encode())
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
            os.kill(first["pid"], signal.SIGKILL)

            parent.wait_for("child_ready", times=2)
            if not pooled():  # which keeps what is asked until it can be answered
                parent.wait_for("release_failed")
            admin.execute(f"alter database {name} allow_connections true".encode())

        eventually(lambda: run_row(dsn, run_id)[0] == "pending", "the run is released")

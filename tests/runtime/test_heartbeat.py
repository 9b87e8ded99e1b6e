"""The heartbeat against a real Postgres: renewed while the loop lives, lost with its row; the end of the process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pydantic import ValidationError

from replaykit.errors import DatabaseUnreachable
from replaykit.limits import Settings
from replaykit.postgres import leases
from replaykit.postgres.database import Database
from replaykit.runtime.clock import DatabaseClock
from replaykit.runtime.heartbeat import EXIT_LEASE_LOST, EXIT_LOOP_STUCK, Heartbeat
from tests.direct import direct, hang_up
from tests.runtime.facts import eventually

ROOT = Path(__file__).resolve().parents[2]

REGISTER: dict[str, Any] = {
    "hostname": "here",
    "pid": 1,
    "queues": ["default"],
    "workflows": {},
    "version": "0",
    "python": "3",
}


class Beating:
    """A heartbeat in this process, with a loop that ticks as long as `ticking` says."""

    def __init__(self, dsn: str, lease_seconds: float, **options: Any) -> None:
        self.worker_id = uuid.uuid4()
        self.clock = DatabaseClock()
        self.lost = threading.Event()
        self.ticking = True
        self._over = threading.Event()
        given: dict[str, Any] = {
            "settings": Settings(lease_seconds=lease_seconds),
            "clock": self.clock,
            "register": {**REGISTER, "lease_seconds": lease_seconds},
            "snapshot": lambda: ([], {}),
            "on_lost": self.lost.set,
            "exit_on_expiry": False,
            "busy": lambda: False,
        }
        self.heartbeat = Heartbeat(Database(dsn, name="beating"), self.worker_id, **{**given, **options})
        self._loop = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        while not self._over.wait(0.01):
            if self.ticking:
                self.heartbeat.tick()

    def start(self) -> None:
        self.heartbeat.start()
        self._loop.start()

    def stop(self) -> None:
        self._over.set()
        self.heartbeat.stop()
        if self._loop.is_alive():
            self._loop.join()


@contextmanager
def beating(dsn: str, lease_seconds: float = 1.0, **options: Any) -> Iterator[Beating]:
    """A started heartbeat for the length of a test."""
    one = Beating(dsn, lease_seconds, **options)
    one.start()
    try:
        yield one
    finally:
        one.stop()


def ask(dsn: str, query: str, *parameters: Any) -> Any:
    """The first column of the first row."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        row = connection.execute(query.encode(), parameters).fetchone()
    return None if row is None else row[0]


def beats_of(dsn: str, worker_id: uuid.UUID) -> Callable[[], Any]:
    """Reads when that worker's last heartbeat was."""
    return lambda: ask(dsn, "select heartbeat_at from replaykit.workers where id = %s", worker_id)


def expired(dsn: str, worker_id: uuid.UUID) -> bool:
    """Whether the database says so."""
    query = "select expires_at < clock_timestamp() from replaykit.workers where id = %s"
    return bool(ask(dsn, query, worker_id))


def lasts(dsn: str, worker_id: uuid.UUID, moment: float) -> bool:
    """Whether the lease goes on beyond a moment of this machine's clock, which is the database's, too."""
    query = "select expires_at > to_timestamp(%s) from replaykit.workers where id = %s"
    return bool(ask(dsn, query, moment, worker_id))


def test_the_lease_is_taken_before_start_returns(dsn: str) -> None:
    """So that the first claim is already covered, and the database's time is known."""
    with beating(dsn, 30.0) as one:
        assert one.heartbeat.valid()
        assert not one.heartbeat.may_reap()
        assert one.clock.now() > 0
        assert not expired(dsn, one.worker_id)


def test_the_lease_is_renewed_while_the_loop_ticks(dsn: str) -> None:
    """Past its first end, without a moment in which it was not valid."""
    with beating(dsn, 4.0) as one:
        first = one.heartbeat.valid_until
        invalid = 0
        while one.heartbeat.valid_until < first + 1.5:
            invalid += not one.heartbeat.valid()
            assert time.monotonic()

        assert invalid == 0
        assert not expired(dsn, one.worker_id)


def test_the_lease_is_not_renewed_while_the_loop_is_stuck(dsn: str) -> None:
    """Another worker has to take the runs over; and it is renewed again once the loop turns, if nobody did."""
    with beating(dsn, 1.0) as one:
        one.ticking = False

        eventually(lambda: not one.heartbeat.valid(), "the lease ends")
        eventually(lambda: expired(dsn, one.worker_id), "for the database too")
        one.ticking = True
        eventually(one.heartbeat.valid, "the lease is renewed")
        assert not one.lost.is_set()


def test_a_lease_that_ends_here_has_not_ended_there_yet(dsn: str) -> None:
    """The worker gives up first: from the moment its request was sent, less a margin."""
    with beating(dsn, 1.0) as one:
        one.ticking = False

        while one.heartbeat.valid():
            pass
        ended_at = time.time()
        assert lasts(dsn, one.worker_id, ended_at)


def test_a_reaped_worker_learns_it_and_stops_beating(dsn: str) -> None:
    """Its row is marked stopped: nothing it does can make it live again."""
    with beating(dsn, 1.0) as one:
        ask(dsn, "update replaykit.workers set stopped_at = clock_timestamp() where id = %s returning 1", one.worker_id)

        assert one.lost.wait(10)
        assert not one.heartbeat.valid()
        assert not one.heartbeat.may_reap()


def test_a_worker_whose_row_is_gone_learns_it(dsn: str) -> None:
    """As one whose row was pruned while it was stopped."""
    with beating(dsn, 1.0) as one:
        ask(dsn, "delete from replaykit.workers where id = %s returning 1", one.worker_id)

        assert one.lost.wait(10)


def test_a_worker_may_reap_after_one_lease_without_a_gap(dsn: str) -> None:
    """And not before."""
    with beating(dsn, 1.0) as one:
        started = time.monotonic()

        eventually(one.heartbeat.may_reap, "it may reap")

        assert time.monotonic() - started >= 0.9


def test_a_lost_connection_is_made_again_and_takes_the_permission_to_reap(dsn: str) -> None:
    """The lease goes on; but the database may have been away for everyone."""
    with beating(dsn, 2.0) as one:
        eventually(one.heartbeat.may_reap, "it may reap")

        hang_up(dsn, "replaykit:beating")

        eventually(lambda: not one.heartbeat.may_reap(), "it may not")
        eventually(one.heartbeat.may_reap, "it may again")
        assert one.heartbeat.valid()
        assert not one.lost.is_set()


def test_a_row_that_expired_in_an_outage_is_renewed_if_nobody_reaped_it(dsn: str, server_dsn: str) -> None:
    """Only the database decides; a longer outage than the lease loses nobody anything by itself."""
    name = conninfo_to_dict(dsn)["dbname"]
    with beating(dsn, 1.0) as one, psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
        eventually(lambda: not one.heartbeat.valid(), "the lease ends")
        admin.execute(f"alter database {name} allow_connections true".encode())

        eventually(one.heartbeat.valid, "the lease is renewed")
        assert not one.lost.is_set()


def test_a_request_without_an_answer_is_given_up(dsn: str) -> None:
    """A lock on the row, or a network that swallows everything, must not keep the thread."""
    with beating(dsn, 1.0) as one, psycopg.connect(dsn) as blocker:
        blocker.execute("select 1 from replaykit.workers where id = %s for update", (one.worker_id,))
        eventually(lambda: not one.heartbeat.valid(), "the lease ends")
        blocker.rollback()

        eventually(one.heartbeat.valid, "the lease is renewed")


def test_what_is_in_flight_is_written_with_each_heartbeat(dsn: str) -> None:
    """`select * from in_flight` shows it; a snapshot that fails costs nothing but itself."""
    health = iter([{"runs": 1}, {"runs": 2}])  # then StopIteration
    with beating(dsn, 1.0, snapshot=lambda: ([], next(health))) as one:
        before = beats_of(dsn, one.worker_id)()
        eventually(lambda: beats_of(dsn, one.worker_id)() > before, "a heartbeat")
        query = "select (health->>'runs')::int from replaykit.workers where id = %s"
        eventually(lambda: ask(dsn, query, one.worker_id) == 2, "the second snapshot")
        before = beats_of(dsn, one.worker_id)()
        eventually(lambda: beats_of(dsn, one.worker_id)() > before, "a heartbeat without one")


def test_stop_leaves_the_row_to_its_owner(dsn: str) -> None:
    """Whoever hands the runs back marks it, with the last of them."""
    with beating(dsn, 30.0) as one:
        pass

    assert ask(dsn, "select stopped_at is null from replaykit.workers where id = %s", one.worker_id)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replaykit-lease")]


def test_without_a_database_start_says_so() -> None:
    """In a sentence, before any thread is there."""
    with pytest.raises(DatabaseUnreachable):
        Beating("postgresql://nobody@127.0.0.1:1/nowhere", 1.0).heartbeat.start()


def test_fewer_than_two_heartbeats_a_lease_are_refused() -> None:
    """One lost packet would cost all runs: no settings can say it."""
    with pytest.raises(ValidationError, match=r"heartbeat_seconds \(0.6\) .* half of lease_seconds \(1\)"):
        Settings(lease_seconds=1.0, heartbeat_seconds=0.6)

    assert Settings(lease_seconds=1.0, heartbeat_seconds=0.5).heartbeat == 0.5
    assert Settings(lease_seconds=1.0).heartbeat == 0.2


class Process:
    """`beating_child` as a process: prints a line of JSON when it beats, and once it has nothing more to do.

    Attributes:
        ended_at: when it was seen to have ended, in seconds since 1970.
    """

    ended_at: float

    def __init__(self, dsn: str, behaviour: str, lease_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.beating_child", dsn, behaviour, str(lease_seconds)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.worker_id = uuid.UUID(json.loads(self.process.stdout.readline())["worker"])

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, stderr."""
        self.process.wait(timeout=60)  # what it prints fits into its pipes
        self.ended_at = time.time()
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@contextmanager
def process(dsn: str, behaviour: str, lease_seconds: float = 1.0) -> Iterator[Process]:
    one = Process(dsn, behaviour, lease_seconds)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.parametrize("behaviour", ["stuck", "frozen"])
def test_a_stuck_loop_does_not_outlive_its_lease(dsn: str, behaviour: str) -> None:
    """The process ends while the lease is still its own, though no body runs: a workflow's own code may block as well. A
    run is to blame."""
    with process(dsn, behaviour, 8.0) as one:
        code, _, _ = one.end()

        assert code == EXIT_LOOP_STUCK
        assert lasts(dsn, one.worker_id, one.ended_at)


def test_bodies_do_not_outlive_the_lease_in_an_outage(dsn: str, server_dsn: str) -> None:
    """Nobody here knows whether someone took the runs; no run is to blame."""
    name = conninfo_to_dict(dsn)["dbname"]
    with process(dsn, "busy") as one, psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))

        code, _, _ = one.end()
        admin.execute(f"alter database {name} allow_connections true".encode())

        assert code == EXIT_LEASE_LOST


def test_an_idle_worker_survives_an_outage(dsn: str, server_dsn: str) -> None:
    """It has nothing that could overlap with anything."""
    name = conninfo_to_dict(dsn)["dbname"]
    with process(dsn, "idle") as one, psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
        pause = time.monotonic() + 2.0
        eventually(lambda: time.monotonic() > pause, "two leases are over")
        admin.execute(f"alter database {name} allow_connections true".encode())

        eventually(lambda: not expired(dsn, one.worker_id), "the lease is renewed")
        assert one.process.poll() is None


def test_a_body_that_never_lets_go_of_the_interpreter_ends_with_the_lease(dsn: str) -> None:
    """No thread of Python's could end it: faulthandler's does, and shows the line."""
    with process(dsn, "hog", 8.0) as one:
        code, _, err = one.end()

        assert code == 1
        assert "in hog" in err
        assert lasts(dsn, one.worker_id, one.ended_at)


def test_a_process_stopped_past_its_lease_never_thinks_it_valid_again(dsn: str) -> None:
    """SIGSTOP, another worker takes over, SIGCONT: no thread of it sees a valid lease before it ends."""
    with process(dsn, "watchful") as one:
        one.process.send_signal(signal.SIGSTOP)
        eventually(lambda: expired(dsn, one.worker_id), "the lease ends")
        with contextlib.closing(Database(dsn).connect_sync()) as connection:
            assert leases.parse_reaped(connection.run(*leases.reap_expired())).workers == 1

        one.process.send_signal(signal.SIGCONT)
        code, out, _ = one.end()

        assert code in (EXIT_LEASE_LOST, 1)
        assert "valid after" not in out

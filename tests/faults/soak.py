"""All faults at random, over a mix of runs, for as long as you like; then everything is let end and the checker looks.

    python -m tests.faults.soak --minutes 10 [--seed N] [--record]

A seed decides which fault comes next and how long it lasts; what it meets is up to the machine. Exits with 1 if a run does
not end or a promise is broken. `--record` writes what was survived into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import os
import platform
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psycopg

from tests.conftest import make_open_folder
from tests.crash.crew import WorkerProcess
from tests.crash.effects_points import Point, Points
from tests.crash.outside_calls import Calls
from tests.faults.faketime import Clocks, find_faketime
from tests.faults.load import Load
from tests.faults.pgbouncer import PgBouncer, find_pgbouncer
from tests.faults.server import Disk, Own, can_mount, small_disk
from tests.faults.wire import Lose, Wire

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN: Final = "<!-- soak: made by make soak MINUTES=10 RECORD=1 -->\n"
END: Final = "<!-- end -->"

LEASE_SECONDS: Final = 4.0
UNDER_WAY: Final = 16
MEAN_GAP_SECONDS: Final = 1.0  # between two faults
DISK_MEGABYTES: Final = 400
SETTINGS: Final = {
    "max_wal_size": "64MB",
    "min_wal_size": "32MB",
    "wal_keep_size": "32MB",
    "wal_retrieve_retry_interval": "200ms",
}
STOPS: Final = (Point.BEFORE_INTENT, Point.INTENT_COMMITTED, Point.BEFORE_REQUEST, Point.BEFORE_RECORD, Point.RECORDED)
STEPS: Final = ("charge", "reserve", "wire_money", "visit", "book0")

Later = tuple[float, Callable[[], None]]


class Soak:
    """Servers, wire, workers, and what happens to them.

    Attributes:
        times: how often each fault was done.
        missing: faults that cannot be done here, and why.
    """

    def __init__(self, folder: Path, calls: Calls, seed: int, stack: contextlib.ExitStack) -> None:
        self.chance = random.Random(seed)
        self.times: Counter[str] = Counter()
        self.missing: dict[str, str] = {}
        self.hired_again = 0
        self._later: list[Later] = []
        self._bag: list[str] = []
        self._stack = stack
        self._disk: Disk | None = self._mount(folder / "disk-1") if can_mount() else None
        disk = self._mount(folder / "disk-2") if can_mount() else None
        self.server = Own(folder / "primary", SETTINGS, disk=self._disk.folder if self._disk else None)
        self.server.start()
        first = self.server
        stack.callback(first.end)
        self.standby: Own | None = first.standby(folder / "standby", disk=disk.folder if disk else None)
        stack.callback(self.standby.end)
        self._standby_disk = disk
        self.wire = stack.enter_context(Wire(first.dsn, seed=seed))
        self.load = Load(folder / "load", lambda: self.server.dsn, self.wire.dsn, calls, seed=seed)
        stack.callback(self.load.close)
        self.points = Points(self.load.folder)
        self.clocks = Clocks(folder / "clocks") if find_faketime() else None
        self.pooler = stack.enter_context(PgBouncer(self.wire.dsn, pool=6)) if find_pgbouncer() else None
        self.workers: list[tuple[WorkerProcess, Callable[[], WorkerProcess]]] = []
        self.faults = dict(self._choose())

    def _mount(self, folder: Path) -> Disk:
        return self._stack.enter_context(small_disk(folder, DISK_MEGABYTES))

    # ------------------------------------------------------------------ workers

    def hire_all(self) -> None:
        """Two with two children, one with a wrong clock, one through a pooler."""
        hire = functools.partial(self.load.hire, lease=LEASE_SECONDS)
        hires = [functools.partial(hire, children=2), hire]
        if self.clocks is not None:
            hires.append(functools.partial(hire, env=self.clocks.env))
        if self.pooler is not None:
            hires.append(functools.partial(hire, env={"REPLAYKIT_DATABASE_URL": self.pooler.through(self.server.dsn)}))
        self.workers = [(hire(), hire) for hire in hires]
        for worker, _ in self.workers:
            worker.wait_ready()

    def _replace(self) -> None:
        """A worker that is gone is hired again."""
        for number, (worker, hire) in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.hired_again += 1
                self.workers[number] = (hire(), hire)

    def _children(self) -> list[int]:
        return [pid for worker, _ in self.workers for pid in worker.ready() if pid not in self.load.continued]

    # ------------------------------------------------------------------ faults

    def _choose(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What can be done here."""
        yield "worker process killed (SIGKILL)", self._kill_child
        yield "whole worker killed, parent and children", self._kill_worker
        yield "worker drained (SIGTERM), another hired", self._drain
        yield "process stopped past its lease, continued", self._stop
        yield "process stopped at a marked point past its lease, continued", self._stop_at_point
        yield "connections cut", lambda: self.wire.cut(self.chance.uniform(0.2, 1))
        yield "connections refused for a while", self._refuse
        yield "commit done, its acknowledgement lost", lambda: self.wire.lose(Lose.ANSWER, self.chance.randrange(1, 6))
        yield "commit sent, nobody there to answer to", lambda: self.wire.lose(Lose.WIRE, self.chance.randrange(1, 4))
        yield "commit lost before the server got it", lambda: self.wire.lose(Lose.REQUEST, self.chance.randrange(1, 4))
        yield "network black hole, shorter than a lease", lambda: self._freeze(self.chance.uniform(0.2, 2))
        yield "network black hole, longer than a lease", lambda: self._freeze(LEASE_SECONDS + 2)
        yield "network slow", self._slow
        yield "all backends terminated", self._terminate
        yield "run rows locked by somebody else", self._lock
        yield "postmaster killed (SIGKILL)", lambda: self._kill_server(signal.SIGKILL)
        yield "postmaster stopped at once (SIGQUIT)", lambda: self._kill_server(signal.SIGQUIT)
        if self._disk is not None:
            yield "disk full", self._fill
        else:
            self.missing["disk full"] = "needs root, to mount a small tmpfs"
        if self.clocks is not None:
            yield "worker's clock moved, up to ten minutes", self._move_clock
        else:
            self.missing["worker's clock moved"] = "needs libfaketime (Debian: apt-get install libfaketime)"
        if self.pooler is not None:
            yield "PgBouncer killed and started again", self._kill_pooler
        else:
            self.missing["PgBouncer"] = "needs pgbouncer (Debian: apt-get install pgbouncer)"

    def _kill_child(self) -> None:
        if children := self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(children), signal.SIGKILL)

    def _kill_worker(self) -> None:
        self.chance.choice(self.workers)[0].kill_all()

    def _drain(self) -> None:
        worker = self.chance.choice(self.workers)[0]
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGTERM)

    def _stop(self) -> None:
        if children := self._children():
            self._stopped(self.chance.choice(children), lambda: None)

    def _stopped(self, pid: int, before: Callable[[], None]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            self.load.continued[pid] = time.time()
            before()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._soon(LEASE_SECONDS + 3, go_on)

    def _stop_at_point(self) -> None:
        if any(name in ("go", "stop", "reached") for name in os.listdir(self.points.folder)):
            return  # one at a time
        self.points.arm(self.chance.choice(STOPS), self.chance.choice(STEPS))

        def reached() -> None:
            (self.points.folder / "stop").unlink(missing_ok=True)
            if (self.points.folder / "reached").exists():
                self._stopped(int((self.points.folder / "reached").read_text()), self._leave_point)
            else:
                self._soon(0.5, self._not_reached)

        self._soon(1.5, reached)

    def _leave_point(self) -> None:
        self.points.go()
        self._soon(1, self._forget_point)

    def _not_reached(self) -> None:
        if (self.points.folder / "reached").exists():  # at the last moment
            self._stopped(int((self.points.folder / "reached").read_text()), self._leave_point)
        else:
            self.times["process stopped at a marked point past its lease, continued"] -= 1

    def _forget_point(self) -> None:
        for name in ("go", "stop", "reached"):
            (self.points.folder / name).unlink(missing_ok=True)

    def _refuse(self) -> None:
        self.wire.refuse()
        self.wire.cut(0.5)
        self._soon(self.chance.uniform(0.2, 3), lambda: self.wire.refuse(False))

    def _freeze(self, seconds: float) -> None:
        self.wire.freeze()
        self._soon(seconds, self.wire.thaw)

    def _slow(self) -> None:
        self.wire.delay(self.chance.uniform(0.001, 0.05))
        self._soon(self.chance.uniform(1, 4), lambda: self.wire.delay(0))

    def _terminate(self) -> None:
        self.load.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend'"
            " and pid <> pg_backend_pid()"
        )

    def _lock(self) -> None:
        """Of a transaction that somebody has left open."""
        connection = psycopg.connect(self.server.dsn, options="-c search_path=replaykit -c lock_timeout=1s")

        def release() -> None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

        try:
            connection.execute("select id from runs where state = 'running' order by random() limit 3 for update")
        except psycopg.Error:
            release()
            return
        self._soon(self.chance.uniform(0.5, 4), release)

    def _kill_server(self, how: signal.Signals) -> None:
        self.server.kill(how)
        time.sleep(self.chance.choice((0, 0, 1, LEASE_SECONDS + 1)))
        self.server.restart()

    def _fill(self) -> None:
        assert self._disk is not None
        self._disk.fill()
        deadline = time.monotonic() + self.chance.uniform(0.5, 3)
        with contextlib.suppress(psycopg.Error):
            while time.monotonic() < deadline:  # tables have room in them, WAL files are there before they are used
                self.server.ask("create table if not exists public.filler (text text)")
                self.server.ask("insert into public.filler select repeat('x', 1000) from generate_series(1, 5000)")
        time.sleep(max(0.0, deadline - time.monotonic()))
        self._disk.empty()
        if not self.server.answers():
            self.server.restart()
        self.load.ask("drop table if exists public.filler")

    def _move_clock(self) -> None:
        assert self.clocks is not None
        self.clocks.move(self.chance.choice((-10, -1, 0, 1, 10)))

    def _kill_pooler(self) -> None:
        assert self.pooler is not None
        self.pooler.restart()

    def fail_over(self) -> None:
        """Once: the primary dies, the standby takes its place."""
        assert self.standby is not None
        self.server.kill()
        self.standby.promote()
        self.server, self.standby = self.standby, None
        self._disk = self._standby_disk
        self.wire.lead_to(self.server.dsn)
        self.times["primary killed, standby promoted (synchronous replication)"] += 1

    # ------------------------------------------------------------------ the hours

    def _next(self) -> str:
        """Each fault once, in a new order; then again."""
        if not self._bag:
            self._bag = self.chance.sample(list(self.faults), len(self.faults))
        return self._bag.pop()

    def _soon(self, seconds: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what))

    def _timed(self, what: Callable[[], None], name: str) -> None:
        """Do it; say so if it takes long: nothing else happens meanwhile."""
        begun = time.monotonic()
        what()
        if (took := time.monotonic() - begun) > 10:
            print(f"  {name}: {took:.0f} s", flush=True)

    def _catch_up(self) -> None:
        while due := [one for one in self._later if one[0] <= time.monotonic()]:
            for one in due:
                self._later.remove(one)
                one[1]()

    def run(self, minutes: float) -> None:
        """Faults, for so long; then everything ends."""
        begun = time.monotonic()
        end = begun + minutes * 60
        told = begun
        while time.monotonic() < end:
            for turn in (lambda: self.load.more(under_way=UNDER_WAY), self.load.look, self.load.tend, self._replace):
                self._timed(turn, "the person")
            self._timed(self._catch_up, "what was to follow")
            if self.standby is not None and time.monotonic() > begun + minutes * 30:
                self.fail_over()
            name = self._next()
            self.times[name] += 1
            self._timed(self.faults[name], name)
            time.sleep(self.chance.expovariate(1 / MEAN_GAP_SECONDS))
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(
                    f"  {(told - begun) / 60:.1f} min: {self.times.total()} faults, {len(self.load.runs)} runs",
                    flush=True,
                )
        while self._later:
            self._catch_up()
            time.sleep(0.1)
        self.wire.heal()
        self._forget_point()
        self._replace()
        self.load.finish(300)

    # ------------------------------------------------------------------ what is told

    def lines(self, minutes: float, seed: int) -> Iterator[str]:
        """The page's part."""
        states = dict(self.load.ask("select state, count(*) from runs group by 1 order by 2 desc"))
        ((entries, recoveries),) = self.load.ask(
            "select (select count(*) from journal), (select sum(recoveries) from runs)"
        )
        calls = sum(len(many) for many in self.load.calls.all().values())
        counted = ", ".join(f"{number:,} {state}" for state, number in states.items())
        asked = ", ".join(f"{number:,} {verb}" for verb, number in sorted(self.load.did.items()))
        yield f"`make soak MINUTES={minutes:g} SEED={seed}`, {dt.date.today().isoformat()}, {machine()}:"
        yield ""
        yield "| fault | times |"
        yield "|---|---|"
        yield from (f"| {name} | {number:,} |" for name, number in sorted(self.times.items()) if number)
        yield from (f"| {name} | not run: {why} |" for name, why in sorted(self.missing.items()))
        yield ""
        yield (
            f"{self.times.total():,} faults over {len(self.load.runs):,} runs ({counted}), {entries:,} entries, {calls:,} calls "
            f"of the world outside, {recoveries:,} recoveries; a person's words: {asked or 'none'}. Commits that lost their "
            f"request {self.wire.lost[Lose.REQUEST]:,}, their wire {self.wire.lost[Lose.WIRE]:,}, their acknowledgement "
            f"{self.wire.lost[Lose.ANSWER]:,}; connections cut {self.wire.links_cut:,}. Every run ended; the checker found "
            "nothing."
        )


def machine() -> str:
    """Of this run."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def record(lines: list[str]) -> None:
    """Put them into the page."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark and end, f"{PAGE.name} has no mark {BEGIN.strip()}"
    PAGE.write_text(f"{before}{mark}{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser("python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--record", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--keep", action="store_true", help="leave logs and files where they are")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(10**6)
    print(f"seed {seed}, {given.minutes:g} minutes", flush=True)
    folder = make_open_folder()
    (folder / "load").mkdir()
    fine = False
    try:
        with contextlib.ExitStack() as stack:
            soak = Soak(folder, stack.enter_context(Calls()), seed, stack)
            soak.hire_all()
            soak.run(given.minutes)
            soak.load.check()
            lines = list(soak.lines(given.minutes, seed))
            print("\n".join(lines))
            print(f"workers hired again: {soak.hired_again}")
            if given.record:
                record(lines)
            fine = True
    except AssertionError as error:
        print(f"{error}\nlogs and files: {folder}", file=sys.stderr)
    finally:
        if fine and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable, Iterator, Sequence
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
STEPS: Final = ("charge", "reserve", "wire_money", "book0")  # which have intents
POINT_SECONDS: Final = 8.0  # for somebody to come to a marked point

STOP_AT_POINT: Final = "process stopped at a marked point past its lease, continued"

Later = tuple[float, Callable[[], object]]
Fault = Callable[[], bool | None]
"""False: there was nothing to do it to. It does not count then."""


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
        self._minutes = 0  # by which a clock is wrong
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

    def _choose(self) -> Iterator[tuple[str, Fault]]:
        """What can be done here."""
        yield "worker process killed (SIGKILL)", self._kill_child
        yield "whole worker killed, parent and children", self._kill_worker
        yield "worker drained (SIGTERM), another hired", self._drain
        yield "process stopped past its lease, continued", self._stop
        yield STOP_AT_POINT, self._stop_at_point
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

    def _kill_child(self) -> bool:
        children = self._children()
        return bool(children) and _send(self.chance.choice(children), signal.SIGKILL)

    def _living(self) -> WorkerProcess | None:
        living = [worker for worker, _ in self.workers if worker.process.poll() is None]
        return self.chance.choice(living) if living else None

    def _kill_worker(self) -> bool:
        worker = self._living()
        if worker is not None:
            worker.kill_all()
        return worker is not None

    def _drain(self) -> bool:
        worker = self._living()
        if worker is not None:
            worker.process.send_signal(signal.SIGTERM)
        return worker is not None

    def _stop(self) -> bool:
        children = self._children()
        return bool(children) and self._stopped(self.chance.choice(children), lambda: None)

    def _stopped(self, pid: int, before: Callable[[], None]) -> bool:
        if not _send(pid, signal.SIGSTOP):
            before()
            return False

        def go_on() -> None:
            self.load.continued[pid] = time.time()
            before()
            _send(pid, signal.SIGCONT)

        self._soon(LEASE_SECONDS + 3, go_on)
        return True

    def _stop_at_point(self) -> bool:
        """Counted once it is reached."""
        if any(name in ("go", "stop", "reached") for name in os.listdir(self.points.folder)):
            return False  # one at a time
        self.points.arm(self.chance.choice(STOPS), self.chance.choice(STEPS))
        self._wait_at_point(time.monotonic() + POINT_SECONDS)
        return False

    def _wait_at_point(self, until: float) -> None:
        """Nobody may come there."""
        if time.monotonic() > until:
            (self.points.folder / "stop").unlink(missing_ok=True)
            self._soon(0.5, self._stop_there)  # at the last moment
        elif not self._stop_there():
            self._soon(0.1, lambda: self._wait_at_point(until))

    def _stop_there(self) -> bool:
        if not (self.points.folder / "reached").exists():
            return False
        if self._stopped(int((self.points.folder / "reached").read_text()), self._leave_point):
            self.times[STOP_AT_POINT] += 1
        return True

    def _leave_point(self) -> None:
        self.points.go()
        self._soon(1, self._forget_point)

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

    def _lock(self) -> bool:
        """Of a transaction that somebody has left open."""
        connection = psycopg.connect(self.server.dsn, options="-c search_path=replaykit -c lock_timeout=1s")
        locked = 0

        def release() -> None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

        try:
            locked = connection.execute(
                "select id from runs where state = 'running' order by random() limit 3 for update"
            ).rowcount
        except psycopg.Error:
            release()
            return False
        self._soon(self.chance.uniform(0.5, 4), release)
        return locked > 0

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
        self._minutes = self.chance.choice([n for n in (-10, -1, 0, 1, 10) if n != self._minutes])
        self.clocks.move(self._minutes)

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

    def _soon(self, seconds: float, what: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, what))

    def _timed(self, what: Fault, name: str) -> bool | None:
        """Do it; say so if it takes long: nothing else happens meanwhile."""
        begun = time.monotonic()
        done = what()
        if (took := time.monotonic() - begun) > 10:
            print(f"  {name}: {took:.0f} s", flush=True)
        return done

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
            self.times[name] += self._timed(self.faults[name], name) is not False
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
            "select (select count(*) from journal), (select coalesce(sum(recoveries), 0) from runs)"
        )
        calls = sum(len(many) for many in self.load.calls.all().values())
        counted = ", ".join(f"{number:,} {state}" for state, number in states.items())
        asked = ", ".join(f"{number:,} {verb}" for verb, number in sorted(self.load.did.items()))
        yield f"`make soak MINUTES={minutes:g} SEED={seed}`, {dt.date.today().isoformat()}, {machine()}:"
        yield ""
        yield "| fault | times |"
        yield "|---|---|"
        yield from (f"| {name} | {number:,} |" for name, number in sorted(self.times.items()))
        yield from (f"| {name} | not run: {why} |" for name, why in sorted(self.missing.items()))
        yield ""
        yield (
            f"{self.times.total():,} faults over {len(self.load.runs):,} runs ({counted}), {entries:,} entries, {calls:,} calls "
            f"of the world outside, {recoveries:,} recoveries; a person's words: {asked or 'none'}. Commits that lost their "
            f"request {self.wire.lost[Lose.REQUEST]:,}, their wire {self.wire.lost[Lose.WIRE]:,}, their acknowledgement "
            f"{self.wire.lost[Lose.ANSWER]:,}; connections cut {self.wire.links_cut:,}. Every run ended; the checker found "
            "nothing."
        )


def _send(pid: int, what: signal.Signals) -> bool:
    """Whether there was somebody to get it."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True


def machine() -> str:
    """Of this run."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def record(lines: list[str]) -> None:
    """Put them into the page."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark and end, f"{PAGE.name} has no mark {BEGIN.strip()}"
    PAGE.write_text(f"{before}{mark}{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")


def a_while(text: str) -> float:
    """Minutes, as somebody gives them.

    Raises:
        ArgumentTypeError: no time at all, or for ever.
    """
    minutes = float(text)
    if not 0 < minutes < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes, more than 0")
    return minutes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser("python -m tests.faults.soak")
    parser.add_argument("--minutes", type=a_while, default=10.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--record", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--keep", action="store_true", help="leave logs and files where they are")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.randrange(10**6)
    print(f"seed {seed}, {given.minutes:g} minutes", flush=True)
    folder = make_open_folder()
    (folder / "load").mkdir()
    fine = False
    try:
        with contextlib.ExitStack() as stack:
            soak = Soak(folder, stack.enter_context(Calls()), seed, stack)
            stack.push(lambda kind, *_: soak.server.dump(folder / "database.sql") if kind is not None else None)
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
        print(error, file=sys.stderr)
    finally:
        if not fine:  # also whatever else went wrong, whose traceback comes below
            print(f"seed {seed}; logs and files: {folder}", file=sys.stderr)
        if fine and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

"""A mix of runs under way, a person who looks after them, and what is found at the end.

What was acknowledged is remembered: starts and requests whose answer came, entries and ends that were seen committed. What
was not is asked for again, as a careful caller does.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg

from replaykit.testing import checker
from tests.crash.crew import Crew, WorkerProcess
from tests.crash.effects_points import FOLDER
from tests.crash.outside_calls import Call, Calls
from tests.faults.flows import DEDUPS, MIX, TABLE
from tests.runtime.facts import eventually

__all__ = ["Load"]

MODULE: Final = "tests.faults.flows"
LIFESPAN: Final = ("--lifespan", f"{MODULE}:lifespan")
PERSON: Final = "ann"
OVER: Final = ("succeeded", "failed", "cancelled")

Sql = psycopg.Connection[tuple[Any, ...]]


class Load:
    """Runs of a mix, by a crew of `replaykit worker` processes.

    Args:
        folder: for logs and files.
        dsn: says where the database is now, without any wire in between.
        wire_dsn: where the workers are told that it is.
        calls: the server outside.
        seed: of what is chosen.
        env: for the workers.

    Attributes:
        runs: ids of those whose start was acknowledged.
        did: what the person did, by verb.
    """

    def __init__(
        self,
        folder: Path,
        dsn: Callable[[], str],
        wire_dsn: str,
        calls: Calls,
        *,
        seed: int,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.calls = calls
        self.chance = random.Random(seed)
        self.crew = Crew(folder, wire_dsn, calls.address, module=MODULE, env={FOLDER: str(folder), **(env or {})})
        self.runs: list[UUID] = []
        self.did: Counter[str] = Counter()
        self.continued: dict[int, float] = {}  # since when a process goes on that was stopped past its lease
        self._dsn = dsn
        self._connection: Sql | None = None
        self._started = 0
        self._acknowledged: list[dict[str, Any]] = []
        self._letters: Counter[tuple[UUID, str]] = Counter()
        self._seen_until = 0.0
        self._seen: set[tuple[UUID, int]] = set()
        calls.behave_usually(dedups=list(DEDUPS), lag=0.02, chances={"cut": 0.02, "do-cut": 0.02, "fail": 0.04})
        self.ask(TABLE)

    def hire(
        self, *flags: str, children: int = 1, lease: float = 3.0, env: dict[str, str] | None = None
    ) -> WorkerProcess:
        """A `replaykit worker`."""
        settings = ("--lease-seconds", str(lease), "--evict-after-seconds", "1", "--grace-seconds", "2")
        return self.crew.hire(*LIFESPAN, *settings, "--processes", str(children), *flags, env=env)

    # ------------------------------------------------------------------ asking

    def ask(self, query: str, *params: Any, seconds: float = 60.0) -> list[tuple[Any, ...]]:
        """Rows; asks again while the database is away. Only for what may be asked twice."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.ask_once(query, *params)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def ask_once(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """Rows.

        Raises:
            psycopg.OperationalError: the database is away; what was asked may be done.
        """
        try:
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(
                    self._dsn(),
                    autocommit=True,
                    connect_timeout=5,
                    options="-c search_path=replaykit -c lock_timeout=2s",
                )
            cursor = self._connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError:
            if self._connection is not None:
                self._connection.close()
            raise

    # ------------------------------------------------------------------ runs

    def start(self, number: int, names: Sequence[str] = tuple(MIX)) -> None:
        """Runs of the mix; each has been acknowledged when this returns."""
        for _ in range(number):
            self._started += 1
            name = self.chance.choice(names)
            input = json.dumps([MIX[name][1]])
            ((run,),) = self.ask("select start(%s, %s, %s)", name, input, f"{name}-{self._started}")
            self.runs.append(run)
            self._acknowledged.append({"run": str(run)})

    def more(self, names: Sequence[str] = tuple(MIX), *, under_way: int = 10) -> None:
        """So many are under way again."""
        self.start(max(0, under_way - (len(self.runs) - self.over())), names)

    def goes_on(self, entries: int, seconds: float = 60.0) -> None:
        """Wait until so many more entries are committed, or nothing is left to do; a person helps on what waits for one."""
        before = self.length()

        def has_gone_on() -> bool:
            if self.length() >= before + entries or self.over() == len(self.runs):
                return True
            self.tend(cancels=0.1)
            return False

        eventually(has_gone_on, f"{entries} more entries are committed", seconds)

    def length(self) -> int:
        """Entries so far."""
        return int(self.ask("select count(*) from journal")[0][0])

    def look(self) -> None:
        """See what is committed by now: whatever happens next, it may not be lost."""
        with contextlib.suppress(psycopg.OperationalError):
            found = self.ask_once(
                "select run_id, seq, key, extract(epoch from recorded_at)::float8 from journal"
                " where recorded_at > to_timestamp(%s)",
                self._seen_until - 30,
            )
            for run, seq, key, recorded_at in found:
                self._seen_until = max(self._seen_until, recorded_at)
                if (run, seq) not in self._seen:
                    self._seen.add((run, seq))
                    self._acknowledged.append({"run": str(run), "seq": seq, "key": key})

    def tend(self, *, cancels: float = 0.3) -> None:
        """A person's turn: says what became of calls in doubt, lets go on what failed or is held, cancels what lingers."""
        with contextlib.suppress(psycopg.OperationalError):
            self._resolve()
        with contextlib.suppress(psycopg.OperationalError):
            self._retry()
        with contextlib.suppress(psycopg.OperationalError):
            self._cancel(cancels)

    def _resolve(self) -> None:
        for run, key, idempotency_key in self.ask_once(
            "select run_id, key, idempotency_key from in_doubt order by 1, 2"
        ):
            receipt = self._receipt(run, key, idempotency_key)
            if key.startswith("~undo:"):
                self._request("retry", run, "select retry(%s, by => %s)", run, PERSON)
            elif receipt is None:
                self._request("resolve", run, "select resolve(%s, %s, not_landed => true, by => %s)", run, key, PERSON)
            else:
                value = json.dumps(receipt)
                self._request("resolve", run, "select resolve(%s, %s, landed => %s, by => %s)", run, key, value, PERSON)

    def _receipt(self, run: UUID, key: str, idempotency_key: str) -> str | None:
        effects = self.calls.log(str(run)).effects
        return next((effect.receipt for effect in effects if effect.key == idempotency_key), None)

    def _retry(self) -> None:
        held = "select id from runs r where state = 'held' and not exists (select from in_doubt where run_id = r.id)"
        failed = (
            "select id from runs r where state = 'failed' and workflow in ('persist', 'gamble') and not exists ("
            "select from journal where run_id = r.id and key like '~undo:%%')"
        )
        for (run,) in (*self.ask_once(held), *self.ask_once(failed)):
            self._request("retry", run, "select retry(%s, by => %s)", run, PERSON)

    def _cancel(self, share: float) -> None:
        lingers = "select id from runs where workflow = 'linger' and state in ('running', 'waiting')"
        unheard = " and not exists (select from mailbox where run_id = runs.id and kind = 'cancel')"
        for (run,) in self.ask_once(lingers + unheard):
            if self.chance.random() < share:
                self._request("cancel", run, "select cancel(%s, %s)", run, PERSON)

    def _request(self, verb: str, run: UUID, query: str, *params: Any) -> None:
        """Only an answer counts. What is refused was asked too late, or twice."""
        try:
            self.ask_once(query, *params)
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return
        self.did[verb] += 1
        if verb == "cancel" or self._letters[run, verb] == 0:
            self._letters[run, verb] = 1

    def over(self) -> int:
        """How many runs have ended for good."""
        counted = "select count(*) from runs where state = any(%s) and not (state = 'failed' and workflow = any(%s))"
        return int(self.ask(counted, list(OVER), ["persist", "gamble"])[0][0])

    def finish(self, seconds: float = 180.0) -> None:
        """Everything ends, with a person's help."""
        deadline = time.monotonic() + seconds
        while self.over() < len(self.runs):
            self.look()
            self.tend(cancels=1.0)
            if time.monotonic() > deadline:
                left = self.ask(
                    "select key, state, waiting_for, reason, recoveries, worker from runs where state <> all(%s) limit 20",
                    list(OVER),
                )
                workers = self.ask(
                    "select id, pid, expires_at - now(), stopped_at from workers where stopped_at is null"
                )
                raise AssertionError(
                    f"{len(self.runs) - self.over()} of {len(self.runs)} runs have not ended in {seconds:g} s:\n"
                    + "\n".join(map(str, (*left, *workers)))
                )
            time.sleep(0.1)
        self.look()

    # ------------------------------------------------------------------ the end

    def check(self) -> None:
        """No promise is broken, as far as journal, mailbox and the server outside can tell."""
        calls, acknowledged = self.folder / "calls.jsonl", self.folder / "acknowledged.jsonl"
        ends = self.ask("select id, state from runs where finished_at is not null")
        told = [
            *self._acknowledged,
            *({"run": str(run), "state": state} for run, state in ends),
            *({"run": str(run), "letter": verb, "number": n} for (run, verb), n in self._letters.items()),
        ]
        acknowledged.write_text("".join(f"{json.dumps(line)}\n" for line in told))
        seen = [self._line(run, call) for run, many in self.calls.all().items() for call in many]
        calls.write_text("".join(f"{json.dumps(line)}\n" for line in seen))
        code = checker.main([self._dsn(), "--calls", str(calls), "--acknowledged", str(acknowledged)])
        assert code == 0, f"the checker has found something; its files are in {self.folder}"
        rows = self.ask(
            "select (select count(*) from public.effects), count(*) from journal where name = 'enter' and outcome = 'ok'"
        )
        assert rows[0][0] == rows[0][1], "a transactional step's row and its entry are there together"

    def _line(self, run: str, call: Call) -> dict[str, Any]:
        line = {"run": run, "key": call.step, "idempotency_key": call.key, "did": call.did is not None}
        since = self.continued.get(call.pid)
        told = asdict(call)
        return {
            **line,
            **{name: told[name] for name in ("attempt", "effect", "at")},
            "excused": since is not None and call.at >= since,
        }

    def close(self) -> None:
        """Kill whatever is left."""
        self.crew.close()
        if self._connection is not None:
            self._connection.close()

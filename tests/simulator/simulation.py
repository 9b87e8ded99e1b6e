"""One schedule: two workers on one database, and everything that can go wrong with them, decided by a seed.

Each event is one thing that happens at once in the world: a statement runs, an answer arrives, a body ends, a worker
dies. Between any two the others may come: a crash, a lease taken away, a drain, a lost acknowledgement, a late attempt, a
refusal, a person's cancel or retry, a deploy of other code, a back-off, a thread that outlives its time, a body that is put
off, a call that lands late or never, a reconciler's answer, a person's word, a transaction that fails or nobody hears of.

The invariants, by where they are checked:

At each commit, body and unit (here):
- no hole in a journal, each key once in it, its clock never goes back, no timer before its time (`check_journal`);
- no timer is fired early by the clocks that its worker knows, and its unit carries the `wakes` that were read;
- a step whose entry is committed is never begun again, nor one that is in flight, in one worker or in two that live;
- no body begins in a run that is held or drains, none is cancelled that is not in flight;
- no unit meets an entry of another write under a valid token; no run gets stuck or stays in memory in vain, and none is
  held but by a refusal or by code that is not its journal's;
- a try begins when all tries before it have a row, its time has come, and no thread of the last one lives;
- a request to end that was read is delivered while the function runs, and never before a timer that was due before it.

Of effects, at each body, question and commit (`outside.py`, `world.py`):
- a body that makes a call begins under its own open intent, committed before, and a valid lease; none that the code has
  given up, but an idempotent one's that may have begun before;
- no irreversible call lands twice for one step, nor is made while an earlier one may yet land; the receiver of idempotent
  calls sees one key for a run, step and input, and one call for a key; what landed is not made again with another input;
- an intent is closed `landed` only with the step's entry and `not_landed` only if that is so in the world and stays so
  (for truthful reconcilers and persons; what is said not to have landed never will); a body's call is not cancelled;
- nobody is asked about a call that never began here, no person where a reconciler was not asked, and a run is held only
  with a call in doubt, or before one that landed with another input;
- a person's word counts for the attempt that it was given for;
- what a body has observed is committed with its outcome at the latest, and seen by later tries and reconcilers;
- what a transactional body wrote is committed with its entry or not at all.

Of sagas, in every execution (`programs.py`):
- no step is undone outside of a saga that was left by an exception, nor one that did not succeed, nor while the outcome of
  a call that was given up is not known; the newest is undone first;
- when a saga has been left, a cancel during its undoing included, all that it owed is undone, or a person let that fail.

At the end of each run (`invariants.py`), by one replay of its journal for each of its lives (a retry after a failure
begins one):
- it is not held and ends with the last entry, as the run ended, with the same result or error to the letter;
- every execution there ever was (live, rebuilt, evicted, dead, zombie) asked for the same in the same order, and saw
  the same values, times, winners and errors, after each entry that it shares with the journal; so did a prefix of it;
- timers fired in the order of their deadlines, and before the outcome of a body that came later (a drain apart);
- each body was begun, and cancelled, for what the journal asks for, with the same input, after the entries that the
  request followed from were committed; each entry holds an outcome that a body of it had;
- no intent is open and nobody is asked any more (a run ended untold apart); every call with an effect that was given up
  has one entry, `cancelled` only if it was given up before; a result is what the world answered, or somebody who knew;
- what was undone landed in the world, or was done by hand, and its intent is `compensated`; no undoing has failed but by
  a person's word; rows and entries of transactional steps agree;
- tries are numbered without a gap for the whole life of the run; what a rewind set aside is repeated to the letter, and
  a step keeps its idempotency key as long as its input is the same;
- after `leave()` no command came out, and no user code ran on another run's loop, nor saw another task's context.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from replaykit.limits import Settings
from replaykit.replay.actions import CancelBody, Reconcile, StartBody, Withdraw
from replaykit.replay.calls import StepInfo
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import (
    ClaimedRun,
    Effect,
    Entry,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    Outcome,
    Park,
    State,
    Unit,
    Verdict,
)
from replaykit.replay.outcomes import BodyOutcome
from replaykit.replay.requests import CallStep
from tests.simulator import bodies
from tests.simulator.database import ENDED, Database, Mismatch, Row
from tests.simulator.hosts import Body, Chances, Host, Worker
from tests.simulator.invariants import BodyStart, History, check_journal, check_run, leave, new_execution, plainly
from tests.simulator.outside import Outside, driver_asks
from tests.simulator.programs import Watched

__all__ = ["Chances", "Mismatch", "Simulation", "play", "simulate", "trace"]

SETTINGS: Final = Settings(input_bytes_max=256)
_START_US: Final = 1_790_000_000_000_000
_EVENTS_MAX: Final = 12_000
_REFUSED: Final = "the database refused an entry"


Event = tuple[Callable[..., None], tuple[Any, ...]]


class Simulation:
    """A schedule. `run()` plays it to its end.

    Args:
        seed: decides everything.
        chances: of faults.
        trace: whether `lines` is kept.
    """

    def __init__(self, seed: int, chances: Chances | None = None, *, trace: bool = False) -> None:
        self.dice = random.Random(f"schedule {seed}")
        self.chances = chances or Chances()
        self.trace = trace
        self.lines: list[str] = []
        self.facts: Counter[str] = Counter()
        self.now = _START_US + self.dice.randrange(10**12)
        self.database = Database(self._committed)
        self.histories: dict[UUID, History] = {}
        self.workers = [Worker(name, self._skew()) for name in "AB"]
        self.late: list[Unit] = []
        self.dead: set[tuple[UUID, UUID]] = set()
        self.writers: dict[UUID, tuple[Host, Watched]] = {}  # by write id
        self.decided: dict[UUID, int] = {}
        self.retried: dict[UUID, bool] = {}
        self.outside = Outside(
            self.dice,
            self.database,
            self.facts,
            settings=SETTINGS,
            say=self._say,
            clock=self._clock,
            obey=self._obey,
            history=lambda row: self.histories[row.id],
        )
        for n in range(self.dice.choice((1, 2, 2))):
            number = seed * 10 + n
            row = Row(self._id(), number, f'{{"number":{number}}}', self.dice.getrandbits(62), self.now)
            self.database.rows[row.id] = row
            self.histories[row.id] = History()

    # ------------------------------------------------------------------ playing

    def run(self) -> None:
        """Play until every run has ended.

        Raises:
            Mismatch: an invariant is broken.
        """
        bodies.breaches.clear()
        try:
            events = 0
            while any(self._goes_on(row, events) for row in self.database.rows.values()):
                events += 1
                if events > _EVENTS_MAX:
                    raise Mismatch(
                        f"runs do not end: {[(r.state, len(r.journal)) for r in self.database.rows.values()]}"
                    )
                self._turn(chaos=events <= self.chances.chaos_events)
            for row in self.database.rows.values():
                self._say(row, f"ended {row.state} {row.output or row.error}")
                check_run(row, self.histories[row.id], self.outside.world, self.dice)
                self.facts[f"runs {row.state}"] += 1
                self.facts["entries"] += len(row.journal)
            for worker in self.workers:
                for host in list(worker.hosts.values()):
                    self._drop(host)
            self.facts["events"] += events
        finally:
            for history in self.histories.values():
                for execution in history.executions:
                    execution.leave()
        if bodies.breaches:
            raise Mismatch(bodies.breaches[0])

    def _goes_on(self, row: Row, events: int) -> bool:
        if row.state is State.FAILED and events < self.chances.chaos_events:
            return self._may_retry(row)
        return row.state not in ENDED

    def _turn(self, chaos: bool) -> None:
        self._let_time_pass()
        if chaos and self._mishap():
            return
        events = self._events(chaos)
        if not events:
            self._wait_for_something()
            return
        act, arguments = self.dice.choice(events)
        act(*arguments)

    def _events(self, chaos: bool) -> list[Event]:
        events: list[Event] = []
        for worker in self.workers:
            for host in worker.hosts.values():
                events += self._events_of(host, chaos)
            if worker.draining and not worker.hosts:
                worker.draining = False
                worker.skew = self._skew()
        for row in self.database.rows.values():
            if row.state is State.PENDING:
                events += [(self._claim, (row,))] * 2
            elif row.state is State.WAITING and row.available_at <= self.now:
                events.append((self._promote, (row,)))
            elif row.state is State.RUNNING and row.token is not None and (row.id, row.token) in self.dead:
                events.append((self._reap, (row,)))
            elif row.state is State.HELD or (row.state is State.FAILED and chaos and self._may_retry(row)):
                events.append((self._retry, (row,)))
            if row.state is State.HELD:
                events += [(self._resolve, (row, intent)) for intent in self.outside.may_resolve(row)] * 3
        events += self.outside.events()
        events += [(self._arrive_late, (unit,)) for unit in self.late]
        return events

    def _events_of(self, host: Host, chaos: bool) -> list[Event]:
        events: list[Event] = [(self._end_body, (host, key)) for key in host.bodies]
        events += [(self._end_thread, (host, key)) for key in sorted(host.threads)]
        events += self.outside.events_of(host, chaos)
        if host.postponed and host.driver.phase is Phase.ACTIVE and not host.worker.draining:
            events += [(self._begin_postponed, (host, key)) for key in host.postponed]
        if host.run.wakes != host.row.wakes and host.driver.phase is Phase.ACTIVE:
            events.append((self._read_mail, (host,)))
        if host.worker.draining and chaos:
            events += [(self._stop_body, (host, key)) for key in host.bodies]
        if host.answer is not None:
            events += [(self._hear, (host,))] * 2
        elif host.doubt is not None:
            events.append((self._recheck, (host,)))
        elif host.outbox is not None:
            events += [(self._send, (host, chaos))] * 2
        elif host.driver.phase is not Phase.ACTIVE:
            events.append((self._rebuild, (host,)))
        elif host.bodies or host.threads or host.postponed or host.unbegun or host.asking or self._is_due(host):
            events.append((self._tick, (host,)))
        else:
            self._check_waits(host)
        return events

    def _is_due(self, host: Host) -> bool:
        wake = host.driver.next_wake
        return wake is not None and wake <= self._clock(host.worker)

    def _check_waits(self, host: Host) -> None:
        """A run that waits in memory does so for a timer that comes soon."""
        wake = host.driver.next_wake
        if wake is None:
            raise Mismatch(f"run {host.row.number} is stuck in memory: nothing is in flight and no timer is set")
        host.driver.tick(self._clock(host.worker))
        self._obey(host)
        wake = host.driver.next_wake
        if host.outbox is None and not host.driver.in_flight and not host.asking and wake is not None:
            entries = (e.at for e, _ in host.row.journal.values())
            clock = max(self._clock(host.worker), host.run.floor, host.row.started_at or 0, *entries)
            if wake - clock > SETTINGS.evict_after_seconds * 1_000_000:
                raise Mismatch(f"run {host.row.number} waits {wake - clock} us in memory instead of leaving it")

    def _let_time_pass(self) -> None:
        draw = self.dice.random()
        if draw < 0.9:
            self.now += int(draw * 330_000)
        elif draw < 0.985:
            self.now += self.dice.randrange(4_000_000)
        else:
            self._wait_for_something()

    def _wait_for_something(self) -> None:
        """Jump to the next moment at which something is due."""
        moments = [r.available_at for r in self.database.rows.values() if r.state is State.WAITING]
        for worker in self.workers:
            for host in worker.hosts.values():
                wake = host.driver.next_wake
                if wake is not None:
                    moments.append(wake - worker.skew)
        self.now = max(self.now + 1, min(moments, default=0))

    def _mishap(self) -> bool:
        chances, draw = self.chances, self.dice.random()
        rows = [row for row in self.database.rows.values() if row.state not in ENDED]
        worker = self.dice.choice(self.workers)
        if not rows:
            return False
        if draw < chances.crash:
            self._crash(worker)
        elif draw < chances.crash + chances.zombie:
            row = self.dice.choice(rows)
            if row.state is State.RUNNING:
                self.facts["zombies"] += 1
                self._say(row, "its lease is taken away")
                self.database.reap(row)
        elif draw < chances.crash + chances.zombie + chances.drain:
            self._drain(worker)
        elif draw < chances.crash + chances.zombie + chances.drain + chances.wake:
            self._wake(self.dice.choice(rows))
        elif draw < chances.crash + chances.zombie + chances.drain + chances.wake + chances.cancel:
            row = self.dice.choice(rows)
            self.facts["cancels asked"] += 1
            self._say(row, "a person asks it to end")
            self.database.cancel(row, self.now)
        elif draw > 1 - chances.word:
            row = self.dice.choice(rows)
            intents = self.outside.may_resolve(row)
            if intents:
                self._resolve(row, self.dice.choice(intents))
        else:
            return False
        return True

    # ------------------------------------------------------------------ the world's events

    def _claim(self, row: Row) -> None:
        worker = self.dice.choice(self.workers)
        if worker.draining:
            return
        if row.id in worker.hosts:  # its own zombie
            self._drop(worker.hosts[row.id])
        if row.claims > 300:
            raise Mismatch(f"run {row.number} was claimed 300 times")
        run = self.database.claim(row, self._id(), self.now)
        self._say(row, f"claimed by {worker.name}, {run.last_seq} entries")
        self.facts["claims"] += 1
        driver, watched = self._wrong_code(run, row) or self._replay(run, row)
        host = Host(worker, run, row, driver, watched, stands=len(run.entries))
        worker.hosts[row.id] = host
        watched.live = True
        driver.begin(self._clock(worker))
        self._obey(host)

    def _wrong_code(self, run: ClaimedRun, row: Row) -> tuple[Driver, Watched] | None:
        """The run meets other code than its journal's: it must be held."""
        if not run.entries or self.dice.random() > self.chances.wrong:
            return None
        watched = new_execution(row, row.number + 1)
        watched.wrong = True
        watched.sent = {m.id: m.sent_at for m in run.mail}
        driver = Driver(run, watched, new_id=self._id, settings=SETTINGS)
        driver.replay([replace(e) for e in run.entries])
        if watched.hold_reason is None:
            watched.leave()  # too short a journal to tell them apart
            return None
        self.facts["met other code"] += 1
        return driver, watched

    def _replay(self, run: ClaimedRun, row: Row, *, again: bool = False) -> tuple[Driver, Watched]:
        watched = new_execution(row)
        watched.rewinds = len(run.rewinds)
        watched.sent = {m.id: m.sent_at for m in run.mail}
        self.histories[row.id].executions.append(watched)
        driver = Driver(run, watched, new_id=self._id, settings=SETTINGS, again=again)
        cut = self.dice.randint(0, len(run.entries))
        driver.replay(run.entries[:cut])
        driver.replay(run.entries[cut:])
        watched.committed = len(run.entries)
        if watched.hold_reason is not None:
            raise Mismatch(f"a replay of {len(run.entries)} entries is held: {watched.hold_reason}")
        return driver, watched

    def _promote(self, row: Row) -> None:
        self._say(row, "its time has come")
        self.database.promote(row)

    def _reap(self, row: Row) -> None:
        assert row.token is not None
        self._say(row, "its worker is found dead")
        self.dead.discard((row.id, row.token))
        self.database.reap(row)

    def _wake(self, row: Row) -> None:
        self._say(row, "something came into its mailbox")
        self.database.wake(row, self.now)

    def _may_retry(self, row: Row) -> bool:
        """Decided once a failure."""
        ends = len(row.ends)
        if self.decided.get(row.id, 0) < ends:
            self.decided[row.id] = ends
            self.retried[row.id] = ends <= 3 and not row.undone and self.dice.random() < self.chances.retry
        return self.retried[row.id]

    def _retry(self, row: Row) -> None:
        self._say(row, f"a person retries it: it was {row.state}")
        self.facts[f"retries of {row.state}"] += 1
        accept = "inputs" if "before the retry its call landed" in (row.reason or "") else None
        self.database.retry(row, self.now, accept)

    def _resolve(self, row: Row, intent: Intent) -> None:
        self.outside.resolve(row, intent, self.now)

    def _crash(self, worker: Worker) -> None:
        self.facts["crashes"] += 1
        self._say(None, f"worker {worker.name} dies")
        for host in list(worker.hosts.values()):
            self.dead.add((host.row.id, host.run.token))
            if host.fresh is not None:
                self.dead.add((host.row.id, host.fresh.token))
            self._drop(host)
        worker.draining = False
        worker.skew, worker.latest = self._skew(), 0

    def _drain(self, worker: Worker) -> None:
        if worker.draining:
            return
        self.facts["drains"] += 1
        self._say(None, f"worker {worker.name} drains")
        worker.draining = True
        for host in list(worker.hosts.values()):
            host.watched.live = False
            host.driver.drain(self._clock(worker))
            self._obey(host)

    def _arrive_late(self, unit: Unit) -> None:
        """A statement whose client gave up on it runs after all, or never."""
        self.late.remove(unit)
        if self.dice.random() < 0.3:
            return
        verdict = self.database.write(unit)
        self.facts[f"late attempts {verdict}"] += 1
        self._say(self.database.rows[unit.run_id], f"a late attempt runs: {verdict}")

    # ------------------------------------------------------------------ a worker's events

    def _send(self, host: Host, chaos: bool) -> None:
        unit = host.outbox
        assert unit is not None
        host.tries += 1
        if unit.within is not None:
            self._commit(host, unit, chaos)
            return
        draw, chances = self.dice.random(), self.chances
        if chaos and draw < chances.late:
            self.late.append(unit)
            self._say(host.row, "sent; its connection breaks, the attempt is still on its way")
            return
        if chaos and draw < chances.late + chances.stale:
            self._answer(host, Verdict.STALE, None)
            return
        if chaos and draw < chances.late + chances.stale + chances.refused:
            self._answer(host, Verdict.REFUSED, "value too large")
            return
        verdict = self.database.write(unit)
        self.facts[f"verdicts {verdict}"] += 1
        if chaos and self.dice.random() < chances.lost:
            self._say(host.row, f"sent: {verdict}; the acknowledgement is lost")
            self.facts["lost acknowledgements"] += 1
        elif verdict is not Verdict.OK and host.tries > 1:
            host.doubt = verdict
        else:
            self._answer(host, verdict, None)

    def _commit(self, host: Host, unit: Unit, chaos: bool) -> None:
        """The transaction of a body commits what it wrote and its unit, or neither. It is sent once."""
        assert unit.within is not None
        if unit.within not in host.transactions:
            raise Mismatch(f"{unit.within} is to be committed by a transaction that is gone")
        host.transactions.discard(unit.within)
        draw, chances = self.dice.random(), self.chances
        if chaos and draw < chances.late + chances.stale:
            if draw < chances.late:
                self.late.append(unit)
            self._say(host.row, f"the transaction of {unit.within} fails, or is on its way")
            self._answer(host, Verdict.STALE, None)
            return
        verdict = self.database.write(unit)
        self.facts[f"transactions {verdict}"] += 1
        if chaos and self.dice.random() < chances.lost:
            verdict = Verdict.STALE
        self._answer(host, Verdict.OK if verdict is Verdict.OK else Verdict.STALE, None)

    def _recheck(self, host: Host) -> None:
        assert host.outbox is not None and host.doubt is not None
        stands = self.database.recheck(host.outbox)
        self._answer(host, Verdict.OK if stands else host.doubt, None)

    def _answer(self, host: Host, verdict: Verdict, words: str | None) -> None:
        if verdict is Verdict.CONFLICT and host.row.token == host.run.token:
            raise Mismatch("a conflict under a valid token: another unit of ours is in the journal")
        host.answer, host.doubt = (verdict, words), None

    def _hear(self, host: Host) -> None:
        assert host.answer is not None and host.outbox is not None
        verdict, words = host.answer
        unit = host.outbox
        host.answer, host.outbox = None, None
        self._say(host.row, f"{host.worker.name} hears {verdict} of {len(unit.entries)} entries")
        if verdict is Verdict.OK and unit.entries:
            host.stands = unit.entries[-1].seq
        host.driver.verdict(verdict, words, self._clock(host.worker))
        self._obey(host)

    def _tick(self, host: Host) -> None:
        host.driver.tick(self._clock(host.worker))
        self._obey(host)

    def _end_body(self, host: Host, key: str) -> None:
        body = host.bodies.pop(key)
        info = StepInfo(host.run.id, key, body.attempt, body.call.idempotency_key, dict)
        made, call = body.made, body.call
        if made is None:
            outcome = bodies.run_body(call, info, body.started_at, self.dice, SETTINGS)
        else:
            world = self.outside.world
            outcome = bodies.run_acting_body(call, info, body.started_at, self.dice, SETTINGS, world, made)
        final = outcome.call_state is IntentState.LANDED
        if call.effect is Effect.IRREVERSIBLE:
            final = outcome.call_state is not IntentState.NOT_LANDED
        if outcome.error is not None and not final and self.dice.random() < self.chances.again:
            self._try_again(host, body, outcome)
            return
        self._say(
            host.row, f"{host.worker.name}: body of {key} ends {outcome.outcome} {outcome.output or outcome.error}"
        )
        self.histories[host.row.id].outcomes.add((key, outcome.output, plainly(outcome.error)))
        if outcome.in_transaction:
            host.transactions.add(key)
        elif call.effect is not Effect.TRANSACTIONAL:
            host.outcomes.add(key)
        host.driver.body_ended(key, outcome, self._clock(host.worker))
        self._obey(host)

    def _try_again(self, host: Host, body: Body, outcome: BodyOutcome) -> None:
        key, wait = body.call.key, self.dice.choice((0.0, 0.0, 0.5, 3.0, 30.0, 3_600.0))
        lingering = self.dice.random() < self.chances.linger
        self._say(host.row, f"{host.worker.name}: body of {key} fails; again after {wait:g} s, lingering {lingering}")
        self.facts["tries again"] += 1
        if lingering:
            host.threads.add(key)
        host.driver.body_failed(key, outcome, wait, self._clock(host.worker), lingering=lingering)
        self._obey(host)

    def _end_thread(self, host: Host, key: str) -> None:
        self._say(host.row, f"{host.worker.name}: the thread of {key} ends")
        host.threads.discard(key)
        host.driver.thread_ended(key, self._clock(host.worker))
        self._obey(host)

    def _read_mail(self, host: Host) -> None:
        row, driver = host.row, host.driver
        self._say(row, f"{host.worker.name} reads its mail")
        host.watched.sent = {m.id: m.sent_at for m in row.mailbox}
        driver.mail(row.wakes, list(row.mailbox), self._clock(host.worker))
        open_one = driver._letters.cancel is not None and driver.execution.may_be_cancelled
        if open_one and not host.worker.draining and not driver._rewinding:
            raise Mismatch("a request to end was read and not delivered")
        self._obey(host)

    def _stop_body(self, host: Host, key: str) -> None:
        del host.bodies[key]
        self._say(host.row, f"{host.worker.name}: body of {key} is stopped")
        host.driver.body_stopped(key, self._clock(host.worker))
        self._obey(host)

    def _rebuild(self, host: Host) -> None:
        """One of the three steps in which a run is read again; bodies may end between them."""
        row, old = host.row, host.driver
        if old.phase is Phase.BROKEN:
            self.facts["broken"] += 1
            self.database.hold(row, host.run.token, old.words or "")
            self._drop(host)
        elif host.fresh is None:
            host.fresh = self.database.renew(row, host.run.token, self._id())
            self._say(row, f"{host.worker.name} asks for a new token: {host.fresh is not None}")
            if host.fresh is None:
                self._drop(host)
        elif host.rebuilt is None:
            host.rebuilt = self._replay(host.fresh, row, again=True)
        else:
            self.facts["rebuilds"] += 1
            if len(host.run.rewinds) != len(host.fresh.rewinds):
                host.outcomes.clear()  # what was set aside may be asked for with another input
            host.run, host.fresh = host.fresh, None
            host.stands = len(host.run.entries)
            (host.driver, host.watched), host.rebuilt = host.rebuilt, None
            host.tries = 0
            host.transactions.clear()
            host.driver.adopt(old)
            leave(old.execution)  # type: ignore[arg-type]
            host.watched.live = not host.worker.draining
            host.driver.begin(self._clock(host.worker))
            if host.worker.draining:
                host.driver.drain(self._clock(host.worker))
            self._obey(host)

    # ------------------------------------------------------------------ obeying a driver

    def _obey(self, host: Host) -> None:
        driver = host.driver
        for action in driver.take_actions():
            if isinstance(action, StartBody):
                self._put_off_or_start(host, action)
            elif isinstance(action, Withdraw):
                self.outside.withdraw(host, action.key)
            elif isinstance(action, Reconcile):
                self.outside.ask(host, action)
            else:
                self._give_up(host, action)
        unit = driver.next_unit()
        if unit is not None:
            self._check_unit(host, unit)
            host.outbox, host.tries = unit, 0
            self.writers[unit.write_id] = host, host.watched
        if driver.phase in (Phase.OVER, Phase.LOST):
            self.facts[f"left {driver.phase}"] += 1
            self._drop(host)
        elif {*host.bodies, *host.postponed, *host.unbegun} != set(driver.in_flight):
            raise Mismatch(f"in flight are {sorted(host.bodies)}, the driver thinks {sorted(driver.in_flight)}")
        elif not driver_asks(driver) <= set(host.asking):
            raise Mismatch(f"asked are {sorted(host.asking)}, the driver thinks {sorted(driver_asks(driver))}")

    def _put_off_or_start(self, host: Host, action: StartBody) -> None:
        """The lease is looked at right before the body of a step with an effect."""
        leased = host.row.token == host.run.token
        if action.call.effect is not None and (not leased or self.dice.random() < self.chances.postponed):
            self._say(host.row, f"{host.worker.name}: body of {action.call.key} is put off, leased {leased}")
            self.facts["bodies put off"] += 1
            host.postponed[action.call.key] = action
        else:
            self._start_body(host, action)

    def _begin_postponed(self, host: Host, key: str) -> None:
        if host.row.token != host.run.token:
            self._say(host.row, f"{host.worker.name} sees that its lease is lost")
            self._drop(host)
            return
        action = host.postponed.pop(key)
        if host.driver.may_begin(key):
            self._start_body(host, action)
        self._obey(host)

    def _start_body(self, host: Host, action: StartBody) -> None:
        row, call, key = host.row, action.call, action.call.key
        self._say(row, f"{host.worker.name}: body of {key} starts with {call.input.text}")
        live = row.token == host.run.token
        if host.driver.execution.hold_reason is not None or host.worker.draining:
            raise Mismatch(f"a body of {key} was started in a run that is held or drains")
        if key in host.threads:
            raise Mismatch(f"a body of {key} was started while the thread of its last try lives")
        if key in host.bodies or (key in host.outcomes and not call.runs_ahead):
            raise Mismatch(f"a body of {key} was started where one is in flight, or had its outcome")
        if live and any(entry.key == key for entry in row.delivered(len(row.journal), host.run.rewinds)):
            raise Mismatch(f"a body of {key} was started, its entry is committed")
        for worker in self.workers:
            other = worker.hosts.get(row.id)
            if (
                live
                and other is not None
                and other is not host
                and other.run.token == row.token
                and key in other.bodies
            ):
                raise Mismatch(f"bodies of {key} in two live workers")
        if live:
            self._check_attempt(row, action)
            self._check_set_aside(host, call)
        made = self.outside.check_start(host, action)
        host.bodies[key] = Body(call, self._clock(host.worker), action.attempt, made)
        self.facts["bodies"] += 1
        start = BodyStart(key, call.input.digest, host.stands, host.watched.rewinds, call.runs_ahead)
        self.histories[row.id].starts.append(start)

    def _check_attempt(self, row: Row, action: StartBody) -> None:
        """All tries before it have a row, or an entry that a rewind has set aside, and their time has come."""
        key = action.call.key
        tried = {a.attempt for a in row.attempts if a.key == key}
        tried |= {e.attempt for e in row.entries if e.key == key and e.kind == Kind.STEP}
        tried |= {n for of, n in row.intents if of == key and n < action.attempt}
        if tried != set(range(1, action.attempt)):
            raise Mismatch(f"attempt {action.attempt} of {key} begins, the rows know of {sorted(tried)}")

    def _check_set_aside(self, host: Host, call: CallStep) -> None:
        """A result that a rewind has set aside is asked for again with the same input: no body runs."""
        before = [e for e in host.row.entries if e.key == call.key and e.kind == Kind.STEP]
        if before and before[-1].outcome == Outcome.OK and before[-1].digest == call.input.digest:
            raise Mismatch(f"a body of {call.key} was started, its result was set aside and is asked for again")

    def _give_up(self, host: Host, action: CancelBody) -> None:
        self._say(host.row, f"{host.worker.name}: body of {action.key} is given up")
        self.facts["bodies given up"] += 1
        body = host.bodies.pop(action.key, None)
        if body is not None and body.made is not None:
            raise Mismatch(f"the body of {action.key} is to be cancelled, its call goes on")
        if body is None:
            raise Mismatch(f"{action.key} is to be cancelled and is not in flight")
        stop = BodyStart(action.key, "", host.stands, host.watched.rewinds, body.call.runs_ahead)
        self.histories[host.row.id].cancels.append(stop)

    def _check_unit(self, host: Host, unit: Unit) -> None:
        acts = [f"+{i.key} {i.attempt}" for i in unit.intents]
        acts += [f"{c.key} {c.attempt} {c.state}{'' if c.resolved else '?'}" for c in unit.closings]
        self._say(host.row, f"{host.worker.name}: unit {[e.key for e in unit.entries]} {acts} {unit.change}")
        host.wrote.update((i.key, i.attempt) for i in unit.intents if i.state == IntentState.OPEN)
        for e in unit.entries:
            if e.kind == Kind.TIMER:
                self._check_timer(host, unit, e)
        if isinstance(unit.change, Hold) and not host.watched.wrong and not self.outside.may_hold(host, unit):
            raise Mismatch(f"the run is held: {unit.change.reason}")
        if isinstance(unit.change, Park):
            self.facts["parks"] += 1
        if isinstance(unit.change, Finish) and host.worker.draining:
            self.facts["ends while draining"] += 1

    def _check_timer(self, host: Host, unit: Unit, e: Entry) -> None:
        """It is due by the clock of the worker or of the journal, and bears the wakes that the worker has read."""
        row = host.row
        journal = [entry.at for seq, (entry, _) in row.journal.items() if seq < e.seq]
        batch = [x.at for x in unit.entries if x.seq < e.seq and x.kind != Kind.TIMER]
        clock = max([host.worker.latest, host.run.floor, row.started_at or 0, *journal, *batch])
        if e.due_at is None or e.due_at > clock:
            raise Mismatch(f"a timer due {e.due_at} was fired when the worker's clock stood at {clock}")
        if unit.wakes is None:
            raise Mismatch("a timer's unit does not carry the wakes that its executor had read")

    def _drop(self, host: Host) -> None:
        """Out of memory: its bodies are given up, its execution leaves."""
        host.worker.hosts.pop(host.row.id, None)
        leave(host.watched)
        if host.rebuilt is not None:
            leave(host.rebuilt[1])

    # ------------------------------------------------------------------ small things

    def _committed(self, row: Row, unit: Unit) -> None:
        check_journal(row)
        host, watched = self.writers[unit.write_id]
        self.outside.check_commit(row, unit, host)
        if unit.entries:
            watched.committed = max(watched.committed, unit.entries[-1].seq)

    def _clock(self, worker: Worker) -> int:
        """The worker's idea of the time."""
        if self.dice.random() < 0.1:
            worker.skew += self.dice.randrange(-200_000, 200_000)
        worker.latest = max(worker.latest, self.now + worker.skew)
        return worker.latest

    def _skew(self) -> int:
        return self.dice.randrange(-3_000_000, 3_000_000)

    def _id(self) -> UUID:
        return UUID(int=self.dice.getrandbits(128), version=4)

    def _say(self, row: Row | None, words: str) -> None:
        if self.trace:
            self.lines.append(f"{self.now} {'run ' + str(row.number) + ': ' if row is not None else ''}{words}")


def simulate(seed: int, chances: Chances | None = None) -> tuple[Counter[str], str | None]:
    """Play one schedule: what happened, and the broken invariant or None."""
    simulation = Simulation(seed, chances)
    return simulation.facts, _play(simulation)


def play(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Play `count` schedules: what happened in all, and the seeds that broke something."""
    facts: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    for seed in range(first, first + count):
        try:
            happened, mismatch = simulate(seed)
        except Exception as error:
            happened, mismatch = Counter[str](), f"the simulator itself failed: {error!r}"
        facts += happened
        if mismatch is not None:
            broken.append((seed, mismatch))
    gc.collect()
    return facts, broken


def trace(seed: int) -> tuple[list[str], str | None]:
    """The lines of one schedule, their SHA-256 last, and the broken invariant or None."""
    simulation = Simulation(seed, trace=True)
    broken = _play(simulation)
    lines = [*simulation.lines, "every invariant holds" if broken is None else f"MISMATCH {broken}"]
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
    return [*lines, f"sha256 {digest}"], broken


def _play(simulation: Simulation) -> str | None:
    """Run it to its end. User code that the garbage collector had to end is a breach too."""
    hook = sys.unraisablehook
    sys.unraisablehook = _collected
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # coroutines that were never awaited, streams never closed: dropped runs' own
            simulation.run()
    except Mismatch as mismatch:
        return str(mismatch)
    finally:
        sys.unraisablehook = hook
    return None


def _collected(unraisable: Any) -> None:
    bodies.breach(f"the garbage collector ended user code: {unraisable.exc_value!r}")

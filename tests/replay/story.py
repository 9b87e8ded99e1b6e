"""One run's whole life on plain rows, obeyed step by step: claims, bodies, commits, requests, evictions.

A test says what each body answers and when something happens; `Story` does what executor and SQL do, one thing at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from replaykit.limits import Settings
from replaykit.replay.actions import CancelBody, Reconcile, StartBody, Withdraw
from replaykit.replay.calls import Workflow
from replaykit.replay.doubts import Answer
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import (
    Attempt,
    ClaimedRun,
    Entry,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    Mail,
    MailKind,
    Observation,
    Park,
    State,
    Unit,
    Verdict,
)
from replaykit.replay.execution import Execution
from replaykit.replay.failures import decode_error
from replaykit.replay.outcomes import BodyOutcome, error_outcome, result_outcome, timeout_outcome
from tests.replay import drive
from tests.replay.drive import RUN_ID

__all__ = ["SECOND", "Again", "Began", "Story", "TimedOut"]

SECOND = 1_000_000


class Again(Exception):
    """An answer: the body fails with this, and `retry=` says to try again after so many seconds."""

    def __init__(self, error: Exception, after: float = 0.0) -> None:
        self.error = error
        self.after = after


class TimedOut(Exception):
    """An answer: the body's time ran out."""


@dataclass(frozen=True, slots=True)
class Began:
    """A body that began."""

    key: str
    input: Any
    attempt: int
    tries: int
    idempotency_key: str


@dataclass(slots=True)
class Story:
    """A run.

    Attributes:
        answer: what a body gives; raises what it raises, `Again` or `TimedOut`.
        began: every body that began, in order: what the world outside saw.
        given_up: keys of bodies that were cancelled.
        now: the clock, microseconds; moves by itself only when a run waits in memory.
    """

    workflow: Workflow[..., Any]
    answer: Callable[[Began], Any] = lambda began: began.input
    state: State = State.PENDING
    journal: list[Entry] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    mailbox: list[Mail] = field(default_factory=list)
    wakes: int = 0
    claims: int = 0
    now: int = 1_000 * SECOND
    started_at: int | None = None
    available_at: int = 0
    waiting_for: str | None = None
    reason: str | None = None
    output: str | None = None
    error: str | None = None
    began: list[Began] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    bodies: dict[str, StartBody] = field(default_factory=dict)
    asked: list[Reconcile] = field(default_factory=list)  # reconcilers that were asked
    asking: dict[str, Reconcile] = field(default_factory=dict)
    says: Callable[[Reconcile], Answer] = lambda _: Answer(IntentState.UNKNOWN, reason="the shop is closed")
    postpones: bool = False  # bodies do not begin, as if the lease were in question
    driver: Driver | None = None
    refuses: Callable[[Unit], bool] = lambda _: False  # the mailbox has moved on before this unit
    settings: Settings = field(default_factory=Settings)
    _ids: int = 0

    # ------------------------------------------------------------------ what others do

    def cancel(self) -> None:
        """`replaykit.cancel`."""
        if self.started_at is None:
            self.state = State.CANCELLED
        else:
            self._letter(MailKind.CANCEL, None)

    def retry(self, accept: str | None = None) -> None:
        """`replaykit.retry`."""
        assert self.state in (State.FAILED, State.HELD)
        body = {"from": self.state, "accept": accept, "seq": len(self.journal)}
        self._letter(MailKind.RETRY, json.dumps(body))
        self.state, self.reason = State.PENDING, None

    def resolve(self, key: str, word: str, by: str = "eve", **more: Any) -> None:
        """`replaykit.resolve`."""
        assert self.state is not State.RUNNING
        attempt = max(i.attempt for i in self.intents if i.key == key)
        body = {"key": key, "attempt": attempt, "word": word, **more}
        self._letter(MailKind.RESOLVE, json.dumps(body), by)
        self.state, self.reason = State.PENDING, None

    def _letter(self, kind: MailKind, body: str | None, by: str | None = None) -> None:
        self._ids += 1
        self.mailbox.append(Mail(self._ids, kind, body, self.now, by))
        self.wakes += 1
        if self.state in (State.WAITING, State.HELD):
            self.state, self.waiting_for, self.available_at = State.PENDING, None, self.now
        if self.driver is not None:
            self.driver.mail(self.wakes, list(self.mailbox), self.now)

    def evict(self) -> None:
        """The worker dies: what it had in memory is gone."""
        assert self.driver is not None and self.state is State.RUNNING
        self.driver.execution.leave()
        self.driver, self.state = None, State.PENDING
        self.bodies.clear()
        self.asking.clear()

    # ------------------------------------------------------------------ what a worker does

    def claim(self, workflow: Workflow[..., Any] | None = None) -> Driver:
        """Take the run, with other code if given."""
        assert self.state is State.PENDING
        self.workflow = workflow or self.workflow
        self.claims += 1
        self.state = State.RUNNING
        self.started_at = self.now if self.started_at is None else self.started_at
        return self._read(None)

    def _read(self, old: Driver | None) -> Driver:
        last = {a.key: a for a in self.attempts}
        run = ClaimedRun(
            RUN_ID, self._id(), self.workflow.name, "{}", 1, 1, self.started_at or 0, self.wakes, self.available_at
        )
        run = replace(
            run,
            last_seq=len(self.journal),
            claims=self.claims,
            attempts=[
                replace(
                    a, first_digest=next((f.digest for f in self.attempts if f.key == a.key and f.attempt == 1), None)
                )
                for a in last.values()
            ],
            mail=list(self.mailbox),
            intents=[replace(i) for i in self.intents if i.state in ("open", "unknown", "not_landed")],
            observations=[replace(o) for o in self.observations],
            rewinds=[(e.seq, e.to_seq) for e in self.journal if e.kind == Kind.REWIND and e.to_seq is not None],
        )
        execution = Execution(
            self.workflow.fn, (), {}, info=self.workflow.info, run_id=RUN_ID, seed=1, started_at=run.started_at
        )
        drive.begun.append(execution)
        driver = self.driver = Driver(run, execution, new_id=self._id, settings=self.settings, again=old is not None)
        driver.replay([replace(e) for e in self.journal])
        if old is not None:
            driver.adopt(old)
            old.execution.leave()
        driver.begin(self.now)
        return driver

    def _id(self) -> UUID:
        self._ids += 1
        return UUID(int=self._ids)

    def settle(self) -> None:
        """Start and stop bodies and commit, until only bodies and time are waited for."""
        while self.driver is not None:
            driver = self.driver
            for action in driver.take_actions():
                if isinstance(action, CancelBody):
                    self.bodies.pop(action.key, None)
                    self.given_up.append(action.key)
                elif isinstance(action, Withdraw):
                    if action.key not in self.bodies:
                        driver.body_unbegun(action.key, self.now)
                elif isinstance(action, Reconcile):
                    self.asked.append(action)
                    self.asking[action.call.key] = action
                elif self.postpones:
                    continue
                else:
                    self._begin(action)
            unit = driver.next_unit()
            if unit is None:
                return
            if (unit.wakes is not None and unit.wakes != self.wakes) or self.refuses(unit):
                driver.verdict(Verdict.STALE, None, self.now)
            else:
                self.journal += [replace(e) for e in unit.entries]
                self.attempts += unit.attempts
                self._write_effects(unit)
                self.units.append(unit)
                driver.verdict(Verdict.OK, None, self.now)
            if driver.phase is Phase.STALE:
                self._read(driver)
            elif driver.phase is Phase.OVER:
                self._over(driver)

    def _write_effects(self, unit: Unit) -> None:
        for intent in unit.intents:
            there = self.intent(intent.key, intent.attempt)
            if there is not None and there.state == IntentState.NOT_LANDED:
                self.intents.remove(there)
            if there is None or there.state == IntentState.NOT_LANDED:
                self.intents.append(replace(intent))
        for closing in unit.closings:
            closed = self.intent(closing.key, closing.attempt)
            assert closed is not None, f"there is no intent of {closing.key}, attempt {closing.attempt}"
            closed.state, closed.resolved = closing.state, closing.resolved
            old, new = json.loads(closed.evidence or "{}"), json.loads(closing.evidence or "{}")
            closed.evidence = json.dumps({**old, **new, **({"by": closing.by} if closing.by else {})})
        self.observations += unit.observations

    def intent(self, key: str, attempt: int = 1) -> Intent | None:
        """The row of an attempt's intent."""
        return next((i for i in self.intents if i.key == key and i.attempt == attempt), None)

    @property
    def states(self) -> dict[str, list[str]]:
        """The states of all intents, by step, in the order of their attempts."""
        found: dict[str, list[str]] = {}
        for intent in sorted(self.intents, key=lambda i: i.attempt):
            found.setdefault(intent.key, []).append(str(intent.state))
        return found

    def reconcile(self, key: str) -> None:
        """The reconciler that was asked about that step answers, with what `says` gives."""
        assert self.driver is not None
        asked = self.asking.pop(key)
        self.driver.reconciled(key, asked.attempt, self.says(asked), self.now)

    def _begin(self, start: StartBody) -> None:
        call = start.call
        if call.has_intent:
            intent = self.intent(call.key, start.attempt)
            assert intent is not None and intent.state == IntentState.OPEN, f"{call.key} began without an intent"
            assert start.written_at == intent.written_at and intent.idempotency_key == call.idempotency_key
        assert call.key not in self.bodies, f"two bodies of {call.key} at once"
        self.bodies[call.key] = start
        given = next(iter(json.loads(call.input.text).values()), None)
        self.began.append(Began(call.key, given, start.attempt, start.tries, call.idempotency_key))

    def _over(self, driver: Driver) -> None:
        change = driver.change
        assert change is not None
        assert not [i for i in self.intents if i.state == IntentState.OPEN] or not isinstance(change, Finish)
        self.given_up += list(self.bodies)  # what an ended function gave up is stopped once its end is committed
        self.bodies.clear()
        if isinstance(change, Finish):
            self.state, self.output, self.error = change.state, change.output, change.error
        elif isinstance(change, Park | Hold) and change.wakes != self.wakes:
            self.state = State.PENDING
        elif isinstance(change, Park):
            self.state, self.waiting_for = State.WAITING, change.waiting_for
            self.available_at = change.available_at or 1 << 62
        elif isinstance(change, Hold):
            self.state, self.reason = State.HELD, change.reason
        else:
            self.state = State.PENDING
        driver.execution.leave()
        self.driver = None

    def end(self, key: str) -> None:
        """The body of that key ends, with what `answer` gives."""
        assert self.driver is not None
        start = self.bodies.pop(key)
        began = next(b for b in reversed(self.began) if b.key == key)
        call = start.call
        outcome: BodyOutcome
        try:
            outcome = result_outcome(call.info, self.answer(began), self.now, self.settings)
            outcome.call_state = IntentState.LANDED
        except Again as again:
            outcome = error_outcome(again.error, self.now)
            outcome.call_state = IntentState.NOT_LANDED if call.says_not_landed(again.error) else IntentState.UNKNOWN
            self.driver.body_failed(key, outcome, again.after, self.now)
            return
        except TimedOut:
            outcome = timeout_outcome(call, start.attempt, 1.0, self.now)
            outcome.call_state = IntentState.UNKNOWN
        except Exception as error:
            outcome = error_outcome(error, self.now)
            outcome.call_state = IntentState.NOT_LANDED if call.says_not_landed(error) else IntentState.UNKNOWN
        self.driver.body_ended(key, outcome, self.now)

    def step(self) -> bool:
        """One thing happens: a claim, a body's end, or time goes on. False: nothing is left to happen."""
        self.settle()
        if self.state is State.PENDING:
            self.claim()
        elif self.state is State.WAITING:
            self.now = max(self.now, self.available_at)
            self.state, self.waiting_for = State.PENDING, None
        elif self.bodies:
            self.end(next(iter(self.bodies)))
        elif self.asking:
            self.reconcile(next(iter(self.asking)))
        elif self.driver is not None:
            wake = self.driver.next_wake
            assert wake is not None, "the run waits in memory for nothing"
            self.now = max(self.now, wake)
            self.driver.tick(self.now)
        else:
            return False
        self.settle()
        return True

    def play(self) -> Story:
        """Until it has ended or is held."""
        for _ in range(1_000):
            if not self.step():
                return self
        raise AssertionError(f"it does not end: {self.state}, {[e.key for e in self.journal][-5:]}")

    def until(self, fact: Callable[[Story], bool]) -> Story:
        """Until that is so."""
        self.settle()
        while not fact(self):
            assert self.step(), "it ended first"
        return self

    # ------------------------------------------------------------------ what became of it

    @property
    def result(self) -> Any:
        """The result; raises what the run failed with."""
        assert self.state in (State.SUCCEEDED, State.FAILED), f"{self.state}: {self.reason}"
        if self.error is not None:
            raise decode_error(self.error)
        return self.workflow.info.decode_result(self.output or "null")

    @property
    def keys(self) -> list[str]:
        """The journal's keys."""
        return [e.key for e in self.journal]

"""The simulator finds bugs: with one rule of the core or of the statements switched off it names a mismatch.

And it finds none in the core as it is; `make simulate` plays 10,000 schedules.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from replaykit.replay import doubts, driver, effects, execution, letters, loop, outcomes, rewinds, sagas, settler, tries
from replaykit.replay.entries import ClaimedRun, Closing, IntentState, Mail, Unit, Verdict
from tests.simulator import bodies, simulation
from tests.simulator.database import Database, Row
from tests.simulator.simulation import Chances, simulate

ROOT = Path(__file__).resolve().parents[2]
SEEDS_MAX = 600
"""Within so many schedules a missing rule must show."""

ROUGH = Chances(crash=0.02, late=0.15, lost=0.1, stale=0.1, cancel=0.02)


@pytest.fixture(autouse=True)
def no_rubbish() -> None:
    """A mutant may leave code behind that the collector ends during the next test."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    sys.unraisablehook = hook


def first_mismatch(chances: Chances | None = None, seeds: int = SEEDS_MAX) -> str | None:
    """The first broken invariant in the schedules from 0 on."""
    for seed in range(seeds):
        mismatch = simulate(seed, chances)[1]
        if mismatch is not None:
            return mismatch
    return None


def test_the_core_as_it_is_breaks_no_invariant() -> None:
    """Fifty rough schedules, and fifty with the usual chances."""
    assert first_mismatch(ROUGH, 50) is None
    assert first_mismatch(seeds=50) is None


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    """Two fresh processes with other hash seeds print the same trace, to the digest."""
    stories = [trace_of(7, hash_seed) for hash_seed in ("1", "2")]

    assert stories[0].splitlines()[-2].startswith("sha256 ")
    assert stories[0] == stories[1]


def trace_of(seed: int, hash_seed: str) -> str:
    """What `--seed N --trace` prints."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", "--seed", str(seed), "--trace"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


Switch = Callable[[pytest.MonkeyPatch], None]


def commands_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._carry_out

    def carry_out(self: driver.Driver) -> None:
        self._committed = self._last_seq
        real(self)

    patch.setattr(driver.Driver, "_carry_out", carry_out)


def a_verdict_for_each_row(patch: pytest.MonkeyPatch) -> None:
    def insert(self: Database, row: Row, unit: Unit) -> None:
        for n, entry in enumerate(unit.entries):
            if n > 0 or len(unit.entries) == 1:  # the first is refused by itself, its neighbours go in
                row.journal[entry.seq] = (replace(entry), unit.write_id)

    patch.setattr(Database, "insert", insert)


def timers_fire_early(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._deliver_due

    def deliver_due(self: driver.Driver) -> None:
        self._now += 1_000_000
        real(self)
        self._now -= 1_000_000

    patch.setattr(driver.Driver, "_deliver_due", deliver_due)


def timers_without_wakes(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver.next_unit

    def next_unit(self: driver.Driver) -> Unit | None:
        unit = real(self)
        if unit is not None:
            unit.wakes = None
        return unit

    patch.setattr(driver.Driver, "next_unit", next_unit)


def outcomes_overtake_timers(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver.body_ended

    def body_ended(self: driver.Driver, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(driver.Driver, "_deliver_due", lambda _: None)
            real(self, *arguments)

    patch.setattr(driver.Driver, "body_ended", body_ended)


def a_rebuild_drops_outcomes(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver.adopt

    def adopt(self: driver.Driver, old: driver.Driver) -> None:
        real(self, old)
        self._kept.clear()

    patch.setattr(driver.Driver, "adopt", adopt)


def a_rebuild_forgets_bodies_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver.adopt

    def adopt(self: driver.Driver, old: driver.Driver) -> None:
        real(self, old)
        self.in_flight.clear()

    patch.setattr(driver.Driver, "adopt", adopt)


def a_rebuild_keeps_its_token(patch: pytest.MonkeyPatch) -> None:
    real = Database.renew
    patch.setattr(Database, "renew", lambda self, row, old, new: real(self, row, old, old))


def no_fence(patch: pytest.MonkeyPatch) -> None:
    real = Database.write

    def write(self: Database, unit: Unit) -> Verdict:
        unit = replace(unit, token=self.rows[unit.run_id].token or unit.token)
        return real(self, unit)

    patch.setattr(Database, "write", write)


def retries_are_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "recheck", lambda self, unit: False)


def a_claim_reads_an_old_journal(patch: pytest.MonkeyPatch) -> None:
    real = Database.claim

    def claim(self: Database, row: Row, token: UUID, now: int) -> ClaimedRun:
        run = real(self, row, token, now)
        if row.claims % 3 == 0:
            run.entries = run.entries[:-1]
        return run

    patch.setattr(Database, "claim", claim)


def sets_of_tasks_by_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop.RunTask, "__hash__", object.__hash__)


def scopes_numbered_by_the_process(patch: pytest.MonkeyPatch) -> None:
    count = itertools.count(1)
    patch.setattr(loop.Scope, "_number_child", lambda self: f"{next(count)}/")


def chance_from_outside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(execution.Execution, "_chance", lambda self, what: os.urandom(32))


def objects_handed_on_as_they_are(patch: pytest.MonkeyPatch) -> None:
    real = outcomes.error_outcome

    def error_outcome(error: BaseException, started_at: int) -> outcomes.BodyOutcome:
        outcome = real(error, started_at)
        outcome.value = error
        return outcome

    patch.setattr(bodies, "error_outcome", error_outcome)


def a_dropped_run_is_left_to_the_collector(patch: pytest.MonkeyPatch) -> None:
    def leave(self: execution.Execution) -> None:
        self.loop.gone = True
        for part in (self.loop.ready, self.loop.timers, self.loop.generators, self.loop.tasks, self.open):
            part.clear()
        self._root = None

    patch.setattr(execution.Execution, "leave", leave)


def a_drain_starts_bodies(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._carry_out

    def carry_out(self: driver.Driver) -> None:
        draining, self._draining = self._draining, False
        real(self)
        self._draining = draining

    patch.setattr(driver.Driver, "_carry_out", carry_out)


def waiting_runs_stay_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver, "Park", lambda *_: None)


def tries_before_their_rows(patch: pytest.MonkeyPatch) -> None:
    real = tries.Tries.wait
    patch.setattr(
        tries.Tries, "wait", lambda self, call, row, **how: real(self, call, row, **{**how, "committed": True})
    )


def threads_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = tries.Tries.wait
    patch.setattr(
        tries.Tries, "wait", lambda self, call, row, **how: real(self, call, row, **{**how, "lingering": False})
    )


def a_request_overtakes_timers(patch: pytest.MonkeyPatch) -> None:
    real = letters.Letters.__dict__["cancel"].fget

    def cancel(self: letters.Letters) -> Mail | None:
        letter: Mail | None = real(self)
        return replace(letter, sent_at=0) if letter is not None else None

    patch.setattr(letters.Letters, "cancel", property(cancel))


def what_is_set_aside_runs_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rewinds.Rewinds, "result_for", lambda self, call: None)


def another_call_under_an_old_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rewinds.Rewinds, "idempotency_key", lambda self, call, keys, _: keys.of(call.key))


def a_retry_forgets_its_tries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tries.Tries, "__init__", lambda self, _: tries_init(self, ()))


tries_init = tries.Tries.__init__


# ---------------------------------------------------------------------- rules about effects


def nobody_waits_for_what_was_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(execution.Execution, "_owed", property(lambda self: 0, lambda self, owed: None), raising=False)


def bodies_before_their_intents(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Effects, "to_begin", property(lambda self: list(self.written.values())))


def what_was_given_up_runs_again(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._take_answer

    def take_answer(self: driver.Driver, doubt: doubts.Doubt, answer: doubts.Answer) -> None:
        if answer.state is IntentState.NOT_LANDED and doubt.call.abandoned and doubt.outcome is None:
            closing = Closing(doubt.call.key, doubt.intent.attempt, IntentState.NOT_LANDED)
            self._effects.close(closing, self._last_seq)
            self._begin(doubt.call)
        else:
            real(self, doubt, answer)

    patch.setattr(driver.Driver, "_take_answer", take_answer)


def undone_in_the_order_of_calls(patch: pytest.MonkeyPatch) -> None:
    real = execution.Execution.undoing

    def undoing(self: execution.Execution, owed: sagas.Owed, saga: sagas.Saga) -> Any:
        saga.owed.append(owed)
        earliest = min(saga.owed, key=lambda o: o.call.number)
        saga.owed.remove(earliest)
        return real(self, earliest, saga)

    patch.setattr(execution.Execution, "undoing", undoing)


def a_cancel_ends_an_undoing(patch: pytest.MonkeyPatch) -> None:
    async def compensate(self: execution.Execution, saga: sagas.Saga) -> None:
        await saga.undo()

    patch.setattr(execution.Execution, "compensate", compensate)


def undone_while_others_are_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = execution.Execution.outcomes
    patch.setattr(execution.Execution, "outcomes", lambda self, awaited: real(self, lambda: False))


def closed_before_its_entry(patch: pytest.MonkeyPatch) -> None:
    real = effects.Effects.close
    patch.setattr(effects.Effects, "close", lambda self, closing, seq: real(self, closing, 0))
    patch.setattr(driver, "BATCH_ENTRIES_MAX", 1)


def a_rebuild_forgets_what_never_began(patch: pytest.MonkeyPatch) -> None:
    real = effects.Effects.adopt

    def adopt(self: effects.Effects, *arguments: Any) -> None:
        real(self, *arguments)
        self._unbegun.clear()

    patch.setattr(effects.Effects, "adopt", adopt)


def a_rebuild_forgets_what_was_observed(patch: pytest.MonkeyPatch) -> None:
    real = effects.Effects.adopt
    patch.setattr(effects.Effects, "adopt", lambda self, old, unwritten, asked: real(self, old, (), asked))


def a_word_on_another_attempt(patch: pytest.MonkeyPatch) -> None:
    real = letters.Letters.word

    def word(self: letters.Letters, key: str, attempt: int, after: int) -> Any:
        found = [real(self, key, n, after) for n in (attempt, *range(attempt - 1, 0, -1))]
        return next((one for one in found if one is not None), None)

    patch.setattr(letters.Letters, "word", word)


def a_word_that_does_not_fit_counts_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settler, "heard_to", lambda intent: 0)


def another_input_after_a_landing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rewinds.Rewinds, "landed_otherwise", lambda self, call: None)


def a_key_for_each_attempt(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._idempotency_key

    def idempotency_key(self: driver.Driver, call: Any) -> str | None:
        key = real(self, call)
        return f"{key[:30]}{self._attempts_before(call.key):02}" if key and call.has_intent else key

    patch.setattr(driver.Driver, "_idempotency_key", idempotency_key)


def what_began_before_counts_as_never_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Effects, "began_before", lambda self, key: False)


def results_without_their_rows(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._uncommitted

    def uncommitted(self: driver.Driver) -> Any:
        self._in_transactions.clear()
        if self.unit is not None:
            self.unit.within = None
        return real(self)

    patch.setattr(driver.Driver, "_uncommitted", uncommitted)


def a_failed_undoing_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        driver.Driver, "_undoing_failed", lambda self, call, intent, outcome: self._settle(call, outcome, None)
    )


def errors_without_a_question(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver._record_effect

    def record_effect(self: driver.Driver, call: Any, outcome: outcomes.BodyOutcome) -> None:
        if outcome.call_state is IntentState.UNKNOWN:
            outcome.call_state = IntentState.NOT_LANDED
        real(self, call, outcome)

    patch.setattr(driver.Driver, "_record_effect", record_effect)


def no_question_after_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Effects, "doubt", lambda self, call, now: None)


def intents_are_left_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Effects, "close_unbegun", lambda self, intent: None)


def a_failed_try_leaves_its_intent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver.Driver, "_close_try", lambda self, call, outcome: None)


def answers_overtake_timers(patch: pytest.MonkeyPatch) -> None:
    real = driver.Driver.reconciled

    def reconciled(self: driver.Driver, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(driver.Driver, "_deliver_due", lambda _: None)
            real(self, *arguments)

    patch.setattr(driver.Driver, "reconciled", reconciled)


def an_undone_step_stays_landed(patch: pytest.MonkeyPatch) -> None:
    real = effects.Effects.close

    def close(self: effects.Effects, closing: Closing, seq: int) -> None:
        if closing.state != IntentState.COMPENSATED:
            real(self, closing, seq)

    patch.setattr(effects.Effects, "close", close)


@pytest.mark.parametrize(
    ("switch", "says"),
    [
        (tries_before_their_rows, "the rows know of"),
        (threads_are_forgotten, "while the thread of its last try lives"),
        (a_request_overtakes_timers, "a request to end overtook a timer"),
        (what_is_set_aside_runs_again, "set aside and is asked for again"),
        (another_call_under_an_old_key, "another idempotency key"),
        (a_retry_forgets_its_tries, ""),
        (commands_before_commit, "a body of"),
        (a_verdict_for_each_row, "hole"),
        (timers_fire_early, "timer due"),
        (timers_without_wakes, "does not carry the wakes"),
        (outcomes_overtake_timers, "overtook a timer"),
        (a_rebuild_drops_outcomes, "or had its outcome"),
        (a_rebuild_forgets_bodies_in_flight, "in flight"),
        (a_rebuild_keeps_its_token, "conflict under a valid token"),
        (no_fence, ""),
        (retries_are_not_recognised, "conflict under a valid token"),
        (a_claim_reads_an_old_journal, ""),
        (sets_of_tasks_by_address, ""),
        (scopes_numbered_by_the_process, ""),
        (chance_from_outside, ""),
        (objects_handed_on_as_they_are, ""),
        (a_dropped_run_is_left_to_the_collector, ""),
        (a_drain_starts_bodies, "held or drains"),
        (waiting_runs_stay_in_memory, "in memory"),
        (nobody_waits_for_what_was_given_up, ""),
        (bodies_before_their_intents, "its intent is"),
        (what_was_given_up_runs_again, "the code has given it up"),
        (undone_in_the_order_of_calls, "order"),
        (a_cancel_ends_an_undoing, ""),
        (undone_while_others_are_in_flight, "before anybody knew"),
        (closed_before_its_entry, "is not committed"),
        (a_rebuild_forgets_what_never_began, "never began"),
        (a_rebuild_forgets_what_was_observed, "observed"),
        (a_word_on_another_attempt, "attempt"),
        (a_word_that_does_not_fit_counts_on, "times"),
        (another_input_after_a_landing, "it landed with"),
        (a_key_for_each_attempt, "is not the call of its intent"),
        (what_began_before_counts_as_never_begun, "closed not_landed"),
        (results_without_their_rows, "rows"),
        (a_failed_undoing_is_over, "~undo:"),
        (errors_without_a_question, "closed not_landed"),
        (no_question_after_a_death, "is made"),
        (intents_are_left_open, ""),
        (a_failed_try_leaves_its_intent, ""),
        (answers_overtake_timers, "overtook a timer"),
        (an_undone_step_stays_landed, "is undone, and its intent"),
    ],
)
def test_a_missing_rule_shows(switch: Switch, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule, switched off, is missed within some hundred schedules."""
    switch(monkeypatch)

    mismatch = first_mismatch(ROUGH)

    assert mismatch is not None
    assert says in mismatch


def test_a_run_that_never_ends_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator does not hang on what it looks for."""
    monkeypatch.setattr(simulation, "_EVENTS_MAX", 3)

    mismatch = simulate(0)[1]

    assert mismatch is not None
    assert mismatch.startswith("runs do not end")

"""Facts about the driver of a claimed run: what it starts when, what it writes with what, what it does with each verdict."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from replaykit.limits import Settings
from replaykit.replay.actions import Reconcile, StartBody
from replaykit.replay.calls import Workflow, sleep, step, workflow
from replaykit.replay.driver import Driver, Phase
from replaykit.replay.entries import ClaimedRun, Entry, Finish, Hold, Kind, Outcome, Park, Release, State, Unit, Verdict
from replaykit.replay.execution import Execution
from replaykit.replay.keys import idempotency_key
from replaykit.replay.outcomes import error_outcome, result_outcome
from tests.replay import drive
from tests.replay.drive import RUN_ID, echo, other

SECOND = 1_000_000
SETTINGS = Settings()


class Hand:
    """A driver obeyed by hand.

    Attributes:
        journal: what has been committed.
        now: the worker's clock, microseconds; a test moves it.
    """

    def __init__(self, workflow_: Workflow[..., Any], journal: list[Entry], **fields: Any) -> None:
        self.workflow = workflow_
        self.journal = [replace(e) for e in journal]
        self.now = 10 * SECOND
        self.ids = 0
        run = ClaimedRun(RUN_ID, UUID(int=1), workflow_.name, "{}", 1, 1, 0, wakes=3, floor=0, last_seq=len(journal))
        self.driver = self.drive(replace(run, **fields))
        self.driver.replay([replace(e) for e in self.journal])

    def drive(self, run: ClaimedRun) -> Driver:
        """A driver with a new execution."""
        execution = Execution(
            self.workflow.fn, (), {}, info=self.workflow.info, run_id=RUN_ID, seed=1, started_at=run.started_at
        )
        drive.begun.append(execution)
        return Driver(run, execution, new_id=self.new_id, settings=SETTINGS)

    def new_id(self) -> UUID:
        self.ids += 1
        return UUID(int=self.ids)

    def actions(self) -> list[str]:
        """What the driver wants: keys to start, `-key` to cancel."""
        actions = self.driver.take_actions()
        assert not any(isinstance(a, Reconcile) for a in actions)
        return [a.call.key if isinstance(a, StartBody | Reconcile) else f"-{a.key}" for a in actions]

    def end(self, key: str, value: Any = 0, *, raising: BaseException | None = None) -> None:
        """A body ends."""
        info = self.driver.in_flight[key].info
        made = error_outcome(raising, 1) if raising is not None else result_outcome(info, value, 1, SETTINGS)
        self.driver.body_ended(key, made, self.now)

    def unit(self) -> Unit:
        """The unit to send."""
        unit = self.driver.next_unit()
        assert unit is not None
        return unit

    def hear(self, verdict: Verdict, words: str | None = None) -> None:
        """The fate of the unit in flight."""
        unit = self.driver.unit
        assert unit is not None
        if verdict is Verdict.OK:
            self.journal += [replace(e) for e in unit.entries]
        self.driver.verdict(verdict, words, self.now)

    def commit(self) -> Unit:
        """Send the next unit and hear that it is committed."""
        unit = self.unit()
        self.hear(Verdict.OK)
        return unit

    def rebuild(self, journal: list[Entry] | None = None, wakes: int = 4) -> None:
        """Read the run again under a new token, and adopt what there was."""
        old = self.driver
        assert old.phase is Phase.STALE
        if journal is not None:
            self.journal = journal
        fresh = replace(old.run, token=UUID(int=99), wakes=wakes)
        self.driver = self.drive(fresh)
        self.driver.replay([replace(e) for e in self.journal])
        self.driver.adopt(old)
        old.execution.leave()
        self.driver.begin(self.now)


def claim(workflow_: Workflow[..., Any], journal: list[Entry] | None = None, **fields: Any) -> Hand:
    """Claim a run and begin."""
    hand = Hand(workflow_, journal or [], **fields)
    hand.driver.begin(hand.now)
    return hand


@workflow
async def chain() -> int:
    return await step(echo, 1) + await step(echo, 2) + await step(echo, 3)


@workflow
async def pair() -> list[int]:
    async def branch(n: int) -> int:
        return await step(echo, n) + await step(other, n)

    return list(await asyncio.gather(branch(1), branch(2)))


@workflow
async def naps() -> str:
    await sleep(3_600)
    await step(echo, 1)
    return "woken"


# --- commands and commits ---------------------------------------------------------------------------------------------


def test_a_command_waits_for_the_commit_of_what_led_to_it() -> None:
    """The second body starts when the first one's entry is committed, not when it is delivered."""
    hand = claim(chain)
    assert hand.actions() == ["echo"]

    hand.end("echo", 1)
    assert hand.driver.execution.open.keys() == {"echo#2"}
    assert hand.actions() == []

    hand.commit()
    assert hand.actions() == ["echo#2"]


def test_an_execution_runs_ahead_while_its_entries_are_in_flight() -> None:
    """Entries made meanwhile go into the next unit."""
    hand = claim(pair)
    assert hand.actions() == ["1/echo", "2/echo"]

    hand.end("1/echo", 1)
    first = hand.unit()
    hand.end("2/echo", 2)

    assert hand.driver.next_unit() is None
    assert [e.key for e in first.entries] == ["1/echo"]
    hand.hear(Verdict.OK)
    assert hand.actions() == ["1/other"]
    assert [e.key for e in hand.unit().entries] == ["2/echo"]


def test_a_unit_is_not_touched_once_it_was_sent() -> None:
    """Not extended, not re-ordered, and with one write id."""
    hand = claim(pair)
    hand.end("1/echo", 1)
    unit = hand.unit()
    before = replace(unit, entries=list(unit.entries))
    hand.end("2/echo", 2)
    hand.driver.tick(hand.now + 9 * SECOND)

    assert hand.driver.unit is unit
    assert unit == before


def test_an_entry_tells_what_was_called_with_what() -> None:
    """Key, name, input, digest, idempotency key and times."""
    hand = claim(chain)
    hand.now = 12 * SECOND
    hand.end("echo", 7)
    (entry,) = hand.unit().entries

    assert (entry.seq, entry.key, entry.name, entry.kind, entry.outcome) == (1, "echo", "echo", "step", "ok")
    assert (entry.input, entry.output, entry.error) == ('{"n":1}', "7", None)
    assert (entry.at, entry.started_at, entry.attempt) == (12 * SECOND, 1, 1)
    assert entry.idempotency_key == idempotency_key(RUN_ID, "echo")
    assert entry.digest is not None and len(entry.digest) == 64


def test_a_failed_body_is_an_entry_too() -> None:
    """Its error goes to the code."""
    hand = claim(chain)
    hand.end("echo", raising=ValueError("no"))
    unit = hand.commit()

    assert unit.entries[0].outcome == Outcome.ERROR
    assert isinstance(unit.change, Finish) and unit.change.state is State.FAILED


def test_the_end_is_committed_with_the_last_entry() -> None:
    """One unit, so that no reader sees an ended journal and a running run."""
    hand = claim(chain)
    for n, key in enumerate(("echo", "echo#2")):
        hand.end(key, n)
        hand.commit()
    hand.end("echo#3", 2)
    unit = hand.commit()

    assert [e.key for e in unit.entries] == ["echo#3"]
    assert unit.change == Finish(State.SUCCEEDED, "3", None)
    assert hand.driver.phase is Phase.OVER


def test_a_claim_goes_on_where_the_journal_ends() -> None:
    """Recorded steps are not started again."""
    hand = claim(chain)
    hand.end("echo", 1)
    hand.commit()

    assert claim(chain, hand.journal).actions() == ["echo#2"]


def test_a_journal_may_come_in_pages() -> None:
    """What is asked for on the way is not carried out."""
    hand = claim(chain)
    for key in ("echo", "echo#2"):
        hand.end(key, 1)
        hand.commit()
    late = Hand(chain, [])
    late.driver.replay([replace(hand.journal[0])])
    late.driver.replay([replace(hand.journal[1])])
    late.driver.begin(late.now)

    assert late.actions() == ["echo#3"]


def test_a_journal_with_a_hole_holds_the_run() -> None:
    """It is never replayed past it."""
    hand = claim(chain)
    for key in ("echo", "echo#2"):
        hand.end(key, 1)
        hand.commit()
    broken = claim(chain, [hand.journal[1]])

    assert isinstance(broken.unit().change, Hold)
    assert "a hole: entry 2 comes after entry 0" in (broken.driver.execution.hold_reason or "")


# --- giving up --------------------------------------------------------------------------------------------------------


@workflow
async def hurries() -> str:
    try:
        async with asyncio.timeout(5):
            await step(echo, 1)
    except TimeoutError:
        return str(await step(other, 2))
    return "in time"


def test_a_call_given_up_is_cancelled_once_that_is_committed() -> None:
    """The timer's entry first: until then it might not have happened."""
    hand = claim(hurries, started_at=10 * SECOND)
    hand.actions()
    hand.now += 6 * SECOND
    hand.driver.tick(hand.now)
    assert hand.actions() == []

    hand.commit()
    assert hand.actions() == ["-echo", "other"]
    hand.driver.body_ended("echo", result_outcome(step_info(), 1, 1, SETTINGS), hand.now)
    assert hand.driver.next_unit() is None


def step_info() -> Any:
    """Of `echo`."""
    hand = claim(chain)
    return hand.driver.in_flight["echo"].info


def test_a_call_given_up_before_it_was_carried_out_never_starts() -> None:
    """It is taken back instead."""

    @workflow
    async def quits() -> int:
        n = await step(echo, 1)
        task = asyncio.create_task(branch())
        await asyncio.sleep(0)
        task.cancel()
        return n + await step(echo, 2)

    async def branch() -> None:
        await step(other, 1)

    hand = claim(quits)
    hand.actions()
    hand.end("echo", 1)
    hand.commit()

    assert hand.actions() == ["echo#2"]


def test_an_outcome_that_comes_before_its_cancel_is_recorded() -> None:
    """The entry moves the clock and reaches nobody."""
    hand = claim(hurries, started_at=10 * SECOND)
    hand.now += 6 * SECOND
    hand.driver.tick(hand.now)
    hand.end("echo", 1)
    unit = hand.unit()

    assert [e.key for e in unit.entries] == ["~timer#1", "echo"]
    hand.hear(Verdict.OK)
    assert hand.actions() == ["echo", "other"]


# --- time -------------------------------------------------------------------------------------------------------------


def test_what_is_due_is_delivered_before_an_outcome() -> None:
    """A body that ends after its deadline has lost, however late anyone looked."""
    hand = claim(hurries, started_at=10 * SECOND)
    hand.now += 9 * SECOND
    hand.end("echo", 1)

    entries = hand.unit().entries
    assert [e.key for e in entries] == ["~timer#1", "echo"]
    assert [e.at for e in entries] == [19 * SECOND] * 2
    assert entries[0].due_at == 15 * SECOND


def test_timers_are_delivered_in_the_order_of_their_deadlines() -> None:
    """Also when all of them are overdue."""

    @workflow
    async def many() -> list[int]:
        out: list[int] = []

        async def nap(n: int) -> None:
            await asyncio.sleep(n)
            out.append(n)

        await asyncio.gather(*(nap(n) for n in (3, 1, 2, 1)))
        return out

    unit = claim(many).unit()

    assert [e.due_at for e in unit.entries] == [n * SECOND for n in (1, 1, 2, 3)]
    assert isinstance(unit.change, Finish) and unit.change.output == "[1,1,2,3]"


def test_the_clock_of_a_journal_never_goes_back() -> None:
    """Not with a worker whose clock is behind the last one's."""
    hand = claim(chain)
    hand.now = 50 * SECOND
    hand.end("echo", 1)
    hand.commit()
    later = claim(chain, hand.journal)
    later.now = 20 * SECOND
    later.end("echo#2", 2)

    assert later.unit().entries[0].at == 50 * SECOND


def test_the_clock_is_never_before_the_due_time_of_the_claim() -> None:
    """A run is claimed for a timer: that timer fires, whatever the worker's clock says."""
    hand = claim(naps, floor=3_600 * SECOND)

    (entry,) = hand.unit().entries
    assert (entry.due_at, entry.at) == (3_600 * SECOND, 3_600 * SECOND)


def test_a_unit_with_a_timer_carries_the_wakes_that_were_read() -> None:
    """And no other unit does."""
    hand = claim(naps, floor=3_600 * SECOND)
    assert hand.commit().wakes == 3
    assert hand.actions() == ["echo"]

    hand.end("echo", 1)
    assert hand.commit().wakes is None


def test_a_long_wait_leaves_memory() -> None:
    """Until the deadline, unless the mailbox has moved on."""
    unit = claim(naps).unit()

    assert unit.entries == []
    assert unit.change == Park("timer", 3_600 * SECOND, 3)


def test_a_short_wait_stays_in_memory() -> None:
    """And says when it wants to be looked at."""

    @workflow
    async def short() -> None:
        await sleep(12)

    hand = claim(short)

    assert hand.driver.next_unit() is None
    assert hand.driver.next_wake == 12 * SECOND


def test_a_run_with_a_body_in_flight_stays_in_memory() -> None:
    """However long it waits."""

    @workflow
    async def both() -> None:
        await asyncio.gather(sleep(3_600), step(echo, 1))

    hand = claim(both)
    assert hand.driver.next_unit() is None

    hand.end("echo", 1)
    assert hand.commit().change == Park("timer", 3_600 * SECOND, 3)


def test_a_timer_that_arms_itself_in_the_past_leaves_others_their_turn() -> None:
    """At most a thousand in one go: the writer gets its units meanwhile."""

    @workflow
    async def spins() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(0, again)

        again()
        await step(echo, 1)

    hand = claim(spins)

    assert len(hand.unit().entries) == 1_000


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_fenced_driver_has_lost_its_run() -> None:
    """It starts and writes nothing more."""
    hand = claim(pair)
    hand.actions()
    hand.end("1/echo", 1)
    hand.unit()
    hand.hear(Verdict.FENCED)
    hand.end("2/echo", 2)

    assert hand.driver.phase is Phase.LOST
    assert hand.driver.next_unit() is None
    assert hand.actions() == []
    assert hand.driver.next_wake is None


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict.REFUSED, "the database refused an entry: value too large"),
        (Verdict.CONFLICT, "rows of another write stand in the place of entry 1: a defect"),
    ],
)
def test_a_unit_that_is_refused_for_good_breaks_the_run(verdict: Verdict, words: str) -> None:
    """Held, never repaired, with words that name both sides."""
    hand = claim(chain)
    hand.end("echo", 1)
    hand.unit()
    hand.hear(verdict, "value too large")

    assert hand.driver.phase is Phase.BROKEN
    assert (hand.driver.words or "").startswith(words)


def test_a_rebuild_keeps_outcomes_that_were_not_committed() -> None:
    """No body runs twice in one worker: not one whose unit was refused, nor one that ended meanwhile."""
    hand = claim(pair)
    assert hand.actions() == ["1/echo", "2/echo"]
    hand.end("1/echo", 1)
    hand.unit()
    hand.hear(Verdict.STALE)
    hand.end("2/echo", 2)
    hand.rebuild()

    assert hand.actions() == []
    unit = hand.commit()
    assert [(e.key, e.output) for e in unit.entries] == [("1/echo", "1"), ("2/echo", "2")]
    assert unit.token == UUID(int=99)
    assert hand.actions() == ["1/other", "2/other"]


def test_a_rebuild_keeps_bodies_in_flight() -> None:
    """They go on, and their outcomes count."""
    hand = claim(pair)
    assert hand.actions() == ["1/echo", "2/echo"]
    hand.end("1/echo", 1)
    hand.unit()
    hand.hear(Verdict.STALE)
    hand.rebuild()
    assert hand.actions() == []

    hand.end("2/echo", 2)
    assert {e.key for e in hand.commit().entries} == {"1/echo", "2/echo"}


def test_a_rebuild_recognises_what_was_committed_all_the_same() -> None:
    """The refused unit's late attempt may have gone in before the new token."""
    hand = claim(pair)
    hand.actions()
    hand.end("1/echo", 1)
    unit = hand.unit()
    hand.hear(Verdict.STALE)
    hand.rebuild([replace(e) for e in unit.entries])

    assert hand.actions() == ["1/other"]
    assert hand.driver.next_unit() is None


def test_a_timer_that_was_refused_is_decided_again() -> None:
    """With the wakes that are read now."""
    hand = claim(naps, floor=3_600 * SECOND)
    assert hand.unit().wakes == 3
    hand.hear(Verdict.STALE)
    hand.rebuild(wakes=5)

    assert hand.unit().wakes == 5


def test_an_outcome_kept_for_a_call_that_was_given_up_does_not_keep_its_run() -> None:
    """It is never asked for again: the run can wait outside of memory."""

    @workflow
    async def gives_up() -> None:
        try:
            async with asyncio.timeout(5):
                await step(echo, 1)
        except TimeoutError:
            await sleep(86_400)

    hand = claim(gives_up, started_at=10 * SECOND)
    hand.now += 6 * SECOND
    hand.driver.tick(hand.now)
    hand.end("echo", 1)
    unit = hand.unit()
    hand.hear(Verdict.STALE)
    hand.rebuild([replace(unit.entries[0])])  # the timer alone had gone in

    assert isinstance(hand.unit().change, Park)


def test_an_outcome_after_the_functions_end_is_kept_until_the_end_is_committed() -> None:
    """The end may be refused, and the rebuilt run ask for the call again."""

    @workflow
    async def leaves() -> int:
        asyncio.create_task(branch())
        await asyncio.sleep(0)
        return await step(echo, 1)

    async def branch() -> None:
        await step(other, 1)

    hand = claim(leaves)
    assert sorted(hand.actions()) == ["1/other", "echo"]
    hand.end("echo", 1)
    hand.unit()
    hand.end("1/other", 2)
    hand.hear(Verdict.STALE)
    hand.rebuild()

    assert hand.actions() == []


# --- held, drained ----------------------------------------------------------------------------------------------------


@workflow
async def diverges() -> None:
    await asyncio.gather(step(echo, 1), step(echo, 2), drops())


async def drops() -> None:
    await step(other, 1)
    step(other, 2)
    await step(other, 3)


def test_a_held_run_says_so_at_once_and_waits_for_its_siblings() -> None:
    """The reason is written while bodies run; their outcomes are recorded, and nothing new starts."""
    hand = claim(diverges)
    assert len(hand.actions()) == 3
    hand.end("1/other", 1)

    first = hand.commit()
    assert first.change is None and "never awaited" in (first.note or "")
    assert hand.actions() == []

    hand.end("echo", 1)
    assert hand.commit().change is None
    hand.end("echo#2", 2)
    last = hand.commit()
    assert [e.key for e in last.entries] == ["echo#2"]
    assert isinstance(last.change, Hold) and last.change.wakes == 3
    assert [e.key for e in hand.journal] == ["1/other", "echo", "echo#2"]


def test_a_drain_waits_for_bodies_and_hands_the_run_back() -> None:
    """Their outcomes are kept, nothing new starts."""
    hand = claim(pair)
    hand.actions()
    hand.driver.drain(hand.now)
    assert hand.driver.next_unit() is None

    hand.end("1/echo", 1)
    assert hand.commit().change is None
    hand.end("2/echo", 2)
    unit = hand.commit()
    assert isinstance(unit.change, Release)
    assert hand.actions() == []
    assert len(hand.journal) == 2


def test_a_body_that_was_stopped_by_a_drain_has_no_entry() -> None:
    """It runs again elsewhere."""
    hand = claim(chain)
    hand.actions()
    hand.driver.drain(hand.now)
    hand.driver.body_stopped("echo", hand.now)
    unit = hand.unit()

    assert unit.entries == []
    assert isinstance(unit.change, Release)


def test_a_run_that_ends_while_it_drains_ends() -> None:
    """It is not handed back for nothing."""
    hand = claim(chain)
    for key in ("echo", "echo#2"):
        hand.end(key, 1)
        hand.commit()
    hand.driver.drain(hand.now)
    hand.end("echo#3", 1)

    assert isinstance(hand.unit().change, Finish)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_the_code_is_given_the_twin_that_a_replay_will_decode() -> None:
    """Not the body's own object, which the body could still change."""
    kept: list[Any] = []

    async def rows() -> list[int]:
        return [1]

    @workflow
    async def reads() -> int:
        kept.append(await step(rows))
        return len(kept[-1])

    hand = claim(reads)
    own = [1]
    hand.end("rows", own)

    assert kept == [[1]] and kept[0] is not own


def test_a_result_too_large_is_the_steps_error() -> None:
    """It says how large it was, how large it may be, and what to do."""
    settings = Settings(payload_bytes_max=1024)
    outcome = result_outcome(step_info(), 10**2_000, 1, settings)

    assert outcome.outcome is Outcome.ERROR
    assert "has 2,001 bytes, at most 1,024" in str(outcome.value)


def test_a_large_input_is_recorded_by_its_digest() -> None:
    """Of a plain step: its size and head are for people."""

    async def reads(text: str) -> int:
        return len(text)

    @workflow
    async def large() -> int:
        return await step(reads, "x" * 100_000)

    hand = claim(large)
    hand.end("reads", 1)
    unit = hand.commit()
    recorded = json.loads(unit.entries[0].input or "")

    assert recorded["size"] > 100_000 and len(recorded["head"]) <= 200
    assert claim(large, hand.journal).driver.execution.ended is not None


def test_entries_of_timers_and_steps_count_from_one_without_gaps() -> None:
    """`seq` is the place in the order of delivery, whatever was delivered."""

    @workflow
    async def mixed() -> None:
        for n in range(3):
            await asyncio.sleep(1)
            await step(echo, n)

    hand = claim(mixed)
    for key in ("echo", "echo#2", "echo#3"):
        hand.now += 5 * SECOND
        hand.driver.tick(hand.now)
        hand.commit()
        hand.end(key, 1)
    hand.commit()

    assert [e.seq for e in hand.journal] == list(range(1, 7))
    assert [e.kind for e in hand.journal] == [Kind.TIMER, Kind.STEP] * 3

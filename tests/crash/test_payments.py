"""Payments while their workers are killed at random moments: how often a customer is charged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from uuid import UUID

import pytest

from replaykit import Landed, NotLanded
from tests.crash.effects_flows import POLICIES, paying
from tests.crash.effects_house import House, kill
from tests.runtime.facts import eventually, lives

_, IDEMPOTENT, ASKED, UNASKED, _ = POLICIES

KILLS = pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
RUNS, TIMES = 4, 4
LAG_SECONDS = 0.1


class Chaos:
    """Payments of runs that are started as long as there are kills to come."""

    def __init__(self, house: House, policy: str, kills: int) -> None:
        self.house = house
        self.account = house.account(dedups=["charge"] if policy == IDEMPOTENT else [], lag=LAG_SECONDS)
        self.runs: list[UUID] = []
        self._policy = policy
        seed = random.randrange(10**6)
        print(f"seed {seed}")
        self._chance = random.Random(seed)
        while kills:
            batch = [self._start() for _ in range(RUNS)]
            self.runs += batch
            while kills and not self.have_ended(batch):
                kills -= self._kill_one(batch)
        eventually(lambda: self.have_ended(self.runs), "all runs have ended, or wait for a person", 60)

    def _start(self) -> UUID:
        return self.house.start(paying, self._policy, self.house.calls.url(self.account), TIMES)

    def _kill_one(self, batch: Sequence[UUID]) -> int:
        """After a random number of further moments of calls: 1, or 0 if the runs ended before."""
        log = self.house.calls.log
        until = log(self.account).moments + self._chance.randrange(2 * RUNS)
        eventually(lambda: log(self.account).moments >= until or self.have_ended(batch), "calls are made")
        pids = self.house.rows.ask("select distinct pid from workers join runs on worker = workers.id order by 1")
        working = [pid for (pid,) in pids if lives(pid) and not self._is_solo(pid)]
        acting = {call.pid for call in log(self.account).open}
        busy = [pid for pid in working if pid in acting]
        victims = busy if busy and self._chance.random() < 0.8 else working
        if not victims:
            return 0
        kill(self._chance.choice(victims))
        return 1

    def _is_solo(self, pid: int) -> bool:
        """It tries a run apart whose process has ended several times before it got any further: three more would hold it."""
        return any(worker.events("child_started", pid=pid, solo=True) for worker in self.house.crew.workers)

    def have_ended(self, runs: Sequence[UUID]) -> bool:
        """Or wait for a person."""
        query = "select count(*) from runs where id = any(%s) and state not in ('pending', 'running', 'waiting')"
        return bool(self.house.rows.ask(query, list(runs)) == [(len(runs),)])

    def assert_each_was_charged_once(self) -> None:
        """Every payment of every run, and its receipt is what the run returned."""
        effects = self.house.calls.log(self.account).effects
        by_key = {effect.key: effect.receipt for effect in effects}
        assert len(effects) == len(by_key) == len(self.runs) * TIMES
        for run in self.runs:
            keys = self.house.rows.ask(
                "select idempotency_key from journal where run_id = %s and name = 'pay' order by seq", run
            )
            assert self.house.result(run) == [by_key[key] for (key,) in keys]
        assert self.house.rows.ask("select count(*) from in_doubt") == [(0,)]

    @property
    def calls(self) -> Counter[str | None]:
        """How often the server was called with each key."""
        return Counter(call.key for call in self.house.calls.log(self.account).calls)


@KILLS
def test_a_server_that_dedups_by_key_charges_once(house: House, kills: int) -> None:
    """Whatever happens: a call that was interrupted is made again, with the same key."""
    chaos = Chaos(house, IDEMPOTENT, kills)

    print(f"{len(chaos.runs)} runs, {chaos.calls.total()} calls, {len(chaos.calls)} keys")
    chaos.assert_each_was_charged_once()


@KILLS
def test_a_server_that_does_not_charges_once_if_it_is_asked(house: House, kills: int) -> None:
    """It charges for every call that it gets. A call that landed is not made again, one that did not is."""
    chaos = Chaos(house, ASKED, kills)

    log = house.calls.log(chaos.account)
    print(f"{len(chaos.runs)} runs, {len(log.calls)} calls, {len(log.asked)} questions")
    chaos.assert_each_was_charged_once()
    intents = house.rows.ask(
        "select state, count(*) from intents where run_id = any(%s) group by 1 order by 1", chaos.runs
    )
    assert dict(intents)["landed"] == len(chaos.runs) * TIMES
    assert set(dict(intents)) <= {"landed", "not_landed"}


@KILLS
def test_a_server_that_cannot_be_asked_is_called_once_and_a_person_says_what_became_of_it(
    house: House, kills: int
) -> None:
    """Until somebody has looked, nothing is done; then the run goes on to its end."""
    chaos = Chaos(house, UNASKED, kills)
    assert max(chaos.calls.values()) == 1
    held = {run for run in chaos.runs if house.state(run) == "held"}
    doubts = house.rows.ask("select run_id, count(*) from in_doubt group by 1")
    assert dict(doubts) == dict.fromkeys(held, 1)
    words = 0

    while doubtful := house.rows.ask("select run_id, key, idempotency_key from in_doubt"):
        for run, key, idempotency_key in doubtful:
            receipt = receipt_of(house, chaos.account, idempotency_key)
            said = NotLanded() if receipt is None else Landed(receipt)
            house.ask(lambda client: client.handle(run).resolve(key, said, by="ann"))  # noqa: B023
            words += 1
        eventually(lambda: chaos.have_ended(chaos.runs), "they go on")

    print(f"{len(chaos.runs)} runs, {len(held)} held, {words} words")
    chaos.assert_each_was_charged_once()


def receipt_of(house: House, account: str, key: str) -> str | None:
    """What a person finds in the other side's books."""
    return next((e.receipt for e in house.calls.log(account).effects if e.key == key), None)

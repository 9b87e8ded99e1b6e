"""A worker that was stopped, lost its runs meanwhile, and goes on: what it may still do to the world outside."""

from __future__ import annotations

import os
import signal
from uuid import UUID

import pytest

from tests.crash.effects_flows import POLICIES, acting
from tests.crash.effects_house import House
from tests.crash.effects_points import Point
from tests.crash.test_stopped import has_lost
from tests.runtime.facts import eventually

_, IDEMPOTENT, ASKED, UNASKED, _ = POLICIES
LEASE_SECONDS = 1.5


class Zombie:
    """A worker that will be stopped, and its heir."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._own = house.hire_own(LEASE_SECONDS)
        self.id, self.pid = self._own.id, self._own.pid

    def stop_at(self, point: Point, policy: str, account: str, *, sync: bool = False) -> UUID:
        """Start a run, which it takes, and stop it when it gets there."""
        self._house.points.arm(point, "act")
        run = self._house.start(acting, policy, self._house.calls.url(account), sync)
        assert self._house.points.wait_reached() == self.pid
        os.kill(self.pid, signal.SIGSTOP)
        return run

    def lose(self) -> int:
        """Another worker takes over; its pid."""
        heir = self._house.hire_own(LEASE_SECONDS)
        eventually(lambda: has_lost(self._house.rows, self.id), "the run is taken")
        return heir.pid

    def wake(self) -> None:
        """It goes on where it was stopped, and then as a new worker: what it was about to do it has done, or not."""
        self._house.points.go()
        os.kill(self.pid, signal.SIGCONT)
        again = "select 1 from workers where pid = %s and id <> %s and stopped_at is null"
        eventually(lambda: self._house.rows.ask(again, self.pid, self.id), "it is back, under another id")


@pytest.fixture
def zombie(own_house: House) -> Zombie:
    """Gone at the end, with the house."""
    return Zombie(own_house)


@pytest.mark.parametrize("policy", [IDEMPOTENT, ASKED, UNASKED])
def test_a_worker_stopped_between_claim_and_intent_makes_no_call(own_house: House, zombie: Zombie, policy: str) -> None:
    """It wakes while the heir's call is under way: its intent is refused, and its body never begins."""
    house = own_house
    account = house.account(script=["hold"])
    run = zombie.stop_at(Point.BEFORE_INTENT, policy, account)
    heir = zombie.lose()
    assert house.calls.wait_call(account).pid == heir

    zombie.wake()
    assert house.intents(run) == [("act", 1, "open")]
    house.calls.release(account)
    assert house.wait_ended(run) == "succeeded"

    assert [call.pid for call in house.calls.log(account).calls] == [heir] != [zombie.pid]
    assert house.intents(run) == [("act", 1, "landed")]
    written = "select count(*) from intents where run_id = %s and worker = %s"
    assert house.rows.ask(written, run, zombie.id) == [(0,)]


def test_a_worker_stopped_after_its_lease_check_makes_its_call_and_a_server_that_dedups_does_it_once(
    own_house: House, zombie: Zombie
) -> None:
    """Nothing can keep it from that; the key can."""
    house = own_house
    account = house.account(dedups=["deed"])
    run = zombie.stop_at(Point.BEFORE_REQUEST, IDEMPOTENT, account, sync=True)
    zombie.lose()
    assert house.wait_ended(run) == "succeeded"

    zombie.wake()
    second = house.calls.wait_call(account, 2)

    log = house.calls.log(account)
    assert second.pid == zombie.pid != log.calls[0].pid
    assert len({call.key for call in log.calls}) == len(log.effects) == 1
    assert_the_heirs_word_stands(house, run, log.effects[0].receipt)
    assert house.intents(run) == [("act", 1, "landed")]


def test_a_worker_stopped_after_its_lease_check_makes_its_call_and_a_server_that_does_not_does_it_twice(
    own_house: House, zombie: Zombie
) -> None:
    """Documented: "it did not land" assumes that the old worker is dead, and this one is not."""
    house = own_house
    account = house.account()
    run = zombie.stop_at(Point.BEFORE_REQUEST, ASKED, account, sync=True)
    zombie.lose()
    assert house.wait_ended(run) == "succeeded"

    zombie.wake()
    second = house.calls.wait_call(account, 2)

    log = house.calls.log(account)
    assert second.pid == zombie.pid != log.calls[0].pid
    assert [effect.receipt for effect in log.effects] == ["deed-1", "deed-2"]
    assert_the_heirs_word_stands(house, run, "deed-1")
    assert house.intents(run) == [("act", 1, "not_landed"), ("act", 2, "landed")]


def assert_the_heirs_word_stands(house: House, run: UUID, receipt: str) -> None:
    """What the zombie's call came to changes nothing in the journal."""
    assert house.result(run) == receipt
    assert house.journal(run) == [("quiet", "ok"), ("act", "ok"), ("quiet#2", "ok")]


def test_a_worker_stopped_after_its_lease_check_whose_server_cannot_be_asked_makes_the_only_call(
    own_house: House, zombie: Zombie
) -> None:
    """A person is asked, and the heir does nothing: what the zombie does late is all that is done."""
    house = own_house
    account = house.account()
    run = zombie.stop_at(Point.BEFORE_REQUEST, UNASKED, account, sync=True)
    zombie.lose()
    assert house.wait_ended(run) == "held"
    assert house.calls.log(account).calls == []

    zombie.wake()
    call = house.calls.wait_call(account, done=True)

    assert call.pid == zombie.pid
    assert house.state(run) == "held"
    assert house.in_doubt(run) == ["act"]

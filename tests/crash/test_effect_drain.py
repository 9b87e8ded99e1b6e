"""SIGTERM while a call with an effect is under way: it may finish, for the length of the lease."""

from __future__ import annotations

import signal

import pytest

from tests.crash.crew import WorkerProcess
from tests.crash.effects_flows import POLICIES, acting
from tests.crash.effects_house import House
from tests.runtime.facts import eventually

_, IDEMPOTENT, ASKED, UNASKED, _ = POLICIES

SOON_SECONDS = 20.0
"""Far above what leaving takes here."""


def terminate(house: House, worker: WorkerProcess) -> None:
    """Ask it to stop, and wait until its grace period is over: then plain bodies are cancelled."""
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: worker.events("workers_stopping"), "it stops")


@pytest.mark.parametrize(
    ("policy", "sync"),
    [(IDEMPOTENT, False), (UNASKED, False), (UNASKED, True)],
    ids=["idempotent", "irreversible", "irreversible, in a thread"],
)
def test_a_call_with_an_effect_may_outlast_the_grace_period(own_house: House, policy: str, sync: bool) -> None:
    """A plain body beside it is cancelled when that is over; this one is waited for, and recorded."""
    house = own_house
    worker = house.hire("--lease-seconds", "60", "--grace-seconds", "0.1")
    account, plain = house.account(script=["hold"]), house.account(script=["hold"])
    run = house.start(acting, policy, house.calls.url(account), sync)
    house.calls.wait_call(account)
    other = house.start(acting, "plain", house.calls.url(plain))
    house.calls.wait_call(plain)

    terminate(house, worker)
    eventually(lambda: house.calls.log(plain).calls[0].ended == "gone", "the plain body is cancelled")
    assert house.calls.log(account).calls[0].ended is None
    house.calls.release(account)

    assert worker.process.wait(SOON_SECONDS) == 0
    assert house.intents(run) == [("act", 1, "landed")]
    assert house.journal(run) == [("quiet", "ok"), ("act", "ok")]
    assert house.rows.ask("select state, recoveries from runs") == [("pending", 0)] * 2
    house.hire_own()
    assert [house.wait_ended(run), house.wait_ended(other)] == ["succeeded", "succeeded"]
    assert [call.attempt for call in house.calls.log(account).calls] == [1]


@pytest.mark.parametrize(("sync", "done"), [(False, False), (True, True)], ids=["nothing done", "done, in a thread"])
def test_a_call_that_outlasts_the_lease_leaves_an_open_intent_and_the_next_worker_asks(
    own_house: House, sync: bool, done: bool
) -> None:
    """It is not made again if it has landed."""
    house = own_house
    worker = house.hire("--lease-seconds", "1.5", "--grace-seconds", "0.1")
    account = house.account(script=["do-hold" if done else "hold"])
    run = house.start(acting, ASKED, house.calls.url(account), sync)
    house.calls.wait_call(account, done=done)

    terminate(house, worker)

    assert worker.process.wait(SOON_SECONDS) == 0
    assert house.intents(run) == [("act", 1, "open")]
    assert house.journal(run) == [("quiet", "ok")]
    assert house.rows.ask("select state, recoveries from runs") == [("pending", 0)]
    house.hire_own()
    assert house.wait_ended(run) == "succeeded"
    log = house.calls.log(account)
    assert len(log.effects) == 1
    assert [call.attempt for call in log.calls] == ([1] if done else [1, 2])
    states = [state for _, _, state in house.intents(run)]
    assert states == (["landed"] if done else ["not_landed", "landed"])


def test_a_call_that_outlasts_the_lease_and_cannot_be_asked_about_waits_for_a_person(own_house: House) -> None:
    """The next worker does nothing of it."""
    house = own_house
    worker = house.hire("--lease-seconds", "1.5", "--grace-seconds", "0.1")
    account = house.account(script=["hold"])
    run = house.start(acting, UNASKED, house.calls.url(account))
    house.calls.wait_call(account)

    terminate(house, worker)
    assert worker.process.wait(SOON_SECONDS) == 0
    house.hire_own()

    assert house.wait_ended(run) == "held"
    assert house.in_doubt(run) == ["act"]
    assert len(house.calls.log(account).calls) == 1

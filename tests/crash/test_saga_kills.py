"""Sagas whose workers are killed while they undo: each undoing lands once, newest first, and nothing stops them half-way."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import pytest

from replaykit import Landed
from tests.crash.effects_flows import touring
from tests.crash.effects_house import House, kill
from tests.crash.effects_points import Point
from tests.runtime.facts import eventually

POINTS: Final = list(Point)[:7]
BOOKED: Final = ["hotel", "flight", "car"]
UNDONE: Final = ["undo-car", "undo-flight", "undo-hotel"]
UNDOINGS: Final = ["~undo:car", "~undo:flight", "~undo:hotel"]
DEDUPED: Final = ["hotel", "car", "undo-flight"]
"""What the server does once for each key, as the steps declare; the others it does as often as it is asked."""

BY_SERVER: Final = {Point.HELD: "hold", Point.DONE: "do-hold"}


def begin(house: House, step: str, point: Point) -> tuple[UUID, str]:
    """A run whose worker will stop there while it undoes that step, and its account."""
    script = ["answer"] * calls_before(step) + [BY_SERVER[point]] if point in BY_SERVER else []
    account = house.account(dedups=DEDUPED, script=script)
    if point not in BY_SERVER:
        house.points.arm(point, f"~undo:{step}")
    return house.start(touring, house.calls.url(account)), account


def calls_before(step: str) -> int:
    """How many calls come before that of its undoing."""
    return len(BOOKED) + UNDONE.index(f"undo-{step}")


def stopped_at(house: House, account: str, step: str, point: Point) -> int:
    """The pid of the process that has got there."""
    if point in BY_SERVER:
        return house.calls.wait_call(account, calls_before(step) + 1, done=point is Point.DONE).pid
    return house.points.wait_reached()


def effects(house: House, account: str) -> list[str]:
    """What was done, in order."""
    return [effect.what for effect in house.calls.log(account).effects]


def assert_all_is_undone(house: House, run: UUID, account: str) -> None:
    """Once each, newest first; and every intent says what became of its call."""
    assert effects(house, account) == BOOKED + UNDONE
    journal = [(key, "ok") for key in BOOKED + UNDOINGS]
    assert [entry for entry in house.journal(run) if entry[0] != "~cancel"] == journal
    last = {key: state for key, _, state in house.intents(run)}
    assert last == dict.fromkeys(BOOKED, "compensated") | dict.fromkeys(UNDOINGS, "landed")
    assert house.in_doubt(run) == []


@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("step", ["car", "flight", "hotel"])
def test_an_undoing_whose_worker_is_killed_lands_once(house: House, step: str, point: Point) -> None:
    """Elsewhere it goes on where it was; then the run fails as it would have."""
    run, account = begin(house, step, point)
    kill(stopped_at(house, account, step, point))

    assert house.wait_ended(run) == "failed"
    assert "SoldOut" in house.error(run)
    assert_all_is_undone(house, run, account)


def test_a_saga_killed_at_every_undoing_undoes_each_once(house: House) -> None:
    """One death after another."""
    script = ["answer"] * 3 + ["do-hold", "do-hold", "answer", "do-hold"]  # the flight is called again, with its key
    account = house.account(dedups=DEDUPED, script=script)
    run = house.start(touring, house.calls.url(account))
    for what in UNDONE:
        undoing = eventually(lambda: [c for c in house.calls.log(account).calls if c.what == what and c.did], what)  # noqa: B023
        kill(undoing[0].pid)

    assert house.wait_ended(run) == "failed"
    assert_all_is_undone(house, run, account)


def test_a_cancel_does_not_stop_an_undoing_half_way(house: House) -> None:
    """What is owed is undone to the end; then the run ends."""
    run, account = begin(house, "flight", Point.HELD)
    stopped_at(house, account, "flight", Point.HELD)

    house.ask(lambda client: client.handle(run).cancel())
    delivered = "select 1 from journal where run_id = %s and kind = 'cancel'"
    eventually(lambda: house.rows.ask(delivered, run), "the cancel has reached the code")
    assert house.state(run) == "running"
    house.calls.release(account)

    assert house.wait_ended(run) == "cancelled"
    assert_all_is_undone(house, run, account)


def test_a_cancel_and_a_kill_do_not_stop_an_undoing_half_way(house: House) -> None:
    """Both at once."""
    run, account = begin(house, "car", Point.DONE)
    pid = stopped_at(house, account, "car", Point.DONE)

    house.ask(lambda client: client.handle(run).cancel())
    kill(pid)

    assert house.wait_ended(run) == "cancelled"
    assert_all_is_undone(house, run, account)


def failed_undoing(house: House) -> tuple[UUID, str]:
    """A run that is held because the flight could not be undone."""
    account = house.account(dedups=DEDUPED, script=["answer"] * 4 + ["fail"])
    run = house.start(touring, house.calls.url(account))
    assert house.wait_ended(run) == "held"
    return run, account


def test_an_undoing_that_fails_holds_the_run_with_what_was_and_was_not_undone(house: House) -> None:
    """A person sees it in the reason and in the view."""
    run, account = failed_undoing(house)

    assert effects(house, account) == [*BOOKED, "undo-car"]
    assert "undone: car; not undone: flight, hotel" in house.reason(run)
    assert house.in_doubt(run) == ["~undo:flight"]


def test_an_undoing_that_failed_is_finished_by_a_retry(house: House) -> None:
    """With the same key; also if the worker is killed meanwhile."""
    run, account = failed_undoing(house)
    house.points.arm(Point.BEFORE_RECORD, "~undo:flight")

    house.ask(lambda client: client.handle(run).retry())
    kill(house.points.wait_reached())

    assert house.wait_ended(run) == "failed"
    assert_all_is_undone(house, run, account)
    assert len({call.key for call in house.calls.log(account).calls if call.what == "undo-flight"}) == 1


def test_an_undoing_that_was_done_by_hand_is_taken_as_done(house: House) -> None:
    """A person's word; the rest is undone."""
    run, account = failed_undoing(house)

    house.ask(lambda client: client.handle(run).resolve("~undo:flight", Landed(None), by="ann"))

    assert house.wait_ended(run) == "failed"
    assert effects(house, account) == [*BOOKED, "undo-car", "undo-hotel"]
    assert {key: state for key, _, state in house.intents(run)}["flight"] == "compensated"
    assert house.in_doubt(run) == []

"""What becomes of a step of each policy when its worker is killed, or its connection is cut, at each point of its call.

The tables of docs/reference/crash-matrix.md are what these tests find.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from uuid import UUID

import pytest

from tests.crash.effects_flows import POLICIES, SYNC, acting, insisting
from tests.crash.effects_house import House, kill
from tests.crash.effects_points import Point
from tests.crash.effects_table import Found, Table, found

PLAIN, IDEMPOTENT, ASKED, UNASKED, TRANSACTIONAL = POLICIES
POINTS: Final = list(Point)[:7]

ONCE: Final = Found("succeeded", (1,), 1, intents=("landed",))
BARE: Final = Found("succeeded", (1,), 1)
ASKED_NOT: Final = Found("succeeded", (2,), 1, asked=1, intents=("not_landed", "landed"))
ASKED_LANDED: Final = replace(ONCE, asked=1)
UNCALLED: Final = Found("held", (), 0, intents=("unknown",), in_doubt=True, keys=0)
CALLED: Final = replace(UNCALLED, attempts=(1,), keys=1)
DONE: Final = replace(CALLED, effects=1)
AGAIN: Final = replace(ONCE, attempts=(1, 1))
BARE_AGAIN: Final = replace(BARE, attempts=(1, 1))
BARE_TWICE: Final = replace(BARE_AGAIN, effects=2)

KILLED: Final[dict[str, list[Found]]] = {
    PLAIN: [BARE, BARE, BARE, BARE_AGAIN, BARE_TWICE, BARE_TWICE, BARE],
    IDEMPOTENT: [ONCE, ONCE, ONCE, AGAIN, AGAIN, AGAIN, ONCE],
    ASKED: [ONCE, ASKED_NOT, ASKED_NOT, replace(ASKED_NOT, attempts=(1, 2)), ASKED_LANDED, ASKED_LANDED, ONCE],
    UNASKED: [ONCE, UNCALLED, UNCALLED, CALLED, DONE, DONE, ONCE],
    TRANSACTIONAL: [BARE, BARE, BARE, BARE_AGAIN, BARE_AGAIN, BARE_AGAIN, BARE],
}
"""By point."""

CALLED_BEFORE: Final = POINTS[3:]
"""Where the process that is killed has sent its request."""

REDONE: Final = {(TRANSACTIONAL, Point.DONE), (TRANSACTIONAL, Point.BEFORE_RECORD)}
"""Where the server, which here only counts, has a second receipt."""

BY_SERVER: Final = {Point.HELD: "hold", Point.DONE: "do-hold"}

CRASHES: Final = Table("killed", list(POLICIES), POINTS)

RAISED: Final = Found("failed", (1,), 0, keys=1)
REFUSED: Final = replace(RAISED, attempts=(), keys=0)

REFUSALS, BEFORE, AFTER = CUTS = ["refused", "cut, nothing done", "cut, done"]
CUT: Final[dict[str, list[Found]]] = {
    PLAIN: [REFUSED, RAISED, replace(RAISED, effects=1)],
    IDEMPOTENT: [
        replace(REFUSED, intents=("not_landed",)),
        replace(RAISED, intents=("unknown",)),
        replace(RAISED, intents=("unknown",), effects=1),
    ],
    ASKED: [
        replace(REFUSED, intents=("not_landed",)),
        replace(RAISED, intents=("not_landed",), asked=1),
        replace(ONCE, asked=1),
    ],
    UNASKED: [replace(REFUSED, intents=("not_landed",)), CALLED, DONE],
    TRANSACTIONAL: [REFUSED, RAISED, RAISED],
}
"""By what happens to the connection."""

BROKEN: Final = Table("cut", list(POLICIES), CUTS)


def has_intent(policy: str) -> bool:
    """Whether its steps write one."""
    return policy not in (PLAIN, TRANSACTIONAL)


def account_for(house: House, policy: str, *script: str) -> str:
    """An account whose server is what the policy says of it."""
    return house.account(dedups=["deed"] if policy == IDEMPOTENT else [], script=script)


def begin(house: House, policy: str, point: Point, *, sync: bool = False) -> tuple[UUID, str]:
    """A run whose worker will stop there, and its account."""
    account = account_for(house, policy, *([BY_SERVER[point]] if point in BY_SERVER else []))
    if point not in BY_SERVER:
        house.points.arm(point, "act")
    return house.start(acting, policy, house.calls.url(account), sync), account


def kill_at(house: House, account: str, point: Point) -> int:
    """Kill the process that has got there; its pid."""
    if point in BY_SERVER:
        pid = house.calls.wait_call(account, done=point is Point.DONE).pid
    else:
        pid = house.points.wait_reached()
    kill(pid)
    return pid


def assert_intents_at(house: House, run: UUID, policy: str, point: Point) -> None:
    """What has an intent has it committed from its point on, and what has none never has one."""
    if not has_intent(policy) or point is Point.BEFORE_INTENT:
        assert house.intents(run) == []
    else:
        assert house.intents(run) == [("act", 1, "landed" if point is Point.RECORDED else "open")]


@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_whose_worker_is_killed_goes_on_as_its_policy_says(house: House, policy: str, point: Point) -> None:
    """In another process. A step that has begun is recorded once, or a person is asked, and told its key."""
    run, account = begin(house, policy, point)
    killed = kill_at(house, account, point)
    assert_intents_at(house, run, policy, point)
    house.wait_ended(run)

    expected = KILLED[policy][POINTS.index(point)]
    assert found(house, run, account, in_rows=policy == TRANSACTIONAL) == expected
    callers = [call.pid for call in house.calls.log(account).calls]
    if point in CALLED_BEFORE:
        assert callers.pop(0) == killed
    assert killed not in callers
    if expected.state == "succeeded":
        assert house.journal(run) == [("quiet", "ok"), ("act", "ok"), ("quiet#2", "ok")]
        assert house.result(run) == f"deed-{2 if expected.effects == 2 or (policy, point) in REDONE else 1}"
    else:
        assert house.journal(run) == [("quiet", "ok")]
        assert f"replaykit resolve {run} act" in house.reason(run)
    assert_in_doubt_tells_its_key(house, run, account)
    CRASHES.check(policy, point, expected.words)


def assert_in_doubt_tells_its_key(house: House, run: UUID, account: str) -> None:
    """The view has what a person needs to ask the other side: key, input, and since when."""
    query = "select idempotency_key, input->>'account', written_at <= until from in_doubt where run_id = %s"
    for key, given, has_span in house.rows.ask(query, run):
        assert {call.key for call in house.calls.log(account).calls} <= {key}
        assert (given, has_span) == (house.calls.url(account), True)


@pytest.mark.parametrize("point", [Point.BEFORE_REQUEST, Point.HELD, Point.DONE], ids=str)
@pytest.mark.parametrize("policy", SYNC)
def test_a_step_in_a_thread_goes_on_as_any_other(house: House, policy: str, point: Point) -> None:
    """The body is a plain function."""
    run, account = begin(house, policy, point, sync=True)
    kill_at(house, account, point)
    assert_intents_at(house, run, policy, point)
    house.wait_ended(run)

    assert found(house, run, account) == KILLED[policy][POINTS.index(point)]


# ------------------------------------------------------------------ connections


@pytest.fixture
def nobody() -> Iterator[str]:
    """Where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_whose_connection_breaks_goes_on_as_its_policy_says(
    house: House, policy: str, cut: str, nobody: str
) -> None:
    """Its worker lives and sees an exception. `not_landed=` says that a refused connection was no call."""
    account = account_for(house, policy, *({BEFORE: ["cut"], AFTER: ["do-cut"]}.get(cut, [])))
    run = house.start(acting, policy, f"{nobody}/{account}" if cut == REFUSALS else house.calls.url(account))
    house.wait_ended(run)

    expected = CUT[policy][CUTS.index(cut)]
    assert found(house, run, account, in_rows=policy == TRANSACTIONAL) == expected
    if expected.state == "failed":
        assert ("ConnectError" if cut == REFUSALS else "RemoteProtocolError") in house.error(run)
        assert house.journal(run) == [("quiet", "ok"), ("act", "error")]
    BROKEN.check(policy, cut, expected.words)


@pytest.mark.parametrize("cut", ["cut", "do-cut"])
def test_an_idempotent_step_that_is_tried_again_calls_with_the_same_key(house: House, cut: str) -> None:
    """Each try has an intent of its own; what the first one did is done once."""
    account = account_for(house, IDEMPOTENT, cut, cut)
    run = house.start(insisting, IDEMPOTENT, house.calls.url(account))
    house.wait_ended(run)

    assert found(house, run, account) == replace(ONCE, attempts=(1, 2, 3), intents=("unknown", "unknown", "landed"))
    assert house.result(run) == "deed-1"


def test_a_failed_run_that_is_retried_calls_with_the_same_key(house: House) -> None:
    """A person says so, after the connection broke."""
    account = account_for(house, IDEMPOTENT, "do-cut")
    run = house.start(acting, IDEMPOTENT, house.calls.url(account))
    assert house.wait_ended(run) == "failed"

    house.ask(lambda client: client.handle(run).retry())
    assert house.wait_ended(run) == "succeeded"

    assert found(house, run, account) == replace(ONCE, attempts=(1, 2), intents=("unknown", "landed"))
    assert house.result(run) == "deed-1"


@pytest.mark.parametrize(("point", "attempts"), [(Point.COMMIT_LOST, (1, 1)), (Point.COMMIT_UNANSWERED, (1,))], ids=str)
def test_a_transaction_whose_connection_breaks_at_its_commit_stands_once(
    house: House, point: Point, attempts: tuple[int, ...]
) -> None:
    """Only the journal says whether it does; the body runs again if not."""
    account = account_for(house, TRANSACTIONAL)
    house.points.arm(point, "act")
    run = house.start(acting, TRANSACTIONAL, house.calls.url(account))
    house.points.wait_reached()
    house.wait_ended(run)

    assert found(house, run, account, in_rows=True) == replace(BARE, attempts=attempts)
    assert house.journal(run) == [("quiet", "ok"), ("act", "ok"), ("quiet#2", "ok")]
    assert house.rows.ask("select recoveries from runs where id = %s", run) == [(0,)]


@pytest.mark.parametrize("table", [CRASHES, BROKEN], ids=lambda table: str(table.name))
def test_the_page_has_every_policy_and_every_point(table: Table) -> None:
    """And no cell that no test has found."""
    table.check_frame()

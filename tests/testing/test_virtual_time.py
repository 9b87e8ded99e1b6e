"""Virtual time stands still until `sleep` moves it, and everything due on the way runs, in order."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from typing import Any

import pytest

from replaykit import ConfigurationError, OutsideRun, RunCancelled, RunHeld, now, sleep, step, workflow
from replaykit.testing import Client, WaitsForTime
from replaykit.testing.engine import REPLAYED_ENTRIES_MAX
from tests.testing import flows

NEW_YEAR = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def test_days_pass_at_once() -> None:
    """A run that waits for days goes on when the client has slept as long; real time has not passed."""

    async def run() -> None:
        client = Client(now=NEW_YEAR)
        handle = await client.start(flows.remind, 30)
        await client.sleep(dt.timedelta(days=30))

        assert await handle.result() == "30 days later"
        assert client.now() == NEW_YEAR + dt.timedelta(days=30)

    asyncio.run(run())


def test_a_result_that_needs_time_says_until_when() -> None:
    """`result()` of a waiting run raises at once, with the moment and with what to call."""

    async def run() -> None:
        client = Client(now=NEW_YEAR)
        handle = await client.start(flows.remind, 2)

        with pytest.raises(WaitsForTime, match=r"until 2030-01-03T00:00:00\+00:00.*client.sleep\(.*days=2\)"):
            await handle.result()
        assert (await handle.info()).state == "waiting"

        await client.sleep(86_400)
        with pytest.raises(WaitsForTime, match=r"client.sleep\(.*days=1\)"):
            await handle.result(timeout=60)

    asyncio.run(run())


def test_one_who_waits_while_time_moves_gets_the_result() -> None:
    """A result that is awaited beside a sleep comes when its time does."""

    async def run() -> None:
        client = Client()
        handle = await client.start(flows.remind, 2)
        result, _ = await asyncio.gather(handle.result(), client.sleep(dt.timedelta(days=3)))

        assert result == "2 days later"

    asyncio.run(run())


def test_what_is_due_runs_in_order_of_time() -> None:
    """Runs with different waits go on one after the other, each at its own moment."""
    seen: list[tuple[str, str]] = []

    def note(order: str) -> tuple[str, int]:
        seen.append((order, f"{client.now():%d}"))
        return order, 0

    client = Client(stubs={flows.reserve: note}, now=NEW_YEAR)

    async def run() -> None:
        for days in (7, 1, 3):
            await client.start(flows.remind, days)
        await client.sleep(NEW_YEAR + dt.timedelta(days=10))

    asyncio.run(run())

    assert seen == [("1 days", "02"), ("3 days", "04"), ("7 days", "08")]


def test_time_stands_still_while_bodies_run() -> None:
    """A body takes real time and no virtual time, also while the client sleeps."""
    go_on = asyncio.Event()

    async def slow(card: str, cents: int) -> flows.Receipt:
        await go_on.wait()
        return flows.Receipt(card, cents)

    @workflow
    async def twice() -> list[dt.datetime]:
        first = now()
        await step(flows.charge, "a", 1)
        second = now()
        await sleep(60)
        return [first, second, now()]

    async def run() -> None:
        client = Client(stubs={flows.charge: slow}, now=NEW_YEAR)
        handle = await client.start(twice)
        sleeping = asyncio.create_task(client.sleep(3_600))
        await asyncio.sleep(0)
        go_on.set()
        await sleeping

        assert await handle.result() == [NEW_YEAR, NEW_YEAR, NEW_YEAR + dt.timedelta(seconds=60)]

    asyncio.run(run())


def test_a_body_may_last_virtual_time() -> None:
    """`client.sleep` in a body makes it last: the workflow's own time limit then cuts it short."""

    async def slow(card: str, cents: int) -> flows.Receipt:
        await step.current().client.sleep(0)
        await step.current().client.sleep(dt.timedelta(hours=2))
        return flows.Receipt(card, cents)

    @workflow
    async def hasty(seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                return repr(await step(flows.charge, "a", 1))
        except TimeoutError:
            return "too late"

    async def run() -> None:
        client = Client(stubs={flows.charge: slow})
        short, long = await client.start(hasty, 60), await client.start(hasty, 8_000)
        with pytest.raises(WaitsForTime, match="a step that waits"):
            await short.result()
        await client.sleep(60)

        assert await short.result() == "too late"
        await client.sleep(7_200)
        assert await long.result() == "Receipt(card='a', cents=1)"

    asyncio.run(run())


def test_a_steps_timeout_counts_the_virtual_time_that_its_body_takes() -> None:
    """A stub that sleeps longer than the step's `timeout=` is timed out at that moment."""

    async def slow(question: str) -> str:
        await step.current().client.sleep(3_600)
        return "yes"

    async def run() -> None:
        client = Client(stubs={flows.ask: slow}, now=NEW_YEAR)
        handle = await client.start(flows.asking, "really?")
        await client.sleep(60)

        assert await handle.result() == "no answer at 00:00:30"
        assert client.steps(handle)["ask"].outcome == "timeout"

    asyncio.run(run())


def test_back_off_passes_beside_a_body_that_lasts() -> None:
    """A step is tried again at its moments while another one of the same run takes longer."""
    tries: list[str] = []

    async def slow(card: str, cents: int) -> flows.Receipt:
        await step.current().client.sleep(86_400)
        return flows.Receipt(card, cents)

    def fail(url: str) -> dict[str, Any]:
        tries.append(f"{client.now():%H:%M}")
        raise ConnectionError(url)

    @workflow
    async def both() -> tuple[flows.Receipt, str]:
        steps = step(flows.charge, "a", 1), step(flows.fetch, "url")
        receipt, error = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(receipt, flows.Receipt)
        return receipt, repr(error)

    client = Client(stubs={flows.charge: slow, flows.fetch: fail}, now=NEW_YEAR)

    async def run() -> None:
        handle = await client.start(both)
        await client.sleep(86_400)
        receipt, words = await handle.result()

        assert (receipt, words) == (flows.Receipt("a", 1), "ConnectionError('url')")

    asyncio.run(run())

    assert tries == ["00:00", "01:00", "02:00"]


def test_a_body_that_lasts_is_stopped_by_a_cancel() -> None:
    """Cancelling a run whose body waits for virtual time ends it without moving the time."""

    async def slow(card: str, cents: int) -> flows.Receipt:
        await step.current().client.sleep(86_400)
        raise AssertionError

    async def run() -> None:
        client = Client(stubs={flows.charge: slow}, now=NEW_YEAR)
        handle = await client.start(flows.checkout, "card")
        await client.sleep(1)
        await handle.cancel()

        with pytest.raises(RunCancelled):
            await handle.result(timeout=10)
        assert client.now() == NEW_YEAR + dt.timedelta(seconds=1)

    asyncio.run(run())


def test_a_body_that_waits_for_another_run_lets_time_go_on() -> None:
    """A body starts a run by `step.current().client`, waits days for it and gets its result."""

    async def run() -> None:
        client = Client(now=NEW_YEAR)
        handle = await client.start(flows.parent, 3)
        with pytest.raises(WaitsForTime, match="a step that waits until 2030-01-04"):
            await handle.result()
        await client.sleep(dt.timedelta(days=10))

        assert await handle.result() == "3 days later"
        assert await client.handle("3 days", flows.remind).result() == "3 days later"
        assert client.steps(handle)["start_and_wait"].at == NEW_YEAR + dt.timedelta(days=3)

    asyncio.run(run())


def test_every_wait_is_followed_by_a_replay() -> None:
    """A workflow whose second run of the code asks for something else is held, with both sides named."""
    names = iter(["first", "second"])

    @workflow
    async def fickle() -> None:
        await step.options(name=next(names))(flows.reserve, "x")
        await sleep(1)

    async def run() -> None:
        client = Client()
        handle = await client.start(fickle)
        await client.sleep(1)

        with pytest.raises(RunHeld, match=r"first.*second"):
            await handle.result()

    asyncio.run(run())


def test_a_long_run_is_replayed_at_each_doubling() -> None:
    """Else hundreds of waits would each replay hundreds of entries."""
    starts: list[int] = []

    @workflow
    async def poll(times: int) -> int:
        starts.append(times)
        for _ in range(times):
            await step(flows.reserve, "x")
            await sleep(60)
        return times

    async def run() -> None:
        client = Client()
        handle = await client.start(poll, 450)
        await client.sleep(dt.timedelta(minutes=450))
        assert await handle.result() == 450
        assert (await handle.info()).entries == 900

    asyncio.run(run())

    every_wait, doublings = REPLAYED_ENTRIES_MAX // 2 + 1, 2  # 404 and 808 entries
    assert every_wait + doublings <= len(starts) <= every_wait + doublings + 2


def test_a_start_may_be_put_off() -> None:
    """A run with a delay waits for virtual time before its first step."""

    async def run() -> None:
        client = Client(now=NEW_YEAR)
        later = client.options(delay=dt.timedelta(hours=1))
        handle = await later.start(flows.checkout, "card")
        assert (await handle.info()).waiting_for == "start"
        with pytest.raises(WaitsForTime, match=r"waits \(start\) until 2030-01-01T01:00"):
            await handle.result()
        await client.sleep(3_600)

        assert await handle.result() == flows.Receipt("card", 5)

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [dt.datetime(2030, 1, 1), "2030-01-01"])
def test_the_start_of_time_has_a_zone(wrong: Any) -> None:
    """A naive moment is refused."""

    with pytest.raises(ConfigurationError, match="needs a time zone"):
        Client(now=wrong)


@pytest.mark.parametrize("wrong", [dt.datetime(2030, 1, 1), "soon", float("nan")])
def test_a_sleep_is_seconds_a_timedelta_or_an_aware_moment(wrong: Any) -> None:
    """Anything else is refused with a sentence that shows it."""

    async def run() -> None:
        with pytest.raises(ConfigurationError, match=re.escape(repr(wrong))):
            await Client().sleep(wrong)

    asyncio.run(run())


def test_a_workflow_does_not_move_the_time() -> None:
    """The client's `sleep` in a workflow's own code is refused: `replaykit.sleep` is meant."""
    client = Client()

    @workflow
    async def wrong() -> None:
        await client.sleep(1)

    async def run() -> None:
        handle = await client.start(wrong)
        with pytest.raises(Exception, match="do this in a step") as caught:
            await handle.result()
        assert isinstance(caught.value.__cause__, OutsideRun)

    asyncio.run(run())


def test_a_real_limit_of_a_result_is_real_time() -> None:
    """`timeout=` ends the wait for a body that takes too long in reality."""

    async def never(card: str, cents: int) -> flows.Receipt:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        async with Client(stubs={flows.charge: never}) as client:
            handle = await client.start(flows.checkout, "card")
            with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
                await handle.result(timeout=0.01)

    asyncio.run(run())

"""The testing client is a `Client`: same surface, same errors, same journal, in memory."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import replaykit
from replaykit import (
    ConfigurationError,
    KeyConflict,
    NotRetryable,
    RunCancelled,
    RunFailed,
    RunHeld,
    RunNotFound,
    Secret,
    Worker,
    WorkflowUnknown,
    sleep,
    step,
    workflow,
)
from replaykit.testing import Client, WaitsForTime
from tests.testing import flows


def test_it_is_a_client() -> None:
    """Code that takes a `Client` takes this one."""

    assert isinstance(Client(), replaykit.Client)


def test_a_key_finds_its_run() -> None:
    """A second start under a key finds the first run; another workflow under it is refused."""

    async def run() -> None:
        client = Client()
        keyed = client.options(key="order-1")
        first = await keyed.start(flows.checkout, "card")
        again = await keyed.start(flows.checkout, "other")

        assert (first.created, again.created, again.id) == (True, False, first.id)
        with pytest.raises(KeyConflict, match=r"belongs to run .* of 'checkout', not of 'remind'"):
            await keyed.start(flows.remind, 1)
        assert await client.handle("order-1", flows.checkout).result() == flows.Receipt("card", 5)
        assert await client.handle(first.id, flows.checkout).result() == flows.Receipt("card", 5)
        assert (await client.handle("order-1").info()).id == first.id

    asyncio.run(run())


def test_a_row_says_where_the_run_is() -> None:
    """`info()` has the columns of the real one, by virtual time."""

    async def run() -> None:
        start = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
        client = Client(now=start)
        handle = await client.options(key="k", queue="slow", priority=3).start(flows.remind, 1)
        with pytest.raises(WaitsForTime):
            await handle.result()
        info = await handle.info()

        assert (info.workflow, info.key, info.queue, info.priority) == ("remind", "k", "slow", 3)
        assert (info.state, info.waiting_for, info.entries) == ("waiting", "timer", 0)
        assert (info.created_at, info.available_at) == (start, start + dt.timedelta(days=1))
        await client.sleep(86_400)
        info = await handle.info()
        assert (info.state, info.finished_at, info.entries) == ("succeeded", start + dt.timedelta(days=1), 2)

    asyncio.run(run())


@pytest.mark.parametrize("reference", [uuid4(), "nobody"])
def test_what_is_not_there_is_not_found(reference: Any) -> None:
    """Result, row, verbs and steps of a run that does not exist."""

    async def run() -> None:
        client = Client()
        handle = client.handle(reference)
        asked: list[Callable[[], Any]] = [handle.result, handle.info, handle.cancel, handle.retry]
        for ask in asked:
            with pytest.raises(RunNotFound, match=str(reference)):
                await ask()
        with pytest.raises(RunNotFound, match=str(reference)):
            client.steps(reference)

    asyncio.run(run())


def test_starts_by_name_are_checked_and_run() -> None:
    """A workflow that was named or started before is found by its name; another is refused."""

    async def run() -> None:
        client = Client(workflows=[flows.checkout])

        handle = await client.start("checkout", card="card", cents=7)
        assert await client.handle(handle.id, flows.checkout).result() == flows.Receipt("card", 7)
        with pytest.raises(ConfigurationError, match=r"checkout: \$\.cents: an integer is needed"):
            await client.start("checkout", "card", "much")
        with pytest.raises(WorkflowUnknown, match=r"'remind' \(it knows checkout\)"):
            await client.start("remind", 1)

    asyncio.run(run())


def test_two_workflows_of_one_name_are_refused() -> None:
    """As in a worker."""

    @workflow(name="checkout")
    async def other() -> None: ...

    async def run() -> None:
        client = Client(workflows=[flows.checkout])
        with pytest.raises(ConfigurationError, match="two workflows are called 'checkout'"):
            await client.start(other)

    asyncio.run(run())


def test_a_failed_run_tells_its_error() -> None:
    """RunFailed with type, message and cause."""

    async def run() -> None:
        handle = await Client().start(flows.checkout, "card", -1)
        with pytest.raises(RunFailed) as caught:
            await handle.result()

        assert (caught.value.type.endswith("CardDeclined"), caught.value.message) == (True, "card: -1")
        assert isinstance(caught.value.__cause__, flows.CardDeclined)

    asyncio.run(run())


def test_a_held_run_tells_its_reason() -> None:
    """RunHeld as from a database."""

    async def run() -> None:
        handle = await Client().start(flows.stuck)
        with pytest.raises(RunHeld, match="nothing can ever resolve"):
            await handle.result()

    asyncio.run(run())


def test_a_waiting_run_is_cancelled() -> None:
    """Its `finally` runs steps, then it is cancelled."""
    cleaned: list[str] = []

    def clean(order: str) -> tuple[str, int]:
        cleaned.append(order)
        return order, 0

    @workflow
    async def careful() -> None:
        try:
            await sleep(86_400)
        finally:
            await step(flows.reserve, "clean up")

    async def run() -> None:
        client = Client(stubs={flows.reserve: clean})
        handle = await client.start(careful)
        with pytest.raises(WaitsForTime):
            await handle.result()
        await handle.cancel(by="ann")

        with pytest.raises(RunCancelled):
            await handle.result()
        assert (await handle.info()).state == "cancelled"

    asyncio.run(run())

    assert cleaned == ["clean up"]


def test_a_running_run_is_cancelled() -> None:
    """Its body is stopped."""
    began = asyncio.Event()

    async def never(card: str, cents: int) -> flows.Receipt:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        client = Client(stubs={flows.charge: never})
        handle = await client.start(flows.checkout, "card")
        await began.wait()
        await handle.cancel()

        with pytest.raises(RunCancelled):
            await handle.result(timeout=10)

    asyncio.run(run())


def test_a_failed_run_is_taken_on() -> None:
    """`retry()` runs the failed step again, not those that succeeded; attempts go on counting."""
    charged: list[int] = []

    def at_last(card: str, cents: int) -> flows.Receipt:
        charged.append(step.current().attempt)
        if len(charged) == 1:
            raise flows.CardDeclined(card)
        return flows.Receipt(card, cents)

    reserved: list[str] = []

    def reserve(order: str) -> tuple[str, int]:
        reserved.append(order)
        return order, 1

    @workflow
    async def order(card: str) -> flows.Receipt:
        await step(flows.reserve, card)
        return await step(flows.charge, card, 5)

    async def run() -> None:
        client = Client(stubs={flows.charge: at_last, flows.reserve: reserve})
        handle = await client.start(order, "card")
        with pytest.raises(RunFailed):
            await handle.result()

        assert await handle.retry() == "pending"
        assert await handle.result() == flows.Receipt("card", 5)
        with pytest.raises(NotRetryable, match="is succeeded"):
            await handle.retry()
        assert client.steps(handle)["charge"].attempts == 2

    asyncio.run(run())

    assert (charged, reserved) == ([1, 2], ["card"])


def test_steps_tell_what_became_of_them() -> None:
    """By key: name, attempts, outcome, result or error, input, idempotency key, times."""

    async def run() -> None:
        start = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
        client = Client(now=start)
        handle = await client.start(flows.patient, "order")
        await client.sleep(1)
        await handle.result()
        steps = client.steps(handle)

        assert list(steps) == ["charge", "reserve", "charge#2"]
        charge, failed = steps["charge"], steps["charge#2"]
        assert (charge.key, charge.name, charge.attempts, charge.outcome) == ("charge", "charge", 1, "ok")
        assert (charge.result, charge.error, charge.failures) == (flows.Receipt("order", 5), None, ())
        assert charge.input == {"card": "order", "cents": 5}
        assert (charge.started_at, charge.at) == (start, start)
        assert len(charge.idempotency_key) == 32 and charge.idempotency_key != failed.idempotency_key
        assert (failed.name, failed.outcome, failed.result) == ("charge", "error", None)
        assert isinstance(failed.error, flows.CardDeclined)
        assert steps["reserve"].result == ("order", 5)
        with pytest.raises(KeyError, match="no step 'refund' has begun; there are charge, reserve, charge#2"):
            steps["refund"]

    asyncio.run(run())


def test_a_step_that_runs_has_no_outcome_yet() -> None:
    """Its record is there from the moment its body begins."""
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow(card: str, cents: int) -> flows.Receipt:
        began.set()
        await go_on.wait()
        return flows.Receipt(card, cents)

    async def run() -> None:
        client = Client(stubs={flows.charge: slow})
        handle = await client.options(key="k").start(flows.checkout, "card")
        await began.wait()
        record = client.steps("k")["charge"]
        assert (record.attempts, record.outcome, record.at) == (1, None, None)
        go_on.set()
        await handle.result()

    asyncio.run(run())


def test_an_argument_that_is_not_recorded_is_not_in_the_record() -> None:
    """The body gets it; the record shows a secret as `***` and leaves out what cannot be journaled."""

    class Connection:
        pass

    async def login(user: str, password: Secret[str], connection: Connection) -> str:
        assert isinstance(connection, Connection)
        return f"{user} {len(password.reveal())}"

    @workflow
    async def logging_in() -> str:
        return await step(login, "ann", Secret("hunter2"), Connection())

    async def run() -> None:
        client = Client()
        handle = await client.start(logging_in)

        assert await handle.result() == "ann 7"
        shown = client.steps(handle)["login"].input
        assert (list(shown), str(shown["password"])) == (["user", "password"], "***")

    asyncio.run(run())


def test_clients_are_independent() -> None:
    """Each has its own runs, keys and time."""

    async def run() -> None:
        one, other = Client(), Client()
        await one.options(key="k").start(flows.remind, 1)
        handle = await other.options(key="k").start(flows.checkout, "card")
        await one.sleep(86_400)

        assert handle.created and await one.handle("k").result() == "1 days later"
        assert abs(other.now() - dt.datetime.now(dt.UTC)) < dt.timedelta(hours=1)

    asyncio.run(run())


def test_a_client_goes_on_in_another_event_loop() -> None:
    """Its runs and its time outlive the loop; a body that the loop took along runs again."""
    calls: list[int] = []

    async def first_never(card: str, cents: int) -> flows.Receipt:
        calls.append(cents)
        if len(calls) == 1:
            await asyncio.Event().wait()
        return flows.Receipt(card, cents)

    client = Client(stubs={flows.charge: first_never})

    async def begin() -> None:
        await client.options(key="waits").start(flows.remind, 1)
        await client.options(key="runs").start(flows.checkout, "card")
        while not calls:
            await asyncio.sleep(0)

    async def go_on() -> None:
        assert await client.handle("runs", flows.checkout).result(timeout=10) == flows.Receipt("card", 5)
        await client.sleep(86_400)
        assert await client.handle("waits").result() == "1 days later"

    asyncio.run(begin())
    asyncio.run(go_on())


def test_a_client_that_was_closed_goes_on_when_it_is_used_again() -> None:
    """A run that was started right before the close, and a sleep that was cut short by it."""

    async def run() -> None:
        client = Client()
        async with client:
            handle = await client.start(flows.checkout, "card")
            waiting = await client.start(flows.remind, 1)
        assert (await handle.info()).state == "pending"
        assert await handle.result(timeout=10) == flows.Receipt("card", 5)

        sleeping = asyncio.create_task(client.sleep(3_600))
        await asyncio.sleep(0)
        await client.aclose()
        sleeping.cancel()
        with pytest.raises(WaitsForTime):
            await waiting.result(timeout=10)
        await client.sleep(86_400)
        assert await waiting.result(timeout=10) == "1 days later"

    asyncio.run(run())


def test_a_worker_has_no_business_with_it() -> None:
    """It has no database that a Worker could use."""

    async def run() -> None:
        with pytest.raises(ConfigurationError, match="a testing client has no database"):
            async with Worker(Client(), workflows=[flows.checkout]):
                pass

    asyncio.run(run())


def test_a_callers_connection_is_refused(dsn: str) -> None:
    """`options(conn=)` needs the database that the connection is of."""

    async def run() -> None:
        with (
            psycopg.connect(dsn) as connection,
            pytest.raises(ConfigurationError, match="a testing client has no database"),
        ):
            await Client().options(conn=connection).start(flows.checkout, "card")

    asyncio.run(run())


def test_the_journal_is_that_of_a_database(dsn: str) -> None:
    """The same workflow leaves the same entries in memory and in Postgres, times and ids apart."""

    async def run() -> list[tuple[Any, ...]]:
        async with replaykit.Client(dsn) as real, Worker(real, workflows=[flows.patient]):
            there = await real.start(flows.patient, "order")
            expected = await there.result(timeout=30)
        client = Client()
        here = await client.start(flows.patient, "order")
        await client.sleep(120)
        assert await here.result() == expected
        return [
            (e.seq, e.key, e.name, e.kind, e.outcome, e.attempt, e.input, e.output, e.digest)
            for e in client._engine.memory.rows[here.id].journal
        ]

    in_memory = asyncio.run(run())

    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select seq, key, name, kind, outcome, attempt, input::text, output::text, digest"
            " from replaykit.journal order by seq"
        ).fetchall()
    assert sorted(row[1:] for row in in_memory) == sorted(row[1:] for row in rows)
    assert [row[0] for row in in_memory] == [row[0] for row in rows]

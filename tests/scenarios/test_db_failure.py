"""Scenarios of the kind db-failure: answers that are lost, servers that die, hints that nobody hears, deadlocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from replaykit import Client, Handle, Worker, Workflow
from replaykit.limits import Settings
from replaykit.postgres import database as database_module
from replaykit.postgres import transaction
from replaykit.postgres.migrate import upgrade
from replaykit.postgres.schema import work_channel
from replaykit.runtime import worker as worker_module
from tests.conftest import with_database
from tests.crash.crew import Crew, WorkerProcess
from tests.crash.rows import Rows, start
from tests.direct import direct
from tests.faults.pgbouncer import PgBouncer, find_pgbouncer
from tests.faults.server import Own, one_server
from tests.faults.wire import Lose, Wire
from tests.runtime.facts import eventually
from tests.scenarios.outages import TABLE, booked, chain, endless, patient, short

MODULE = "tests.scenarios.outages"
FLOWS: list[Workflow[..., Any]] = [booked, chain, endless, patient, short]

ENTRY = re.compile(rb"insert into \S*journal", re.IGNORECASE)
CLAIM = re.compile(rb"update \S*runs set state = 'running'", re.IGNORECASE)
START = re.compile(rb"insert into \S*runs", re.IGNORECASE)
LISTEN = re.compile(rb"^\s*listen", re.IGNORECASE)


def lines(said: Path) -> Counter[str]:
    """What was done, and how often."""
    return Counter(said.read_text().splitlines())


def change(dsn: str, script: str) -> None:
    """Several statements."""
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        connection.execute(script.encode())


@contextlib.asynccontextmanager
async def working(dsn: str, **settings: Any) -> AsyncIterator[tuple[Client, Worker]]:
    """A client, and a worker beside it."""
    async with Client(dsn) as client, Worker(dsn, workflows=FLOWS, settings=Settings(**settings)) as worker:
        yield client, worker


async def fact(true: Any, what: str) -> None:
    """Wait for it, with the event loop turning."""
    await asyncio.to_thread(eventually, true, what, 60)


# ------------------------------------------------------------------ B031: the acknowledgement of a commit


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [Lose.ANSWER, Lose.WIRE])
@pytest.mark.parametrize(
    ("flow", "what", "times"), [(chain, ENTRY, 12), (chain, CLAIM, 3), (chain, START, 3), (booked, ENTRY, 5)]
)
async def test_b031_a_commit_that_nobody_was_told_of_is_found(
    dsn: str, rows: Rows, said: Path, flow: Workflow[..., Any], what: re.Pattern[bytes], times: int, lost: Lose
) -> None:
    """Of entries, claims, starts, and of a body's own transaction: nothing is done or written twice, no lease is lost."""
    rows.ask(TABLE)
    with Wire(dsn, matters=what) as wire:
        async with working(wire.dsn) as (client, worker):
            worker_id, names = worker.worker_id, [str(n) for n in range(6)]
            handles = []
            for name in names:
                wire.lose(lost, times // 6 + (int(name) < times % 6))
                handles.append(await client.start(flow, str(said), name))
            results = [await handle.result(timeout=60) for handle in handles]
            assert worker.worker_id == worker_id
        assert wire.lost == {lost: times}

    assert results == names
    # A server that finds nobody there may end between a transaction's last statement and its COMMIT: then it was none.
    assert set(lines(said).values()) == {1} or (flow is booked and lost is Lose.WIRE)
    assert rows.ask("select count(*), sum(claims), sum(recoveries) from runs") == [(6, 6, 0)]
    assert rows.ask("select count(*), count(distinct (run_id, seq)), count(distinct (run_id, key)) from journal") == [
        (6 * (6 if flow is chain else 1),) * 3
    ]
    assert rows.ask("select what from public.orders order by what") == ([(n,) for n in names] if flow is booked else [])


SLOW_CLAIM = """
create function public.wait_for_standby() returns trigger language plpgsql as $$
begin
    while not exists (select from public.standby_is_there) loop
        perform pg_sleep(0.01);
    end loop;
    return new;
end $$;
create table public.standby_is_there ();
create trigger slow after update on replaykit.runs for each row
    when (old.state = 'pending' and new.state = 'running') execute function public.wait_for_standby()
"""
"""A claim that takes the server as long as that table is empty."""


@pytest.mark.anyio
async def test_b031_a_claim_that_is_committed_only_after_its_repetition_is_found(
    dsn: str, rows: Rows, said: Path
) -> None:
    """The connection is lost, the server works on (for a standby's sake, say): the repetition passes by rows that are locked."""
    change(dsn, SLOW_CLAIM)
    waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
    with Wire(dsn, matters=CLAIM) as wire:
        async with (
            Client(dsn) as client,
            Worker(wire.dsn, workflows=FLOWS, settings=Settings(lease_seconds=5)) as worker,
        ):
            worker_id = worker.worker_id
            wire.lose(Lose.WIRE)
            handle = await client.start(chain, str(said), "one")
            await fact(lambda: rows.ask(waits) == [(1,)], "the claim waits")
            await fact(lambda: not worker._claim_tokens, "it is repeated and answered")
            assert wire.lost == {Lose.WIRE: 1}
            rows.ask("insert into public.standby_is_there default values returning 1")

            assert await handle.result(timeout=60) == "one"
            assert worker.worker_id == worker_id

    assert rows.ask("select claims, recoveries from runs") == [(1, 0)]


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [Lose.ANSWER, Lose.WIRE])
async def test_b031_what_an_unanswered_claim_took_is_taken_in_once(
    dsn: str, rows: Rows, said: Path, lost: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its repetition, though before each claim leases are looked for that nobody knows of."""
    look = Worker._strays_turn

    async def look_each_time(worker: Worker) -> None:
        worker._strays_at = 0.0
        await look(worker)

    monkeypatch.setattr(Worker, "_strays_turn", look_each_time)
    with Wire(dsn, matters=CLAIM) as wire:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS):
            for number in range(8):
                wire.lose(lost)
                names = [f"{number}-{n}" for n in range(3)]
                handles = [await client.start(chain, str(said), name) for name in names]
                assert [await handle.result(timeout=60) for handle in handles] == names

    assert set(lines(said).values()) == {1}
    assert rows.ask("select max(claims), sum(recoveries) from runs") == [(1, 0)]


@pytest.mark.anyio
async def test_b031_a_letter_whose_receipt_nobody_was_told_of_is_taken_once(dsn: str, rows: Rows, said: Path) -> None:
    """A request to end is the journal's entry; the acknowledgement of that is lost."""
    with Wire(dsn, matters=ENTRY) as wire:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS):
            handles = [await client.start(endless, str(said), str(n)) for n in range(3)]
            begun = "select count(*) = 3 from runs where started_at is not null"
            await fact(lambda: rows.ask(begun) == [(True,)], "all have begun")
            wire.lose(Lose.ANSWER, 3)
            for handle in handles:
                await handle.cancel()
            ended = "select count(*) from runs where state = 'cancelled'"
            await fact(lambda: rows.ask(ended) == [(3,)], "all are cancelled")
        assert wire.lost == {Lose.ANSWER: 3}

    assert lines(said) == {"0": 1, "1": 1, "2": 1}
    assert rows.ask("select kind, count(*) from journal where kind = 'cancel' group by 1") == [("cancel", 3)]
    assert rows.recoveries() == 0


# ------------------------------------------------------------------ a server of one's own


@pytest.fixture(scope="module")
def own_server() -> Iterator[Own]:
    """One whose postmaster may be killed."""
    with one_server() as server:
        yield server


@pytest.fixture
def own_dsn(own_server: Own) -> str:
    """A migrated database on it."""
    return own_server.database()


@pytest.fixture
def own_rows(own_dsn: str) -> Iterator[Rows]:
    """Looks at it."""
    looker = Rows(own_dsn)
    yield looker
    looker.close()


@contextlib.contextmanager
def hired(folder: Path, dsn: str, *flags: str) -> Iterator[WorkerProcess]:
    """A `replaykit worker`, which is ready."""
    crew = Crew(folder, dsn, "127.0.0.1:1", module=MODULE)
    try:
        worker = crew.hire(*flags)
        worker.wait_ready()
        yield worker
    except BaseException:
        print(crew.logs())
        raise
    finally:
        crew.close()


def test_b032_a_result_outlives_an_outage_longer_than_the_lease(
    own_server: Own, own_dsn: str, own_rows: Rows, said: Path, tmp_path: Path
) -> None:
    """Its body ended when the server was gone: it is kept, and written when the server is back, by the same process."""
    own_rows.ask(TABLE)
    doors = [tmp_path / "first", tmp_path / "second"]
    with hired(tmp_path, own_dsn, "--lease-seconds", "5") as worker:
        children = worker.ready()
        runs = start(own_dsn, patient, [(str(said), str(doors[0]))])
        eventually(lambda: lines(said)["waits"] == 1, "the body runs")

        own_server.kill()
        doors[0].touch()
        eventually(lambda: worker.events("journal_write_failed", retrying=True), "the result cannot be written")
        eventually(lambda: down_for(worker) > 6, "the lease is over", 60)
        own_rows.close()
        own_server.restart()
        own_rows.wait_ended(1)

        doors[1].touch()  # with the connections of the second hour
        runs += start(own_dsn, patient, [(str(said), str(doors[1]))])
        own_rows.wait_ended(2)
        assert worker.ready() == children

    assert own_rows.outputs(runs) == dict.fromkeys(runs, ("succeeded", "done"))
    assert lines(said) == {"order before": 2, "waits": 2, "order after first": 1, "order after second": 1}
    assert own_rows.recoveries() == 0


def down_for(worker: WorkerProcess) -> int:
    """Failed heartbeats, each at least a second after the one before but the first ones."""
    return max((event["failures"] for event in worker.events("heartbeat_failed")), default=0)


def test_b037_hints_are_heard_again_after_a_restart(
    own_server: Own, own_dsn: str, own_rows: Rows, said: Path, tmp_path: Path
) -> None:
    """An idle worker that would look by itself only once an hour finds each run that is started after it."""
    with hired(tmp_path, own_dsn, "--poll-seconds", "3600") as worker:
        own_server.kill()
        own_rows.close()
        own_server.restart()
        eventually(lambda: worker.events("hints_restored"), "it listens")

        for number in range(5):
            start(own_dsn, short, [(str(said), str(number))])
            own_rows.wait_ended(number + 1)

        assert len(worker.events("hints_lost")) == 1


# ------------------------------------------------------------------ the connection for hints


@pytest.mark.anyio
async def test_b037_what_was_started_while_nobody_listened_is_found(dsn: str, rows: Rows, said: Path) -> None:
    """The look after it listens again."""
    with Wire(dsn) as wire, capture_logs() as logs:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS, settings=Settings(poll_seconds=3600)):
            await fact(lambda: listens(rows), "it listens")
            wire.refuse()
            wire.cut()
            await fact(lambda: not listens(rows), "it does not")
            handle = await client.start(short, str(said), "unheard")
            wire.heal()
            assert await handle.result(timeout=60) == "unheard"
    assert [e["event"] for e in logs if e["event"].startswith("hints")] == ["hints_lost", "hints_restored"]


def listens(rows: Rows) -> list[tuple[Any, ...]]:
    """The connection on which a worker hears hints, if there is one."""
    return rows.ask(
        "select pid from pg_stat_activity where datname = current_database() and application_name = 'replaykit:worker'"
        " and (query ilike 'listen%%' or query = 'select 1')"
    )


@pytest.mark.anyio
async def test_b038_a_half_open_connection_for_hints_is_found(
    dsn: str, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No packet of it arrives, none is refused: the worker asks whether it lives, says that it does not, and has another."""
    monkeypatch.setattr(worker_module, "_HEARS_SECONDS", 1.0)
    with Wire(dsn, matters=LISTEN) as wire, capture_logs() as logs:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS, settings=Settings(poll_seconds=3600)):
            handle = await client.start(short, str(said), "heard")
            assert await handle.result(timeout=60) == "heard"
            wire.forget(only_mattered=True)
            handle = await client.start(short, str(said), "unheard")
            assert await handle.result(timeout=60) == "unheard"
            again = await client.start(short, str(said), "heard again")
            assert await again.result(timeout=60) == "heard again"
    assert [e["event"] for e in logs if e["event"].startswith("hints")] == ["hints_lost", "hints_restored"]


@pytest.mark.anyio
async def test_b038_polling_covers_the_gap(dsn: str, said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is found."""
    monkeypatch.setattr(worker_module, "_HEARS_SECONDS", 3600.0)
    with Wire(dsn, matters=LISTEN) as wire, capture_logs() as logs:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS):
            wire.forget(only_mattered=True)
            for number in range(3):
                handle = await client.start(short, str(said), str(number))
                assert await handle.result(timeout=60) == str(number)
    assert not [e for e in logs if e["event"].startswith("hints")]


@pytest.mark.anyio
async def test_b038_a_client_that_waits_over_a_half_open_connection_gets_its_result(
    dsn: str, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its looks have no answer: it asks over another connection."""
    monkeypatch.setattr(database_module, "DEAD_AFTER_SECONDS", 3)
    door = tmp_path / "door"
    change(dsn, TABLE)
    with Wire(dsn) as wire:
        async with Client(wire.dsn) as client, Worker(dsn, workflows=FLOWS):
            handle: Handle[str] = await client.start(patient, str(said), str(door))
            waits = asyncio.create_task(handle.result(timeout=60))
            await fact(lambda: lines(said)["waits"] == 1, "the body runs")
            wire.forget()
            door.touch()
            assert await waits == "done"


def test_b040_an_outage_is_no_busy_loop(dsn: str, rows: Rows, said: Path, tmp_path: Path) -> None:
    """Nobody can connect: what the worker does about it costs next to nothing. Then hints are heard again."""
    with Wire(dsn) as wire, hired(tmp_path, wire.dsn, "--poll-seconds", "3600") as worker:
        (child,) = worker.ready()
        wire.refuse()
        wire.cut()
        eventually(lambda: worker.events("hints_lost"), "it has noticed")
        before = (cpu_seconds(child), down_for(worker))
        eventually(lambda: down_for(worker) >= before[1] + 4, "it is out for some seconds", 60)
        spent = cpu_seconds(child) - before[0]
        wire.heal()
        eventually(lambda: worker.events("hints_restored"), "it listens")

        for number in range(2):  # and the backend alone ends, again and again
            eventually(lambda: listens(rows), "it listens")
            rows.ask("select pg_terminate_backend(%s)", listens(rows)[0][0])
            start(dsn, short, [(str(said), str(number))])
            rows.wait_ended(number + 1)

        assert spent < 1.0, "a fraction of the outage"


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------ a pooler, a firewall


@pytest.mark.skipif(find_pgbouncer() is None, reason="needs PgBouncer (Debian: apt-get install pgbouncer)")
@pytest.mark.anyio
async def test_b034_two_connections_of_a_pooler_are_enough(dsn: str, server_dsn: str, rows: Rows, said: Path) -> None:
    """Twenty runs by way of PgBouncer in transaction mode. `pytest --pgbouncer` runs the whole suite like that."""
    rows.ask(TABLE)
    with PgBouncer(server_dsn, pool=2) as pooler:
        async with working(pooler.through(with_database(server_dsn, rows.ask("select current_database()")[0][0]))) as (
            client,
            _,
        ):
            handles = [await client.start(chain, str(said), str(n)) for n in range(10)]
            handles += [await client.start(booked, str(said), str(n)) for n in range(10)]
            results = [await handle.result(timeout=120) for handle in handles]

    assert results == 2 * [str(n) for n in range(10)]
    assert set(lines(said).values()) == {1}
    assert rows.recoveries() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["closed", "forgotten"])
async def test_b035_connections_that_died_during_a_long_step_are_replaced(
    dsn: str, rows: Rows, said: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pooler that closes what is idle, by a firewall that drops it without a word."""
    monkeypatch.setattr(database_module, "DEAD_AFTER_SECONDS", 3)
    assert transaction._say.__kwdefaults__ is not None
    monkeypatch.setitem(transaction._say.__kwdefaults__, "seconds", 3)
    rows.ask(TABLE)
    door = tmp_path / "door"
    with Wire(dsn) as wire:
        async with Client(dsn) as client, Worker(wire.dsn, workflows=FLOWS) as worker:
            worker_id = worker.worker_id
            handle = await client.start(patient, str(said), str(door))
            await fact(lambda: lines(said)["waits"] == 1, "the body runs")
            if how == "closed":
                wire.cut()
            else:
                wire.forget()
            door.touch()
            assert await handle.result(timeout=60) == "done"
            assert worker.worker_id == worker_id

    assert lines(said) == {"order before": 1, "waits": 1, "order after door": 1}
    assert rows.recoveries() == 0


# ------------------------------------------------------------------ large and strange hints


@pytest.mark.anyio
@pytest.mark.parametrize("schema", ["replaykit", "ü" * 31])
async def test_b041_a_hint_carries_nothing(empty_dsn: str, said: Path, schema: str) -> None:
    """However large inputs, keys, queues and batches are: a hint is a channel's name."""
    upgrade(empty_dsn, schema)
    queue = "ü" * 90
    with psycopg.connect(empty_dsn, autocommit=True) as listener:
        listener.execute(f'listen "{work_channel(schema)}"'.encode())
        async with (
            Client(empty_dsn, schema) as client,
            Worker(empty_dsn, workflows=FLOWS, schema=schema, queues=[queue], settings=Settings(poll_seconds=3600)),
        ):
            large = client.options(key="ß" * 200, queue=queue)
            assert await (await large.start(short, str(said), "é" * 20_000)).result(timeout=60) == "é" * 20_000
            starts = (client.options(queue="elsewhere").start(short, str(said), str(n)) for n in range(2_000))
            await asyncio.gather(*starts)
        payloads = {note.payload for note in listener.notifies(timeout=0)}

    assert payloads == {""}


# ------------------------------------------------------------------ deadlocks

GIVES_UP = """
create sequence public.turns;
grant usage on sequence public.turns to public;
create function public.give_up() returns trigger language plpgsql as $$
declare turn bigint := nextval('public.turns');
begin
    if turn % 3 = 0 then
        raise exception using errcode = case when turn % 2 = 0 then '40P01' else '40001' end, message = 'not now';
    end if;
    return null;
end $$;
"""


@pytest.mark.anyio
@pytest.mark.parametrize("table", ["runs", "journal", "workers", "mailbox"])
async def test_b043_a_deadlock_is_tried_again(dsn: str, rows: Rows, said: Path, table: str) -> None:
    """A third of all writes to a table fail as the victim of one: claims, entries, heartbeats, starts, letters."""
    async with working(dsn, lease_seconds=1.0) as (client, worker):
        worker_id = worker.worker_id
        change(dsn, GIVES_UP)
        rows.ask(
            f"create trigger give_up after insert or update on {table} for each statement"
            " execute function public.give_up()"
        )
        handles = [await client.start(chain, str(said), str(n)) for n in range(6)]
        asked = await client.start(endless, str(said), "asked")
        begun = "select count(*) from runs where started_at is not null"
        await fact(lambda: rows.ask(begun) == [(7,)], "all have begun")
        await asked.cancel()
        for number, handle in enumerate(handles):
            assert await handle.result(timeout=60) == str(number)
        cancelled = "select count(*) from runs where state = 'cancelled'"
        await fact(lambda: rows.ask(cancelled) == [(1,)], "it has ended as asked")
        if table == "workers":
            await fact(lambda: rows.ask("select last_value from public.turns")[0][0] > 9, "the lease was renewed")
        assert worker.worker_id == worker_id

    assert rows.ask("select last_value > 3 from public.turns") in ([(True,)], [(table != "mailbox",)])
    assert set(lines(said).values()) == {1}
    assert rows.recoveries() == 0


@pytest.mark.anyio
async def test_b043_twenty_workers_that_poll_do_not_deadlock(dsn: str, rows: Rows, said: Path) -> None:
    """They claim, write, are told, renew leases, promote and sweep, all at the same time."""
    await crowd(dsn, rows, said, 20)


@pytest.mark.anyio
async def test_b044_ten_workers_begin_together_on_a_big_table(dsn: str, rows: Rows, said: Path) -> None:
    """With the runs of dead workers to hand back, rows to promote and to remove: none of them is in another's way."""
    await crowd(dsn, rows, said, 10, many=20_000)


async def crowd(dsn: str, rows: Rows, said: Path, workers: int, many: int = 1_000) -> None:
    """That many workers begin at once and do all that there is to do; none of them tells of trouble."""
    rows.ask(
        "insert into runs (id, workflow, state, waiting_for, available_at) select gen_random_uuid(), 'another', 'waiting',"
        " 'timer', now() from generate_series(1, %s)",
        many,
    )
    async with Client(dsn) as client:
        handles = [await client.start(chain, str(said), str(n)) for n in range(40)]
        later = [await client.start(endless, str(said), f"asked {n}") for n in range(20)]
        orphan(rows)
        with capture_logs() as logs:
            async with contextlib.AsyncExitStack() as stack:
                settings = Settings(lease_seconds=5.0, heartbeat_seconds=0.1, poll_seconds=0.05)
                crew = [Worker(dsn, workflows=FLOWS, settings=settings) for _ in range(workers)]
                await asyncio.gather(*(stack.enter_async_context(worker) for worker in crew))
                begun = "select count(*) from runs where workflow <> 'another' and started_at is null"
                await fact(lambda: rows.ask(begun) == [(0,)], "all have begun")
                await asyncio.gather(*(handle.cancel() for handle in later))
                for handle in handles:
                    await handle.result(timeout=120)
                await fact(partial(has_ended, rows, 60), "all have ended")

    assert [e for e in logs if "error" in e or e["log_level"] == "error"] == []
    assert set(lines(said).values()) == {1}


def orphan(rows: Rows) -> None:
    """A third of the runs belong to workers that died."""
    rows.ask(
        "insert into workers (id, hostname, pid, expires_at, lease_seconds, queues, workflows, version, python)"
        " select gen_random_uuid(), 'gone', n, now() - interval '1 hour', 30, '{default}', '{}', '0', '3'"
        " from generate_series(1, 20) n"
    )
    rows.ask(
        "update runs set state = 'running', started_at = now(), claims = 1, lease_token = gen_random_uuid(), protocol = 1,"
        " worker = (select id from workers where runs.id is not null order by random() limit 1)"
        " where workflow <> 'another' and id in (select id from runs where workflow <> 'another' order by id limit 20)"
    )


def has_ended(rows: Rows, number: int) -> bool:
    """So many, in whatever way."""
    return rows.ended() == number

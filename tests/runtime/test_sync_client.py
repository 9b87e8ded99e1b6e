"""`SyncClient`: the real client for code without an event loop, whatever else goes on in its process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import psycopg
import pytest
from pydantic import PlainSerializer

from replaykit import (
    Client,
    ConfigurationError,
    DatabaseUnreachable,
    KeyConflict,
    RunCancelled,
    RunFailed,
    RunNotFound,
    SyncClient,
    SyncHandle,
    Worker,
    step,
    workflow,
)
from replaykit.replay.calls import Workflow
from replaykit.runtime.portal import Portal
from tests.direct import connections, direct
from tests.runtime.facts import eventually
from tests.runtime.shop import CardDeclined, Receipt, checkout, nap

Sql = psycopg.Connection[tuple[Any, ...]]

SERIALIZED_IN: list[threading.Thread] = []


def noted_thread(card: str) -> str:
    SERIALIZED_IN.append(threading.current_thread())
    return card


@workflow
async def thread_minded(card: Annotated[str, PlainSerializer(noted_thread)]) -> str:
    """Its argument notes where it is encoded."""
    return card


def start_from_a_body(dsn: str) -> str:
    """A sync step that starts a run."""
    with SyncClient(dsn) as client:
        return str(client.options(key="of a body").start(nap, 0).id)


async def wait_in_an_async_body(dsn: str, run: str) -> str:
    """What would block the worker's loop."""
    with SyncClient(dsn) as client:
        return str(client.handle(run).result())


@workflow
async def starter(dsn: str) -> str:
    return await step(start_from_a_body, dsn)


@workflow
async def blocker(dsn: str, run: str) -> str:
    return await step(wait_in_an_async_body, dsn, run)


@workflow
async def careless(dsn: str) -> str:
    """A start in the workflow's own code, which would be made again at each replay."""
    return str(SyncClient(dsn).start(nap, 0).id)


WORKFLOWS: list[Workflow[..., Any]] = [checkout, nap, thread_minded, starter, blocker, careless]


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    with psycopg.connect(direct(dsn), autocommit=True) as connection:
        yield connection


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as client:
        yield client


@pytest.fixture
def worker(dsn: str) -> Iterator[None]:
    """A worker in a thread of its own: its loop is not the test's."""
    with in_a_loop_of_its_own(dsn):
        yield


@contextlib.contextmanager
def in_a_loop_of_its_own(dsn: str) -> Iterator[None]:
    ready: threading.Event = threading.Event()
    stop: list[Any] = []

    async def work() -> None:
        async with Worker(dsn, workflows=WORKFLOWS):
            stopped = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
            ready.set()
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    assert ready.wait(30)
    yield
    stop[0]()
    thread.join()


def waits(sql: Sql) -> bool:
    """Whether a client of this database waits for a run's end: its watcher has looked."""
    row = sql.execute(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'replaykit:client' and query like '%p.output::text%'"
    ).fetchone()
    return row != (0,)


# --- the same as Client -----------------------------------------------------------------------------------------------


def test_a_run_is_started_awaited_and_looked_at(client: SyncClient, worker: None) -> None:
    """Typed results, `created`, the row, a handle by key and by id, a start by name."""

    keyed = client.options(key="order-42", priority=3)
    first = keyed.start(checkout, "visa", cents=7)
    second = keyed.start(checkout, "visa")

    assert first.result(timeout=30) == Receipt("visa", 7)
    assert (first.created, second.created, second.id) == (True, False, first.id)
    assert (first.info().state, first.info().key, first.info().priority) == ("succeeded", "order-42", 3)
    assert client.handle("order-42", checkout).result() == Receipt("visa", 7)
    assert client.handle(first.id).result() == {"card": "visa", "cents": 7}
    assert client.start("checkout", "visa", cents=8).result(timeout=30) == {"card": "visa", "cents": 8}
    assert repr(first) == f"<SyncHandle {first.id} of checkout>"


def test_errors_are_those_of_the_client(client: SyncClient, worker: None) -> None:
    """With their causes, raised in the caller's thread."""

    with pytest.raises(RunFailed, match="CardDeclined: visa: -1") as caught:
        client.start(checkout, "visa", -1).result(timeout=30)
    assert isinstance(caught.value.__cause__, CardDeclined)
    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        client.options(key="k").start(nap, 3600).result(timeout=0)
    with pytest.raises(KeyConflict, match="'k' belongs to run"):
        client.options(key="k").start(checkout, "visa")
    with pytest.raises(RunNotFound):
        client.handle("nobody").info()
    with pytest.raises(ConfigurationError, match=r"checkout: \$\.cents"):
        client.start("checkout", "visa", "x")


def test_a_database_that_is_not_there_is_an_error_at_once() -> None:
    """And the client may be closed all the same."""

    with SyncClient("postgresql://127.0.0.1:1/nowhere") as client, pytest.raises(DatabaseUnreachable, match="nowhere"):
        client.start(checkout, "visa")


def test_a_person_s_verbs_are_there(client: SyncClient) -> None:
    """`cancel` of a run that nobody has begun, `retry` of one that has not failed."""

    handle = client.start(nap, 3600)

    assert handle.cancel(by="ann") == "cancelled"
    with pytest.raises(RunCancelled):
        handle.result(timeout=30)
    with pytest.raises(Exception, match="only failed and held runs are retried"):
        handle.retry()


def test_values_are_encoded_in_the_callers_thread(client: SyncClient) -> None:
    """What is bound to a thread (an ORM's object) is touched in that thread only."""

    SERIALIZED_IN.clear()
    client.start(thread_minded, "visa")

    assert set(SERIALIZED_IN) == {threading.current_thread()}


def test_many_threads_share_a_client(dsn: str, client: SyncClient, sql: Sql) -> None:
    """Their starts share commits, over one connection."""

    with ThreadPoolExecutor(16) as threads:
        handles = list(threads.map(lambda n: client.start(checkout, "visa", n), range(200)))

    rows = sql.execute("select count(*), count(distinct xmin::text) from replaykit.runs").fetchone()
    assert rows is not None
    assert rows[0] == len({handle.id for handle in handles}) == 200
    assert rows[1] < 200
    assert len(connections(dsn)) == 1


# --- whatever else goes on in its process -----------------------------------------------------------------------------


@pytest.mark.parametrize("parent", ["idle", "awaiting"])
def test_a_forked_child_leaves_its_parents_connections_alone_and_opens_its_own(dsn: str, parent: str) -> None:
    """Though the child ends as interpreters end, and frees all it has."""

    ran = subprocess.run(
        [sys.executable, "-m", "tests.runtime.forking", dsn, parent],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "child": {"started": 3, "known": "checkout"},
        "child's exit": 0,
        "connections kept": True,
        "parent goes on": True,
        "same connections": True,
    }
    assert ran.stderr == ""


def test_a_keyboard_interrupt_ends_the_wait_and_nothing_else(client: SyncClient, sql: Sql) -> None:
    """Ctrl-C while a result is awaited; the client goes on."""

    handle = client.start(checkout, "visa")

    def press() -> None:
        try:
            eventually(lambda: waits(sql), "the client waits")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):
        presser.start()
        handle.result()
    presser.join()

    assert handle.info().state == "pending"
    assert client.start(checkout, "visa").created
    assert client.handle(handle.id).cancel() == "cancelled"
    with pytest.raises(RunCancelled):
        handle.result(timeout=30)


def test_a_close_ends_those_who_wait_and_the_client_opens_again(client: SyncClient, sql: Sql) -> None:
    """In other threads; nothing is opened to be closed."""

    client.close()
    handle = client.start(checkout, "visa")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(handle.result)
        eventually(lambda: waits(sql), "the other thread waits")
        client.close()
        with pytest.raises(DatabaseUnreachable, match="was closed while this call waited"):
            waiting.result(timeout=30)

    assert [thread for thread in threading.enumerate() if thread.name == "replaykit-portal"] == []
    assert handle.info().state == "pending"


def test_a_client_that_nobody_closed_keeps_no_interpreter_alive(dsn: str) -> None:
    """Nor says it anything at the end."""

    code = (
        "import logging, sys\n"
        "from replaykit import SyncClient\n"
        "from tests.runtime.shop import checkout\n"
        "logging.getLogger('replaykit').setLevel('ERROR')\n"  # the tests' server is not durable
        "client = SyncClient(sys.argv[1])\n"
        "print(client.start(checkout, 'visa').created)"
    )
    ran = subprocess.run([sys.executable, "-c", code, dsn], capture_output=True, text=True, timeout=60, check=False)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


def test_a_client_that_is_dropped_takes_its_thread_along(dsn: str) -> None:
    """Once its handles are gone, too."""

    client = SyncClient(dsn)
    handle: SyncHandle[Receipt] | None = client.start(checkout, "visa")
    serving = client._portal._serving
    assert serving is not None
    gone = weakref.ref(client)
    del client
    assert handle is not None and handle.info().state == "pending"
    del handle
    gc.collect()

    assert gone() is None
    eventually(lambda: not serving.thread.is_alive(), "the thread ends")


# --- beside event loops -----------------------------------------------------------------------------------------------


def test_it_works_inside_a_running_loop(client: SyncClient, worker: None) -> None:
    """B076: it blocks that loop, and comes back; a worker elsewhere executes the run."""

    async def main() -> Receipt:
        return client.start(checkout, "visa", 7).result(timeout=30)

    assert asyncio.run(main()) == Receipt("visa", 7)


def test_a_wait_that_would_block_the_worker_of_the_run_is_refused(client: SyncClient, dsn: str) -> None:
    """B076: on the loop of a Worker `result()` would never come back. In a thread it does."""

    async def main() -> Receipt:
        async with Worker(dsn, workflows=[checkout]):
            handle = client.start(checkout, "visa", 7)
            with pytest.raises(ConfigurationError, match="would block the event loop that a Worker runs on"):
                handle.result()
            return await asyncio.to_thread(handle.result, 30)

    assert asyncio.run(main()) == Receipt("visa", 7)


def test_bodies_may_start_runs_and_async_ones_may_not_block(client: SyncClient, dsn: str, worker: None) -> None:
    """A sync body has a thread of its own; an async one shares its loop with the worker."""

    started = client.start(starter, dsn).result(timeout=30)
    assert client.handle("of a body").info().id.hex == started.replace("-", "")
    with pytest.raises(RunFailed, match="would block the event loop"):
        client.start(blocker, dsn, started).result(timeout=30)


def test_a_start_in_a_workflows_own_code_is_refused(client: SyncClient, dsn: str, worker: None) -> None:
    """It would be made again at each replay."""

    with pytest.raises(RunFailed, match="OutsideRun: start\\(\\) of a SyncClient in a workflow's own code"):
        client.start(careless, dsn).result(timeout=30)


def test_a_run_outlives_the_loop_that_started_it(client: SyncClient, dsn: str, worker: None) -> None:
    """B077: a helper thread's `asyncio.run` returns at once; the run is executed on the worker's loop."""

    started: list[Any] = []

    async def start() -> None:
        started.append((await Client(dsn).start(checkout, "visa", 7)).id)

    helper = threading.Thread(target=lambda: asyncio.run(start()))
    helper.start()
    helper.join()

    assert client.handle(started[0], checkout).result(timeout=30) == Receipt("visa", 7)


@pytest.mark.parametrize("how", ["close in __del__", "start in __del__", "finally of a generator"])
def test_what_is_asked_while_the_interpreter_ends_keeps_it_from_ending_no_longer(dsn: str, how: str) -> None:
    """Threads stand still by then: nobody would answer."""
    code = """
import sys
from replaykit import SyncClient
client = SyncClient(sys.argv[1])
try:
    client.handle("nobody").info()
except Exception as error:
    print(type(error).__name__)
class Owner:
    def __init__(self, act): self.act = act
    def __del__(self): self.act()
def rows():
    try:
        yield 1
    finally:
        client.close()
if sys.argv[2] == "close in __del__":
    owner = Owner(client.close)
elif sys.argv[2] == "start in __del__":
    owner = Owner(lambda: client.handle("nobody").info())
else:
    owner = rows(); next(owner)
keep = [owner]; keep.append(keep)
sys.modules["kept"] = keep
"""
    ended = subprocess.run([sys.executable, "-c", code, dsn, how], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "RunNotFound\n"


@pytest.mark.parametrize("option", [{"delay": dt.datetime.max.replace(tzinfo=dt.UTC)}, {"priority": True}])
def test_an_option_that_no_row_could_hold_is_refused(option: dict[str, Any]) -> None:
    """In a sentence, before anything is sent."""
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        SyncClient("postgresql://nowhere").options(**option)


def test_a_portal_whose_loop_can_start_no_thread_any_more_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on so at an interpreter's end, where a client is let go that nobody closed."""
    said: list[object] = []

    async def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    async def nothing() -> None: ...

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_default_executor", refuse)
    monkeypatch.setattr(threading, "excepthook", said.append)
    portal = Portal()
    portal.run(nothing)
    portal.close(nothing)

    assert said == []

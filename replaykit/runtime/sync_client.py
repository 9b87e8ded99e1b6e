"""`SyncClient`: the client for code without an event loop. It is the real one, behind a portal.

    client = SyncClient("postgresql://localhost/app")
    handle = client.options(key="order-42").start(checkout, order)
    receipt = handle.result()

Values are bound and decoded in the caller's thread; only what waits for the database waits in the portal.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, overload
from uuid import UUID

from replaykit.errors import ConfigurationError, OutsideRun
from replaykit.postgres.borrowed import Borrowable
from replaykit.replay.answers import Landed
from replaykit.replay.calls import Moment, Workflow
from replaykit.replay.entries import State
from replaykit.replay.execution import current_execution
from replaykit.replay.requests import UNSET, Unset
from replaykit.runtime.client import CLAIM_TASK, Client, Handle, RunInfo
from replaykit.runtime.portal import Portal
from replaykit.runtime.target import Target

__all__ = ["SyncClient", "SyncHandle"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class SyncClient:
    """Starts runs and finds them again, without an event loop of one's own. Opens at first use; needs no `with`.

    Any number of threads may use it. A forked child leaves its parent's connections alone and opens its own.

    Args:
        dsn: a URL or libpq connection string. None: `REPLAYKIT_DATABASE_URL`, else the embedded Postgres, which
            migrates itself (a URL is never migrated unasked: `replaykit db migrate`).
        schema: the schema that replaykit's tables live in.
    """

    def __init__(self, dsn: str | None = None, schema: str = "replaykit") -> None:
        self._client = Client(dsn, schema)
        self._portal = Portal()

    @property
    def target(self) -> Target:
        """Which database it is."""
        return self._client.target

    @overload
    def start(self, workflow: Workflow[P, T], /, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[T]: ...
    @overload
    def start(self, workflow: str, /, *args: Any, **kwargs: Any) -> SyncHandle[Any]: ...
    def start(self, workflow: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a run, or find the one that holds the key; as `Client.start`, with the same errors.

        With `options(conn=)` the statement runs in this thread, on that connection.
        """
        _refuse_in_workflow("start()")
        client = self._client
        call = client._call(workflow, args, kwargs)
        conn = client._options.conn
        if conn is None:
            found = self._portal.run(lambda: client._start(call))
        else:
            found = client._borrower.talk(conn, client._conversation(call))
        return SyncHandle(self._portal, client._started(call, found))

    def options(
        self,
        *,
        key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: Moment | None = None,
        conn: Borrowable | Unset = UNSET,
    ) -> Self:
        """A client on the same connections that starts with these options; as `Client.options`. `conn` is a sync one."""
        twin = copy.copy(self)
        twin._client = self._client.options(key=key, queue=queue, priority=priority, delay=delay, conn=conn)
        return twin

    @overload
    def handle(self, run: UUID | str) -> SyncHandle[Any]: ...
    @overload
    def handle(self, run: UUID | str, workflow: Workflow[..., T]) -> SyncHandle[T]: ...
    def handle(self, run: UUID | str, workflow: Workflow[..., Any] | None = None) -> SyncHandle[Any]:
        """A handle of a run that is there already, by its id or its key; as `Client.handle`."""
        handle = self._client.handle(run) if workflow is None else self._client.handle(run, workflow)
        return SyncHandle(self._portal, handle)

    def close(self) -> None:
        """Close the connections and end the thread; calls that still wait raise DatabaseUnreachable. The client may be
        used again: it opens anew."""
        self._portal.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncHandle(Generic[T]):
    """A run, seen from outside by code that blocks. It holds no connection."""

    __slots__ = ("_handle", "_portal")

    def __init__(self, portal: Portal, handle: Handle[T]) -> None:
        self._portal = portal
        self._handle = handle

    @property
    def id(self) -> UUID:
        """The run's id. Of a handle by key it is known once `info()` or `result()` was called."""
        return self._handle.id

    @property
    def created(self) -> bool:
        """True if the `start` that returned it made the run; False: it was there already."""
        return self._handle.created

    def info(self) -> RunInfo:
        """The run's row, now; as `Handle.info`."""
        return self._ask("info()", self._handle.info)

    def result(self, timeout: Moment | None = None) -> T:
        """Block until the run's end and return its result; as `Handle.result`, with the same errors.

        Raises:
            ConfigurationError: this thread's event loop has the worker that might have to execute the run.
        """
        _refuse_in_workflow("result()")
        _refuse_before_worker()
        ended = self._ask("result()", lambda: self._handle._ended(timeout))
        return self._handle._outcome(ended)

    def cancel(self, by: str | None = None) -> State:
        """Ask the run to end; as `Handle.cancel`."""
        return self._ask("cancel()", lambda: self._handle.cancel(by))

    def retry(self, accept: Literal["inputs"] | None = None, by: str | None = None) -> State:
        """Take a failed or held run on; as `Handle.retry`."""
        return self._ask("retry()", lambda: self._handle.retry(accept, by))

    def resolve(
        self, key: str, answer: Landed[Any] | BaseException, *, by: str | None = None, comment: str | None = None
    ) -> State:
        """Say what became of a call that is in doubt; as `Handle.resolve`."""
        return self._ask("resolve()", lambda: self._handle.resolve(key, answer, by=by, comment=comment))

    def _ask(self, what: str, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        _refuse_in_workflow(what)
        return self._portal.run(make)

    def __repr__(self) -> str:
        return f"<Sync{repr(self._handle)[1:]}"


def _refuse_in_workflow(what: str) -> None:
    if current_execution() is not None:
        raise OutsideRun(f"{what} of a SyncClient in a workflow's own code, which is replayed: call it in a step")


def _refuse_before_worker() -> None:
    """A blocked event loop executes nothing: the wait could last for ever."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs here
        return
    if any(task.get_name() == CLAIM_TASK for task in tasks):
        raise ConfigurationError(
            "result() of a SyncClient would block the event loop that a Worker runs on: await Client's there, or call it"
            " in a thread (asyncio.to_thread)"
        )

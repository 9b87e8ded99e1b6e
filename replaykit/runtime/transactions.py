"""Transactional steps: the body's writes and the step's entry in one transaction, from its first `connection()` to COMMIT.

    connection() in a body     `BodyTransaction.connect`: the first one begins the transaction
    the body returns           its transaction is settled, and kept open: `RunTransactions.keep`
    the driver has a unit      with the step's entry in it (`unit.within`): `RunTransactions.write`, over that transaction
    anything else              rolled back

A transaction that the database ended so that others could go on (a serialization failure, a deadlock), or whose connection was
lost, has done nothing: before its body's end the body runs again at once; after it the journal is read again (STALE), and the
body runs again unless its entry is there.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

from replaykit.errors import OutsideRun
from replaykit.events import log
from replaykit.postgres.transaction import Commit, Connections, Transaction, check_kind
from replaykit.replay.entries import Unit, Verdict
from replaykit.replay.requests import CallStep
from replaykit.runtime.writer import OnVerdict

__all__ = ["BodyTransaction", "Lent", "RunTransactions"]

T = TypeVar("T")

_CONFLICTS_MAX: Final = 10  # tries of a body, or of a commit, before the database's error is the step's
_PAUSE_SECONDS: Final = 0.01  # before the second try, at most; twice as much before the next
_PAUSE_SECONDS_MAX: Final = 1.0


class Lent(Protocol):
    """What a body may take of its run's database: made for each try, used by few."""

    @property
    def used(self) -> bool:
        """Whether the body has asked for a connection, and what it wrote waits for its commit."""
        ...

    def connect(self, kind: type[Any] | None) -> Any:
        """What `step.current().connection(kind)` gives."""

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Await the body, as often as the database asks for it; its value."""

    def run_in_thread(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a sync body."""

    async def commit(self, unit: Unit) -> Commit:
        """Commit what it wrote, and the unit with it."""
        ...

    def discard(self) -> None:
        """Roll back what it wrote; the body is waited for no longer."""


class BodyTransaction:
    """The transaction of one body, if it asks for a connection.

    Args:
        connections: the worker's.
        call: whose body.
        chance: between 0 and 1; makes two that conflict part.
    """

    def __init__(self, connections: Connections, call: CallStep, chance: Callable[[], float] = random.random) -> None:
        self._connections = connections
        self._call = call
        self._chance = chance
        self._host = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._transaction: Transaction | None = None
        self._over = False

    @property
    def used(self) -> bool:
        """Whether there is a transaction to commit."""
        return self._transaction is not None

    def connect(self, kind: type[Any] | None) -> Any:
        """A connection or session in the body's transaction: to be awaited on the event loop, itself in a thread.

        Raises:
            ConfigurationError: a class that cannot be given.
            OutsideRun: the step is no longer waiting for this body, or this is a thread of an async one.
        """
        on_loop = asyncio._get_running_loop() is self._host
        if not on_loop and self._call.info.is_async:
            raise OutsideRun(
                f"connection() in a thread that the async body of step {self._call.key} has begun: ask in the body, or make"
                " the step's function a plain `def`, which runs in a thread as a whole"
            )
        kind = check_kind(kind, in_async=on_loop)
        return self._lend(kind) if on_loop else self._lend_sync(kind)

    async def _lend(self, kind: type[Any] | None) -> Any:
        async with self._lock:
            transaction = await self._begun()
            if kind is not None:
                await self._connections.engines.prepare_async()
            return await transaction.lend(kind)

    def _lend_sync(self, kind: type[Any] | None) -> Any:
        transaction = self._wait(self._begun_once())
        if kind is not None:
            self._connections.engines.prepare()
        return transaction.lend_sync(kind)

    async def _begun_once(self) -> Transaction:
        async with self._lock:
            return await self._begun()

    async def _begun(self) -> Transaction:
        if self._transaction is None and not self._over:
            begun = await self._connections.begin()
            if self._over:  # meanwhile
                self._connections.discard(begun)
            else:
                self._transaction = begun
        if self._transaction is None:
            raise OutsideRun(f"connection(): step {self._call.key} is no longer waiting for this body")
        return self._transaction

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """In the body's thread: what is done on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._host).result()

    # ------------------------------------------------------------------ the body

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Await the body; again, if the database has ended its transaction for reasons of its own. Its value.

        Raises:
            BaseException: what the body raised, or why what it wrote cannot be committed. Nothing of it is left.
        """
        for tries in itertools.count(1):
            try:
                value = await function(*args, **kwargs)
                if self._transaction is not None:
                    await self._transaction.flush()
                    await self._transaction.settle()
                return value
            except BaseException as error:
                # What a plain function has returned to be awaited cannot be awaited twice.
                tries_max = _CONFLICTS_MAX if function is self._call.function else 0
                if not await self._failed(error, tries, tries_max):
                    raise
            await asyncio.sleep(self._pause(tries))
            args, kwargs = self._call.info.fresh_arguments(self._call.input)
        raise AssertionError("unreachable")

    def run_in_thread(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a sync body. A coroutine that it returns is for `run`."""
        for tries in itertools.count(1):
            try:
                value = function(*args, **kwargs)
                if self._transaction is not None and not isinstance(value, Coroutine):
                    self._transaction.flush_sync()
                    self._wait(self._transaction.settle())
                return value
            except BaseException as error:
                if self._over or not self._wait(self._failed(error, tries, _CONFLICTS_MAX)):
                    raise
            time.sleep(self._pause(tries))
            args, kwargs = self._call.info.fresh_arguments(self._call.input)
        raise AssertionError("unreachable")

    async def _failed(self, error: BaseException, tries: int, tries_max: int) -> bool:
        """Roll back; whether the body is to run again."""
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return False
        again = tries < tries_max and not self._over and transaction.has_conflict(error)
        await transaction.roll_back()
        if again:
            log.info("step_transaction_again", step=self._call.key, tries=tries, error=error)
        return again

    def _pause(self, tries: int) -> float:
        return pause_seconds(tries, self._chance())

    # ------------------------------------------------------------------ its end

    async def commit(self, unit: Unit) -> Commit:
        """Write the unit over the body's connection, and commit."""
        transaction, self._transaction = self._transaction, None
        self._over = True
        return await transaction.commit(unit) if transaction is not None else Commit(Verdict.STALE)

    def discard(self) -> None:
        """Roll back, soon. What of the body still runs can write no more."""
        self._over = True
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            self._connections.discard(transaction)


def pause_seconds(tries: int, chance: float) -> float:
    """How long to wait before another try: so that two that conflict part, not long enough to be noticed."""
    return chance * min(_PAUSE_SECONDS * 2.0 ** (tries - 1), _PAUSE_SECONDS_MAX)


class RunTransactions:
    """Transactions of one run: of bodies that have ended and whose entries are on their way. For plain callbacks of the
    worker's event loop.

    Args:
        run_id: whose.
        lend: makes what a body may ask for a connection.
        chance: between 0 and 1.
    """

    def __init__(
        self, run_id: UUID, lend: Callable[[CallStep], Lent], chance: Callable[[], float] = random.random
    ) -> None:
        self._run_id = run_id
        self._lend = lend
        self._chance = chance
        self._kept: dict[str, Lent] = {}
        self._failures: dict[str, int] = {}  # commits in a row that the database refused
        self._errors: dict[str, Exception] = {}  # the last of so many that the step gets it
        self._writing: set[asyncio.Task[None]] = set()

    def lend(self, call: CallStep) -> Lent:
        """For a body that is to begin.

        Raises:
            Exception: the database would not commit the tries before it, and no more are made.
        """
        self.forget(call.key)  # of a try before it: it was not committed, else there would not be another
        error = self._errors.pop(call.key, None)
        if error is not None:
            raise error
        return self._lend(call)

    def keep(self, key: str, lent: Lent) -> None:
        """A body has ended, and its entry is about to be written."""
        self.forget(key)
        self._kept[key] = lent

    def forget(self, key: str) -> None:
        """Its entry will not be written."""
        lent = self._kept.pop(key, None)
        if lent is not None:
            lent.discard()

    def forget_all(self) -> None:
        """The run's journal is read again, or the run has left."""
        for key in list(self._kept):
            self.forget(key)

    def write(self, unit: Unit, on_verdict: OnVerdict) -> None:
        """Write a unit over the transaction of the body that it names; `on_verdict` is called from a plain callback."""
        assert unit.within is not None
        lent = self._kept.pop(unit.within, None)
        host = asyncio.get_running_loop()
        if lent is None:  # forgotten: the journal says what stands
            host.call_soon(on_verdict, Verdict.STALE, None)
            return
        writing = self._write(lent, unit, unit.within, on_verdict)
        # Not in the context of the body, whose end may be what is being handled.
        task = host.create_task(writing, name="replaykit_commit_within", context=contextvars.Context())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, lent: Lent, unit: Unit, key: str, on_verdict: OnVerdict) -> None:
        try:
            commit = await lent.commit(unit)
        except Exception as error:  # never without a verdict
            commit = Commit(Verdict.STALE, error=error)
        if commit.error is None:
            self._failures.pop(key, None)
        else:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            log.info("step_commit_failed", run_id=str(self._run_id), step=key, failures=failures, error=commit.error)
            if failures >= _CONFLICTS_MAX:
                del self._failures[key]
                self._errors[key] = commit.error
            await asyncio.sleep(pause_seconds(failures, self._chance()))
        asyncio.get_running_loop().call_soon(on_verdict, commit.verdict, commit.words)

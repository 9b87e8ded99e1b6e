"""Transactions of steps' bodies, on connections of the worker's own: lent for one body, committed together with its entry.

One connection, two ends. The body has a *view*: psycopg's own class, so that whatever takes a connection takes it, though it
cannot end the transaction. We speak over the same libpq connection ourselves, while the view's lock is ours or it is retired.

    begin     BEGIN, and a mark that this transaction alone bears; nothing that takes a snapshot, so that the body's first
              statement may still be SET TRANSACTION
    settle    the body has returned: its sessions are flushed, its deferred constraints checked, the mark is found again
    commit    the fenced statement that writes the entry, and COMMIT, in one message: the run's row is locked only once the
              server has all of it, so that a process that stops on the way keeps nobody waiting
    roll_back
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg
from psycopg import generators, waiting
from psycopg.abc import AdaptContext, PQGen
from psycopg.adapt import AdaptersMap
from psycopg.pq import ConnStatus, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row
from typing_extensions import override

from replaykit.errors import OutsideRun
from replaykit.events import log
from replaykit.limits import LOCK_TIMEOUT_SECONDS
from replaykit.postgres import journal
from replaykit.postgres.database import (
    BYTES_PER_SECOND_MIN,
    DEAD_AFTER_SECONDS,
    Database,
    cut_off,
    first_line,
    is_lock_timeout,
    is_refusal,
    is_transient,
)
from replaykit.postgres.orm import Engines, check_kind, is_session
from replaykit.replay.entries import Unit, Verdict

__all__ = ["Commit", "Connections", "Transaction", "check_kind"]

Row = tuple[Any, ...]
RV = TypeVar("RV")

_MARK: Final = "replaykit.transaction"
_BACKOFF_SECONDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)  # before another try to connect, or to lock the run's row
_TELL_EVERY: Final = 30  # tries between two words about that
_RETIRE_SECONDS: Final = 5.0  # for a statement of the body's to end that was cancelled, before its connection is cut
_CANCEL_SECONDS: Final = 0.1  # between two requests to end it: the first may come before there is one
_CLOSE_SECONDS: Final = 2.0  # for commits in flight when the worker closes
_LOOK_SECONDS: Final = 0.01

# What the body may have narrowed for its own statements, or set for its own role.
_OURS: Final = (
    f"set local lock_timeout = {round(LOCK_TIMEOUT_SECONDS * 1000)}; set local statement_timeout to default;"
    " set local enable_seqscan = off; reset role"
)


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of a transaction and of the unit that was written in it.

    Attributes:
        verdict: OK; REFUSED; or STALE: it does not stand, or nobody knows, and only the journal can say.
        words: the database's, where it refused.
        error: why it does not stand, where that was an error.
    """

    verdict: Verdict
    words: str | None = None
    error: Exception | None = None


class Connections:
    """Connections that bodies' transactions run on: made when first needed, kept for the next body, closed with the worker.

    Args:
        database: the journal's.
        limit: how many at once; who comes then waits for a turn.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self.database = database
        self.engines = Engines(database.arguments())
        self._idle: list[psycopg.AsyncConnection[Row]] = []
        self._turns = asyncio.Semaphore(limit)
        self._marks = itertools.count(1)
        self._open: set[Transaction] = set()
        self._tidying: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closed = False

    async def begin(self) -> Transaction:
        """A transaction on a connection that is nobody else's, as soon as there is one: a worker waits for its database.

        Raises:
            OutsideRun: the worker has stopped.
        """
        await self._turns.acquire()
        try:
            failures = 0
            while True:
                if self._closed:
                    raise OutsideRun("connection(): the worker has stopped")
                try:
                    return await self._begin()
                except Exception as error:
                    if not is_transient(error):
                        raise
                    if failures % _TELL_EVERY == 0:
                        log.warning("step_connection_failed", error=error, retrying=True)
                await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])
                failures += 1
        except BaseException:
            self._turns.release()
            raise

    async def _begin(self) -> Transaction:
        while self._idle:  # one that was kept may have died meanwhile: then the next
            with contextlib.suppress(psycopg.OperationalError, OSError):
                return await self._begin_on(self._idle.pop(), pooled=False)
        owner, pooled = await self.database.connect_plain()
        return await self._begin_on(owner, pooled=pooled)

    async def _begin_on(self, owner: psycopg.AsyncConnection[Row], *, pooled: bool) -> Transaction:
        transaction = Transaction(self, owner, pooled=pooled, mark=str(next(self._marks)))
        try:
            await transaction.begin()
        except BaseException:
            await owner.close()
            raise
        self._open.add(transaction)
        return transaction

    def take_back(self, transaction: Transaction, owner: psycopg.AsyncConnection[Row], *, keep: bool) -> None:
        """A transaction is over. Its connection is made as new for the next body, or closed."""
        self._open.discard(transaction)
        self._in_background(self._tidy(owner, keep and not self._closed))

    def discard(self, transaction: Transaction) -> None:
        """Roll back, in a task of its own."""
        self._in_background(transaction.roll_back())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, name="replaykit_step_connection", context=contextvars.Context())  # no body's
        self._tidying.add(task)
        task.add_done_callback(self._tidied)

    def _tidied(self, task: asyncio.Task[None]) -> None:
        self._tidying.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:  # lost while it was made as new, for one
            log.info("step_connection_closed", error=error)

    async def _tidy(self, owner: psycopg.AsyncConnection[Row], keep: bool) -> None:
        try:
            if keep:
                # Settings, prepared statements (a new view counts them from the beginning), temporary tables, locks.
                await _say(owner, "discard all")
                if not self._closed:
                    self._idle.append(owner)
                    return
            await owner.close()
        except BaseException:
            await owner.close()
            raise
        finally:
            self._turns.release()

    async def close(self) -> None:
        """Close all. What is being committed has a moment for that; the rest is rolled back."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self._open or self._tidying:
                    self._changed.clear()
                    await self._changed.wait()
        for transaction in list(self._open):
            transaction.cut()
        idle, self._idle = self._idle, []
        for owner in idle:
            await owner.close()


class Transaction:
    """One body's, from BEGIN to COMMIT. For the worker's event loop, but `lend_sync` and what views call.

    Attributes:
        over: the body has no more to say in it.
    """

    def __init__(
        self, connections: Connections, owner: psycopg.AsyncConnection[Row], *, pooled: bool, mark: str
    ) -> None:
        self.over = False
        self._connections = connections
        self._owner = owner
        self._pooled = pooled
        self._mark = mark
        self._view: _AsyncView | _SyncView | None = None
        self._alchemy: Any = None  # SQLAlchemy's connection over the view
        self._sessions: dict[type[Any], Any] = {}
        self._conflict: psycopg.Error | None = None
        self._left = False

    # ------------------------------------------------------------------ what the body has

    async def begin(self) -> None:
        """Begin it."""
        await _say(self._owner, f"begin; set local {_MARK} = '{self._mark}'")

    async def lend(self, kind: type[Any] | None) -> Any:
        """A connection or session of a class that `check_kind` took, for code on the event loop."""
        if self._view is None:
            self._view = _AsyncView(self)
            self._view.prepare_threshold = None if self._pooled else self._view.prepare_threshold
        if not isinstance(self._view, _AsyncView):
            raise OutsideRun(
                "connection() was asked for in a thread before: the step's transaction belongs to sync code"
            )
        if kind is None:
            return self._view
        if self._alchemy is None:
            self._alchemy = await self._connections.engines.over_async(self._view)
        return self._of_alchemy(kind)

    def lend_sync(self, kind: type[Any] | None) -> Any:
        """The same for code in a thread."""
        if self._view is None:
            self._view = _SyncView(self)
            self._view.prepare_threshold = None if self._pooled else self._view.prepare_threshold
        if not isinstance(self._view, _SyncView):
            raise OutsideRun(
                "connection() was asked for on the event loop before: the step's transaction belongs to it"
            )
        if kind is None:
            return self._view
        if self._alchemy is None:
            self._alchemy = self._connections.engines.over(self._view)
        return self._of_alchemy(kind)

    def _of_alchemy(self, kind: type[Any]) -> Any:
        if not is_session(kind):
            return self._alchemy
        if kind not in self._sessions:
            # A session's own commit() ends a savepoint. What it holds is read once more when the result is encoded.
            self._sessions[kind] = kind(
                bind=self._alchemy, join_transaction_mode="create_savepoint", expire_on_commit=False
            )
        return self._sessions[kind]

    @property
    def pgconn(self) -> PGconn:
        """libpq's connection."""
        return self._owner.pgconn

    @property
    def lost(self) -> bool:
        """Whether the connection is gone: whatever was written over it is rolled back."""
        return self.pgconn.status != ConnStatus.OK

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around each statement of the body's.

        Raises:
            OutsideRun: the step is no longer waiting for its body.
            psycopg.ProgrammingError: the statement has ended the transaction.
        """
        if self.over:
            raise OutsideRun("this connection was lent to a step whose body is over: its transaction has ended")
        try:
            yield
        except psycopg.Error as error:
            if _is_conflict(error):
                self._conflict = error
            raise
        if self.pgconn.transaction_status == TransactionStatus.IDLE and not self.lost:
            raise _ended()

    # ------------------------------------------------------------------ its end

    async def flush(self) -> None:
        """Write what sessions still hold back, on the event loop."""
        if isinstance(self._view, _SyncView):  # of a plain function whose coroutine is awaited here
            await asyncio.to_thread(self.flush_sync)
            return
        for session in self._sessions.values():
            await session.flush()

    def flush_sync(self) -> None:
        """The same in the body's thread."""
        for session in self._sessions.values():
            session.flush()

    async def settle(self) -> None:
        """The body has returned: see that what it leaves can be committed, with an entry, as it is.

        Raises:
            psycopg.Error: it cannot: a deferred constraint, an error that the body swallowed, a transaction that it ended.
            OutsideRun: something that it began still uses the connection.
        """
        status = self.pgconn.transaction_status
        if status == TransactionStatus.IDLE and not self.lost:
            raise _ended()
        if status == TransactionStatus.INERROR:
            raise psycopg.errors.InFailedSqlTransaction(
                "the body went on after an error of the database, which has undone all that it wrote: let the error out of"
                " the body, or put the statement that may fail into `with connection.transaction():`, a savepoint"
            ) from self._conflict
        async with self._between_statements():
            marks = await _say(
                self._owner,
                f"set constraints all immediate; select current_setting('{_MARK}', true)",
                seconds=None,  # deferred triggers take as long as they take
            )
        if marks[-1].get_value(0, 0) != self._mark.encode():
            raise _ended()

    @contextlib.asynccontextmanager
    async def _between_statements(self) -> AsyncIterator[None]:
        view = self._view
        busy = self.pgconn.pipeline_status != PipelineStatus.OFF or (
            self.pgconn.transaction_status == TransactionStatus.ACTIVE
        )
        if busy or (view is not None and view.lock.locked()):
            raise OutsideRun(
                "the body has returned, and its connection is still in use: await all that it begins (tasks, a COPY, a"
                " pipeline, a stream) before it returns"
            )
        if view is None:
            yield
        elif isinstance(view, _AsyncView):
            async with view.lock:
                yield
        else:
            with view.lock:
                yield

    def has_conflict(self, error: BaseException) -> bool:
        """Whether the body may simply be run again: the database, not the body, is why it failed with this error."""
        if not isinstance(error, Exception):
            return False
        if self.lost:
            return True
        if self._conflict is not None and self.pgconn.transaction_status == TransactionStatus.INERROR:
            return True
        return any(_is_conflict(each) for each in _chain(error))

    async def commit(self, unit: Unit) -> Commit:
        """Write the unit, which holds the body's entry, and commit. However it ends: the connection is given back."""
        outcome = Commit(Verdict.STALE)
        try:
            await self._retire()
            outcome = await self._commit(unit)
        finally:
            if outcome.verdict is Verdict.OK:
                await self._leave(sound=True)
            else:
                await self.roll_back()
        return outcome

    async def _commit(self, unit: Unit) -> Commit:
        write = self._write(unit)
        first, failures = "savepoint replaykit_entry", 0
        while True:
            unit.tries += 1
            try:
                await _say(self._owner, f"{first}; {_OURS}; {write}; commit")
            except psycopg.errors.DivisionByZero:  # the fence, or others stand at its seq
                return Commit(Verdict.STALE)
            except Exception as error:
                if not is_lock_timeout(error) or self.lost:
                    if is_refusal(error):
                        return Commit(Verdict.REFUSED, first_line(error))
                    return Commit(Verdict.STALE, error=error)
                if failures % _TELL_EVERY == 0:
                    log.warning("run_locked_by_someone_else", run_id=str(unit.run_id))
            else:
                return Commit(Verdict.OK)
            first = "rollback to savepoint replaykit_entry"
            await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])
            failures += 1

    def _write(self, unit: Unit) -> str:
        """The text of one message: the server begins with it when it has all of it."""
        statement, parameters = journal.write_within(unit)
        text = self._connections.database.text(statement)
        return psycopg.AsyncClientCursor(self._owner).mogrify(text, parameters)

    async def roll_back(self) -> None:
        """End it, and leave nothing of it. May be called at any time, more than once; does not raise."""
        if self._left:
            return
        sound = False
        try:
            await self._retire()
            if not self.lost and self.pgconn.pipeline_status == PipelineStatus.OFF:
                status = self.pgconn.transaction_status
                if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                    await _say(self._owner, "rollback")
                sound = self.pgconn.transaction_status == TransactionStatus.IDLE
        except Exception as error:
            log.info("step_connection_closed", error=error)
        finally:
            await self._leave(sound=sound)

    async def _retire(self) -> None:
        """From here on the body has no more to say, whatever of it still runs."""
        self.over = True
        view = self._view
        loop = asyncio.get_running_loop()
        until = loop.time() + _RETIRE_SECONDS
        cancel_at = loop.time() + _LOOK_SECONDS
        while view is not None and view.lock.locked():
            if loop.time() > until:
                self.cut()
                return
            if loop.time() > cancel_at:
                cancel_at = loop.time() + _CANCEL_SECONDS
                with contextlib.suppress(Exception):
                    await self._owner.cancel_safe(timeout=_CANCEL_SECONDS)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _leave(self, *, sound: bool) -> None:
        if self._left:
            return
        self._left = True
        try:
            await self._close_alchemy()
        except Exception as error:
            log.info("step_connection_closed", error=error)
            sound = False
        finally:
            self._connections.take_back(self, self._owner, keep=sound and not self._pooled)

    async def _close_alchemy(self) -> None:
        """SQLAlchemy lets go of the view, and says nothing over it."""
        alchemy, sessions = self._alchemy, self._sessions
        if alchemy is None:
            return
        if isinstance(self._view, _AsyncView):
            await alchemy.invalidate()
            for session in sessions.values():
                await session.close()
            await alchemy.close()
        elif self._view is not None and not self._view.lock.locked():  # else its thread still uses it
            alchemy.invalidate()
            for session in sessions.values():
                session.close()
            alchemy.close()

    def cut(self) -> None:
        """End the connection as it is: the server rolls back what it has not been told to commit."""
        cut_off(self.pgconn)


def _ended() -> psycopg.ProgrammingError:
    return psycopg.ProgrammingError(
        "the body has ended its transaction (COMMIT or ROLLBACK in SQL), which is committed for it, with the step's entry:"
        " what it committed stands, the step has failed"
    )


def _refuse(what: str) -> psycopg.ProgrammingError:
    return psycopg.ProgrammingError(
        f"{what}() in the body of a transactional step: what it writes is committed with the step's entry when it returns,"
        " and rolled back when it raises"
    )


_AS_TUPLES: Any = tuple_row  # as psycopg's own, which no checker can say of a class that is generic in its rows


class _View:
    """What both views of a transaction's connection share."""

    _adapters: AdaptersMap | None

    def __del__(self, *args: Any) -> None:
        """Not closed is not forgotten: it is only a view."""

    def adapt(self, context: AdaptContext | None) -> None:
        """Take SQLAlchemy's adapters."""
        if context is not None:
            self._adapters = AdaptersMap(context.adapters)


class _AsyncView(_View, psycopg.AsyncConnection[Row]):
    """What an async body has of its transaction's connection."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction.pgconn, row_factory=_AS_TUPLES)
        self._transaction = transaction

    @override
    async def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        with self._transaction.watched():
            return await super().wait(gen, *args, **kwargs)

    @override
    async def commit(self) -> None:
        raise _refuse("commit")

    @override
    async def rollback(self) -> None:
        raise _refuse("rollback")

    @override
    async def close(self) -> None:
        """It is given back when the body is over."""

    @override
    async def __aexit__(self, *exc: object) -> None:
        """`async with` ends nothing."""


class _SyncView(_View, psycopg.Connection[Row]):
    """What a sync body has of it."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction.pgconn, row_factory=_AS_TUPLES)
        self._transaction = transaction

    @override
    def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        with self._transaction.watched():
            return super().wait(gen, *args, **kwargs)

    @override
    def commit(self) -> None:
        raise _refuse("commit")

    @override
    def rollback(self) -> None:
        raise _refuse("rollback")

    @override
    def close(self) -> None:
        """It is given back when the body is over."""

    @override
    def __exit__(self, *exc: object) -> None:
        """`with` ends nothing."""


async def _say(
    owner: psycopg.AsyncConnection[Row], text: str, *, seconds: float | None = DEAD_AFTER_SECONDS
) -> list[PGresult]:
    """Send a message of one or more statements, of which the first that fails is the last; what they return.

    Raises:
        psycopg.Error: the first failure.
        TimeoutError: no answer in time; the connection cannot be used any more.
    """
    pgconn = owner.pgconn
    encoding = owner.info.encoding
    pgconn.send_query(text.encode(encoding))
    async with asyncio.timeout(seconds and seconds + len(text) / BYTES_PER_SECOND_MIN):
        results: list[PGresult] = await waiting.wait_async(generators.execute(pgconn), pgconn.socket)
    for result in results:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(result, encoding=encoding)
    return results


def _is_conflict(error: BaseException) -> bool:
    """Whether the database ended a transaction so that others could go on: the same again may succeed at once."""
    return isinstance(error, psycopg.errors.SerializationFailure | psycopg.errors.DeadlockDetected)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came of; SQLAlchemy keeps the driver's as `orig`."""
    seen: set[int] = set()
    waiting_list: list[Any] = [error]
    while waiting_list:
        each = waiting_list.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting_list += [each.__cause__, each.__context__, getattr(each, "orig", None)]

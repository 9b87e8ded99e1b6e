"""SQLAlchemy over a connection that is lent: which classes can be asked for, and engines that connect to nothing but that.

SQLAlchemy is imported when one of its classes is asked for: whoever has such a class has imported it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import psycopg

from replaykit.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlalchemy
    from sqlalchemy.ext import asyncio as aio

__all__ = ["Engines", "check_kind", "is_connection", "is_session"]

_SYNC: Final = (("sqlalchemy.engine", "Connection"), ("sqlalchemy.orm", "Session"))
_ASYNC: Final = (("sqlalchemy.ext.asyncio", "AsyncConnection"), ("sqlalchemy.ext.asyncio", "AsyncSession"))

_LENT: Final[contextvars.ContextVar[Any]] = contextvars.ContextVar("replaykit_lent", default=None)
"""What an engine is to connect to, while it does; None: a connection of its own, to learn of its database."""


def is_connection(kind: type[Any]) -> bool:
    """Whether it is one of SQLAlchemy's connections."""
    return _is_any(kind, (_SYNC[0], _ASYNC[0]))


def is_session(kind: type[Any]) -> bool:
    """Whether it is one of SQLAlchemy's sessions."""
    return _is_any(kind, (_SYNC[1], _ASYNC[1]))


def check_kind(kind: object, *, in_async: bool) -> type[Any] | None:
    """A class that can be given; None: psycopg's own connection.

    Raises:
        ConfigurationError: another class, or one for the other sort of body.
    """
    ours, others = psycopg.AsyncConnection, psycopg.Connection
    if not in_async:
        ours, others = others, ours  # type: ignore[assignment]
    if kind is None or kind is ours:
        return None
    if isinstance(kind, type):
        if _is_any(kind, _ASYNC if in_async else _SYNC):
            return kind
        if kind is others or _is_any(kind, _SYNC if in_async else _ASYNC):
            sort, classes = ("async", "AsyncSession") if in_async else ("sync", "Session")
            raise ConfigurationError(
                f"connection({kind.__name__}) in {'an' if in_async else 'a'} {sort} body: ask for {classes}, or for nothing to"
                f" get psycopg's {ours.__name__}"
            )
    raise ConfigurationError(
        f"connection({kind!r}): a class is asked for, psycopg's {ours.__name__}, or"
        f" {'AsyncConnection or AsyncSession' if in_async else 'Connection or Session'} of SQLAlchemy"
    )


def _is_any(kind: type[Any], classes: tuple[tuple[str, str], ...]) -> bool:
    return any(issubclass(kind, getattr(sys.modules[m], name)) for m, name in classes if m in sys.modules)


class Engines:
    """One of each sort for a worker, made when first needed: what an engine learns of its database is learned once, over a
    connection of its own, so that nothing of it happens in anybody's transaction.

    Args:
        arguments: what psycopg connects with.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._sync: sqlalchemy.Engine | None = None
        self._async: aio.AsyncEngine | None = None
        self._sync_lock = threading.Lock()
        self._async_lock = asyncio.Lock()

    def prepare(self) -> None:
        """Learn, in a thread.

        Raises:
            sqlalchemy.exc.OperationalError: the database cannot be reached.
        """
        with self._sync_lock:
            if self._sync is None:
                from sqlalchemy import create_engine, event
                from sqlalchemy.pool import NullPool

                engine = create_engine("postgresql+psycopg://", poolclass=NullPool, pool_reset_on_return=None)
                event.listen(engine, "do_connect", self._connect)
                with engine.connect():
                    pass
                self._sync = engine

    async def prepare_async(self) -> None:
        """Learn, on the event loop.

        Raises:
            sqlalchemy.exc.OperationalError: the database cannot be reached.
        """
        async with self._async_lock:
            if self._async is None:
                from sqlalchemy.ext.asyncio import create_async_engine
                from sqlalchemy.pool import NullPool

                engine = create_async_engine(
                    "postgresql+psycopg://",
                    poolclass=NullPool,
                    pool_reset_on_return=None,
                    connect_args={"async_creator_fn": self._connect_async},
                )
                async with engine.connect():
                    pass
                self._async = engine

    def over(self, view: Any) -> sqlalchemy.Connection:
        """A connection over one that is lent, in a transaction that it did not begin and will not end."""
        assert self._sync is not None, "not prepared"
        token = _LENT.set(view)
        try:
            connection = self._sync.connect()
        finally:
            _LENT.reset(token)
        connection.begin()
        return connection

    async def over_async(self, view: Any) -> aio.AsyncConnection:
        """The same, async."""
        assert self._async is not None, "not prepared"
        token = _LENT.set(view)
        try:
            connection = await self._async.connect()
        finally:
            _LENT.reset(token)
        await connection.begin()
        return connection

    def _connect(self, dialect: Any, record: Any, cargs: Any, cparams: dict[str, Any]) -> Any:
        view = _LENT.get()
        if view is None:
            return psycopg.connect(**self._arguments, context=cparams.get("context"))
        view.adapt(cparams.get("context"))
        return view

    async def _connect_async(self, *args: Any, **kwargs: Any) -> Any:
        view = _LENT.get()
        if view is None:
            return await psycopg.AsyncConnection.connect(**self._arguments, context=kwargs.get("context"))
        view.adapt(kwargs.get("context"))
        return view

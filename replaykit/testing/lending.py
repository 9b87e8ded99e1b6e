"""What bodies of transactional steps are given where there is no database."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from replaykit.errors import ConfigurationError
from replaykit.postgres.transaction import Commit
from replaykit.replay.entries import Unit, Verdict
from replaykit.replay.requests import CallStep

__all__ = ["LentInMemory", "connector"]


def connector(connection: Any) -> Callable[[type[Any] | None], Any]:
    """Gives it as a body expects it: an asynchronous one has to be awaited."""

    async def awaited() -> Any:
        return connection

    # The one sign that psycopg's, SQLAlchemy's and a test's own connections and sessions have in common.
    is_async = inspect.iscoroutinefunction(getattr(connection, "commit", None))
    return lambda kind: awaited() if is_async else connection


class LentInMemory:
    """The test's own connection, whatever becomes of the step; what is written over it is the test's affair.

    Args:
        call: whose body.
        connection: what the body gets; None: a sentence.
    """

    used = False
    """Nothing is committed with an entry that is kept in memory."""

    def __init__(self, call: CallStep, connection: Any) -> None:
        self._call = call
        self._connection = connection

    def connect(self, kind: type[Any] | None) -> Any:
        """The test's connection.

        Raises:
            ConfigurationError: it has named none.
        """
        if self._connection is None:
            raise ConfigurationError(
                f"connection() in step {self._call.key}: runs in memory have no database; give the bodies one with"
                " testing.Client(connection=...), replace the step with stubs={...}, or test it on a database of its own"
            )
        return connector(self._connection)(kind)

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Await the body."""
        return await function(*args, **kwargs)

    def run_in_thread(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it."""
        return function(*args, **kwargs)

    async def commit(self, unit: Unit) -> Commit:
        """There is never anything to commit."""
        return Commit(Verdict.STALE)

    def discard(self) -> None:
        """Nothing of it is ours."""

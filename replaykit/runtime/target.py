"""Which database: a URL that was given, `REPLAYKIT_DATABASE_URL`, else the embedded Postgres, made ready by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

from replaykit.errors import SchemaMismatch
from replaykit.postgres.database import Database
from replaykit.postgres.schema import REVISION, check_schema
from replaykit.runtime.embedded import EmbeddedPostgres, default_home
from replaykit.runtime.forks import renew_after_fork

__all__ = ["Target"]


class Target:
    """A database and a schema in it. `open` may be called by several threads; the work is done once.

    Args:
        dsn: a URL or a libpq connection string; None: the environment's, else the embedded Postgres.
        schema: the schema that replaykit's tables live in.
        home: where an embedded Postgres keeps its data; None: `REPLAYKIT_HOME`, else the user's data folder.
        say: told in a sentence that the embedded Postgres is used.

    Raises:
        ConfigurationError: no schema can have that name.
    """

    def __init__(
        self,
        dsn: str | None = None,
        schema: str = "replaykit",
        *,
        home: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.schema = check_schema(schema)
        self._given = dsn
        self._home = home
        self._say = say
        self._lock = threading.Lock()
        self._embedded: EmbeddedPostgres | None = None
        self._dsn: str | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a child: the lock may be held by a thread that is not there. A hold on an embedded Postgres is shared."""
        self._lock = threading.Lock()

    @property
    def given(self) -> str | None:
        """The URL that was given or stands in the environment; None: the embedded Postgres is used."""
        return self._given or os.environ.get("REPLAYKIT_DATABASE_URL") or None

    def open(self) -> str:
        """The database's URL. Blocks while an embedded Postgres starts and is migrated; a URL is never migrated."""
        given = self.given
        if given is not None:
            return given
        with self._lock:
            if self._dsn is None:
                self._dsn = self._open_embedded()
            return self._dsn

    def _open_embedded(self) -> str:
        home = self._home or default_home()
        if self._say is not None:
            self._say(f"no REPLAYKIT_DATABASE_URL: using the embedded Postgres in {home}")
        embedded = EmbeddedPostgres(home)
        dsn = embedded.start()
        try:
            self._migrate(dsn)
        except BaseException:
            embedded.close()
            raise
        self._embedded = embedded
        return dsn

    def _migrate(self, dsn: str) -> None:
        try:
            asyncio.run(Database(dsn, self.schema, name="migrate").check())
        except SchemaMismatch:
            self.migrate(dsn)

    def migrate(self, dsn: str) -> bool:
        """Bring the schema to this release's revision; False if it was there. Any number of processes may try."""
        from replaykit.postgres.migrate import upgrade  # alembic and SQLAlchemy: half a second that few need

        return upgrade(dsn, self.schema)

    @property
    def revision(self) -> str:
        """The schema revision that this release needs."""
        return REVISION

    def migration_sql(self, since: str | None = None) -> str:
        """The migration as a script, from revision `since` (None: from nothing) on."""
        from replaykit.postgres.migrate import sql

        return sql(self.schema, since=since)

    def close(self) -> None:
        """Let go of the embedded Postgres, which stops when nobody uses it. Blocks briefly; `open` starts it again."""
        with self._lock:
            embedded, self._embedded, self._dsn = self._embedded, None, None
        if embedded is not None:
            embedded.close()

"""What a `replaykit worker` is told: made by the command line, read by the parent, handed to each child."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from replaykit.limits import Settings

__all__ = ["WorkerConfig"]


class WorkerConfig(BaseModel):
    """The whole of a worker's configuration. JSON both ways, since it travels to the children through a pipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dsn: str
    """Where the database is. May hold a password, so it is never an argument or a variable of a child."""

    schema_name: str = "replaykit"
    """The schema with replaykit's tables."""

    modules: tuple[str, ...]
    """Where the workflows are: dotted names, or paths to files."""

    queues: Annotated[tuple[str, ...], Field(min_length=1)] = ("default",)
    """The queues to claim from."""

    processes: Annotated[int, Field(ge=1)] = 1
    """Children of the parent."""

    spare: bool = True
    """Keep one more child that has imported everything and waits to replace one that dies: half a second less."""

    lifespan: str | None = None
    """`MODULE:NAME` of an async context manager that is entered before the first claim."""

    settings: Settings = Settings()
    """Leases, periods, concurrency and threads of each child."""

    poll_only: bool = False
    """No LISTEN: look for work by polling alone."""

    log_format: Literal["json", "console"] = "console"
    """How the children write their logs."""

    log_level: str = "info"
    """From which level on."""

    log_setup: str | None = None
    """`MODULE:NAME` of the function that a child calls with `(log_format, log_level)`: the library itself never
    configures logging, and its runtime knows nothing of the command line above it."""

    child_module: str = "replaykit.runtime.child"
    """What a child runs (`python -m`); tests put simpler children here."""

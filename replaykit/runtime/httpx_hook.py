"""The idempotency key of the step whose body runs, as a header of each request that an httpx client sends.

    httpx.AsyncClient(event_hooks={"request": [idempotency_header]})

httpx itself is not imported: all that is asked of a request is its `headers`.
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from typing import Any, Final, Protocol

from replaykit.replay.calls import CURRENT_STEP
from replaykit.replay.execution import current_execution

__all__ = ["idempotency_header"]

_HEADER: Final = "Idempotency-Key"


class _Request(Protocol):
    @property
    def headers(self) -> MutableMapping[str, str]: ...


class _Done:
    """What an `httpx.AsyncClient` awaits of a hook that has done its work already."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


_DONE: Final = _Done()


def idempotency_header(request: _Request) -> _Done:
    """An event hook for `httpx.AsyncClient` and `httpx.Client`: adds `Idempotency-Key: <the step's key>`.

    A request that has the header already keeps its own. One that is sent outside of a step's body, or in a step with
    `durability="async"`, gets none.
    """
    info = CURRENT_STEP.get()
    if info is not None and info.has_key and current_execution() is None and _HEADER not in request.headers:
        request.headers[_HEADER] = info.idempotency_key
    return _DONE

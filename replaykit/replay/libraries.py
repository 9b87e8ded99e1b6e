"""What libraries leave without a fixed order, put in order for code that runs on a run's loop.

anyio keeps the scopes below a cancel scope in a set, by address: cancelling a task group would reach its tasks in an order
that changes with every replay. On a run's loop the set is one that remembers the order of insertion.
"""

from __future__ import annotations

import functools
import importlib
import sys
from asyncio import events
from typing import Any

__all__ = ["is_polling", "order_libraries"]


class _Ordered(dict[Any, None]):
    """The few methods of a set that cancel scopes use, in order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


_ordered: set[str] = set()


def is_polling(handle: Any) -> bool:
    """Whether a callback is one that a library schedules again and again until something outside has happened: anyio tells a
    task that it is cancelled at every turn of the loop, for as long as the task cleans up."""
    callback = getattr(handle, "callback", None)
    return (
        getattr(callback, "__name__", "") == "_deliver_cancellation"
        and getattr(callback, "__module__", "") == "anyio._backends._asyncio"
    )


def order_libraries(loop_type: type) -> None:
    """Put in order what is imported by now, once. Costs a dictionary look-up when there is nothing to do."""
    if "anyio" in sys.modules and "anyio" not in _ordered:
        _ordered.add("anyio")
        _order_anyio(loop_type)


def _order_anyio(loop_type: type) -> None:
    try:
        scope: Any = importlib.import_module("anyio._backends._asyncio").CancelScope
    except (ImportError, AttributeError):
        return  # another anyio: its order stays its own
    made = scope.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if type(events._get_running_loop()) is loop_type and type(getattr(self, "_child_scopes", None)) is set:
            self._child_scopes = _Ordered()

    scope.__init__ = init

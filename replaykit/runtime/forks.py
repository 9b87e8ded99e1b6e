"""What a forked child must not keep of its parent: locks that a thread held, threads and event loops that are not there.

What was the parent's is neither closed nor freed in the child: its sockets are shared, and closing one says good-bye to
the server in the parent's name.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["leave_to_parent", "renew_after_fork"]


class Renewed(Protocol):
    """What is made anew in a child, before any other code of the child runs."""

    def after_fork(self) -> None:
        """Make anew what the parent's threads hold."""


_RENEWED: weakref.WeakSet[Renewed] = weakref.WeakSet()
_LEFT: list[Any] = []


def renew_after_fork(thing: Renewed) -> None:
    """Have `after_fork` called in each child that is forked while it lives."""
    _RENEWED.add(thing)


def leave_to_parent(things: Any) -> None:
    """Keep what is the parent's from being freed here."""
    _LEFT.append(things)


def _renew() -> None:
    for thing in list(_RENEWED):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)

"""Stubs: functions that are called instead of the bodies of steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import Workflow
from replaykit.replay.keys import check_name
from replaykit.replay.requests import CallStep

__all__ = ["Stubs"]


class Stubs:
    """What is called instead of bodies.

    Args:
        given: by function, or by the step's name.

    Raises:
        ConfigurationError: a key that is neither a function nor a name, or a stub that cannot be called.
    """

    def __init__(self, given: Mapping[Any, Any] | None) -> None:
        self._by_name: dict[str, Callable[..., Any]] = {}
        self._by_function: list[tuple[Any, Callable[..., Any]]] = []  # compared: a method of what has no hash, too
        self._unused: set[str] = set()
        self._real: set[str] = set()  # names of steps whose own bodies ran
        for what, stub in (given or {}).items():
            if not callable(stub):
                raise ConfigurationError(f"stubs={{{_shown(what)}: {stub!r}}}: a stub is a function")
            if isinstance(what, str):
                self._by_name[check_name(what, "step")] = stub
            elif isinstance(what, Workflow):
                raise ConfigurationError(f"stubs={{{what.name}: ...}}: that is a workflow, and stubs stand for steps")
            elif callable(what):
                self._by_function.append((what, stub))
            else:
                raise ConfigurationError(f"stubs={{{what!r}: ...}}: a stub stands for a function or a step's name")
        self._unused.update(self._by_name)

    def replace(self, call: CallStep) -> None:
        """Put the stub of this call, if there is one, in the place of its body."""
        for function, stub in self._by_function:
            if call.function == function:
                call.function = _as_body(stub, call.info.is_async)
                return
        stub_by_name = self._by_name.get(call.name)
        if stub_by_name is not None:
            self._unused.discard(call.name)
            call.function = _as_body(stub_by_name, call.info.is_async)
        elif not hasattr(call.function, _MARK):  # else a try that follows another
            self._real.add(call.name)

    def replace_reconciler(self, call: CallStep) -> None:
        """Put the stub of this call's reconciler, if there is one, in its place."""
        for function, stub in self._by_function:
            if call.policy is not None and call.reconcile == function:
                call.policy = replace(call.policy, reconcile=_as_body(stub, True))
                return

    def warn_of_unused(self) -> None:
        """A misspelt name means that a real body was called: say so, once."""
        unused, self._unused = self._unused, set()
        if unused and self._real:
            warnings.warn(
                f"stubs={{...}}: no step was called {' or '.join(map(repr, sorted(unused)))}; "
                f"without a stub ran {', '.join(sorted(self._real))}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __del__(self) -> None:
        if hasattr(self, "_real"):
            self.warn_of_unused()  # of a client that was never closed


_MARK = "__replaykit_stub__"


def _as_body(stub: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """A stub as the executor runs a body: on the loop where the body is async, else in a thread."""

    async def on_the_loop(*args: Any, **kwargs: Any) -> Any:
        value = stub(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def in_a_thread(*args: Any, **kwargs: Any) -> Any:
        return stub(*args, **kwargs)

    body = on_the_loop if is_async else in_a_thread
    setattr(body, _MARK, True)
    return body


def _shown(what: Any) -> str:
    return repr(what) if isinstance(what, str) else getattr(what, "__qualname__", repr(what))

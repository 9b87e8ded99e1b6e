"""`retry=` at its declaration: a tenacity object whose every part will be heard, or a sentence that says what to write.

Of a tenacity object only the strategies are asked (`retry`, `wait`, `stop`, in runtime/retries.py): its own loop never
runs, since a wait may outlive the process. What only that loop would call is refused here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from replaykit.errors import ConfigurationError

if TYPE_CHECKING:  # a workflow's module that declares no retry needs no tenacity
    from tenacity import BaseRetrying

__all__ = ["check_retry"]

_EXAMPLE: Final = "retry=AsyncRetrying(stop=stop_after_attempt(3))"

_INSTEAD: Final = {
    "before": "log in the step's body, or look into the attempts table",
    "after": "every try that failed is a row of the attempts table, with its error",
    "before_sleep": "every decision to wait is a row of the attempts table and an event (step_attempt_failed) in the log",
    "retry_error_callback": "catch the step's error in the workflow",
    "sleep": "the wait is durable; say how long it is with wait=",
}


def check_retry(retry: Any) -> BaseRetrying:
    """The tenacity object that `retry=` was given.

    `reraise` is taken whatever it says: the error of the last try is always the step's.

    Raises:
        ConfigurationError: it is none, or has hooks that would never be called.
    """
    import tenacity

    if not isinstance(retry, tenacity.BaseRetrying):
        raise ConfigurationError(_no_retrying(retry))
    for hook, instead in _INSTEAD.items():
        if not _is_default(retry, hook):
            given = getattr(retry, hook)
            raise ConfigurationError(
                f"retry= has {hook}={_name(given)}, which would never be called, because a wait may outlive the process: "
                f"leave it out; {instead}"
            )
    if not _is_default(retry, "retry_error_cls"):
        raise ConfigurationError(
            f"retry= has retry_error_cls={_name(retry.retry_error_cls)}, which would never be raised: leave it out; "
            "the error of the last try is the step's"
        )
    return retry


def _is_default(retry: BaseRetrying, hook: str) -> bool:
    """Whether a hook does nothing, or (`sleep`, `retry_error_cls`) is what its class takes when nothing is given."""
    import tenacity

    given = getattr(retry, hook, None)
    nothing = (tenacity.before_nothing, tenacity.after_nothing, tenacity.before_sleep_nothing)
    if given is None or any(given is one for one in nothing):
        return True
    for kind in type(retry).__mro__:  # a subclass may take **kwargs
        try:
            parameter = inspect.signature(kind.__init__).parameters.get(hook)  # type: ignore[misc]
        except (TypeError, ValueError):
            continue
        if parameter is not None and parameter.default is given:
            return True
    return False


def _no_retrying(retry: Any) -> str:
    import tenacity

    if isinstance(retry, type) and issubclass(retry, tenacity.BaseRetrying):
        return f"retry={retry.__name__} is the class: write retry={retry.__name__}(...), as in {_EXAMPLE}"
    for base, option in (
        (tenacity.stop.stop_base, "stop"),
        (tenacity.wait.wait_base, "wait"),
        (tenacity.retry_base, "retry"),
    ):
        if isinstance(retry, base):
            return (
                f"retry={type(retry).__name__}(...) is one strategy of a tenacity object: "
                f"write retry=AsyncRetrying({option}={type(retry).__name__}(...))"
            )
    if isinstance(getattr(retry, "retry", None), tenacity.BaseRetrying):
        name = _name(retry)
        return (
            f"retry={name} is a function that tenacity's @retry has wrapped: give its tenacity object, retry={name}.retry, "
            "and take the decorator off the step's function, or both would retry"
        )
    if retry is False or (retry == 0 and isinstance(retry, int)):
        return f"retry={retry!r} is no tenacity object: no retry at all is retry=None, some are {_EXAMPLE}"
    if isinstance(retry, int) and retry is not True:
        return f"retry={retry!r} is no tenacity object: {retry} tries are retry=AsyncRetrying(stop=stop_after_attempt({retry}))"
    return f"retry={_name(retry)} is no tenacity object: write {_EXAMPLE}"


def _name(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    return name if isinstance(name, str) else repr(thing)[:100]

"""What `step.options(...)` and `@step.policy(...)` were given, as a `Policy`, or the sentence that says what cannot work.

Two looks: each option by itself when it is given, and all of them together as soon as they are known: at the declaration
on a function, and at a call whose options complete or replace what was declared.
"""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable
from typing import Any, Final

from replaykit.errors import ConfigurationError
from replaykit.replay.entries import Effect
from replaykit.replay.keys import check_name
from replaykit.replay.requests import POLICY_ATTRIBUTE, UNSET, Policy
from replaykit.replay.retrying import check_retry
from replaykit.replay.signature import describe

__all__ = ["check_call", "declare", "effect_of"]

_KNOWN: Final = "'repeatable' (the default), 'idempotent', 'irreversible' or 'transactional'"
_INTENT: Final = (Effect.IDEMPOTENT, Effect.IRREVERSIBLE)


def declare(*, whole: bool, **given: Any) -> Policy:
    """The policy that these options make.

    Args:
        whole: nothing completes them (a declaration); False: what is declared on a function may.
        given: options by name; UNSET where one is not given.

    Raises:
        ConfigurationError: an option that cannot work as given, or not beside another.
    """
    for option, value in given.items():
        if value is not UNSET and (value is not None or option in _NEVER_NONE) and option in _CHECKS:
            given[option] = _CHECKS[option](value)
    policy = Policy(**given)
    if not _is_plain(policy) and (why := _contradiction(policy, whole=whole)):
        raise ConfigurationError(why)
    return policy


def check_call(options: Policy, function: Callable[..., Any]) -> None:
    """See that the options of one call go together with what is declared on its function.

    Raises:
        ConfigurationError: they do not.
    """
    declared: Policy | None = getattr(function, POLICY_ATTRIBUTE, None)
    if _is_plain(options) and (declared is None or _is_plain(declared)):
        return
    if why := _contradiction(options.over(declared), whole=True):
        raise ConfigurationError(f"step {describe(function).label}: {why}")


def effect_of(options: Policy | None, function: Callable[..., Any]) -> Effect:
    """The effect of a call of this function with these options."""
    declared: Policy | None = getattr(function, POLICY_ATTRIBUTE, None)
    policy = declared if options is None else options.over(declared)
    return Effect.REPEATABLE if policy is None or policy.effect is UNSET else policy.effect


def _is_plain(policy: Policy) -> bool:
    return (
        policy.effect is UNSET
        and policy.compensate is UNSET
        and policy.reconcile is UNSET
        and policy.not_landed is UNSET
        and policy.key_valid_for is UNSET
    )


# ---------------------------------------------------------------------- options beside each other


def _contradiction(policy: Policy, *, whole: bool) -> str | None:
    """What of these options cannot work together. Not `whole`: an option that is not given says nothing yet."""
    effect: Effect | None
    if policy.effect is not UNSET:
        effect = policy.effect
    else:
        effect = Effect.REPEATABLE if whole else None  # None: whatever the function declares
    if policy.durability == "async":
        return _ahead(policy, effect)
    if effect is None:
        return None
    if effect not in _INTENT:
        return _without_intent(policy, effect)
    if effect is not Effect.IDEMPOTENT and _given(policy.key_valid_for):
        return (
            f"key_valid_for={policy.key_valid_for!r} with effect={effect.value!r}: it says for how long the other side knows "
            "a call by its key, and such a call is effect='idempotent'; say that, or leave it out"
        )
    if whole and effect is Effect.IDEMPOTENT and _given(policy.reconcile) and not _given(policy.key_valid_for):
        return (
            f"reconcile={_name(policy.reconcile)} with effect='idempotent' and no key_valid_for=: such a call is made again with "
            "its key and nobody is ever asked; say for how long the other side knows the key, or leave reconcile= out"
        )
    unheard = policy.not_landed is UNSET and whole
    if effect is Effect.IRREVERSIBLE and _given(policy.retry) and (unheard or policy.not_landed == ()):
        return (
            f"retry={type(policy.retry).__name__}(...) with effect='irreversible': an error leaves in doubt whether the call "
            "landed, and a second one might be a second deed; name the errors that say that it did not happen, "
            "as in not_landed=(ConnectionRefusedError,), or not_landed=NotLanded alone"
        )
    return None


def _ahead(policy: Policy, effect: Effect | None) -> str | None:
    """What goes against `durability="async"`."""
    if effect is not None and effect is not Effect.REPEATABLE:
        other = f"effect={effect.value!r}"
    elif _given(policy.compensate):
        other = f"compensate={_name(policy.compensate)}"
    else:
        return None if effect is None else _without_intent(policy, effect)
    return (
        f"durability='async' with {other}: the result would be handed on before anything says that the call was made; "
        "leave durability= out"
    )


def _without_intent(policy: Policy, effect: Effect) -> str | None:
    """What only a step whose call may be in doubt has a use for."""
    if _given(policy.reconcile):
        option, what = f"reconcile={_name(policy.reconcile)}", "it is asked whether a call landed"
    elif policy.not_landed is not UNSET and policy.not_landed:
        names = ", ".join(each.__name__ for each in policy.not_landed)
        option, what = f"not_landed=({names},)", "it says which errors leave no doubt that a call did not land"
    elif _given(policy.key_valid_for):
        option, what = f"key_valid_for={policy.key_valid_for!r}", "it says for how long the other side recognises a key"
    else:
        return None
    ways = "effect='idempotent'" if option.startswith("key_valid_for") else "effect='idempotent' or 'irreversible'"
    if effect is Effect.TRANSACTIONAL:
        return (
            f"{option} with effect='transactional': {what}, and what such a body writes is committed with its entry or not at "
            f"all; leave it out, or say {ways}"
        )
    said = "without effect=" if policy.effect is UNSET else f"with effect={effect.value!r}"
    return f"{option} {said}: {what}, and a step without an effect just runs again; say {ways}, or leave it out"


def _given(value: Any) -> bool:
    return value is not UNSET and value is not None


# ---------------------------------------------------------------------- each option by itself


def _effect(effect: Any) -> Effect:
    if not isinstance(effect, str) or effect not in list(Effect):
        raise ConfigurationError(f"effect={effect!r}: it is {_KNOWN}")
    return Effect(effect)


def _reconcile(reconcile: Any) -> Any:
    if not callable(reconcile):
        raise ConfigurationError(f"reconcile={reconcile!r}: it is an async function of the step's StepInfo, or None")
    if not _is_async(reconcile):
        raise ConfigurationError(
            f"reconcile={_name(reconcile)} is no async function: write `async def {_name(reconcile, short=True)}(info)`; "
            "what blocks in it goes to a thread with asyncio.to_thread"
        )
    if not _takes_one(reconcile):
        raise ConfigurationError(
            f"reconcile={_name(reconcile)} cannot be called with one argument: it is asked with the step's StepInfo alone, "
            "whose .input has the step's arguments by name"
        )
    return reconcile


def _not_landed(classes: Any) -> tuple[type[BaseException], ...]:
    as_tuple = classes if isinstance(classes, tuple) else (classes,)
    for each in as_tuple:
        if not isinstance(each, type) or not issubclass(each, BaseException):
            raise ConfigurationError(
                f"not_landed={_shown(classes)} has {_shown(each)}, which is no class of exceptions: name those that say that the "
                "call did not happen, as in not_landed=(ConnectionRefusedError,); none: not_landed=()"
            )
        if not issubclass(each, Exception):
            raise ConfigurationError(
                f"not_landed={_shown(classes)} has {each.__name__}, which is no Exception: what ends a body from outside says "
                "nothing of its call; leave it out"
            )
    return as_tuple


def _compensate(compensate: Any) -> Any:
    if not callable(compensate):
        raise ConfigurationError(f"compensate={compensate!r}: it is a function of the step's result, or None")
    called = _call_of(compensate)
    if any(map(inspect.isgeneratorfunction, called)) or any(map(inspect.isasyncgenfunction, called)):
        raise ConfigurationError(
            f"compensate={_name(compensate)} is a generator function, which cannot be a step: write one that returns"
        )
    if not _takes_one(compensate):
        raise ConfigurationError(
            f"compensate={_name(compensate)} cannot be called with one argument: it gets the step's result alone; at a call "
            f"a lambda gives it more: step.options(compensate=lambda result: undo(result, ...))"
        )
    return compensate


def _key_valid_for(valid: Any) -> float | dt.timedelta:
    seconds = _seconds(valid)
    if seconds is None:
        raise ConfigurationError(f"key_valid_for={valid!r}: it is a number of seconds or a timedelta")
    if not seconds > 0:  # NaN is not above 0 either
        raise ConfigurationError(
            f"key_valid_for={valid!r}: the other side would never recognise a key; with no key at all the effect is "
            "'irreversible'"
        )
    if seconds == float("inf"):
        raise ConfigurationError(f"key_valid_for={valid!r}: for ever is None")
    return valid  # type: ignore[no-any-return]


def _seconds(span: Any) -> float | None:
    """A number of seconds or a timedelta, in seconds; None: it is neither."""
    if isinstance(span, dt.timedelta):
        return span.total_seconds()
    return float(span) if isinstance(span, int | float) and not isinstance(span, bool) else None


def _timeout(timeout: Any) -> Any:
    if isinstance(timeout, dt.datetime):
        if timeout.utcoffset() is None:
            raise ConfigurationError(
                f"timeout={timeout!r}: a moment needs a time zone, such as datetime(..., tzinfo=UTC)"
            )
        return timeout
    seconds = _seconds(timeout)
    if seconds is None:
        raise ConfigurationError(f"timeout={timeout!r}: it is a number of seconds, a timedelta, or an aware moment")
    if not seconds > 0:  # NaN is not above 0 either
        raise ConfigurationError(f"timeout={timeout!r}: no attempt could ever end in time; None means no limit")
    return timeout


def _durability(durability: Any) -> Any:
    if durability not in ("sync", "async"):
        raise ConfigurationError(f"durability={durability!r}: it is 'sync' (the default) or 'async'")
    return durability


def _step_name(name: Any) -> str:
    return check_name(name, "step")


_NEVER_NONE: Final = ("durability", "effect", "not_landed")  # of the others None is an answer

_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "name": _step_name,
    "retry": check_retry,
    "timeout": _timeout,
    "durability": _durability,
    "effect": _effect,
    "reconcile": _reconcile,
    "not_landed": _not_landed,
    "compensate": _compensate,
    "key_valid_for": _key_valid_for,
}


# ---------------------------------------------------------------------- functions, without a look at their annotations

# Not `describe`, which resolves annotations and keeps what it found: at a declaration, classes further down do not exist yet.


def _call_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    return function, type(function).__call__


def _is_async(function: Any) -> bool:
    return any(map(inspect.iscoroutinefunction, _call_of(function)))


def _takes_one(function: Any) -> bool:
    try:
        signature = inspect.signature(function)
    except Exception:  # of C, or with annotations that cannot be had yet: the call will show
        return True
    try:
        signature.bind(object())
    except TypeError:
        return False
    return True


def _name(thing: Any, *, short: bool = False) -> str:
    name = getattr(thing, "__name__" if short else "__qualname__", None)
    return name if isinstance(name, str) else repr(thing)[:100]


def _shown(thing: Any) -> str:
    if isinstance(thing, tuple):
        return f"({', '.join(map(_shown, thing))}{',' if len(thing) == 1 else ''})"
    return thing.__name__ if isinstance(thing, type) else repr(thing)[:100]

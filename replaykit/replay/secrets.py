"""Values that are never written: `Secret`, and pydantic's own.

A codec meets a secret in one of three moods (`_mood`). Left alone it refuses it. While an input is recorded (`masked`) it
writes `***`. While a fresh argument is made for a body (`kept`) it writes a number and keeps the secret beside the
text, and the same number is read back as that very secret: so the text of a secret is never made at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

import pydantic
from pydantic_core import CoreSchema, core_schema

from replaykit.errors import NotJournalable

__all__ = [
    "HIDDEN",
    "IN_SCHEMA",
    "NOT_HANDED_OVER",
    "REFUSED",
    "SECRETS",
    "Secret",
    "SecretMet",
    "core_schema_of",
    "is_refusing",
    "is_secret_schema",
    "kept",
    "masked",
    "read",
    "write",
]

T = TypeVar("T")

_MASK: Final = "***"

REFUSED: Final = "secrets are never written: let each step that needs one read it itself"
"""Why a value with a secret is not journaled."""

NOT_HANDED_OVER: Final = (
    "a secret is never written, so no worker could be handed it: let the step that needs it read it there, "
    "from the worker's environment or its lifespan's resources"
)
"""Why a run's input has no secrets."""

IN_SCHEMA: Final = "~secret"
"""What a JSON schema says of the place of a secret, to those who start runs by name."""


class Secret(Generic[T]):
    """A value that replaykit never writes and that prints as `***`.

    As an argument of a step the body gets it as it is; the recorded input holds `***`, and the digest knows only that a
    secret was there. In a step's or run's result, and in the input of a run, it is refused.

        async def call(key: Secret[str], prompt: str) -> str:
            return await ask(prompt, key=key.reveal())

    Two secrets are equal when their values are.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def reveal(self) -> T:
        """The value itself.

        Raises:
            NotJournalable: this one was read from a recorded input, which does not hold it.
        """
        if self is HIDDEN:
            raise NotJournalable("$: this secret was never written: read it where it came from")
        return self._value

    def __repr__(self) -> str:
        return _MASK

    def __format__(self, spec: str) -> str:
        return format(_MASK, spec)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self) or self is HIDDEN or other is HIDDEN:
            return False
        return bool(self._value == other._value)

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __copy__(self) -> Secret[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret[T]:
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        arguments = getattr(source, "__args__", None)
        inner = handler.generate_schema(arguments[0] if arguments else Any)
        made = core_schema.no_info_after_validator_function(cls, inner)
        return core_schema.json_or_python_schema(
            json_schema=made,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), made], mode="left_to_right"),
            serialization=core_schema.plain_serializer_function_ser_schema(_serialize_secret, when_used="json"),
        )


def _serialize_secret(value: Any) -> str:
    return _MASK


HIDDEN: Final[Secret[Any]] = Secret(_MASK)
"""What stands where a recorded input has `***`."""

SECRETS: Final = (Secret, pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)
"""Classes whose values are never written."""


class SecretMet(ValueError):
    """A codec met a secret, and may not write it."""


_mood: ContextVar[list[Any] | str | None] = ContextVar("replaykit_secrets", default=None)


@contextmanager
def masked() -> Iterator[None]:
    """Secrets are written as `***`."""
    token = _mood.set(_MASK)
    try:
        yield
    finally:
        _mood.reset(token)


@contextmanager
def kept(secrets: list[Any]) -> Iterator[None]:
    """Secrets are put into `secrets` when they are written, and taken from there when they are read."""
    token = _mood.set(secrets)
    try:
        yield
    finally:
        _mood.reset(token)


def write(value: Any) -> str:
    """What is written for a secret. Raises SecretMet when it may not be written at all, or is none."""
    mood = _mood.get()
    if mood is None or not isinstance(value, SECRETS):
        raise SecretMet("secrets are never written")
    if isinstance(mood, str):
        return mood
    mood.append(value)
    return f"{_MASK}{len(mood) - 1}"


def read(text: Any) -> Any:
    """The secret that was kept, or HIDDEN. Raises ValueError for anything that `write` did not write."""
    mood = _mood.get()
    if text == _MASK:
        return HIDDEN
    if isinstance(mood, list) and isinstance(text, str) and text.startswith(_MASK):
        return mood[int(text[len(_MASK) :])]
    raise ValueError("a secret is never read from a record")


def is_refusing() -> bool:
    """Whether a secret may not be written at all now."""
    return _mood.get() is None


def is_secret_schema(schema: dict[str, Any]) -> bool:
    """Whether a part of a core schema is a secret.

    Told by what its validator makes, for an author may have put another serializer in the place of the one that hides it.
    """
    kind = schema.get("type")
    if kind == "lax-or-strict":
        return is_secret_schema(schema.get("lax_schema") or {})
    if kind != "json-or-python":
        return False
    made = ((schema.get("json_schema") or {}).get("function") or {}).get("function")
    if isinstance(made, type):
        return issubclass(made, SECRETS)
    module, name = getattr(made, "__module__", ""), str(getattr(made, "__qualname__", ""))
    return module == "pydantic.types" and name.startswith("Secret.__get_pydantic_core_schema__")


def core_schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What takes the place of a secret's schema in a codec."""
    made: dict[str, Any] = {
        "type": "function-plain",
        "function": {"type": "no-info", "function": read},
        "serialization": {"type": "function-plain", "function": write},
    }
    if "ref" in schema:
        made["ref"] = schema["ref"]
    return made

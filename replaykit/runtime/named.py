"""Starts by name: the arguments are bound and checked by what the live workers say of the workflow.

Where no live worker has it, or its parameters take what a JSON schema cannot say, the call is recorded as it was made,
under `~call`, and the worker that claims the run binds it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import pydantic_core

from replaykit.errors import ConfigurationError, NotJournalable
from replaykit.limits import NAMED_SECONDS
from replaykit.postgres.leases import live_workflows, parse_workflows
from replaykit.replay.calls import Workflow
from replaykit.replay.codec import misfit as misfit_of
from replaykit.replay.codec import path_of_secret
from replaykit.replay.secrets import NOT_HANDED_OVER
from replaykit.runtime.fit import misfit
from replaykit.runtime.line import Line

__all__ = ["Caller", "NamedWorkflows", "bind_among", "bind_by_schema", "call_as_made", "why_unfit"]


_OURS: Final = __file__.rpartition("/runtime/")[0] + "/"


class Caller:
    """The line outside of replaykit that made a call. Looked up at once: a thread or a task may do the work."""

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
            frame = frame.f_back
        self._where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        self._registry: dict[Any, Any] = frame.f_globals.setdefault("__warningregistry__", {})

    def warn(self, sentence: str) -> None:
        """A RuntimeWarning that names that line."""
        warnings.warn_explicit(sentence, RuntimeWarning, *self._where, self._registry)


class NamedWorkflows:
    """What live workers have, read at most every `NAMED_SECONDS` seconds."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._schemas: dict[str, Any] = {}
        self._read_at = float("-inf")

    async def bind(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: Caller) -> str:
        """The input of a run of that workflow, as JSON text.

        Raises:
            ConfigurationError: the arguments do not fit.
            NotJournalable: an argument has no JSON form.
        """
        if name not in self._schemas or time.monotonic() - self._read_at > NAMED_SECONDS:
            self._schemas = parse_workflows(await self._line.run(live_workflows()))
            self._read_at = time.monotonic()
        return bind_among(name, self._schemas, args, kwargs, caller)


def bind_among(
    name: str, schemas: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: Caller
) -> str:
    """The arguments as `bind_by_schema` has them; as they were made, with a warning, if no live worker has the workflow.

    Args:
        name: the workflow's.
        schemas: of the live workers' workflows, by name.
        args, kwargs: what the run is started with.
        caller: whose line the warning names.
    """
    schema = schemas.get(name)
    if schema:
        return bind_by_schema(name, schema, args, kwargs)
    there = ", ".join(sorted(schemas))
    instead = f"they have {there}" if there else "its run will wait for one"
    caller.warn(f"no live worker has the workflow {name!r}: {instead}")
    return call_as_made(args, kwargs)


def bind_by_schema(name: str, schema: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments as a JSON object by parameter name.

    Args:
        name: the workflow's, for sentences.
        schema: as `FunctionInfo.schema` makes it: a JSON schema by parameter, and `positional`, their order.

    Raises:
        ConfigurationError: they do not fit; the message names the path (`checkout: $.order.rows[3].cents: ...`).
        NotJournalable: an argument has no JSON form, or stands in the place of a secret.
    """
    positional, properties = schema["positional"], schema["properties"]
    given = {p: _text(name, f".{p}", value) for p, value in zip(positional, args, strict=False)}
    as_made = False
    if len(args) > len(positional):
        # `*args` is an array that cannot be given by place; which of several it is the schema does not say.
        as_made = any(properties[p].get("type") == "array" for p in properties if p not in positional)
        if not as_made:
            noun = "argument" if len(positional) == 1 else "arguments"
            raise ConfigurationError(f"{name} takes at most {len(positional)} {noun} by place, not {len(args)}")
    for parameter, value in kwargs.items():
        if parameter in given:
            raise ConfigurationError(f"{name} got {parameter!r} twice: by place and by name")
        if parameter not in properties:
            if schema["additionalProperties"] is False:
                raise ConfigurationError(
                    f"{name} has no parameter {parameter!r}; it has {', '.join(properties) or 'none'}"
                )
            as_made = True  # `**kwargs`
        given[parameter] = _text(name, f".{parameter}", value)
    for parameter in schema["required"]:
        if parameter not in given:
            raise ConfigurationError(f"{name} needs {parameter!r}; its parameters are {', '.join(properties)}")
    for parameter, text in given.items():
        expected = properties.get(parameter, schema["additionalProperties"])
        wrong = misfit(pydantic_core.from_json(text), expected, schema.get("$defs", {}))
        if wrong is not None and wrong.endswith(NOT_HANDED_OVER):
            raise NotJournalable(f"$.{parameter}{wrong}")
        if wrong is not None:
            raise ConfigurationError(f"{name}: $.{parameter}{wrong}")
    if as_made:
        return call_as_made(args, kwargs)
    return _object({parameter: given[parameter] for parameter in properties if parameter in given})


def why_unfit(workflow: Workflow[..., Any], run_id: UUID, text: str, error: Exception) -> str:
    """Why a run's input cannot be what its function is called with: path and reason, in the words of a start by name.

    Args:
        workflow: whose run it is.
        run_id: the run.
        text: its input, as recorded.
        error: what `FunctionInfo.decode_arguments` raised.
    """
    why = misfit_of(error)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # of a call that is no call
        found = json.loads(text)
        call = found.get("~call")
        try:
            if isinstance(call, list):
                bind_by_schema(workflow.name, workflow.info.schema(), tuple(call), {})
            elif call is not None:
                args, kwargs = call.get("args", []), call.get("kwargs", {})
                bind_by_schema(workflow.name, workflow.info.schema(), tuple(args), kwargs)
            else:
                bind_by_schema(workflow.name, workflow.info.schema(), (), found)
        except NotJournalable as secret:
            why = str(secret)
        except ConfigurationError as sentence:
            why = str(sentence) if call is not None else why
    why = why.removeprefix(f"{workflow.name}: ").removeprefix(f"{workflow.info.label}: ")
    if why.endswith(NOT_HANDED_OVER):
        why += (
            f". What was given stands in the run's row of payloads: `replaykit cancel {run_id}`, then"
            f" update replaykit.payloads set input = '{{}}' where run_id = '{run_id}'"
        )
    return why


def call_as_made(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The call in the form that SQL's `start()` records: the worker that claims the run binds and checks it."""
    places = ",".join(_text("start", f"[{place}]", value) for place, value in enumerate(args))
    names = _object({parameter: _text("start", f".{parameter}", value) for parameter, value in kwargs.items()})
    return f'{{"~call":{{"args":[{places}],"kwargs":{names}}}}}'


def _object(members: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{_text('start', '', member)}:{text}" for member, text in members.items()) + "}"


def _text(name: str, path: str, value: Any) -> str:
    """A value as JSON, for an annotation that is known elsewhere: as pydantic reads it back."""
    try:
        text = pydantic_core.to_json(value, by_alias=False, bytes_mode="base64", inf_nan_mode="strings").decode()
    except (ValueError, TypeError, RecursionError) as error:
        if (secret := path_of_secret(value)) is not None:
            raise NotJournalable(f"${path}{secret}: {NOT_HANDED_OVER}") from None
        raise NotJournalable(f"${path}: cannot be written as JSON for {name}: {error}") from None
    secret = path_of_secret(value)  # pydantic writes stars for one, and an author's serializer what it likes
    if secret is not None:
        raise NotJournalable(f"${path}{secret}: {NOT_HANDED_OVER}")
    return text

"""`replaykit start`: values from the command line, the start, the wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import warnings
from collections.abc import AsyncIterator, Sequence
from typing import Any

import click

from replaykit.errors import RunCancelled, RunFailed, RunHeld, WorkflowUnknown
from replaykit.interfaces.output import as_json, console, error_type, print_json, say
from replaykit.runtime.client import Client, Handle
from replaykit.runtime.inspect import Inspector, error_words
from replaykit.runtime.target import Target

__all__ = ["parse_values", "start_run"]

_PROGRESS_SECONDS = 0.5


def parse_values(values: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments from `JSON` and `NAME=JSON`.

    Raises:
        click.UsageError: one is not JSON. The sentence names its place, never the value: it may be a secret.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, text in enumerate(values, 1):
        if text.startswith("--"):
            raise click.UsageError(f"no such option: {text.partition('=')[0]}")
        name, equals, rest = text.partition("=")
        if equals and name.isidentifier():
            if name in kwargs:
                raise click.UsageError(f"{name} is given twice")
            kwargs[name] = _parse(rest, f"{name}=...", f"{name}=")
        elif kwargs:
            raise click.UsageError(f"value {place} follows a NAME=JSON: arguments by place come first")
        else:
            args.append(_parse(text, f"value {place}", ""))
    return args, kwargs


def _parse(text: str, which: str, before: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise click.UsageError(f"{which} is not JSON; text is written '{before}\"...\"'") from None


def start_run(
    target: Target,
    workflow: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    key: str | None,
    queue: str | None,
    priority: int | None,
    delay: float | None,
    wait: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Start a run, wait for it if asked to, print what became of it. Returns the exit code."""
    with Inspector(target) as inspector:
        if not force:
            _refuse_unknown(inspector, workflow)
        client = Client(target.open(), target.schema)
        client = client.options(key=key, queue=queue, priority=priority, delay=delay)
        unclaimed = _unclaimed(inspector, workflow, queue or "default")
        answer = asyncio.run(_start(client, workflow, args, kwargs, unclaimed, wait=wait, as_json=as_json))
        if wait:
            answer |= _outcome(inspector.run(answer["id"]))
    if as_json:
        print_json(answer)
    else:
        _print(answer, wait)
    return 0 if not wait or answer["state"] == "succeeded" else 1


def _refuse_unknown(inspector: Inspector, workflow: str) -> None:
    """A name that no live worker has is likelier mistyped than early, as long as there are live workers."""
    there = inspector.workflows()
    if there and workflow not in there:
        names = ", ".join(sorted(there))
        raise WorkflowUnknown(
            f"no live worker has a workflow {workflow!r}; there are {names} (--force starts it anyway)"
        )


def _unclaimed(inspector: Inspector, workflow: str, queue: str) -> str | None:
    """What to say of a queue that no live worker takes this workflow's runs from, while there are some that have it."""
    taken = inspector.queues(workflow)
    if not taken or queue in taken:
        return None
    return (
        f"no live worker takes {workflow} from the queue {queue!r} (they take it from {', '.join(taken)}): "
        "its run will wait for one"
    )


async def _start(
    client: Client,
    workflow: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    unclaimed: str | None,
    *,
    wait: bool,
    as_json: bool,
) -> dict[str, Any]:
    async with client:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = await client.start(workflow, *args, **kwargs)
        for warning in caught:
            say(str(warning.message))
        state = str((await handle.info()).state)
        if handle.created:
            state = "waiting" if state == "waiting" else "pending"  # a worker may have it by now
        else:
            say(f"the key's run was there already, with the input of its first start: {handle.id}, {state}")
        if handle.created and unclaimed is not None:
            say(unclaimed)
        if wait:
            if handle.created and not as_json:
                say(f"run {handle.id}")  # before the wait: whoever ends it, or loses patience, may want it
            async with _progress(handle, workflow):
                with contextlib.suppress(RunFailed, RunHeld, RunCancelled):  # the row says more
                    await handle.result()
    return {"id": str(handle.id), "state": state, "created": handle.created}


def _outcome(run: dict[str, Any]) -> dict[str, Any]:
    """What `--wait` adds: the state, and the result, the error or the reason."""
    named = {"succeeded": ("result", "output"), "failed": ("error", "error"), "held": ("reason", "reason")}
    name, column = named.get(run["state"], ("reason", "reason"))
    return {"state": run["state"], name: run[column]}


def _print(answer: dict[str, Any], waited: bool) -> None:
    if not waited:
        click.echo(answer["id"])
    elif answer["state"] == "succeeded":
        click.echo(as_json(answer["result"]))
    else:
        error = answer.get("error") or {}
        why = f"{error_type(error)}: {error_words(error)}" if error else answer.get("reason")
        place = f" ({error['line']})" if error.get("line") else ""
        say(f"run {answer['id']} {_BECAME.get(answer['state'], answer['state'])}{f': {why}{place}' if why else ''}")


_BECAME = {"failed": "failed", "held": "is held", "cancelled": "was cancelled"}


@contextlib.asynccontextmanager
async def _progress(handle: Handle[Any], workflow: str) -> AsyncIterator[None]:
    """A line on a terminal's stderr while the run works; elsewhere nothing."""
    screen = console(err=True)
    if not screen.is_terminal:
        yield
        return
    with screen.status(f"{workflow} {handle.id}") as status:

        async def follow() -> None:
            while True:
                info = await handle.info()
                waits = f" {info.waiting_for}" if info.waiting_for else ""
                status.update(f"{workflow} {handle.id}  {info.state}{waits}, {info.entries} entries")
                await asyncio.sleep(_PROGRESS_SECONDS)

        task = asyncio.create_task(follow())
        try:
            yield
        except asyncio.CancelledError:
            say(f"the run goes on: `replaykit show {handle.id}`")
            raise
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

"""Live views: `replaykit dev`, `runs --watch`, `show --watch`. They look again and again; no run is kept open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from replaykit.errors import ReplaykitError
from replaykit.interfaces.logs import setup
from replaykit.interfaces.output import STATE_STYLES, console, say
from replaykit.interfaces.show import draw_run, draw_runs
from replaykit.limits import Settings
from replaykit.runtime.inspect import Inspector
from replaykit.runtime.modules import load_object, load_workflows
from replaykit.runtime.target import Target
from replaykit.runtime.worker import Worker

__all__ = ["above_view", "quiet_beside", "run_dev", "watch_run", "watch_runs"]

_LOOK_SECONDS = 0.25
_ENDED = {"held", "succeeded", "failed", "cancelled", "continued"}


def run_dev(
    target: Target,
    module: str,
    *,
    queues: tuple[str, ...],
    lifespan: str | None,
    poll_only: bool,
    log_format: str,
    log_level: str | None,
    settings: Settings,
) -> int:
    """A worker in this process until Ctrl-C, with a live view of the newest runs if stdout is a terminal."""
    screen = console()
    workflows = load_workflows([module])
    worker_of = load_object(lifespan) if lifespan is not None else None
    with Inspector(target) as inspector:
        inspector.check()
    dsn = target.open()
    worker = Worker(
        dsn,
        schema=target.schema,
        workflows=list(workflows.values()),
        queues=queues,
        lifespan=worker_of,
        settings=settings,
        poll_only=poll_only,
    )
    names = ", ".join(sorted(workflows))
    say(f"running {names}; start one from another terminal: replaykit start {min(workflows)} ...  (Ctrl-C ends)")
    with _view(screen, target) if screen.is_terminal else contextlib.nullcontext():
        # Inside the view, which puts what is printed above itself.
        setup(log_format, log_level or quiet_beside(screen.is_terminal))
        asyncio.run(worker.run())
    return 0


def quiet_beside(view: bool) -> str:
    """The level of a log that nobody chose: the view tells what the lines of each run would."""
    return "warning" if view else "info"


@contextlib.contextmanager
def _view(screen: Console, target: Target) -> Iterator[None]:
    """Draws the newest runs from a thread of its own: a body that blocks the event loop must not freeze it."""
    done = threading.Event()
    rows = max(5, screen.height - 6)
    with Live(console=screen, auto_refresh=False, redirect_stdout=True, redirect_stderr=True) as live:

        def look() -> None:
            with Inspector(target) as inspector:
                while not done.wait(_LOOK_SECONDS):
                    live.update(_try(lambda: _runs(inspector.progress(limit=rows))), refresh=True)

        thread = threading.Thread(target=look, name="replaykit view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)


@contextlib.contextmanager
def above_view(target: Target) -> Iterator[bool]:
    """A live view of the newest runs if stdout is a terminal; what this process and its children write goes above it.

    Yields:
        Whether there is a view.
    """
    if not sys.stdout.isatty():
        yield False
        return
    streams = [number for number in (1, 2) if os.isatty(number)]
    kept = [os.dup(number) for number in streams]
    reading, writing = os.pipe()
    with os.fdopen(os.dup(1), "w") as terminal:
        screen = Console(file=terminal, highlight=False, emoji=False)
        printer = threading.Thread(target=_print_lines, args=(reading, screen), name="replaykit print", daemon=True)
        with _view(screen, target):
            for number in streams:
                os.dup2(writing, number)
            os.close(writing)
            printer.start()
            try:
                yield True
            finally:
                for number, descriptor in zip(streams, kept, strict=True):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                printer.join(timeout=5)  # its end is that of the last child


def _print_lines(reading: int, screen: Console) -> None:
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            screen.print(Text.from_ansi(line.rstrip("\n")))


def watch_runs(inspector: Inspector, *, state: str | None, workflow: str | None, limit: int) -> None:
    """The list, again and again, until Ctrl-C."""

    def look() -> RenderableType:
        return _runs(inspector.progress(state=state, workflow=workflow, limit=limit))

    with Live(console=console(), auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            live.update(_try(look), refresh=True)
            time.sleep(_LOOK_SECONDS)


def watch_run(inspector: Inspector, run_id: UUID, *, every: bool = False) -> None:
    """One run, again and again, until it ends or is held."""
    screen = console()
    with Live(console=screen, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            report = inspector.drawn(run_id, every=every)
            live.update(draw_run(report), refresh=True)
            if report["run"]["state"] in _ENDED:
                break
            time.sleep(_LOOK_SECONDS)
    if not screen.is_terminal:
        screen.print()  # rich leaves the last line open


def _try(look: Callable[[], RenderableType]) -> RenderableType:
    """What a look finds, or why there is nothing to see now."""
    try:
        return look()
    except ReplaykitError as error:
        return Text(str(error), "red")


def _runs(runs: list[dict[str, Any]]) -> RenderableType:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run["state"]] = counts.get(run["state"], 0) + 1
    summary = Text("  ").join(Text(f"{count} {state}", STATE_STYLES[state]) for state, count in counts.items())
    return Group(draw_runs(runs, short=True, progress=True), Text(), summary if runs else Text("no runs yet", "dim"))

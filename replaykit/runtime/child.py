"""One child of `replaykit worker`: `python -m replaykit.runtime.child`, which only the supervisor runs.

A `Worker` with three ways out. SIGTERM: a drain, with the grace period. The end of the lifeline (the parent is gone, or
wants no more drain): everything is given up, within 2 seconds, whatever it takes. The end of the lease while bodies
run: the heartbeat ends the process itself. A solo child, which executes suspects apart from all other runs, has a
fourth: it leaves when there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from replaykit.errors import ConfigurationError
from replaykit.events import log
from replaykit.replay.calls import Workflow
from replaykit.runtime.config import WorkerConfig
from replaykit.runtime.heartbeat import EXIT_LEASE_LOST
from replaykit.runtime.lifeline import ChildEnd, Incarnation
from replaykit.runtime.modules import load_object, load_workflows, users_traceback
from replaykit.runtime.supervisor import refusal_code
from replaykit.runtime.worker import Lifespan, Worker

__all__ = ["calm_collector", "main"]


ORPHAN_SECONDS: Final = 1.8
"""From the end of the lifeline to the end of the process, at the latest: DESIGN promises 2."""

EXIT_SECONDS: Final = 2.0
"""How long threads and exit handlers of the user's may take once all is done."""


def main(argv: Sequence[str]) -> int:
    """Runs the worker that the parent wants; returns the exit code."""
    parent = ChildEnd(argv)
    parent.die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing is held yet
    # A terminal sends SIGINT to the whole group; the parent decides what it means. Not SIG_IGN, which the bodies' own
    # children would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    config = parent.read_config()
    try:
        if config.log_setup is not None:
            load_object(config.log_setup)(config.log_format, config.log_level)
        workflows = load_workflows(config.modules)
        calm_collector()
        lifespan = _checked(config.lifespan) if config.lifespan is not None else None
        worker = asyncio.run(_serve(parent, config, parent.read_incarnation(), workflows, lifespan))
    except ConfigurationError as error:
        parent.report("failed", str(error))
        return refusal_code(error)
    except BaseException:
        log.exception("child_failed")
        raise
    parent.report("leaving")
    return _leave(worker)


def calm_collector() -> None:
    """Let the garbage collector look less often, and never at what was there from the start.

    Runs in memory are many long-lived objects: at its default it walks them all every few hundred steps, for a quarter of
    the process's time. A run that leaves memory leaves no cycles of ours behind (`Execution.leave`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _serve(
    parent: ChildEnd,
    config: WorkerConfig,
    incarnation: Incarnation,
    workflows: dict[str, Workflow[..., Any]],
    lifespan: Lifespan | None,
) -> Worker:
    """Works until it is told to stop, and stops."""
    loop = asyncio.get_running_loop()
    drain, gone = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, drain.set)
    parent.watch(lambda: _orphaned(loop, gone))
    worker = Worker(
        config.dsn,
        workflows=list(workflows.values()),
        queues=config.queues,
        lifespan=lifespan,
        settings=config.settings,
        schema=config.schema_name,
        worker_id=incarnation.worker_id,
        supervised=True,
        solo=incarnation.solo,
        on_suspects=lambda: parent.report("suspects"),
        poll_only=config.poll_only,
    )
    told = [asyncio.create_task(event.wait()) for event in (drain, gone)]
    starting = asyncio.create_task(worker.start())
    await asyncio.wait([starting, *told], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await _cancelled(starting)
        return worker
    await starting
    parent.report("ready")
    told.append(asyncio.create_task(worker.idle.wait()))
    await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
    if not gone.is_set():
        stopping = asyncio.create_task(worker.stop())
        await asyncio.wait([stopping, told[1]], return_when=asyncio.FIRST_COMPLETED)
        await (_cancelled(stopping) if not stopping.done() else stopping)
    if gone.is_set():
        await worker.abandon()
    for task in told:
        task.cancel()
    if worker.bodies:
        # asyncio.run would wait for those bodies, and act on. After a drain the parent hands their runs back as soon as
        # this process is gone; after an orphaning the lease runs out by itself.
        _flush()
        parent.report("leaving")
        os._exit(EXIT_LEASE_LOST if gone.is_set() else 0)
    return worker


def _orphaned(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """In the lifeline's thread: asks the loop to give up, and ends the process if it does not."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: we are leaving already
        loop.call_soon_threadsafe(gone.set)
    try:
        time.sleep(ORPHAN_SECONDS)
    finally:  # under libfaketime a sleep may fail
        os._exit(EXIT_LEASE_LOST)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _checked(reference: str) -> Lifespan:
    """The user's lifespan; an error on its way in is shown as theirs, as an error of their module is."""
    made = load_object(reference)

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                resources = await stack.enter_async_context(made())
            except Exception as error:
                raise ConfigurationError(f"the lifespan {reference} failed:\n{users_traceback(error)}") from error
            yield resources

    return lifespan


def _leave(worker: Worker) -> int:
    """Lets exit handlers of the user's run, but not for ever."""
    guard = threading.Timer(EXIT_SECONDS, os._exit, args=(0,))
    guard.daemon = True
    guard.start()
    log.info("child_stopped", worker=str(worker.worker_id))
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

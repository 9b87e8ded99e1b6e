"""`replaykit dev MODULE --reload`: a worker whose children are drained and started anew when a Python file changes.

The worker is that of `replaykit worker`, with one child: the new code is imported by a new process, and what a module
leaves behind (threads, patches, open connections) ends with the old one. Runs in flight are handed over by the drain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from replaykit.errors import ConfigurationError
from replaykit.interfaces.live import above_view, quiet_beside
from replaykit.interfaces.logs import SETUP, setup
from replaykit.interfaces.output import say
from replaykit.limits import Settings
from replaykit.runtime.config import WorkerConfig
from replaykit.runtime.inspect import Inspector
from replaykit.runtime.supervisor import Bell, run_workers
from replaykit.runtime.target import Target

__all__ = ["run_reloading"]


def run_reloading(
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
    """Works until Ctrl-C. Code that does not import ends nothing: the error is said, and the next change is awaited.

    Raises:
        ConfigurationError: watchfiles is not installed, or there is no such module to watch.
    """
    folder = _folder(module)
    with Inspector(target) as inspector:
        inspector.check()
    dsn = target.open()
    with _watched(folder) as changes, above_view(target) as drawn:
        # Two saves within a second that leave the size alone would find the bytecode of the first.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        log_level = log_level or quiet_beside(drawn)
        setup(log_format, log_level)
        config = WorkerConfig(
            dsn=dsn,
            schema_name=target.schema,
            modules=(module,),
            queues=queues,
            spare=False,  # it would have imported the old code
            lifespan=lifespan,
            settings=settings,
            poll_only=poll_only,
            log_format="json" if log_format == "json" else "console",
            log_level=log_level,
            log_setup=SETUP,
        )
        say(f"running {module}, again after each change of a .py file in {folder}  (Ctrl-C ends)")
        return _work(config, changes)


def _work(config: WorkerConfig, changes: _Changes) -> int:
    """One worker after another, until a person ends one."""
    while True:
        bell = changes.next_bell()
        try:
            code = run_workers(config, bell)
        except ConfigurationError as error:
            if bell.signalled:
                raise
            say(str(error))
            say("waiting for the next change")
            changes.wait()
        else:
            if bell.signalled:
                return code
        say(f"{changes.file} has changed: starting anew")


class _Changes:
    """What the watching thread has seen since the worker that runs now was started."""

    def __init__(self) -> None:
        self.file = ""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._bell = Bell()

    def next_bell(self) -> Bell:
        """For the next worker, which has yet to import the code: the changes that it must not miss ring this one."""
        with self._lock:
            self._changed.clear()
            self._bell = Bell()
            return self._bell

    def tell(self, file: str) -> None:
        """In the watching thread."""
        with self._lock:
            self.file = file
            self._changed.set()
            self._bell.ring()

    def wait(self) -> None:
        """Until a file changes, or Ctrl-C."""
        self._changed.wait()


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[_Changes]:
    try:
        from watchfiles import PythonFilter, watch
    except ModuleNotFoundError:
        raise ConfigurationError("--reload needs watchfiles: pip install 'replaykit[reload]'") from None
    changes, stop = _Changes(), threading.Event()

    def look() -> None:
        try:
            for seen in watch(folder, watch_filter=PythonFilter(), stop_event=stop, raise_interrupt=False):
                changes.tell(os.path.relpath(min(path for _, path in seen), folder))
        except OSError as error:  # such as the limit of inotify's watches
            say(f"{folder} cannot be watched any more, changes go unseen: {error}")

    thread = threading.Thread(target=look, name="replaykit reload", daemon=True)
    thread.start()
    try:
        yield changes
    finally:
        stop.set()
        thread.join(timeout=5)


def _folder(module: str) -> Path:
    """The folder of a file; of a dotted name its outermost package's. Nothing of the user's is imported here."""
    if module.endswith(".py") or os.sep in module:
        path = Path(module).resolve()
        if not path.parent.is_dir():
            raise ConfigurationError(f"there is no file {module}")
        return path.parent
    spec = PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is None:
        raise ConfigurationError(f"there is no module {module!r}")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin or ".").resolve().parent

"""Where the time of a step goes, by layer: `python -m benchmarks.layers SCENE [URL]`, in a process of its own.

A clock interrupts the process every millisecond and notes in which layer the event loop's thread is. What C code takes counts for
the Python that called it; what the standard library takes for the layer that called it, but for asyncio and the selector, which
are layers. `waiting` is the selector waiting for an answer: the server's time, its commit to disk, and the way there and back.
"""

from __future__ import annotations

import asyncio
import collections
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Self

from benchmarks import replay, throughput
from replaykit.runtime.child import calm_collector

__all__ = ["LAYERS", "SCENES", "as_markdown"]

INTERVAL_SECONDS: Final = 0.001
REPLAYED: Final = 50_000  # steps
REPLAYS: Final = 5

WAITING: Final = "waiting"
OTHER: Final = "other"

PLACES: Final = {
    "/selectors.py": WAITING,
    "/asyncio/": "asyncio",
    "/replaykit/replay/loop.py": "its event loop (replay/loop)",
    "/replaykit/replay/execution.py": "execution, calls and keys",
    "/replaykit/replay/calls.py": "execution, calls and keys",
    "/replaykit/replay/keys.py": "execution, calls and keys",
    "/replaykit/replay/signature.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/codec.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/tags.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/jsontext.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/secrets.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/outcomes.py": "arguments and results: bound, encoded, decoded",
    "/replaykit/replay/": "what to do next (the driver)",
    "/replaykit/runtime/writer.py": "batches and their connection (the writer)",
    "/replaykit/runtime/": "bodies and runs (executor, worker)",
    "/replaykit/postgres/": "SQL and rows (postgres, psycopg)",
    "/psycopg": "SQL and rows (postgres, psycopg)",
    "/replaykit/": OTHER,
    "/benchmarks/": "the benchmark's own code",
}
"""The first of these that a file's path has decides about its layer; a file that has none counts for its caller."""

LAYERS: Final = list(
    dict.fromkeys([*(layer for layer in PLACES.values() if layer not in (WAITING, OTHER)), OTHER, WAITING])
)


class Looks:
    """What is done inside a `with` is looked at.

    Attributes:
        counts: looks by layer.
        seconds: how long it took.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self.seconds = -time.perf_counter()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_SECONDS, INTERVAL_SECONDS)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.seconds += time.perf_counter()

    def _look(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if (layer := _layer(frame.f_code.co_filename)) is not None:
                self.counts[layer] += 1
                return
            frame = frame.f_back
        self.counts[OTHER] += 1


_known: dict[str, str | None] = {}


def _layer(path: str) -> str | None:
    if path not in _known:
        _known[path] = next((layer for place, layer in PLACES.items() if place in path), None)
    return _known[path]


@dataclass
class Scene:
    """A goal of docs/performance.md, and what is driven to look at it.

    Attributes:
        title: of its column.
        units: how many of what the column counts in microseconds are done.
        drive: does them; takes the URL of a migrated database.
        has_database: whether it needs one.
    """

    title: str
    units: int
    drive: Callable[[str, Looks], None]
    has_database: bool = True


def _drive_runs(runs: int, steps: int) -> Callable[[str, Looks], None]:
    return lambda dsn, looks: asyncio.run(throughput.measure(dsn, runs, steps, around=looks))


def _drive_replay(_: str, looks: Looks) -> None:
    journal = replay.record(REPLAYED)
    with looks:
        for _each in range(REPLAYS):
            run = replay.execution(REPLAYED)
            run.start()
            run.replay(journal)


SCENES: Final = {
    "many": Scene("100 runs, a step", 100 * 400, _drive_runs(100, 400)),
    "one": Scene("one run, a step", 4_000, _drive_runs(1, 4_000)),
    "short": Scene("3-step runs, a run", 6_000, _drive_runs(6_000, 3)),
    "replay": Scene("replay, a step", REPLAYED * REPLAYS, _drive_replay, has_database=False),
}


def as_markdown(found: dict[str, dict[str, float]]) -> str:
    """A table of microseconds, a row for each layer, a column for each scene, as docs/performance.md has it."""
    names = [name for name in SCENES if name in found]
    lines = [
        "| µs | " + " | ".join(SCENES[name].title for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for layer in LAYERS:
        cells = [found[name].get(layer, 0.0) for name in names]
        if any(cell >= 0.05 for cell in cells):
            lines.append(f"| {layer} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    lines.append("| **all** | " + " | ".join(f"**{sum(found[name].values()):.1f}**" for name in names) + " |")
    return "\n".join(lines)


def main(name: str, dsn: str) -> None:
    """One scene; prints microseconds by layer."""
    scene = SCENES[name]
    seen = Looks()
    scene.drive(dsn, seen)
    each = seen.seconds / max(seen.counts.total(), 1) / scene.units * 1e6
    figures: dict[str, Any] = {layer: count * each for layer, count in seen.counts.items()}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    calm_collector()  # as in every child of `replaykit worker`
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")

"""How fast a recorded journal is replayed, decode and digest included: `python -m benchmarks.replay STEPS`."""

from __future__ import annotations

import json
import sys
import time
import uuid

from benchmarks.workflows import echoes
from replaykit.replay.entries import Entry
from replaykit.replay.execution import Execution


def execution(steps: int) -> Execution:
    """A fresh one."""
    return Execution(echoes.fn, (steps,), {}, info=echoes.info, run_id=uuid.UUID(int=1), seed=1, started_at=0)


def record(steps: int) -> list[Entry]:
    """The journal of a run of that many steps."""
    run = execution(steps)
    run.start()
    journal: list[Entry] = []
    while run.ended is None:
        call = next(iter(run.open.values()))
        seq = len(journal) + 1
        entry = Entry(
            seq,
            call.key,
            call.name,
            "step",
            "ok",
            seq,
            1,
            call.input.text,
            json.dumps({"i": seq - 1}),
            None,
            call.input.digest,
        )
        journal.append(entry)
        run.deliver(entry)
    return journal


def main(steps: int) -> None:
    """Best of five, since what disturbs a replay only ever makes it slower."""
    journal = record(steps)
    best = 0.0
    for _ in range(5):
        run = execution(steps)
        started = time.perf_counter()
        run.start()
        run.replay(journal)
        best = max(best, steps / (time.perf_counter() - started))
        assert run.ended is not None and run.ended.output == str(steps)
    print(json.dumps({"steps": steps, "steps_per_s": best}))


if __name__ == "__main__":
    main(int(sys.argv[1]))

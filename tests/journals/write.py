"""Writes the journals of the Python that runs it: `python -m tests.journals.write [--anew]` in the repository.

A journal that a release has written stays as it is: the next release must replay it. So a file that is there is left
alone, but for workflows that it does not hold yet, unless `--anew` is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from replaykit.about import __version__
from replaykit.replay.entries import PROTOCOL
from tests.journals.record import record, replay
from tests.journals.workflows import WORKFLOWS

NUMBERS = range(1, 4)


def main(args: list[str]) -> None:
    """Write, and say what was written."""
    if set(args) - {"--anew"}:
        sys.exit("usage: python -m tests.journals.write [--anew]")
    path = Path(__file__).with_name("py{}{}.json".format(*sys.version_info))
    known: list[dict[str, Any]] = []
    if path.exists() and "--anew" not in args:
        known = json.loads(path.read_text())["runs"]
    names = {run["workflow"] for run in known}
    new = [record(workflow, n) for name, workflow in WORKFLOWS.items() if name not in names for n in NUMBERS]
    for run in new:
        again = replay(WORKFLOWS[run["workflow"]], run)
        assert again == run, f"{run['workflow']} {run['number']} does not replay even here: {again}"
    head = {"python": "{}.{}.{}".format(*sys.version_info), "release": __version__, "protocol": PROTOCOL}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in (*known, *new))
    if new:
        path.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')
    print(f"{path.name}: {len(new)} runs written, {len(known)} left as they were, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])

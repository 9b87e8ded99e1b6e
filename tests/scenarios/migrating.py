"""A process that migrates each database that it is told of: `python -m tests.scenarios.migrating`, a URL a line."""

from __future__ import annotations

import sys

from replaykit.postgres.migrate import upgrade

if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(upgrade(line.strip()), flush=True)

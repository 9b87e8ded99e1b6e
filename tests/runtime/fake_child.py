"""A child without a worker in it: speaks the parent's protocol and behaves as its configuration's module says."""

from __future__ import annotations

import os
import signal
import sys
import threading

from replaykit.runtime.lifeline import ChildEnd


def main() -> None:
    """`fine`, `stubborn` (deaf to everything), `refused`, `quick` (dies when ready), `broken` (dies before that)."""
    parent = ChildEnd(sys.argv[1:])
    parent.die_with_parent()
    behaviour, *_ = parent.read_config().modules
    parent.read_incarnation()
    over = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: None)
    if behaviour == "refused":
        parent.report("failed", "there is no module 'flows'")
        sys.exit(2)
    if behaviour == "broken":
        sys.exit(1)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: None)
    else:
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        parent.watch(lambda: os._exit(0))
    parent.report("ready")
    if behaviour == "quick":
        sys.exit(1)
    over.wait()
    parent.report("leaving")


if __name__ == "__main__":
    main()

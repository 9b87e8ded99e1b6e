"""A child without a worker in it: speaks the parent's protocol and behaves as its configuration's module says."""

from __future__ import annotations

import os
import signal
import sys
import threading

from replaykit.runtime.lifeline import ChildEnd


def main() -> None:
    """`fine`, `stubborn` (deaf to everything), `refused`, `quick` (dies when ready), `broken` (dies before that), `vanishing`
    (on SIGUSR1 it ends as a body's os._exit(0) ends it), `suspicious` (tells of suspects, and dies of them when it is
    solo), `relieved` (tells of suspects once, and is done with them at once when it is solo)."""
    parent = ChildEnd(sys.argv[1:])
    parent.die_with_parent()
    behaviour, *_ = parent.read_config().modules
    solo = parent.read_incarnation().solo
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
    if solo:
        if behaviour == "suspicious":
            os._exit(9)
        parent.report("leaving")
        sys.exit(0)
    if behaviour == "vanishing":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        parent.report("suspects")  # says that it is prepared
    if behaviour == "relieved":
        parent.report("suspects")
    while behaviour == "suspicious" and not over.wait(0.01):
        parent.report("suspects")
    if behaviour == "quick":
        sys.exit(1)
    over.wait()
    parent.report("leaving")


if __name__ == "__main__":
    main()

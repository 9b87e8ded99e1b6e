"""A process is told from a stranger that has its number after it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.runtime.facts import lives, lives_in


def test_a_process_of_another_session_is_a_stranger() -> None:
    """Whoever kills by numbers from a log asks first."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        try:
            found = lives(stranger.pid), lives_in(stranger.pid, stranger.pid), lives_in(stranger.pid, os.getsid(0))
        finally:
            stranger.kill()
    gone = lives_in(stranger.pid, stranger.pid)

    assert (found, gone) == ((True, True, False), False)

"""Runs pyright (over the project, or with the arguments given), or says in one line why it cannot run here.

The PyPI package of pyright needs node. Where there is none it would fetch one; a machine without node and without that
network can still run all other checks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

SKIPPED = "pyright: SKIPPED, there is no node on this machine"


def main() -> int:
    """Pyright's exit code (0 nothing found, 1 mistakes found), or 0 and a line when it cannot be used."""
    if shutil.which("node") is None:
        print(SKIPPED)
        return 0
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

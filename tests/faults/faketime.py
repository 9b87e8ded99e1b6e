"""Workers whose clocks are wrong: libfaketime, from the system's package, before their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["Clocks", "find_faketime"]

LIBRARY: Final = "libfaketime.so.1"  # not the one for threads: it takes a lock that a killed thread may hold
PLACES: Final = ("/usr/lib", "/usr/local/lib")


def find_faketime() -> Path | None:
    """The library; None if it is not installed."""
    return next(_libraries(), None)


def _libraries() -> Iterator[Path]:
    for place in PLACES:
        for pattern in (f"faketime/{LIBRARY}", f"*/faketime/{LIBRARY}"):
            yield from Path(place).glob(pattern)


class Clocks:
    """What processes believe to be the time; it may be moved while they run. Their monotonic clock is left alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._file = folder / "faketime"
        self.move(0)

    @property
    def env(self) -> dict[str, str]:
        """For the processes."""
        library = find_faketime()
        assert library is not None, "libfaketime is not installed"
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def move(self, minutes: float) -> None:
        """So far from the true time, from now on."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{minutes * 60:+.0f}\n")
        new.rename(self._file)

    def told(self) -> float:
        """What such a process believes."""
        asked = [sys.executable, "-c", "import time; print(time.time())"]
        return float(subprocess.run(asked, env={**os.environ, **self.env}, capture_output=True, check=True).stdout)

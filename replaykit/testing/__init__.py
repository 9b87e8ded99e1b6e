"""Test workflows and steps: a client whose runs execute here, in memory, on virtual time.

    from replaykit import testing

    async with testing.Client(stubs={charge: lambda card, cents: Receipt("r-1")}) as client:
        handle = await client.start(checkout, order)
        await client.sleep(timedelta(days=2))
        receipt = await handle.result()

`testing.step` runs one body alone; the fixtures for pytest are in `pytest_plugin.py`. `testing.crash_everywhere` runs a
workflow in real processes and kills them at every commit.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replaykit.testing.alone import step
    from replaykit.testing.client import Client, StepRecord
    from replaykit.testing.counting import count_effect, effects_counted
    from replaykit.testing.crash_report import Crash, CrashReport
    from replaykit.testing.crashing import Doubt, Nursery, crash_everywhere
    from replaykit.testing.engine import WaitsForTime

__all__ = [
    "Client",
    "Crash",
    "CrashReport",
    "Doubt",
    "Nursery",
    "StepRecord",
    "WaitsForTime",
    "count_effect",
    "crash_everywhere",
    "effects_counted",
    "step",
]

# Imported when first asked for: pytest loads this package's plugin at its start, in projects that may not use it.
if not TYPE_CHECKING:
    _HOME_OF = {
        "Client": "client",
        "Crash": "crash_report",
        "CrashReport": "crash_report",
        "Doubt": "crashing",
        "Nursery": "crashing",
        "StepRecord": "client",
        "WaitsForTime": "engine",
        "count_effect": "counting",
        "crash_everywhere": "crashing",
        "effects_counted": "counting",
        "step": "alone",
    }

    def __getattr__(name):
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})

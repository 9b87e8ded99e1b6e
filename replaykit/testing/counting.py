"""What bodies do outside, counted in a file that outlives every process: `count_effect`, for `crash_everywhere`.

One line a call, written at once and appended by the kernel: no SIGKILL leaves half of it, and none is lost.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from replaykit.errors import ConfigurationError
from replaykit.replay.calls import CURRENT_STEP

__all__ = ["COUNTED_IN", "Effect", "count_effect", "effects_counted", "read_effects", "tally"]

COUNTED_IN: Final = "REPLAYKIT_COUNT_EFFECTS"
"""The variable that names the file, in the processes of `crash_everywhere`."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One call of `count_effect`.

    Attributes:
        what: its name.
        step: key of the step whose body made it; None: no body did.
        idempotency_key: the step's; None: it has none.
        once: the other side recognises a second call by that key.
        run: id of the step's run; None: no body made it.
    """

    what: str
    step: str | None = None
    idempotency_key: str | None = None
    once: bool = False
    run: str | None = None


def count_effect(what: str, *, once: bool = False) -> None:
    """Count that something was done outside. Call it in a body (or in what stands for the other side in your tests), where the
    real thing would happen. Outside of `crash_everywhere` it does nothing.

    Args:
        what: a name for it, such as "charge".
        once: the other side recognises the step's idempotency key: a second call with the same key is no second effect.

    Raises:
        ConfigurationError: `once` in a step without a key, or outside of a step.
    """
    info = CURRENT_STEP.get()
    key = info.idempotency_key if info is not None and info.has_key else None
    if once and key is None:
        raise ConfigurationError(
            f"count_effect({what!r}, once=True) where there is no idempotency key: it needs a step without durability='async'"
        )
    file = os.environ.get(COUNTED_IN)
    if file is None:
        return
    of = (None, None) if info is None else (info.key, str(info.run_id))
    line = json.dumps(asdict(Effect(what, of[0], key, once, of[1]))) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def effects_counted(what: str) -> int:
    """How often this step's attempts, of whatever process, have counted that so far. For a reconciler under `crash_everywhere`,
    in place of the question to the other side; elsewhere 0.

    Args:
        what: the name that `count_effect` was given.

    Raises:
        ConfigurationError: outside of a step.
    """
    info = CURRENT_STEP.get()
    if info is None:
        raise ConfigurationError(f"effects_counted({what!r}) outside of a step: it is for bodies and their reconcilers")
    file = os.environ.get(COUNTED_IN)
    if file is None:
        return 0
    mine = what, info.key, str(info.run_id)
    return sum((effect.what, effect.step, effect.run) == mine for effect in read_effects(Path(file)))


def read_effects(file: Path) -> list[Effect]:
    """All that was counted in a file, oldest first; none without it."""
    if not file.exists():
        return []
    return [Effect(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def tally(effects: Iterable[Effect]) -> Counter[tuple[str | None, str]]:
    """How often each thing was done, by step and name: with `once`, once for each key."""
    seen: set[tuple[str, str | None]] = set()
    counts: Counter[tuple[str | None, str]] = Counter()
    for effect in effects:
        if effect.once:
            if (effect.what, effect.idempotency_key) in seen:
                continue
            seen.add((effect.what, effect.idempotency_key))
        counts[effect.step, effect.what] += 1
    return counts

"""What rewinds set aside of a journal, and what of it is used again.

A run that failed and is retried goes on from before its last error: `rewind(to_seq)` sets the entries from `to_seq` up to
itself aside. They are not delivered again, but a result among them that the code asks for again, with the same input, is
taken as it is: no completed step runs twice because a person said "retry" (DESIGN 4, Rewind).
"""

from __future__ import annotations

from collections.abc import Sequence

from replaykit.replay.entries import Entry, Kind, Outcome
from replaykit.replay.keys import IdempotencyKeys
from replaykit.replay.requests import CallStep
from replaykit.replay.signature import same_input

__all__ = ["Rewinds"]


class Rewinds:
    """The rewinds of one journal.

    Args:
        rewinds: `(seq, to_seq)` of each, in order, those that a later one set aside included.
        accept_inputs_to: up to this seq results are used again whatever input the code asks with now.
    """

    def __init__(self, rewinds: Sequence[tuple[int, int]], accept_inputs_to: int = 0) -> None:
        self._spans = list(rewinds)
        self._accept_inputs_to = accept_inputs_to
        self._aside: dict[str, Entry] = {}

    def take(self, entry: Entry) -> bool:
        """Take notice of the journal's next entry; True if it is set aside: not to be delivered."""
        if any(to_seq <= entry.seq < seq for seq, to_seq in self._spans):
            if entry.kind == Kind.STEP:
                self._aside[entry.key] = entry
            return True
        self.redone(entry.key)
        return False

    def redone(self, key: str) -> None:
        """The step has a new entry: what was set aside of it counts no more."""
        self._aside.pop(key, None)

    def result_for(self, call: CallStep) -> Entry | None:
        """The entry that was set aside and whose result this call repeats, if there is one."""
        entry = self._aside.get(call.key)
        if entry is None or entry.outcome != Outcome.OK or not self._same_call(entry, call):
            return None
        return entry

    def attempts_before(self, key: str) -> int:
        """How many tries the step had before the rewind; 0 if it was not set aside."""
        entry = self._aside.get(key)
        return entry.attempt if entry is not None else 0

    def idempotency_key(self, call: CallStep, keys: IdempotencyKeys) -> str:
        """The step's key, as long as it is the same call: with another input it is another one."""
        entry = self._aside.get(call.key)
        if entry is None:
            return keys.of(call.key)
        if self._same_call(entry, call):
            return entry.idempotency_key or keys.of(call.key)
        return keys.of(f"{call.key}\0rewind:{len(self._spans)}")  # no key holds a NUL

    def _same_call(self, entry: Entry, call: CallStep) -> bool:
        if entry.name != call.name:
            return False
        if entry.digest == call.input.digest or entry.seq <= self._accept_inputs_to:
            return True
        return entry.input is not None and same_input(call.info, entry.input, call.input)

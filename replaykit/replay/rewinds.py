"""What rewinds set aside of a journal, and what of it is used again.

A run that failed and is retried goes on from before the error that it died of: `rewind(to_seq)` sets the entries from
`to_seq` up to itself aside. They are not delivered again, but a result among them that the code asks for again, with the
same input, is taken as it is: no completed step runs twice because a person said "retry" (DESIGN 4, Rewind).
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
        self._first: dict[str, Entry] = {}  # by step: its first entry of all

    def take(self, entry: Entry) -> bool:
        """Take notice of the journal's next entry; True if it is set aside: not to be delivered."""
        if entry.kind == Kind.STEP:
            self._first.setdefault(entry.key, entry)
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
        if entry is None or entry.outcome != Outcome.OK or entry.name != call.name:
            return None
        return entry if entry.seq <= self._accept_inputs_to or _same_call(entry, call) else None

    def landed_otherwise(self, call: CallStep) -> Entry | None:
        """The entry that was set aside of a call that succeeded, if the code now asks with another input."""
        entry = self._aside.get(call.key)
        if entry is None or entry.outcome != Outcome.OK or self.result_for(call) is not None:
            return None
        return entry

    def attempts_before(self, key: str) -> int:
        """How many tries the step had before the rewind; 0 if it was not set aside."""
        entry = self._aside.get(key)
        return entry.attempt if entry is not None else 0

    def idempotency_key(self, call: CallStep, keys: IdempotencyKeys, first_digest: str | None) -> str:
        """The step's key, as long as it asks with the input of its very first try; with another one it is another call, and
        its key depends on that input: the same call has the same key, whatever lies between.

        Args:
            call: as asked for now.
            keys: of the run.
            first_digest: of the first try, if a row of `attempts` knows it.
        """
        first = self._first.get(call.key)
        if first_digest is not None:
            same = first_digest == call.input.digest
        else:
            same = first is None or _same_call(first, call)
        return keys.of(call.key if same else f"{call.key}\0{call.input.digest}")  # no key holds a NUL


def _same_call(entry: Entry, call: CallStep) -> bool:
    if entry.name != call.name:
        return False
    return entry.digest == call.input.digest or (
        entry.input is not None and same_input(call.info, entry.input, call.input)
    )

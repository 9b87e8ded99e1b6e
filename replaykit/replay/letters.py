"""What others have written to a run, and what of it was answered."""

from __future__ import annotations

import json
from typing import Any

from replaykit.replay.entries import Entry, Kind, Mail, MailKind, State

__all__ = ["Letters"]


class Letters:
    """What others have written to a run, and what of it was answered."""

    def __init__(self, letters: list[Mail]) -> None:
        self.cancels = 0  # entries of requests to end
        self.rewinds = 0  # entries of requests to go on
        self.open = False  # whether there is one to be answered
        self._answered_max: dict[str, int] = {Kind.CANCEL: 0, Kind.REWIND: 0}
        self.read(letters)

    def read(self, letters: list[Mail]) -> None:
        """All of the mailbox, as it is now."""
        self._letters = letters
        self.open = bool(letters) and self.cancel is not None

    def answered(self, entry: Entry) -> None:
        """The journal holds the answer of one."""
        self.cancels += entry.kind == Kind.CANCEL
        self.rewinds += entry.kind == Kind.REWIND
        if entry.mailbox_id is not None and entry.kind in self._answered_max:
            self._answered_max[entry.kind] = max(self._answered_max[entry.kind], entry.mailbox_id)
        self.open = bool(self._letters) and self.cancel is not None

    @property
    def cancel(self) -> Mail | None:
        """The earliest request to end that was not answered. One from before a retry is over: the person changed their mind."""
        seen = max((m.id for m in self._letters if m.kind == MailKind.RETRY), default=0)
        seen = max(seen, self._answered_max[Kind.CANCEL])
        return next((m for m in self._letters if m.kind == MailKind.CANCEL and m.id > seen), None)

    @property
    def retry_of_failed(self) -> Mail | None:
        """The request to go on after a failure that has no rewind yet."""
        seen = self._answered_max[Kind.REWIND]
        retries = [m for m in self._letters if m.kind == MailKind.RETRY and m.id > seen]
        return next((m for m in retries if _body(m).get("from") == State.FAILED), None)

    @property
    def accept_inputs_to(self) -> int:
        """Up to which seq recorded results are taken whatever inputs the code asks with now."""
        return max((_body(m).get("seq", 0) for m in self._letters if _body(m).get("accept") == "inputs"), default=0)

    def word(self, key: str, attempt: int, after: int) -> tuple[Mail, dict[str, Any]] | None:
        """A person's word on that attempt of a step, with what it says; words up to that id count no more."""
        for letter in self._letters:
            if letter.kind == MailKind.RESOLVE and letter.id > after:
                body = _body(letter)
                if body.get("key") == key and body.get("attempt") == attempt:
                    return letter, body
        return None


def _body(letter: Mail) -> dict[str, Any]:
    read = letter.kind in (MailKind.RETRY, MailKind.RESOLVE) and letter.body is not None
    found = json.loads(letter.body or "{}") if read else {}
    return found if isinstance(found, dict) else {}

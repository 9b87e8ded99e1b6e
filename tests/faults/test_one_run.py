"""The checker's rules, one made-up run at a time: what each of them finds, and what it must not take for a fault."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from replaykit.postgres.audit import EntryRow, IntentRow, LetterRow, RunRecord, TryRow
from replaykit.testing.checker import Acknowledged, Call, Checked, check_run

ID, WRITE = uuid.UUID(int=1), uuid.UUID(int=2)


def entry(seq: int, key: str = "note", **changes: Any) -> EntryRow:
    """The row of a step that returned, a second after the one before."""
    keyed = {"name": key, "kind": "step", "idempotency_key": f"key of {key}", "at": 10 + seq, "recorded_at": 10 + seq}
    others = dict.fromkeys(("digest", "started_at", "due_at", "worker", "mailbox_id", "to_seq", "reuses"))
    row = {
        "seq": seq,
        "key": key,
        "outcome": "ok",
        "attempt": 1,
        "write_id": WRITE,
        "repeats": True,
        **others,
        **keyed,
        **changes,
    }
    return EntryRow(**row)


def rewind(seq: int, to_seq: int, letter: int) -> EntryRow:
    """The row of a request to go on."""
    return entry(seq, f"~rewind#{seq}", kind="rewind", idempotency_key=None, to_seq=to_seq, mailbox_id=letter)


def intent(state: str = "landed", attempt: int = 1, **changes: Any) -> IntentRow:
    """The row of an irreversible call; by default one that nobody is asked about."""
    row = {"key": "note", "effect": "irreversible", "idempotency_key": "key of note", "resolved_by": None, "word": None}
    return IntentRow(
        attempt=attempt,
        state=state,
        **{"written_at": 1, "resolved_at": None if state == "open" else 15, **row, **changes},
    )


def letter(id: int, kind: str = "retry", sent_at: int = 5, of_failed: bool = False) -> LetterRow:
    """A request."""
    return LetterRow(id, kind, kind, sent_at, of_failed)


def called(attempt: int | None = 1, key: str = "note", at: int | None = None, **changes: Any) -> Call:
    """A call of an irreversible step, as the other side saw it."""
    return Call(key, attempt, **{"idempotency_key": "key of note", "effect": "irreversible", "at": at, **changes})


def of(state: str = "succeeded", *entries: EntryRow, **changes: Any) -> RunRecord:
    """A run that was started at 10 and ended at 100."""
    ended = state in ("succeeded", "failed", "cancelled")
    row = {
        "state": state,
        "started_at": 10,
        "finished_at": 100 if ended else None,
        "asleep": False,
        "claims": 1,
        "write_id": WRITE,
    }
    known = {"id": ID, "workflow": "w", "waiting_for": None, "worker": None, "worker_known": True, "payloads": True}
    told = {"output": state == "succeeded", "error": state == "failed"}
    return RunRecord(**{**row, **known, **told, "entries": list(entries), **changes})


LATER = uuid.UUID(int=3)
HEARD = entry(1, "~cancel", kind="cancel", mailbox_id=1, idempotency_key=None)
PAID: dict[str, Any] = {"intents": [intent()]}
TWICE = [intent("not_landed"), intent(attempt=2)]
BY_KEY: dict[str, Any] = {"effect": "idempotent"}

FACTS: list[tuple[str, RunRecord, Sequence[Call], list[str]]] = [
    ("a timer at its deadline", of("running", entry(1, kind="timer", due_at=11)), (), []),
    ("a first entry before the start", of("running", entry(1, at=9)), (), ["timer"]),
    ("a second entry before the first", of("running", entry(1), entry(2, "other", at=10)), (), ["linear"]),
    ("an entry written at the start", of("running", entry(1, recorded_at=10)), (), []),
    ("an entry written before the start", of("running", entry(1, recorded_at=9)), (), ["after-the-end"]),
    ("an entry written at the end", of("succeeded", entry(1, recorded_at=100, write_id=LATER)), (), []),
    ("an entry written with the end", of("succeeded", entry(1, recorded_at=101)), (), []),
    ("a write after the end", of("succeeded", entry(1, recorded_at=101, write_id=LATER)), (), ["after-the-end"]),
    (
        "a word that came when it was answered",
        of("running", entry(1, mailbox_id=1), letters=[letter(1, "resolve", sent_at=11)]),
        (),
        [],
    ),
    (
        "a word that two entries answer",
        of("running", entry(1, mailbox_id=1), entry(2, "other", mailbox_id=1), letters=[letter(1, "resolve")]),
        (),
        ["letter"],
    ),
    (
        "a word that is answered again after its answer was set aside",
        of(
            *("running", entry(1, mailbox_id=1), rewind(2, 1, 2), entry(3, mailbox_id=1)),
            letters=[letter(1, "resolve"), letter(2)],
        ),
        (),
        [],
    ),
    (
        "a request to go on that only a later cancel answers",
        of(
            "failed",
            entry(1, "~cancel", kind="cancel", mailbox_id=2),
            letters=[letter(1, of_failed=True), letter(2, "cancel")],
        ),
        (),
        ["unheard"],
    ),
    ("a request to go on of a run that is about to", of("pending", letters=[letter(1, of_failed=True)]), (), []),
    ("an undoing of nothing", of("running", entry(1, "~undo:note")), (), ["undo"]),
    ("an undoing of a failure", of("running", entry(1, outcome="error"), entry(2, "~undo:note")), (), ["undo"]),
    ("an undoing of a result", of("running", entry(1), entry(2, "~undo:note")), (), []),
    ("intents of a run that nobody began", of("pending", started_at=None, intents=[intent("open")]), (), ["state"]),
    (
        "tries of a run that nobody began",
        of("pending", started_at=None, tries=[TryRow("note", 1, 1, 2)]),
        (),
        ["state"],
    ),
    ("a success with an error", of("succeeded", error=True), (), ["state"]),
    ("a failure with an output", of("failed", output=True), (), ["state"]),
    ("an output before the end", of("running", output=True), (), ["state"]),
    ("a try of a step that goes on", of("running", tries=[TryRow("note", 1, 1, 2)]), (), []),
    ("a try before the entry", of("running", entry(1, attempt=2), tries=[TryRow("note", 1, 1, 2)]), (), []),
    ("a try that the entry is of", of("running", entry(1), tries=[TryRow("note", 1, 1, 2)]), (), ["try-order"]),
    (
        "a word that is there",
        of("running", entry(1), intents=[intent(word="1")], letters=[letter(1, "resolve")]),
        (),
        [],
    ),
    ("a word that is not there", of("running", entry(1), intents=[intent(word="1")]), (), ["letter"]),
    ("a word that is no number", of("running", entry(1), intents=[intent(word="?")]), (), ["letter"]),
    ("an open intent of a run that goes on", of("running", intents=[intent("open")]), (), []),
    ("an open intent beside an entry", of("running", entry(1), intents=[intent("open")]), (), ["entry-of-intent"]),
    ("a doubt that was settled", of("failed", entry(1, outcome="error"), intents=[intent("unknown")]), (), []),
    ("a doubt in a held run", of("held", intents=[intent("unknown", resolved_at=None)]), (), []),
    ("a doubt in a failed run", of("failed", intents=[intent("unknown", resolved_at=None)]), (), ["open-intent"]),
    ("a second call after one that did not happen", of("running", entry(1, attempt=2), intents=TWICE), (), []),
    (
        "a second call after one in doubt",
        of("running", entry(1, attempt=2), intents=[intent("unknown"), intent(attempt=2)]),
        (),
        ["second-intent"],
    ),
    (
        "a second call of another sort",
        of("running", entry(1, attempt=2), intents=[intent("unknown", **BY_KEY), intent(attempt=2, **BY_KEY)]),
        (),
        [],
    ),
    (
        "an undone call whose first try did not happen",
        of(
            *("running", entry(1, attempt=2), entry(2, "~undo:note")),
            intents=[intent("not_landed"), intent("compensated", attempt=2)],
        ),
        (),
        [],
    ),
    (
        "a call that landed before the end, without a result",
        of("cancelled", HEARD, letters=[letter(1, "cancel")], **PAID),
        (),
        ["entry-of-intent"],
    ),
    (
        "a call that landed, as a person said after the end",
        of("cancelled", HEARD, letters=[letter(1, "cancel")], intents=[intent(resolved_at=101)]),
        (),
        [],
    ),
    ("a cancel of a run whose code could not be told of it", of("cancelled", letters=[letter(1, "cancel")]), (), []),
    ("a cancel before the start", of("cancelled", started_at=None, letters=[letter(1, "cancel")]), (), []),
    ("a wait for a moment that never comes", of("waiting", waiting_for="timer", asleep=True), (), ["asleep"]),
    ("a wait for a moment", of("waiting", waiting_for="timer"), (), []),
    ("a wait for somebody", of("waiting", waiting_for="signal", asleep=True), (), []),
    (
        "a result that is another one when it is used again",
        of("running", entry(1), rewind(2, 1, 1), entry(3, reuses=1, repeats=False), letters=[letter(1)]),
        (),
        ["reuse"],
    ),
    (
        "a result that is made anew with the same input",
        of("running", entry(1, digest="d"), rewind(2, 1, 1), entry(3, digest="d"), letters=[letter(1)]),
        (),
        ["reuse"],
    ),
    (
        "a result that is made anew with another input",
        of("running", entry(1, digest="d"), rewind(2, 1, 1), entry(3, digest="e"), letters=[letter(1)]),
        (),
        [],
    ),
    (
        "a failure that is made good with the same input",
        of(
            "running", entry(1, outcome="error", digest="d"), rewind(2, 1, 1), entry(3, digest="d"), letters=[letter(1)]
        ),
        (),
        [],
    ),
    (
        "a result that a person gives anew",
        of(
            *("running", entry(1, digest="d"), rewind(2, 1, 1), entry(3, digest="d", mailbox_id=2)),
            letters=[letter(1), letter(2, "resolve")],
        ),
        (),
        [],
    ),
    (
        "an intent with another step's key",
        of("running", entry(1, "other", idempotency_key="key of note"), entry(2), **PAID),
        (),
        ["one-key", "one-key"],
    ),
    (
        "an intent with another key than its entry",
        of("running", entry(1, idempotency_key="x"), **PAID),
        (),
        ["one-key"],
    ),
    ("an intent that was written with its entry", of("running", entry(1), intents=[intent(written_at=11)]), (), []),
    (
        "an intent that was written after its entry",
        of("running", entry(1), intents=[intent(written_at=12)]),
        (),
        ["entry-of-intent"],
    ),
    (
        "an undoing that failed after it had begun",
        of("running", entry(1), intents=[intent(written_at=12, effect="repeatable")]),
        (),
        [],
    ),
    ("a call when the run was started", of("running"), [Call("note", at=10)], []),
    ("a call before the run was started", of("running"), [Call("note", at=9)], ["timer"]),
    ("a call of a run that was never started", of("pending", started_at=None), [Call("note", at=9)], ["timer"]),
    ("many calls of a transactional step", of("running", entry(1)), [called(effect="transactional")] * 9, []),
    ("a call when its entry was written", of("running", entry(1), **PAID), [called(at=11)], []),
    ("a call after its entry", of("running", entry(1), **PAID), [called(at=12)], ["call-after-entry"]),
    ("a late call of a cheap step", of("running", entry(1, idempotency_key=None)), [Call("note", at=12)], []),
    ("a late call of a step that timed out", of("running", entry(1, outcome="timeout")), [Call("note", at=12)], []),
    (
        "a call when its entry was set aside",
        of("running", entry(1), rewind(2, 1, 1), letters=[letter(1)]),
        [Call("note", at=12)],
        [],
    ),
    (
        "a call after its entry was set aside for the first of two times",
        of("running", entry(1), rewind(2, 1, 1), entry(5), rewind(6, 1, 2), letters=[letter(1), letter(2)]),
        [Call("note", at=13)],
        ["linear"],
    ),
    (
        "a call between its entry and what set it aside",
        of("running", entry(1), entry(2, "other"), rewind(3, 1, 1), letters=[letter(1)]),
        [Call("note", at=12)],
        ["call-after-entry"],
    ),
    (
        "a call after a later entry was set aside",
        of("running", entry(1), entry(2, "other"), rewind(3, 2, 1), letters=[letter(1)]),
        [Call("note", at=14)],
        ["call-after-entry"],
    ),
    ("a call of an attempt that nobody told", of("running", entry(1), **PAID), [called(None)], []),
    (
        "a call of another sort than its intent",
        of("running", entry(1), **PAID),
        [called(effect="idempotent")],
        ["call-without-intent"],
    ),
    ("a call when its intent was written", of("running", intents=[intent("open", written_at=20)]), [called(at=20)], []),
    (
        "a call before its intent was written",
        of("running", intents=[intent("open", written_at=20)]),
        [called(at=19)],
        ["call-without-intent"],
    ),
    ("two calls of one attempt", of("running", entry(1), **PAID), [called(), called()], ["two-calls"]),
    ("two calls by one key", of("running", entry(1), intents=[intent(**BY_KEY)]), [called(did=True, **BY_KEY)] * 2, []),
    (
        "two deeds of one step",
        of("running", entry(1, attempt=2), intents=TWICE),
        [called(did=True), called(2, did=True)],
        ["landed-unsaid", "two-calls"],
    ),
    (
        "one deed of two calls",
        of("running", entry(1, attempt=2), intents=TWICE),
        [called(did=False), called(2, did=True)],
        [],
    ),
    ("a deed that nobody saw", of("running", entry(1), **PAID), [called()], []),
    ("a deed by no key", of("running", entry(1), **PAID), [called(did=True, idempotency_key=None)], []),
    ("a deed that was none", of("running", entry(1), **PAID), [called(did=False)], ["landed-unsaid"]),
    (
        "a deed that the first of two calls by one key did",
        of("running", entry(1, attempt=2), intents=[intent("unknown", **BY_KEY), intent(attempt=2, **BY_KEY)]),
        [called(did=True, **BY_KEY), called(2, did=False, **BY_KEY)],
        [],
    ),
    (
        "a deed that another key did",
        of(
            *("running", entry(1, attempt=2)),
            intents=[intent("unknown", idempotency_key="old", **BY_KEY), intent(attempt=2, **BY_KEY)],
        ),
        [called(did=True, **{"idempotency_key": "old", **BY_KEY}), called(2, did=False, **BY_KEY)],
        ["landed-unsaid"],
    ),
    ("a key of a step that goes on", of("running"), [Call("note", idempotency_key="one")], []),
    (
        "two keys of a step that goes on",
        of("running", claims=2),
        [Call("note", idempotency_key=k) for k in "ab"],
        ["one-key"],
    ),
    (
        "two keys of a step that was asked for twice",
        of(
            "running",
            intents=[
                intent("unknown", idempotency_key="a", **BY_KEY),
                intent("open", 2, idempotency_key="b", **BY_KEY),
            ],
        ),
        [called(n, idempotency_key=k, **BY_KEY) for n, k in ((1, "a"), (2, "b"))],
        [],
    ),
]


@pytest.mark.parametrize(("run", "calls", "rules"), [fact[1:] for fact in FACTS], ids=[fact[0] for fact in FACTS])
def test_a_run_breaks_these_rules_and_no_others(run: RunRecord, calls: Sequence[Call], rules: list[str]) -> None:
    """In the order in which they are told."""
    found = list(check_run(run, calls, Acknowledged(), Checked()))

    assert [broken.rule for broken in found] == rules, found


@pytest.mark.parametrize(("requests", "rules"), [(0, ["lost-end"]), (1, [])])
def test_an_end_may_be_another_one_after_a_request_to_go_on(requests: int, rules: list[str]) -> None:
    """Only then."""
    run = of("succeeded", *[rewind(1, 1, 1)][:requests], letters=[letter(1, of_failed=True)][:requests])

    assert [b.rule for b in check_run(run, (), Acknowledged(state="failed"), Checked())] == rules

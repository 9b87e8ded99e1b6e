"""Intents, what becomes of them and what bodies observe: in the unit of their entries, under its fence, once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from replaykit.postgres import journal, onlookers, runs
from replaykit.postgres.runs import OBSERVATIONS_READ_MAX
from replaykit.postgres.schema import Statement
from replaykit.replay.entries import (
    Attempt,
    Closing,
    Finish,
    Hold,
    Intent,
    Observation,
    Park,
    Release,
    State,
    Unit,
    Verdict,
)
from replaykit.replay.failures import decode_error, encode_error
from tests.postgres.store import NOW, Store, intent, step, timer, unit

Write = Callable[[Store, Unit], Verdict]


def batch(store: Store, written: Unit) -> Verdict:
    return store.write(written)[written.run_id]


def alone(store: Store, written: Unit) -> Verdict:
    return store.write_lone(written)


@pytest.fixture(params=[batch, alone])
def write(request: pytest.FixtureRequest) -> Write:
    """By both statements."""
    way: Write = request.param
    return way


# --- what is written --------------------------------------------------------------------------------------------------


def test_an_intent_stands_before_anything_else_does(store: Store, write: Write) -> None:
    """A unit may be nothing but an intent; its row says all that a person asks about it."""
    run = store.running()
    written = unit(run, intents=[intent()])

    assert write(store, written) is Verdict.OK

    columns = (
        "key, attempt, name, effect, idempotency_key, input, state, extract(epoch from written_at) * 1000000, doubt_at,"
        " resolved_at, resolved_by, evidence, worker, write_id"
    )
    call = ("charge", 1, "charge", "irreversible", "rk1_charge", {"cents": 1200})
    assert store.intents(run.id, columns) == [
        (*call, "open", NOW, None, None, None, None, store.worker, written.write_id)
    ]
    assert store.seqs(run.id) == []
    assert store.row(run.id, "state, lease_token") == ("running", run.token)


def test_an_entry_its_intent_and_the_next_one_are_one_write(store: Store, write: Write) -> None:
    """What a run that makes one call after the other sends."""
    run = store.running()
    write(store, unit(run, intents=[intent("a")]))

    done = unit(run, step(1, key="a"), closings=[Closing("a", 1, "landed")], intents=[intent("b")])
    assert write(store, done) is Verdict.OK

    columns = "key, state, resolved_at is not null, resolved_by, doubt_at"
    assert store.intents(run.id, columns) == [("a", "landed", True, None, None), ("b", "open", False, None, None)]
    assert store.seqs(run.id) == [1]


def test_a_call_that_landed_and_was_undone_says_so(store: Store, write: Write) -> None:
    """In the unit of the undo's entry."""
    run = store.running()
    write(store, unit(run, intents=[intent("a")]))
    write(store, unit(run, step(1, key="a"), closings=[Closing("a", 1, "landed")]))

    write(store, unit(run, step(2, key="~undo:a"), closings=[Closing("a", 1, "compensated")]))

    assert store.intents(run.id) == [("a", 1, "compensated")]


def test_a_call_in_doubt_asks_until_somebody_has_said(store: Store, write: Write) -> None:
    """The moment when it was found in doubt stays; so does what was known before."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    error = '{"outcome": "error", "error": {"type": "OSError"}}'

    write(store, unit(run, closings=[Closing("charge", 1, "unknown", False, "reconcile", error)]))

    columns = "state, doubt_at is not null, resolved_at, resolved_by, evidence"
    known = {"outcome": "error", "error": {"type": "OSError"}}
    assert store.intents(run.id, columns) == [("unknown", True, None, None, known)]
    ((found_at,),) = store.intents(run.id, "doubt_at")

    said = Closing("charge", 1, "landed", True, "ada", '{"comment": "seen", "outcome": "ok"}')
    write(store, unit(run, step(1, key="charge"), closings=[said]))

    known |= {"outcome": "ok", "comment": "seen"}
    columns = "state, doubt_at, resolved_at > doubt_at, resolved_by, evidence"
    assert store.intents(run.id, columns) == [("landed", found_at, True, "ada", known)]
    assert store.intents(run.id, "(select count(*) from json_object_keys(evidence))") == [(len(known),)]


def test_a_word_that_does_not_fit_leaves_the_call_in_doubt_and_is_noted(store: Store, write: Write) -> None:
    """So that another word can be given."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    write(store, unit(run, closings=[Closing("charge", 1, "unknown", False)]))
    ((found_at,),) = store.intents(run.id, "doubt_at")

    write(store, unit(run, closings=[Closing("charge", 1, "unknown", False, evidence='{"misfit": 7}')]))

    assert store.intents(run.id, "state, doubt_at, resolved_at, evidence") == [
        ("unknown", found_at, None, {"misfit": 7})
    ]


def test_a_try_of_an_idempotent_call_may_fail_without_anybody_being_asked(store: Store, write: Write) -> None:
    """Closed, and not known; the next try is a row of its own."""
    run = store.running()
    write(store, unit(run, intents=[intent(effect="idempotent")]))

    failed = Closing("charge", 1, "unknown", True, evidence='{"error": {}}')
    write(store, unit(run, closings=[failed], intents=[intent(attempt=2, effect="idempotent")]))

    columns = "attempt, state, doubt_at, resolved_at is not null"
    assert store.intents(run.id, columns) == [(1, "unknown", None, True), (2, "open", None, False)]
    assert store.admin.execute("select from in_doubt").fetchall() == []


def test_a_call_that_a_rewind_asks_about_again_is_in_doubt_again(store: Store, write: Write) -> None:
    """It was let fail without being known: no later than that can it have landed."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    write(store, unit(run, closings=[Closing("charge", 1, "unknown", True, "ada")]))
    ((closed_at,),) = store.intents(run.id, "resolved_at")

    write(store, unit(run, closings=[Closing("charge", 1, "unknown", False)]))

    columns = "state, doubt_at, resolved_at, resolved_by"
    assert store.intents(run.id, columns) == [("unknown", closed_at, None, None)]


def test_a_call_that_did_not_happen_and_its_next_attempt_are_one_write(store: Store, write: Write) -> None:
    """No moment in which neither or both are open."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))

    again = unit(run, closings=[Closing("charge", 1, "not_landed", by="reconcile")], intents=[intent(attempt=2)])
    assert write(store, again) is Verdict.OK

    columns = "attempt, state, resolved_by"
    assert store.intents(run.id, columns) == [(1, "not_landed", "reconcile"), (2, "open", None)]


@pytest.mark.parametrize(
    ("closing", "row"),
    [
        (Closing("charge", 1, "landed", by="ada", evidence='{"b": 2}'), ("landed", True, False, "ada")),
        (Closing("charge", 1, "not_landed", evidence='{"b": 2}'), ("not_landed", True, False, None)),
        (Closing("charge", 1, "unknown", False, evidence='{"b": 2}'), ("unknown", False, True, None)),
    ],
)
def test_a_unit_that_opens_and_closes_an_intent_writes_its_end(
    store: Store, write: Write, closing: Closing, row: tuple[Any, ...]
) -> None:
    """A statement does not see its own rows: the intent goes in as it ends."""
    run = store.running()

    write(store, unit(run, intents=[intent(evidence='{"a": 1}')], closings=[closing]))

    columns = "state, resolved_at is not null, doubt_at is not null, resolved_by, evidence"
    assert store.intents(run.id, columns) == [(*row, {"a": 1, "b": 2})]


def test_two_closings_of_one_intent_in_a_unit_are_its_last(store: Store, write: Write) -> None:
    """With the evidence of both."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))

    doubted = Closing("charge", 1, "unknown", False, evidence='{"a": 1, "b": 1}')
    landed = Closing("charge", 1, "landed", evidence='{"b": 2}')
    write(store, unit(run, closings=[doubted, landed]))

    assert store.intents(run.id, "state, evidence") == [("landed", {"a": 1, "b": 2})]


def test_an_undo_that_failed_leaves_a_row_that_asks(store: Store, write: Write) -> None:
    """Its body has run; nobody has said whether it landed."""
    run = store.running()

    write(store, unit(run, intents=[intent("~undo:a", effect="repeatable", state="unknown", evidence='{"error": 1}')]))

    assert store.intents(run.id, "key, state, doubt_at is not null, resolved_at") == [
        ("~undo:a", "unknown", True, None)
    ]


def test_an_intent_whose_body_never_began_is_opened_again_as_if_new(store: Store, write: Write) -> None:
    """Nothing of its first life stays."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    write(store, unit(run, closings=[Closing("charge", 1, "not_landed", evidence='{"unbegun": true}')]))

    again = intent(input="2", written_at=NOW + 5, idempotency_key="rk2")
    assert write(store, unit(run, intents=[again])) is Verdict.OK

    columns = "state, input, idempotency_key, extract(epoch from written_at) * 1000000, resolved_at, evidence"
    assert store.intents(run.id, columns) == [("open", 2, "rk2", NOW + 5, None, None)]


@pytest.mark.parametrize("state", ["landed", "unknown", "compensated", "open"])
def test_an_intent_that_may_have_landed_is_not_opened_again(store: Store, write: Write, state: str) -> None:
    """Whoever sends it twice changes nothing."""
    run = store.running()
    write(store, unit(run, intents=[intent(state=state)]))
    (before,) = store.intents(run.id, "intents::text")

    assert write(store, unit(run, intents=[intent(input="2")])) is Verdict.OK

    assert store.intents(run.id, "intents::text") == [before]


@pytest.mark.parametrize("state", ["landed", "not_landed", "compensated"])
@pytest.mark.parametrize("then", ["landed", "not_landed", "unknown"])
def test_a_call_that_is_known_stays_known(store: Store, write: Write, state: str, then: str) -> None:
    """A closing that comes again, or too late, changes nothing."""
    run = store.running()
    write(store, unit(run, intents=[intent(state=state)]))
    (before,) = store.intents(run.id, "intents::text")

    write(store, unit(run, closings=[Closing("charge", 1, then, then != "unknown", "bob", '{"x": 1}')]))

    assert store.intents(run.id, "intents::text") == [before]


def test_an_error_outlives_what_is_added_to_it_in_the_same_unit(store: Store, write: Write) -> None:
    """NUL and half a surrogate pair among its words, which are stored behind a mark, come back as they were."""
    run = store.running()
    error = encode_error(OSError("a\0b \ud800"))
    failed = Closing("charge", 1, "unknown", False, evidence=f'{{"outcome":"error","error":{error}}}')
    answered = Closing("charge", 1, "unknown", False, evidence='{"reason":"closed"}')

    write(store, unit(run, intents=[intent()], closings=[failed, answered]))

    ((evidence,),) = store.admin.execute("select evidence::text from intents").fetchall()
    found = json.loads(evidence)
    assert found["reason"] == "closed"
    assert str(decode_error(json.dumps(found["error"], ensure_ascii=False))) == "a\0b \ud800"


def test_whatever_text_evidence_holds_can_be_added_to_and_asked_for(store: Store, write: Write) -> None:
    """NUL and half a surrogate pair, however they came: Postgres' operators would fail on the whole row."""
    run = store.running()
    write(store, unit(run, intents=[intent(evidence='{"reason": "a\\u0000b"}')]))

    write(store, unit(run, closings=[Closing("charge", 1, "unknown", False, evidence='{"comment": "\\ud800ü"}')]))

    ((reason, comment),) = store.intents(run.id, "evidence ->> 'reason', evidence ->> 'comment'")
    assert (reason.startswith("a"), reason.endswith("b"), comment.endswith("ü")) == (True, True, True)
    (shown,) = onlookers.parse_rows(store.run(onlookers.run_intents(run.id)))
    assert shown["evidence"] == {"reason": "a\0b", "comment": "\ud800ü"}


def test_observations_are_rows_of_their_unit(store: Store) -> None:
    """One a kind and identifier of an attempt, however often it is told."""
    run = store.running()
    told = [Observation("charge", 1, "ticket", "1", NOW), Observation("charge", 1, "ticket", "2", NOW + 1)]

    assert batch(store, unit(run, observations=told)) is Verdict.OK
    assert batch(store, unit(run, step(1), observations=[told[1], replace(told[1], attempt=2)])) is Verdict.OK

    rows = store.admin.execute(
        "select run_id, key, attempt, kind, value, extract(epoch from observed_at) * 1000000, worker from observations"
        " order by id"
    ).fetchall()
    assert rows == [
        (run.id, "charge", 1, "ticket", "1", NOW, store.worker),
        (run.id, "charge", 1, "ticket", "2", NOW + 1, store.worker),
        (run.id, "charge", 2, "ticket", "2", NOW + 1, store.worker),
    ]


def test_an_identifier_of_any_length_that_is_taken_is_stored_and_found(store: Store) -> None:
    """Longer than a key of three such columns may be in an index."""
    run = store.running()
    kind, value = ("".join(chr(0x4E00 + (n * 7919 + m) % 20000) for n in range(341)) for m in (1, 5))
    key = "".join(chr(0x4E00 + (n * 104729) % 20000) for n in range(341))

    for _ in range(2):
        assert batch(store, unit(run, observations=[Observation(key, 1, kind, value, NOW)])) is Verdict.OK

    (found,) = onlookers.parse_rows(store.run(onlookers.find_observations(f"{kind}:{value}")))
    assert (found["key"], found["value"]) == (key, value)


def test_tries_effects_and_an_end_go_together(store: Store) -> None:
    """One statement has them all."""
    run = store.running()
    store.write(unit(run, intents=[intent(effect="idempotent")]))
    failed = Attempt("charge", 1, NOW, NOW + 1, NOW + 2, 1, NOW, error="{}")

    written = unit(
        run,
        step(1),
        change=Finish(State.SUCCEEDED, "1"),
        attempts=[failed],
        closings=[Closing("charge", 1, "landed")],
        observations=[Observation("charge", 1, "ticket", "1", NOW)],
    )
    assert batch(store, written) is Verdict.OK

    assert store.row(run.id, "state") == ("succeeded",)
    assert store.intents(run.id) == [("charge", 1, "landed")]
    assert store.admin.execute("select count(*) from attempts").fetchone() == (1,)
    assert store.admin.execute("select count(*) from observations").fetchone() == (1,)


def test_only_a_unit_of_little_is_written_by_the_fast_statement(store: Store) -> None:
    """What it does not know, it must not leave out."""
    run = store.running()
    seen = Observation("charge", 1, "ticket", "1", NOW)
    for too_much in (
        unit(run),
        unit(run, step(1), step(2), intents=[intent()]),
        unit(run, intents=[intent("a"), intent("b")]),
        unit(run, closings=[Closing("a", 1, "landed"), Closing("b", 1, "landed")]),
        unit(run, intents=[intent()], observations=[seen]),
        unit(run, intents=[intent()], note="diverged"),
        unit(run, intents=[intent()], change=Release()),
        unit(run, intents=[intent()], attempts=[Attempt("charge", 1, NOW, NOW, NOW, 1, NOW, error="{}")]),
        unit(run, step(1, mailbox_id=1), intents=[intent()]),
        unit(run, step(1, reuses=1), closings=[Closing("a", 1, "landed")]),
    ):
        assert journal.write_lone(too_much) is None


# --- the fence --------------------------------------------------------------------------------------------------------


def effects(**fields: Any) -> dict[str, Any]:
    """An intent, and the end of another."""
    return {"intents": [intent("new")], "closings": [Closing("charge", 1, "landed")], **fields}


def test_a_zombie_writes_no_intent_and_closes_none(store: Store, write: Write) -> None:
    """The worker lost its lease between its claim and the intent: it must not make the call."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))

    for entries in ([], [step(1)]):
        late = Unit(run.id, uuid.uuid4(), uuid.uuid4(), entries, **effects())
        assert write(store, late) is Verdict.FENCED
    seen = Observation("charge", 1, "ticket", "1", NOW)
    assert batch(store, Unit(run.id, uuid.uuid4(), uuid.uuid4(), observations=[seen])) is Verdict.FENCED

    assert store.intents(run.id) == [("charge", 1, "open")]
    assert store.admin.execute("select from observations").fetchall() == []


def test_an_intent_that_meets_a_takeover_in_flight_waits_and_is_fenced(store: Store, write: Write) -> None:
    """The takeover commits first: nothing of the old owner stands."""
    run = store.running()
    takeover = store.transaction()
    takeover.run(runs.renew_token(run.id, run.token, uuid.uuid4()))
    old = store.connect()
    late = unit(run, intents=[intent()])
    bound = journal.write_lone(late) if write is alone else journal.write_units([late])
    assert bound is not None

    writing = store.in_thread(lambda: old.run(*bound))
    store.wait_blocked(old.backend_pid)
    takeover.commit()

    assert journal.parse_verdicts(writing.result()) == ({} if write is alone else {run.id: Verdict.FENCED})
    assert store.intents(run.id) == []


def test_an_intent_shares_the_fate_of_its_stale_timer(store: Store, write: Write) -> None:
    """The mailbox moved on: decide again, call nobody."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    store.raise_wakes(run.id)

    assert write(store, unit(run, timer(1), wakes=0, **effects())) is Verdict.STALE

    assert store.intents(run.id) == [("charge", 1, "open")]
    assert store.seqs(run.id) == []


def test_an_intent_shares_the_fate_of_an_entry_in_conflict(store: Store, write: Write) -> None:
    """Another write stands at that seq."""
    run = store.running()
    write(store, unit(run, step(1), intents=[intent()]))

    assert write(store, unit(run, step(1), **effects())) is Verdict.CONFLICT

    assert store.intents(run.id) == [("charge", 1, "open")]


def test_each_run_of_a_batch_has_its_own_effects(store: Store) -> None:
    """Two runs ask for a step of the same key; only the one that holds its lease gets an intent."""
    for _ in range(3):
        store.start()
    good, fenced, plain = store.claim()
    seen = Observation("charge", 1, "ticket", "1", NOW)

    verdicts = store.write(
        unit(good, intents=[intent()], observations=[seen]),
        Unit(fenced.id, uuid.uuid4(), uuid.uuid4(), intents=[intent()], observations=[seen]),
        unit(plain, step(1)),
    )

    assert verdicts == {good.id: Verdict.OK, fenced.id: Verdict.FENCED, plain.id: Verdict.OK}
    assert store.admin.execute("select run_id from intents").fetchall() == [(good.id,)]
    assert store.admin.execute("select run_id from observations").fetchall() == [(good.id,)]


def test_a_row_that_the_table_refuses_takes_its_unit_along(store: Store, write: Write) -> None:
    """The entry too: the run will be held with the database's words."""
    run = store.running()

    with pytest.raises(psycopg.errors.CheckViolation, match="intents_effect_check"):
        write(store, unit(run, step(1), intents=[intent(effect="magic")]))

    assert store.seqs(run.id) == []


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'lost'", "intents_state_check"),
        ("resolved_at = now()", "intents_open_is_unresolved"),
        ("doubt_at = now()", "intents_open_is_unresolved"),
        ("state = 'landed'", "intents_known_is_resolved"),
        ("state = 'unknown'", "intents_asked_since"),
        ("resolved_by = 'ada'", "intents_resolved_by_when"),
        ("evidence = '[]'", "intents_evidence_is_object"),
        ("attempt = 0", "intents_attempt_check"),
    ],
)
def test_an_intents_row_refuses_what_no_state_allows(store: Store, change: str, constraint: str) -> None:
    """By hand as well."""
    run = store.running()
    store.write(unit(run, intents=[intent()]))

    with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
        store.admin.execute(f"update intents set {change}".encode())


# --- retried writes ---------------------------------------------------------------------------------------------------


def test_a_retried_intent_is_the_first_one(store: Store, write: Write) -> None:
    """The acknowledgement was lost: there is no entry and no change to know it by, and nothing is written twice."""
    run = store.running()
    written = unit(run, intents=[intent()])
    write(store, written)
    (before,) = store.intents(run.id, "intents::text")

    assert write(store, written) is Verdict.OK

    assert store.intents(run.id, "intents::text") == [before]


def test_a_retried_closing_is_the_first_one(store: Store, write: Write) -> None:
    """With the next attempt's intent, and without any entry."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    written = unit(run, closings=[Closing("charge", 1, "not_landed")], intents=[intent(attempt=2)])
    write(store, written)
    before = store.intents(run.id, "intents::text")

    assert write(store, written) is Verdict.OK

    assert store.intents(run.id, "intents::text") == before


def test_a_retried_observation_is_the_first_one(store: Store) -> None:
    """A row a fact."""
    run = store.running()
    written = unit(run, observations=[Observation("charge", 1, "ticket", "1", NOW)])

    assert [batch(store, written) for _ in range(2)] == [Verdict.OK, Verdict.OK]

    assert store.admin.execute("select count(*) from observations").fetchone() == (1,)


def test_a_retried_unit_with_an_entry_recognises_its_own(store: Store, write: Write) -> None:
    """By its entries: what came with them stands as they do."""
    run = store.running()
    write(store, unit(run, intents=[intent()]))
    written = unit(run, step(1), **effects())
    write(store, written)
    before = store.intents(run.id, "intents::text")

    assert write(store, written) is Verdict.CONFLICT
    assert store.stands(written) == {run.id}
    assert store.intents(run.id, "intents::text") == before


@pytest.mark.parametrize("change", [Finish(State.SUCCEEDED, "1"), Park("timer", None, 0), Hold("in doubt", 0)])
def test_a_retried_change_with_an_effect_recognises_its_own(store: Store, change: Finish | Park | Hold) -> None:
    """The lease went with the first try."""
    run = store.running()
    store.write(unit(run, intents=[intent()]))
    written = unit(run, change=change, closings=[Closing("charge", 1, "unknown", False)])
    store.write(written)

    assert batch(store, written) is Verdict.FENCED
    assert store.stands(written) == {run.id}


def test_a_retried_intent_whose_lease_is_gone_is_fenced(store: Store, write: Write) -> None:
    """Although the row stands: its body must not begin, and whoever has the run now asks what became of it."""
    run = store.running()
    written = unit(run, intents=[intent()])
    write(store, written)
    store.run(runs.renew_token(run.id, run.token, uuid.uuid4()))

    assert write(store, written) is Verdict.FENCED
    assert store.stands(written) == set()


@pytest.mark.parametrize("first_of", ["intent", "closing"])
def test_a_retry_that_races_its_own_first_attempt_changes_nothing(store: Store, write: Write, first_of: str) -> None:
    """It is judged by a snapshot from before that attempt's commit."""
    run = store.running()
    written = unit(run, intents=[intent()])
    if first_of == "closing":
        write(store, written)
        written = unit(run, **effects())
    bound = journal.write_lone(written) if write is alone else journal.write_units([written])
    assert bound is not None
    first = store.transaction()
    assert first.run(bound) == [(run.id, "ok")]
    second = store.connect()

    retrying = store.in_thread(lambda: second.run(*bound))
    store.wait_blocked(second.backend_pid)
    first.commit()

    before = store.intents(run.id, "intents::text")
    assert journal.parse_verdicts(retrying.result()) == {run.id: Verdict.OK}
    assert store.intents(run.id, "intents::text") == before


def test_a_copy_that_arrives_late_opens_nothing_again(store: Store, write: Write) -> None:
    """A proxy kept the first try; meanwhile the body was withdrawn and its intent closed."""
    run = store.running()
    written = unit(run, intents=[intent()])
    write(store, written)
    write(store, unit(run, closings=[Closing("charge", 1, "not_landed", evidence='{"unbegun": true}')]))
    before = store.intents(run.id, "intents::text")

    assert write(store, written) is Verdict.OK

    assert store.intents(run.id, "intents::text") == before


# --- what a claim hands over ------------------------------------------------------------------------------------------


def test_a_claim_hands_over_what_is_not_settled(store: Store) -> None:
    """By key and attempt, as it was written; what landed is in the journal."""
    run, other = store.running(), store.running()
    doubted = intent("b", 2, state="unknown", evidence='{"error": {"type": "E"}}')
    let_fail = intent("b", 1, state="unknown", resolved=True)
    there = [intent("c"), doubted, let_fail, intent("a", state="not_landed"), intent("d", state="landed")]
    store.write(unit(run, intents=[*there, intent("e", state="compensated")], change=Release()))
    store.write(unit(other, change=Release()))

    claimed = {r.id: r for r in store.claim()}

    assert claimed[run.id].intents == [
        replace(there[3], resolved=True),
        let_fail,
        doubted,
        there[0],
    ]
    assert all(isinstance(i, Intent) for i in claimed[run.id].intents)
    assert (claimed[other.id].intents, claimed[other.id].observations) == ([], [])
    again = runs.parse_claimed(
        store.connection.run_all(runs.read_claimed(store.worker, claimed[run.id].token)), claimed[run.id].token
    )
    assert {r.id: (r.intents, r.last_seq) for r in again}[run.id] == (claimed[run.id].intents, None)


def test_a_claim_hands_over_the_latest_observations_oldest_first(store: Store) -> None:
    """Not all of a body that tells one a second."""
    run = store.running()
    told = [Observation("s", 1, "line", str(n), NOW + n) for n in range(OBSERVATIONS_READ_MAX + 5)]
    store.write(unit(run, observations=told, change=Release()))

    (again,) = store.claim()

    assert again.observations == told[5:]


def test_a_run_that_is_cancelled_untold_leaves_its_open_calls_in_doubt(store: Store) -> None:
    """No worker will ever say what became of them."""
    run = store.running()
    store.write(unit(run, intents=[intent("a"), intent("b", state="landed")]))

    assert store.run(runs.cancel_run(run.id, uuid.uuid4())) == []
    assert store.intents(run.id) == [("a", 1, "open"), ("b", 1, "landed")]
    assert store.run(runs.cancel_run(run.id, run.token)) == [(run.id,)]

    assert store.intents(run.id, "key, state, doubt_at is not null") == [("a", "unknown", True), ("b", "landed", False)]
    assert store.admin.execute("select key, run_state from in_doubt").fetchall() == [("a", "cancelled")]


# --- what people see --------------------------------------------------------------------------------------------------


def test_the_view_shows_what_is_in_doubt_and_since_when(store: Store) -> None:
    """An unknown call wherever its run stands; an open one only of a run that is held: others are at work."""
    held, running = store.claim_after(store.start(key="order-1")), store.running()
    store.write(unit(running, intents=[intent("open"), intent("asked", state="unknown")]))
    there = [
        intent("open"),
        intent("asked", state="unknown", evidence='{"reason": "?"}'),
        intent("done", state="landed"),
    ]
    store.write(unit(held, intents=[*there, intent("closed", state="unknown", resolved=True)], change=Hold("why", 0)))

    rows = store.admin.execute(
        "select run_id, key, name, attempt, effect, idempotency_key, input, extract(epoch from written_at) * 1000000,"
        " until is not null, evidence, workflow, run_key, run_state, reason, worker from in_doubt order by run_id, key"
    ).fetchall()

    def row(key: str, known: bool, evidence: Any, *run: Any) -> tuple[Any, ...]:
        call = (key, key, 1, "irreversible", f"rk1_{key}", {"cents": 1200}, NOW, known, evidence)
        return (run[0], *call, "wf", *run[1:], store.worker)

    assert rows == [
        row("asked", True, {"reason": "?"}, held.id, "order-1", "held", "why"),
        row("open", False, None, held.id, "order-1", "held", "why"),
        row("asked", True, None, running.id, None, "running", None),
    ]


def test_all_intents_of_a_run_are_shown_in_the_order_of_their_writing(store: Store) -> None:
    """Landed ones too, with every column that is not the engine's."""
    run = store.running()
    store.write(unit(run, intents=[intent("a", written_at=NOW + 1, state="landed"), intent("b")]))

    shown = onlookers.parse_rows(store.run(onlookers.run_intents(run.id)))

    assert [(row["key"], row["state"], row["input"]) for row in shown] == [
        ("b", "open", {"cents": 1200}),
        ("a", "landed", {"cents": 1200}),
    ]
    assert set(shown[0]) == {
        *("run_id", "key", "attempt", "name", "effect", "idempotency_key", "input", "state", "written_at", "doubt_at"),
        *("resolved_at", "resolved_by", "evidence", "worker"),
    }


def test_an_identifier_leads_to_its_runs_even_when_they_are_gone(store: Store) -> None:
    """A ticket is found by what it is called outside."""
    first, second = store.claim_after(store.start(key="order-1")), store.running()
    for run in (first, second):
        store.write(unit(run, observations=[Observation("open", 1, "ticket", "123", NOW)]))
    store.write(unit(second, observations=[Observation("open", 1, "ticket", "124", NOW)]))
    store.admin.execute("delete from runs where id = %s", [second.id])

    found = onlookers.parse_rows(store.run(onlookers.find_observations("ticket:123")))

    assert [(f["run_id"], f["key"], f["workflow"], f["run_key"], f["state"]) for f in found] == [
        (str(first.id), "open", "wf", "order-1", "running"),
        (str(second.id), "open", None, None, None),
    ]


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["batch", "alone", "claim", "observations", "view", "find"])
def test_many_calls_that_landed_cost_nobody_anything(store: Store, what: str) -> None:
    """Each statement goes by an index to the rows that it needs, of a run that has made 20,000 calls."""
    run = store.running()
    store.admin.execute(
        "insert into intents (run_id, key, attempt, name, effect, idempotency_key, input, state, written_at, resolved_at,"
        " write_id) select %s, 's' || n, 1, 's', 'idempotent', 'k', '1', 'landed', now(), now(), gen_random_uuid()"
        " from generate_series(1, 20000) n",
        [run.id],
    )
    store.admin.execute(
        "insert into observations (run_id, key, attempt, kind, value, observed_at)"
        " select %s, 's' || n, 1, 'ticket', n, now() from generate_series(1, 20000) n",
        [run.id],
    )
    store.write(unit(run, intents=[intent("a"), intent("b", state="unknown")]))
    store.admin.execute("analyze")
    written = unit(run, step(1), closings=[Closing("a", 1, "landed")], intents=[intent("c")])
    claimed = {statement.name: (statement, params) for statement, params in runs.read_claimed(store.worker, run.token)}
    statement, params = {
        "batch": journal.write_units([written]),
        "alone": journal.write_lone(written) or (Statement("", ""), {}),
        "claim": claimed["intents-read-claimed"],
        "observations": claimed["observations-read-claimed"],
        "view": (Statement("view", "select * from {schema}.in_doubt"), {}),
        "find": onlookers.find_observations("ticket:77"),
    }[what]

    connection = store.connect()
    explained = Statement("explain", "explain (analyze, format json) " + statement.text)
    plan = connection.run(explained, params)[0][0]

    assert sum(rows_read(plan[0]["Plan"])) < (1_010 if what == "observations" else 20)


def rows_read(plan: dict[str, Any]) -> list[float]:
    """Rows that the scans of a plan have touched."""
    found = [number for part in plan.get("Plans", ()) for number in rows_read(part)]
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        found.append((plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"])
    return found

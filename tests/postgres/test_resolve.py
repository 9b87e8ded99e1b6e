"""The function `resolve`: a person's word on a call in doubt, who may say it when, and who wins when two meet."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from typing import Any
from uuid import UUID

import psycopg
import pytest

from replaykit.errors import ConfigurationError, NotResolvable, NotRetryable, RunNotFound
from replaykit.postgres import journal, mailbox
from replaykit.postgres.schema import Bound, work_channel
from replaykit.replay.entries import Change, Closing, Finish, Hold, Park, Release, State, Verdict
from tests.postgres.store import NOW, Store, intent, step, unit

FAR = NOW + 365 * 86_400_000_000

UTC = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


def in_doubt(store: Store, state: str = "held", **fields: Any) -> UUID:
    """A run with the call `charge` in doubt."""
    run = store.running()
    changes: dict[str, Change | None] = {
        "held": Hold("charge may have landed", 0),
        "waiting": Park("timer", FAR, 0),
        "pending": Release(),
        "running": None,
    }
    more: dict[str, Any] = {"state": "unknown"} | fields
    written = unit(run, intents=[intent(**more)], change=changes[state])
    assert store.write(written) == {run.id: Verdict.OK}
    return run.id


def say(store: Store, run_id: UUID, key: str = "charge", **word: Any) -> str:
    """A person's word; the run's state after it."""
    return mailbox.parse_state(store.run(mailbox.resolve(run_id, key, **word)))


def refused(store: Store, run_id: UUID, key: str = "charge", **word: Any) -> str:
    """The sentence with which a word is refused."""
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        say(store, run_id, key, **word)
    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, NotResolvable)
    return str(refusal)


def words(store: Store, run_id: UUID) -> list[tuple[Any, ...]]:
    """What was said, the first first."""
    return store.admin.execute(
        "select name, body, sent_by, raised from mailbox where run_id = %s and kind = 'resolve' order by id", [run_id]
    ).fetchall()


def body(word: str, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    """A word as it lies in the mailbox."""
    nothing = {"value": None, "error": None, "comment": None}
    return {"key": "charge", "attempt": attempt, "word": word, **nothing, **fields}


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "letter"),
    [
        ({"landed": '{"id": 1}', "comment": "seen at the bank"}, {"value": {"id": 1}, "comment": "seen at the bank"}),
        ({"landed": "null"}, {}),
        ({"not_landed": True}, {}),
        ({"fail": True}, {}),
        ({"fail": True, "error": '{"type": "InDoubt"}'}, {"error": {"type": "InDoubt"}}),
    ],
)
@pytest.mark.parametrize("state", ["held", "waiting", "pending"])
def test_a_word_lies_in_the_mailbox_and_the_run_wants_a_worker(
    store: Store, state: str, word: dict[str, Any], letter: dict[str, Any]
) -> None:
    """At once; with who, when and why. JSON's null is a value, SQL's is none."""
    run_id = in_doubt(store, state)

    assert say(store, run_id, by="ada", **word) == "pending"

    said = next(name for name in ("landed", "not_landed", "fail") if name in word)
    assert words(store, run_id) == [("charge", body(said, **letter), "ada", True)]
    columns = "state, wakes, waiting_for, reason, available_at <= clock_timestamp()"
    assert store.row(run_id, columns) == ("pending", 1, None, None, True)
    (claimed,) = store.claim()
    assert [(mail.kind, json.loads(mail.body or ""), mail.sent_by) for mail in claimed.mail] == [
        ("resolve", body(said, **letter), "ada")
    ]
    assert [i.state for i in claimed.intents] == ["unknown"]


def test_the_value_arrives_as_it_was_written(store: Store) -> None:
    """Type json keeps order and digits."""
    run_id = in_doubt(store)
    value = '{"z": 1.10, "a": 12345678901234567890.5, "n": "ü\ufdd0\ufdd2"}'

    say(store, run_id, landed=value)

    found = store.admin.execute("select (body -> 'value')::text from mailbox").fetchone()
    assert found == (value,)


def test_in_sql_a_word_is_one_call_with_names(store: Store) -> None:
    """As a person writes it."""
    ids = [in_doubt(store) for _ in range(3)]

    for run_id, text in zip(
        ids, ("landed => '{\"id\":1}'", "not_landed => true, by => 'ada'", "fail => true, comment => 'no'"), strict=True
    ):
        assert store.admin.execute(f"select resolve(%s, 'charge', {text})".encode(), [run_id]).fetchone() == (
            "pending",
        )

    assert [words(store, run_id)[0][1]["word"] for run_id in ids] == ["landed", "not_landed", "fail"]


def test_an_open_call_of_a_run_that_is_held_can_be_resolved(store: Store) -> None:
    """Its worker died, and its code cannot be replayed: nobody has asked yet."""
    run = store.running()
    store.write(unit(run, intents=[intent()], change=Hold("diverged", 0)))

    assert say(store, run.id, not_landed=True) == "pending"


def test_a_word_counts_for_the_attempt_in_doubt(store: Store) -> None:
    """Earlier ones are settled, whatever was said of them."""
    run_id = in_doubt(store)
    say(store, run_id, not_landed=True, by="ada")
    again = store.claim_after(run_id)
    closed = Closing("charge", 1, "not_landed", by="ada")
    store.write(unit(again, closings=[closed], intents=[intent(attempt=2, state="unknown")], change=Hold("again", 1)))

    assert say(store, run_id, landed="1", by="bob") == "pending"

    assert [(letter["attempt"], letter["word"]) for _, letter, *_ in words(store, run_id)] == [
        (1, "not_landed"),
        (2, "landed"),
    ]


def test_the_undo_that_failed_is_resolved_by_its_own_key(store: Store) -> None:
    """`~undo:KEY`."""
    run_id = in_doubt(store, key="~undo:charge", effect="repeatable")

    assert say(store, run_id, "~undo:charge", landed="null") == "pending"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [{}, {"landed": "1", "not_landed": True}, {"not_landed": True, "fail": True}, {"landed": "null", "fail": True}],
)
def test_no_word_and_two_words_are_refused(store: Store, word: dict[str, Any]) -> None:
    """With the three that there are."""
    run_id = in_doubt(store)

    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        say(store, run_id, **word)

    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, ConfigurationError)
    assert str(refusal) == "say exactly one of landed => 'JSON', not_landed => true and fail => true"
    assert words(store, run_id) == []


def test_an_error_goes_with_fail_only(store: Store) -> None:
    """Else it would be forgotten."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="error goes with fail => true"):
        say(store, in_doubt(store), landed="1", error="{}")


@pytest.mark.parametrize("value", [r'"a\u0000b"', r'{"\u0000": 1}', r'"\ud800"'])
def test_a_value_that_postgres_cannot_take_apart_is_refused(store: Store, value: str) -> None:
    """From SQL; the codec writes such text in another way."""
    run_id = in_doubt(store)

    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"the value of 'charge' of run {run_id} holds what"):
        say(store, run_id, landed=value)

    assert words(store, run_id) == []


def test_a_run_that_is_not_there_is_not_found(store: Store) -> None:
    """By a state that a client knows."""
    nobody = uuid.uuid4()

    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        say(store, nobody, not_landed=True)

    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, RunNotFound)
    assert str(refusal) == f"no run has the id {nobody}"


def test_a_step_without_an_intent_is_refused(store: Store) -> None:
    """A wrong key, or a step without an effect; the sentence says where to look."""
    run_id = in_doubt(store)

    assert refused(store, run_id, "book", landed="1") == (
        f"'book' of run {run_id} has written no intent: the view in_doubt lists what is in doubt"
    )


@pytest.mark.parametrize(
    ("closing", "sentence"),
    [
        (Closing("charge", 1, "landed"), f"its attempt 1 has landed since {UTC}"),
        (Closing("charge", 1, "landed", by="reconcile"), f"its attempt 1 has landed, says reconcile, since {UTC}"),
        (Closing("charge", 1, "not_landed", by="ada"), f"its attempt 1 has not landed, says ada, since {UTC}"),
        (Closing("charge", 1, "unknown", True), f"its attempt 1 has failed and nobody was to be asked since {UTC}"),
    ],
)
def test_a_call_that_is_not_in_doubt_needs_no_word(store: Store, closing: Closing, sentence: str) -> None:
    """The sentence names what stands, and who said so."""
    run = store.running()
    store.write(unit(run, intents=[intent()]))
    store.write(unit(run, closings=[closing], change=Hold("another", 0)))

    said = refused(store, run.id, landed="1")

    assert said.startswith(f"'charge' of run {run.id} is not in doubt: its attempt 1")
    assert re.search(sentence, said)
    assert words(store, run.id) == []


def test_a_call_that_was_undone_needs_no_word(store: Store) -> None:
    """It had landed."""
    run = store.running()
    store.write(unit(run, intents=[intent(state="landed")]))
    store.write(unit(run, closings=[Closing("charge", 1, "compensated")], change=Hold("another", 0)))

    assert "its attempt 1 has landed and was undone since" in refused(store, run.id, landed="1")


def test_a_call_that_its_worker_still_has_is_not_for_a_person(store: Store) -> None:
    """It may yet say what became of it."""
    run_id = in_doubt(store, "running")

    assert refused(store, run_id, landed="1") == (
        f"'charge' of run {run_id} may still be at work: worker {store.worker} has the run; wait until it is held"
    )
    assert words(store, run_id) == []
    assert store.row(run_id, "state, wakes") == ("running", 0)


# --- a second word ----------------------------------------------------------------------------------------------------

WORDS: list[dict[str, Any]] = [
    {"landed": '{"id": 1, "cents": 5}'},
    {"landed": "null"},
    {"not_landed": True},
    {"fail": True},
    {"fail": True, "error": '{"type": "InDoubt"}'},
]


@pytest.mark.parametrize("word", WORDS)
def test_the_same_word_again_is_the_first_one(store: Store, word: dict[str, Any]) -> None:
    """Whoever lost the answer may say it again, also while a worker takes it up and after that."""
    run_id = in_doubt(store)
    say(store, run_id, by="ada", **word)

    assert say(store, run_id, by="bob", **word) == "pending"
    run = store.claim_after(run_id)
    assert say(store, run_id, **word) == "running"
    state = "landed" if "landed" in word else "not_landed" if "not_landed" in word else "unknown"
    store.write(unit(run, closings=[Closing("charge", 1, state, by="ada")], change=Finish(State.SUCCEEDED, "1")))
    assert say(store, run_id, **word) == "succeeded"

    assert len(words(store, run_id)) == 1
    assert store.row(run_id, "wakes") == (1,)


def test_the_same_value_is_the_same_however_it_is_written(store: Store) -> None:
    """Spaces and the order of keys say nothing."""
    run_id = in_doubt(store)
    say(store, run_id, landed='{"id": 1, "cents": 5}')

    assert say(store, run_id, landed='{"cents":5,"id":1}') == "pending"
    assert len(words(store, run_id)) == 1


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(WORDS, 2)))
def test_a_different_word_is_refused_and_names_the_first(
    store: Store, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Before a worker has heard it, while one has the run, and after."""
    run_id = in_doubt(store)
    say(store, run_id, by="ada", **first)
    (said,) = (name for name in ("landed", "not_landed", "fail") if name in first)
    with_what = f" with {first['landed']}" if "landed" in first else ""

    sentence = refused(store, run_id, by="bob", **second)
    assert sentence.startswith(f"'charge' of run {run_id} has a word already: ada said {said}{with_what} at ")
    assert re.search(f"{UTC}$", sentence)
    run = store.claim_after(run_id)
    assert refused(store, run_id, **second) == sentence
    store.write(unit(run, closings=[Closing("charge", 1, "landed", by="ada")], change=Hold("another", 1)))
    assert refused(store, run_id, **second) == sentence
    assert len(words(store, run_id)) == 1


def test_a_word_of_nobody_is_somebodys(store: Store) -> None:
    """`by` is left out in SQL."""
    run_id = in_doubt(store)
    say(store, run_id, not_landed=True)

    assert "has a word already: somebody said not_landed at" in refused(store, run_id, fail=True)


def test_after_a_value_that_did_not_fit_another_word_is_taken(store: Store) -> None:
    """The worker notes which letter it was; those after it stand."""
    run_id = in_doubt(store)
    say(store, run_id, landed='"text"')
    run = store.claim_after(run_id)
    misfit = Closing("charge", 1, "unknown", False, evidence=json.dumps({"misfit": run.mail[0].id}))
    store.write(unit(run, closings=[misfit], change=Hold("the value does not fit", 1)))

    assert say(store, run_id, landed="1", by="ada") == "pending"
    assert "ada said landed with 1" in refused(store, run_id, landed="2")

    assert [letter["value"] for _, letter, *_ in words(store, run_id)] == ["text", 1]


def test_a_call_that_is_asked_about_again_takes_a_new_word(store: Store) -> None:
    """It was let fail; the run was retried, and the same attempt is in doubt again."""
    run_id = in_doubt(store)
    say(store, run_id, fail=True)
    run = store.claim_after(run_id)
    closed = Closing("charge", 1, "unknown", True, "ada", json.dumps({"mailbox_id": run.mail[0].id}))
    store.write(unit(run, closings=[closed], change=Finish(State.FAILED, error="{}")))
    assert "has a word already: somebody said fail" in refused(store, run_id, landed="1")
    store.run(mailbox.retry(run_id))
    run = store.claim_after(run_id)
    store.write(unit(run, closings=[Closing("charge", 1, "unknown", False)], change=Hold("in doubt", run.wakes)))

    assert say(store, run_id, landed="1") == "pending"


# --- runs that have ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "state"), [({"landed": "1"}, "landed"), ({"not_landed": True}, "not_landed"), ({"fail": True}, "unknown")]
)
def test_a_run_that_ended_in_doubt_may_still_be_told(store: Store, word: dict[str, Any], state: str) -> None:
    """It was cancelled and its code could not be told: no worker will close the call, so it is closed at once."""
    run = store.running()
    doubted = intent(state="unknown", evidence='{"reason": "?"}')
    store.write(unit(run, intents=[doubted], change=Finish(State.CANCELLED)))
    assert store.admin.execute("select key, run_state from in_doubt").fetchall() == [("charge", "cancelled")]
    before = store.row(run.id, "runs")

    assert say(store, run.id, by="ada", comment="seen", **word) == "cancelled"

    columns = "state, resolved_at is not null, resolved_by, evidence"
    assert store.intents(run.id, columns) == [(state, True, "ada", {"reason": "?", "comment": "seen"})]
    assert store.row(run.id, "runs") == before
    assert len(words(store, run.id)) == 1
    assert store.admin.execute("select from in_doubt").fetchall() == []
    assert say(store, run.id, **word) == "cancelled"
    assert "ada said" in refused(store, run.id, landed="2")


# --- hints and races --------------------------------------------------------------------------------------------------


def test_a_word_tells_the_workers(store: Store) -> None:
    """Who listens need not poll."""
    run_id = in_doubt(store)
    store.admin.execute(f'listen "{work_channel("replaykit")}"'.encode())

    say(store, run_id, not_landed=True)

    assert [n.channel for n in store.admin.notifies(timeout=20, stop_after=1)] == [work_channel("replaykit")]


class Asked:
    """A word that is said in a thread on a connection of its own, and blocks."""

    def __init__(self, store: Store, bound: Bound) -> None:
        connection = store.connect()
        self._future = store.in_thread(lambda: connection.run(*bound))
        store.wait_blocked(connection.backend_pid)

    @property
    def state(self) -> str:
        return mailbox.parse_state(self._future.result(20))


def test_of_two_who_say_different_things_at_once_the_first_counts(store: Store) -> None:
    """The second waits for the first, and is refused."""
    run_id = in_doubt(store)
    first = store.transaction()
    assert first.run(mailbox.resolve(run_id, "charge", landed="1", by="ada")) == [("pending",)]

    second = Asked(store, mailbox.resolve(run_id, "charge", not_landed=True, by="bob"))
    first.commit()

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="ada said landed with 1"):
        _ = second.state
    assert [who for _, _, who, _ in words(store, run_id)] == ["ada"]


def test_a_word_that_meets_a_hold_in_flight_waits_for_the_doubt(store: Store) -> None:
    """The worker finds the call in doubt and holds the run while the person speaks."""
    run = store.running()
    store.write(unit(run, intents=[intent()]))
    owner = store.transaction()
    doubted = unit(run, closings=[Closing("charge", 1, "unknown", False)], change=Hold("in doubt", 0))
    owner.run(journal.write_units([doubted]))

    asked = Asked(store, mailbox.resolve(run.id, "charge", landed="1"))
    owner.commit()

    assert asked.state == "pending"
    assert [mail.kind for mail in store.claim_after(run.id).mail] == ["resolve"]


def test_a_word_that_meets_an_outcome_in_flight_is_not_needed(store: Store) -> None:
    """The call landed, and its worker says so first."""
    run = store.running()
    store.write(unit(run, intents=[intent()]))
    owner = store.transaction()
    done = unit(run, step(1), closings=[Closing("charge", 1, "landed")], change=Finish(State.SUCCEEDED, "1"))
    owner.run(journal.write_units([done]))

    asked = Asked(store, mailbox.resolve(run.id, "charge", not_landed=True))
    owner.commit()

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is not in doubt: its attempt 1 has landed"):
        _ = asked.state
    assert words(store, run.id) == []


def test_a_word_that_is_rolled_back_was_never_said(store: Store) -> None:
    """It is part of the caller's transaction."""
    run_id = in_doubt(store)
    person = store.transaction()
    person.run(mailbox.resolve(run_id, "charge", landed="1"))
    person.rollback()

    assert words(store, run_id) == []
    assert say(store, run_id, not_landed=True) == "pending"


# --- retry after an undo ----------------------------------------------------------------------------------------------


def test_a_run_that_has_undone_something_is_not_retried(store: Store) -> None:
    """What was undone is named, and so is the way out."""
    run = store.running()
    undone = [step(1, key="book"), step(2, key="charge"), step(3, key="~undo:charge"), step(4, key="~undo:book")]
    store.write(unit(run, *undone, change=Finish(State.FAILED, error="{}")))

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        store.run(mailbox.retry(run.id))

    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, NotRetryable)
    assert str(refusal) == (
        f"run {run.id} has undone charge, book, and would go on as if that stood: fork it, or start another"
    )
    assert store.row(run.id, "state") == ("failed",)


def test_a_run_that_has_undone_much_names_some_of_it(store: Store) -> None:
    """A sentence stays a sentence."""
    run = store.running()
    undone = [step(n, key=f"~undo:s{n}") for n in range(1, 31)]
    store.write(unit(run, *undone, change=Finish(State.FAILED, error="{}")))

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=r"s19, s20, \.\.\. \(30 in all\), and would"):
        store.run(mailbox.retry(run.id))


def test_a_run_that_is_held_amid_its_undos_goes_on_with_them(store: Store) -> None:
    """One failed: `retry` runs it again."""
    run = store.running()
    store.write(unit(run, step(1, key="~undo:charge"), change=Hold("undo of book failed", 0)))

    assert store.run(mailbox.retry(run.id)) == [("pending",)]

"""The functions `cancel` and `retry`: what they do in each state, and who wins when they meet another transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from replaykit.errors import NotRetryable, RunNotFound
from replaykit.postgres import journal, mailbox, migrate, onlookers, runs
from replaykit.postgres.schema import Bound, Statement, done_channel, work_channel
from replaykit.replay.entries import Change, Entry, Finish, Hold, Park, State, Verdict
from tests.direct import direct
from tests.postgres.store import NOW, Store, step, unit

FAR = NOW + 365 * 86_400_000_000

ERROR = '{"type": "ValueError", "message": "no"}'

ENDS = {
    "succeeded": Finish(State.SUCCEEDED, "1"),
    "failed": Finish(State.FAILED, None, ERROR),
    "cancelled": Finish(State.CANCELLED),
}

CHANGES: dict[str, Change] = {**ENDS, "held": Hold("needs a person", 0), "waiting": Park("timer", FAR, 0)}


def brought_to(store: Store, state: str) -> UUID:
    """A run in that state, which a worker has begun (except `unbegun`)."""
    if state == "unbegun":
        return store.start()
    if state == "delayed":
        return store.start(delay=3_600_000_000)
    run = store.running()
    if state == "pending":
        store.admin.execute(
            "update runs set state = 'pending', lease_token = null, worker = null where id = %s", [run.id]
        )
    elif state != "running":
        assert store.write(unit(run, step(1), change=CHANGES[state])) == {run.id: Verdict.OK}
    return run.id


def letters(store: Store, run_id: UUID) -> list[tuple[Any, ...]]:
    """What stands in the mailbox, oldest first."""
    return store.admin.execute(
        "select kind, body, sent_by, raised from mailbox where run_id = %s order by id", [run_id]
    ).fetchall()


def ask(store: Store, bound: Bound) -> str:
    return mailbox.parse_state(store.run(bound))


# --- cancel, state by state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["unbegun", "delayed"])
def test_a_run_that_nobody_has_begun_is_cancelled_at_once(store: Store, state: str) -> None:
    """No worker is needed, and none gets it; who asked is kept."""
    run_id = brought_to(store, state)

    assert ask(store, mailbox.cancel(run_id, "ada")) == "cancelled"

    columns = "state, waiting_for, started_at, finished_at is not null"
    assert store.row(run_id, columns) == ("cancelled", None, None, True)
    assert letters(store, run_id) == [("cancel", None, "ada", True)]
    assert store.claim() == []


@pytest.mark.parametrize(
    ("state", "after"),
    [("pending", "pending"), ("waiting", "pending"), ("held", "pending"), ("running", "running")],
)
def test_a_run_that_was_begun_finds_the_request_in_its_mailbox(store: Store, state: str, after: str) -> None:
    """What slept wants a worker now; what runs keeps its lease; whoever parks next sees that somebody has knocked."""
    run_id = brought_to(store, state)

    assert ask(store, mailbox.cancel(run_id, "ada")) == after

    assert store.row(run_id, "state, wakes, waiting_for, reason, finished_at") == (after, 1, None, None, None)
    assert letters(store, run_id) == [("cancel", None, "ada", True)]
    if after == "pending":
        (claimed,) = store.claim()
        assert [(mail.kind, mail.sent_by) for mail in claimed.mail] == [("cancel", "ada")]
        assert claimed.wakes == 1


@pytest.mark.parametrize("state", ENDS)
def test_a_run_that_has_ended_keeps_its_end(store: Store, state: str) -> None:
    """The answer says which."""
    run_id = brought_to(store, state)
    before = store.row(run_id, "runs")

    assert ask(store, mailbox.cancel(run_id)) == state

    assert store.row(run_id, "runs") == before
    assert letters(store, run_id) == []


@pytest.mark.parametrize("state", ["pending", "waiting", "running"])
def test_a_second_cancel_says_nothing_new(store: Store, state: str) -> None:
    """One letter, one knock."""
    run_id = brought_to(store, state)
    first = ask(store, mailbox.cancel(run_id))

    assert ask(store, mailbox.cancel(run_id)) == first

    assert len(letters(store, run_id)) == 1
    assert store.row(run_id, "wakes") == (1,)


def test_a_cancel_of_a_run_that_is_held_again_is_heard_again(store: Store) -> None:
    """Its code could not be told the first time: this ends it."""
    run_id = brought_to(store, "held")
    ask(store, mailbox.cancel(run_id))
    again = store.claim_after(run_id)
    store.write(unit(again, change=Hold("still", 1)))

    assert ask(store, mailbox.cancel(run_id)) == "pending"

    assert [kind for kind, *_ in letters(store, run_id)] == ["cancel", "cancel"]


def test_a_cancel_after_a_retry_is_a_new_one(store: Store) -> None:
    """The request before it was of the life that failed."""
    run = store.running()
    ask(store, mailbox.cancel(run.id))
    store.write(unit(run, change=ENDS["failed"]))
    ask(store, mailbox.retry(run.id))

    assert ask(store, mailbox.cancel(run.id)) == "pending"
    assert ask(store, mailbox.cancel(run.id)) == "pending"

    assert [kind for kind, *_ in letters(store, run.id)] == ["cancel", "retry", "cancel"]


# --- retry, state by state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [None, "inputs"])
@pytest.mark.parametrize("state", ["failed", "held"])
def test_failed_and_held_runs_want_a_worker_again(store: Store, state: str, accept: str | None) -> None:
    """The letter says from which state, what is accepted, and how long the journal was."""
    run_id = brought_to(store, state)
    store.admin.execute("update runs set suspect = true, fruitless = 7 where id = %s", [run_id])

    assert ask(store, mailbox.retry(run_id, accept, "ada")) == "pending"

    columns = "state, wakes, reason, finished_at, suspect, fruitless, lease_token, available_at <= clock_timestamp()"
    assert store.row(run_id, columns) == ("pending", 1, None, None, False, 0, None, True)
    assert letters(store, run_id) == [("retry", {"from": state, "accept": accept, "seq": 1}, "ada", True)]
    (claimed,) = store.claim()
    assert (claimed.id, claimed.wakes, [mail.kind for mail in claimed.mail]) == (run_id, 1, ["retry"])


@pytest.mark.parametrize("state", ["unbegun", "delayed", "pending", "waiting", "running", "succeeded", "cancelled"])
def test_a_retry_of_any_other_run_is_refused_naming_its_state(store: Store, state: str) -> None:
    """And leaves nothing."""
    run_id = brought_to(store, state)
    before = store.row(run_id, "runs")

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        ask(store, mailbox.retry(run_id))

    there = {"unbegun": "pending", "delayed": "waiting"}.get(state, state)
    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, NotRetryable)
    assert str(refusal) == f"run {run_id} is {there}, and only failed and held runs are retried"
    assert store.row(run_id, "runs") == before
    assert letters(store, run_id) == []


def test_the_same_retry_again_is_the_first_one_until_a_worker_takes_the_run(store: Store) -> None:
    """Whoever lost the answer may ask again; two who press the button press it once."""
    run_id = brought_to(store, "failed")
    ask(store, mailbox.retry(run_id))

    assert ask(store, mailbox.retry(run_id)) == "pending"
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is pending"):
        ask(store, mailbox.retry(run_id, "inputs"))
    again = store.claim_after(run_id)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is running"):
        ask(store, mailbox.retry(run_id))

    assert len(letters(store, run_id)) == 1
    assert store.row(run_id, "wakes") == (1,)
    store.write(unit(again, step(2), change=ENDS["failed"]))
    assert ask(store, mailbox.retry(run_id)) == "pending"
    assert len(letters(store, run_id)) == 2


def test_a_retry_that_was_taken_up_is_not_the_next_one(store: Store) -> None:
    """The run is pending for another reason: its worker was stopped."""
    run_id = brought_to(store, "failed")
    ask(store, mailbox.retry(run_id))
    again = store.claim_after(run_id)
    store.write(unit(again, step(2)))
    store.expire(store.worker)
    store.admin.execute("update runs set state = 'pending', lease_token = null, worker = null where id = %s", [run_id])

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is pending"):
        ask(store, mailbox.retry(run_id))


def test_a_retry_that_accepts_what_nobody_knows_is_refused(store: Store) -> None:
    """With the word that is known."""
    run_id = brought_to(store, "held")

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="accept is 'inputs' or null, not 'outputs'"):
        store.admin.execute("select retry(%s, 'outputs')", [run_id])

    assert store.row(run_id, "state") == ("held",)


@pytest.mark.parametrize("verb", [mailbox.cancel, mailbox.retry])
def test_a_run_that_is_not_there_is_not_found(store: Store, verb: Any) -> None:
    """By a state that a client knows."""
    nobody = uuid.uuid4()

    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        store.run(verb(nobody))

    refusal = mailbox.refusal(caught.value)
    assert isinstance(refusal, RunNotFound)
    assert str(refusal) == f"no run has the id {nobody}"


def test_other_errors_are_no_refusals(store: Store) -> None:
    """A lost connection is retried, not explained."""
    assert mailbox.refusal(psycopg.OperationalError("gone")) is None
    assert mailbox.refusal(ValueError("x: y")) is None


def test_the_old_error_is_no_news_while_a_retried_run_goes_on(store: Store) -> None:
    """It stays in its row for people; one who waits gets the new end."""
    run_id = brought_to(store, "failed")
    ask(store, mailbox.retry(run_id))

    (pending,) = runs.parse_results(store.run(runs.run_results([run_id]))).values()
    assert (pending.state, pending.error) == ("pending", None)
    assert store.admin.execute("select error from payloads").fetchone() != (None,)
    again = store.claim_after(run_id)
    store.write(unit(again, step(2), change=ENDS["succeeded"]))

    (ended,) = runs.parse_results(store.run(runs.run_results([run_id]))).values()
    assert (ended.state, ended.output, ended.error) == ("succeeded", "1", None)
    assert store.admin.execute("select output, error from payloads").fetchone() == (1, None)


# --- hints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["replaykit", "ü" * 31])
def test_the_functions_tell_those_who_listen(store: Store, schema: str) -> None:
    """Workers of work, clients of an end, on the channels that they listen on, however long the schema's name is."""
    dsn = store.database.dsn
    migrate.upgrade(direct(dsn), schema)
    other = Store(dsn, schema)
    try:
        begun = other.running()
        other.write(unit(begun, change=ENDS["failed"]))
        unbegun = other.start()
        for channel in (work_channel(schema), done_channel(schema)):
            other.admin.execute(f'listen "{channel}"'.encode())

        def heard(bound: Bound) -> list[str]:
            other.run(bound)
            return [n.channel for n in other.admin.notifies(timeout=20, stop_after=1)]

        assert heard(mailbox.cancel(unbegun)) == [done_channel(schema)]
        assert heard(mailbox.retry(begun.id)) == [work_channel(schema)]
        assert heard(mailbox.cancel(begun.id)) == [work_channel(schema)]
    finally:
        other.close()


# --- races ------------------------------------------------------------------------------------------------------------


class Asked:
    """A verb that runs in a thread on a connection of its own, and blocks."""

    def __init__(self, store: Store, bound: Bound) -> None:
        connection = store.connect()
        self._future = store.in_thread(lambda: connection.run(*bound))
        store.wait_blocked(connection.backend_pid)

    @property
    def state(self) -> str:
        return mailbox.parse_state(self._future.result(20))


def written(store: Store, bound: Bound) -> Iterator[dict[UUID, Verdict]]:
    """A write of the lease holder that blocks; then its verdicts."""
    owner = store.connect()
    writing = store.in_thread(lambda: owner.run(*bound))
    store.wait_blocked(owner.backend_pid)
    yield {}
    yield journal.parse_verdicts(writing.result(20))


@pytest.mark.parametrize("state", ENDS)
def test_a_cancel_that_meets_an_end_in_flight_waits_and_names_it(store: Store, state: str) -> None:
    """The end came first: nothing is asked."""
    run = store.running()
    owner = store.transaction()
    owner.run(journal.write_units([unit(run, step(1), change=ENDS[state])]))

    asked = Asked(store, mailbox.cancel(run.id))
    owner.commit()

    assert asked.state == state
    assert store.row(run.id, "state, wakes") == (state, 0)
    assert letters(store, run.id) == []


@pytest.mark.parametrize("state", ENDS)
def test_an_end_that_meets_a_cancel_in_flight_wins_all_the_same(store: Store, state: str) -> None:
    """The function had returned before its code could be told: the request came too late, and no entry answers it."""
    run = store.running()
    person = store.transaction()
    assert person.run(mailbox.cancel(run.id)) == [("running",)]

    writing = written(store, journal.write_units([unit(run, step(1), change=ENDS[state])]))
    next(writing)
    person.commit()

    assert next(writing) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, wakes") == (state, 1)
    assert store.seqs(run.id) == [1]
    assert ask(store, mailbox.cancel(run.id)) == state


@pytest.mark.parametrize("change", [Park("timer", FAR, 0), Park("retry", None, 0), Hold("needs a person", 0)])
def test_a_cancel_that_meets_a_park_in_flight_wakes_the_run(store: Store, change: Change) -> None:
    """It waits for the park, and finds the run asleep."""
    run = store.running()
    owner = store.transaction()
    owner.run(journal.write_units([unit(run, step(1), change=change)]))

    asked = Asked(store, mailbox.cancel(run.id))
    owner.commit()

    assert asked.state == "pending"
    assert [mail.kind for mail in store.claim_after(run.id).mail] == ["cancel"]


@pytest.mark.parametrize("change", [Park("timer", FAR, 0), Park("retry", None, 0), Hold("needs a person", 0)])
def test_a_park_that_meets_a_cancel_in_flight_does_not_sleep(store: Store, change: Change) -> None:
    """It compares the knocks: the run wants a worker at once."""
    run = store.running()
    person = store.transaction()
    person.run(mailbox.cancel(run.id))

    writing = written(store, journal.write_units([unit(run, step(1), change=change)]))
    next(writing)
    person.commit()

    assert next(writing) == {run.id: Verdict.OK}
    assert store.row(run.id, "state, waiting_for, reason") == ("pending", None, None)
    assert [mail.kind for mail in store.claim_after(run.id).mail] == ["cancel"]


def test_a_cancel_that_meets_a_claim_in_flight_finds_a_run_that_was_begun(store: Store) -> None:
    """The worker, which has read no mail, will read it: the knock is new."""
    run_id = store.start()
    worker = store.transaction()
    token = uuid.uuid4()
    claim, read, *_ = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token)
    worker.run(claim)
    ((_, _, _, _, _, _, wakes, *_),) = worker.run(read)

    asked = Asked(store, mailbox.cancel(run_id, "ada"))
    worker.commit()

    assert asked.state == "running"
    mail = runs.parse_mail(store.run(runs.read_mail(store.worker)))
    assert mail[run_id][0] == wakes + 1
    assert [letter.sent_by for letter in mail[run_id][1]] == ["ada"]


def test_a_claim_that_meets_a_cancel_in_flight_passes_the_run_by(store: Store) -> None:
    """And takes its neighbour; nobody begins what was cancelled."""
    run_id, neighbour = store.start(), store.start()
    person = store.transaction()
    assert person.run(mailbox.cancel(run_id)) == [("cancelled",)]

    assert [run.id for run in store.claim()] == [neighbour]
    person.commit()

    assert store.claim() == []
    assert store.row(run_id, "state, started_at") == ("cancelled", None)


def test_a_cancel_that_is_rolled_back_was_never_asked(store: Store) -> None:
    """It is part of the caller's transaction."""
    ids = [store.running().id, store.start()]
    person = store.transaction()
    for run_id in ids:
        person.run(mailbox.cancel(run_id))
    person.rollback()

    assert [letters(store, run_id) for run_id in ids] == [[], []]


def test_a_retry_that_meets_a_cancel_in_flight_is_refused(store: Store) -> None:
    """The held run is about to end."""
    run_id = brought_to(store, "held")
    person = store.transaction()
    assert person.run(mailbox.cancel(run_id)) == [("pending",)]

    asked = Asked(store, mailbox.retry(run_id))
    person.commit()

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is pending"):
        _ = asked.state
    assert [kind for kind, *_ in letters(store, run_id)] == ["cancel"]


def test_a_cancel_that_meets_a_retry_in_flight_follows_it(store: Store) -> None:
    """The run goes on, and is told to end."""
    run_id = brought_to(store, "failed")
    person = store.transaction()
    assert person.run(mailbox.retry(run_id)) == [("pending",)]

    asked = Asked(store, mailbox.cancel(run_id))
    person.commit()

    assert asked.state == "pending"
    assert [mail.kind for mail in store.claim_after(run_id).mail] == ["retry", "cancel"]


@pytest.mark.parametrize(
    ("state", "verb", "after"),
    [
        ("failed", mailbox.retry, "pending"),
        ("held", mailbox.retry, "pending"),
        ("running", mailbox.cancel, "running"),
        ("waiting", mailbox.cancel, "pending"),
        ("unbegun", mailbox.cancel, "cancelled"),
    ],
)
def test_two_who_ask_the_same_at_once_ask_once(store: Store, state: str, verb: Any, after: str) -> None:
    """The second waits for the first, and gets the same answer."""
    run_id = brought_to(store, state)
    first = store.transaction()
    assert first.run(verb(run_id, by="ada")) == [(after,)]

    second = Asked(store, verb(run_id, by="bob"))
    first.commit()

    assert second.state == after
    assert [who for _, _, who, _ in letters(store, run_id)] == ["ada"]


def test_a_retry_of_an_end_in_flight_waits_for_it(store: Store) -> None:
    """The run is running until that end is committed."""
    run = store.running()
    owner = store.transaction()
    owner.run(journal.write_units([unit(run, failed(1), change=ENDS["failed"])]))

    asked = Asked(store, mailbox.retry(run.id))
    owner.commit()

    assert asked.state == "pending"
    assert [body for _, body, *_ in letters(store, run.id)] == [{"from": "failed", "accept": None, "seq": 1}]


def failed(seq: int) -> Entry:
    return step(seq, None, outcome="error", error=ERROR)


def test_a_cancel_under_an_older_snapshot_fails_instead_of_guessing(store: Store) -> None:
    """A repeatable-read transaction would not see what was decided meanwhile."""
    run = store.running()
    person = store.transaction()
    person.execute("set transaction isolation level repeatable read")
    person.execute("select from {schema}.runs")
    store.write(unit(run, change=ENDS["succeeded"]))

    with pytest.raises(psycopg.errors.SerializationFailure):
        person.run(mailbox.cancel(run.id))


@pytest.mark.parametrize("statement", ["runs-read-claimed", "mailbox-list-shown"])
def test_what_answers_requests_is_found_in_a_long_journal_by_an_index(store: Store, statement: str) -> None:
    """A claim and `show` read no other entry for it."""
    run = store.running()
    store.admin.execute(
        "insert into journal (run_id, seq, key, name, kind, outcome, output, at, write_id)"
        " select %s, n, 's' || n, 's', 'step', 'ok', '1', now(), gen_random_uuid() from generate_series(1, 20000) n",
        [run.id],
    )
    ask(store, mailbox.cancel(run.id))
    store.admin.execute("analyze")
    bound = onlookers.shown_requests(run.id) if "shown" in statement else runs.read_claimed(store.worker, run.token)[0]
    assert bound[0].name == statement

    connection = store.connect()
    plan = connection.run(Statement("explain", "explain (analyze, format json) " + bound[0].text), bound[1])[0][0]

    assert sum(rows_read(plan[0]["Plan"])) < 20


def rows_read(plan: dict[str, Any]) -> Iterator[int]:
    """Rows that the scans of a plan have touched."""
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        yield (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    for part in plan.get("Plans", ()):
        yield from rows_read(part)

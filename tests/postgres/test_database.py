"""Connections: what they refuse, what may be retried, what a pooler costs, and sentences without passwords."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import psycopg
import pytest
from psycopg.waiting import Ready
from structlog.testing import capture_logs

from replaykit.errors import ConfigurationError, DatabaseUnreachable, SchemaMismatch
from replaykit.postgres import database as database_module
from replaykit.postgres import journal, leases, runs
from replaykit.postgres.database import Connection, Database, describe_dsn, first_line, is_refusal, is_transient
from replaykit.postgres.schema import REVISION, Statement, work_channel
from replaykit.replay.entries import Verdict
from replaykit.runtime.ids import new_id
from tests.direct import direct, hang_up
from tests.postgres.pooler import Pooler
from tests.postgres.store import Store, step, unit
from tests.runtime.facts import eventually

PIDS = Statement("test-pid", "select pg_backend_pid(), pg_current_xact_id()::text")
SETTING = Statement("test-setting", "select current_setting(%(name)s)")
PREPARED = Statement("test-prepared", "select count(*) from pg_prepared_statements")


def on_connection(dsn: str, work: Callable[[Connection], Awaitable[None]], name: str = "test") -> None:
    """Run that on a fresh connection."""

    async def main() -> None:
        connection = await Database(dsn, name=name).connect()
        try:
            await work(connection)
        finally:
            await connection.close()
            await connection.close()
        assert connection.closed

    asyncio.run(main())


def test_statements_run_one_by_one_are_transactions_of_their_own(dsn: str) -> None:
    """And several in one pipeline are one."""

    async def work(connection: Connection) -> None:
        (first,), (second,) = await connection.run(PIDS), await connection.run(PIDS)
        ((third,), (fourth,)) = await connection.run_all([(PIDS, {}), (PIDS, {})])

        assert len({first[0], second[0], third[0], fourth[0], connection.backend_pid}) == 1
        assert len({first[1], second[1], third[1], fourth[1]}) == 3
        assert third[1] == fourth[1]

    on_connection(dsn, work)


def test_one_failing_statement_voids_its_pipeline_and_not_the_connection(dsn: str) -> None:
    """A start whose second half fails leaves no first half."""

    async def work(connection: Connection) -> None:
        bad = Statement("test-bad", "select 1 / %(x)s::int")
        rows = [runs.StartRow(new_id(), "wf", "{}")]
        with pytest.raises(psycopg.errors.DivisionByZero):
            await connection.run_all([*runs.start_runs(rows), (bad, {"x": 0})])
        assert await connection.run(Statement("test-count", "select count(*) from {schema}.runs")) == [(0,)]

    on_connection(dsn, work)


def test_a_dedicated_connection_is_set_up_for_work(dsn: str) -> None:
    """A lock never waits for ever, a plan never scans a table that has grown, and people see whose it is."""

    async def work(connection: Connection) -> None:
        values = [(await connection.run(SETTING, {"name": name}))[0][0] for name in SETTINGS]
        assert dict(zip(SETTINGS, values, strict=True)) == SETTINGS
        assert not connection.pooled

    SETTINGS = {"lock_timeout": "2s", "enable_seqscan": "off", "TimeZone": "UTC", "application_name": "replaykit:w-1"}
    on_connection(dsn, work, name="w-1")


def test_a_hint_arrives_and_its_absence_is_no_error(dsn: str) -> None:
    """NOTIFY through our own names."""

    async def work(connection: Connection) -> None:
        await connection.listen(work_channel("replaykit"))
        assert not await connection.wait_notify(0.0)
        await connection.run(*runs.notify(work_channel("replaykit")))
        assert await connection.wait_notify(10.0)
        assert not await connection.wait_notify(0.0)

    on_connection(dsn, work)


def test_behind_a_pooler_everything_runs_and_nothing_is_prepared(store: Store) -> None:
    """The next transaction may be on a backend that has never heard of the statement."""
    run = store.running()

    async def work(connection: Connection) -> None:
        assert connection.pooled
        for seq in range(1, 9):
            rows = await connection.run(*journal.write_entry(unit(run, step(seq))))
            assert journal.parse_verdicts(rows) == {run.id: Verdict.OK}
        assert await connection.run(PREPARED) == [(0,)]
        assert await connection.run(SETTING, {"name": "enable_seqscan"}) == [("on",)]
        assert await connection.run(SETTING, {"name": "lock_timeout"}) == [("2s",)]
        with pytest.raises(ConfigurationError, match="cannot listen"):
            await connection.listen("x")
        token = uuid.uuid4()
        bounds = runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token)
        assert runs.parse_claim(await connection.run_all(bounds), token) == []

    with Pooler(direct(store.database.dsn)) as pooled:
        on_connection(pooled, work)
        sync = Database(pooled).connect_sync()
        assert sync.pooled
        assert leases.parse_clock(sync.run(*leases.heartbeat(store.worker))) is not None
        assert sync.run(PREPARED) == [(0,)]
        sync.close()


@pytest.mark.parametrize("patience", [60.0, 0.0], ids=["it ends", "it does not"])
def test_behind_a_pooler_nobody_is_asked_to_end_a_statement_whose_caller_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """psycopg would ask, and PgBouncer 1.18 may end of it: the caller waits for the statement, and hangs up after a while."""
    run = store.running()
    monkeypatch.setattr(database_module, "LEAVE_SECONDS", patience)
    waits = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

    async def leave(dsn: str) -> bool:
        connection = await Database(dsn).connect(lock_timeout_seconds=60.0)
        with store.transaction() as other:
            other.execute("select from {schema}.runs where id = %s for update", run.id)
            writing = asyncio.create_task(connection.run(*journal.write_entry(unit(run, step(1)))))
            await asyncio.to_thread(eventually, lambda: store.admin.execute(waits).fetchone() is not None, "it waits")
            writing.cancel()
            await asyncio.sleep(0)
            if patience:
                other.rollback()
            with pytest.raises(asyncio.CancelledError):
                await writing
        closed = connection.closed
        await connection.close()
        return closed

    pooler = Pooler(direct(store.database.dsn))
    with pooler as pooled:
        assert asyncio.run(leave(pooled)) == (not patience)
        assert pooler.cancels == 0
    if patience:
        assert store.admin.execute("select count(*) from journal where run_id = %s", [run.id]).fetchone() == (1,)


def test_a_connection_that_the_server_ends_is_transient_and_closed(store: Store) -> None:
    """The owner makes another."""

    async def work(connection: Connection) -> None:
        hang_up(store.database.dsn, "replaykit:test")
        with pytest.raises(psycopg.OperationalError) as caught:
            await connection.run(PIDS)
        assert is_transient(caught.value)
        assert connection.closed
        with pytest.raises(psycopg.OperationalError) as again:
            await connection.run(PIDS)
        assert is_transient(again.value)

    on_connection(store.database.dsn, work)


@pytest.mark.parametrize(
    ("code", "transient", "refusal"),
    [
        ("40001", True, False),
        ("40P01", True, False),
        ("55P03", True, False),
        ("57P01", True, False),
        ("57P03", True, False),
        ("53300", True, False),
        ("25006", True, False),
        ("08006", True, False),
        ("0A000", False, False),
        ("22P02", False, True),
        ("22P05", False, True),
        ("23514", False, True),
        ("54001", False, True),
        ("42501", False, False),
        ("42P01", False, False),
    ],
)
def test_codes_say_what_may_be_retried_and_what_was_refused(
    dsn: str, code: str, transient: bool, refusal: bool
) -> None:
    """A lost right or table is neither: nothing to retry, and no run's fault."""
    with psycopg.connect(dsn) as conn, pytest.raises(psycopg.Error) as caught:
        conn.execute(f"do $$ begin raise exception 'made up' using errcode = '{code}'; end $$".encode())

    assert caught.value.sqlstate == code
    assert is_transient(caught.value) is transient
    assert is_refusal(caught.value) is refusal


def test_a_plan_that_a_migration_made_old_is_retried(store: Store) -> None:
    """`cached plan must not change result type`, once; then it is prepared anew."""
    store.admin.execute("create table t (i int)")
    everything = Statement("test-everything", "select * from {schema}.t")
    store.connection.run(everything)
    store.admin.execute("alter table t add j int")

    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught:
        store.connection.run(everything)

    assert is_transient(caught.value)
    assert store.connection.run(everything) == []


def test_the_hot_statement_says_whether_it_wrote(store: Store) -> None:
    """A row or none; what the database refuses is an error of its class; after a migration it is prepared anew."""
    run = store.running()
    wrong = unit(run, step(2, output="{"))

    async def work(connection: Connection) -> None:
        assert await connection.wrote(*journal.write_entry(unit(run, step(1))))
        assert not await connection.wrote(*journal.write_entry(unit(run, step(1))))
        with pytest.raises(psycopg.Error) as caught:
            await connection.wrote(*journal.write_entry(wrong))
        assert is_refusal(caught.value)
        assert await connection.wrote(*journal.write_entry(unit(run, step(2))))

        everything = Statement("test-wrote-everything", "select * from {schema}.t")
        assert not await connection.wrote(everything, {})
        store.admin.execute("alter table t add j int")
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            await connection.wrote(everything, {})
        assert not await connection.wrote(everything, {})

    store.admin.execute("create table t (i int)")
    on_connection(store.database.dsn, work)
    assert store.seqs(run.id) == [1, 2]


def test_the_hot_statement_takes_more_than_a_socket_does_and_is_not_called_for_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes out in parts; once all of it has, and between statements, the loop does not look for a way to write."""
    run = store.running()
    calls: list[Ready] = []
    is_ready = Connection._is_ready

    def counted(self: Connection, ready: Ready) -> None:
        calls.append(ready)
        is_ready(self, ready)

    monkeypatch.setattr(Connection, "_is_ready", counted)
    long = f'"{"x" * 20_000_000}"'

    async def work(connection: Connection) -> None:
        assert await connection.wrote(*journal.write_entry(unit(run, step(1, output=long))))
        assert Ready.W in calls and calls[-1] is Ready.R
        for seq in range(2, 12):
            calls.clear()
            assert await connection.wrote(*journal.write_entry(unit(run, step(seq))))
            assert calls == [Ready.R]
        await asyncio.sleep(0.01)
        assert calls == [Ready.R]

    on_connection(store.database.dsn, work)
    assert store.seqs(run.id) == list(range(1, 12))


@pytest.mark.parametrize("hot", [True, False])
def test_a_statement_without_an_answer_is_cut(store: Store, monkeypatch: pytest.MonkeyPatch, hot: bool) -> None:
    """A peer may acknowledge every byte and never answer: the caller sees a lost connection, and may try another."""
    monkeypatch.setattr(database_module, "DEAD_AFTER_SECONDS", 0.2)
    silent = Statement("test-silent", "select pg_sleep(60)::text")

    async def work(connection: Connection) -> None:
        with pytest.raises(psycopg.OperationalError) as caught:
            await (connection.wrote(silent, {}) if hot else connection.run(silent))
        assert is_transient(caught.value)
        assert connection.closed

    on_connection(store.database.dsn, work)


def test_other_errors_are_neither() -> None:
    """A defect of ours is not retried for ever, nor held against a run."""
    for error in (ValueError("x"), KeyError("x"), SchemaMismatch("x")):
        assert not is_transient(error)
        assert not is_refusal(error)
    assert is_transient(DatabaseUnreachable("x"))
    assert is_transient(ConnectionResetError())


def test_no_connection_is_a_sentence_without_the_password() -> None:
    """By both ways to connect."""
    database = Database("host=127.0.0.1 port=1 user=me password=s3cret dbname=app")

    for attempt in (lambda: asyncio.run(database.connect()), database.connect_sync):
        with pytest.raises(DatabaseUnreachable) as caught:
            attempt()
        assert str(caught.value).startswith("cannot reach postgresql://me@127.0.0.1:1/app: ")
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    [
        *("nonsense s3cret", "postgresql://me:s3cret@[::1/app", "host=x passwort=s3cret"),
        *(
            "postgresql://me:s3cret/x@host/app",
            "postgresql://me:1/s3cret@host/app",
            "postgresql://me:x@s3cret@host/app",
        ),
    ],
)
def test_a_url_that_is_none_is_a_sentence_without_the_password(dsn: str) -> None:
    """libpq's own words would quote it."""
    with pytest.raises(ConfigurationError, match="not one that Postgres understands") as caught:
        Database(dsn).connect_sync()

    assert "s3cret" not in str(caught.value)
    assert describe_dsn(dsn) == "the database"


def test_the_right_schema_passes_the_check(dsn: str) -> None:
    """And the check tells which it is."""
    assert asyncio.run(Database(dsn).check()) == REVISION


@pytest.mark.parametrize(
    ("revision", "words"),
    [(None, "not set up; run `replaykit db migrate`"), ("9999", "newer than"), ("0000", "newer than")],
)
def test_another_schema_fails_the_check(dsn: str, revision: str | None, words: str) -> None:
    """Missing, or of a release that we don't know; without `need` it is only told."""
    with psycopg.connect(direct(dsn), autocommit=True) as conn:
        if revision is None:
            conn.execute("drop schema replaykit cascade")
        else:
            conn.execute("update replaykit.alembic_version set version_num = %s", [revision])

    with pytest.raises(SchemaMismatch, match=words):
        asyncio.run(Database(dsn).check())
    assert asyncio.run(Database(dsn).check(need=False)) == revision


def test_an_older_schema_fails_the_check_and_names_the_command(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later release will see ours."""
    monkeypatch.setattr("replaykit.postgres.database.REVISIONS", (REVISION, "9999"))
    monkeypatch.setattr("replaykit.postgres.database.REVISION", "9999")

    with pytest.raises(
        SchemaMismatch, match=f"at revision {REVISION}, this release needs 9999; run `replaykit db migrate`"
    ):
        asyncio.run(Database(dsn).check())


def test_a_server_that_may_lose_commits_is_warned_of(dsn: str) -> None:
    """A default of the database or role voids the first promise in silence."""
    with psycopg.connect(direct(dsn), autocommit=True) as conn:
        conn.execute(
            "do $$ begin execute format('alter database %I set synchronous_commit = off', current_database()); end $$"
        )

    with capture_logs() as logs:
        asyncio.run(Database(dsn).check())

    assert ("synchronous_commit", "off", "warning") in [(e["setting"], e["value"], e["log_level"]) for e in logs]


def test_an_error_is_cut_to_its_first_line() -> None:
    """For sentences."""
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"

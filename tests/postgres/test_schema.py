"""What alembic makes is what the contract says, tables refuse nonsense, and a role with only DML rights can work."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import sql

from replaykit.postgres import database, journal, leases, mailbox, migrate, onlookers, runs
from replaykit.postgres.database import Database
from replaykit.postgres.schema import REVISION, REVISIONS, Statement, done_channel, quote_name, work_channel
from replaykit.replay.entries import (
    Attempt,
    Closing,
    Effect,
    Finish,
    Hold,
    Intent,
    IntentState,
    Kind,
    MailKind,
    Observation,
    Outcome,
    State,
)
from replaykit.runtime.ids import new_id
from tests.direct import direct
from tests.postgres.store import Store, step, unit

ODD_SCHEMA = 'o"d %s {schema} %(x)s :y \\ ü'

COLUMNS = {
    "runs": "id uuid, workflow text, key text, state text, queue text, priority int4, waiting_for text, reason text,"
    " created_at timestamptz, started_at timestamptz, finished_at timestamptz, available_at timestamptz, parent_id uuid,"
    " parent_key text, forked_from uuid, recoveries int4, suspect bool, worker uuid, lease_token uuid, write_id uuid,"
    " wakes int8, protocol int4, seed int8, claims int4, fruitless int4",
    "payloads": "run_id uuid, input json, output json, error json",
    "journal": "run_id uuid, seq int4, key text, name text, kind text, outcome text, attempt int4, input json,"
    " output json, error json, digest text, idempotency_key text, started_at timestamptz, at timestamptz,"
    " due_at timestamptz, recorded_at timestamptz, worker uuid, write_id uuid, mailbox_id int8, to_seq int4,"
    " reuses int4",
    "attempts": "run_id uuid, key text, attempt int4, error json, started_at timestamptz, ended_at timestamptz,"
    " next_at timestamptz, tries int4, first_at timestamptz, idle_seconds float8, digest text",
    "workers": "id uuid, hostname text, pid int4, started_at timestamptz, heartbeat_at timestamptz,"
    " expires_at timestamptz, stopped_at timestamptz, lease_seconds float8, queues _text, workflows json, version text,"
    " python text, health json, in_flight json",
    "mailbox": "run_id uuid, id int8, kind text, name text, body json, sent_at timestamptz, sent_by text, raised bool",
    "waiting": "run_id uuid, workflow text, key text, queue text, waiting_for text, until timestamptz,"
    " created_at timestamptz, started_at timestamptz, parent_id uuid",
    "timeline": "run_id uuid, workflow text, seq int4, at timestamptz, kind text, key text, name text, outcome text,"
    " attempt int4, started_at timestamptz, duration interval, due_at timestamptz, input json, output json, error json,"
    " recorded_at timestamptz, worker uuid, hostname text, pid int4, mailbox_id int8, to_seq int4, reuses int4",
    "in_flight": "run_id uuid, key text, attempt int4, since timestamptz, worker uuid, hostname text, pid int4",
    "intents": "run_id uuid, key text, attempt int4, name text, effect text, idempotency_key text, input json, state text,"
    " written_at timestamptz, doubt_at timestamptz, resolved_at timestamptz, resolved_by text, evidence json, worker uuid,"
    " write_id uuid",
    "observations": "id int8, run_id uuid, key text, attempt int4, kind text, value text, observed_at timestamptz,"
    " worker uuid",
    "in_doubt": "run_id uuid, key text, name text, attempt int4, effect text, idempotency_key text, input json,"
    " written_at timestamptz, until timestamptz, evidence json, workflow text, run_key text, run_state text, reason text,"
    " worker uuid",
    "alembic_version": "version_num varchar",
}

KEYS = {
    "runs": "id",
    "payloads": "run_id",
    "journal": "run_id,seq",
    "attempts": "run_id,key,attempt",
    "workers": "id",
    "mailbox": "run_id,id",
    "intents": "run_id,key,attempt",
    "observations": "run_id,id",
    "alembic_version": "version_num",
}

INDEXES = {
    "runs_key": "UNIQUE (key) WHERE (key IS NOT NULL)",
    "runs_ready": "(queue, priority, available_at, id) WHERE ((state = 'pending'::text) AND (NOT suspect))",
    "runs_due": "(available_at) WHERE (state = 'waiting'::text)",
    "runs_leased": "(worker, lease_token) WHERE (state = 'running'::text)",
    "runs_held": "(id) WHERE (state = 'held'::text)",
    "runs_suspects": "(queue, priority, available_at, id) WHERE ((state = 'pending'::text) AND suspect)",
    "runs_woken": "(worker) WHERE ((state = 'running'::text) AND (wakes > 0))",
    "journal_asked": "(run_id, seq) WHERE (kind = ANY (ARRAY['cancel'::text, 'rewind'::text]))",
    "intents_unsettled": "(run_id) WHERE (state = ANY (ARRAY['open'::text, 'unknown'::text, 'not_landed'::text]))",
    "intents_in_doubt": "(run_id) WHERE ((state = 'unknown'::text) AND (resolved_at IS NULL))",
    "observations_once": "UNIQUE (run_id, key, attempt, md5(kind), md5(value))",
    "observations_found": "(value, kind)",
}

INTENT = Intent("s", 1, "s", "irreversible", "rk1", "{}", 1)


def statements() -> list[Statement]:
    """Every statement of the package."""
    modules = (database, journal, leases, mailbox, onlookers, runs)
    return [value for module in modules for value in vars(module).values() if isinstance(value, Statement)]


def test_alembic_makes_the_tables_and_views_that_the_contract_names(store: Store) -> None:
    """Columns with their types, in order, and nothing else."""
    rows = store.admin.execute(
        "select table_name, string_agg(column_name || ' ' || udt_name, ', ' order by ordinal_position)"
        " from information_schema.columns where table_schema = 'replaykit' group by 1"
    ).fetchall()

    assert dict(rows) == COLUMNS


def test_keys_begin_with_the_run_and_indexes_are_those_that_statements_need(store: Store) -> None:
    """The journal has its primary key and nothing more."""
    rows = store.admin.execute(
        "select t.relname, i.relname, x.indisprimary, pg_get_indexdef(x.indexrelid),"
        " (select string_agg(attname, ',' order by array_position(x.indkey::int2[], attnum)) from pg_attribute a"
        "  where a.attrelid = t.oid and a.attnum = any(x.indkey))"
        " from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class t on t.oid = x.indrelid"
        " join pg_namespace n on n.oid = t.relnamespace where n.nspname = 'replaykit'"
    ).fetchall()

    assert {table: columns for table, _, primary, _, columns in rows if primary} == KEYS
    others = {
        name: ("UNIQUE " if "UNIQUE" in text else "") + text.split("USING btree ")[1]
        for _, name, primary, text, _ in rows
        if not primary
    }
    assert others == INDEXES


def test_no_table_points_at_another(store: Store) -> None:
    """A schema is a cell; and each check of a foreign key would lock a row."""
    assert store.admin.execute("select conname from pg_constraint where contype = 'f'").fetchall() == []


def test_every_table_and_every_enumerated_column_is_explained_where_people_look(store: Store) -> None:
    r"""`\d+` in psql says what each state, kind and outcome means."""
    described: dict[str, str] = dict(
        store.admin.execute(
            "select c.relname || coalesce('.' || a.attname, ''), d.description from pg_description d"
            " join pg_class c on c.oid = d.objoid and d.classoid = 'pg_class'::regclass"
            " join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'replaykit'"
            " left join pg_attribute a on a.attrelid = c.oid and a.attnum = d.objsubid and d.objsubid > 0"
        ).fetchall()
    )

    tables = {"runs", "payloads", "journal", "attempts", "workers", "mailbox", "intents", "observations"}
    assert tables <= described.keys()
    for column, values in (
        ("runs.state", State),
        ("journal.kind", Kind),
        ("journal.outcome", Outcome),
        ("mailbox.kind", MailKind),
        ("intents.state", IntentState),
        ("intents.effect", Effect),
    ):
        assert all(value.value in described[column] for value in values), described[column]


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'asleep'", "runs_state_check"),
        ("state = 'running'", "runs_running_has_"),
        ("lease_token = gen_random_uuid()", "runs_running_has_lease"),
        ("worker = gen_random_uuid()", "runs_running_has_worker"),
        ("state = 'waiting'", "runs_waiting_says_for_what"),
        ("waiting_for = 'timer'", "runs_waiting_says_for_what"),
        ("state = 'waiting', waiting_for = 'godot'", "runs_waiting_for_check"),
        ("state = 'held'", "runs_held_has_reason"),
        ("reason = 'why'", "runs_reason_is_of_held"),
        ("state = 'cancelled'", "runs_end_has_time"),
        ("finished_at = now()", "runs_end_has_time"),
        ("state = 'failed', finished_at = now()", "runs_work_was_started"),
        ("started_at = now()", "runs_start_has_protocol"),
        ("parent_id = id", "runs_parent_has_key"),
        ("recoveries = -1", "runs_recoveries_check"),
        ("queue = ''", "runs_queue_check"),
    ],
)
def test_a_runs_row_refuses_what_no_state_allows(store: Store, change: str, constraint: str) -> None:
    """Each invariant is a CHECK besides the code, by hand as well."""
    run_id = store.start()

    with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
        store.admin.execute(f"update runs set {change} where id = %s".encode(), [run_id])


def test_priority_and_queue_of_a_pending_run_may_be_updated_by_hand(store: Store) -> None:
    """The contract says so."""
    store.start()
    urgent = store.start()
    store.admin.execute("update runs set priority = -1 where id = %s", [urgent])

    assert [run.id for run in store.claim(limit=1)] == [urgent]


def test_statements_have_names_of_their_own() -> None:
    """For logs; and the cache of their texts goes by name."""
    names = [statement.name for statement in statements()]

    assert len(names) == len(set(names))
    assert len(names) > 25


def test_every_statement_names_the_schema_of_every_table() -> None:
    """No session needs a search_path."""
    tables = [name for name in COLUMNS if name not in ("waiting", "in_flight", "in_doubt")]
    for statement in statements():
        words = statement.text.replace("(", " ").replace(",", " ").split()
        for before, word in itertools.pairwise(words):
            if before in ("from", "join", "into", "update"):
                assert word not in tables, (statement.name, before, word)


def test_channels_are_names_that_postgres_takes() -> None:
    """At most 63 bytes, one for each schema."""
    long = "ü" * 31

    for channel in (work_channel, done_channel):
        assert channel("app") == f"replaykit_{channel.__name__.split('_')[0]}:app"
        assert len(channel(long).encode()) < 64
        assert channel(long) != channel(long[:-1] + "x")


@pytest.fixture
def worker_role(dsn: str) -> Iterator[str]:
    """A role that may nothing yet."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(direct(dsn), autocommit=True) as admin:
        admin.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
        yield role
        admin.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def test_a_role_with_only_dml_rights_runs_every_statement(store: Store, worker_role: str) -> None:
    """No DDL, nothing on the database, no update or delete on the journal; and migrating what is there needs no more."""
    role = sql.Identifier(worker_role)
    for grant in (
        "grant usage on schema replaykit to {}",
        "grant select, insert, update on runs, payloads, mailbox, attempts, intents to {}",
        "grant select, insert on journal, observations to {}",
        "grant select, insert, update, delete on workers to {}",
        "grant select on waiting, timeline, in_flight, in_doubt, alembic_version to {}",
    ):
        store.admin.execute(sql.SQL(grant).format(role))
    store.admin.execute(
        sql.SQL(
            "revoke create on schema public from public; revoke create, temporary on database {} from public"
        ).format(sql.Identifier(store.admin.info.dbname))
    )
    assert _run_every_statement(store, role) == {s.name for s in statements()}

    store.admin.execute(sql.SQL("set role {}").format(role))
    assert store.admin.execute("select start('wf', '[]', 'k') = start('wf', '[]', 'k')").fetchone() == (True,)
    assert store.admin.execute("select cancel(start('wf', '[]', 'k'), by => 'ada')").fetchone() == ("cancelled",)
    for forbidden in ("update journal set seq = 2", "delete from journal", "create table replaykit.t (i int)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            store.admin.execute(forbidden)
    assert migrate.current_revision(store.admin, "replaykit") == REVISION


def _run_every_statement(store: Store, role: sql.Identifier) -> set[str]:
    """As that role, with parameters that reach rows; the names of what ran."""
    run, late, held = store.running(), store.running(), store.running()
    store.write(unit(held, change=Hold("x", 0)))
    connection = store.connect()
    connection._raw.execute(sql.SQL("set role {}").format(role))
    token = uuid.uuid4()
    worker = leases.insert_worker(
        uuid.uuid4(), hostname="h", pid=1, lease_seconds=1, queues=[], workflows={}, version="", python=""
    )
    lone = journal.write_lone(unit(late, closings=[Closing("s", 1, "landed")], intents=[replace(INTENT, key="t")]))
    assert lone is not None
    done = unit(run, step(1), change=Finish(State.SUCCEEDED, "1"))
    starts = runs.start_runs([runs.StartRow(new_id(), "wf", "{}", key="x")])
    bounds: list[tuple[Statement, dict[str, Any]]] = [
        worker,
        leases.heartbeat(worker[1]["id"]),
        leases.live_workflows(),
        *starts,
        *((borrowed, starts[0][1]) for borrowed in (runs.START_BORROWED, runs.START_BORROWED_READ)),
        *runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token),
        journal.write_units([done]),
        journal.write_units([unit(late, attempts=[Attempt("s", 1, 1, 2, 3, 1, 1, error="{}")])]),
        journal.recheck([done]),
        journal.unlocked([done]),
        journal.write_entry(unit(late, step(1))),
        journal.write_units([unit(late, intents=[INTENT], observations=[Observation("s", 1, "ticket", "1", 1)])]),
        lone,
        journal.read_journal(late.id, late.token, 0),
        runs.renew_token(late.id, late.token, token),
        runs.read_mail(store.worker),
        runs.read_strays(store.worker, [late.id]),
        runs.hold_run(late.id, token, "x"),
        mailbox.resolve(late.id, "t", landed="1"),
        mailbox.retry(held.id),
        mailbox.cancel(late.id),
        runs.cancel_run(held.id, token),
        runs.promote_due(),
        *runs.claim(queue="default", workflows=["wf"], worker=store.worker, token=token, suspects=[]),
        runs.clear_suspect(late.id, token),
        runs.find_run(str(run.id)),
        runs.find_run("key"),
        runs.run_results([run.id]),
        runs.notify("c"),
        leases.lock_runs(worker[1]["id"]),
        leases.release_worker(worker[1]["id"], recovered=True),
        leases.release_worker(worker[1]["id"], recovered=True, wait=False),
        leases.stop_worker(worker[1]["id"]),
        leases.reap_expired(),
        leases.prune_workers(0),
        (database.ALIVE, {}),
        (database.DURABILITY, {}),
        (database.VERSION_TABLE, {"table": "replaykit.alembic_version"}),
        (database.VERSION, {}),
        *_onlooking(run.id),
    ]
    for statement, params in bounds:
        connection.run(statement, params)
    return {statement.name for statement, _ in bounds}


def _onlooking(run_id: uuid.UUID) -> Iterator[tuple[Statement, dict[str, Any]]]:
    params = {"run_id": run_id, "run_ids": [run_id], "state": None, "workflow": None, "limit": 5, "stopped": True}
    params |= {"first": 1, "last": 1, "keys": ["s"], "kind": "ticket", "value": "1", "whole": "1"}
    for value in vars(onlookers).values():
        if isinstance(value, Statement):
            yield value, params


def test_a_schema_of_any_name_works(empty_dsn: str) -> None:
    """Quotes, percent signs, braces: quoted once, in one place."""
    assert migrate.upgrade(empty_dsn, ODD_SCHEMA)
    assert not migrate.upgrade(empty_dsn, ODD_SCHEMA)
    store = Store(empty_dsn, ODD_SCHEMA)
    try:
        run = store.running()
        store.write(unit(run, step(1), change=Finish(State.SUCCEEDED, "1")))
        store.admin.execute("select start('wf', '[]')")
        assert len(store.claim()) == 1
        ended = store.running()
        store.write(unit(ended, change=Finish(State.FAILED, None, "{}")))
        assert store.run(mailbox.retry(ended.id)) == [("pending",)]
        assert store.run(mailbox.cancel(ended.id)) == [("pending",)]
        assert store.seqs(run.id) == [1]
        assert store.admin.execute("select count(*) from timeline").fetchone() == (1,)
    finally:
        store.close()


def test_two_schemas_in_one_database_are_strangers(store: Store) -> None:
    """Each with its own version, its own runs."""
    dsn = store.database.dsn
    assert migrate.upgrade(direct(dsn), "another")
    other = Store(dsn, "another")
    try:
        store.start()
        assert other.claim() == []
        assert len(store.claim()) == 1
    finally:
        other.close()


def test_the_revision_of_the_code_is_the_head_of_the_scripts() -> None:
    """`REVISIONS` is what tells too old from too new."""
    from alembic.script import ScriptDirectory

    with migrate._config("replaykit") as config:
        script = ScriptDirectory.from_config(config)
        assert [r.revision for r in script.walk_revisions()][::-1] == list(REVISIONS)
        assert script.get_current_head() == REVISION


def test_a_database_knows_its_statements_by_schema() -> None:
    """A percent sign in the name would be taken for a parameter."""
    statement = Statement("x", "select * from {schema}.runs where id = %(id)s")

    assert Database("", "a%b").text(statement) == b'select * from "a%%b".runs where id = %(id)s'
    assert quote_name('a"b') == '"a""b"'

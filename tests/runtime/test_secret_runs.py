"""A secret reaches the body of a step, and no row of the database (DESIGN 7)."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pydantic import BaseModel, SecretStr

from replaykit import Client, NotJournalable, RunCancelled, RunFailed, RunHeld, Secret, Worker, step, workflow
from tests.direct import direct

pytestmark = pytest.mark.anyio

SECRET = "s3" + "cret"
seen: list[Any] = []


class Gateway(BaseModel):
    url: str
    token: SecretStr


@dataclasses.dataclass
class Account:
    name: str
    key: Secret[str]


class Denied(Exception):
    def __init__(self, account: Account, key: Secret[str]) -> None:
        super().__init__("denied", key)
        self.account = account


async def charge(gateway: Gateway, key: Secret[str], anything) -> str:  # type: ignore[no-untyped-def]
    seen.append((gateway.token.get_secret_value(), key.reveal(), anything["account"].key.reveal()))
    return "charged"


def refuse(account: Account) -> None:
    raise Denied(account, account.key)


async def leak(key: Secret[str]) -> dict[str, Any]:
    return {"key": key}


@workflow
async def pay(way: str) -> str:
    account = Account("ada", Secret(SECRET))
    if way == "refuse":
        await step(refuse, account)
    if way == "leak":
        await step(leak, account.key)
    return await step(charge, Gateway(url="u", token=SecretStr(SECRET)), account.key, {"account": account})


@workflow
async def enter(account: Account) -> str:
    return account.name


def rows(dsn: str) -> str:
    """All rows of all tables, as text."""
    with psycopg.connect(dsn) as connection:
        tables = connection.execute("select tablename from pg_tables where schemaname = 'replaykit'").fetchall()
        found = [
            connection.execute(
                sql.SQL("select t::text from {} t").format(sql.Identifier("replaykit", table))
            ).fetchall()
            for (table,) in tables
        ]
    return str(found)


async def test_no_row_holds_a_secret(dsn: str) -> None:
    """Arguments, results, errors and what a run is started with: the bodies saw it, the database did not."""

    seen.clear()
    async with Client(dsn) as client, Worker(client, workflows=[pay, enter]):
        charged = await (await client.start(pay, "charge")).result()
        with pytest.raises(RunFailed) as refused:
            await (await client.start(pay, "refuse")).result()
        with pytest.raises(RunFailed, match=r"\$\.key: secrets are never written"):
            await (await client.start(pay, "leak")).result()
        for call in (client.start(enter, Account("ada", Secret(SECRET))), client.start("enter", Secret(SECRET))):
            with pytest.raises(NotJournalable, match=r"^\$\.?\S*: a secret is never written, so no worker"):
                await call
        stored = rows(dsn)

    assert charged == "charged"
    assert seen == [(SECRET, SECRET, SECRET)]
    assert ".account (" in str(getattr(refused.value.__cause__, "__notes__", ()))
    assert stored.count("***") >= 5
    assert SECRET not in stored


@workflow
async def hold_dear(name: str, key: SecretStr | None = None, account: Account | None = None) -> str:
    return name


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"key": SECRET}, "$.key"),
        ({"account": {"name": "ada", "key": SECRET}}, "$.account.key"),
        ({"key": None, "account": {"name": "ada", "key": None}}, "$.account.key"),
    ],
)
async def test_a_secret_in_clear_is_refused_by_name(dsn: str, arguments: dict[str, Any], path: str) -> None:
    """What stands in the place of a secret is one, and the live workers tell the places."""

    async with Client(dsn) as client, Worker(client, workflows=[hold_dear]):
        with pytest.raises(NotJournalable, match=f"^{re.escape(path)}: a secret is never written, so no worker"):
            await client.start("hold_dear", "ada", **arguments)
        assert await (await client.start("hold_dear", "ada", key=None)).result() == "ada"
        stored = rows(dsn)

    assert SECRET not in stored


async def test_a_secret_in_clear_that_nobody_could_refuse_holds_its_run(dsn: str) -> None:
    """From SQL, or before there was a worker. The reason says where it stands and how to be rid of it, and not what it is."""

    with psycopg.connect(direct(dsn), autocommit=True) as sql:
        call = json.dumps({"args": ["ada"], "kwargs": {"key": SECRET}})
        row = sql.execute("select replaykit.start('hold_dear', %s::json)", [call]).fetchone()
        assert row is not None
        run_id = row[0]
        async with Client(dsn) as client, Worker(client, workflows=[hold_dear]):
            with pytest.raises(RunHeld) as held:
                await client.handle(run_id).result()
            assert SECRET in rows(dsn)
            await client.handle(run_id).cancel()
            with pytest.raises(RunCancelled):
                await client.handle(run_id).result()
        sql.execute(held.value.reason.rpartition("then ")[2].encode())

    assert "$.key: a secret is never written, so no worker" in held.value.reason
    assert SECRET not in held.value.reason
    assert SECRET not in rows(dsn)

"""Transactional steps for the tests that kill: each writes a line of a ledger and adds one to an account."""

from __future__ import annotations

import os
from typing import Any, Final

import psycopg

from replaykit import step, workflow
from tests.crash.workflows import calling, pass_gate

__all__ = ["DISAGREE", "LEDGER", "MODULE", "TABLES", "book", "book_seen", "book_slowly"]

MODULE: Final = "tests.crash.ledger"

ACCOUNTS: Final = 5  # few enough that bodies wait for each other's locks

TABLES: Final = """
create table public.ledger (run_id uuid, key text, pid int);
create table public.account (id int primary key, balance int);
insert into public.account select n, 0 from generate_series(0, 4) n;
"""

DISAGREE: Final = """
select l.run_id, l.key, j.run_id, j.key
from public.ledger l full join (select * from journal where name like 'enter%%') j on j.run_id = l.run_id and j.key = l.key
where l.run_id is null or j.run_id is null
"""
"""Lines without an entry, and entries without a line."""

LEDGER: Final = """
select (select count(*) from public.ledger), (select count(distinct (run_id, key)) from public.ledger),
    (select sum(balance) from public.account)
"""
"""Lines, steps that they are of, and what the accounts say."""

LINE: Final = "insert into public.ledger values (%s, %s, %s)"
ADD: Final = "update public.account set balance = balance + 1 where id = %s"


def line() -> tuple[Any, ...]:
    """What this step writes."""
    info = step.current()
    return info.run_id, info.key, os.getpid()


async def enter(number: int) -> int:
    """One line."""
    conn = await step.current().connection()
    await conn.execute(LINE, line())
    await conn.execute(ADD, (number % ACCOUNTS,))
    return number


def enter_sync(number: int) -> int:
    """The same in a thread."""
    conn = step.current().connection(psycopg.Connection)
    conn.execute(LINE, line())
    conn.execute(ADD, (number % ACCOUNTS,))
    return number


async def enter_slowly(gate: str) -> str:
    """One line, and a wait for the test before the end; seen from outside."""
    conn = await step.current().connection()
    await conn.execute(LINE, line())
    return await pass_gate(gate)


async def enter_seen(number: int) -> int:
    """One line; seen from outside."""
    async with calling():
        return await enter(number)


transactional = step.options(effect="transactional")


@workflow
async def book(steps: int) -> int:
    """One step after another, in coroutines and in threads."""
    total = 0
    for number in range(steps):
        total += await (transactional(enter_sync, number) if number % 2 else transactional(enter, number))
    return total


@workflow
async def book_slowly(gate: str) -> str:
    """One step."""
    return await transactional(enter_slowly, gate)


@workflow
async def book_seen(number: int) -> int:
    """One step that is seen, and a plain one that is not."""
    return await transactional(enter_seen, number)

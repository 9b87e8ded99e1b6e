"""Planted mistakes: both checkers must complain of each line that is marked, and of no other. Never run."""

from __future__ import annotations

import asyncio

from sqlalchemy.ext.asyncio import AsyncSession

from replaykit import Client, Landed, StepInfo, SyncClient, Worker, now, sleep, step, workflow
from tests.typing.examples import Receipt, charge, checkout, find_refund, nightly, refund, score, send_mail, take_back


async def find_number(info: StepInfo) -> Landed[int]:
    return Landed(len(info.key))


async def find_without_asking() -> Landed[Receipt]:
    return Landed(Receipt(""))


async def find_bare(info: StepInfo) -> Receipt:
    return Receipt(info.key)


def find_in_a_thread(info: StepInfo) -> Landed[Receipt]:
    return Landed(Receipt(info.key))


async def undo_number(number: int) -> None:
    pass


async def undo_with(receipt: Receipt, why: str) -> None:
    pass


@step.policy(effect="irreversible", reconcile=find_number)  # MISTAKE: finds a number, and the step gives a Receipt
async def found_another(card: str) -> Receipt:
    return Receipt(card)


@step.policy(effect="irreversible", reconcile=find_number)  # MISTAKE: so with a sync step
def found_another_in_a_thread(card: str) -> Receipt:
    return Receipt(card)


@step.policy(compensate=undo_number)  # MISTAKE: undoes a number, and the step gives a Receipt
async def undone_another(card: str) -> Receipt:
    return Receipt(card)


@step.policy(compensate=undo_number)  # MISTAKE: so with a sync step
def undone_another_in_a_thread(card: str) -> Receipt:
    return Receipt(card)


@step.policy(effect="irreversible", reconcile=find_refund, compensate=undo_number)  # MISTAKE: one fits, one does not
async def fits_by_half(card: str) -> Receipt:
    return Receipt(card)


step.policy(effect="irreversible", reconcile=find_without_asking)  # MISTAKE: takes no StepInfo
step.policy(effect="irreversible", reconcile=find_bare)  # MISTAKE: neither Landed nor NotLanded nor Unknown
step.policy(effect="irreversible", reconcile=find_in_a_thread)  # MISTAKE: not async
step.policy(effect="once")  # MISTAKE: no such effect
step.policy(effect="irreversible", not_landed="refused")  # MISTAKE: no class of exceptions
step.policy(effect="irreversible", not_landed=(OSError, 5))  # MISTAKE: one of them is none
step.policy(effect="idempotent", key_valid_for="a day")  # MISTAKE: neither seconds nor a timedelta
step.policy(compensate=5)  # MISTAKE: no function


@workflow
async def mistaken(order: str) -> int:
    await step(charge, 5)  # MISTAKE: a number for the card
    await step(charge, order, 5, "note")  # MISTAKE: note is keyword-only
    await step(charge)  # MISTAKE: no card
    await step(charge, order, memo="x")  # MISTAKE: no such parameter
    await step(score, "x")  # MISTAKE: text for a number, in a sync step
    await step(send_mail, 5)  # MISTAKE: a policy keeps the signature
    await step.options(key="k")(score, "x")  # MISTAKE: so do options
    await step.options(keys="k")(score, 1)  # MISTAKE: no such option
    await step.options(effect="irreversible", reconcile=find_number)(charge, order)  # MISTAKE: finds a number
    await step.options(effect="irreversible", reconcile=find_refund)(score, 1)  # MISTAKE: finds a Receipt
    await step.options(compensate=undo_number)(charge, order)  # MISTAKE: undoes a number
    await step.options(compensate=take_back)(score, 1)  # MISTAKE: undoes a Receipt, in a sync step
    await step.options(compensate=undo_with)(charge, order)  # MISTAKE: nobody says why
    await step.options(compensate=take_back, reconcile=find_number)(charge, order)  # MISTAKE: one fits, one does not
    await step.options(compensate=take_back)(charge, 5)  # MISTAKE: options keep the signature
    await step(refund, 5)  # MISTAKE: so does a policy with a reconciler
    await refund("card", memo="x")  # MISTAKE: and as a plain function
    await step.current().observe("ticket", 5)  # MISTAKE: an identifier is text
    await step.current().connection(Receipt)  # MISTAKE: no connection
    step.current().connection(AsyncSession).add(5)  # MISTAKE: not awaited
    await sleep("tomorrow")  # MISTAKE: neither seconds nor a timedelta nor a moment
    receipt, half = await asyncio.gather(step(charge, order), step(score, 1))
    wrong: str = half  # MISTAKE: gather keeps the second type
    receipt.cents  # MISTAKE: gather keeps the first type
    return await step(score, 1) + wrong  # MISTAKE: a float and a text


@workflow  # MISTAKE: a workflow is an async function
def not_async(order: str) -> int:
    return len(order)


async def callers(client: Client) -> None:
    await client.start(checkout, 5)  # MISTAKE: a number for the order
    await client.start(checkout, "order", key="k")  # MISTAKE: what isn't the workflow's own goes through options
    await client.options(key=5).start(checkout, "order")  # MISTAKE: a key is text
    number: int = await client.handle("order-42", checkout).result()  # MISTAKE: the result is a Receipt
    await client.start(charge, "order")  # MISTAKE: a step is no workflow
    await checkout(number)  # MISTAKE: inline calls are typed too
    Worker(client, workflows=[charge])  # MISTAKE: a step is no workflow
    (now() - 5).date()  # MISTAKE: a moment less a number
    await client.start(nightly)  # MISTAKE: no day


def without_a_loop(client: SyncClient) -> None:
    client.start(checkout, 5)  # MISTAKE: a number for the order
    client.options(delay="soon")  # MISTAKE: neither seconds nor a timedelta nor a moment
    client.options(conn="postgresql://localhost/app")  # MISTAKE: a URL is no connection
    client.start(checkout, "order").result().cents  # MISTAKE: the result is a Receipt

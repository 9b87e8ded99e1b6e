"""Planted mistakes: both checkers must complain of each line that is marked, and of no other. Never run."""

from __future__ import annotations

import asyncio

from replaykit import Client, SyncClient, Worker, now, sleep, step, workflow
from tests.typing.examples import charge, checkout, nightly, score, send_mail


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

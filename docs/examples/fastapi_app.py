"""A web service that executes its own workflows: one process, no second deployment.

    export REPLAYKIT_DATABASE_URL=postgresql://localhost/app
    replaykit db migrate && uvicorn fastapi_app:app

The worker lives in the app's lifespan: it begins before the first request and drains after the last. Bodies that block
belong into sync steps, which have threads of their own; for heavy ones run `replaykit worker` beside the service instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from replaykit import Client, RunNotFound, Worker, step, workflow


class Order(BaseModel):
    """What a customer asks for."""

    id: str
    cents: int


async def charge(order: Order) -> str:
    """A step: it would call the bank."""
    return f"{order.cents} for {order.id}"


@workflow
async def take_order(order: Order) -> str:
    """What happens to an order, whatever happens to this process."""
    return await step(charge, order)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The client that the endpoints share, and the worker that executes what they start."""
    async with Client() as client, Worker(client, workflows=[take_order]):
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def order(order: Order, request: Request) -> dict[str, Any]:
    """Start a run. A customer who sends the order twice gets the same run."""
    client: Client = request.app.state.client
    handle = await client.options(key=f"order {order.id}").start(take_order, order)
    return {"run": str(handle.id), "created": handle.created}


@app.get("/runs/{run}")
async def run(run: UUID, request: Request) -> dict[str, Any]:
    """Where a run stands."""
    client: Client = request.app.state.client
    try:
        info = await client.handle(run).info()
        result = await client.handle(run, take_order).result() if info.state == "succeeded" else None
    except RunNotFound as error:
        raise HTTPException(404, str(error)) from error
    return {"state": info.state, "result": result}

"""The workflows of the shop. They know nothing of Django's requests; the worker's command has set Django up for them."""

from __future__ import annotations

from django.db import connection

from django_shop.models import Order
from replaykit import step, workflow


def mark_paid(order: int) -> str:
    """A sync step: it runs in a thread, where Django's ORM and connections are at home."""
    try:
        Order.objects.filter(pk=order).update(paid=True)
        return str(Order.objects.get(pk=order).customer)
    finally:
        connection.close()  # the worker's threads see no end of a request, at which Django would close it


@workflow
async def fulfil(order: int) -> str:
    """What happens to an order once it is committed."""
    return await step(mark_paid, order)

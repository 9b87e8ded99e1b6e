"""A view that stores an order and starts its run: both are there, or neither."""

from __future__ import annotations

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse

from django_shop.models import Order
from django_shop.workflows import fulfil
from replaykit import SyncClient

client = SyncClient()  # opens nothing before its first use, so that servers may fork after they have imported this


def order(request: HttpRequest) -> JsonResponse:
    """Inside `atomic()` Django's own connection is open, and the run is inserted over it."""
    with transaction.atomic():
        number = Order.objects.create(customer=request.POST["customer"]).pk
        handle = client.options(key=f"order {number}", conn=connection.connection).start(fulfil, number)
        if request.POST["customer"] == "nobody":
            raise ValueError("an order needs a customer")  # neither the order nor its run was ever there
    return JsonResponse({"order": number, "run": str(handle.id)}, status=202)

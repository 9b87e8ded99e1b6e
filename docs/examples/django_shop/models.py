"""The shop's one table."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """What a customer asks for."""

    customer = models.TextField()
    paid = models.BooleanField(default=False)

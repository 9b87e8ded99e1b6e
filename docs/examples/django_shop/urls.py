"""One page."""

from __future__ import annotations

from django.urls import path

from django_shop.views import order

urlpatterns = [path("orders", order)]

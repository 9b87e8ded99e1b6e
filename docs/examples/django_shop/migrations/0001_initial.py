"""As `python -m django makemigrations django_shop` wrote it."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """The table of orders."""

    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.TextField()),
                ("paid", models.BooleanField(default=False)),
            ],
        ),
    ]

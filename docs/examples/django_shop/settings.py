"""As little of a Django project as there can be. In docs/examples, with `pip install django` and a Postgres:

    export DJANGO_SETTINGS_MODULE=django_shop.settings REPLAYKIT_DATABASE_URL=postgresql://localhost/shop
    python -m django migrate && replaykit db migrate     # the shop's tables, and replaykit's
    python -m django runserver                           # in one terminal
    python -m django run_worker                          # in another
    curl -d customer=ann localhost:8000/orders           # in a third

A project with a manage.py says `python manage.py` where this says `python -m django`.
"""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

_given = conninfo_to_dict(os.environ["REPLAYKIT_DATABASE_URL"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given["dbname"],
        "USER": _given.get("user", ""),
        "PASSWORD": _given.get("password", ""),
        "HOST": _given.get("host", ""),
        "PORT": _given.get("port", ""),
    }
}
INSTALLED_APPS = ["django_shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "django_shop.urls"
SECRET_KEY = "only for this example"
ALLOWED_HOSTS = ["*"]

"""As little of a Django project as there can be."""

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
ROOT_URLCONF = "django_shop.urls"
SECRET_KEY = "only for this example"
ALLOWED_HOSTS = ["*"]

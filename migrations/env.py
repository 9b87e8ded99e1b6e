"""Alembic's entry: runs on the connection that `replaykit.postgres.migrate` hands over, or writes a script.

All DDL is unqualified: the session's search_path is the one schema, so raw SQL and `op.create_table` land in the same
place. The version table lies in that schema too and cannot meet an application's own.
"""

from __future__ import annotations

from alembic import context

config = context.config
schema: str = config.attributes.get("schema", "replaykit")


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Alembic looks at our schema only."""
    return kind != "schema" or name == schema


if context.is_offline_mode():
    quoted = '"' + schema.replace('"', '""') + '"'
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # the driver's own style would double each percent sign
        version_table_schema=schema,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
        context.execute(f"SET LOCAL search_path TO {quoted}")
        context.run_migrations()
else:
    connection = config.attributes.get("connection")
    if connection is None:
        raise SystemExit("run `replaykit db migrate`: it takes the lock and sets the schema")
    context.configure(
        connection=connection,
        version_table="alembic_version",
        version_table_schema=schema,
        include_schemas=True,
        include_name=include_name,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()

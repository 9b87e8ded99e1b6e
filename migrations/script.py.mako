"""${message}.

Rules: unqualified DDL, one statement an `op.execute`; columns are only ever added; a change that older releases cannot
live with comes one release after the code that no longer needs the old form.
"""

from __future__ import annotations

from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """${message}."""
    ${upgrades if upgrades else "raise NotImplementedError"}

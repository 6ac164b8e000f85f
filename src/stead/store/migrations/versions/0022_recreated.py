"""Whether a VM is being recreated has a column of its own; before, it was any reason of a new VM."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("machines", sa.Column("recreated", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute(
        "UPDATE machines SET recreated = TRUE, reason = NULL WHERE state = 'creating' AND reason IS NOT NULL"
    )

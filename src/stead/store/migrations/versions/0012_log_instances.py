"""Log lines name the run of the VM that they are about."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("log_entries", sa.Column("instance", sa.String(20)))

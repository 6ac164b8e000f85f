"""Snapshots record the disk space that they take."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("size_bytes", sa.BigInteger))

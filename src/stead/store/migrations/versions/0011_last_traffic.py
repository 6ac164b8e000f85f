"""VMs have the time of their last network traffic."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("machines", sa.Column("traffic_at", sa.BigInteger))

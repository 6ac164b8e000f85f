"""VMs have the time of their last network traffic."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("machines", sa.Column("traffic_at", sa.BigInteger))


def downgrade() -> None:
    op.drop_column("machines", "traffic_at")

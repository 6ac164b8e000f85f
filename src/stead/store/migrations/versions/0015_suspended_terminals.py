"""The terminals of suspended VMs are known without waking them."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "suspended_terminals",
        sa.Column("id", sa.String(20), sa.ForeignKey("machines.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("terminals", sa.Text, nullable=False),
    )

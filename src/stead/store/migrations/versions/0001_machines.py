"""machines"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "machines",
        sa.Column("id", sa.String(20), primary_key=True),
        sa.Column("name", sa.Text),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.String(16)),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_gib", sa.Integer, nullable=False),
        sa.Column("slot", sa.Integer, nullable=False, unique=True),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("hostname", sa.String(64), nullable=False),
        sa.Column("guest_machine_id", sa.String(32), nullable=False),
        sa.Column("pid", sa.Integer),
        sa.Column("pid_started", sa.BigInteger),
        sa.Column("reason", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_machines_state", "machines", ["state"])

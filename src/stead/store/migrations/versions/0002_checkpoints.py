"""layers, snapshots, and what machines need to sleep, fork and be recreated"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "layers",
        sa.Column("id", sa.String(20), primary_key=True),
        sa.Column("parent", sa.String(20), sa.ForeignKey("layers.id")),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("file", sa.String(48), nullable=False, unique=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(23), primary_key=True),
        sa.Column("name", sa.Text),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("source_machine", sa.String(20), nullable=False),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_gib", sa.Integer, nullable=False),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("layer", sa.String(20), sa.ForeignKey("layers.id")),
        sa.Column("checkpoint", sa.String(20)),
        sa.Column("persistence", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("used_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_snapshots_state", "snapshots", ["state"])
    with op.batch_alter_table("machines") as machines:
        machines.add_column(sa.Column("top", sa.String(20)))
        machines.add_column(sa.Column("next_top", sa.String(20)))
        machines.add_column(sa.Column("layer", sa.String(20), sa.ForeignKey("layers.id", name="fk_layer")))
        machines.add_column(sa.Column("checkpoint", sa.String(20)))
        machines.add_column(sa.Column("memory_base", sa.String(64)))
        machines.add_column(sa.Column("snapshot", sa.String(23)))
        machines.add_column(sa.Column("idle_timeout", sa.Integer))
        machines.add_column(sa.Column("activity_threshold", sa.Integer, nullable=False, server_default="0"))
        machines.add_column(
            sa.Column("persistence", sa.String(16), nullable=False, server_default="persistent")
        )
        machines.add_column(sa.Column("priority", sa.Integer))
        machines.add_column(sa.Column("delete_event", sa.String(16)))
        machines.add_column(sa.Column("recreate", sa.Boolean, nullable=False, server_default=sa.false()))
        machines.add_column(sa.Column("active_at", sa.BigInteger, nullable=False, server_default="0"))

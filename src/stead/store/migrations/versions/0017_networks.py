"""Private networks (VPCs), and the VPC and address of a VM's NIC."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "vpcs",
        sa.Column("id", sa.String(24), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False, unique=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("cidr", sa.String(18), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_vpcs_account", "vpcs", ["account"])
    # With the reference in the column, the table is not copied.
    op.execute("ALTER TABLE machines ADD COLUMN vpc VARCHAR(24) REFERENCES vpcs (id)")
    op.add_column("machines", sa.Column("vpc_address", sa.String(15)))
    op.add_column("machines", sa.Column("vpc_fixed", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_machines_vpc_address", "machines", ["vpc", "vpc_address"], unique=True)

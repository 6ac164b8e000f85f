"""WireGuard sessions of VPCs, and the key of the server's end."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("vpcs", sa.Column("wireguard_key", sa.String(44)))
    op.create_table(
        "wireguard_sessions",
        sa.Column("id", sa.String(24), primary_key=True),
        sa.Column("vpc", sa.String(24), sa.ForeignKey("vpcs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("public_key", sa.String(44), nullable=False),
        sa.Column("address", sa.String(15), nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("vpc", "address"),
    )

"""WireGuard clients with keys of their own, which belong to a VM of the VPC."""

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    # With the reference in the column, the table is not copied.
    op.execute(
        "ALTER TABLE wireguard_sessions"
        " ADD COLUMN machine VARCHAR(20) REFERENCES machines (id) ON DELETE CASCADE"
    )
    op.create_index("ix_wireguard_sessions_machine", "wireguard_sessions", ["machine"])
    op.create_index("ix_wireguard_sessions_key", "wireguard_sessions", ["vpc", "public_key"], unique=True)

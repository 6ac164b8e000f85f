"""Creates that a client may repeat, by their idempotency keys; identities that belong to a repository."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("account", sa.String(36), nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("content", sa.String(64), nullable=False),
        sa.Column("request", sa.String(23), nullable=False),
        sa.Column("answer", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_idempotency_keys_account", "idempotency_keys", ["account", "created_at"])
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])
    # With the reference in the column, the table is not copied.
    op.execute("ALTER TABLE identities ADD COLUMN repo VARCHAR(36) REFERENCES repos (id) ON DELETE CASCADE")
    op.create_index("ix_identities_repo", "identities", ["repo"])

"""GitHub Apps of accounts, and repositories that are kept in step with others."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "github_apps",
        sa.Column("id", sa.String(36), sa.ForeignKey("accounts.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("app", sa.String(64), nullable=False),
        sa.Column("private_key", sa.Text, nullable=False),
        sa.Column("webhook_secret", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("api_url", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "github_links",
        sa.Column("id", sa.String(36), sa.ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("account", sa.String(36), nullable=False),
        sa.Column("github_id", sa.String(20), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("left_over", sa.Text, nullable=False),
        sa.Column("synced_at", sa.BigInteger),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("account", "github_id"),
    )
    op.create_index("ix_github_apps_app", "github_apps", ["app"])

"""Repositories, and who besides their account may use them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "repos",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "git_permissions",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column(
            "identity", sa.String(36), sa.ForeignKey("identities.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("repo", sa.String(36), sa.ForeignKey("repos.id", ondelete="CASCADE"), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("granted_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("identity", "repo"),
    )
    op.create_index("ix_repos_account", "repos", ["account"])
    op.create_index("ix_git_permissions_repo", "git_permissions", ["repo"])

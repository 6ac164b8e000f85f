"""Triggers, branches as they were last seen, and what is delivered when they change."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "triggers",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("repo", sa.String(36), sa.ForeignKey("repos.id", ondelete="CASCADE"), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("branches", sa.Text),
        sa.Column("globs", sa.Text),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "observed_refs",
        sa.Column("repo", sa.String(36), sa.ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("sha", sa.String(40), nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(36), nullable=False, unique=True),
        sa.Column("trigger", sa.String(36), sa.ForeignKey("triggers.id", ondelete="CASCADE"), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("next_at", sa.BigInteger, nullable=False),
        sa.Column("attempted_at", sa.BigInteger),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("response", sa.Text),
        sa.Column("redelivery_of", sa.String(36)),
    )
    op.create_index("ix_triggers_repo", "triggers", ["repo"])
    op.create_index("ix_deliveries_trigger", "deliveries", ["trigger", "number"])
    op.create_index("ix_deliveries_finished", "deliveries", ["finished_at", "trigger", "number"])

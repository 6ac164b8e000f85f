"""Snapshots may expire, and say what they are for. Those that exist do not expire."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

_NAME = "agent-" + "[0-9a-f]" * 16
"""The names that the client of the OpenAI Agents SDK gave to the snapshots of its sessions."""


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("expires_at", sa.BigInteger))
    op.add_column("snapshots", sa.Column("purpose", sa.String(16), nullable=False, server_default="use"))
    op.create_index("ix_snapshots_expires_at", "snapshots", ["expires_at"])
    op.execute(sa.text("UPDATE snapshots SET purpose = 'agent' WHERE name GLOB :name").bindparams(name=_NAME))

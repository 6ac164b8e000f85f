"""Domains and their owners, pending verifications, and names that lead to VMs."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "domains",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("domain", sa.String(253), nullable=False, unique=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("implicit", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "domain_verifications",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("domain", sa.String(253), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("account", "domain"),
    )
    op.create_table(
        "domain_mappings",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("domain", sa.String(253), nullable=False, unique=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("ownership", sa.String(36), sa.ForeignKey("domains.id"), nullable=False),
        sa.Column("machine", sa.String(20), sa.ForeignKey("machines.id", ondelete="CASCADE"), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_domains_account", "domains", ["account"])
    op.create_index("ix_domain_mappings_account", "domain_mappings", ["account"])
    op.create_index("ix_domain_mappings_machine", "domain_mappings", ["machine"])
    op.create_index("ix_domain_mappings_ownership", "domain_mappings", ["ownership"])

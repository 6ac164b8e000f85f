"""accounts, keys, identities, permissions, builds, logs, requests; whose machines and snapshots are"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("machines") as machines:
        machines.add_column(sa.Column("account", sa.String(36)))
        machines.add_column(sa.Column("purpose", sa.String(8), nullable=False, server_default="use"))
        machines.add_column(sa.Column("workdir", sa.Text))
        machines.add_column(sa.Column("build", sa.String(24)))
        machines.add_column(sa.Column("request", sa.String(24)))
        machines.create_index("ix_machines_account", ["account"])
    with op.batch_alter_table("snapshots") as snapshots:
        snapshots.add_column(sa.Column("account", sa.String(36)))
        snapshots.add_column(sa.Column("failure", sa.Text))
        snapshots.add_column(sa.Column("build", sa.String(24)))
        snapshots.add_column(sa.Column("template_hash", sa.String(64)))
        snapshots.add_column(sa.Column("deleted_at", sa.BigInteger))
        snapshots.create_index("ix_snapshots_account", ["account"])
        snapshots.create_index("ix_snapshots_template_hash", ["account", "template_hash"])
    op.create_table(
        "accounts",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("limits", sa.Text, nullable=False, server_default="{}"),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(20), primary_key=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("used_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
    )
    op.create_table(
        "identities",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("account", sa.String(36), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("managed", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column(
            "identity", sa.String(36), sa.ForeignKey("identities.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("used_at", sa.BigInteger),
    )
    op.create_table(
        "vm_permissions",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column(
            "identity", sa.String(36), sa.ForeignKey("identities.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("machine", sa.String(20), nullable=False),
        sa.Column("allowed_users", sa.Text),
        sa.Column("granted_at", sa.BigInteger, nullable=False),
        sa.Column("granted_by", sa.String(36), nullable=False),
        sa.UniqueConstraint("identity", "machine", name="uq_vm_permissions"),
    )
    op.create_table(
        "builds",
        sa.Column("id", sa.String(24), primary_key=True),
        sa.Column("account", sa.String(36), nullable=False),
        sa.Column("request", sa.String(24)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("template_hash", sa.String(64)),
        sa.Column("failure", sa.Text),
        sa.Column("planned_phases", sa.Text, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "build_phases",
        sa.Column("id", sa.String(24), primary_key=True),
        sa.Column("build", sa.String(24), sa.ForeignKey("builds.id", ondelete="CASCADE"), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("snapshot", sa.String(23)),
        sa.Column("started_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "log_entries",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("account", sa.String(36), nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("level", sa.String(8), nullable=False, server_default="info"),
        sa.Column("source", sa.String(16)),
        sa.Column("machine", sa.String(20)),
        sa.Column("service", sa.Text),
        sa.Column("request", sa.String(24)),
        sa.Column("build", sa.String(24)),
    )
    op.create_table(
        "background_requests",
        sa.Column("id", sa.String(23), primary_key=True),
        sa.Column("account", sa.String(36), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("answer", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("finished_at", sa.BigInteger),
    )
    op.create_index("ix_api_keys_account", "api_keys", ["account"])
    op.create_index("ix_identities_account", "identities", ["account"])
    op.create_index("ix_tokens_identity", "tokens", ["identity"])
    op.create_index("ix_vm_permissions_machine", "vm_permissions", ["machine"])
    op.create_index("ix_builds_account", "builds", ["account"])
    op.create_index("ix_builds_state", "builds", ["state"])
    op.create_index("ix_build_phases_build", "build_phases", ["build"])
    op.create_index("ix_log_entries_time", "log_entries", ["account", "at"])
    op.create_index("ix_log_entries_machine", "log_entries", ["machine", "at"])
    op.create_index("ix_log_entries_request", "log_entries", ["request", "at"])
    op.create_index("ix_log_entries_build", "log_entries", ["build", "at"])
    op.create_index("ix_background_requests_account", "background_requests", ["account"])

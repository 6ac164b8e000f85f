"""The schema. Migrations in `migrations/` upgrade a database to it."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData()

installation = Table("installation", metadata, Column("id", String(32), primary_key=True))

machines = Table(
    "machines",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("name", Text),
    Column("state", String(16), nullable=False, index=True),
    Column("step", String(16)),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_gib", Integer, nullable=False),
    Column("slot", Integer, nullable=False, unique=True),
    Column("template", String(64), nullable=False),
    Column("hostname", String(64), nullable=False),
    Column("guest_machine_id", String(32), nullable=False),
    Column("pid", Integer),
    Column("pid_started", BigInteger),
    Column("reason", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("top", String(20)),
    Column("next_top", String(20)),
    Column("layer", String(20), ForeignKey("layers.id")),
    Column("checkpoint", String(20)),
    Column("memory_base", String(64)),
    Column("snapshot", String(23)),
    Column("idle_timeout", Integer),
    Column("activity_threshold", Integer, nullable=False, server_default="0"),
    Column("persistence", String(16), nullable=False, server_default="persistent"),
    Column("priority", Integer),
    Column("delete_event", String(16)),
    Column("recreate", Boolean, nullable=False, server_default=false()),
    Column("active_at", BigInteger, nullable=False, server_default="0"),
    Column("traffic_at", BigInteger),
    Column("account", String(36), index=True),
    Column("purpose", String(8), nullable=False, server_default="use"),
    Column("workdir", Text),
    Column("build", String(24)),
    Column("request", String(24)),
)

layers = Table(
    "layers",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("parent", String(20), ForeignKey("layers.id")),
    Column("template", String(64), nullable=False),
    Column("file", String(48), nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String(23), primary_key=True),
    Column("name", Text),
    Column("state", String(16), nullable=False, index=True),
    Column("source_machine", String(20), nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_gib", Integer, nullable=False),
    Column("template", String(64), nullable=False),
    Column("layer", String(20), ForeignKey("layers.id")),
    Column("checkpoint", String(20)),
    Column("persistence", String(16), nullable=False),
    Column("priority", Integer),
    Column("created_at", BigInteger, nullable=False),
    Column("used_at", BigInteger, nullable=False),
    Column("account", String(36), index=True),
    Column("failure", Text),
    Column("build", String(24)),
    Column("template_hash", String(64)),
    Column("deleted_at", BigInteger),
    Column("size_bytes", BigInteger),
    Index("ix_snapshots_template_hash", "account", "template_hash"),
)

accounts = Table(
    "accounts",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("limits", Text, nullable=False, server_default="{}"),
    Column("created_at", BigInteger, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("account", String(36), ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", Text),
    Column("hash", String(64), nullable=False, unique=True),
    Column("hint", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("used_at", BigInteger),
    Column("revoked_at", BigInteger),
)

identities = Table(
    "identities",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("account", String(36), ForeignKey("accounts.id"), nullable=False, index=True),
    Column("managed", Boolean, nullable=False, server_default=false()),
    Column("created_at", BigInteger, nullable=False),
    Column("name", Text),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(36), primary_key=True),
    Column(
        "identity", String(36), ForeignKey("identities.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    Column("used_at", BigInteger),
)

vm_permissions = Table(
    "vm_permissions",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("identity", String(36), ForeignKey("identities.id", ondelete="CASCADE"), nullable=False),
    Column("machine", String(20), nullable=False, index=True),
    Column("allowed_users", Text),
    Column("granted_at", BigInteger, nullable=False),
    Column("granted_by", String(36), nullable=False),
    UniqueConstraint("identity", "machine", name="uq_vm_permissions"),
)

builds = Table(
    "builds",
    metadata,
    Column("id", String(24), primary_key=True),
    Column("account", String(36), nullable=False, index=True),
    Column("request", String(24)),
    Column("state", String(16), nullable=False, index=True),
    Column("template_hash", String(64)),
    Column("failure", Text),
    Column("planned_phases", Text, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("updated_at", BigInteger, nullable=False),
    Index("ix_builds_started_at", "account", "started_at"),
)

build_phases = Table(
    "build_phases",
    metadata,
    Column("id", String(24), primary_key=True),
    Column("build", String(24), ForeignKey("builds.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("position", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("snapshot", String(23)),
    Column("started_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("state", String(16), nullable=False, server_default="succeeded"),
)

log_entries = Table(
    "log_entries",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("account", String(36), nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("level", String(8), nullable=False, server_default="info"),
    Column("source", String(16)),
    Column("machine", String(20)),
    Column("service", Text),
    Column("request", String(24)),
    Column("build", String(24)),
    Column("instance", String(20)),
    Index("ix_log_entries_time", "account", "at"),
    Index("ix_log_entries_machine", "machine", "at"),
    Index("ix_log_entries_request", "request", "at"),
    Index("ix_log_entries_build", "build", "at"),
)

background_requests = Table(
    "background_requests",
    metadata,
    Column("id", String(23), primary_key=True),
    Column("account", String(36), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("status", Integer),
    Column("answer", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
)

repos = Table(
    "repos",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("account", String(36), ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", Text),
    Column("public", Boolean, nullable=False, server_default=false()),
    Column("created_at", BigInteger, nullable=False),
    Column("size", BigInteger),
    Column("lfs_size", BigInteger),
    Column("refs", Integer),
    Column("prune_at", BigInteger, index=True),
)

git_permissions = Table(
    "git_permissions",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("identity", String(36), ForeignKey("identities.id", ondelete="CASCADE"), nullable=False),
    Column("repo", String(36), ForeignKey("repos.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("level", String(8), nullable=False),
    Column("granted_at", BigInteger, nullable=False),
    UniqueConstraint("identity", "repo"),
)

triggers = Table(
    "triggers",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("repo", String(36), ForeignKey("repos.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("event", String(16), nullable=False),
    Column("branches", Text),
    Column("globs", Text),
    Column("endpoint", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

observed_refs = Table(
    "observed_refs",
    metadata,
    Column("repo", String(36), ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("sha", String(40), nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("trigger", String(36), ForeignKey("triggers.id", ondelete="CASCADE"), nullable=False),
    Column("body", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("next_at", BigInteger, nullable=False),
    Column("attempted_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("status", Integer),
    Column("error", Text),
    Column("response", Text),
    Column("redelivery_of", String(36)),
    Index("ix_deliveries_trigger", "trigger", "number"),
    Index("ix_deliveries_finished", "finished_at", "trigger", "number"),
)

github_apps = Table(
    "github_apps",
    metadata,
    Column("id", String(36), ForeignKey("accounts.id", ondelete="CASCADE"), primary_key=True),
    Column("app", String(64), nullable=False, index=True),
    Column("private_key", Text, nullable=False),
    Column("webhook_secret", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("api_url", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

github_links = Table(
    "github_links",
    metadata,
    Column("id", String(36), ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
    Column("account", String(36), nullable=False),
    Column("github_id", String(20), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", Text),
    Column("left_over", Text, nullable=False),
    Column("synced_at", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    UniqueConstraint("account", "github_id"),
)

"""The tables. Migrations in `migrations/` bring a database to this shape."""

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Integer, MetaData, String, Table, Text, false

metadata = MetaData()

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
)

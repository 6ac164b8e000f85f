"""The tables. Migrations in `migrations/` bring a database to this shape."""

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text

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
)

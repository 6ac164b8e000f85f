"""WireGuard clients end with the API key that let them in; those of earlier releases have none."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("wireguard_sessions", sa.Column("api_key", sa.String(20)))

"""Identities have names."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("identities", sa.Column("name", sa.Text))

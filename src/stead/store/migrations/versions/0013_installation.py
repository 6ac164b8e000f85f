"""The database has the id of the data folder that it belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table("installation", sa.Column("id", sa.String(32), primary_key=True))

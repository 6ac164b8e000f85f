"""An identity may belong to a VM, with which it is deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("identities", sa.Column("machine", sa.String(20)))
    op.create_index("ix_identities_machine", "identities", ["machine"])

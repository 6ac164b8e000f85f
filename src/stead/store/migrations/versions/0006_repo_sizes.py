"""How large repositories are, and when what nobody refers to is to be removed."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("repos", sa.Column("size", sa.BigInteger))
    op.add_column("repos", sa.Column("lfs_size", sa.BigInteger))
    op.add_column("repos", sa.Column("refs", sa.Integer))
    op.add_column("repos", sa.Column("prune_at", sa.BigInteger))
    op.create_index("ix_repos_prune_at", "repos", ["prune_at"])

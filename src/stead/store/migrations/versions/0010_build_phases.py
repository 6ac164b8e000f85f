"""End times and states of build phases."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("build_phases", sa.Column("finished_at", sa.BigInteger))
    op.add_column(
        "build_phases", sa.Column("state", sa.String(16), nullable=False, server_default="succeeded")
    )
    # A phase ended when the next one started; the last one ended with its build, and as its build did.
    op.execute(
        """
        UPDATE build_phases SET finished_at = coalesce(
            (SELECT min(later.started_at) FROM build_phases AS later
                WHERE later.build = build_phases.build AND later.position > build_phases.position),
            (SELECT builds.finished_at FROM builds WHERE builds.id = build_phases.build))
        """
    )
    op.execute(
        """
        UPDATE build_phases
        SET state = (SELECT replace(builds.state, 'pending', 'running') FROM builds
            WHERE builds.id = build_phases.build)
        WHERE position = (SELECT max(last.position) FROM build_phases AS last
            WHERE last.build = build_phases.build)
        """
    )
    op.create_index("ix_builds_started_at", "builds", ["account", "started_at"])

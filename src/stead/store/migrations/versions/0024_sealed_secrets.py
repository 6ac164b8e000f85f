"""Secrets are sealed from here on: `store/sealing.py` seals those of earlier releases when it has the keys.

The schema is the same. The revision keeps an earlier release from using sealed values as secrets.
"""

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    pass

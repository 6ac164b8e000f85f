"""Empty databases: migrated once and then copied, because a migration takes longer than most tests."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from stead.store import migrations
from stead.store.database import open_database

_empty = b""


async def put_database(path: Path) -> Path:
    """Make a database unless there is one."""
    global _empty
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _empty:
            await (await open_database(path)).dispose()
            _empty = path.read_bytes()
        path.write_bytes(_empty)
    return path


def migrate(path: Path, revision: str) -> None:
    """Make a database as an earlier release left it."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()

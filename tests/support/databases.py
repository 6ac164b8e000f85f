"""Empty databases: migrated once and then copied, because a migration takes longer than most tests."""

from pathlib import Path

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

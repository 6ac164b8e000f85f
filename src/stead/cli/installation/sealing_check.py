"""`stead doctor`: whether the secrets in the database can be read."""

import sqlalchemy as sa

from stead.errors import HostError
from stead.host.examination import Finding
from stead.settings import Settings
from stead.store.database import Database, pending_migration
from stead.store.installation_id import DATABASE
from stead.store.sealing import SealingError, SealingKeys, sealed_values, unreadable
from stead.tasks import in_thread

_NAME = "sealing key"
_COST = "GitHub sync and WireGuard tunnels fail; everything else works"
_REMEDY = "restore the key file from its backup; without one, run `stead secrets forget`"


async def sealing_key(settings: Settings) -> Finding:
    """The keys of the installation, and the secrets that none of them opens. Changes nothing."""
    keys = SealingKeys(settings.sealing_key_files)
    names = " or ".join(map(str, keys.files))
    try:
        ids = keys.ids
        total, lost = await _counts(settings, keys)
    except SealingError as error:
        return Finding(_NAME, "degraded", str(error), _COST, _REMEDY)
    except (HostError, OSError, sa.exc.DatabaseError) as error:
        return Finding(_NAME, "degraded", f"cannot check: {error}", "nothing is known", "run as root")
    if lost:
        return Finding(_NAME, "degraded", f"{lost} of {total} secrets have no key in {names}", _COST, _REMEDY)
    if not ids:
        return Finding(_NAME, "ok", f"none yet: the first start of the server creates {keys.files[-1]}")
    present = " and ".join(str(path) for path in keys.files if path.exists())
    return Finding(_NAME, "ok", f"{present} ({total} secrets): back it up apart from the database")


async def _counts(settings: Settings, keys: SealingKeys) -> tuple[int, int]:
    """Secrets in the database, and those that cannot be read."""
    path = settings.data / DATABASE
    if not path.exists() or await in_thread(pending_migration, path) is not None:
        return 0, 0
    database = Database(path, keys)
    try:
        with database.look_up() as connection:
            return sum(1 for _ in sealed_values(connection)), len(unreadable(connection, keys))
    finally:
        await database.dispose()

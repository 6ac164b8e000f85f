"""Quarantine: files that no row refers to are set aside and removed days later, never at once.

At start-up these are files without a row. A crash leaves such files, and so does a database that is older
than the data folder; in the second case they are VMs of users, and moving them back restores them. Later it
is saved memory that a VM could not be woken with.
"""

import os
import re
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from stead.errors import HostError
from stead.files import remove_folder, sync_folder
from stead.logs import get_logger

RETENTION = 7 * 24 * 3600.0
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")

log = get_logger("stead.quarantine")


class Quarantine:
    """The folder `quarantine` of an installation: one folder per day, with files under their old paths."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.folder = data / "quarantine"

    def keep(self, paths: Iterable[Path]) -> None:
        """Move files or folders of the installation here. Nothing may use them."""
        for path in paths:
            target = self.folder / f"{datetime.now(UTC):%Y-%m-%d}" / path.relative_to(self._data)
            number = 1
            while os.path.lexists(target):
                target = target.with_name(f"{path.name}.{number}")
                number += 1
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.rename(target)
                sync_folder(target.parent)
            except OSError as error:
                raise HostError(f"cannot move {path} to {target}: {error.strerror}") from error
            log.warning("moved a file to the quarantine", path=str(path), to=str(target))

    def prune(self) -> None:
        """Remove what has been here for longer than the retention."""
        if not self.folder.is_dir():
            return
        for day in self.folder.iterdir():
            # By the date in the name: moving a file does not change its own times.
            if _DAY.fullmatch(day.name) and time.time() - _start(day.name) > RETENTION:
                log.info("removing expired files from the quarantine", folder=str(day))
                try:
                    remove_folder(day)
                except HostError as error:
                    log.error("cannot remove expired files", folder=str(day), error=str(error))
        if not any(self.folder.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)


def _start(day: str) -> float:
    try:
        return datetime.fromisoformat(f"{day}T23:59:59+00:00").timestamp()
    except ValueError:
        return time.time()

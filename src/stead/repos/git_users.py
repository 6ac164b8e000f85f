"""The Linux users of git: one for each account, so that git of one cannot read repositories of another.

The owner of a repository's folder is the record: only root can change it.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stead.errors import HostError
from stead.files import give_to, give_tree_to
from stead.logs import get_logger

log = get_logger("stead.repos")


@dataclass(frozen=True)
class OwnedFolder:
    """A repository's folder and the account that owns the repository."""

    account: str
    path: Path


class GitUsers:
    """Accounts and their users, from a range. Accounts share users when the range has no more."""

    def __init__(self, uids: range, nobody: int) -> None:
        """`nobody` is the user of git that owns no usable repository."""
        self.uids = uids
        self._nobody = nobody
        self._of_account: dict[str, int] = {}
        self._taken: set[int] = set()

    def of(self, account: str) -> int:
        """The user of an account, which is chosen at its first repository."""
        if account not in self._of_account:
            free = next((uid for uid in self.uids if uid not in self._taken), None)
            shared = self.uids[zlib.crc32(account.encode()) % len(self.uids)]
            self._assign(account, shared if free is None else free)
        return self._of_account[account]

    def _assign(self, account: str, uid: int) -> None:
        self._of_account[account] = uid
        self._taken.add(uid)

    def take_over(self, folders: Iterable[OwnedFolder]) -> None:
        """Learn the users of accounts from their folders, and give folders with another owner to them.

        Others are those of an earlier version, or of a data folder that was restored at another path. A
        repository that cannot be given to its user is refused until the next start.
        """
        found = [(folder, owner) for folder in folders if (owner := _owner(folder.path)) is not None]
        for folder, owner in found:
            if owner in self.uids and owner not in self._taken and folder.account not in self._of_account:
                self._assign(folder.account, owner)
        for folder, owner in found:
            uid = self.of(folder.account)
            if owner != uid:
                log.warning("changing the owner of a repository", path=str(folder.path), uid=uid)
                self._give(folder.path, uid)

    def _give(self, path: Path, uid: int) -> None:
        try:
            give_tree_to(uid, path)
        except HostError as error:
            log.error("git cannot use a repository", path=str(path), error=str(error))
            give_to(self._nobody, path)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None

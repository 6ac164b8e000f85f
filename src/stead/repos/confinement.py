"""How git is confined when the server is root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _no_group(_: int) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Confinement:
    uids: range
    """The Linux users that git runs as: the first for no repository, the others for accounts."""
    enter_group: Callable[[int], Sequence[str]] = _no_group
    """The command prefix that starts a program with the resource limits of a user."""
    landlock: int = 0
    """The version of Landlock that limits git to its repository; 0 if the kernel has none."""

    @property
    def nobody(self) -> int:
        """The user of git where no account is known. It owns nothing."""
        return self.uids[0]

    @property
    def of_accounts(self) -> range:
        return self.uids[1:]

"""How git is confined when the server is root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _no_group(_: int) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Confinement:
    uids: range
    """The Linux users that git runs as: one for each account."""
    enter_group: Callable[[int], Sequence[str]] = _no_group
    """The command prefix that starts a program with the resource limits of a user."""

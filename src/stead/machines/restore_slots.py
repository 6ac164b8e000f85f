"""Restore slots: how many VMs are brought up at once, shared fairly by the accounts."""

from contextlib import AbstractAsyncContextManager

from stead.deadlines import scaled
from stead.tasks import KeyedLimit

_LONGEST = scaled(10.0)
"""Seconds. A restore takes about one; a guest whose agent does not answer would hold its slot for minutes."""


class RestoreSlots(KeyedLimit):
    """A place goes to the waiting account that holds the fewest, and back after a deadline.

    The work of a slot whose time is over continues: the slot only limits how many compete for the CPU.
    """

    def __init__(self, count: int, longest: float = _LONGEST) -> None:
        super().__init__(count)
        self._longest = longest

    def held(self, account: str | None) -> AbstractAsyncContextManager[None]:
        """Bring a VM of an account up in this block."""
        return self.hold(account, release_after=self._longest)

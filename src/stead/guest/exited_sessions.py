"""Terminals that were seen to exit: an attach after the guest has dropped one is answered 410, not 404."""

from collections import OrderedDict

_MAX_REMEMBERED = 10_000


class ExitedSessions:
    """The last terminals whose exit a client was told, in memory."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, vm_id: str, session_id: str) -> None:
        self._seen[vm_id, session_id] = None
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def discard(self, vm_id: str, session_id: str) -> None:
        """Its id is used again, or it was closed."""
        self._seen.pop((vm_id, session_id), None)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._seen

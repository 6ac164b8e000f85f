"""Log lines that are asked for again and again: which of them are new."""

from collections.abc import Iterable, Iterator

from stead.sdk.models import LogEntry


class NewLines:
    """Remembers what was seen. Servers send lines again when the time of a query includes them."""

    def __init__(self) -> None:
        self._seen: set[LogEntry] = set()
        self.newest = ""

    def among(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        for entry in entries:
            if entry not in self._seen:
                self._seen.add(entry)
                self.newest = max(self.newest, entry.timestamp)
                yield entry

    def forget_before_newest(self) -> None:
        """Drop what a query from `newest` on cannot bring again."""
        self._seen = {entry for entry in self._seen if entry.timestamp[:23] >= self.newest[:23]}

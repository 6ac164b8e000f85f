"""Deduplicates polled log lines."""

from collections.abc import Iterable, Iterator

from stead.sdk.models import LogEntry


class LogDeduplicator:
    """Yields each line once. The server sends a line again if a query's time range includes it."""

    def __init__(self) -> None:
        self._seen: set[LogEntry] = set()
        self.newest = ""

    def unseen(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """The lines that were not yielded before."""
        for entry in entries:
            if entry not in self._seen:
                self._seen.add(entry)
                self.newest = max(self.newest, entry.timestamp)
                yield entry

    def prune(self) -> None:
        """Forget lines that a query starting at `newest` cannot return."""
        self._seen = {entry for entry in self._seen if entry.timestamp[:23] >= self.newest[:23]}

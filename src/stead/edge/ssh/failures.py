"""Places for connections. No IO."""

from collections import Counter


class ConnectionPlaces:
    """Places for connections, `total` in all and `per_key` for each key."""

    def __init__(self, total: int, per_key: int) -> None:
        self._total = total
        self._per_key = per_key
        self._held: Counter[str] = Counter()

    def take(self, key: str | None) -> bool:
        """Take a place; False if there is none. The key None has no limit of its own."""
        if self._held.total() >= self._total or (key is not None and self._held[key] >= self._per_key):
            return False
        self._held[key or ""] += 1
        return True

    def release(self, key: str | None) -> None:
        self._held[key or ""] -= 1
        if not self._held[key or ""]:
            del self._held[key or ""]

"""LRU cache of search results by commit. Commits are immutable, so entries never expire."""

from collections import OrderedDict
from typing import Any

CACHE_BYTES = 64 << 20
_OVERHEAD = 500


class SearchCache:
    """LRU cache with a limit in bytes. Keys start with the repository's id."""

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self.size = 0
        self._most = most
        self._kept: OrderedDict[tuple[object, ...], tuple[Any, int]] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: tuple[object, ...], answer: Any, size: int) -> None:
        """Store a result, unless it would evict nearly all others."""
        self._drop(key)
        size += _OVERHEAD
        if size > self._most // 4:
            return
        self._kept[key] = answer, size
        self.size += size
        while self.size > self._most:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[object, ...]) -> None:
        if key in self._kept:
            self.size -= self._kept.pop(key)[1]

    def drop_repo(self, repo_id: str) -> None:
        for key in [key for key in self._kept if key[0] == repo_id]:
            self._drop(key)

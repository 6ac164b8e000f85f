"""Chains of disk layers, newest first: which of them are needed, and how many to merge."""

from collections.abc import Iterable, Mapping, Sequence


def needed(parents: Mapping[str, str | None], referenced: Iterable[str]) -> set[str]:
    """The referenced layers and all layers below them."""
    found: set[str] = set()
    for start in referenced:
        layer: str | None = start
        while layer is not None and layer not in found:
            found.add(layer)
            layer = parents.get(layer)
    return found


def how_many_to_merge(sizes: Sequence[int], limit: int) -> int:
    """How many of the newest layers to make one, so that no more than `limit` are left; 0 when none need be.

    An old layer is left alone while it is more than twice as large as all that would go into it: so what is
    written once is copied a few times in its life, and not with every layer that comes later.
    """
    if len(sizes) <= limit:
        return 0
    count = max(2, len(sizes) - limit + 1)
    while count < len(sizes) and sizes[count] <= 2 * sum(sizes[:count]):
        count += 1
    return count

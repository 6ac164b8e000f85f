"""Sentinel for "do not change" where None has a meaning."""

from enum import Enum


class Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED

"""Deadlines for slow hosts: every deadline of guests, QEMU and host commands is scaled by one setting."""

from stead.errors import InvalidRequest
from stead.settings import Settings


def _scale() -> float:
    try:
        return Settings.load().deadline_scale
    except InvalidRequest:
        return 1.0  # what loads the settings later reports the error


_SCALE = _scale()


def scaled(seconds: float) -> float:
    """A deadline on this host. Not for what a user asks for, nor for how often something is done."""
    return seconds * _SCALE

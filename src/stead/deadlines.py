"""Deadlines for slow hosts: every deadline of guests, QEMU and host commands is scaled by one setting."""

import os

from stead.errors import InvalidRequest

VARIABLE = "STEAD_DEADLINE_SCALE"
_MAX_SCALE = 1000.0


def parse_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 1.0 <= scale <= _MAX_SCALE:
        raise InvalidRequest(f"must be a number from 1 to {_MAX_SCALE:g}")
    return scale


def _from_environment() -> float:
    try:
        return parse_scale(os.environ.get(VARIABLE, "1"))
    except InvalidRequest:
        return 1.0  # Settings.load refuses it, with a message


_SCALE = _from_environment()


def scaled(seconds: float) -> float:
    """A deadline on this host. Not for what a user asks for, nor for how often something is done."""
    return seconds * _SCALE

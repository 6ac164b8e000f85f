"""Numbers as JavaScript clients send them: 2.0 for 2, and 1100.0000000000002 for 1.1 * 1000.

JSON has one number type, so a client that computes a value may send any of these where the server wants an
integer. Counts must be whole; durations and byte counts are rounded to the nearest unit.
"""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

_TOLERANCE = 1e-9
"""Relative error of floating-point arithmetic that is not a fraction the client meant."""


def _whole(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        nearest = round(value)
        if abs(value - nearest) > _TOLERANCE * max(1.0, abs(value)):
            raise ValueError(f"must be a whole number, not {value:g}")
        return nearest
    return value


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        # A positive value never becomes 0, which has a meaning of its own for most timeouts and limits.
        return max(1, round(value)) if value > 0 else math.floor(value)
    return value


def _gigabytes(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value * 1024):
        nearest = round(value * 1024) / 1024
        return nearest if abs(value - nearest) <= _TOLERANCE * max(1.0, abs(value)) else value
    return value


Count = Annotated[int, BeforeValidator(_whole)]
"""A count (of vCPUs, lines, forks): 2.0 is 2, and 2.5 is refused."""
Rounded = Annotated[int, BeforeValidator(_rounded)]
"""A duration or a number of bytes in whole units: 1100.0000000000002 is 1100, 0.2 is 1."""
Gigabytes = Annotated[float, BeforeValidator(_gigabytes)]
"""A size in GiB: 4.000000000000001 is 4; other fractions stay for the size rules to judge."""

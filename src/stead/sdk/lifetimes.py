"""Lifetimes in requests: for a time from now, or until a date."""

import math
from datetime import datetime, timedelta
from typing import Any

from stead.sdk.exceptions import InvalidArgument
from stead.sdk.requests import UNSET, Unset

Ttl = float | timedelta


def lifetime_to_wire(ttl: Ttl | None, expires_at: datetime | Unset | None) -> dict[str, Any]:
    """The keys of a lifetime. A time without a zone is local time; None is no end."""
    if ttl is not None and expires_at is not UNSET and expires_at is not None:
        raise InvalidArgument("give either ttl or expires_at, not both")
    if ttl is not None:
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        return {"ttlSeconds": math.ceil(seconds)}
    if isinstance(expires_at, datetime):
        return {"expiresAt": expires_at.astimezone().isoformat()}
    return {} if expires_at is UNSET else {"expiresAt": None}

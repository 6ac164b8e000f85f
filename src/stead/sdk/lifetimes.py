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
        if not math.isfinite(seconds):
            raise InvalidArgument(f"ttl must be a number of seconds, not {seconds}; leave it out for no end")
        return {"ttlSeconds": math.ceil(seconds)}
    if isinstance(expires_at, datetime):
        try:
            return {"expiresAt": expires_at.astimezone().isoformat()}
        except (OverflowError, ValueError) as error:
            raise InvalidArgument(f"expires_at {expires_at} is not a date in local time: {error}") from None
    return {} if expires_at is UNSET else {"expiresAt": None}

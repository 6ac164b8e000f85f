"""Wire fields of lifetimes."""

from pydantic import AwareDatetime, Field

from stead.api.wire.numbers import Rounded
from stead.api.wire.unknown import Tracked
from stead.machines.lifetimes import MAX_TTL, Lifetime


class LifetimeFields(Tracked):
    """When something is deleted by itself: after a time, or at a date. With neither, never."""

    ttl_seconds: Rounded | None = Field(
        default=None, ge=1, le=MAX_TTL, description="Delete it after this many seconds."
    )
    expires_at: AwareDatetime | None = Field(
        default=None, description="Delete it at this time, instead of `ttlSeconds`."
    )

    def lifetime(self) -> Lifetime:
        return Lifetime(self.ttl_seconds, None if self.expires_at is None else self.expires_at.timestamp())

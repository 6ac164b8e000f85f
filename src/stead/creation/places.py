"""Places for creates, builds and background requests: a bound in all, and a share of it for each account."""

from collections.abc import Callable

from stead.deadlines import scaled
from stead.errors import TooBusy
from stead.settings import Settings
from stead.shares import KeyedLimit, share_of

_CREATE_WAIT = scaled(30.0)
"""Seconds that a create waits for a place: about as long as a load balancer waits for an answer."""
_BUILD_WAIT = scaled(600.0)
"""Seconds that a build waits for a place: others of the same account may take half an hour each."""
_WAITING = 4
"""Calls of an account that wait, for each of its places; more are refused at once."""


def create_places(settings: Settings) -> KeyedLimit:
    """For VMs that are being created or forked."""
    return _places(settings.max_creations, _CREATE_WAIT, "VMs are being created", "STEAD_MAX_CREATIONS")


def build_places(settings: Settings) -> KeyedLimit:
    """For layers and VMs that are being set up: that runs commands of the account for up to half an hour."""
    return _places(settings.max_builds, _BUILD_WAIT, "builds are running", "STEAD_MAX_BUILDS")


def background_places(settings: Settings) -> KeyedLimit:
    """For requests that continue without their call. One that has no place is refused at once."""
    return _places(settings.max_background, 0, "background requests are in progress", "STEAD_MAX_BACKGROUND")


def _places(most: int, wait: float, what: str, setting: str) -> KeyedLimit:
    share = share_of(most)
    return KeyedLimit(
        most, share, max_waiting=_WAITING * share, max_wait=wait, busy=_busy(most, share, what, setting)
    )


def _busy(most: int, share: int, what: str, setting: str) -> Callable[[], TooBusy]:
    def busy() -> TooBusy:
        return TooBusy(
            f"too many {what}: at most {share} for an account and {most} in all ({setting}); try again in 5 s"
        )

    return busy

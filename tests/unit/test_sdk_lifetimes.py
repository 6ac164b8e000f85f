"""Lifetimes that the SDK sends."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from stead.sdk.exceptions import InvalidArgument
from stead.sdk.lifetimes import lifetime_to_wire
from stead.sdk.requests import UNSET


@pytest.mark.parametrize("ttl", [math.inf, -math.inf, math.nan])
def test_a_ttl_that_is_no_number_of_seconds_is_refused(ttl: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl must be a number of seconds"):
        lifetime_to_wire(ttl, UNSET)


def test_ttls_are_rounded_up() -> None:
    assert lifetime_to_wire(0.2, UNSET) == {"ttlSeconds": 1}
    assert lifetime_to_wire(timedelta(days=1), UNSET) == {"ttlSeconds": 86400}


def test_the_last_date_that_python_knows_is_sent_or_refused() -> None:
    for zone in (None, UTC):
        try:
            assert lifetime_to_wire(None, datetime.max.replace(tzinfo=zone))["expiresAt"].startswith("9999")
        except InvalidArgument as error:
            assert "is not a date in local time" in str(error)

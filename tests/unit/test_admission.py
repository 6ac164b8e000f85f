"""Admission of calls: shares of accounts, identities and addresses, and rates, without IO."""

import contextlib

import pytest

from stead.api.admission import Admission
from stead.api.errors import ApiError
from stead.identity.callers import Caller
from stead.shares import Release

LARGE = 1_000_000
"""A rate that no test reaches."""


def refused(error: pytest.ExceptionInfo[ApiError], status: int) -> None:
    assert (error.value.code, error.value.status) == ("SERVICE_UNAVAILABLE", status)
    assert error.value.headers is not None and int(error.value.headers["Retry-After"]) >= 1
    assert error.value.extras["retryable"] is True


async def filled(admission: Admission, *callers: Caller) -> list[Release]:
    """Places of the callers in turns, until all are refused."""
    places = []
    waiting = list(callers)
    while waiting:
        for caller in tuple(waiting):
            try:
                places.append(await admission.place(caller))
            except ApiError:
                waiting.remove(caller)
    return places


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stead.api.admission._MAX_WAIT", 0)


async def test_an_account_has_a_quarter_of_the_places() -> None:
    admission = Admission(100, LARGE, LARGE)
    places = await filled(admission, Caller("greedy"))
    assert len(places) == 25
    release = await admission.place(Caller("victim"))
    release()
    with pytest.raises(ApiError) as error:
        await admission.place(Caller("greedy"))
    refused(error, 503)
    places[0]()
    await admission.place(Caller("greedy"))


async def test_an_identity_has_half_of_its_account() -> None:
    admission = Admission(100, LARGE, LARGE)
    assert len(await filled(admission, Caller("account", "agent"))) == 12
    assert len(await filled(admission, Caller("account"))) == 13


async def test_strangers_take_no_places_of_accounts() -> None:
    admission = Admission(800, LARGE, LARGE)
    places = []
    for number in range(100):
        for _ in range(100):
            try:
                places.append(await admission.anonymous_place(f"198.51.100.{number}"))
            except ApiError:
                break
    assert len(places) == 100
    assert len(await filled(admission, Caller("a"), Caller("b"), Caller("c"), Caller("d"))) == 800


async def test_strangers_take_no_places_of_webhooks() -> None:
    admission = Admission(800, LARGE, LARGE)
    for number in range(100):
        with contextlib.suppress(ApiError):
            while True:
                await admission.anonymous_place(f"198.51.100.{number}")
    with pytest.raises(ApiError) as error:
        await admission.anonymous_place("192.30.252.1")
    refused(error, 503)
    await admission.webhook_place("192.30.252.1")


async def test_addresses_of_one_network_share_places() -> None:
    admission = Admission(800, LARGE, LARGE)
    places = []
    for number in range(30):
        try:
            places.append(await admission.anonymous_place(f"2001:db8::{number:x}"))
        except ApiError:
            break
    assert len(places) == 12
    await admission.anonymous_place("2001:db8:0:1::1")


async def test_an_account_that_calls_too_often_is_told_when_to_retry() -> None:
    admission = Admission(100, 5, LARGE)
    for _ in range(50):
        admission.count(Caller("greedy"))
    with pytest.raises(ApiError) as error:
        admission.count(Caller("greedy"))
    refused(error, 429)
    admission.count(Caller("victim"))


async def test_an_identity_that_calls_too_often_leaves_calls_to_its_account() -> None:
    admission = Admission(100, 10, LARGE)
    for _ in range(50):
        admission.count(Caller("account", "agent"))
    with pytest.raises(ApiError) as error:
        admission.count(Caller("account", "agent"))
    refused(error, 429)
    admission.count(Caller("account"))


async def test_an_address_that_calls_too_often_without_a_credential_is_refused() -> None:
    admission = Admission(100, LARGE, 5)
    for _ in range(50):
        admission.count_anonymous("198.51.100.7")
    with pytest.raises(ApiError) as error:
        admission.count_anonymous("198.51.100.7")
    refused(error, 429)
    admission.count_anonymous("198.51.100.8")

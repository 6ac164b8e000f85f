"""Places for git: bounds by account, caller, owner and address, without IO."""

import contextlib

import pytest

from stead.repos.errors import RepoBusy
from stead.repos.places import GitCaller, GitPlaces, RepoPlaces, Work


async def held(places: GitPlaces, stack: contextlib.AsyncExitStack, owner: str, user: GitCaller) -> int:
    """How many places a caller gets in repositories of an owner."""
    count = 0
    with contextlib.suppress(RepoBusy):
        while count < 100:
            await stack.enter_async_context(places.hold(owner, user))
            count += 1
    return count


async def test_a_caller_leaves_places_to_its_account_and_to_other_accounts() -> None:
    places = GitPlaces(Work.CALL, 24, max_wait=0)
    async with contextlib.AsyncExitStack() as stack:
        assert await held(places, stack, "a", GitCaller("a", "identity")) == 6
        assert await held(places, stack, "a", GitCaller("a")) == 2
        assert await held(places, stack, "b", GitCaller("b")) == 6
        with pytest.raises(RepoBusy, match="too many git processes"):
            await stack.enter_async_context(places.hold("a", GitCaller("a")))
    async with contextlib.AsyncExitStack() as stack:
        assert await held(places, stack, "a", GitCaller("a")) == 6


async def test_visitors_take_no_places_of_the_owner() -> None:
    places = GitPlaces(Work.TRANSFER, 24, max_wait=0)
    async with contextlib.AsyncExitStack() as stack:
        assert await held(places, stack, "owner", GitCaller("b")) == 4
        assert await held(places, stack, "owner", GitCaller("c")) == 4
        assert await held(places, stack, "owner", GitCaller("d")) == 0
        assert await held(places, stack, "owner", GitCaller("owner")) == 6
        assert await held(places, stack, "b", GitCaller("b")) == 2


async def test_callers_without_credentials_have_a_small_pool() -> None:
    places = GitPlaces(Work.TRANSFER, 24, max_wait=0)
    async with contextlib.AsyncExitStack() as stack:
        assert await held(places, stack, "a", GitCaller(None, address="192.0.2.1")) == 3
        assert await held(places, stack, "b", GitCaller(None, address="192.0.2.2")) == 3
        assert await held(places, stack, "c", GitCaller(None, address="192.0.2.3")) == 0
        assert await held(places, stack, "a", GitCaller("a")) == 6


async def test_kinds_of_work_have_separate_places() -> None:
    places = RepoPlaces({work: GitPlaces(work, 1, max_wait=0) for work in Work})
    holder = places.of("a", GitCaller("a"))
    async with holder.hold(Work.CALL), holder.hold(Work.TRANSFER), holder.hold(Work.OBJECT):
        with pytest.raises(RepoBusy, match="too many LFS transfers"):
            async with holder.hold(Work.OBJECT):
                pass

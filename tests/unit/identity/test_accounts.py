"""Accounts, their keys and their limits."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import InvalidRequest
from stead.identity.accounts import Account, Accounts
from stead.identity.errors import AccountExists, AccountNotFound, KeyNotFound
from stead.limits import LIMIT_NAMES, Limits
from stead.store.accounts import AccountRow, AccountStore, api_keys
from support.accounts import NOWHERE, Installation, attempt

# Accounts and keys


async def test_accounts_are_found_by_id_and_by_name(here: Installation) -> None:
    first, second = await here.accounts.create("first"), await here.accounts.create("second")
    assert await here.accounts.get(first.id) == await here.accounts.by_name("first") == first
    assert await here.accounts.list() == [first, second]
    for missing in (here.accounts.get(NOWHERE), here.accounts.by_name("third")):
        with pytest.raises(AccountNotFound):
            await missing
    with pytest.raises(AccountExists):
        await here.accounts.create("first")


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "a\n", "ä", "a" * 101, "a/b", "a\x1b[31m"])
async def test_invalid_account_names_are_refused(here: Installation, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await here.accounts.create(name)
    assert await here.accounts.list() == []


async def test_concurrent_creates_of_one_account_name(here: Installation, there: Installation) -> None:
    both = (here.accounts, there.accounts)
    results = await asyncio.gather(*(attempt(both[number % 2].create("same")) for number in range(6)))
    assert sum(isinstance(result, Account) for result in results) == 1
    assert sum(isinstance(result, AccountExists) for result in results) == 5
    defaults = await asyncio.gather(*(both[number % 2].default() for number in range(6)))
    assert len({account.id for account in defaults}) == 1
    assert len(await here.accounts.list()) == 2


async def test_keys_are_listed_with_a_hint_until_revoked(
    here: Installation, ours: Account, theirs: Account
) -> None:
    first, secret = await here.accounts.create_key(ours.id, "laptop")
    second, _ = await here.accounts.create_key(theirs.id)
    assert secret.startswith(first.hint) and len(first.hint) == 10
    assert (first.name, second.name) == ("laptop", None)
    assert await here.accounts.keys() == [first, second]
    assert await here.accounts.keys(ours.id) == [first]

    revoked = await here.accounts.revoke_key(first.id)
    assert revoked.revoked_at is not None
    assert await here.accounts.keys(ours.id) == []
    assert await here.accounts.keys(ours.id, revoked=True) == [revoked]
    assert await here.accounts.revoke_key(first.id) == revoked, "the time of the first revocation stays"


async def test_key_is_revoked_by_a_unique_id_prefix(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["abcd0" + "0" * 15, "abcd1" + "0" * 15, "ef%_" + "0" * 16])
    monkeypatch.setattr("stead.identity.accounts.secrets.token_hex", lambda _: next(ids))
    keys = [(await here.accounts.create_key(ours.id))[0] for _ in range(3)]
    for none in ("", "abc", "b", "%", "____", "ABCD0", "0000", "abcd2"):
        with pytest.raises(KeyNotFound):
            await here.accounts.revoke_key(none)
    with pytest.raises(InvalidRequest, match="2 key ids start with abcd"):
        await here.accounts.revoke_key("abcd")
    assert (await here.accounts.revoke_key("abcd1")).id == keys[1].id
    assert (await here.accounts.revoke_key("abcd")).id == keys[0].id, "the other one counts no more"
    assert await here.accounts.keys(ours.id) == [keys[2]]


async def test_create_key_needs_an_existing_account(here: Installation, ours: Account) -> None:
    with pytest.raises(AccountNotFound):
        await here.accounts.create_key(NOWHERE)
    for name in ("", " ", "a\nb", "\x1b[31m", "x" * 201):
        with pytest.raises(InvalidRequest):
            await here.accounts.create_key(ours.id, name)
    assert await here.count(api_keys) == 0


# Limits


async def test_account_limits_override_the_installations(here: Installation) -> None:
    accounts = Accounts(here.database, Limits(vms=10, vcpus=8))
    account = await accounts.create("small", {"vms": 2, "disk_gib": 40, "vcpus": None})
    assert account.limits == Limits(vms=2, vcpus=None, disk_gib=40)
    assert account.own_limits == {"vms": 2, "disk_gib": 40, "vcpus": None}

    account = await accounts.set_limits(account.id, {"running": 0}, unset=["vms", "vcpus", "snapshots"])
    assert account.limits == Limits(vms=10, vcpus=8, disk_gib=40, running=0)
    assert await accounts.get(account.id) == account
    stricter = Accounts(here.database, Limits(vms=1))
    assert (await stricter.get(account.id)).limits == Limits(vms=1, disk_gib=40, running=0)


@pytest.mark.parametrize("limits", [{"vms": -1}, {"vms": True}, {"vms": 1.5}, {"vms": "1"}, {"cores": 1}])
async def test_invalid_limits_are_refused(here: Installation, ours: Account, limits: dict[str, Any]) -> None:
    for work in (here.accounts.create("new", limits), here.accounts.set_limits(ours.id, limits)):
        with pytest.raises(InvalidRequest, match=next(iter(limits))):
            await work
    with pytest.raises(InvalidRequest, match="cores"):
        await here.accounts.set_limits(ours.id, {}, unset=["cores"])
    assert await here.accounts.list() == [ours]


async def test_unknown_limits_of_a_newer_version_are_kept(here: Installation) -> None:
    store = AccountStore(here.database)
    await store.add(AccountRow(NOWHERE, "old", '{"bandwidth": 5, "vms": 3}'))
    account = await here.accounts.get(NOWHERE)
    assert (account.limits, account.own_limits) == (Limits(vms=3), {"vms": 3})
    await here.accounts.set_limits(NOWHERE, {"vms": 4})
    row = await store.get(NOWHERE)
    assert row is not None and row.limits == '{"bandwidth": 5, "vms": 4}'


async def test_concurrent_limit_changes_are_all_applied(
    here: Installation, there: Installation, ours: Account
) -> None:
    wanted = {name: number for number, name in enumerate(LIMIT_NAMES)}
    both = itertools.cycle((here.accounts, there.accounts))
    await asyncio.gather(*(next(both).set_limits(ours.id, {name: number}) for name, number in wanted.items()))
    assert (await here.accounts.get(ours.id)).own_limits == wanted


async def test_set_limits_of_a_missing_account(here: Installation) -> None:
    with pytest.raises(AccountNotFound):
        await here.accounts.set_limits(NOWHERE, {"vms": 1})


@given(
    defaults=st.fixed_dictionaries(
        {}, optional={name: st.none() | st.integers(0, 99) for name in LIMIT_NAMES}
    ),
    own=st.fixed_dictionaries({}, optional={name: st.none() | st.integers(0, 99) for name in LIMIT_NAMES}),
)
def test_effective_limits_property(defaults: dict[str, int | None], own: dict[str, int | None]) -> None:
    limits = Limits.from_json(json.dumps(own), Limits(**defaults))
    assert limits == Limits(**{**defaults, **own})

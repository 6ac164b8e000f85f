"""Identities and their permissions, also concurrently."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stead.errors import InvalidRequest, MachineNotFound, SteadError
from stead.identity.accounts import Account
from stead.identity.callers import Caller
from stead.identity.errors import (
    AccountNotFound,
    IdentityNotFound,
    ManagedIdentity,
    PermissionExists,
    PermissionNotFound,
    TokenNotFound,
    UserNotAllowed,
)
from stead.identity.identities import Identities, Identity, Permission
from stead.store.identities import PermissionStore, TokenStore, tokens, vm_permissions
from support.accounts import NOWHERE, Installation, attempt

# Identities


async def test_identities_are_paged(here: Installation, ours: Account, theirs: Account) -> None:
    made = [await here.identities.create(ours.id) for _ in range(7)]
    await here.identities.create(theirs.id)
    pages = [await here.identities.list(ours.id, limit=3, offset=offset) for offset in (0, 3, 6, 9)]
    assert [identity for page in pages for identity in page.items] == made
    assert [len(page.items) for page in pages] == [3, 3, 1, 0]
    assert {page.total for page in pages} == {7}
    assert [page.offset for page in pages] == [0, 3, 6, 9]
    assert (await here.identities.list(NOWHERE)).total == 0


async def test_permissions_are_paged(here: Installation, ours: Account) -> None:
    identity = await here.identities.create(ours.id)
    machines = [here.machine(ours, f"m{number}") for number in range(5)]
    made = [await here.identities.grant(ours.id, identity.id, machine) for machine in machines]
    pages = [
        await here.identities.permissions(ours.id, identity.id, limit=2, offset=offset)
        for offset in (0, 2, 4, 6)
    ]
    assert [permission for page in pages for permission in page.items] == made
    assert {page.total for page in pages} == {5}


async def test_managed_identity_is_listed_on_request_and_cannot_be_deleted(
    here: Installation, ours: Account
) -> None:
    managed = await here.identities.create(ours.id, managed=True)
    plain = await here.identities.create(ours.id)
    assert (await here.identities.list(ours.id)).items == [plain]
    assert (await here.identities.list(ours.id)).total == 1
    assert (await here.identities.list(ours.id, managed=True)).items == [managed, plain]
    with pytest.raises(ManagedIdentity):
        await here.identities.delete(ours.id, managed.id)
    assert await here.identities.get(ours.id, managed.id) == managed


async def test_create_identity_needs_an_existing_account(here: Installation) -> None:
    with pytest.raises(AccountNotFound):
        await here.identities.create(NOWHERE)


async def test_delete_identity_deletes_its_tokens_and_permissions(here: Installation, ours: Account) -> None:
    machine = here.machine(ours)
    gone, kept = [await here.identities.create(ours.id) for _ in range(2)]
    secrets = []
    for identity in (gone, kept):
        secrets += [(await here.identities.create_token(ours.id, identity.id))[1] for _ in range(2)]
        await here.identities.grant(ours.id, identity.id, machine)
    await here.identities.delete(ours.id, gone.id)
    assert (await here.count(tokens), await here.count(vm_permissions)) == (2, 1)
    assert [await here.callers.authenticate(secret) for secret in secrets[:2]] == [None, None]
    assert await here.identities.permission(gone.id, machine) is None
    assert await here.identities.granted(gone.id) == set()
    assert await here.identities.granted(kept.id) == {machine}
    with pytest.raises(IdentityNotFound):
        await here.identities.delete(ours.id, gone.id)


OPERATIONS: dict[str, Callable[[Identities, str, str, str, str], Coroutine[Any, Any, object]]] = {
    "get": lambda room, account, identity, token, machine: room.get(account, identity),
    "delete": lambda room, account, identity, token, machine: room.delete(account, identity),
    "create_token": lambda room, account, identity, token, machine: room.create_token(account, identity),
    "tokens": lambda room, account, identity, token, machine: room.tokens(account, identity),
    "revoke_token": lambda room, account, identity, token, machine: room.revoke_token(
        account, identity, token
    ),
    "grant": lambda room, account, identity, token, machine: room.grant(account, identity, machine),
    "update": lambda room, account, identity, token, machine: room.update(account, identity, machine, None),
    "revoke": lambda room, account, identity, token, machine: room.revoke(account, identity, machine),
    "get_permission": lambda room, account, identity, token, machine: room.get_permission(
        account, identity, machine
    ),
    "permissions": lambda room, account, identity, token, machine: room.permissions(account, identity),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_identity_of_another_account_is_not_found(
    here: Installation, ours: Account, theirs: Account, operation: str
) -> None:
    identity = await here.identities.create(ours.id)
    token, secret = await here.identities.create_token(ours.id, identity.id)
    machine = here.machine(ours)
    granted = await here.identities.grant(ours.id, identity.id, machine, ["alice"])
    foreign = here.machine(theirs, "m2")

    answers = []
    for target in (identity.id, NOWHERE):
        for each in (machine, foreign):
            with pytest.raises(IdentityNotFound) as caught:
                await OPERATIONS[operation](here.identities, theirs.id, target, token.id, each)
            answers.append(str(caught.value).replace(target, "?"))
    assert len(set(answers)) == 1
    assert await here.identities.get_permission(ours.id, identity.id, machine) == granted
    assert await here.callers.authenticate(secret) == Caller(ours.id, identity.id)
    assert await here.count(vm_permissions) == 1
    assert await here.count(tokens) == 1


async def test_token_of_another_identity_cannot_be_revoked(here: Installation, ours: Account) -> None:
    one, two = [await here.identities.create(ours.id) for _ in range(2)]
    token, secret = await here.identities.create_token(ours.id, one.id)
    for identity, wrong in ((two.id, token.id), (one.id, NOWHERE), (one.id, secret)):
        with pytest.raises(TokenNotFound):
            await here.identities.revoke_token(ours.id, identity, wrong)
    assert [each.id for each in await here.identities.tokens(ours.id, one.id)] == [token.id]
    assert await here.identities.tokens(ours.id, two.id) == []
    await here.identities.revoke_token(ours.id, one.id, token.id)
    with pytest.raises(TokenNotFound):
        await here.identities.revoke_token(ours.id, one.id, token.id)


# Permissions


async def test_permission_is_granted_updated_and_revoked(here: Installation, ours: Account) -> None:
    identity = await here.identities.create(ours.id)
    machine = here.machine(ours)
    assert await here.identities.permission(identity.id, machine) is None

    granted = await here.identities.grant(ours.id, identity.id, machine, ["alice", "bob", "alice"])
    assert granted.allowed_users == ("alice", "bob")
    assert (granted.identity, granted.machine, granted.granted_by) == (identity.id, machine, ours.id)
    assert abs(granted.granted_at - time.time()) < 60
    assert await here.identities.permission(identity.id, machine) == granted
    with pytest.raises(PermissionExists):
        await here.identities.grant(ours.id, identity.id, machine)

    changed = await here.identities.update(ours.id, identity.id, machine, None)
    assert (changed.allowed_users, changed.id) == (None, granted.id)
    assert await here.identities.get_permission(ours.id, identity.id, machine) == changed

    await here.identities.revoke(ours.id, identity.id, machine)
    assert await here.identities.granted(identity.id) == set()
    for work in (
        here.identities.revoke(ours.id, identity.id, machine),
        here.identities.update(ours.id, identity.id, machine, None),
        here.identities.get_permission(ours.id, identity.id, machine),
    ):
        with pytest.raises(PermissionNotFound):
            await work


async def test_grant_needs_a_vm_of_the_same_account(
    here: Installation, ours: Account, theirs: Account
) -> None:
    identity = await here.identities.create(ours.id)
    foreign = here.machine(theirs)
    for machine in (foreign, "nowhere"):
        with pytest.raises(MachineNotFound) as caught:
            await here.identities.grant(ours.id, identity.id, machine)
        assert str(caught.value) == f"VM {machine} not found"
    assert await here.count(vm_permissions) == 0


async def test_grant_during_a_vm_delete_leaves_no_permission(here: Installation, ours: Account) -> None:
    identity = await here.identities.create(ours.id)
    answers = iter([True, False])

    async def owns(_account: str, _machine: str) -> bool:
        return next(answers)

    with pytest.raises(MachineNotFound):
        await Identities(here.database, owns).grant(ours.id, identity.id, "m1")
    assert await here.count(vm_permissions) == 0


async def test_forget_machine_deletes_all_its_permissions(here: Installation, ours: Account) -> None:
    one, two = [await here.identities.create(ours.id) for _ in range(2)]
    for identity, machine in itertools.product((one, two), ("m1", "m2")):
        await here.identities.grant(ours.id, identity.id, here.machine(ours, machine))
    await here.identities.delete_machine_permissions("m1")
    assert [await here.identities.granted(each.id) for each in (one, two)] == [{"m2"}, {"m2"}]


async def test_identity_that_was_made_for_a_vm_is_deleted_with_it(here: Installation, ours: Account) -> None:
    """Also at the next start, when a crash came between the two."""
    plain = await here.identities.create(ours.id)
    one, two = [await here.identities.create(ours.id, managed=True, machine=name) for name in ("m1", "m2")]
    _, secret = await here.identities.create_token(ours.id, one.id)
    caller = await here.callers.authenticate(secret)
    assert caller is not None
    assert caller.identity == one.id
    await here.identities.delete_machine_identities("m1")
    assert await here.count(tokens) == 0
    assert (await here.identities.list(ours.id, managed=True)).items == [plain, two]
    await here.identities.recover()
    assert (await here.identities.list(ours.id, managed=True)).items == [plain]


@pytest.mark.parametrize(
    ("allowed", "wanted", "user"),
    [
        (None, None, None),
        (None, "alice", "alice"),
        (("alice",), None, "alice"),
        (("alice",), "", "alice"),
        (("alice",), "alice", "alice"),
        (("alice", "bob"), "bob", "bob"),
        (("alice",), "root", UserNotAllowed),
        (("alice",), "ALICE", UserNotAllowed),
        (("alice",), "alice ", UserNotAllowed),
        (("alice", "bob"), None, UserNotAllowed),
        (("alice", "bob"), "", UserNotAllowed),
        ((), None, UserNotAllowed),
        ((), "root", UserNotAllowed),
    ],
)
def test_allowed_users_of_a_permission(
    allowed: tuple[str, ...] | None, wanted: str | None, user: str | type[SteadError] | None
) -> None:
    permission = Permission("p", "i", "m", allowed, 0.0, "a")
    if isinstance(user, type):
        with pytest.raises(user):
            permission.user(wanted)
    else:
        assert permission.user(wanted) == user


@pytest.mark.parametrize(
    "users",
    [[""], ["a b"], ["a:b"], ["../a"], ["a\n"], ["-a"], ["\x00"], ["\ud800"], ["a" * 257], ["a"] * 1001],
)
async def test_invalid_linux_users_are_refused(here: Installation, ours: Account, users: list[str]) -> None:
    identity = await here.identities.create(ours.id)
    machine = here.machine(ours)
    with pytest.raises(InvalidRequest):
        await here.identities.grant(ours.id, identity.id, machine, users)
    granted = await here.identities.grant(ours.id, identity.id, machine, ["www-data", "user@example.org"])
    with pytest.raises(InvalidRequest):
        await here.identities.update(ours.id, identity.id, machine, users)
    assert await here.identities.permission(identity.id, machine) == granted


# Concurrency


async def test_concurrent_grants_succeed_once(here: Installation, there: Installation, ours: Account) -> None:
    for number in range(10):
        identity = await here.identities.create(ours.id)
        machine = here.machine(ours, f"m{number}")
        rooms = (here.identities, there.identities, here.identities, there.identities)
        results = await asyncio.gather(
            *(attempt(room.grant(ours.id, identity.id, machine)) for room in rooms)
        )
        assert sum(isinstance(result, Permission) for result in results) == 1
        assert sum(isinstance(result, PermissionExists) for result in results) == 3


async def test_operations_during_an_identity_delete_leave_no_rows(
    here: Installation, there: Installation, ours: Account
) -> None:
    machine = here.machine(ours)
    for _ in range(10):
        identity = await here.identities.create(ours.id)
        results = await asyncio.gather(
            attempt(here.identities.grant(ours.id, identity.id, machine)),
            attempt(here.identities.create_token(ours.id, identity.id)),
            attempt(there.identities.delete(ours.id, identity.id)),
            attempt(here.identities.delete(ours.id, identity.id)),
        )
        assert sorted(str(result) for result in results[2:]) == ["None", f"no identity {identity.id}"]
        for result in results[:2]:
            assert isinstance(result, (Permission, tuple, IdentityNotFound))
    assert (await here.count(tokens), await here.count(vm_permissions)) == (0, 0)


async def test_identity_deleted_before_the_insert_is_not_found(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete between the lookup and the insert."""
    machine = here.machine(ours)
    for store in (TokenStore, PermissionStore):
        identity = await here.identities.create(ours.id)
        add: Any = store.add

        async def late(self: Any, row: Any, add: Any = add, identity: Identity = identity) -> Any:
            await here.identities.delete(ours.id, identity.id)
            return await add(self, row)

        monkeypatch.setattr(store, "add", late)
        with pytest.raises(IdentityNotFound):
            if store is TokenStore:
                await here.identities.create_token(ours.id, identity.id)
            else:
                await here.identities.grant(ours.id, identity.id, machine)

"""Accounts, keys, identities, tokens and permissions, on a real database file."""

import asyncio
import contextlib
import itertools
import json
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stead.errors import InvalidRequest, MachineNotFound, SteadError
from stead.identity.accounts import LIMIT_NAMES, Account, Accounts
from stead.identity.callers import Caller, Callers
from stead.identity.errors import (
    AccountExists,
    AccountNotFound,
    IdentityNotFound,
    KeyNotFound,
    ManagedIdentity,
    PermissionExists,
    PermissionNotFound,
    TokenNotFound,
    UserNotAllowed,
)
from stead.identity.identities import Identities, Identity, Permission
from stead.limits import Limits
from stead.store.accounts import AccountRow, AccountStore, KeyStore
from stead.store.database import Database, open_database
from stead.store.identities import PermissionStore, TokenStore
from stead.store.tables import api_keys, tokens, vm_permissions

T = TypeVar("T")
NOWHERE = "00000000-0000-4000-8000-000000000000"


class Installation:
    """A database, the services that use it, and VMs that exist only as ids."""

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self.database = database
        self.machines: dict[str, str] = {}
        self.accounts = Accounts(database)
        self.callers = Callers(database)
        self.identities = Identities(database, self.owns)

    async def owns(self, account: str, machine: str) -> bool:
        return self.machines.get(machine) == account

    def machine(self, account: Account | str, name: str = "m1") -> str:
        self.machines[name] = account if isinstance(account, str) else account.id
        return name

    async def count(self, table: sa.Table) -> int:
        with self.database.look_up() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

    async def close(self) -> None:
        await self.callers.close()
        await self.database.dispose()


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Installation]:
    installation = Installation(path, await open_database(path))
    try:
        yield installation
    finally:
        await installation.close()


@pytest_asyncio.fixture(scope="session")
async def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A migrated empty database, copied for each test: a migration takes longer than most tests."""
    path = tmp_path_factory.mktemp("empty") / "stead.db"
    await (await open_database(path)).dispose()
    return path.read_bytes()


@pytest_asyncio.fixture
async def here(tmp_path: Path, empty: bytes) -> AsyncIterator[Installation]:
    (tmp_path / "stead.db").write_bytes(empty)
    async with opened(tmp_path / "stead.db") as installation:
        yield installation


@pytest_asyncio.fixture
async def there(here: Installation) -> AsyncIterator[Installation]:
    """The same installation, opened a second time as another process would."""
    async with opened(here.path) as installation:
        installation.machines = here.machines
        yield installation


@pytest_asyncio.fixture
async def ours(here: Installation) -> Account:
    return await here.accounts.create("ours")


@pytest_asyncio.fixture
async def theirs(here: Installation) -> Account:
    return await here.accounts.create("theirs")


async def attempt(work: Awaitable[T]) -> T | SteadError:
    try:
        return await work
    except SteadError as error:
        return error


# Secrets


async def test_database_contains_no_secrets(here: Installation, ours: Account) -> None:
    info, key = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    _, token = await here.identities.create_token(ours.id, identity.id)
    for secret in (key, token):
        assert await here.callers.authenticate(secret) is not None
    await here.callers.close()

    kept = b"".join(file.read_bytes() for file in here.path.parent.glob("stead.db*"))
    assert info.hint.encode() in kept, "this is where it would be found"
    for secret in (key, token):
        prefix, body = secret.split("_", 1)
        assert (prefix, len(body)) in {("stead", 43), ("stid", 43)}
        assert body.encode() not in kept
        assert body[10:].encode() not in kept


async def test_authenticate_keys_and_tokens(here: Installation, ours: Account) -> None:
    _, key = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    _, token = await here.identities.create_token(ours.id, identity.id)
    assert await here.callers.authenticate(key) == Caller(ours.id)
    assert await here.callers.authenticate(token) == Caller(ours.id, identity.id)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key: "",
        lambda key: "stead_",
        lambda key: key[:-1],
        lambda key: key + "\n",
        lambda key: key.lower(),
        lambda key: key.removeprefix("stead_"),
        lambda key: "stid_" + key.removeprefix("stead_"),
        lambda key: "stead_" + "A" * 43,
        lambda key: key[:10],
        lambda key: key + "A" * 1_000_000,
        lambda key: "stead_" + "ü" * 43,
        lambda key: "\ud800" * 49,
        lambda key: "stead_' OR 1=1 --".ljust(49, "x"),
    ],
)
async def test_malformed_secrets_are_refused(
    here: Installation, ours: Account, spoil: Callable[[str], str]
) -> None:
    _, key = await here.accounts.create_key(ours.id)
    assert await here.callers.authenticate(spoil(key)) is None


async def test_stored_hash_is_not_a_valid_secret(here: Installation, ours: Account) -> None:
    """A leak of the database does not leak valid credentials."""
    info, _ = await here.accounts.create_key(ours.id)
    row = await KeyStore(here.database).get(info.id)
    assert row is not None
    for guess in (row.hash, f"stead_{row.hash[:43]}", row.hint):
        assert await here.callers.authenticate(guess) is None


async def test_revocation_takes_effect_at_once_in_all_processes(
    here: Installation, there: Installation, ours: Account
) -> None:
    """The command line revokes keys in another process than the server's."""
    info, key = await here.accounts.create_key(ours.id)
    _, other = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    token_info, token = await here.identities.create_token(ours.id, identity.id)
    _, last = await here.identities.create_token(ours.id, identity.id)
    for secret in (key, other, token, last):
        assert await here.callers.authenticate(secret) is not None

    await there.accounts.revoke_key(info.id)
    assert await here.callers.authenticate(key) is None
    await there.identities.revoke_token(ours.id, identity.id, token_info.id)
    assert await here.callers.authenticate(token) is None
    assert await here.callers.authenticate(last) == Caller(ours.id, identity.id)
    await there.identities.delete(ours.id, identity.id)
    assert await here.callers.authenticate(last) is None
    assert await here.callers.authenticate(other) == Caller(ours.id)


async def test_use_of_a_key_is_recorded_once_a_minute(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    update = KeyStore.update

    async def counting(self: KeyStore, row_id: str, **changes: object) -> Any:
        written.append(row_id)
        return await update(self, row_id, **changes)

    monkeypatch.setattr(KeyStore, "update", counting)
    info, key = await here.accounts.create_key(ours.id)
    await asyncio.gather(*(here.callers.authenticate(key) for _ in range(20)))
    await here.callers.close()
    assert written == [info.id]
    (used,) = await here.accounts.keys(ours.id)
    assert used.used_at is not None and abs(used.used_at - time.time()) < 10

    again = Callers(here.database)
    await again.authenticate(key)
    await again.close()
    assert written == [info.id], "after a restart it still is the same minute"

    await update(KeyStore(here.database), info.id, used_at=time.time_ns() - 61 * 10**9)
    again = Callers(here.database)
    await again.authenticate(key)
    await again.close()
    assert written == [info.id] * 2


async def test_use_of_a_token_is_recorded(here: Installation, ours: Account) -> None:
    identity = await here.identities.create(ours.id)
    info, token = await here.identities.create_token(ours.id, identity.id)
    assert info.used_at is None
    await here.callers.authenticate(token)
    await here.callers.close()
    (used,) = await here.identities.tokens(ours.id, identity.id)
    assert used.used_at is not None


async def test_authenticate_does_not_wait_for_the_write(here: Installation, ours: Account) -> None:
    _, key = await here.accounts.create_key(ours.id)
    other = sqlite3.connect(here.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    async with asyncio.timeout(2):
        assert await here.callers.authenticate(key) == Caller(ours.id)
    other.execute("COMMIT")
    other.close()
    await here.callers.close()
    (used,) = await here.accounts.keys(ours.id)
    assert used.used_at is not None


async def test_authenticate_succeeds_if_the_write_fails(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    info, key = await here.accounts.create_key(ours.id)
    monkeypatch.setattr(KeyStore, "update", fail)
    callers = Callers(here.database)
    assert await callers.authenticate(key) == Caller(ours.id)
    await callers.close()
    assert info.id in caplog.text and "the disk is full" in caplog.text and key not in caplog.text


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
    assert abs(granted.granted_at - time.time()) < 10
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


# Model-based test


class Histories(RuleBasedStateMachine):
    """Model-based test: two accounts, compared with dictionaries of secrets and permissions."""

    empty_database = b""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.path = Path(folder) / "stead.db"
        self.identities: dict[str, str] = {}
        self.secrets: dict[str, tuple[str, str]] = {}
        """All tokens, revoked ones included: id and identity."""
        self.revoked: set[str] = set()
        self.permissions: dict[tuple[str, str], tuple[str, ...] | None] = {}
        self.gone: set[str] = set()

    @initialize()
    def begin(self) -> None:
        self.path.write_bytes(Histories.empty_database)
        self.here = Installation(self.path, self.run(open_database(self.path)))
        Histories.empty_database = Histories.empty_database or self.path.read_bytes()
        self.accounts = [self.run(self.here.accounts.create(name)).id for name in ("one", "two")]
        for number in range(4):
            self.here.machine(self.accounts[number % 2], f"m{number}")

    def teardown(self) -> None:
        if hasattr(self, "here"):
            self.run(self.here.close())
        self.exits.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def attempt(self, work: Coroutine[Any, Any, T]) -> T | type[SteadError]:
        try:
            return self.run(work)
        except SteadError as error:
            return type(error)

    def pick(self, data: st.DataObject) -> tuple[str, str]:
        """An account, and an identity that may belong to the other account or be deleted."""
        known = [*self.identities, *self.gone, NOWHERE]
        return data.draw(st.sampled_from(self.accounts)), data.draw(st.sampled_from(known))

    def sees(self, account: str, identity: str) -> bool:
        return self.identities.get(identity) == account

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        account = data.draw(st.sampled_from(self.accounts))
        self.identities[self.run(self.here.identities.create(account)).id] = account

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.delete(account, identity))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
            return
        assert result is None
        del self.identities[identity]
        self.gone.add(identity)
        self.permissions = {key: users for key, users in self.permissions.items() if key[0] != identity}

    @rule(data=st.data())
    def create_token(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.create_token(account, identity))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
            return
        assert isinstance(result, tuple)
        assert result[1] not in self.secrets
        self.secrets[result[1]] = result[0].id, identity

    @precondition(lambda self: self.secrets)
    @rule(data=st.data())
    def revoke_token(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        secret = data.draw(st.sampled_from(list(self.secrets)))
        token, holder = self.secrets[secret]
        result = self.attempt(self.here.identities.revoke_token(account, identity, token))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif holder != identity or secret in self.revoked:
            assert result is TokenNotFound
        else:
            assert result is None
            self.revoked.add(secret)

    users = st.none() | st.lists(st.sampled_from(["root", "alice", "bob"]), unique=True).map(tuple)
    machines = st.sampled_from([f"m{number}" for number in range(5)])

    @rule(data=st.data(), machine=machines, users=users)
    def grant(self, data: st.DataObject, machine: str, users: tuple[str, ...] | None) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.grant(account, identity, machine, users))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif self.here.machines.get(machine) != account:
            assert result is MachineNotFound
        elif (identity, machine) in self.permissions:
            assert result is PermissionExists
        else:
            assert isinstance(result, Permission)
            self.permissions[identity, machine] = users

    @rule(data=st.data(), machine=machines, users=users)
    def update(self, data: st.DataObject, machine: str, users: tuple[str, ...] | None) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.update(account, identity, machine, users))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif (identity, machine) not in self.permissions:
            assert result is PermissionNotFound
        else:
            self.permissions[identity, machine] = users

    @rule(data=st.data(), machine=machines)
    def revoke(self, data: st.DataObject, machine: str) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.revoke(account, identity, machine))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif (identity, machine) not in self.permissions:
            assert result is PermissionNotFound
        else:
            del self.permissions[identity, machine]

    @rule(machine=machines)
    def delete_machine(self, machine: str) -> None:
        self.here.machines.pop(machine, None)
        self.run(self.here.identities.delete_machine_permissions(machine))
        self.permissions = {key: users for key, users in self.permissions.items() if key[1] != machine}

    @rule()
    def open_again(self) -> None:
        machines = self.here.machines
        self.run(self.here.close())
        self.here = Installation(self.path, self.run(open_database(self.path)))
        self.here.machines = machines

    @invariant()
    def secrets_are_what_they_were_made_for(self) -> None:
        for secret, (_, identity) in self.secrets.items():
            valid = identity in self.identities and secret not in self.revoked
            expected = Caller(self.identities[identity], identity) if valid else None
            assert self.run(self.here.callers.authenticate(secret)) == expected

    @invariant()
    def permissions_are_what_was_granted(self) -> None:
        if not hasattr(self, "here"):
            return
        for account in self.accounts:
            mine = [identity for identity, owner in self.identities.items() if owner == account]
            assert [each.id for each in self.run(self.here.identities.list(account)).items] == mine
        for identity, account in self.identities.items():
            page = self.run(self.here.identities.permissions(account, identity))
            found = {(identity, each.machine): each.allowed_users for each in page.items}
            expected = {key: users for key, users in self.permissions.items() if key[0] == identity}
            assert found == expected
            assert page.total == len(expected)
            assert self.run(self.here.identities.granted(identity)) == {key[1] for key in expected}


Histories.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = pytest.mark.heavy(Histories.TestCase)


@given(
    defaults=st.fixed_dictionaries(
        {}, optional={name: st.none() | st.integers(0, 99) for name in LIMIT_NAMES}
    ),
    own=st.fixed_dictionaries({}, optional={name: st.none() | st.integers(0, 99) for name in LIMIT_NAMES}),
)
def test_effective_limits_property(defaults: dict[str, int | None], own: dict[str, int | None]) -> None:
    limits = Limits.from_json(json.dumps(own), Limits(**defaults))
    assert limits == Limits(**{**defaults, **own})

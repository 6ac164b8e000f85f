"""Identities: restricted callers that may use only the VMs and repositories granted to them."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from stead.errors import InvalidRequest, MachineNotFound
from stead.identity.credentials import CredentialKind, digest, new_secret
from stead.identity.errors import (
    AccountNotFound,
    IdentityNotFound,
    ManagedIdentity,
    PermissionExists,
    PermissionNotFound,
    TokenNotFound,
    UserNotAllowed,
)
from stead.limits import LimitExceeded, LimitName, Limits
from stead.names import check_name
from stead.store.database import Database
from stead.store.identities import (
    CountedIdentity,
    IdentityRow,
    IdentityStore,
    PermissionRow,
    PermissionStore,
    TokenRow,
    TokenStore,
)

PAGE = 100
MAX_ALLOWED_USERS = 1000
_MAX_USER_NAME = 256
T = TypeVar("T")

LimitsOf = Callable[[str], Awaitable[Limits]]
Owns = Callable[[str, str], Awaitable[bool]]
"""Whether an account owns a VM: `await owns(account, machine)`."""


@dataclass(frozen=True)
class Identity:
    """An identity, with the number of VMs and repositories that it has permissions for."""

    id: str
    account: str
    managed: bool
    created_at: float
    name: str | None = None
    vm_grants: int = 0
    repo_grants: int = 0


@dataclass(frozen=True)
class TokenInfo:
    """A token without its secret. `used_at` is accurate to a minute."""

    id: str
    identity: str
    created_at: float
    used_at: float | None


@dataclass(frozen=True)
class Permission:
    """An identity may use a VM, as one of the allowed Linux users; None allows every user."""

    id: str
    identity: str
    machine: str
    allowed_users: tuple[str, ...] | None
    granted_at: float
    granted_by: str

    def user(self, wanted: str | None) -> str | None:
        """The Linux user to act as: `wanted`, or the only allowed one if none is wanted.

        Raises `UserNotAllowed` if `wanted` is not allowed, or if it is None and several are.
        """
        wanted = wanted or None
        if self.allowed_users is None:
            return wanted
        if wanted is None and len(self.allowed_users) == 1:
            return self.allowed_users[0]
        if wanted is None or wanted not in self.allowed_users:
            raise UserNotAllowed(self.machine, wanted, self.allowed_users)
        return wanted


@dataclass(frozen=True)
class Page(Generic[T]):
    """Items from `offset` on, and the total number."""

    items: Sequence[T]
    offset: int
    total: int


class Identities:
    """All identities of one installation. An account sees only its own; others are `IdentityNotFound`."""

    def __init__(self, database: Database, owns: Owns, limits_of: LimitsOf | None = None) -> None:
        """Without `limits_of`, accounts have no limits."""
        self._limits_of = limits_of
        self._counting = asyncio.Lock()
        self._store = IdentityStore(database)
        self._tokens = TokenStore(database)
        self._permissions = PermissionStore(database)
        self._owns = owns

    async def create(
        self,
        account: str,
        *,
        name: str | None = None,
        managed: bool = False,
        machine: str | None = None,
        repo: str | None = None,
        identity_id: str | None = None,
    ) -> Identity:
        """Create an identity without permissions. Names are labels and need not be unique.

        One that is made for a VM or a repository is deleted with it.
        """
        check_name(name)
        own_id = identity_id or str(uuid.uuid4())
        row = IdentityRow(own_id, account, managed, name=name, machine=machine, repo=repo)
        async with self._counting:
            # Stead's own are as many as VMs and repositories.
            if not managed and self._limits_of is not None:
                most = (await self._limits_of(account)).identities
                _check(LimitName.IDENTITIES, most, await self._store.count(account))
            added = await self._store.add(row)
        if added is None:
            if repo is not None:
                raise InvalidRequest(f"repository {repo} was deleted")
            raise AccountNotFound(account)
        return _identity(added)

    async def list(
        self, account: str, *, limit: int = PAGE, offset: int = 0, managed: bool = False
    ) -> Page[Identity]:
        """Identities, oldest first; with `managed`, those that Stead uses itself too."""
        rows, total = await self._store.page(account, limit, offset, managed=managed)
        return Page([_identity(row) for row in rows], offset, total)

    async def named(self, account: str, name: str) -> Sequence[Identity]:
        """The identities of this name, without those that Stead uses itself."""
        rows = await self._store.named(account, name)
        return [_identity(row) for row in rows if not row.managed]

    async def get(self, account: str, identity: str) -> Identity:
        row = await self._store.find(account, identity)
        if row is None:
            raise IdentityNotFound(identity)
        return _identity(row)

    async def delete(self, account: str, identity: str) -> None:
        """Delete an identity with its tokens and permissions."""
        if not await self._store.remove(account, identity):
            await self.get(account, identity)
            raise ManagedIdentity(identity)

    # Tokens

    async def create_token(self, account: str, identity: str) -> tuple[TokenInfo, str]:
        """Create a token. Returns its secret too, which is not stored and cannot be read later."""
        of = await self.get(account, identity)
        secret = new_secret(CredentialKind.TOKEN)
        async with self._counting:
            if not of.managed and self._limits_of is not None:
                most = (await self._limits_of(account)).tokens
                _check(LimitName.TOKENS, most, await self._tokens.count(account))
            added = await self._tokens.add(TokenRow(str(uuid.uuid4()), identity, digest(secret)))
        if added is None:
            raise IdentityNotFound(identity)
        return _token_info(added), secret

    async def tokens(self, account: str, identity: str) -> Sequence[TokenInfo]:
        await self.get(account, identity)
        return await self._tokens.of_identity(identity, _token_info)

    async def revoke_token(self, account: str, identity: str, token: str) -> None:
        """Revoke a token; the next call with it is refused."""
        await self.get(account, identity)
        if not await self._tokens.remove(identity, token):
            raise TokenNotFound(token)

    # Permissions

    async def grant(
        self, account: str, identity: str, machine: str, allowed_users: Sequence[str] | None = None
    ) -> Permission:
        """Grant an identity the use of a VM of the same account."""
        await self.get(account, identity)
        users = _encode(allowed_users)
        await self._check_owned(account, machine)
        row = PermissionRow(str(uuid.uuid4()), identity, machine, users, granted_by=account)
        added = await self._permissions.add(row)
        if added is None:
            await self.get(account, identity)
            raise PermissionExists(identity, machine)
        try:
            # A concurrent delete of the VM may have removed its permissions before this one was added.
            await self._check_owned(account, machine)
        except MachineNotFound:
            await self._permissions.remove(identity, machine)
            raise
        return _permission(added)

    async def update(
        self, account: str, identity: str, machine: str, allowed_users: Sequence[str] | None
    ) -> Permission:
        """Change the allowed Linux users of a permission."""
        await self.get(account, identity)
        row = await self._permissions.set_allowed_users(identity, machine, _encode(allowed_users))
        if row is None:
            raise PermissionNotFound(identity, machine)
        return _permission(row)

    async def revoke(self, account: str, identity: str, machine: str) -> None:
        """Revoke a VM permission; the next call is refused."""
        await self.get(account, identity)
        if not await self._permissions.remove(identity, machine):
            raise PermissionNotFound(identity, machine)

    async def get_permission(self, account: str, identity: str, machine: str) -> Permission:
        await self.get(account, identity)
        found = await self.permission(identity, machine)
        if found is None:
            raise PermissionNotFound(identity, machine)
        return found

    async def permissions(
        self, account: str, identity: str, *, limit: int = PAGE, offset: int = 0
    ) -> Page[Permission]:
        """The VM permissions of an identity, oldest first."""
        await self.get(account, identity)
        rows, total = await self._permissions.page(identity, limit, offset)
        return Page([_permission(row) for row in rows], offset, total)

    # Checks for authenticated identities

    async def permission(self, identity: str, machine: str) -> Permission | None:
        row = await self._permissions.find(identity, machine)
        return None if row is None else _permission(row)

    async def granted(self, identity: str) -> set[str]:
        """The ids of the VMs that an identity may use."""
        return await self._permissions.machines(identity)

    async def delete_machine_permissions(self, machine: str) -> None:
        """Delete all permissions for a VM. Call it after the VM was deleted."""
        await self._permissions.delete_for_machine(machine)

    async def delete_machine_identities(self, machine: str) -> None:
        """Delete the identities that were made for a VM, with their tokens."""
        await self._store.delete_for_machine(machine)

    async def recover(self) -> None:
        """Delete permissions and identities for VMs that do not exist, which a crash may leave."""
        await self._permissions.delete_orphans()
        await self._store.delete_orphans()

    async def _check_owned(self, account: str, machine: str) -> None:
        if not await self._owns(account, machine):
            raise MachineNotFound(machine)


def _check(name: LimitName, most: int | None, current: int) -> None:
    if most is not None and current >= most:
        raise LimitExceeded(name, most, current, 1)


def _encode(users: Sequence[str] | None) -> str | None:
    """Allowed users as JSON, without duplicates."""
    if users is None:
        return None
    if len(users) > MAX_ALLOWED_USERS:
        raise InvalidRequest(f"too many allowed users: {len(users)} (max {MAX_ALLOWED_USERS})")
    for user in users:
        if not _is_user_name(user):
            raise InvalidRequest(f"invalid Linux user name {user!r}")
    return json.dumps(list(dict.fromkeys(users)))


def _is_user_name(user: str) -> bool:
    """Whether a Linux user can have this name: it must fit a field of /etc/passwd."""
    plain = user.isprintable() and not any(sign in user for sign in " :/")
    return plain and 0 < len(user) <= _MAX_USER_NAME and not user.startswith("-")


def _identity(row: IdentityRow) -> Identity:
    found = Identity(row.id, row.account, row.managed, row.created_at / 1e9, row.name)
    if isinstance(row, CountedIdentity):
        return replace(found, vm_grants=row.vm_grants, repo_grants=row.repo_grants)
    return found


def _token_info(row: TokenRow) -> TokenInfo:
    used_at = None if row.used_at is None else row.used_at / 1e9
    return TokenInfo(row.id, row.identity, row.created_at / 1e9, used_at)


def _permission(row: PermissionRow) -> Permission:
    users = None if row.allowed_users is None else tuple(json.loads(row.allowed_users))
    return Permission(row.id, row.identity, row.machine, users, row.granted_at / 1e9, row.granted_by)

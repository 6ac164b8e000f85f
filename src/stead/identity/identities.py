"""Identities: who may use some machines of an account and nothing else."""

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stead.errors import InvalidRequest, MachineNotFound
from stead.identity.credentials import Kind, digest, new_secret
from stead.identity.errors import (
    AccountNotFound,
    IdentityNotFound,
    ManagedIdentity,
    PermissionExists,
    PermissionNotFound,
    TokenNotFound,
    UserNotAllowed,
)
from stead.store.database import Database
from stead.store.identities import (
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

Owns = Callable[[str, str], Awaitable[bool]]
"""Tells whether an account has a machine: `await owns(account, machine)`."""


@dataclass(frozen=True)
class Identity:
    id: str
    account: str
    managed: bool
    created_at: float


@dataclass(frozen=True)
class TokenInfo:
    """What is recorded of a token. `used_at` is right to a minute."""

    id: str
    identity: str
    created_at: float
    used_at: float | None


@dataclass(frozen=True)
class Permission:
    """An identity may use a machine, as one of these Linux users; as any of them when it is None."""

    id: str
    identity: str
    machine: str
    allowed_users: tuple[str, ...] | None
    granted_at: float
    granted_by: str

    def user(self, wanted: str | None) -> str | None:
        """The Linux user to act as, when this one (or none in particular) is asked for."""
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
    """Some of many: those from `offset` on, and how many there are in all."""

    items: Sequence[T]
    offset: int
    total: int


class Identities:
    """All identities of one installation. To an account, those of another do not exist."""

    def __init__(self, database: Database, owns: Owns) -> None:
        self._store = IdentityStore(database)
        self._tokens = TokenStore(database)
        self._permissions = PermissionStore(database)
        self._owns = owns

    async def create(self, account: str, *, managed: bool = False) -> Identity:
        """A new identity, which may do nothing yet."""
        added = await self._store.add(IdentityRow(str(uuid.uuid4()), account, managed))
        if added is None:
            raise AccountNotFound(account)
        return _identity(added)

    async def list(
        self, account: str, *, limit: int = PAGE, offset: int = 0, managed: bool = False
    ) -> Page[Identity]:
        """Identities, oldest first; with `managed`, those that Stead keeps for itself too."""
        rows, total = await self._store.page(account, limit, offset, managed=managed)
        return Page([_identity(row) for row in rows], offset, total)

    async def get(self, account: str, identity: str) -> Identity:
        row = await self._store.find(account, identity)
        if row is None:
            raise IdentityNotFound(identity)
        return _identity(row)

    async def delete(self, account: str, identity: str) -> None:
        """Remove an identity; its tokens and permissions end with it."""
        if not await self._store.remove(account, identity):
            await self.get(account, identity)
            raise ManagedIdentity(identity)

    # Tokens

    async def create_token(self, account: str, identity: str) -> tuple[TokenInfo, str]:
        """A new token, and the secret itself, which nobody can ask for a second time."""
        await self.get(account, identity)
        secret = new_secret(Kind.TOKEN)
        added = await self._tokens.add(TokenRow(str(uuid.uuid4()), identity, digest(secret)))
        if added is None:
            raise IdentityNotFound(identity)
        return _token_info(added), secret

    async def tokens(self, account: str, identity: str) -> Sequence[TokenInfo]:
        await self.get(account, identity)
        return [_token_info(row) for row in await self._tokens.list(identity)]

    async def revoke_token(self, account: str, identity: str, token: str) -> None:
        """End a token; the next call with it is refused."""
        await self.get(account, identity)
        if not await self._tokens.remove(identity, token):
            raise TokenNotFound(token)

    # Permissions

    async def grant(
        self, account: str, identity: str, machine: str, allowed_users: Sequence[str] | None = None
    ) -> Permission:
        """Let an identity use a machine of the same account."""
        await self.get(account, identity)
        users = _encode(allowed_users)
        await self._check_owned(account, machine)
        row = PermissionRow(str(uuid.uuid4()), identity, machine, users, granted_by=account)
        added = await self._permissions.add(row)
        if added is None:
            await self.get(account, identity)
            raise PermissionExists(identity, machine)
        try:
            # Deleted meanwhile, it may have been forgotten before this permission was there.
            await self._check_owned(account, machine)
        except MachineNotFound:
            await self._permissions.remove(identity, machine)
            raise
        return _permission(added)

    async def update(
        self, account: str, identity: str, machine: str, allowed_users: Sequence[str] | None
    ) -> Permission:
        """Change which Linux users a permission extends to."""
        await self.get(account, identity)
        row = await self._permissions.change(identity, machine, _encode(allowed_users))
        if row is None:
            raise PermissionNotFound(identity, machine)
        return _permission(row)

    async def revoke(self, account: str, identity: str, machine: str) -> None:
        """Take a machine away from an identity, from the next call on."""
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
        """What an identity may use, oldest first."""
        await self.get(account, identity)
        rows, total = await self._permissions.page(identity, limit, offset)
        return Page([_permission(row) for row in rows], offset, total)

    # For those who have been recognised: what may this identity do?

    async def permission(self, identity: str, machine: str) -> Permission | None:
        row = await self._permissions.find(identity, machine)
        return None if row is None else _permission(row)

    async def granted(self, identity: str) -> set[str]:
        """The machines that an identity may use."""
        return await self._permissions.machines(identity)

    async def forget_machine(self, machine: str) -> None:
        """A machine is gone for good, and every permission on it. To be called after its removal."""
        await self._permissions.forget(machine)

    async def recover(self) -> None:
        """After a crash: machines may have gone without their permissions."""
        await self._permissions.forget_missing()

    async def _check_owned(self, account: str, machine: str) -> None:
        if not await self._owns(account, machine):
            raise MachineNotFound(machine)


def _encode(users: Sequence[str] | None) -> str | None:
    """Allowed users as they are recorded, each once."""
    if users is None:
        return None
    if len(users) > MAX_ALLOWED_USERS:
        raise InvalidRequest(f"a permission names up to {MAX_ALLOWED_USERS} Linux users, not {len(users)}")
    for user in users:
        if not _is_user_name(user):
            raise InvalidRequest(f"{user!r} is not the name of a Linux user")
    return json.dumps(list(dict.fromkeys(users)))


def _is_user_name(user: str) -> bool:
    """Whether a Linux user could have this name: what cannot stand in a line of /etc/passwd is refused."""
    plain = user.isprintable() and not any(sign in user for sign in " :/")
    return plain and 0 < len(user) <= _MAX_USER_NAME and not user.startswith("-")


def _identity(row: IdentityRow) -> Identity:
    return Identity(row.id, row.account, row.managed, row.created_at / 1e9)


def _token_info(row: TokenRow) -> TokenInfo:
    used_at = None if row.used_at is None else row.used_at / 1e9
    return TokenInfo(row.id, row.identity, row.created_at / 1e9, used_at)


def _permission(row: PermissionRow) -> Permission:
    users = None if row.allowed_users is None else tuple(json.loads(row.allowed_users))
    return Permission(row.id, row.identity, row.machine, users, row.granted_at / 1e9, row.granted_by)

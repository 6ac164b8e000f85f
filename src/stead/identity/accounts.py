"""Accounts, their limits and their API keys."""

import json
import re
import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stead.errors import InvalidRequest
from stead.identity.credentials import CredentialKind, digest, hint, new_secret
from stead.identity.errors import AccountExists, AccountNotEmpty, AccountNotFound, KeyNotFound
from stead.limits import LIMIT_NAMES, UNLIMITED, Limits
from stead.names import check_name
from stead.store.accounts import AccountRow, AccountStore, KeyRow, KeyStore
from stead.store.database import Database

DEFAULT_ACCOUNT = "default"
MIN_PREFIX = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


@dataclass(frozen=True)
class Account:
    """The owner of VMs, snapshots, repositories and identities.

    `limits` are the effective ones: the account's own limits override the installation's.
    """

    id: str
    name: str
    limits: Limits
    own_limits: Mapping[str, int | None]
    created_at: float


@dataclass(frozen=True)
class KeyInfo:
    """An API key without its secret. `hint` is its first characters; `used_at` is accurate to a minute."""

    id: str
    account: str
    name: str | None
    hint: str
    created_at: float
    used_at: float | None
    revoked_at: float | None


class Accounts:
    """All accounts of one installation, without access control."""

    def __init__(self, database: Database, defaults: Limits = UNLIMITED) -> None:
        self.database = database
        self._store = AccountStore(database)
        self._keys = KeyStore(database)
        self._defaults = defaults

    @property
    def defaults(self) -> Limits:
        """The limits of accounts that have none of their own."""
        return self._defaults

    async def create(self, name: str, limits: Mapping[str, int | None] | None = None) -> Account:
        """Create an account; `limits` override the installation's."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"invalid account name {name[:100]!r}: must be 1 to 100 of A-Z a-z 0-9 . _ @ -"
            )
        row = AccountRow(str(uuid.uuid4()), name, _encode(limits or {}))
        added = await self._store.add(row)
        if added is None:
            raise AccountExists(name)
        return self._account(added)

    async def default(self) -> Account:
        """The default account, created on first use."""
        found = await self._store.by_name(DEFAULT_ACCOUNT)
        if found is not None:
            return self._account(found)
        try:
            return await self.create(DEFAULT_ACCOUNT)
        except AccountExists:
            return await self.by_name(DEFAULT_ACCOUNT)

    async def get(self, account_id: str) -> Account:
        return self._account(await self._row(account_id))

    async def by_name(self, name: str) -> Account:
        row = await self._store.by_name(name)
        if row is None:
            raise AccountNotFound(name)
        return self._account(row)

    async def list(self) -> list[Account]:
        return [self._account(row) for row in await self._store.list()]

    async def delete(self, account_id: str) -> None:
        """Delete an account and its keys. One that owns anything is not deleted: `AccountNotEmpty`."""
        if left := await self._store.delete_unless_owner(account_id):
            raise AccountNotEmpty((await self._row(account_id)).name, left)

    async def set_limits(
        self, account_id: str, limits: Mapping[str, int | None], *, unset: Collection[str] = ()
    ) -> Account:
        """Change some limits; those in `unset` return to the installation's."""
        _check_names(unset)
        while True:
            row = await self._row(account_id)
            own = {name: value for name, value in json.loads(row.limits).items() if name not in unset}
            changed = await self._store.change_limits(account_id, row.limits, _encode(limits, own))
            if changed is not None:
                return self._account(changed)

    # Keys

    async def create_key(self, account_id: str, name: str | None = None) -> tuple[KeyInfo, str]:
        """Create an API key. Returns its secret too, which is not stored and cannot be read later."""
        check_name(name)
        secret = new_secret(CredentialKind.API_KEY)
        row = KeyRow(secrets.token_hex(10), account_id, name, digest(secret), hint(secret))
        added = await self._keys.add(row)
        if added is None:
            raise AccountNotFound(account_id)
        return _key_info(added), secret

    async def keys(self, account_id: str | None = None, *, revoked: bool = False) -> Sequence[KeyInfo]:
        """Valid keys of one account or of all, oldest first; with `revoked`, revoked ones too."""
        rows = await self._keys.list(account_id)
        return [_key_info(row) for row in rows if revoked or row.revoked_at is None]

    async def is_valid_key(self, secret: str) -> bool:
        return await self._keys.find_valid(digest(secret)) is not None

    async def revoke_key(self, key: str) -> KeyInfo:
        """Revoke a key, by id or unique id prefix; the next call with it is refused."""
        row = await self._keys.get(key)
        if row is None:
            matching = [each for each in await self.keys() if each.id.startswith(key)]
            if len(key) < MIN_PREFIX or not matching:
                raise KeyNotFound(key)
            if len(matching) > 1:
                raise InvalidRequest(f"{len(matching)} key ids start with {key}: use a longer prefix")
            key = matching[0].id
        revoked = await self._keys.revoke(key)
        if revoked is None:
            raise KeyNotFound(key)
        return _key_info(revoked)

    async def _row(self, account_id: str) -> AccountRow:
        row = await self._store.get(account_id)
        if row is None:
            raise AccountNotFound(account_id)
        return row

    def _account(self, row: AccountRow) -> Account:
        own = {name: value for name, value in json.loads(row.limits).items() if name in LIMIT_NAMES}
        limits = Limits.from_json(row.limits, self._defaults)
        return Account(row.id, row.name, limits, own, row.created_at / 1e9)


def _encode(limits: Mapping[str, int | None], over: Mapping[str, int | None] | None = None) -> str:
    _check_names(limits)
    Limits(**limits)
    return json.dumps({**(over or {}), **limits}, sort_keys=True)


def _check_names(names: Collection[str]) -> None:
    if unknown := sorted(set(names) - set(LIMIT_NAMES)):
        raise InvalidRequest(f"unknown limit {', '.join(unknown)}; known limits: {', '.join(LIMIT_NAMES)}")


def _key_info(row: KeyRow) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        account=row.account,
        name=row.name,
        hint=row.hint,
        created_at=row.created_at / 1e9,
        used_at=None if row.used_at is None else row.used_at / 1e9,
        revoked_at=None if row.revoked_at is None else row.revoked_at / 1e9,
    )

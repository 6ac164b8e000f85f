"""Authentication: the account, or the identity, of an API key or access token."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from stead.identity.credentials import CredentialKind, credential_kind, digest
from stead.store.accounts import KeyStore
from stead.store.database import Database
from stead.store.identities import TokenStore
from stead.tasks import TaskSet

_USE_INTERVAL = 60 * 10**9
_MAX_REMEMBERED = 1000
_MAX_VALID = 10_000


@dataclass(frozen=True)
class Caller:
    """The authenticated caller. With an identity, it has only the permissions granted to that identity."""

    account: str
    identity: str | None = None
    credential: str | None = field(default=None, compare=False)
    """The id of its API key or token."""


class Callers:
    """Authenticates API keys and tokens. No answer is cached: the next call after a revocation is refused."""

    def __init__(self, database: Database) -> None:
        self._keys = KeyStore(database)
        self._tokens = TokenStore(database)
        self._noted: dict[str, int] = {}
        self._valid: dict[str, None] = {}
        """Hashes of secrets that were valid at their last use, the last used last."""
        self._writes = TaskSet()

    async def authenticate(self, secret: str) -> Caller | None:
        """The caller of a secret; None if it is unknown or revoked."""
        kind = credential_kind(secret)
        if kind is None:
            return None
        hashed = digest(secret)
        caller = await self._find(kind, hashed)
        self._valid.pop(hashed, None)
        if caller is not None:
            self._valid[hashed] = None
            if len(self._valid) > _MAX_VALID:
                del self._valid[next(iter(self._valid))]
        return caller

    def was_valid(self, secret: str) -> bool:
        """Whether a secret was valid when it was last used, since the start of the server.

        It proves nothing: for a guess whether looking for it is worth the work.
        """
        return digest(secret) in self._valid

    async def _find(self, kind: CredentialKind, hashed: str) -> Caller | None:
        if kind is CredentialKind.API_KEY and (key := await self._keys.find_valid(hashed)):
            self._record_use(key.id, key.used_at, self._keys.update)
            return Caller(key.account, credential=key.id)
        if kind is CredentialKind.TOKEN and (holder := await self._tokens.find_holder(hashed)):
            self._record_use(holder.token, holder.used_at, self._tokens.update)
            return Caller(holder.account, holder.identity, holder.token)
        return None

    async def close(self) -> None:
        """Wait for pending writes."""
        await self._writes.join()

    def _record_use(
        self, row: str, used_at: int | None, update: Callable[..., Coroutine[Any, Any, object]]
    ) -> None:
        """Record the time of use in the background, at most once a minute."""
        now = time.time_ns()
        last = max(used_at or 0, self._noted.get(row, 0))
        if 0 <= now - last < _USE_INTERVAL:
            return
        if len(self._noted) >= _MAX_REMEMBERED:
            self._noted = {each: at for each, at in self._noted.items() if 0 <= now - at < _USE_INTERVAL}
        self._noted[row] = now
        self._writes.start(update(row, used_at=now), f"record use of {row}")

"""Authentication: the account, or the identity, of an API key or access token."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stead.identity.credentials import Kind, digest, kind_of
from stead.logs import get_logger
from stead.store.accounts import KeyStore
from stead.store.database import Database
from stead.store.identities import TokenStore

_USE_INTERVAL = 60 * 10**9
_MAX_REMEMBERED = 1000

log = get_logger("stead.identity")


@dataclass(frozen=True)
class Caller:
    """The authenticated caller. With an identity, it has only the permissions granted to that identity."""

    account: str
    identity: str | None = None


class Callers:
    """Authenticates API keys and tokens. Nothing is cached: the next call after a revocation is refused."""

    def __init__(self, database: Database) -> None:
        self._keys = KeyStore(database)
        self._tokens = TokenStore(database)
        self._noted: dict[str, int] = {}
        self._writing: set[asyncio.Task[None]] = set()

    async def authenticate(self, secret: str) -> Caller | None:
        """The caller of a secret; None if it is unknown or revoked."""
        kind = kind_of(secret)
        if kind is Kind.API_KEY and (key := await self._keys.valid(digest(secret))) is not None:
            self._note_use(key.id, key.used_at, self._keys.update)
            return Caller(key.account)
        if kind is Kind.TOKEN and (holder := await self._tokens.holder(digest(secret))) is not None:
            self._note_use(holder.token, holder.used_at, self._tokens.update)
            return Caller(holder.account, holder.identity)
        return None

    async def close(self) -> None:
        """Wait for pending writes."""
        await asyncio.gather(*self._writing)

    def _note_use(self, row: str, used_at: int | None, update: Callable[..., Awaitable[object]]) -> None:
        """Record the time of use in the background, at most once a minute."""
        now = time.time_ns()
        last = max(used_at or 0, self._noted.get(row, 0))
        if 0 <= now - last < _USE_INTERVAL:
            return
        if len(self._noted) >= _MAX_REMEMBERED:
            self._noted = {each: at for each, at in self._noted.items() if 0 <= now - at < _USE_INTERVAL}
        self._noted[row] = now
        task = asyncio.create_task(self._record(row, now, update))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _record(self, row: str, now: int, update: Callable[..., Awaitable[object]]) -> None:
        try:
            await update(row, used_at=now)
        except Exception as error:
            log.warning("recording use of key or token failed", id=row, error=str(error))

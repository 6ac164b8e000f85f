"""Who is calling: a secret becomes an account, or an identity of one."""

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
    """Whoever makes a call. With an identity, it may do what that identity was granted, and no more."""

    account: str
    identity: str | None = None


class Callers:
    """Recognises API keys and tokens, each time anew: a revocation counts from the next call on."""

    def __init__(self, database: Database) -> None:
        self._keys = KeyStore(database)
        self._tokens = TokenStore(database)
        self._noted: dict[str, int] = {}
        self._writing: set[asyncio.Task[None]] = set()

    async def authenticate(self, secret: str) -> Caller | None:
        """Whose secret it is; None when it is nobody's, or not any more."""
        kind = kind_of(secret)
        if kind is Kind.API_KEY and (key := await self._keys.valid(digest(secret))) is not None:
            self._note_use(key.id, key.used_at, self._keys.update)
            return Caller(key.account)
        if kind is Kind.TOKEN and (holder := await self._tokens.holder(digest(secret))) is not None:
            self._note_use(holder.token, holder.used_at, self._tokens.update)
            return Caller(holder.account, holder.identity)
        return None

    async def close(self) -> None:
        """Wait for what is still being written."""
        await asyncio.gather(*self._writing)

    def _note_use(self, row: str, used_at: int | None, update: Callable[..., Awaitable[object]]) -> None:
        """Have the time of use recorded, beside the call, at most once a minute."""
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
            log.warning("the use of a key or token was not recorded", id=row, error=str(error))

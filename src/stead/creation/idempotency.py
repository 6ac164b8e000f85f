"""Idempotency keys: a create that its client repeats, because it did not get the answer, is run once.

A key is recorded before the create begins, and its result before the client gets it. A create that fails is
forgotten. One that a crash interrupted is looked for when the server starts: see `recover`.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from stead.errors import InvalidRequest, SteadError
from stead.logs import get_logger
from stead.store.idempotency import IdempotencyRow, IdempotencyStore
from stead.tasks import SingleFlight, finished

LIFETIME = 24 * 3600
"""Seconds that a result is kept."""
MAX_KEYS = 10_000
"""Results that are kept for an account: of more, the oldest are forgotten."""
MAX_KEY = 255

log = get_logger("stead.requests")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]


class IdempotencyKeyReused(SteadError):
    def __init__(self, key: str) -> None:
        super().__init__(
            f"idempotency key {key!r} was used for another request in the last {LIFETIME // 3600} hours:"
            " use a new key for each create, and repeat a create unchanged"
        )


@dataclass(frozen=True)
class KeyedCall:
    """A call with an idempotency key; `target` is its method and path."""

    account: str
    key: str
    target: str
    body: bytes
    request: str

    @classmethod
    def parse(cls, account: str, key: str, target: str, body: bytes, request: str) -> "KeyedCall":
        """Checks the key. The quotes of a string in a structured header (RFC 8941) are optional."""
        plain = key[1:-1] if len(key) > 1 and key[0] == key[-1] == '"' else key
        if not (plain.strip() and len(plain) <= MAX_KEY and plain.isascii() and plain.isprintable()):
            shown = plain[:MAX_KEY]
            raise InvalidRequest(
                f"invalid Idempotency-Key {shown!r}: must be 1 to {MAX_KEY} printable ASCII characters"
            )
        return cls(account, plain, target, body, request)

    def row(self) -> IdempotencyRow:
        return IdempotencyRow(
            id=_digest(self.account, self.key),
            account=self.account,
            target=self.target,
            content=hashlib.sha256(self.body).hexdigest(),
            request=self.request,
            created_at=time.time_ns(),
        )


@dataclass(frozen=True)
class InterruptedCreate:
    """A create that was under way when the server ended."""

    account: str
    path: str
    request: str


class IdempotencyKeys:
    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._calls: SingleFlight[Any] = SingleFlight()

    async def run(self, call: KeyedCall, kind: type[T], make: Make[T]) -> T:
        """The result of the create with this key, of type `kind`; `make` is only run by the first call.

        A call that comes while the first one is under way waits for it: a client that repeats a call wants
        the answer, and would have to poll after a refusal. The create continues when its client disconnects.
        """
        row = call.row()
        stored = await self._store.get(row.id)
        if stored is not None and stored.created_at >= _expired(row.created_at):
            if (stored.target, stored.content) != (row.target, row.content):
                raise IdempotencyKeyReused(call.key)
            if stored.result is not None:
                return TypeAdapter(kind).validate_json(stored.result)
        # The content is part of the key: another call with the same key does not join, and finds the row.
        flight = (row.id, row.target, row.content)
        result: T = await self._calls.run(flight, lambda: self._first(row, call, make), name=f"{call.target}")
        return result

    async def _first(self, row: IdempotencyRow, call: KeyedCall, make: Make[T]) -> T:
        if not await self._store.begin(row, _expired(row.created_at), MAX_KEYS):
            raise IdempotencyKeyReused(call.key)
        try:
            result = await make()
        except BaseException:
            await finished(self._store.delete(row.id))
            raise
        await finished(self._store.update(row.id, result=_stored(result)))
        return result

    async def recover(self, find: Callable[[InterruptedCreate], Awaitable[object]]) -> None:
        """After a crash: store the results of creates that had ended, and forget the others.

        `find` returns the result of a create from what it has made; None if that is not complete.
        """
        for row in await self._store.pending():
            try:
                path = row.target.partition(" ")[2]
                found = await find(InterruptedCreate(row.account, path, row.request))
            except Exception as error:
                log.error("cannot find what a create has made", request=row.request, error=repr(error))
                found = None
            if found is None:
                await self._store.delete(row.id)
            else:
                await self._store.update(row.id, result=_stored(found))

    async def close(self) -> None:
        """Cancel creates that are under way, and undo them."""
        await self._calls.close()


def _stored(result: object) -> str:
    return to_json(result).decode()


def _expired(now: int) -> int:
    return now - LIFETIME * 10**9


def _digest(account: str, key: str) -> str:
    return hashlib.sha256(f"{account}\0{key}".encode()).hexdigest()

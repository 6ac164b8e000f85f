"""Creates that a client may repeat: by an idempotency key, or by `ifMissing` and a name."""

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, TypeVar

from fastapi import Depends, Header, Request
from starlette.responses import JSONResponse

from stead.api.callers import Owner
from stead.api.dependencies import CreatedNamesDep, IdempotencyDep
from stead.api.errors import ApiError
from stead.api.wire import Wire
from stead.creation.background import new_request_id
from stead.creation.idempotency import IdempotencyKeys, KeyedCall, Make
from stead.errors import InvalidRequest
from stead.shares import KeyedLock

KEY_HEADER = "Idempotency-Key"

T = TypeVar("T")


@dataclass(frozen=True)
class IfMissing(Generic[T]):
    """Create unless there is one of this name. `find` returns those that exist."""

    kind: str
    name: str | None
    find: Callable[[str], Awaitable[Sequence[T]]]


@dataclass(frozen=True)
class CreateCall:
    """A call that creates something."""

    account: str
    request: str
    """The id of the request: what it makes is found by it after a crash."""
    _keyed: KeyedCall | None
    _keys: IdempotencyKeys
    _names: KeyedLock

    @property
    def outlives_client(self) -> bool:
        """Whether the create continues without its client, which repeats the call for the answer."""
        return self._keyed is not None

    @property
    def uuid(self) -> str:
        """An id for what is created, of the kind that identities and repositories have."""
        return request_uuid(self.request)

    async def run(self, kind: type[T], make: Make[T], if_missing: IfMissing[T] | None = None) -> T:
        """The result of `make`; of an earlier call with the same idempotency key; or what exists."""
        if if_missing is not None:
            make = partial(self._ensure, if_missing, make)
        return await (make() if self._keyed is None else self._keys.run(self._keyed, kind, make))

    async def _ensure(self, wanted: IfMissing[T], make: Make[T]) -> T:
        if wanted.name is None:
            raise InvalidRequest(f"ifMissing without a name: give the name of the {wanted.kind}")
        async with self._names.hold((wanted.kind, self.account, wanted.name)):
            found = await wanted.find(wanted.name)
            if len(found) > 1:
                kinds = f"{wanted.kind[:-1]}ies" if wanted.kind.endswith("y") else f"{wanted.kind}s"
                raise ApiError(
                    "NAME_NOT_UNIQUE",
                    f"{len(found)} {kinds} are named {wanted.name!r}: rename or delete all but one",
                )
            return found[0] if found else await make()


async def create_call(
    request: Request,
    owner: Owner,
    keys: IdempotencyDep,
    names: CreatedNamesDep,
    key: Annotated[
        str | None,
        Header(
            alias=KEY_HEADER,
            description="A repeated call with the same key and body gets the first answer, for 24 h, and"
            " creates nothing.",
        ),
    ] = None,
) -> CreateCall:
    request_id = new_request_id()
    keyed = None
    if key is not None:
        target = f"{request.method} {request.url.path}"
        keyed = KeyedCall.parse(owner.account, key, target, await request.body(), request_id)
    return CreateCall(owner.account, request_id, keyed, keys, names)


CurrentCreate = Annotated[CreateCall, Depends(create_call)]


def answer_of(model: Wire) -> JSONResponse:
    """Serialized here: FastAPI would validate it again."""
    return JSONResponse(model.model_dump(by_alias=True))


# The ids of what a request creates follow from its own: it is found by them after a crash.


def request_uuid(request: str) -> str:
    """A UUID of version 4: a path with one is a repository to git's routes."""
    return str(uuid.UUID(bytes=hashlib.sha256(request.encode()).digest()[:16], version=4))


def vpc_id(request: str) -> str:
    return f"vpc-{request.removeprefix('ri-')}"


def snapshot_id(request: str) -> str:
    return f"sc-{request.removeprefix('ri-')}"

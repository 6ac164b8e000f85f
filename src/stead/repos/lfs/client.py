"""Git LFS client: transfers objects to and from other servers with the basic transfer."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from stead.logs import get_logger
from stead.repos.lfs.pointers import pointed_objects
from stead.repos.lfs.store import LfsObject, LfsObjects
from stead.repos.quotas import QuotaReservation
from stead.repos.repository import Repository
from stead.repos.ssrf import AddressRefused, PinnedTarget, RemoteResponse, RequestFailed, SsrfGuard
from stead.repos.transfer.remotes import Remote, SourceUnauthorized, printable

_TYPE = "application/vnd.git-lfs+json"
_AT_ONCE = 100
"""Objects per batch request; GitHub accepts no more."""
_MAX_ANSWER = 4 << 20
_NO_LFS = (404, 405, 410, 501)
"""Status codes of servers without LFS."""
_GONE = (404, 410)
_BATCH_TIMEOUT = 60.0

log = get_logger("stead.repos")

Operation = Literal["download", "upload"]


class _Action(BaseModel):
    href: str
    header: dict[str, str] = Field(default={})


class _ObjectError(BaseModel):
    code: int
    message: str = ""


class _BatchObject(BaseModel):
    oid: str
    actions: dict[str, _Action] | None = None
    error: _ObjectError | None = None

    def action(self, name: str) -> _Action | None:
        return (self.actions or {}).get(name)


class _BatchResponse(BaseModel):
    transfer: str = "basic"
    objects: list[_BatchObject]


class _ObjectId(BaseModel):
    oid: str
    size: int


class _BatchRequest(BaseModel):
    operation: Operation
    transfers: list[str] = Field(default=["basic"])
    objects: list[_ObjectId]
    hash_algo: str = "sha256"


class _ErrorBody(BaseModel):
    """The body of an error response."""

    message: str = ""


class LfsClient:
    """Transfers a repository's LFS objects, so that each side has those of the commits that it receives."""

    def __init__(
        self,
        guard: SsrfGuard,
        repository: Repository,
        objects: LfsObjects,
        quota: QuotaReservation,
        timeout: float,
    ) -> None:
        """`timeout` is in seconds, per object."""
        self._guard = guard.for_account(quota.account)
        self._repository = repository
        self._objects = objects
        self._quota = quota
        self._timeout = timeout

    async def download(self, remote: Remote, new: Sequence[str], known: Iterable[str]) -> None:
        """Download the objects that new commits point to, as far as the remote has them."""
        if not new:
            return
        wanted = await pointed_objects(self._repository, new, known, self._timeout)
        for some in _parts(await self._objects.missing(wanted)):
            for lfs_object, offer in await self._batch(remote, "download", some):
                if (action := offer.action("download")) is not None:
                    await self._get_object(remote, action, lfs_object)
                elif offer.error is not None and offer.error.code not in _GONE:
                    raise RequestFailed(remote.url, _message(offer.error, lfs_object))
                else:
                    log.info("lfs object missing on remote", repo=self._repository.id, oid=lfs_object.oid)

    async def upload(self, remote: Remote, new: Sequence[str], known: Iterable[str]) -> None:
        """Upload the objects that new commits point to, as far as they exist here."""
        if not new or not self._objects.may_have_any:
            return
        pointed = await pointed_objects(self._repository, new, known, self._timeout)
        missing = set(await self._objects.missing(pointed))
        for some in _parts([each for each in pointed if each not in missing]):
            for lfs_object, offer in await self._batch(remote, "upload", some):
                if offer.error is not None:
                    raise RequestFailed(remote.url, _message(offer.error, lfs_object))
                if (action := offer.action("upload")) is not None:
                    await self._put_object(remote, action, lfs_object)
                if (action := offer.action("verify")) is not None:
                    await self._verify(remote, action, lfs_object)

    async def _batch(
        self, remote: Remote, operation: Operation, objects: Sequence[LfsObject]
    ) -> list[tuple[LfsObject, _BatchObject]]:
        """Batch request: the transfer actions of these objects; empty if the server has no LFS."""
        path = remote.target.path.rstrip("/").removesuffix(".git")
        target = replace(remote.target, path=f"{path}.git/info/lfs/objects/batch")
        question = _BatchRequest(operation=operation, objects=[_object_id(each) for each in objects])
        async with self._guard.request(
            "POST",
            target,
            most_bytes=_MAX_ANSWER,
            timeout=_BATCH_TIMEOUT,
            headers={"Accept": _TYPE, "Content-Type": _TYPE},
            content=question.model_dump_json().encode(),
        ) as answer:
            if answer.status in _NO_LFS:
                log.info("remote has no lfs", repo=self._repository.id, status=answer.status)
                return []
            body = await answer.read()
        if answer.status == 401:
            raise SourceUnauthorized(remote.url)
        _check(answer, body)
        try:
            response = _BatchResponse.model_validate_json(body)
        except ValidationError:
            raise RequestFailed(target.shown, "invalid LFS response") from None
        if response.transfer != "basic":
            raise RequestFailed(target.shown, f"unsupported LFS transfer {response.transfer!r}")
        known = {each.oid: each for each in objects}
        return [(known[offer.oid], offer) for offer in response.objects if offer.oid in known]

    async def _get_object(self, remote: Remote, action: _Action, lfs_object: LfsObject) -> None:
        await self._check_action(remote, action)
        async with self._guard.stream_get(
            action.href, most_bytes=lfs_object.size, timeout=self._timeout, headers=action.header
        ) as answer:
            if answer.status != 200:
                raise RequestFailed(answer.target.shown, f"status {answer.status} for an LFS object")
            await self._objects.write_reserved(self._quota, lfs_object.oid, answer.pieces)

    async def _put_object(self, remote: Remote, action: _Action, lfs_object: LfsObject) -> None:
        target = await self._check_action(remote, action)
        headers = {"Content-Type": "application/octet-stream", **action.header}
        with self._objects.open(lfs_object.oid) as stored:
            headers["Content-Length"] = str(stored.size)
            await self._send("PUT", target, headers, stored.pieces(0, stored.size), self._timeout)

    async def _verify(self, remote: Remote, action: _Action, lfs_object: LfsObject) -> None:
        target = await self._check_action(remote, action)
        content = _object_id(lfs_object).model_dump_json().encode()
        headers = {"Accept": _TYPE, "Content-Type": _TYPE, **action.header}
        await self._send("POST", target, headers, content, _BATCH_TIMEOUT)

    async def _send(
        self,
        method: str,
        target: PinnedTarget,
        headers: Mapping[str, str],
        content: bytes | AsyncIterator[bytes],
        timeout: float,
    ) -> None:
        async with self._guard.request(
            method, target, most_bytes=_MAX_ANSWER, timeout=timeout, headers=headers, content=content
        ) as answer:
            _check(answer, await answer.read())

    async def _check_action(self, remote: Remote, action: _Action) -> PinnedTarget:
        target = await self._guard.check(action.href)
        if remote.target.scheme == "https" and target.scheme != "https":
            raise AddressRefused(target.shown, "LFS transfer from https to http")
        return target


def _object_id(lfs_object: LfsObject) -> _ObjectId:
    return _ObjectId(oid=lfs_object.oid, size=lfs_object.size)


def _parts(objects: Sequence[LfsObject]) -> Iterator[Sequence[LfsObject]]:
    return (objects[start : start + _AT_ONCE] for start in range(0, len(objects), _AT_ONCE))


def _check(answer: RemoteResponse, body: bytes) -> None:
    if 200 <= answer.status < 300:
        return
    try:
        message = _ErrorBody.model_validate_json(body).message
    except ValidationError:
        message = ""
    status = f"LFS status {answer.status}"
    raise RequestFailed(answer.target.shown, f"{status} ({printable(message)})" if message else status)


def _message(problem: _ObjectError, lfs_object: LfsObject) -> str:
    return f"LFS object {lfs_object.oid}: status {problem.code} ({printable(problem.message)})"

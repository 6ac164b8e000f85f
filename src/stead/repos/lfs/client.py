"""Git LFS client: transfers objects to and from other servers with the basic transfer."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from stead.logs import get_logger
from stead.repos.lfs.pointers import large_files
from stead.repos.lfs.store import LfsObject, LfsObjects
from stead.repos.quotas import Writing
from stead.repos.repository import Repository
from stead.repos.ssrf import Answer, Egress, EgressFailed, EgressRefused, Target
from stead.repos.transfer.remotes import Remote, SourceUnauthorized, printable

_TYPE = "application/vnd.git-lfs+json"
_AT_ONCE = 100
"""Objects per batch request; GitHub accepts no more."""
_MAX_ANSWER = 4 << 20
_NOT_KEPT = (404, 405, 410, 501)
"""Status codes of servers without LFS."""
_GONE = (404, 410)
_QUESTION_TIMEOUT = 60.0

log = get_logger("stead.repos")

Operation = Literal["download", "upload"]


class _Action(BaseModel):
    href: str
    header: dict[str, str] = Field(default={})


class _Problem(BaseModel):
    code: int
    message: str = ""


class _Offer(BaseModel):
    oid: str
    actions: dict[str, _Action] | None = None
    error: _Problem | None = None

    def action(self, name: str) -> _Action | None:
        return (self.actions or {}).get(name)


class _Offers(BaseModel):
    transfer: str = "basic"
    objects: list[_Offer]


class _Named(BaseModel):
    oid: str
    size: int


class _Question(BaseModel):
    operation: Operation
    transfers: list[str] = Field(default=["basic"])
    objects: list[_Named]
    hash_algo: str = "sha256"


class _Said(BaseModel):
    """The body of an error response."""

    message: str = ""


class LfsExchange:
    """Transfers a repository's LFS objects, so that each side has those of the commits that it receives."""

    def __init__(
        self, egress: Egress, repository: Repository, objects: LfsObjects, writing: Writing, timeout: float
    ) -> None:
        """`timeout` is in seconds, per object."""
        self._egress = egress
        self._repository = repository
        self._objects = objects
        self._writing = writing
        self._timeout = timeout

    async def take(self, remote: Remote, new: Sequence[str], known: Iterable[str]) -> None:
        """Download the objects that new commits point to, as far as the remote has them."""
        if not new:
            return
        wanted = await large_files(self._repository, new, known, self._timeout)
        for some in _parts(await self._objects.missing(wanted)):
            for large, offer in await self._ask(remote, "download", some):
                if (action := offer.action("download")) is not None:
                    await self._download(remote, action, large)
                elif offer.error is not None and offer.error.code not in _GONE:
                    raise EgressFailed(remote.url, _words(offer.error, large))
                else:
                    log.info("lfs object missing on remote", repo=self._repository.id, oid=large.oid)

    async def give(self, remote: Remote, new: Sequence[str], known: Iterable[str]) -> None:
        """Upload the objects that new commits point to, as far as they exist here."""
        if not new or not self._objects.any:
            return
        pointed = await large_files(self._repository, new, known, self._timeout)
        missing = set(await self._objects.missing(pointed))
        for some in _parts([each for each in pointed if each not in missing]):
            for large, offer in await self._ask(remote, "upload", some):
                if offer.error is not None:
                    raise EgressFailed(remote.url, _words(offer.error, large))
                if (action := offer.action("upload")) is not None:
                    await self._upload(remote, action, large)
                if (action := offer.action("verify")) is not None:
                    await self._verify(remote, action, large)

    async def _ask(
        self, remote: Remote, operation: Operation, objects: Sequence[LfsObject]
    ) -> list[tuple[LfsObject, _Offer]]:
        """Batch request: the transfer actions of these objects; empty if the server has no LFS."""
        path = remote.target.path.rstrip("/").removesuffix(".git")
        target = replace(remote.target, path=f"{path}.git/info/lfs/objects/batch")
        question = _Question(operation=operation, objects=[_named(each) for each in objects])
        async with self._egress.request(
            "POST",
            target,
            most_bytes=_MAX_ANSWER,
            timeout=_QUESTION_TIMEOUT,
            headers={"Accept": _TYPE, "Content-Type": _TYPE},
            content=question.model_dump_json().encode(),
        ) as answer:
            if answer.status in _NOT_KEPT:
                log.info("remote has no lfs", repo=self._repository.id, status=answer.status)
                return []
            body = await answer.read()
        if answer.status == 401:
            raise SourceUnauthorized(remote.url)
        _check(answer, body)
        try:
            told = _Offers.model_validate_json(body)
        except ValidationError:
            raise EgressFailed(target.shown, "invalid LFS response") from None
        if told.transfer != "basic":
            raise EgressFailed(target.shown, f"unsupported LFS transfer {told.transfer!r}")
        known = {each.oid: each for each in objects}
        return [(known[offer.oid], offer) for offer in told.objects if offer.oid in known]

    async def _download(self, remote: Remote, action: _Action, large: LfsObject) -> None:
        await self._place(remote, action)
        async with self._egress.stream_get(
            action.href, most_bytes=large.size, timeout=self._timeout, headers=action.header
        ) as answer:
            if answer.status != 200:
                raise EgressFailed(answer.target.shown, f"status {answer.status} for an LFS object")
            await self._objects.write_within(self._writing, large.oid, answer.pieces)

    async def _upload(self, remote: Remote, action: _Action, large: LfsObject) -> None:
        target = await self._place(remote, action)
        headers = {"Content-Type": "application/octet-stream", **action.header}
        with self._objects.open(large.oid) as stored:
            headers["Content-Length"] = str(stored.size)
            await self._send("PUT", target, headers, stored.pieces(0, stored.size), self._timeout)

    async def _verify(self, remote: Remote, action: _Action, large: LfsObject) -> None:
        target = await self._place(remote, action)
        content = _named(large).model_dump_json().encode()
        headers = {"Accept": _TYPE, "Content-Type": _TYPE, **action.header}
        await self._send("POST", target, headers, content, _QUESTION_TIMEOUT)

    async def _send(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        content: bytes | AsyncIterator[bytes],
        timeout: float,
    ) -> None:
        async with self._egress.request(
            method, target, most_bytes=_MAX_ANSWER, timeout=timeout, headers=headers, content=content
        ) as answer:
            _check(answer, await answer.read())

    async def _place(self, remote: Remote, action: _Action) -> Target:
        target = await self._egress.check(action.href)
        if remote.target.scheme == "https" and target.scheme != "https":
            raise EgressRefused(target.shown, "LFS transfer from https to http")
        return target


def _named(large: LfsObject) -> _Named:
    return _Named(oid=large.oid, size=large.size)


def _parts(objects: Sequence[LfsObject]) -> Iterator[Sequence[LfsObject]]:
    return (objects[start : start + _AT_ONCE] for start in range(0, len(objects), _AT_ONCE))


def _check(answer: Answer, body: bytes) -> None:
    if 200 <= answer.status < 300:
        return
    try:
        said = _Said.model_validate_json(body).message
    except ValidationError:
        said = ""
    words = f"LFS status {answer.status}"
    raise EgressFailed(answer.target.shown, f"{words} ({printable(said)})" if said else words)


def _words(problem: _Problem, large: LfsObject) -> str:
    return f"LFS object {large.oid}: status {problem.code} ({printable(problem.message)})"

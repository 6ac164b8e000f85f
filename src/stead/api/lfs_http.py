"""Git LFS over HTTP: the batch API with the basic transfer."""

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from stead.api.streaming import StreamedAnswer, TextError, pieces, read_all
from stead.repos.access import Level
from stead.repos.errors import DiskFull, RepoError
from stead.repos.lfs.store import MAX_BATCH, InvalidLfsObject, LfsObject, LfsObjects
from stead.repos.quotas import QuotaExceeded

_TYPE = "application/vnd.git-lfs+json"
_HEADERS = {"Content-Type": _TYPE, "Cache-Control": "no-store"}
_AUTHENTICATE = {"WWW-Authenticate": 'Basic realm="Stead"', "LFS-Authenticate": 'Basic realm="Stead"'}
MAX_REQUEST = 4 << 20
MAX_VALUES = 20_000
"""Values of a batch's JSON."""
_BATCH = "info/lfs/objects/batch"
_OBJECT = re.compile(r"info/lfs/objects/([0-9a-f]{64})(/verify)?")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")


class _ObjectModel(BaseModel):
    oid: str
    size: int


class _Ref(BaseModel):
    name: str


class _Batch(BaseModel):
    operation: str
    objects: list[_ObjectModel]
    transfers: list[str] = Field(default=["basic"])
    ref: _Ref | None = None
    hash_algo: str = "sha256"


@dataclass(frozen=True)
class LfsRequest:
    """A request and the caller's access level."""

    scope: Scope
    receive: Receive
    answer: StreamedAnswer
    headers: Headers
    level: Level
    anonymous: bool

    def check_write(self) -> None:
        if self.level != "write":
            if self.anonymous:
                raise TextError(
                    401, "authentication required: use a token or an API key as the password", _AUTHENTICATE
                )
            raise TextError(403, "no write access to this repository")

    def check_method(self, *methods: str) -> str:
        method: str = self.scope["method"]
        if method not in methods:
            allowed = ", ".join(methods)
            raise TextError(405, f"method not allowed: use {allowed}", {"Allow": allowed})
        return method


def route(what: str) -> str | None:
    """The route label in metrics; None if it is not an LFS request."""
    if not what.startswith("info/lfs/"):
        return None
    if what == _BATCH:
        return what
    matched = _OBJECT.fullmatch(what)
    return "info/lfs/none" if matched is None else f"info/lfs/objects/{{oid}}{matched[2] or ''}"


def is_transfer(what: str) -> bool:
    """Whether a request sends or receives an object."""
    matched = _OBJECT.fullmatch(what)
    return matched is not None and matched[2] is None


async def refuse(answer: StreamedAnswer, refused: TextError) -> None:
    headers = _HEADERS | refused.headers
    if "WWW-Authenticate" in headers:
        headers |= _AUTHENTICATE
    await _send_json(answer, {"message": str(refused)}, refused.status, headers)


async def answer(request: LfsRequest, objects: LfsObjects, what: str) -> None:
    matched = _OBJECT.fullmatch(what)
    if what == _BATCH:
        request.check_method("POST")
        await _batch(request, objects)
    elif matched is None:
        raise TextError(404, "only the LFS batch API with the basic transfer is supported, without locks")
    elif matched[2]:
        request.check_method("POST")
        await _verify(request, objects, matched[1])
    elif request.check_method("GET", "PUT") == "PUT":
        request.check_write()
        await objects.write(matched[1], pieces(request.receive))
        await request.answer.send(200, b"", {})
    else:
        await _download(request, objects, matched[1])


async def _batch(request: LfsRequest, objects: LfsObjects) -> None:
    try:
        batch = _Batch.model_validate_json(await read_all(pieces(request.receive), MAX_REQUEST))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TextError(422, f"invalid request: {place} {first['msg']}") from None
    if batch.operation not in ("download", "upload"):
        raise TextError(422, f"invalid operation {batch.operation!r}: use download or upload")
    if "basic" not in batch.transfers:
        raise TextError(422, "UNSUPPORTED_TRANSFER: only the basic transfer is supported")
    if batch.hash_algo != "sha256":
        raise TextError(409, "unsupported hash algorithm: use sha256")
    if len(batch.objects) > MAX_BATCH:
        raise TextError(413, f"too many objects in one batch (max {MAX_BATCH})")
    if batch.operation == "upload":
        request.check_write()
    answers = await _batch_objects(request, objects, batch)
    await _send_json(
        request.answer, {"transfer": "basic", "objects": answers, "hash_algo": "sha256"}, 200, _HEADERS
    )


async def _batch_objects(request: LfsRequest, objects: LfsObjects, batch: _Batch) -> list[dict[str, Any]]:
    checked: list[LfsObject | RepoError] = []
    for wanted in batch.objects:
        try:
            checked.append(LfsObject(wanted.oid, wanted.size))
        except RepoError as error:
            checked.append(error)
    # Deduplicate, in order.
    missing = dict.fromkeys(await objects.missing(each for each in checked if isinstance(each, LfsObject)))
    refused = await objects.over_limit(missing) if batch.operation == "upload" else {}
    answers = []
    for wanted, found in zip(batch.objects, checked, strict=True):
        result = refused.get(found, found) if isinstance(found, LfsObject) else found
        offer: dict[str, Any] = {"oid": wanted.oid, "size": wanted.size}
        if isinstance(result, RepoError):
            code = 507 if isinstance(result, QuotaExceeded | DiskFull) else 422
            offer["error"] = {"code": code, "message": str(result)}
        elif batch.operation == "upload" and result in missing:
            offer["actions"] = _actions(request, result, "upload", "verify")
        elif batch.operation == "download" and result in missing:
            offer["error"] = {"code": 404, "message": f"no LFS object {result.oid}"}
        elif batch.operation == "download":
            offer["actions"] = _actions(request, result, "download")
        answers.append(offer)
    return answers


def _actions(request: LfsRequest, wanted: LfsObject, *names: str) -> dict[str, Any]:
    """The URL of an object on the host of this request.

    It carries no credentials and is not `authenticated`, so that git-lfs authenticates by its own.
    """
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        raise TextError(400, "missing Host header")
    root = request.scope["path"].removesuffix("/batch")
    here = f"{request.scope['scheme']}://{host}{root}/{wanted.oid}"
    return {name: {"href": f"{here}/verify" if name == "verify" else here} for name in names}


async def _verify(request: LfsRequest, objects: LfsObjects, oid: str) -> None:
    try:
        wanted = _ObjectModel.model_validate_json(await read_all(pieces(request.receive), MAX_REQUEST))
    except ValidationError:
        raise TextError(422, "invalid request: oid and size are required") from None
    if wanted.oid != oid:
        raise InvalidLfsObject(f"oid mismatch: the path has {oid}, the body {wanted.oid!r}")
    objects.verify(LfsObject(wanted.oid, wanted.size))
    await _send_json(request.answer, {}, 200, _HEADERS)


async def _download(request: LfsRequest, objects: LfsObjects, oid: str) -> None:
    with objects.open(oid) as stored:
        first, last = 0, stored.size - 1
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        # Several ranges or an invalid range: answer the read_all object, as HTTP allows.
        wanted = _RANGE.fullmatch(request.headers.get("range", ""))
        if wanted is not None:
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
            if first > last:
                raise TextError(416, "range outside the object", {"Content-Range": f"bytes */{stored.size}"})
            headers["Content-Range"] = f"bytes {first}-{last}/{stored.size}"
        headers["Content-Length"] = str(last + 1 - first)
        await request.answer.begin(200 if wanted is None else 206, headers)
        async for piece in stored.pieces(first, last + 1):
            await request.answer.write(piece)
        await request.answer.end()


async def _send_json(
    answer: StreamedAnswer, body: dict[str, Any], status: int, headers: dict[str, str]
) -> None:
    await answer.send(status, json.dumps(body).encode(), headers)

"""Git's smart HTTP protocol (clone, fetch, push) and git-lfs, as an ASGI middleware."""

import base64
import contextlib
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stead.addresses import network_of
from stead.api import lfs_http
from stead.api.calls import Call
from stead.api.declared import BodyLimit
from stead.api.errors import ApiError, to_git
from stead.api.streaming import ClientLeft, StreamedAnswer, TextError, decompressed, pieces
from stead.errors import SteadError
from stead.identity.callers import Caller, Callers
from stead.repos.access import Level, RepoAccess
from stead.repos.errors import RepoNotFound
from stead.repos.lfs.store import (
    MAX_OBJECT,
    LfsObjects,
)
from stead.repos.places import GitCaller, Work
from stead.repos.repos import RepoInfo, Repos
from stead.repos.repository import Repository
from stead.repos.transfer.serving import GitService, PackServer, Read, is_protocol

_REPO = r"(?P<repo>[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})"
_WHAT = r"(?P<what>info/refs|HEAD|git-upload-pack|git-receive-pack|info/lfs/[^\n]+)"
_PATH = re.compile(rf"/(?:git/)?{_REPO}(?:\.git)?/{_WHAT}")
_SERVICES = tuple(GitService)
_NEVER_CACHED = {
    "Expires": "Fri, 01 Jan 1980 00:00:00 GMT",
    "Pragma": "no-cache",
    "Cache-Control": "no-cache, max-age=0, must-revalidate",
}
_PLAIN = {"Content-Type": "text/plain; charset=utf-8"}
_AUTHENTICATE = {"WWW-Authenticate": 'Basic realm="Stead"'}


def git_body_limit(scope: Scope) -> BodyLimit | None:
    """What is read of the body of a request of git or git-lfs; None for other requests.

    Packs and LFS objects are streamed, and have limits of their own.
    """
    matched = _PATH.fullmatch(scope["path"])
    if matched is None:
        return None
    what = matched["what"]
    streamed = what in _SERVICES if scope["method"] == "POST" else what.startswith("info/lfs/objects/")
    return BodyLimit(None) if streamed else BodyLimit(lfs_http.MAX_REQUEST, lfs_http.MAX_VALUES)


@dataclass(frozen=True)
class _Route:
    """The route label in metrics."""

    path: str


class SmartHttp:
    """ASGI middleware that serves git clients and passes all other requests to the app.

    It authenticates requests itself, because git sends credentials with Basic authentication, and answers
    errors as plain text, which git prints.
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        repos: Repos,
        access: RepoAccess,
        serving: PackServer,
        max_lfs_object: int = MAX_OBJECT,
    ) -> None:
        self._app = app
        self._callers = callers
        self._repos = repos
        self._access = access
        self._serving = serving
        self._max_lfs_object = max_lfs_object

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        matched = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if matched is None:
            await self._app(scope, receive, send)
            return
        repo, what = matched["repo"].lower(), matched["what"]
        scope["route"] = _Route(f"/{{repo}}/{lfs_http.route(what) or what}")
        answer = StreamedAnswer(send)
        try:
            await self._answer(_GitCall(scope, receive, answer, Headers(scope=scope), repo, what))
        except ClientLeft:
            return
        except (TextError, ApiError, SteadError) as error:
            refused = _in_plain_text(error)
            if answer.begun:
                # The response has started: an aborted connection is the only way to report the failure.
                raise ApiError("INTERNAL", str(refused)) from error
            if lfs_http.route(what):
                await lfs_http.refuse(answer, refused)
            else:
                text = f"{refused}\n".encode()
                await answer.send(refused.status, text, _PLAIN | _NEVER_CACHED | refused.headers)

    async def _answer(self, call: "_GitCall") -> None:
        caller = await self._authenticate(call)
        info, level = await self._level(call.repo, caller)
        if caller is None:
            # git asks without its credential first, and a push is refused without a place.
            if GitService.RECEIVE_PACK in (call.what, *_wanted(call)):
                raise _authentication_required()
            await _current(call).admit_anonymous()
        else:
            _current(call).require(partial(self._check_access, call, caller))
        repository = self._repos.opened(info, _user(caller, call.scope))
        if lfs_http.route(call.what):
            objects = LfsObjects(repository, self._repos.quotas, self._max_lfs_object)
            request = lfs_http.LfsRequest(
                call.scope, call.receive, call.answer, call.headers, level, caller is None
            )
            if lfs_http.is_transfer(call.what):
                async with repository.holding(Work.OBJECT):
                    await lfs_http.answer(request, objects, call.what)
            else:
                await lfs_http.answer(request, objects, call.what)
        elif call.what in _SERVICES:
            await self._serve_pack(call, repository, GitService(call.what), caller, level)
        else:
            await self._advertise(call, repository, caller, level)

    # Authentication

    async def _authenticate(self, call: "_GitCall") -> Caller | None:
        """The caller, with a place for the call; None for an anonymous one, which is only counted yet."""
        current = _current(call)
        if call.headers.get("authorization") is None:
            current.count_anonymous()
            return None
        secret = _secret(call.headers["authorization"])
        current.check_unproven(secret is not None and self._callers.was_valid(secret))
        caller = await self._caller(call)
        if caller is None:
            current.count_anonymous()
            raise TextError(401, "invalid or revoked API key or token", _AUTHENTICATE)
        await current.admit(caller)
        return caller

    async def _caller(self, call: "_GitCall") -> Caller | None:
        secret = _secret(call.headers.get("authorization", ""))
        return await self._callers.authenticate(secret) if secret else None

    async def _level(self, repo: str, caller: Caller | None) -> tuple[RepoInfo, Level]:
        """The repository and the caller's access. No access is answered as not found."""
        with contextlib.suppress(RepoNotFound):
            info = await self._repos.get(repo)
            level = await self._access.level(caller, info)
            if level is not None:
                return info, level
        if caller is None:
            raise _authentication_required()
        raise TextError(404, f"repository {repo} not found, or no access to it")

    async def _check_access(self, call: "_GitCall", caller: Caller) -> None:
        """Raise an error if the credential was revoked, or the access to the repository withdrawn."""
        if await self._caller(call) is None:
            raise ApiError("UNAUTHORIZED_ERROR", "the API key or token was revoked")
        if await self._access.level(caller, await self._repos.get(call.repo)) is None:
            raise RepoNotFound(call.repo)

    # Requests

    async def _advertise(
        self, call: "_GitCall", repository: Repository, caller: Caller | None, level: Level
    ) -> None:
        if call.scope["method"] != "GET":
            raise TextError(405, "method not allowed: use GET", {"Allow": "GET"})
        wanted = _wanted(call)
        if call.what == "HEAD" or len(wanted) != 1 or wanted[0] not in _SERVICES:
            raise TextError(403, "only git's smart HTTP protocol is supported: use git 1.6.6 or later")
        service = GitService(wanted[0])
        _check(service, caller, level)
        reading = self._serving.advertise(repository, service, _protocol(call.headers))
        await self._send(call.answer, reading, f"application/x-{service}-advertisement")

    async def _serve_pack(
        self,
        call: "_GitCall",
        repository: Repository,
        service: GitService,
        caller: Caller | None,
        level: Level,
    ) -> None:
        if call.scope["method"] != "POST":
            raise TextError(405, "method not allowed: use POST", {"Allow": "POST"})
        _check(service, caller, level)
        kind = call.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != f"application/x-{service}-request":
            raise TextError(415, f"unsupported content type: use application/x-{service}-request")
        reading = self._serving.answer(repository, service, _protocol(call.headers), _body(call))
        await self._send(call.answer, reading, f"application/x-{service}-result")

    async def _send(
        self, answer: StreamedAnswer, reading: AbstractAsyncContextManager[Read], content_type: str
    ) -> None:
        async with reading as read:
            piece = await read()
            await answer.begin(200, {"Content-Type": content_type, **_NEVER_CACHED})
            while piece:
                await answer.write(piece)
                piece = await read()
        await answer.end()


@dataclass(frozen=True)
class _GitCall:
    scope: Scope
    receive: Receive
    answer: StreamedAnswer
    headers: Headers
    repo: str
    what: str


def _user(caller: Caller | None, scope: Scope) -> GitCaller:
    """Whose share of git the call uses. Without a peer, as behind a Unix socket, all addresses are one."""
    if caller is not None:
        return GitCaller(caller.account, caller.identity)
    host, _ = scope.get("client") or ("", 0)
    return GitCaller(None, address=network_of(host))


def _in_plain_text(error: TextError | ApiError | SteadError) -> TextError:
    match error:
        case TextError():
            return error
        case ApiError():
            return TextError(error.status, error.message, error.headers)
        case _:
            return to_git(error)


def _wanted(call: _GitCall) -> list[str]:
    """The services that a request for the refs names: one, if git sent it."""
    return parse_qs(call.scope["query_string"].decode("latin-1")).get("service", [])


def _current(call: _GitCall) -> Call:
    current: Call = call.scope["state"]["call"]
    return current


def _check(service: GitService, caller: Caller | None, level: Level) -> None:
    if service is GitService.RECEIVE_PACK and level != "write":
        if caller is None:
            raise _authentication_required()
        raise TextError(403, "no write access to this repository")


def _authentication_required() -> TextError:
    return TextError(401, "authentication required: use a token or an API key as the password", _AUTHENTICATE)


def _secret(authorization: str) -> str | None:
    """The key or token from the Authorization header; the user name of Basic authentication is ignored."""
    scheme, _, value = authorization.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value
    if scheme.lower() != "basic":
        return None
    try:
        user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except ValueError:
        return None
    return password or user


def _protocol(headers: Headers) -> str | None:
    asked = headers.get("git-protocol")
    if asked is not None and not is_protocol(asked):
        raise TextError(400, "invalid Git-Protocol header: expected a list like version=2")
    return asked


def _body(call: _GitCall) -> AsyncGenerator[bytes, None]:
    encoding = call.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("gzip", "x-gzip"):
        return decompressed(pieces(call.receive))
    if encoding != "identity":
        raise TextError(415, "unsupported content encoding: use gzip")
    return pieces(call.receive)

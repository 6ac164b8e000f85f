"""GitHub App client: authentication, installation lookup and repository tokens.

The App authenticates with a JWT signed by its private key, looks up its installation, and gets tokens for one
repository that are valid for an hour.
"""

import json
import re
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey

from stead.errors import InvalidRequest
from stead.github.errors import GithubFailed, GithubRefused
from stead.repos.ssrf import RemoteResponse, RequestFailed, SsrfGuard

GITHUB = "https://github.com"
GITHUB_API = "https://api.github.com"
WEBHOOKS = "/github/webhooks"
"""The path of the webhook receiver."""
TIMEOUT = 30.0
_MIN_TOKEN_LIFETIME = 600
"""Minimum remaining seconds of a token, so that a long fetch can finish with it."""
_JWT_LIFETIME = 540
_CLOCK_SKEW = 60
_MAX_ANSWER = 4 << 20
_ALGORITHM = "RS256"
_NAME = re.compile(r"(?P<owner>[A-Za-z0-9](?:[A-Za-z0-9-]{0,98}))/(?P<name>[A-Za-z0-9._-]{1,100})")
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}


@dataclass(frozen=True)
class App:
    """A GitHub App and its secrets."""

    id: str
    private_key: str = field(repr=False)
    webhook_secret: str = field(repr=False)
    url: str = GITHUB
    """The base URL of repositories."""
    api_url: str = GITHUB_API

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9]{1,20}", self.id):
            # Tokens would work with the client id, but webhooks carry the numeric id.
            raise InvalidRequest(f"invalid App ID {self.id!r}: it is a number")
        try:
            RSAKey.import_key(self.private_key)
        except (ValueError, JoseError):
            raise InvalidRequest("not the private key of a GitHub App: it must be a PEM file") from None

    def sign(self, now: int) -> str:
        """A JWT that authenticates the App for a few minutes."""
        claims = {"iat": now - _CLOCK_SKEW, "exp": now + _JWT_LIFETIME, "iss": self.id}
        return jwt.encode({"alg": _ALGORITHM}, claims, RSAKey.import_key(self.private_key))


@dataclass(frozen=True)
class GithubRepo:
    """A GitHub repository that the App can write to."""

    id: str
    name: str


@dataclass(frozen=True)
class _Token:
    secret: str
    until: float


class GithubClient:
    """GitHub API client for the Apps of all accounts."""

    def __init__(self, guard: SsrfGuard) -> None:
        self._guard = guard
        self._tokens: dict[tuple[App, str], _Token] = {}

    async def slug(self, app: App) -> str:
        """The App's URL name; a successful call proves its id and key."""
        return str((await self._get(app, "/app", app.sign(int(time.time())))).get("slug", ""))

    async def find(self, app: App, name: str) -> GithubRepo:
        """Look up a repository by `owner/name`, which may be a former name."""
        token = await self.token(app, name)
        found = await self._get(app, f"/repos/{name}", token)
        try:
            return GithubRepo(str(int(found["id"])), check_name(found["full_name"]))
        except (KeyError, TypeError, ValueError, InvalidRequest):
            raise GithubFailed(f"invalid response from GitHub about {name}") from None

    async def token(self, app: App, name: str) -> str:
        """A cached token for one repository, valid for at least ten minutes."""
        now = time.time()
        known = self._tokens.get((app, name))
        if known is None or known.until - now < _MIN_TOKEN_LIFETIME:
            self._tokens = {key: each for key, each in self._tokens.items() if each.until > now}
            known = self._tokens[app, name] = await self._new_token(app, name)
        return known.secret

    def drop_token(self, app: App, name: str) -> None:
        """Drop a rejected token from the cache."""
        self._tokens.pop((app, name), None)

    async def _new_token(self, app: App, name: str) -> _Token:
        signed = app.sign(int(time.time()))
        installation = await self._get(app, f"/repos/{name}/installation", signed)
        path = f"/app/installations/{quote(str(installation.get('id', '')), safe='')}/access_tokens"
        target = await self._guard.check(app.api_url + path)
        content = json.dumps({"repositories": [name.partition("/")[2]]}).encode()
        try:
            async with self._guard.request(
                "POST",
                target,
                most_bytes=_MAX_ANSWER,
                timeout=TIMEOUT,
                headers=_HEADERS | {"Authorization": f"Bearer {signed}", "Content-Type": "application/json"},
                content=content,
            ) as answer:
                made = await _read(answer, name)
        except RequestFailed as error:
            raise GithubFailed(str(error)) from error
        if made.get("permissions", {}).get("contents") != "write":
            raise GithubRefused(
                f"the GitHub App may not write {name}: give it the permission Contents: read and write"
            )
        try:
            return _Token(str(made["token"]), datetime.fromisoformat(made["expires_at"]).timestamp())
        except (KeyError, TypeError, ValueError):
            raise GithubFailed("invalid token response from GitHub") from None

    async def _get(self, app: App, path: str, secret: str) -> dict[str, Any]:
        headers = _HEADERS | {"Authorization": f"Bearer {secret}"}
        try:
            async with self._guard.stream_get(
                app.api_url + path, most_bytes=_MAX_ANSWER, timeout=TIMEOUT, headers=headers
            ) as answer:
                return await _read(answer, path.removeprefix("/repos/").removesuffix("/installation"))
        except RequestFailed as error:
            raise GithubFailed(str(error)) from error


async def _read(answer: RemoteResponse, what: str) -> dict[str, Any]:
    """Parse a response of GitHub; raise its error."""
    try:
        body = json.loads(await answer.read() or b"{}")
    except ValueError:
        body = None
    message = str(body.get("message", ""))[:200] if isinstance(body, dict) else ""
    why = f"GitHub answered {answer.status}" + (f" ({message})" if message else "")
    limited = answer.status == 429 or (answer.status == 403 and "rate limit" in message.lower())
    if answer.status == 401:
        raise GithubRefused(f"GitHub rejected the App's id and key: {why}")
    if answer.status in (403, 404, 422) and not limited:
        raise GithubRefused(f"the GitHub App has no access to {what}: install it there first ({why})")
    if answer.status not in (200, 201) or not isinstance(body, dict):
        raise GithubFailed(why)
    return body


def check_name(name: str) -> str:
    """Check `owner/name`, with or without `.git`."""
    found = _NAME.fullmatch(name.removesuffix(".git"))
    if found is None or found["name"] in (".", ".."):
        raise InvalidRequest(f"invalid GitHub repository {name[:200]!r}: use owner/name")
    return found[0]

"""A stand-in for GitHub: its REST API for Apps, tokens, webhooks and LFS, on a git server."""

import base64
import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey

from stead.github.app import App
from support.git_server import GitServer, Page, Question, serving

APP_ID = "4711"
_API = "/api/v3"
_STORE = "/lfs-store/"
_LIMIT = 10.0


@functools.cache
def _key() -> RSAKey:
    return RSAKey.generate_key(2048)


@dataclass
class Hosted:
    id: int
    name: str
    default_branch: str = "main"
    installed: bool = True
    contents: str = "write"


@dataclass
class Github:
    """Serves `owner/name.git` to users without authentication, and to clients with a token for it."""

    server: GitServer
    webhook_secret: str = "it is only a test"
    webhook_url: str | None = None
    lifetime: float = 3600.0
    """Seconds that a token is valid."""
    repos: dict[str, Hosted] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """The repository of each token."""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """Sent webhooks: the repository and the response status."""
    given: int = 0
    """Number of tokens issued."""
    seen: dict[str, str] = field(default_factory=dict)
    down: bool = False
    large_files: dict[str, bytes] = field(default_factory=dict)
    """By hash."""
    verified: list[str] = field(default_factory=list)
    lfs_pass: str = field(default_factory=lambda: secrets.token_hex(8))
    lfs_answer: tuple[int, dict[str, Any]] | None = None
    """The response to all LFS requests."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def app(self) -> App:
        url = self.server.url
        return App(APP_ID, _key().as_pem(private=True).decode(), self.webhook_secret, url, f"{url}{_API}")

    def create(self, name: str, branch: str = "main") -> Path:
        self.repos[name] = Hosted(len(self.repos) + 1000, name, branch)
        (self.server.folder / name).parent.mkdir(exist_ok=True)
        return self.server.init(f"{name}.git", branch)

    def rename(self, old: str, new: str) -> None:
        self.repos[new] = self.repos.pop(old)
        self.repos[new].name = new
        (self.server.folder / f"{old}.git").rename(self.server.folder / f"{new}.git")

    def path(self, name: str) -> Path:
        return self.server.folder / f"{name}.git"

    def url(self, name: str) -> str:
        """The URL that users push to."""
        return self.server.url.replace("://", "://person:secret@") + f"/{name}.git"

    def git(self, name: str, *arguments: str) -> str:
        """Run git inside GitHub."""
        command = ["git", "-c", "safe.directory=*", *arguments]
        ran = subprocess.run(command, cwd=self.path(name), capture_output=True, text=True, check=True)
        return ran.stdout

    def refs(self, name: str) -> dict[str, str]:
        printed = self.git(name, "for-each-ref", "--format=%(refname) %(objectname)")
        return dict(line.split(" ") for line in printed.splitlines())

    def protect(self, name: str, ref: str) -> None:
        """Reject pushes to this ref."""
        hook = self.path(name) / "hooks" / "update"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f'#!/bin/sh\n[ "$1" != "{ref}" ] || {{ echo "protected branch" >&2; exit 1; }}\n')
        hook.chmod(0o755)

    # Requests

    def judge(self, question: Question) -> Page | None:
        if self.down:
            return Page(b"<html>a unicorn</html>", 503)
        if question.path.startswith(_API):
            return self._rest(question, question.path.removeprefix(_API))
        if question.path.startswith(_STORE):
            return self._store(question, question.path.removeprefix(_STORE))
        name = question.path.strip("/").partition(".git/")[0]
        kind, _, pair = question.headers.get("authorization", "").partition(" ")
        login = base64.b64decode(pair).decode() if kind == "Basic" else ""
        user, _, secret = login.partition(":")
        if login == "person:secret" or (user == "x-access-token" and self.tokens.get(secret) == name):
            if question.path.endswith("/info/lfs/objects/batch"):
                return self._large_files(json.loads(question.read()))
            return None if name in self.repos else Page(b"Not Found", 404)
        return Page(b"who are you?", 401, {"WWW-Authenticate": 'Basic realm="GitHub"'})

    def _rest(self, question: Question, path: str) -> Page:
        secret = question.headers.get("authorization", "").removeprefix("Bearer ")
        parts = path.strip("/").split("/")
        name = "/".join(parts[1:3])
        if parts[0] == "repos" and len(parts) == 3 and secret in self.tokens:
            hosted = self.repos.get(self.tokens[secret])
            if hosted is None or hosted.name != name:
                return _says(404, {"message": "Not Found"})
            return _says(200, _facts(hosted))
        if not _signed_by_app(secret):
            return _says(401, {"message": "A JSON web token could not be decoded"})
        if path == "/app":
            return _says(200, {"slug": "stead-tests", "id": int(APP_ID)})
        if parts[0] == "repos" and parts[3:] == ["installation"]:
            hosted = self.repos.get(name)
            if hosted is None or not hosted.installed:
                return _says(404, {"message": "Not Found"})
            return _says(200, {"id": hosted.id + 1})
        if parts[:2] == ["app", "installations"] and parts[3:] == ["access_tokens"]:
            return self._give(int(parts[2]), json.loads(question.read()))
        return _says(404, {"message": "Not Found"})

    def _give(self, installation: int, wanted: dict[str, Any]) -> Page:
        hosted = next((each for each in self.repos.values() if each.id + 1 == installation), None)
        if hosted is None or wanted["repositories"] != [hosted.name.partition("/")[2]]:
            return _says(422, {"message": "There is at least one repository that does not exist"})
        token = f"ghs_{secrets.token_hex(18)}"
        self.tokens[token] = hosted.name
        self.given += 1
        until = datetime.fromtimestamp(time.time() + self.lifetime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        permissions = {"contents": hosted.contents, "metadata": "read"}
        return _says(201, {"token": token, "expires_at": until, "permissions": permissions})

    def _large_files(self, asked: dict[str, Any]) -> Page:
        """LFS batch API: objects are on another path, and need the headers given here."""
        if self.lfs_answer is not None:
            return _says(*self.lfs_answer)
        offers = []
        for wanted in asked["objects"]:
            place = {"href": f"{self.server.url}{_STORE}{wanted['oid']}", "header": {"X-Pass": self.lfs_pass}}
            kept = len(self.large_files.get(wanted["oid"], b"")) == wanted["size"]
            offer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if asked["operation"] == "download":
                missing = {"error": {"code": 404, "message": "Object does not exist on the server"}}
                offer |= {"actions": {"download": place}} if kept else missing
            elif not kept:
                verify = place | {"href": f"{place['href']}/verify"}
                offer["actions"] = {"upload": place, "verify": verify}
            offers.append(offer)
        return _says(200, {"transfer": "basic", "objects": offers})

    def _store(self, question: Question, path: str) -> Page:
        oid, _, verify = path.partition("/")
        if question.headers.get("x-pass") != self.lfs_pass or "authorization" in question.headers:
            return _says(403, {"message": "that is not what you were told to show"})
        if question.method == "PUT":
            self.large_files[oid] = question.read()
            return Page(b"", 200)
        content = self.large_files.get(oid)
        if content is None:
            return _says(404, {"message": "Not Found"})
        if verify:
            told = json.loads(question.read())
            self.verified.append(oid)
            return _says(200 if told == {"oid": oid, "size": len(content)} else 422, {})
        return Page(content)

    def done(self, path: str) -> None:
        """Send a webhook if it was a push."""
        name = path.strip("/").partition(".git/")[0]
        if self.webhook_url is None or not path.endswith("/git-receive-pack"):
            return
        with self.lock:
            refs = json.dumps(self.refs(name), sort_keys=True)
            if self.seen.get(name) == refs:
                return
            self.seen[name] = refs
            self.tell(name)

    def webhook(self, name: str, event: str, secret: str | None = None) -> tuple[bytes, dict[str, str]]:
        """The body and headers of a webhook."""
        body = json.dumps({"action": "done", "repository": _facts(self.repos[name])}).encode()
        signed = hmac.new((secret or self.webhook_secret).encode(), body, hashlib.sha256).hexdigest()
        return body, {
            "Content-Type": "application/json",
            "User-Agent": "GitHub-Hookshot/tests",
            "X-GitHub-Event": event,
            "X-GitHub-Hook-Installation-Target-ID": APP_ID,
            "X-Hub-Signature-256": f"sha256={signed}",
        }

    def tell(self, name: str, event: str = "push") -> None:
        request = urllib.request.Request(str(self.webhook_url), *self.webhook(name, event))
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT) as answer:
                self.sent.append((name, answer.status))
        except urllib.error.HTTPError as error:
            with error:
                self.sent.append((name, error.code))


def _says(status: int, told: Any) -> Page:
    return Page(json.dumps(told).encode(), status, {"Content-Type": "application/json"})


def _facts(hosted: Hosted) -> dict[str, Any]:
    return {"id": hosted.id, "full_name": hosted.name, "default_branch": hosted.default_branch}


def _signed_by_app(secret: str) -> bool:
    try:
        claims = jwt.decode(secret, _key(), algorithms=["RS256"]).claims
    except (JoseError, ValueError):
        return False
    now = time.time()
    return bool(claims["iss"] == APP_ID and claims["iat"] <= now < claims["exp"] <= now + 600)


@contextlib.contextmanager
def playing_github(folder: Path) -> Iterator[Github]:
    with serving(folder) as server:
        github = Github(server)
        server.judge, server.done = github.judge, github.done
        yield github

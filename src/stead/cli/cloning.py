"""`stead git clone`: a clone with a token of its own.

Least privilege: each clone gets a new identity with one permission, on this repository. A leaked clone does
not leak the account's API key, the server enforces `--readonly`, and each clone can be revoked alone. The
token is never a command-line argument (visible to all users of the host) nor part of the remote's URL (git
prints it): during the clone it is in git's environment, afterwards in a file in `.git` with mode 0600.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stead.cli.connection import target
from stead.cli.output import fail, note
from stead.cli.signals import ignore_repeated_signals, signals_as_exits
from stead.cli.temporary_identity import delete_identity

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.git_models import RepoInfo
    from stead.sdk.models import Permission

_VARIABLE = "STEAD_CLONE_TOKEN"
_FILE = "stead-token"
# Resolve the path on each call: clones can be moved and have worktrees.
_HELPER = '!f() {{ test "$1" = get && echo username=x-access-token && echo "password={}"; }}; f'
_WHILE_CLONING = _HELPER.format(f"${_VARIABLE}")
_AFTERWARDS = _HELPER.format(f'$(cat "$(git rev-parse --git-common-dir)/{_FILE}")')

_ELSEWHERE = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
)
_GRACE = 10.0
_MAX_NAME = 200
"""Characters of an identity's name; a repository's may have more."""


@dataclass(frozen=True)
class Credential:
    """The token of a clone, and its identity if one was created for the clone."""

    token: str
    permission: "Permission | None" = None
    identity_id: str | None = None
    token_id: str | None = None


@dataclass(frozen=True)
class ClonedRepo:
    repo_id: str
    path: str
    permission: "Permission | None"
    identity_id: str | None
    token_id: str | None


def clone(stead: "Stead", info: "RepoInfo", folder: Path, permission: "Permission") -> ClonedRepo:
    """Clone a repository into a missing or empty folder."""
    url = stead.git.repos.ref(info.id).clone_url()
    with signals_as_exits(), _credential(stead, info, permission) as credential:
        _run_git(url, folder, credential)
        if credential is not None:
            _store_credential(url, info.id, folder, credential)
    found = credential or Credential("")
    path = str(folder.absolute())
    return ClonedRepo(info.id, path, found.permission, found.identity_id, found.token_id)


@contextlib.contextmanager
def _credential(stead: "Stead", info: "RepoInfo", permission: "Permission") -> Iterator[Credential | None]:
    """A credential for the clone; an identity created for a clone that fails is deleted.

    A public repository of another account needs none.
    """
    from stead.sdk.errors import RepoNotFound

    if stead.whoami().identity_id is not None:
        # An identity cannot create identities: use its own token.
        if permission == "read":
            note("the clone uses the current token and has its permissions")
        yield Credential(target().key or "")
        return
    try:
        # Deleted with the repository; its token does not expire, or the clone could not push any more.
        name = f"clone of {info.name or info.id}"
        identity = stead.identities.create(name=name[:_MAX_NAME], repo=info.id)
    except RepoNotFound:
        if info.visibility != "public":
            raise
        yield None
        return
    kept = False
    try:
        identity.permissions.git.grant(info.id, permission=permission)
        made = identity.tokens.create()
        yield Credential(made.token, permission, identity.id, made.id)
        kept = True
    finally:
        if not kept:
            delete_identity(identity)


def _run_git(url: str, folder: Path, credential: Credential | None) -> None:
    environment = _environment() | {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": ""}
    options: list[str] = []
    if credential is not None:
        environment[_VARIABLE] = credential.token
        # Disable the user's credential helpers: they may hold another token for this server.
        options = ["-c", f"{_helper_of(url)}=", "-c", f"{_helper_of(url)}={_WHILE_CLONING}"]
    try:
        command = ["git", *options, "clone", "--", url, str(folder)]
        # Own process group: a stopped git leaves its HTTP helper running.
        git = subprocess.Popen(command, env=environment, process_group=0)
    except FileNotFoundError:
        fail("git is not installed: install it and try again")
    with git:
        try:
            code = git.wait()
        except BaseException:
            _end(git)
            raise
    if code:
        fail(f"git clone failed with exit code {code}")


def _end(git: "subprocess.Popen[bytes]") -> None:
    """Stop git with SIGTERM, so that it can remove the partial clone."""
    with ignore_repeated_signals():
        os.killpg(git.pid, signal.SIGTERM)
        try:
            git.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(git.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """The environment without variables that point git to another repository, as in a hook."""
    return {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}


def _store_credential(url: str, repo_id: str, folder: Path, credential: Credential) -> None:
    """Store the token in the clone and configure git's credential helper."""
    place = folder / ".git" / _FILE
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{credential.token}\n")
    facts = {
        "stead.repoId": repo_id,
        "stead.identityId": credential.identity_id,
        "stead.tokenId": credential.token_id,
        "stead.permission": credential.permission,
    }
    settings = [(key, value) for key, value in facts.items() if value is not None]
    for key, value in [(_helper_of(url), ""), (_helper_of(url), _AFTERWARDS), *settings]:
        command = ["git", "-C", str(folder), "config", "--add", key, value]
        if subprocess.run(command, env=_environment(), check=False).returncode:
            fail(f"cannot write the git configuration of the clone in {folder}")


def _helper_of(url: str) -> str:
    """The credential setting for the whole server: git-lfs asks without the repository's path."""
    parts = urlsplit(url)
    return f"credential.{parts.scheme}://{parts.netloc}.helper"

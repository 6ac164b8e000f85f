# Made by scripts/unasync from _async/identities.py.
"""Identities: who may use some of an account's machines and repositories, and nothing else."""

from collections.abc import Sequence
from typing import Any

from stead.sdk._sync.connection import Connection
from stead.sdk.models import (
    GitPermission,
    GrantedRepo,
    IdentityInfo,
    IdentityList,
    Permission,
    Token,
    VmPermission,
)
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import request

_ROOT = "/identity/v1/identities"


class Identities:
    """Identities: made, found, deleted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(self) -> "Identity":
        """Make an identity that may do nothing yet."""
        info = parse(IdentityInfo, self._connection.call(request("POST", _ROOT)))
        return Identity(self._connection, info.id)

    def list(self, *, limit: int | None = None, offset: int = 0) -> IdentityList:
        call = request("GET", _ROOT, query={"limit": limit, "offset": offset})
        return parse(IdentityList, self._connection.call(call))

    def ref(self, identity_id: str) -> "Identity":
        """A handle on an identity, without asking whether it is there."""
        return Identity(self._connection, identity_id)

    def delete(self, identity_id: str) -> None:
        """Delete an identity. Its tokens are worthless from now on."""
        self.ref(identity_id).delete()


class Identity:
    """A handle on one identity: its tokens and what it may do."""

    def __init__(self, connection: Connection, identity_id: str) -> None:
        self.id = identity_id
        self.tokens = Tokens(connection, identity_id)
        """What it shows to be let in."""
        self.permissions = Permissions(connection, identity_id)
        """What it may use."""
        self._connection = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def delete(self) -> None:
        """Delete it. Its tokens are worthless from now on."""
        self._connection.call(request("DELETE", f"{_ROOT}/{{}}", self.id))


class Tokens:
    """Access tokens of an identity: for `Stead(access_token=...)`, and as the password for SSH and Git."""

    def __init__(self, connection: Connection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    def create(self) -> Token:
        """A new token. Its secret is told only now."""
        return parse(Token, self._call("POST", ""))

    def list(self) -> list[str]:
        """The ids of the tokens that are valid."""
        return [info.id for info in parse_list(IdentityInfo, self._call("GET", ""), "tokens")]

    def revoke(self, token_id: str) -> None:
        """Make a token worthless, at once."""
        self._call("DELETE", "/{}", token_id)

    def _call(self, method: str, path: str, *parts: str) -> Any:
        call = request(method, f"{_ROOT}/{{}}/tokens{path}", self._identity_id, *parts)
        return self._connection.call(call)


class Permissions:
    """What an identity may use."""

    def __init__(self, connection: Connection, identity_id: str) -> None:
        self.vms = VmPermissions(connection, identity_id)
        """Machines."""
        self.git = GitPermissions(connection, identity_id)
        """Repositories."""


class VmPermissions:
    """The machines that an identity may use: commands, files, terminals; not their life and death."""

    def __init__(self, connection: Connection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    def grant(self, vm_id: str, *, allowed_users: Sequence[str] | None = None) -> VmPermission:
        """Let it use a machine, as any Linux user or only as the allowed ones."""
        return parse(VmPermission, self._call("POST", vm_id, json=_allowed(allowed_users)))

    def list(self, *, limit: int | None = None, offset: int = 0) -> list[VmPermission]:
        query = {"limit": limit, "offset": offset}
        return parse_list(VmPermission, self._call("GET", query=query), "permissions")

    def get(self, vm_id: str) -> VmPermission:
        return parse(VmPermission, self._call("GET", vm_id))

    def update(self, vm_id: str, *, allowed_users: Sequence[str] | None = None) -> VmPermission:
        """Change as which Linux users it may use a machine."""
        return parse(VmPermission, self._call("PUT", vm_id, json=_allowed(allowed_users)))

    def revoke(self, vm_id: str) -> None:
        self._call("DELETE", vm_id)

    def _call(self, method: str, *parts: str, **options: Any) -> Any:
        path = f"{_ROOT}/{{}}/permissions/vm" + "/{}" * len(parts)
        return self._connection.call(request(method, path, self._identity_id, *parts, **options))


class GitPermissions:
    """The repositories that an identity may read or write."""

    def __init__(self, connection: Connection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    def grant(self, repo_id: str, *, permission: Permission = "read") -> None:
        self._call("POST", repo_id, json={"permission": permission})

    def list(self, *, limit: int | None = None, offset: int = 0) -> list[GrantedRepo]:
        query = {"limit": limit, "offset": offset}
        return parse_list(GrantedRepo, self._call("GET", query=query), "repositories")

    def get(self, repo_id: str) -> GitPermission:
        return parse(GitPermission, self._call("GET", repo_id))

    def update(self, repo_id: str, *, permission: Permission) -> None:
        self._call("PUT", repo_id, json={"permission": permission})

    def revoke(self, repo_id: str) -> None:
        self._call("DELETE", repo_id)

    def _call(self, method: str, *parts: str, **options: Any) -> Any:
        path = f"{_ROOT}/{{}}/permissions/git" + "/{}" * len(parts)
        return self._connection.call(request(method, path, self._identity_id, *parts, **options))


def _allowed(users: Sequence[str] | None) -> dict[str, Any]:
    return {"allowedUsers": None if users is None else list(users)}

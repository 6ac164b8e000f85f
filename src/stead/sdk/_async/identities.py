"""Identities: restricted callers that may use only the VMs and repositories granted to them."""

import builtins
from collections.abc import Sequence
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_identity, find_repo, find_vm
from stead.sdk.arguments import checks_arguments
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
from stead.sdk.requests import UNSET, request

_ROOT = "/identity/v1/identities"


@checks_arguments
class AsyncIdentities:
    """Create, find, list and delete identities."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self,
        *,
        name: str | None = None,
        repo: str | None = None,
        if_missing: bool = False,
        idempotency_key: str | None = None,
    ) -> "AsyncIdentity":
        """Create an identity. It has no permissions until you grant some; `name` is a label.

        One that is made for a repository (`repo`: id, unique id prefix or unique name) is deleted with it.

        With `if_missing`, an identity of this name is returned as it is, and its `created` is False;
        `NameNotUnique` if there are several. A call that is repeated with the same `idempotency_key` within
        24 h returns the same identity.
        """
        body: dict[str, Any] = {} if name is None else {"name": name}
        if repo is not None:
            body["repoId"] = await find_repo(self._connection, repo)
        if if_missing:
            body["ifMissing"] = True
        call = request(
            "POST", _ROOT, json=body or UNSET, idempotent=if_missing, idempotency_key=idempotency_key
        )
        answer = await self._connection.call(call)
        info = parse(IdentityInfo, answer)
        identity = AsyncIdentity(self._connection, info.id, last_info=info)
        identity.created = answer.get("created") is not False
        return identity

    async def list(self, *, limit: int | None = None, offset: int = 0) -> IdentityList:
        """Identities, oldest first, with their names and how many permissions each has."""
        call = request("GET", _ROOT, query={"limit": limit, "offset": offset})
        return parse(IdentityList, await self._connection.call(call))

    async def find(self, identity: str) -> "AsyncIdentity":
        """A handle on the identity with this id, unique id prefix (4 characters or more), or unique name.

        A full id is used as it is, without a request; else the identities are listed. Raises
        `IdentityNotFound` if there is none, `AmbiguousName` if there are several.
        """
        found, info = await find_identity(self._connection, identity)
        return AsyncIdentity(self._connection, found, last_info=info)

    def ref(self, identity_id: str) -> "AsyncIdentity":
        """A handle on the identity with this id, without a request: it need not exist."""
        return AsyncIdentity(self._connection, identity_id)

    async def delete(self, identity: str) -> None:
        """Delete an identity, by id, unique id prefix or unique name. Its tokens stop working at once."""
        await (await self.find(identity)).delete()


@checks_arguments
class AsyncIdentity:
    """A handle on one identity: its tokens and its permissions."""

    def __init__(
        self, connection: AsyncConnection, identity_id: str, *, last_info: IdentityInfo | None = None
    ) -> None:
        self.id = identity_id
        self.last_info = last_info
        """The server's last answer about it; None if this handle never asked."""
        self.created: bool | None = None
        """False if it existed when it was to be created with `if_missing`; None if this is not known."""
        self.tokens = AsyncTokens(connection, identity_id)
        """Its access tokens."""
        self.permissions = AsyncPermissions(connection, identity_id)
        """The VMs and repositories that it may use."""
        self._connection = connection

    @property
    def name(self) -> str | None:
        """Its name, if this handle knows it: from create or find."""
        return None if self.last_info is None else self.last_info.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def delete(self) -> None:
        """Delete it. Its tokens stop working at once."""
        await self._connection.call(request("DELETE", f"{_ROOT}/{{}}", self.id))


@checks_arguments
class AsyncTokens:
    """Access tokens of an identity: for `Stead(access_token=...)`, and as the password for SSH and Git."""

    def __init__(self, connection: AsyncConnection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    async def create(self) -> Token:
        """Create a token. Only this answer contains its secret."""
        return parse(Token, await self._call("POST", ""))

    async def list(self) -> builtins.list[str]:
        """The ids of the valid tokens."""
        return [info.id for info in parse_list(IdentityInfo, await self._call("GET", ""), "tokens")]

    async def revoke(self, token_id: str) -> None:
        """Revoke a token. It stops working at once."""
        await self._call("DELETE", "/{}", token_id)

    async def _call(self, method: str, path: str, *parts: str) -> Any:
        call = request(method, f"{_ROOT}/{{}}/tokens{path}", self._identity_id, *parts)
        return await self._connection.call(call)


@checks_arguments
class AsyncPermissions:
    """The VMs and repositories that an identity may use."""

    def __init__(self, connection: AsyncConnection, identity_id: str) -> None:
        self.vms = AsyncVmPermissions(connection, identity_id)
        """Permissions for VMs."""
        self.git = AsyncGitPermissions(connection, identity_id)
        """Permissions for repositories."""


@checks_arguments
class AsyncVmPermissions:
    """The VMs that an identity may use: commands, files, services and terminals, but not stop or delete.

    A VM is given by its id, a unique id prefix, or a unique name.
    """

    def __init__(self, connection: AsyncConnection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    async def grant(self, vm: str, *, allowed_users: Sequence[str] | None = None) -> VmPermission:
        """Grant the use of a VM, as any Linux user or only as `allowed_users`."""
        return parse(VmPermission, await self._call("POST", vm, json=_allowed(allowed_users)))

    async def list(self, *, limit: int | None = None, offset: int = 0) -> builtins.list[VmPermission]:
        """The VM permissions, oldest first."""
        query = {"limit": limit, "offset": offset}
        return parse_list(VmPermission, await self._call("GET", query=query), "permissions")

    async def get(self, vm: str) -> VmPermission:
        """The permission for one VM; `PermissionNotFound` if it has none."""
        return parse(VmPermission, await self._call("GET", vm))

    async def update(self, vm: str, *, allowed_users: Sequence[str] | None = None) -> VmPermission:
        """Change the Linux users of a permission; None allows every user."""
        return parse(VmPermission, await self._call("PUT", vm, json=_allowed(allowed_users)))

    async def revoke(self, vm: str) -> None:
        """Revoke the permission for a VM. The next call with a token of the identity is refused."""
        await self._call("DELETE", vm)

    async def _call(self, method: str, vm: str | None = None, **options: Any) -> Any:
        path, parts = f"{_ROOT}/{{}}/permissions/vm", [self._identity_id]
        if vm is not None:
            path, parts = f"{path}/{{}}", [*parts, (await find_vm(self._connection, vm))[0]]
        return await self._connection.call(request(method, path, *parts, **options))


@checks_arguments
class AsyncGitPermissions:
    """The repositories that an identity may read or write.

    A repository is given by its id, a unique id prefix, or a unique name.
    """

    def __init__(self, connection: AsyncConnection, identity_id: str) -> None:
        self._connection = connection
        self._identity_id = identity_id

    async def grant(self, repo: str, permission: Permission = "read") -> None:
        """Grant access to a repository: "read", or "write", which includes reading."""
        await self._call("POST", repo, json={"permission": permission})

    async def list(self, *, limit: int | None = None, offset: int = 0) -> builtins.list[GrantedRepo]:
        """The repositories that the identity may use, with its access level."""
        query = {"limit": limit, "offset": offset}
        return parse_list(GrantedRepo, await self._call("GET", query=query), "repositories")

    async def get(self, repo: str) -> GitPermission:
        """The permission for one repository; its `access_level` is None if it has none."""
        return parse(GitPermission, await self._call("GET", repo))

    async def update(self, repo: str, permission: Permission) -> None:
        """Change the permission for a repository to "read" or "write"."""
        await self._call("PUT", repo, json={"permission": permission})

    async def revoke(self, repo: str) -> None:
        """Revoke the permission for a repository."""
        await self._call("DELETE", repo)

    async def _call(self, method: str, repo: str | None = None, **options: Any) -> Any:
        path, parts = f"{_ROOT}/{{}}/permissions/git", [self._identity_id]
        if repo is not None:
            path, parts = f"{path}/{{}}", [*parts, await find_repo(self._connection, repo)]
        return await self._connection.call(request(method, path, *parts, **options))


def _allowed(users: Sequence[str] | None) -> dict[str, Any]:
    return {"allowedUsers": None if users is None else list(users)}

"""Wire models of identities, tokens and permissions."""

from typing import Literal, Self

from pydantic import Field

from stead.api.wire import Time, Wire
from stead.identity.identities import Identity, Page, Permission
from stead.repos.repos import RepoInfo

AccessLevel = Literal["read", "write"]


class NewIdentity(Wire):
    name: str | None = Field(default=None, description="A label; it need not be unique.")
    if_missing: bool | None = Field(
        default=None, description="Answer with the identity of this name if there is one, else create it."
    )
    repo_id: str | None = Field(
        default=None, description="A repository of the account that it is for: it is deleted with it."
    )


class IdentityModel(Wire):
    id: str
    managed: bool = Field(description="Stead uses this identity itself; it cannot be deleted.")
    name: str | None = None
    created_at: Time
    vm_grants: int = Field(description="The number of VMs that it has permissions for.")
    repo_grants: int = Field(description="The number of repositories that it has permissions for.")


class CreatedIdentity(IdentityModel):
    created: bool = Field(default=True, description="False: it existed, and `ifMissing` was given.")


class IdentityList(Wire):
    identities: list[IdentityModel]
    offset: int
    total: int

    @classmethod
    def of(cls, page: Page[Identity]) -> Self:
        items = [IdentityModel.model_validate(identity) for identity in page.items]
        return cls(identities=items, offset=page.offset, total=page.total)


class TokenModel(Wire):
    id: str


class TokenList(Wire):
    tokens: list[TokenModel]


class NewToken(TokenModel):
    token: str = Field(description="The secret. Only this answer contains it.")


class VmPermissionModel(Wire):
    id: str
    vm_id: str
    identity_id: str
    allowed_users: list[str] | None
    granted_at: Time
    granted_by: str

    @classmethod
    def of(cls, permission: Permission) -> Self:
        users = permission.allowed_users
        return cls(
            id=permission.id,
            vm_id=permission.machine,
            identity_id=permission.identity,
            allowed_users=None if users is None else list(users),
            granted_at=permission.granted_at,
            granted_by=permission.granted_by,
        )


class VmPermissionList(Wire):
    permissions: list[VmPermissionModel]
    offset: int
    total: int

    @classmethod
    def of(cls, page: Page[Permission]) -> Self:
        items = [VmPermissionModel.of(permission) for permission in page.items]
        return cls(permissions=items, offset=page.offset, total=page.total)


class VmAccess(Wire):
    """The Linux users that a permission allows."""

    allowed_users: list[str] | None = Field(default=None, description="Null allows every user.")


class RepositoryAccess(Wire):
    permission: AccessLevel


class RepositoryPermission(Wire):
    identity: str
    repo: str
    access_level: AccessLevel | None


class AccessibleRepository(Wire):
    id: str
    name: str | None = None
    account_id: str
    permissions: AccessLevel
    visibility: Literal["public", "private"]

    @classmethod
    def of(cls, info: RepoInfo, level: AccessLevel) -> Self:
        visibility: Literal["public", "private"] = "public" if info.public else "private"
        return cls(
            id=info.id, name=info.name, account_id=info.account, permissions=level, visibility=visibility
        )


class AccessibleRepositoryList(Wire):
    repositories: list[AccessibleRepository]

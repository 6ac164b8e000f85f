"""Identities, their tokens and their permissions."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from stead.api.callers import CurrentCall, Owner
from stead.api.dependencies import AccessDep, IdentitiesDep, ReposDep
from stead.api.errors import ApiError
from stead.api.large_answers import Items, large_answer
from stead.api.repeatable import CurrentCreate, IfMissing, answer_of
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.identities import (
    AccessibleRepository,
    AccessibleRepositoryList,
    CreatedIdentity,
    IdentityList,
    NewIdentity,
    NewToken,
    RepositoryAccess,
    RepositoryPermission,
    TokenList,
    TokenModel,
    VmAccess,
    VmPermissionList,
    VmPermissionModel,
)
from stead.creation.results import Ensured
from stead.identity.identities import PAGE, Identity
from stead.repos.errors import RepoNotFound
from stead.repos.repos import Repos

MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="The maximum number of entries.")]
Offset = Annotated[int, Query(ge=0, le=LARGEST, description="The number of entries to skip.")]

router = APIRouter(prefix="/identity/v1/identities", tags=["identities"])


@router.get("")
async def list_identities(
    owner: Owner,
    identities: IdentitiesDep,
    limit: Limit = PAGE,
    offset: Offset = 0,
    include_managed: Annotated[
        bool, Query(alias="includeManaged", description="Include identities that Stead uses itself.")
    ] = False,
) -> IdentityList:
    """List the account's identities, oldest first."""
    page = await identities.list(owner.account, limit=limit, offset=offset, managed=include_managed)
    return IdentityList.of(page)


@router.post("", response_model=CreatedIdentity)
async def create_identity(
    owner: Owner,
    identities: IdentitiesDep,
    repos: ReposDep,
    create: CurrentCreate,
    body: NewIdentity | None = None,
) -> JSONResponse:
    """Create an identity. It has no permissions until you grant some."""
    wanted = body or NewIdentity()
    if wanted.repo_id is not None:
        await _check_repository(repos, owner.account, wanted.repo_id)

    async def make() -> Ensured[Identity]:
        made = await identities.create(
            owner.account, name=wanted.name, repo=wanted.repo_id, identity_id=create.uuid
        )
        return Ensured(made)

    async def existing(name: str) -> list[Ensured[Identity]]:
        return [Ensured(each, created=False) for each in await identities.named(owner.account, name)]

    if_missing = IfMissing("identity", wanted.name, existing) if wanted.if_missing else None
    made = await create.run(Ensured[Identity], make, if_missing)
    model = CreatedIdentity.model_validate(made.value)
    return answer_of(model.model_copy(update={"created": made.created}))


@router.delete("/{identity}")
async def delete_identity(identity: str, owner: Owner, identities: IdentitiesDep) -> Nothing:
    """Delete an identity with its tokens and permissions."""
    await identities.delete(owner.account, identity)
    return Nothing()


# Tokens


@router.get("/{identity}/tokens", response_model=TokenList)
async def list_tokens(identity: str, owner: Owner, call: CurrentCall, identities: IdentitiesDep) -> Response:
    """List the ids of an identity's valid tokens. The secrets are not stored."""
    found = await identities.tokens(owner.account, identity)
    tokens = Items(TokenModel, len(found), lambda: (TokenModel(id=token.id) for token in found))
    return await large_answer(call, TokenList(tokens=[]), {"tokens": tokens})


@router.post("/{identity}/tokens")
async def create_token(identity: str, owner: Owner, identities: IdentitiesDep) -> NewToken:
    """Create an access token of an identity. Only this answer contains the secret."""
    info, secret = await identities.create_token(owner.account, identity)
    return NewToken(id=info.id, token=secret)


@router.delete("/{identity}/tokens/{token}")
async def revoke_token(identity: str, token: str, owner: Owner, identities: IdentitiesDep) -> Nothing:
    """Revoke a token. The next call with it is refused."""
    await identities.revoke_token(owner.account, identity, token)
    return Nothing()


# VMs


@router.get("/{identity}/permissions/vm")
async def list_vm_permissions(
    identity: str, owner: Owner, identities: IdentitiesDep, limit: Limit = PAGE, offset: Offset = 0
) -> VmPermissionList:
    """List the VMs that an identity may use, oldest permission first."""
    page = await identities.permissions(owner.account, identity, limit=limit, offset=offset)
    return VmPermissionList.of(page)


@router.get("/{identity}/permissions/vm/{vm}")
async def get_vm_permission(
    identity: str, vm: str, owner: Owner, identities: IdentitiesDep
) -> VmPermissionModel:
    """Get an identity's permission for one VM."""
    return VmPermissionModel.of(await identities.get_permission(owner.account, identity, vm))


@router.post("/{identity}/permissions/vm/{vm}")
async def grant_vm_permission(
    identity: str, vm: str, owner: Owner, identities: IdentitiesDep, body: VmAccess | None = None
) -> VmPermissionModel:
    """Grant an identity the use of a VM, as any Linux user or only as `allowedUsers`."""
    users = None if body is None else body.allowed_users
    return VmPermissionModel.of(await identities.grant(owner.account, identity, vm, users))


@router.put("/{identity}/permissions/vm/{vm}")
async def update_vm_permission(
    identity: str, vm: str, owner: Owner, identities: IdentitiesDep, body: VmAccess | None = None
) -> VmPermissionModel:
    """Change the Linux users that a permission allows; without `allowedUsers` it allows every user."""
    users = None if body is None else body.allowed_users
    return VmPermissionModel.of(await identities.update(owner.account, identity, vm, users))


@router.delete("/{identity}/permissions/vm/{vm}")
async def revoke_vm_permission(identity: str, vm: str, owner: Owner, identities: IdentitiesDep) -> Nothing:
    """Revoke an identity's permission for a VM."""
    await identities.revoke(owner.account, identity, vm)
    return Nothing()


# Repositories


@router.get("/{identity}/permissions/git")
async def list_git_permissions(
    identity: str,
    owner: Owner,
    identities: IdentitiesDep,
    access: AccessDep,
    limit: Limit = PAGE,
    offset: Offset = 0,
) -> AccessibleRepositoryList:
    """List the repositories that an identity may use."""
    await identities.get(owner.account, identity)
    page = await access.all_granted(identity, limit, offset)
    return AccessibleRepositoryList(
        repositories=[AccessibleRepository.of(info, level) for info, level in page.items]
    )


@router.get("/{identity}/permissions/git/{repo}")
async def get_git_permission(
    identity: str, repo: str, owner: Owner, identities: IdentitiesDep, access: AccessDep, repos: ReposDep
) -> RepositoryPermission:
    """Get an identity's permission for one repository; `accessLevel` is null if it has none."""
    await identities.get(owner.account, identity)
    await _check_repository(repos, owner.account, repo)
    level = await access.granted(identity, repo)
    return RepositoryPermission(identity=identity, repo=repo, access_level=level)


@router.post("/{identity}/permissions/git/{repo}")
async def grant_git_permission(
    identity: str,
    repo: str,
    body: RepositoryAccess,
    owner: Owner,
    identities: IdentitiesDep,
    access: AccessDep,
    repos: ReposDep,
) -> Nothing:
    """Grant an identity read access to a repository, or read and write access."""
    await identities.get(owner.account, identity)
    await _check_repository(repos, owner.account, repo)
    await access.grant(owner.account, identity, repo, body.permission)
    return Nothing()


@router.put("/{identity}/permissions/git/{repo}")
async def update_git_permission(
    identity: str,
    repo: str,
    body: RepositoryAccess,
    owner: Owner,
    identities: IdentitiesDep,
    access: AccessDep,
    repos: ReposDep,
) -> Nothing:
    """Change an identity's permission for a repository to read or write."""
    await identities.get(owner.account, identity)
    await _check_repository(repos, owner.account, repo)
    await access.change(identity, repo, body.permission)
    return Nothing()


@router.delete("/{identity}/permissions/git/{repo}")
async def revoke_git_permission(
    identity: str, repo: str, owner: Owner, identities: IdentitiesDep, access: AccessDep, repos: ReposDep
) -> Nothing:
    """Revoke an identity's permission for a repository."""
    await identities.get(owner.account, identity)
    await _check_repository(repos, owner.account, repo)
    await access.revoke(identity, repo)
    return Nothing()


async def _check_repository(repos: Repos, account: str, repo: str) -> None:
    try:
        await repos.owned(account, repo)
    except RepoNotFound as error:
        raise ApiError("GIT_REPOSITORY_NOT_FOUND", str(error)) from None

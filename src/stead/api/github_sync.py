"""HTTP routes of GitHub sync, and the receiver of GitHub's webhooks."""

from typing import Annotated

from fastapi import APIRouter, Header
from starlette.requests import Request

from stead.api.bodies import MANY_VALUES
from stead.api.declared import large_body
from stead.api.dependencies import LinksDep
from stead.api.errors import ApiError
from stead.api.repos import OwnedRepo
from stead.api.wire import Nothing
from stead.api.wire.github_sync import GithubSyncModel, NewGithubSync
from stead.github.app import WEBHOOKS

router = APIRouter(tags=["repositories"])

MAX_WEBHOOK = 4 << 20
"""Bytes. Larger webhooks are refused: the periodic sync covers them."""
_PATH = "/git/v1/repo/{repo_id}/github-sync"


@router.get(_PATH)
async def get_github_sync(repo: OwnedRepo, links: LinksDep) -> GithubSyncModel:
    """Get the GitHub sync configuration and state of a repository."""
    return GithubSyncModel.of(await links.get(repo.info.id))


@router.post(_PATH)
async def enable_github_sync(repo: OwnedRepo, links: LinksDep, wanted: NewGithubSync) -> GithubSyncModel:
    """Enable GitHub sync: mirror branches and tags in both directions."""
    link = await links.enable(repo.info.account, repo.info.id, wanted.github_repo_name)
    return GithubSyncModel.of(link)


@router.delete(_PATH)
async def disable_github_sync(repo: OwnedRepo, links: LinksDep) -> Nothing:
    """Disable GitHub sync. Both repositories stay as they are."""
    await links.disable(repo.info.id)
    return Nothing()


@router.post(f"{_PATH}/run")
async def run_github_sync(repo: OwnedRepo, links: LinksDep) -> GithubSyncModel:
    """Sync now and return the result."""
    return GithubSyncModel.of(await links.sync(repo.info.id))


@router.post(WEBHOOKS, include_in_schema=False)
@large_body(MAX_WEBHOOK, MANY_VALUES)
async def hear_github(
    request: Request,
    links: LinksDep,
    app: Annotated[str, Header(alias="X-GitHub-Hook-Installation-Target-ID")] = "",
    signature: Annotated[str, Header(alias="X-Hub-Signature-256")] = "",
) -> Nothing:
    """Receive a GitHub webhook: verify its signature and start a sync. Its content is not used otherwise."""
    known = await links.apps.by_app_id(app)
    # Do not read the body for an unknown App.
    body = await _read(request) if known else b""
    if not await links.receive_webhook(known, signature, body):
        reason = "invalid webhook signature: it matches no connected GitHub App"
        raise ApiError("UNAUTHORIZED_ERROR", reason, route=WEBHOOKS, reason=reason)
    return Nothing()


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_WEBHOOK:
            raise ApiError("GIT_INVALID_REQUEST", f"webhook too large (max {MAX_WEBHOOK} bytes)", 413)
    return bytes(body)

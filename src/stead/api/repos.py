"""HTTP routes of the Git API: repositories, refs, contents, commits."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import JSONResponse, Response, StreamingResponse

from stead.api.bodies import MANY_VALUES, MAX_BODY, json_body
from stead.api.callers import AnyCaller, CurrentCall, Owner
from stead.api.calls import Call
from stead.api.declared import large_body
from stead.api.dependencies import AccessDep, ImportsDep, ReposDep, WriterDep
from stead.api.errors import ApiError
from stead.api.large_answers import Base64, Items, Objects, Text, large_answer, large_object
from stead.api.paced_response import PacedResponse
from stead.api.repeatable import CurrentCreate, IfMissing, answer_of
from stead.api.repo_answers import FolderEntries, branch_items, repo_fields, tag_items, tree_entries
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.guests import decoded
from stead.api.wire.repos import (
    ArchiveImport,
    Blob,
    BranchList,
    CommitCreated,
    CommitList,
    CommitModel,
    ComparedFile,
    Comparison,
    CreatedRepo,
    CreateRepo,
    DefaultBranch,
    DirectoryEntry,
    FileChangeModel,
    FileContent,
    FilesImport,
    GitImport,
    NewBranch,
    NewCommit,
    Ref,
    RepoList,
    RepoModel,
    TagList,
    TagModel,
    Tree,
)
from stead.creation.results import Ensured
from stead.identity.callers import Caller
from stead.repos import contents, history
from stead.repos.access import Level
from stead.repos.committing import Change
from stead.repos.errors import RepoNotFound, TooLarge
from stead.repos.fast_import import Author
from stead.repos.history import MAX_COMMITS, Order
from stead.repos.places import GitCaller
from stead.repos.repos import Fill, RepoInfo
from stead.repos.repository import Repository
from stead.repos.transfer.imports import Imports
from stead.shares import Reserve
from stead.tasks import Threads

router = APIRouter(prefix="/git/v1/repo", tags=["repositories"])

MAX_PAGE = 100
_MAX_PAGE_REFS = 96 << 20
"""Bytes of the branches and tags of all repositories of a page, with what is made of them."""
_UNNAMED = "{*branch}"
"""The path template itself, which the npm package sends instead of the branch name."""

_RECURSIVE = (
    "true: list all folders below too. false: subfolders have no `entries`. By default, subfolders have "
    f"their `entries` if the listing has at most {contents.MAX_NESTED} in all."
)
RepoId = Annotated[str, Path(description="Repository id.")]
Rev = Annotated[str | None, Query(description="Branch, tag or commit sha. Default: the default branch.")]


@dataclass(frozen=True)
class OpenRepo:
    """A repository and the caller's access level."""

    info: RepoInfo
    repository: Repository
    level: Level


def _user(caller: Caller) -> GitCaller:
    return GitCaller(caller.account, caller.identity)


async def readable(
    repo_id: RepoId, caller: AnyCaller, call: CurrentCall, repos: ReposDep, access: AccessDep
) -> OpenRepo:
    """A repository that the caller may read; others are 404, as if they did not exist."""
    info = await repos.get(repo_id)

    async def level() -> Level:
        found = await access.level(caller, info)
        if found is None:
            raise RepoNotFound(repo_id)
        return found

    if caller.identity is not None:
        call.require(level)
    return OpenRepo(info, repos.opened(info, _user(caller), call.reserve), await level())


ReadableRepo = Annotated[OpenRepo, Depends(readable)]


async def writable(repo: ReadableRepo) -> OpenRepo:
    if repo.level != "write":
        raise ApiError("REPOSITORY_ACCESS_DENIED", "no write access to this repository")
    return repo


WritableRepo = Annotated[OpenRepo, Depends(writable)]


async def owned(repo_id: RepoId, caller: Owner, call: CurrentCall, repos: ReposDep) -> OpenRepo:
    info = await repos.owned(caller.account, repo_id)
    return OpenRepo(info, repos.opened(info, _user(caller), call.reserve), "write")


OwnedRepo = Annotated[OpenRepo, Depends(owned)]


# Repositories


@router.post("", response_model=CreatedRepo)
@large_body(MAX_BODY, MANY_VALUES)
async def create_repo(
    caller: Owner,
    repos: ReposDep,
    imports: ImportsDep,
    create: CurrentCreate,
    body: Annotated[CreateRepo | None, json_body(CreateRepo | None)],
) -> JSONResponse:
    """Create a repository: empty, from a source with its history, or with one commit of imported files."""
    wanted = body or CreateRepo.model_validate({})
    fill = _fill(imports, wanted)

    async def make() -> Ensured[str]:
        info = await repos.create(
            caller.account,
            name=wanted.name,
            public=bool(wanted.public),
            default_branch=wanted.default_branch,
            fill=fill,
            repo_id=create.uuid,
        )
        return Ensured(info.id)

    async def existing(name: str) -> list[Ensured[str]]:
        return [Ensured(info.id, created=False) for info in await repos.named(caller.account, name)]

    if_missing = IfMissing("repository", wanted.name, existing) if wanted.if_missing else None
    made = await create.run(Ensured[str], make, if_missing)
    return answer_of(CreatedRepo(repo_id=made.value, created=made.created))


def _fill(sources: Imports, wanted: CreateRepo) -> Fill | None:
    """The initial content, if any."""
    if wanted.source is not None and wanted.import_ is not None:
        raise ApiError("SOURCE_IMPORT_CONFLICT", "source and import cannot be combined")
    if (source := wanted.source) is not None:
        return sources.source(
            source.url,
            rev=source.rev or source.branch,
            depth=source.depth,
            all_branches=bool(source.all_branches),
            default_branch=wanted.default_branch,
        )
    if (wish := wanted.import_) is None:
        return None
    who = Author()
    author = Author(wish.author_name or who.name, wish.author_email or who.email)
    match wish:
        case FilesImport():
            return sources.files(wish.files, wish.commit_message, author)
        case ArchiveImport():
            return sources.archive(wish.type, wish.url, wish.commit_message, folder=wish.dir, author=author)
        case GitImport():
            rev = wish.rev or wish.branch
            return sources.tree(wish.url, wish.commit_message, rev=rev, folder=wish.dir, author=author)


@router.get("", response_model=RepoList)
async def list_repos(
    caller: AnyCaller,
    call: CurrentCall,
    access: AccessDep,
    repos: ReposDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 10,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    search: Annotated[str | None, Query(description="Part of a name or id.")] = None,
) -> Response:
    """List the account's repositories, newest first; for an identity, those it has access to."""
    only = None if caller.identity is None else await access.repos_of(caller.identity)
    page = await repos.list(caller.account, limit=limit, offset=offset, search=search, only=only)
    user, reserve = _user(caller), _page_memory(call)
    rows = await asyncio.gather(*(_row(repos.opened(info, user, reserve), info) for info in page.items))
    model = RepoList(repositories=[], total=page.total, offset=page.offset)
    return await large_answer(call, model, {"repositories": Objects(rows)})


def _page_memory(call: Call) -> Reserve:
    """Reserves memory for the refs of a page of repositories; TooLarge if the page can never be answered."""
    reserved = 0

    async def reserve(amount: int) -> bool:
        nonlocal reserved
        reserved += amount
        if reserved > _MAX_PAGE_REFS:
            raise TooLarge(
                "these repositories have too many branches and tags for one page: use a lower limit"
            )
        return await call.reserve(amount)

    return reserve


async def _row(repository: Repository, info: RepoInfo) -> dict[str, object]:
    return repo_fields(info, await repository.refs(), repository.default_branch)


@router.get("/{repo_id}", response_model=RepoModel)
async def get_repo(repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get a repository with its branches and tags."""
    return await large_object(call, await _row(repo.repository, repo.info))


@router.delete("/{repo_id}")
async def delete_repo(repo: OwnedRepo, writer: WriterDep) -> Nothing:
    """Delete a repository permanently, with its history."""
    await writer.delete(repo.info.id)
    return Nothing()


@router.get("/{repo_id}/default-branch")
async def get_default_branch(repo: ReadableRepo) -> DefaultBranch:
    """Get the default branch."""
    return DefaultBranch(default_branch=repo.repository.default_branch)


@router.put("/{repo_id}/default-branch")
async def set_default_branch(repo: OwnedRepo, wanted: DefaultBranch) -> Nothing:
    """Set the default branch, which clones check out."""
    await repo.repository.set_default_branch(wanted.default_branch)
    return Nothing()


# Branches and tags


@router.get("/{repo_id}/git/refs/heads/", response_model=BranchList)
@router.get("/{repo_id}/git/refs/heads", include_in_schema=False)
async def list_branches(repo: ReadableRepo, call: CurrentCall) -> Response:
    """List branches."""
    found = await repo.repository.branches()
    return await large_answer(call, BranchList(branches=[]), {"branches": branch_items(found)})


@router.get("/{repo_id}/git/refs/heads/{branch:path}")
async def get_branch(branch: str, repo: ReadableRepo) -> Ref:
    """Get a branch by name."""
    found = await repo.repository.branch(branch)
    return Ref(name=f"refs/heads/{found.name}", sha=found.sha)


@router.post("/{repo_id}/git/refs/heads/{branch:path}")
async def create_branch(
    branch: str, repo: WritableRepo, writer: WriterDep, wanted: NewBranch | None = None
) -> Ref:
    """Create a branch at a commit, by default at the head of the default branch."""
    if branch == _UNNAMED:
        raise ApiError("BRANCH_NAME_EMPTY", "branch name is missing: append it to the path")
    sha = None if wanted is None else wanted.sha
    made = await writer.create_branch(repo.repository, branch, sha)
    return Ref(name=f"refs/heads/{made.name}", sha=made.sha)


@router.get("/{repo_id}/git/refs/tags/", response_model=TagList)
@router.get("/{repo_id}/git/refs/tags", include_in_schema=False)
async def list_tags(repo: ReadableRepo, call: CurrentCall) -> Response:
    """List tags."""
    found = await repo.repository.tags()
    return await large_answer(call, TagList(tags=[]), {"tags": tag_items(found)})


@router.get("/{repo_id}/git/refs/tags/{tag:path}", response_model=TagModel)
async def get_tag(tag: str, repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get a tag by name."""
    return await _with_message(call, TagModel.of(await repo.repository.tag(tag)))


@router.get("/{repo_id}/git/tags/{sha}", response_model=TagModel)
async def get_tag_object(sha: str, repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get an annotated tag by the sha of its tag object."""
    return await _with_message(call, TagModel.of(await repo.repository.tag_object(sha)))


async def _with_message(call: Call, model: TagModel | CommitModel) -> Response:
    """A tag or commit, whose message may be long."""
    if model.message is None:
        return await large_answer(call, model, {})
    message = Text(model.message.encode())
    return await large_answer(call, model.model_copy(update={"message": ""}), {"message": message})


# Contents


@router.get("/{repo_id}/contents", response_model=FileContent | DirectoryEntry)
@router.get("/{repo_id}/contents/{path:path}", response_model=FileContent | DirectoryEntry)
async def get_contents(
    repo: ReadableRepo,
    call: CurrentCall,
    path: str = "",
    rev: Rev = None,
    ref: Rev = None,
    recursive: Annotated[bool | None, Query(description=_RECURSIVE)] = None,
) -> Response:
    """Get a file with its content in base64, or a folder with its entries."""
    found = await contents.read(repo.repository, path, rev or ref, recursive=recursive)
    if isinstance(found, contents.RepoFile):
        entry, size = found.entry, len(found.content)
        file = FileContent(name=entry.name, path=entry.path, sha=entry.sha, size=size, content="")
        return await large_answer(call, file, {"content": Base64(found.content)})
    folder = DirectoryEntry(name=found.name, path=found.path, sha=found.sha, entries=[])
    return await large_answer(call, folder, {"entries": FolderEntries(found)})


@router.get("/{repo_id}/git/blobs/{sha}", response_model=Blob)
async def get_blob(sha: str, repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get a blob by its sha, in base64."""
    found, data = await contents.blob(repo.repository, sha)
    blob = Blob(sha=found, size=len(data), content="")
    return await large_answer(call, blob, {"content": Base64(data)})


@router.get("/{repo_id}/git/trees/{sha}", response_model=Tree)
async def get_tree(sha: str, repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get a tree by its sha or the sha of a commit."""
    entries = await contents.tree(repo.repository, sha)
    return await large_answer(call, Tree(sha=sha.lower(), tree=[]), {"tree": tree_entries(entries)})


@router.get("/{repo_id}/tarball", response_class=StreamingResponse)
async def get_tarball(repo: ReadableRepo, rev: Rev = None, ref: Rev = None) -> StreamingResponse:
    """Download a revision as a tar archive."""
    return await _archive(repo, "tar", rev or ref)


@router.get("/{repo_id}/zip", response_class=StreamingResponse)
async def get_zip(repo: ReadableRepo, rev: Rev = None, ref: Rev = None) -> StreamingResponse:
    """Download a revision as a zip archive."""
    return await _archive(repo, "zip", rev or ref)


async def _archive(repo: OpenRepo, kind: str, rev: str | None) -> StreamingResponse:
    pieces = contents.archive(repo.repository, kind, rev)
    # Read the first piece before the response starts, so that a missing revision is still a 404.
    first = await anext(pieces)
    name = f"{repo.info.name or repo.info.id}.{kind}".encode("ascii", "replace").decode().replace('"', "")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return PacedResponse(first, pieces, contents.ARCHIVES[kind], headers)


# Commits


@router.get("/{repo_id}/git/commits", response_model=CommitList)
async def list_commits(
    repo: ReadableRepo,
    call: CurrentCall,
    branch: Annotated[str | None, Query(description="Branch name. Default: the default branch.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_COMMITS)] = 50,
    order: Order = "desc",
    since: Annotated[str | None, Query(description="Commit sha.")] = None,
    until: Annotated[str | None, Query(description="Commit sha.")] = None,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    disable_total_count: Annotated[bool, Query(alias="disableTotalCount")] = False,
) -> Response:
    """List the commits of a branch.

    With `order=desc` (newest first) the list starts at `until` and stops before `since`; with `order=asc` it
    starts at `since` and stops after `until`. `next_commit` is the start of the next page: pass it as
    `until`, or as `since` with `order=asc`.
    """
    page = await history.commits(
        repo.repository,
        branch,
        limit=limit,
        order=order,
        offset=offset,
        since=since,
        until=until,
        count=not disable_total_count,
    )
    model = CommitList(
        commits=[],
        count=len(page.commits),
        limit=limit,
        order=order,
        offset=None if since or until else offset,
        total=page.total,
        selector=_selector(since, until),
        next_commit=page.next_commit,
    )
    size = sum(len(commit.message) for commit in page.commits)
    items = Items(CommitModel, len(page.commits), lambda: map(CommitModel.of, page.commits), size)
    return await large_answer(call, model, {"commits": items})


def _selector(since: str | None, until: str | None) -> dict[str, object] | None:
    if since and until:
        return {"Range": {"since": since, "until": until}}
    if since:
        return {"Since": since}
    return {"Until": until} if until else None


@router.get("/{repo_id}/git/commits/{sha}", response_model=CommitModel)
async def get_commit(sha: str, repo: ReadableRepo, call: CurrentCall) -> Response:
    """Get a commit by its sha."""
    return await _with_message(call, CommitModel.of(await repo.repository.commit(sha)))


@router.post("/{repo_id}/commits")
@large_body(MAX_BODY, MANY_VALUES)
async def create_commit(
    repo: WritableRepo, writer: WriterDep, wanted: Annotated[NewCommit, json_body(NewCommit)]
) -> CommitCreated:
    """Commit file changes to a branch. A missing branch is created.

    With `expectedSha` the commit is made only if the branch is at that commit, otherwise the response is 409
    CONFLICTING_PARENT. A concurrent push is never overwritten.
    """
    author = None if wanted.author is None else Author(wanted.author.name, wanted.author.email)
    commit = await writer.commit(
        repo.repository,
        await Threads.PARSING.run(_changes, wanted.files),
        wanted.message,
        branch=wanted.branch,
        author=author,
        expected=wanted.expected_sha,
    )
    return CommitCreated(commit=CommitModel.of(commit))


def _changes(files: Sequence[FileChangeModel]) -> list[Change]:
    return [_change(file) for file in files]


def _change(file: FileChangeModel) -> Change:
    if file.deleted:
        return Change(file.path, None)
    if file.content is None:
        raise ApiError("INVALID_FILE_CHANGE", "a file change needs content or deleted", path=file.path)
    if file.encoding != "base64":
        return Change(file.path, file.content.encode(errors="replace"))
    try:
        return Change(file.path, decoded(file.content, "content"))
    except ValueError:
        text = f"the content of {file.path!r} is not valid base64"
        raise ApiError("INVALID_BASE64_CONTENT", text, path=file.path) from None


@router.get("/{repo_id}/compare", response_model=Comparison)
async def compare(
    repo: ReadableRepo, call: CurrentCall, base: Annotated[str, Query()], head: Annotated[str, Query()]
) -> Response:
    """Compare two revisions: commits and changed files of `head` since `base`."""
    found = await history.compare(repo.repository, base, head)
    model = Comparison(
        status=found.status,
        ahead_by=found.ahead_by,
        behind_by=found.behind_by,
        total_commits=found.ahead_by,
        files=[],
    )
    files = Items(ComparedFile, len(found.files), lambda: map(ComparedFile.of, found.files))
    return await large_answer(call, model, {"files": files})

"""Tools for Git repositories."""

from typing import Annotated

from pydantic import BaseModel, Field

from stead.mcp.calls import Call, additive, client_of, destructive, read_only
from stead.mcp.excerpts import decoded
from stead.mcp.files import READ_LIMIT
from stead.sdk import AsyncRepo, RepoFolder, RepoInfo

RepoReference = Annotated[
    str, Field(description="The repository: its id, a unique prefix of the id, or its unique name.")
]
Revision = Annotated[
    str | None, Field(description="A branch, a tag or a commit. Default: the default branch.")
]
_MOST_ENTRIES = 1000


class Repository(BaseModel):
    """A Git repository."""

    id: str
    name: str | None
    public: bool
    default_branch: str | None
    branches: dict[str, str | None] = Field(description="The commit of each branch.")
    clone_url: str = Field(description="The URL for git, which needs a token as its password.")


class Repositories(BaseModel):
    """A page of repositories."""

    repositories: list[Repository]
    total: int
    next_offset: int | None = Field(description="The offset of the next page; null on the last.")


class RepositoryEntry(BaseModel):
    """A file or folder of a revision."""

    path: str
    kind: str = Field(description="file or folder.")
    size: int | None = Field(description="Bytes of a file.")


class RepositoryContent(BaseModel):
    """A part of a file, or the entries of a folder."""

    path: str
    kind: str = Field(description="file or folder.")
    size: int | None = Field(description="Bytes of the whole file.")
    next_offset: int | None = Field(description="Where to continue; null at the end.")
    encoding: str | None = Field(description="Of content: utf-8, or base64 if the bytes are not text.")
    content: str | None
    entries: list[RepositoryEntry] | None


class Committed(BaseModel):
    """A new commit."""

    sha: str
    parents: list[str]


def _repository(repo: AsyncRepo, info: RepoInfo) -> Repository:
    return Repository(
        id=repo.id,
        name=info.name,
        public=info.visibility == "public",
        default_branch=info.default_branch,
        branches={name: branch.sha for name, branch in info.branches.items()},
        clone_url=repo.clone_url(),
    )


async def repo_create(
    call: Call,
    name: Annotated[str | None, Field(description="A label.")] = None,
    public: Annotated[bool, Field(description="Everyone may read it.")] = False,
    default_branch: Annotated[str | None, Field(description="Default: main, or that of the source.")] = None,
    source: Annotated[str | None, Field(description="The URL of a Git repository to copy.")] = None,
) -> Repository:
    """Create a Git repository: empty, or a copy of another with its history."""
    repos = client_of(call).git.repos
    repo = await repos.create(name=name, public=public, default_branch=default_branch, source=source)
    return _repository(repo, await repo.info())


async def repo_list(
    call: Call,
    search: Annotated[str | None, Field(description="A part of a name or an id.")] = None,
    limit: Annotated[int, Field(ge=1, le=100)] = 50,
    offset: Annotated[int, Field(ge=0)] = 0,
) -> Repositories:
    """List Git repositories, newest first."""
    repos = client_of(call).git.repos
    found = await repos.list(search=search, limit=limit, offset=offset)
    end = offset + len(found)
    return Repositories(
        repositories=[_repository(repos.ref(each.id), each) for each in found],
        total=found.total,
        next_offset=end if end < found.total else None,
    )


async def repo_read(
    call: Call,
    repo: RepoReference,
    path: Annotated[str, Field(description="A path in the repository; empty for its root folder.")] = "",
    rev: Revision = None,
    offset: Annotated[int, Field(ge=0, description="Begin at this byte, or at this entry of a folder.")] = 0,
) -> RepositoryContent:
    """Read a file of a Git repository, or list a folder, without a clone. Long ones come in parts: continue
    at next_offset."""
    found = await (await client_of(call).git.repos.find(repo)).contents.get(path, rev)
    if isinstance(found, RepoFolder):
        entries = list(found)
        shown = entries[offset : offset + _MOST_ENTRIES]
        end = offset + len(shown)
        return RepositoryContent(
            path=found.path,
            kind="folder",
            size=None,
            next_offset=end if end < len(entries) else None,
            encoding=None,
            content=None,
            entries=[
                RepositoryEntry(path=each.path, kind="folder", size=None)
                if isinstance(each, RepoFolder)
                else RepositoryEntry(path=each.path, kind="file", size=each.size)
                for each in shown
            ],
        )
    at_end = offset + READ_LIMIT >= len(found.content)
    encoding, content, covered = decoded(found.content[offset : offset + READ_LIMIT], at_end=at_end)
    return RepositoryContent(
        path=found.path,
        kind="file",
        size=len(found.content),
        next_offset=None if at_end else offset + covered,
        encoding=encoding,
        content=content,
        entries=None,
    )


async def repo_commit(
    call: Call,
    repo: RepoReference,
    message: Annotated[str, Field(min_length=1, description="The commit message.")],
    files: Annotated[
        dict[str, str | None],
        Field(min_length=1, description="The new text of each changed file by its path; null deletes it."),
    ],
    branch: Annotated[
        str | None, Field(description="Default: the default branch. One that does not exist is created.")
    ] = None,
    expected_sha: Annotated[
        str | None, Field(description="Refuse the commit unless the branch is at this commit.")
    ] = None,
) -> Committed:
    """Commit changes of files to a branch of a Git repository, without a clone. Earlier commits stay."""
    found = await client_of(call).git.repos.find(repo)
    commit = await found.commits.create(message, files, branch=branch, expected_sha=expected_sha)
    return Committed(sha=commit.sha, parents=list(commit.parents))


TOOLS = [
    additive(repo_create, "Create a repository"),
    read_only(repo_list, "List repositories"),
    read_only(repo_read, "Read a repository"),
    destructive(repo_commit, "Commit to a repository"),
]

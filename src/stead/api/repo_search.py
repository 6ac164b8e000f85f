"""HTTP routes of the search in a repository: contents, file names, commit messages, diffs."""

from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.dependencies import SearchDep
from stead.api.repos import ReadableRepo
from stead.api.wire.repo_search import (
    CommitResults,
    ContentResults,
    DiffResults,
    FileResults,
    SearchFiles,
    SearchLines,
    SearchMessages,
)

router = APIRouter(prefix="/git/v1/repo/{repo_id}/search", tags=["repositories"])


@router.get("")
async def search(
    repo: ReadableRepo, search: SearchDep, wanted: Annotated[SearchLines, Query()]
) -> ContentResults:
    """Search the contents of files. `maxResults` and `offset` count files."""
    return ContentResults.of(
        await search.content(repo.repository, wanted.query, wanted.revision, **wanted.options)
    )


@router.get("/files")
async def search_files(
    repo: ReadableRepo, search: SearchDep, wanted: Annotated[SearchFiles, Query()]
) -> FileResults:
    """Search files by path."""
    return FileResults.of(
        await search.files(repo.repository, wanted.query, wanted.revision, **wanted.options)
    )


@router.get("/commits")
async def search_commits(
    repo: ReadableRepo, search: SearchDep, wanted: Annotated[SearchMessages, Query()]
) -> CommitResults:
    """Search commits by message, newest first."""
    return CommitResults.of(
        await search.commits(repo.repository, wanted.query, wanted.revision, **wanted.options)
    )


@router.get("/diffs")
async def search_diffs(
    repo: ReadableRepo, search: SearchDep, wanted: Annotated[SearchLines, Query()]
) -> DiffResults:
    """Search commits by the lines that they add or remove, newest first."""
    return DiffResults.of(
        await search.diffs(repo.repository, wanted.query, wanted.revision, **wanted.options)
    )

"""Search in a repository: contents, names, messages, changes."""

from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.repos import ReadableRepo, Rev
from stead.api.services import ServicesDep
from stead.api.wire import LARGEST
from stead.api.wire.repo_search import CommitResults, ContentResults, DiffResults, FileResults
from stead.repos.search import MAX_RESULTS

router = APIRouter(prefix="/git/v1/repo/{repo_id}/search", tags=["repositories"])

Text = Annotated[str, Query(description="What to search for.")]
PathPattern = Annotated[str | None, Query(alias="pathPattern", description="Only in files like `src/**`.")]
ExcludePattern = Annotated[str | None, Query(alias="excludePattern", description="Not in files like this.")]
MaxResults = Annotated[int, Query(alias="maxResults", ge=1, le=MAX_RESULTS)]
Offset = Annotated[int, Query(ge=0, le=LARGEST)]
CaseSensitive = Annotated[bool, Query(alias="caseSensitive")]
IsRegex = Annotated[bool, Query(alias="isRegex")]
WholeWord = Annotated[bool, Query(alias="wholeWord")]


@router.get("")
async def search(
    repo: ReadableRepo,
    services: ServicesDep,
    query: Text = "",
    ref: Rev = None,
    rev: Rev = None,
    path_pattern: PathPattern = None,
    exclude_pattern: ExcludePattern = None,
    max_results: MaxResults = 100,
    offset: Offset = 0,
    case_sensitive: CaseSensitive = False,
    is_regex: IsRegex = False,
    whole_word: WholeWord = False,
) -> ContentResults:
    """Lines of files; `maxResults` and `offset` count files."""
    found = await services.search.content(
        repo.repository,
        query,
        ref or rev,
        path_pattern=path_pattern,
        exclude_pattern=exclude_pattern,
        max_results=max_results,
        offset=offset,
        case_sensitive=case_sensitive,
        regex=is_regex,
        whole_word=whole_word,
    )
    return ContentResults.of(found)


@router.get("/files")
async def search_files(
    repo: ReadableRepo,
    services: ServicesDep,
    query: Text = "",
    ref: Rev = None,
    rev: Rev = None,
    path_pattern: PathPattern = None,
    exclude_pattern: ExcludePattern = None,
    max_results: MaxResults = 100,
    offset: Offset = 0,
    case_sensitive: CaseSensitive = False,
    is_regex: IsRegex = False,
) -> FileResults:
    """Files by their paths."""
    found = await services.search.files(
        repo.repository,
        query,
        ref or rev,
        path_pattern=path_pattern,
        exclude_pattern=exclude_pattern,
        max_results=max_results,
        offset=offset,
        case_sensitive=case_sensitive,
        regex=is_regex,
    )
    return FileResults.of(found)


@router.get("/commits")
async def search_commits(
    repo: ReadableRepo,
    services: ServicesDep,
    query: Text = "",
    ref: Rev = None,
    rev: Rev = None,
    max_results: MaxResults = 100,
    offset: Offset = 0,
    case_sensitive: CaseSensitive = False,
    is_regex: IsRegex = False,
) -> CommitResults:
    """Commits by their messages, newest first."""
    found = await services.search.commits(
        repo.repository,
        query,
        ref or rev,
        max_results=max_results,
        offset=offset,
        case_sensitive=case_sensitive,
        regex=is_regex,
    )
    return CommitResults.of(found)


@router.get("/diffs")
async def search_diffs(
    repo: ReadableRepo,
    services: ServicesDep,
    query: Text = "",
    ref: Rev = None,
    rev: Rev = None,
    path_pattern: PathPattern = None,
    exclude_pattern: ExcludePattern = None,
    max_results: MaxResults = 100,
    offset: Offset = 0,
    case_sensitive: CaseSensitive = False,
    is_regex: IsRegex = False,
    whole_word: WholeWord = False,
) -> DiffResults:
    """Commits by the lines that they add or remove, newest first."""
    found = await services.search.diffs(
        repo.repository,
        query,
        ref or rev,
        path_pattern=path_pattern,
        exclude_pattern=exclude_pattern,
        max_results=max_results,
        offset=offset,
        case_sensitive=case_sensitive,
        regex=is_regex,
        whole_word=whole_word,
    )
    return DiffResults.of(found)

"""Git repositories: made, found, read, changed, searched, deleted."""

from urllib.parse import quote, urlsplit, urlunsplit

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_repo
from stead.sdk._async.repo_automation import AsyncGithub, AsyncTriggers
from stead.sdk._async.repo_contents import AsyncBlobs, AsyncContents, AsyncTrees
from stead.sdk._async.repo_history import AsyncBranches, AsyncCommits, AsyncTags
from stead.sdk._async.repo_part import ROOT
from stead.sdk._async.repo_search import AsyncRepoSearch
from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.git_models import Comparison, Import, RepoInfo, RepoList, Source, create_body
from stead.sdk.parsing import parse
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, request, segment


class AsyncGit:
    """Git hosting."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.repos = AsyncRepos(connection)
        """Repositories."""


class AsyncRepos:
    """Repositories: made, found, deleted."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self,
        *,
        name: str | None = None,
        public: bool = False,
        default_branch: str | None = None,
        source: Source | str | None = None,
        import_: Import | None = None,
    ) -> "AsyncRepo":
        """Make a repository: empty, or from a source with its history, or with one commit of imported files.

        Args:
            name: a label.
            public: anyone may read it; to write it still needs a permission.
            default_branch: the branch that clones begin with; else `main`, or as the source has it.
            source: a repository elsewhere, by URL or as a `Source`.
            import_: `FilesImport`, `TarImport`, `ZipImport` or `GitImport`, instead of a source.
        """
        body = create_body(name, public, default_branch, source, import_)
        wait = UNSET if source is None and import_ is None else BUILD_TIMEOUT
        answer = await self._connection.call(request("POST", ROOT, json=body, timeout=wait))
        repo_id = answer.get("repoId") if isinstance(answer, dict) else None
        if not isinstance(repo_id, str):
            raise UnexpectedAnswer("the answer has no usable 'repoId'")
        return self.ref(repo_id)

    async def list(
        self, *, limit: int | None = None, offset: int | None = None, search: str | None = None
    ) -> RepoList:
        """Repositories, newest first: ten unless told, at most 100; or those with a text in name or id."""
        call = request("GET", ROOT, query={"limit": limit, "offset": offset, "search": search})
        return RepoList.of(await self._connection.call(call))

    async def find(self, repo: str) -> "AsyncRepo":
        """A handle on the repository with this id, unique id prefix (4 characters or more), or unique name.

        A full id is used as it is, without a request; else the repositories are searched. Raises
        `RepoNotFound` if there is none, `AmbiguousName` if there are several.
        """
        return self.ref(await find_repo(self._connection, repo))

    def ref(self, repo_id: str) -> "AsyncRepo":
        """A handle on the repository with this id, without a request: it need not exist."""
        return AsyncRepo(self._connection, repo_id)

    async def delete(self, repo: str) -> None:
        """Delete a repository and its history, by id, unique id prefix or unique name.

        This cannot be undone.
        """
        await (await self.find(repo)).delete()


class AsyncRepo(AsyncRepoSearch):
    """A handle on one repository."""

    def __init__(self, connection: AsyncConnection, repo_id: str) -> None:
        super().__init__(connection, repo_id)
        self.id = repo_id
        self.contents = AsyncContents(connection, repo_id)
        """Files and folders, and archives of all of them."""
        self.branches = AsyncBranches(connection, repo_id)
        self.commits = AsyncCommits(connection, repo_id)
        self.tags = AsyncTags(connection, repo_id)
        self.blobs = AsyncBlobs(connection, repo_id)
        self.trees = AsyncTrees(connection, repo_id)
        self.triggers = AsyncTriggers(connection, repo_id)
        """Webhooks that are called after pushes."""
        self.github_sync = AsyncGithub(connection, repo_id)
        """Keeping it in step with a repository at GitHub."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def clone_url(self, *, token: str | None = None, base_url: str | None = None) -> str:
        """Where git finds it.

        Args:
            token: an identity's access token, put into the URL. Whoever sees the URL can then use it: better
                give it to git by a credential helper, as `stead git clone` does.
            base_url: where git reaches the server, if not where this client does.
        """
        parts = urlsplit((base_url or self._connection.settings.base_url).rstrip("/"))
        host = parts.netloc.rpartition("@")[2] if token else parts.netloc
        who = f"x-access-token:{quote(token, safe='')}@" if token else ""
        return urlunsplit((parts.scheme, who + host, f"{parts.path}/{segment(self.id)}", "", ""))

    async def info(self) -> RepoInfo:
        """Its name, branches and tags as they are now; `RepoNotFound` if there is none."""
        return RepoInfo.of(await self._call("GET", ""))

    async def compare(self, base: str, head: str) -> Comparison:
        """What the revision `head` has that `base` has not."""
        return parse(Comparison, await self._call("GET", "/compare", query={"base": base, "head": head}))

    async def delete(self) -> None:
        """Delete it with its history, for good."""
        await self._call("DELETE", "", timeout=LIFECYCLE_TIMEOUT)

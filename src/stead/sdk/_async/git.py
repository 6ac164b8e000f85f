"""Git repositories."""

from urllib.parse import urlsplit, urlunsplit

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_repo
from stead.sdk._async.repo_automation import AsyncGithub, AsyncTriggers
from stead.sdk._async.repo_contents import AsyncBlobs, AsyncContents, AsyncTrees
from stead.sdk._async.repo_history import AsyncBranches, AsyncCommits, AsyncTags
from stead.sdk._async.repo_part import ROOT
from stead.sdk._async.repo_search import AsyncRepoSearch
from stead.sdk.arguments import checks_arguments
from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.git_models import Comparison, Import, RepoInfo, RepoList, Source, create_body
from stead.sdk.parsing import parse
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, check_url, request, segment


@checks_arguments
class AsyncGit:
    """Git hosting."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.repos = AsyncRepos(connection)
        """Repositories."""


@checks_arguments
class AsyncRepos:
    """Create, find, list and delete repositories.

    A repository is given by its id, a unique id prefix, or a unique name.
    """

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
        if_missing: bool = False,
        idempotency_key: str | None = None,
    ) -> "AsyncRepo":
        """Create a repository: empty, a copy of another with its history, or one commit of imported files.

        Args:
            name: a label.
            public: everyone may read it; writing needs a permission.
            default_branch: the branch that clones check out. Default: `main`, or the default branch of the
                source.
            source: another repository to copy, as a URL or a `Source`.
            import_: `FilesImport`, `TarImport`, `ZipImport` or `GitImport`, instead of a source.
            if_missing: return the repository of this name if there is one, as it is; its `created` is False
                then. `NameNotUnique` if there are several.
            idempotency_key: a call that is repeated with it within 24 h returns the same repository.
        """
        body = create_body(name, public, default_branch, source, import_)
        wait = UNSET if source is None and import_ is None else BUILD_TIMEOUT
        if if_missing:
            body["ifMissing"] = True
        call = request(
            "POST", ROOT, json=body, timeout=wait, idempotent=if_missing, idempotency_key=idempotency_key
        )
        answer = await self._connection.call(call)
        repo_id = answer.get("repoId") if isinstance(answer, dict) else None
        if not isinstance(repo_id, str):
            raise UnexpectedAnswer("the answer has no valid 'repoId'")
        repo = self.ref(repo_id)
        repo.created = answer.get("created") is not False
        return repo

    async def list(
        self, *, limit: int | None = None, offset: int | None = None, search: str | None = None
    ) -> RepoList:
        """Repositories, newest first; `search` is a part of a name or an id.

        `limit` is 10 by default and at most 100.
        """
        call = request("GET", ROOT, query={"limit": limit, "offset": offset, "search": search})
        return RepoList.from_wire(await self._connection.call(call))

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


@checks_arguments
class AsyncRepo(AsyncRepoSearch):
    """A handle on one repository."""

    def __init__(self, connection: AsyncConnection, repo_id: str) -> None:
        super().__init__(connection, repo_id)
        self.id = repo_id
        self.created: bool | None = None
        """False if it existed when it was to be created with `if_missing`; None if this is not known."""
        self.contents = AsyncContents(connection, repo_id)
        """Files and folders, and archives of them."""
        self.branches = AsyncBranches(connection, repo_id)
        self.commits = AsyncCommits(connection, repo_id)
        self.tags = AsyncTags(connection, repo_id)
        self.blobs = AsyncBlobs(connection, repo_id)
        self.trees = AsyncTrees(connection, repo_id)
        self.triggers = AsyncTriggers(connection, repo_id)
        """Webhooks for pushes."""
        self.github_sync = AsyncGithub(connection, repo_id)
        """Synchronisation with a repository on GitHub."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def clone_url(self, *, token: str | None = None, base_url: str | None = None) -> str:
        """The URL for `git clone`, `git fetch` and `git push`.

        Args:
            token: an identity's access token to put into the URL. Everyone who sees the URL can use it; a
                credential helper, as `stead git clone` configures, is safer.
            base_url: the server's URL as git reaches it, if it differs from this client's.
        """
        check_url(base_url or self._connection.settings.base_url)
        parts = urlsplit((base_url or self._connection.settings.base_url).rstrip("/"))
        host = parts.netloc.rpartition("@")[2] if token else parts.netloc
        who = f"x-access-token:{segment(token)}@" if token else ""
        return urlunsplit((parts.scheme, who + host, f"{parts.path}/{segment(self.id)}", "", ""))

    async def info(self) -> RepoInfo:
        """Its name, size, branches and tags; `RepoNotFound` if it does not exist."""
        return RepoInfo.from_wire(await self._call("GET", ""))

    async def compare(self, base: str, head: str) -> Comparison:
        """The commits and files that the revision `head` has and `base` does not."""
        return parse(Comparison, await self._call("GET", "/compare", query={"base": base, "head": head}))

    async def delete(self) -> None:
        """Delete it with its history. This cannot be undone."""
        await self._call("DELETE", "", timeout=LIFECYCLE_TIMEOUT)

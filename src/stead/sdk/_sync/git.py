# Made by scripts/unasync from _async/git.py.
"""Git repositories: made, found, read, changed, searched, deleted."""

from urllib.parse import quote, urlsplit, urlunsplit

from stead.sdk._sync.connection import Connection
from stead.sdk._sync.lookups import find_repo
from stead.sdk._sync.repo_automation import Github, Triggers
from stead.sdk._sync.repo_contents import Blobs, Contents, Trees
from stead.sdk._sync.repo_history import Branches, Commits, Tags
from stead.sdk._sync.repo_part import ROOT
from stead.sdk._sync.repo_search import RepoSearch
from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.git_models import Comparison, Import, RepoInfo, RepoList, Source, create_body
from stead.sdk.parsing import parse
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, request, segment


class Git:
    """Git hosting."""

    def __init__(self, connection: Connection) -> None:
        self.repos = Repos(connection)
        """Repositories."""


class Repos:
    """Repositories: made, found, deleted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(
        self,
        *,
        name: str | None = None,
        public: bool = False,
        default_branch: str | None = None,
        source: Source | str | None = None,
        import_: Import | None = None,
    ) -> "Repo":
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
        answer = self._connection.call(request("POST", ROOT, json=body, timeout=wait))
        repo_id = answer.get("repoId") if isinstance(answer, dict) else None
        if not isinstance(repo_id, str):
            raise UnexpectedAnswer("the answer has no usable 'repoId'")
        return self.ref(repo_id)

    def list(
        self, *, limit: int | None = None, offset: int | None = None, search: str | None = None
    ) -> RepoList:
        """Repositories, newest first: ten unless told, at most 100; or those with a text in name or id."""
        call = request("GET", ROOT, query={"limit": limit, "offset": offset, "search": search})
        return RepoList.of(self._connection.call(call))

    def find(self, repo: str) -> "Repo":
        """A handle on the repository with this id, unique id prefix (4 characters or more), or unique name.

        A full id is used as it is, without a request; else the repositories are searched. Raises
        `RepoNotFound` if there is none, `AmbiguousName` if there are several.
        """
        return self.ref(find_repo(self._connection, repo))

    def ref(self, repo_id: str) -> "Repo":
        """A handle on the repository with this id, without a request: it need not exist."""
        return Repo(self._connection, repo_id)

    def delete(self, repo: str) -> None:
        """Delete a repository and its history, by id, unique id prefix or unique name.

        This cannot be undone.
        """
        (self.find(repo)).delete()


class Repo(RepoSearch):
    """A handle on one repository."""

    def __init__(self, connection: Connection, repo_id: str) -> None:
        super().__init__(connection, repo_id)
        self.id = repo_id
        self.contents = Contents(connection, repo_id)
        """Files and folders, and archives of all of them."""
        self.branches = Branches(connection, repo_id)
        self.commits = Commits(connection, repo_id)
        self.tags = Tags(connection, repo_id)
        self.blobs = Blobs(connection, repo_id)
        self.trees = Trees(connection, repo_id)
        self.triggers = Triggers(connection, repo_id)
        """Webhooks that are called after pushes."""
        self.github_sync = Github(connection, repo_id)
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

    def info(self) -> RepoInfo:
        """Its name, branches and tags as they are now; `RepoNotFound` if there is none."""
        return RepoInfo.of(self._call("GET", ""))

    def compare(self, base: str, head: str) -> Comparison:
        """What the revision `head` has that `base` has not."""
        return parse(Comparison, self._call("GET", "/compare", query={"base": base, "head": head}))

    def delete(self) -> None:
        """Delete it with its history, for good."""
        self._call("DELETE", "", timeout=LIFECYCLE_TIMEOUT)

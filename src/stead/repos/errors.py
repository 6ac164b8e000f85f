"""Errors of repositories and of requests about them."""

from stead.errors import SteadError


class RepoError(SteadError):
    """An error about a repository. Its fields are what the message is about; `api/errors.py` names them."""


class RepoNotFound(RepoError):
    """The repository does not exist, or belongs to another account: the caller cannot tell which."""

    def __init__(self, repo: str) -> None:
        super().__init__(f"no repository {repo}")
        self.repo_id = repo


class RepoLimitExceeded(RepoError):
    """The account has as many repositories as it may have."""


class RepoDamaged(RepoError):
    """Git could not read or write the repository."""


class DiskFull(RepoError):
    """The host's disk has nothing left for repositories; nothing was written."""

    def __init__(self) -> None:
        super().__init__(
            "disk of the host is full: delete repositories, VMs or snapshots, or try again later"
        )


class RepoBusy(RepoError):
    """The concurrency limit of a repository, or of all repositories, is reached."""

    def __init__(self, what: str) -> None:
        super().__init__(f"too many {what} at the same time: retry later")


class InvalidRevision(RepoError):
    def __init__(self, revision: str) -> None:
        super().__init__(f"invalid revision {revision!r}: use a branch, a tag or a commit sha")
        self.revision = revision


class AmbiguousRevision(RepoError):
    def __init__(self, revision: str) -> None:
        super().__init__(f"ambiguous revision {revision}: more than one object starts with it")
        self.revision = revision


class ReferenceNotFound(RepoError):
    def __init__(self, reference: str) -> None:
        super().__init__(f"no branch, tag or commit {reference}")
        self.reference = reference


class BranchNotFound(RepoError):
    def __init__(self, branch: str) -> None:
        super().__init__(f"no branch {branch}")
        self.branch = branch


class BranchExists(RepoError):
    def __init__(self, branch: str) -> None:
        super().__init__(f"branch {branch} already exists")
        self.branch = branch


class InvalidBranch(RepoError):
    """The branch name is empty or invalid."""


class TagNotFound(RepoError):
    def __init__(self, tag: str) -> None:
        super().__init__(f"no tag {tag}")
        self.tag = tag


class CommitNotFound(RepoError):
    def __init__(self, sha: str) -> None:
        super().__init__(f"no commit {sha}")
        self.sha = sha


class CommitNotInBranch(RepoError):
    def __init__(self, sha: str, branch: str) -> None:
        super().__init__(f"commit {sha} is not in the history of {branch}")
        self.sha = sha
        self.branch = branch


class InvalidRange(RepoError):
    def __init__(self, since: str, until: str) -> None:
        super().__init__(f"commit {since} is not an ancestor of {until}")
        self.since = since
        self.until = until


class OffsetWithSelector(RepoError):
    def __init__(self) -> None:
        super().__init__("offset cannot be combined with since or until")


class BlobNotFound(RepoError):
    def __init__(self, sha: str) -> None:
        super().__init__(f"no blob {sha}")
        self.sha = sha


class TreeNotFound(RepoError):
    def __init__(self, sha: str) -> None:
        super().__init__(f"no tree {sha}")
        self.sha = sha


class InvalidObjectId(RepoError):
    def __init__(self, sha: str) -> None:
        super().__init__(f"invalid object id {sha!r}: use 40 hexadecimal digits")
        self.sha = sha


class PathNotFound(RepoError):
    def __init__(self, path: str) -> None:
        super().__init__(f"no {path or 'commit'} in this revision")
        self.path = path


class TooLarge(RepoError):
    """Over a size, time or memory limit: clone the repository, or request less."""


class InvalidPath(RepoError):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"invalid path {path!r}: {why}")
        self.path = path


class InvalidChange(RepoError):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"cannot change {path!r}: {why}")
        self.path = path


class ConflictingParent(RepoError):
    """The branch is not at the expected commit."""

    def __init__(self, branch: str, expected: str, actual: str | None) -> None:
        where = f"at {actual}" if actual else "missing"
        super().__init__(f"branch {branch} is {where}, not at {expected}")
        self.expected = expected
        self.actual = actual

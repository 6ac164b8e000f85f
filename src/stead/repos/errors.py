"""Errors of repositories and of requests about them."""

from stead.errors import SteadError


class RepoError(SteadError):
    """An error with facts that the API returns beside the message."""

    code = "repo"

    def __init__(self, text: str, **facts: str | None) -> None:
        super().__init__(text)
        self.facts = facts


class RepoNotFound(RepoError):
    """The repository does not exist, or belongs to another account: the caller cannot tell which."""

    code = "repo_not_found"

    def __init__(self, repo: str) -> None:
        super().__init__(f"no repository {repo}", repoId=repo)


class RepoLimitExceeded(RepoError):
    code = "repo_limit_exceeded"


class RepoDamaged(RepoError):
    """Git could not read or write the repository."""

    code = "repo_damaged"


class DiskFull(RepoError):
    """The host's disk is full; nothing was written."""

    code = "disk_full"

    def __init__(self) -> None:
        super().__init__("disk of the host is full")


class RepoBusy(RepoError):
    """The concurrency limit of a repository, or of all repositories, is reached."""

    code = "repo_busy"

    def __init__(self, what: str) -> None:
        super().__init__(f"too many {what} at the same time: retry later")


class InvalidRevision(RepoError):
    code = "invalid_revision"

    def __init__(self, revision: str) -> None:
        super().__init__(
            f"invalid revision {revision!r}: use a branch, a tag or a commit sha", revision=revision
        )


class AmbiguousRevision(RepoError):
    code = "ambiguous_revision"

    def __init__(self, revision: str) -> None:
        super().__init__(f"ambiguous revision {revision}: more than one object starts with it", rev=revision)


class ReferenceNotFound(RepoError):
    code = "reference_not_found"

    def __init__(self, reference: str) -> None:
        super().__init__(f"no branch, tag or commit {reference}", reference=reference)


class BranchNotFound(RepoError):
    code = "branch_not_found"

    def __init__(self, branch: str) -> None:
        super().__init__(f"no branch {branch}", branch=branch)


class BranchExists(RepoError):
    code = "branch_exists"

    def __init__(self, branch: str) -> None:
        super().__init__(f"branch {branch} already exists", branch=branch)


class InvalidBranch(RepoError):
    """The branch name is empty or invalid."""

    code = "invalid_branch"


class TagNotFound(RepoError):
    code = "tag_not_found"

    def __init__(self, tag: str) -> None:
        super().__init__(f"no tag {tag}", hash=tag)


class CommitNotFound(RepoError):
    code = "commit_not_found"

    def __init__(self, sha: str) -> None:
        super().__init__(f"no commit {sha}", sha=sha)


class CommitNotInBranch(RepoError):
    code = "commit_not_in_branch"

    def __init__(self, sha: str, branch: str) -> None:
        super().__init__(f"commit {sha} is not in the history of {branch}", sha=sha, branch=branch)


class InvalidRange(RepoError):
    code = "invalid_range"

    def __init__(self, since: str, until: str) -> None:
        super().__init__(f"commit {since} is not an ancestor of {until}", since=since, until=until)


class OffsetWithSelector(RepoError):
    code = "offset_with_selector"

    def __init__(self) -> None:
        super().__init__("offset cannot be combined with since or until")


class BlobNotFound(RepoError):
    code = "blob_not_found"

    def __init__(self, sha: str) -> None:
        super().__init__(f"no blob {sha}", hash=sha)


class TreeNotFound(RepoError):
    code = "tree_not_found"

    def __init__(self, sha: str) -> None:
        super().__init__(f"no tree {sha}", hash=sha)


class InvalidObjectId(RepoError):
    code = "invalid_object_id"

    def __init__(self, sha: str) -> None:
        super().__init__(f"invalid object id {sha!r}: use 40 hexadecimal digits", hash=sha)


class PathNotFound(RepoError):
    code = "path_not_found"

    def __init__(self, path: str) -> None:
        super().__init__(f"no {path or 'commit'} in this revision", path=path)


class TooLarge(RepoError):
    """Over a size, time or memory limit: clone the repository, or request less."""

    code = "too_large"


class InvalidPath(RepoError):
    code = "invalid_path"

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"invalid path {path!r}: {why}", path=path)


class InvalidChange(RepoError):
    code = "invalid_change"

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"cannot change {path!r}: {why}", path=path)


class InvalidContent(RepoError):
    code = "invalid_content"

    def __init__(self, path: str) -> None:
        super().__init__(f"the content of {path!r} is not valid base64", path=path)


class ConflictingParent(RepoError):
    """The branch is not at the expected commit."""

    code = "conflicting_parent"

    def __init__(self, branch: str, expected: str, actual: str | None) -> None:
        where = f"at {actual}" if actual else "missing"
        super().__init__(f"branch {branch} is {where}, not at {expected}", expected=expected, actual=actual)

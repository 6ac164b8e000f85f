"""What can be wrong with keeping repositories in step."""

from stead.repos.errors import RepoError


class GithubNotConnected(RepoError):
    """The account has no GitHub App."""

    code = "github_not_connected"

    def __init__(self) -> None:
        super().__init__("no GitHub App is connected to this account: run `stead github connect`")


class GithubRefused(RepoError):
    """GitHub does not let the App do this: people have to give it the right first."""

    code = "github_refused"


class GithubFailed(RepoError):
    """GitHub was not reached, or did not answer as it should."""

    code = "github_failed"


class LinkConflict(RepoError):
    """One of the two repositories is kept in step with another already."""

    code = "link_conflict"


class NotLinked(RepoError):
    code = "not_linked"

    def __init__(self) -> None:
        # Clients look for the number in the sentence.
        super().__init__("404: GitHub sync is not enabled for this repository")

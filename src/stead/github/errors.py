"""Errors of GitHub sync."""

from stead.repos.errors import RepoError


class GithubNotConnected(RepoError):
    """The account has no GitHub App."""

    code = "github_not_connected"

    def __init__(self) -> None:
        super().__init__("no GitHub App is connected to this account: run `stead github connect`")


class GithubRefused(RepoError):
    """GitHub denies the App this: a person has to grant the permission."""

    code = "github_refused"


class GithubFailed(RepoError):
    """GitHub was not reached, or returned an invalid response."""

    code = "github_failed"


class LinkConflict(RepoError):
    """One of the two repositories is already synced with another."""

    code = "link_conflict"


class NotLinked(RepoError):
    code = "not_linked"

    def __init__(self) -> None:
        # The npm package looks for the number in the message.
        super().__init__("404: GitHub sync is not enabled for this repository")

"""Errors of GitHub sync."""

from stead.repos.errors import RepoError


class GithubNotConnected(RepoError):
    """The account has no GitHub App."""

    def __init__(self) -> None:
        super().__init__("no GitHub App is connected to this account: run `stead github connect`")


class GithubRefused(RepoError):
    """GitHub denies the App this: a person has to grant the permission."""


class GithubFailed(RepoError):
    """GitHub was not reached, or returned an invalid response."""


class LinkConflict(RepoError):
    """One of the two repositories is already synced with another."""


class NotLinked(RepoError):
    def __init__(self) -> None:
        super().__init__("GitHub sync is not enabled for this repository")

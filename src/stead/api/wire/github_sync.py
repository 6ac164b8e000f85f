"""Wire models of GitHub sync."""

from typing import Self

from stead.api.wire import Time, Wire
from stead.github.links import Link


class NewGithubSync(Wire):
    github_repo_name: str


class Divergence(Wire):
    """A branch or tag that was not synced: its commit on both sides, and the reason."""

    ref: str
    here: str | None
    there: str | None
    reason: str


class GithubSyncModel(Wire):
    github_repo_name: str
    state: str
    error: str | None
    divergences: list[Divergence]
    last_synced_at: Time | None
    created_at: Time

    @classmethod
    def of(cls, link: Link) -> Self:
        return cls(
            github_repo_name=link.name,
            state=link.state,
            error=link.error,
            divergences=[
                Divergence(ref=each.ref, here=each.here, there=each.there, reason=each.reason)
                for each in link.conflicts
            ],
            last_synced_at=link.synced_at,
            created_at=link.created_at,
        )

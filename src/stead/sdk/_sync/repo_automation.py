# Made by scripts/unasync from _async/repo_automation.py.
"""What happens after pushes: webhooks are called, GitHub is kept in step."""

from collections.abc import Sequence
from typing import Any

from stead.sdk._sync.repo_part import RepoPart
from stead.sdk.errors import NotFound, RepoNotFound, UnexpectedAnswer
from stead.sdk.git_models import Delivery, DeliveryList, GithubSync, Trigger, list_of
from stead.sdk.parsing import parse


class Triggers(RepoPart):
    """Webhooks that are called after pushes."""

    def create(
        self, endpoint: str, *, branches: Sequence[str] | None = None, globs: Sequence[str] | None = None
    ) -> str:
        """Have a URL called after each push, or only after those to these branches that change files like
        these; returns the trigger's id."""
        trigger: dict[str, Any] = {"event": "push"}
        if branches is not None:
            trigger["branches"] = list(branches)
        if globs is not None:
            trigger["globs"] = list(globs)
        body = {"trigger": trigger, "action": {"action": "webhook", "endpoint": endpoint}}
        answer = self._call("POST", "/trigger", json=body)
        trigger_id = answer.get("triggerId") if isinstance(answer, dict) else None
        if not isinstance(trigger_id, str):
            raise UnexpectedAnswer("the answer has no usable 'triggerId'")
        return trigger_id

    def list(self) -> list[Trigger]:
        return [Trigger.of(each) for each in list_of(self._call("GET", "/trigger"), "triggers")]

    def delete(self, trigger_id: str) -> None:
        self._call("DELETE", "/trigger/{}", trigger_id)

    def deliveries(
        self, trigger_id: str, *, limit: int | None = None, offset: int | None = None
    ) -> DeliveryList:
        """What was sent for a trigger, and is to be, newest first."""
        query = {"limit": limit, "offset": offset}
        answer = self._call("GET", "/trigger/{}/deliveries", trigger_id, query=query)
        return parse(DeliveryList, answer)

    def redeliver(self, trigger_id: str, delivery_id: str) -> Delivery:
        """Send the same once more."""
        path = "/trigger/{}/deliveries/{}/redeliver"
        return parse(Delivery, self._call("POST", path, trigger_id, delivery_id))


class Github(RepoPart):
    """Keeping the repository in step with one at GitHub, in both directions."""

    def enable(self, github_repo_name: str) -> None:
        """Begin, with the repository `owner/name`, where the account's GitHub App is installed."""
        self._call("POST", "/github-sync", json={"githubRepoName": github_repo_name})

    def get(self) -> GithubSync | None:
        """What it is kept in step with, or None."""
        try:
            return parse(GithubSync, self._call("GET", "/github-sync"))
        except RepoNotFound:
            raise
        except NotFound:
            return None

    def run(self) -> GithubSync:
        """Look at both sides now, and tell how it went."""
        return parse(GithubSync, self._call("POST", "/github-sync/run"))

    def disable(self) -> None:
        """Leave both as they are from now on."""
        self._call("DELETE", "/github-sync")

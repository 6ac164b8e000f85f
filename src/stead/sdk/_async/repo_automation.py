"""Webhooks for pushes, and synchronisation with GitHub."""

import builtins
from collections.abc import Sequence
from typing import Any

from stead.sdk._async.repo_part import AsyncRepoPart
from stead.sdk.arguments import checks_arguments
from stead.sdk.errors import NotFound, RepoNotFound, UnexpectedAnswer
from stead.sdk.git_models import Delivery, DeliveryList, GithubSync, Trigger, objects_at
from stead.sdk.parsing import parse


@checks_arguments
class AsyncTriggers(AsyncRepoPart):
    """Webhooks that the server calls after pushes."""

    async def create(
        self, endpoint: str, *, branches: Sequence[str] | None = None, globs: Sequence[str] | None = None
    ) -> Trigger:
        """Create a webhook for pushes.

        Args:
            endpoint: the URL to call.
            branches: only for pushes to these branches.
            globs: only for pushes that change a file that matches one of these patterns.
        """
        trigger: dict[str, Any] = {"event": "push"}
        if branches is not None:
            trigger["branches"] = list(branches)
        if globs is not None:
            trigger["globs"] = list(globs)
        body = {"trigger": trigger, "action": {"action": "webhook", "endpoint": endpoint}}
        answer = await self._call("POST", "/trigger", json=body)
        trigger_id = answer.get("triggerId") if isinstance(answer, dict) else None
        if not isinstance(trigger_id, str):
            raise UnexpectedAnswer("the answer has no valid 'triggerId'")
        return Trigger(
            trigger_id,
            endpoint,
            branches=None if branches is None else tuple(branches),
            globs=None if globs is None else tuple(globs),
            repository_id=self._repo_id,
        )

    async def list(self) -> builtins.list[Trigger]:
        """The repository's webhooks."""
        return [
            Trigger.from_wire(each) for each in objects_at(await self._call("GET", "/trigger"), "triggers")
        ]

    async def delete(self, trigger: Trigger | str) -> None:
        """Delete a webhook, by its id or as `create` and `list` return it."""
        await self._call("DELETE", "/trigger/{}", _id(trigger))

    async def deliveries(
        self, trigger: Trigger | str, *, limit: int | None = None, offset: int | None = None
    ) -> DeliveryList:
        """The deliveries of a webhook, newest first, pending ones included."""
        query = {"limit": limit, "offset": offset}
        answer = await self._call("GET", "/trigger/{}/deliveries", _id(trigger), query=query)
        return parse(DeliveryList, answer)

    async def redeliver(self, trigger: Trigger | str, delivery: Delivery | str) -> Delivery:
        """Send a delivery again."""
        path = "/trigger/{}/deliveries/{}/redeliver"
        return parse(Delivery, await self._call("POST", path, _id(trigger), _id(delivery)))


def _id(thing: Trigger | Delivery | str) -> str:
    return thing if isinstance(thing, str) else thing.id


@checks_arguments
class AsyncGithub(AsyncRepoPart):
    """Two-way synchronisation with a repository on GitHub."""

    async def enable(self, github_repo_name: str) -> None:
        """Start the synchronisation with `owner/name`, where the account's GitHub App is installed."""
        await self._call("POST", "/github-sync", json={"githubRepoName": github_repo_name})

    async def get(self) -> GithubSync | None:
        """The state of the synchronisation; None if it is not enabled."""
        try:
            return parse(GithubSync, await self._call("GET", "/github-sync"))
        except RepoNotFound:
            raise
        except NotFound:
            return None

    async def run(self) -> GithubSync:
        """Synchronise now, and return the result."""
        return parse(GithubSync, await self._call("POST", "/github-sync/run"))

    async def disable(self) -> None:
        """Stop the synchronisation. Both repositories stay as they are."""
        await self._call("DELETE", "/github-sync")

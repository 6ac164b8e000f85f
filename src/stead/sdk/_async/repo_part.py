"""Base class of the parts of a repository: requests below its path."""

from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.arguments import checks_arguments
from stead.sdk.requests import Request, request

ROOT = "/git/v1/repo"


@checks_arguments
class AsyncRepoPart:
    """A part of one repository."""

    def __init__(self, connection: AsyncConnection, repo_id: str) -> None:
        self._connection = connection
        self._repo_id = repo_id

    async def _call(self, method: str, path: str, *parts: str, **options: Any) -> Any:
        return await self._connection.call(self._on(method, path, *parts, **options))

    def _on(self, method: str, path: str, *parts: str, **options: Any) -> Request:
        return request(method, f"{ROOT}/{{}}{path}", self._repo_id, *parts, **options)

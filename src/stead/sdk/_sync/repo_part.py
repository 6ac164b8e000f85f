# Made by scripts/unasync from _async/repo_part.py.
"""What all parts of a repository have in common: calls below its address."""

from typing import Any

from stead.sdk._sync.connection import Connection
from stead.sdk.requests import Request, request

ROOT = "/git/v1/repo"


class RepoPart:
    """A part of one repository."""

    def __init__(self, connection: Connection, repo_id: str) -> None:
        self._connection = connection
        self._repo_id = repo_id

    def _call(self, method: str, path: str, *parts: str, **options: Any) -> Any:
        return self._connection.call(self._on(method, path, *parts, **options))

    def _on(self, method: str, path: str, *parts: str, **options: Any) -> Request:
        return request(method, f"{ROOT}/{{}}{path}", self._repo_id, *parts, **options)

"""Recordings of a VM: the output of commands that were run with `terminal`."""

import builtins
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.arguments import checks_arguments
from stead.sdk.models import Terminal, TerminalLine
from stead.sdk.parsing import parse_list, parse_object
from stead.sdk.requests import request


@checks_arguments
class AsyncTerminals:
    """The recorded output of commands that were run with `terminal`."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    async def logs(self, name: str) -> builtins.list[TerminalLine]:
        """A recording as lines of plain text."""
        return parse_list(TerminalLine, await self._get("/{}/logs", name), "logs")

    async def output(self, name: str) -> str:
        """A recording with its control sequences (xterm-256color)."""
        return str(parse_object(await self._get("/{}/xterm-256color", name)).get("output", ""))

    async def _get(self, path: str, *parts: str) -> Any:
        call = request("GET", f"/v1/vms/{{}}/terminals{path}", self._vm_id, *parts, user=self._user)
        return await self._connection.call(call)

    # Last: the name shadows the built-in `list` in annotations below it.
    async def list(self) -> builtins.list[Terminal]:
        """The recordings and their states."""
        return parse_list(Terminal, await self._get(""), "terminals")

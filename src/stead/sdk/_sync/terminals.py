# Made by scripts/unasync from _async/terminals.py.
"""Terminals that were opened in a machine."""

from typing import Any

from stead.sdk._sync.connection import Connection
from stead.sdk.models import Terminal, TerminalLine
from stead.sdk.parsing import parse_list
from stead.sdk.requests import request


class Terminals:
    """What stands on a machine's terminals."""

    def __init__(self, connection: Connection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    def logs(self, name: str) -> list[TerminalLine]:
        """The lines of a terminal as plain text."""
        return parse_list(TerminalLine, self._get("/{}/logs", name), "logs")

    def output(self, name: str) -> str:
        """The terminal's output with its control sequences."""
        return str((self._get("/{}/xterm-256color", name)).get("output", ""))

    def _get(self, path: str, *parts: str) -> Any:
        call = request("GET", f"/v1/vms/{{}}/terminals{path}", self._vm_id, *parts, user=self._user)
        return self._connection.call(call)

    # Last, because its name hides the built-in from the annotations of what follows it.
    def list(self) -> list[Terminal]:
        return parse_list(Terminal, self._get(""), "terminals")

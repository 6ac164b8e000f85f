"""Options of a command that the client waits for, and their form on the wire."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from stead.sdk.arguments import as_bytes, milliseconds


class ExecOptions(TypedDict, total=False):
    """Options of `vm.exec` and `vm.exec_stream`."""

    cwd: str | None
    """The working directory."""
    env: Mapping[str, str] | None
    """Environment variables to add."""
    stdin: str | bytes | None
    """Standard input."""
    timeout: float | None
    """Seconds after which the VM kills the command."""
    user: str | None
    """The Linux user; the handle's user if None."""


@dataclass(frozen=True)
class ExecCall:
    """A command with its options. An unknown option is a TypeError."""

    command: str | Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | bytes | None = None
    timeout: float | None = None
    user: str | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "command": self.command if isinstance(self.command, str) else list(self.command),
            "timeoutMs": None if self.timeout is None else milliseconds("timeout", self.timeout),
        }
        if self.cwd is not None:
            body["cwd"] = self.cwd
        if self.env is not None:
            body["env"] = dict(self.env)
        if self.stdin is not None:
            data = as_bytes("stdin", self.stdin)
            body["stdin"] = base64.b64encode(data).decode()
        return body

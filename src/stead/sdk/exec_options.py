"""Options of a command that the client waits for, and their form on the wire."""

import base64
from collections.abc import Mapping, Sequence
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


def exec_body(command: str | Sequence[str], options: ExecOptions) -> dict[str, Any]:
    """A command with its options, in the server's format."""
    timeout, cwd = options.get("timeout"), options.get("cwd")
    env, stdin = options.get("env"), options.get("stdin")
    body: dict[str, Any] = {
        "command": command if isinstance(command, str) else list(command),
        "timeoutMs": None if timeout is None else milliseconds("timeout", timeout),
    }
    if cwd is not None:
        body["cwd"] = cwd
    if env is not None:
        body["env"] = dict(env)
    if stdin is not None:
        body["stdin"] = base64.b64encode(as_bytes("stdin", stdin)).decode()
    return body

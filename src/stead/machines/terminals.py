"""Named terminals: the guest records the output of commands under a name.

The recordings are part of the VM: they survive suspend, stop, fork and snapshot. A terminal belongs to the
Linux user that first ran a command in it; root sees all.
"""

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from stead.errors import GuestError, InvalidRequest
from stead.host.execution import DEFAULT_OUTPUT_LIMIT, ExecRequest, ExecResult, collect
from stead.machines.events import Use
from stead.machines.machine import Machine

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class TerminalInfo:
    """A terminal; it is running while a process started in it has its output open."""

    name: str
    user: str
    status: Literal["running", "exited"]
    created_at: float


@dataclass(frozen=True)
class LogLine:
    """A line without its newline, and the time of its first byte."""

    text: str
    at: float


@dataclass(frozen=True)
class _Piece:
    at: float
    data: bytes


async def run(
    machine: Machine,
    name: str,
    command: str | Sequence[str],
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    stdin: bytes | AsyncIterator[bytes] | None = None,
    user: str | None = None,
    timeout: float | None = None,
    output_limit: int = DEFAULT_OUTPUT_LIMIT,
) -> ExecResult:
    """Run a command to its end, like `Machine.exec`; the guest records its output and its children's.

    Creates the terminal if it does not exist; of more than 64 the oldest is dropped.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"invalid terminal name {name!r}: must be 1 to 64 letters, digits, '.', '_' or '-'"
        )
    request = ExecRequest(command, cwd, env or {}, stdin, user, timeout, terminal=name)
    return await collect(await machine.agent(Use.TERMINAL), request, output_limit)


async def find(machine: Machine, user: str | None = None) -> list[TerminalInfo]:
    """The terminals that a Linux user may see, oldest first."""
    agent = await machine.agent(Use.TERMINAL)
    answer = await agent.call("GET", "/v1/terminals", user=user)
    return [
        TerminalInfo(
            name=entry["name"],
            user=entry["user"],
            status="running" if entry["running"] else "exited",
            created_at=entry["created_ms"] / 1000,
        )
        for entry in answer["terminals"]
    ]


async def output(machine: Machine, name: str, user: str | None = None) -> bytes:
    """The recorded output, both streams interleaved: about the last MiB."""
    return b"".join(piece.data for piece in await _pieces(machine, name, user))


async def logs(machine: Machine, name: str, user: str | None = None) -> list[LogLine]:
    """The recorded output in lines."""
    lines: list[LogLine] = []
    begun, began = bytearray(), 0.0
    for piece in await _pieces(machine, name, user):
        for part in _parts(piece.data):
            if not begun:
                began = piece.at
            begun += part
            if part.endswith(b"\n"):
                lines.append(_line(begun, began))
                begun.clear()
    if begun:
        lines.append(_line(begun, began))
    return lines


def _parts(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [*(line + b"\n" for line in whole), *([rest] if rest else [])]


def _line(data: bytes | bytearray, at: float) -> LogLine:
    return LogLine(bytes(data).removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace"), at)


async def _pieces(machine: Machine, name: str, user: str | None) -> list[_Piece]:
    if not _NAME.fullmatch(name):
        raise GuestError("not_found", f"terminal {name!r} not found")
    agent = await machine.agent(Use.TERMINAL)
    async with agent.stream("GET", f"/v1/terminals/{quote(name, safe='')}", user=user) as response:
        content = await response.aread()
    pieces = []
    for line in content.splitlines():
        piece = json.loads(line)
        pieces.append(_Piece(piece["at_ms"] / 1000, base64.b64decode(piece["data_b64"])))
    return pieces

"""Recordings: the guest records the output of commands under a name, which the wire calls a terminal.

They are part of the VM: they survive suspend, stop, fork and snapshot. A recording belongs to the Linux user
that first ran a command under its name; root sees all.
"""

import base64
import io
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from stead.errors import GuestError, InvalidRequest
from stead.guest.agent import Agent, parse_object, parsing
from stead.guest.execution import DEFAULT_OUTPUT_LIMIT, ExecRequest, ExecResult, collect
from stead.shares import MemoryReservation, Reserve, unlimited

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MAX_LINE = 256 << 10
_MAX_OUTPUT = 16 << 20
"""The agent keeps about 1 MiB for each recording; base64 and short pieces make it longer."""
_PIECE_COST = 160
_LATEST = 253_402_300_799_999
"""The last millisecond of the year 9999, which is as far as dates go."""


@dataclass(frozen=True)
class RecordingInfo:
    """A recording; it is running while a process that prints to it has its output open."""

    name: str
    user: str
    status: Literal["running", "exited"]
    created_at: float


@dataclass(frozen=True)
class LogLine:
    """A line without its newline, and the time of its first byte."""

    text: str
    at: float


@dataclass(frozen=True, slots=True)
class _Piece:
    at: float
    data: bytes


async def run(
    agent: Agent,
    name: str,
    command: str | Sequence[str],
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    stdin: bytes | AsyncIterator[bytes] | None = None,
    user: str | None = None,
    timeout: float | None = None,
    output_limit: int = DEFAULT_OUTPUT_LIMIT,
    reserve: Reserve = unlimited,
) -> ExecResult:
    """Run a command to its end, like `Machine.exec`; the guest records its output and its children's.

    Creates the recording if it does not exist; of more than 64 the oldest is dropped. `reserve` is asked for
    the memory of the output.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"invalid terminal name {name!r}: must be 1 to 64 letters, digits, '.', '_' or '-'"
        )
    request = ExecRequest(command, cwd, env or {}, stdin, user, timeout, terminal=name)
    return await collect(agent, request, output_limit, reserve)


async def find(agent: Agent, user: str | None = None) -> list[RecordingInfo]:
    """The recordings that a Linux user may see, oldest first."""
    answer = await agent.call("GET", "/v1/terminals", user=user)
    with parsing("GET /v1/terminals"):
        return [
            RecordingInfo(
                name=str(entry["name"]),
                user=str(entry["user"]),
                status="running" if entry["running"] else "exited",
                created_at=moment(entry["created_ms"]),
            )
            for entry in answer["terminals"]
        ]


async def output(agent: Agent, name: str, user: str | None = None, reserve: Reserve = unlimited) -> bytes:
    """The recorded output, both streams interleaved: about the last MiB. `reserve` is asked for memory."""
    output = io.BytesIO()
    async for piece in _pieces(agent, name, user, reserve):
        output.write(piece.data)
    return output.getvalue()


async def logs(
    agent: Agent, name: str, user: str | None = None, reserve: Reserve = unlimited
) -> "RecordedLines":
    """The recorded output in lines. `reserve` is asked for memory."""
    return RecordedLines([piece async for piece in _pieces(agent, name, user, reserve)])


class RecordedLines:
    """The lines of a recording, made when they are read: there may be a million empty ones in a MiB."""

    def __init__(self, pieces: "Sequence[_Piece]") -> None:
        self._pieces = pieces

    @property
    def most(self) -> int:
        """An upper bound of their number."""
        return 1 + sum(piece.data.count(b"\n") for piece in self._pieces)

    def __iter__(self) -> Iterator[LogLine]:
        begun, began = bytearray(), 0.0
        for piece in self._pieces:
            start = 0
            while start < len(piece.data):
                if not begun:
                    began = piece.at
                end = piece.data.find(b"\n", start) + 1
                begun += piece.data[start : end or len(piece.data)]
                if not end:
                    break
                start = end
                yield _line(begun, began)
                begun.clear()
        if begun:
            yield _line(begun, began)


def _line(data: bytearray, at: float) -> LogLine:
    return LogLine(bytes(data).removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace"), at)


async def _pieces(
    agent: Agent, name: str, user: str | None, reserve: Reserve
) -> AsyncGenerator[_Piece, None]:
    if not _NAME.fullmatch(name):
        raise GuestError("not_found", f"terminal {name!r} not found")
    what = f"/v1/terminals/{quote(name, safe='')}"
    size, memory = 0, MemoryReservation(reserve)
    async with agent.stream("GET", what, user=user) as answer:
        async for line in answer.lines(_MAX_LINE):
            size += len(line)
            if size > _MAX_OUTPUT:
                raise GuestError("answer_too_large", f"terminal {name!r} has more than {_MAX_OUTPUT} bytes")
            # A piece of a few bytes takes more memory than its line.
            await memory.add(len(line) + _PIECE_COST)
            with parsing(what):
                piece = parse_object(line, what)
                yield _Piece(moment(piece["at_ms"]), base64.b64decode(piece["data_b64"]))


def moment(millis: Any) -> float:
    """Milliseconds since the epoch as seconds; ValueError for what is no date."""
    if not 0 <= int(millis) <= _LATEST:
        raise ValueError
    return int(millis) / 1000

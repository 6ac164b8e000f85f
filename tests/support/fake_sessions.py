"""Terminals and processes of a guest in memory, by the agent's protocol, for tests of the API without VMs.

A program is named by the last word of its argument list: `cat` prints its input, `flood` prints without end,
`exit N` exits at once. Input `exit N` ends any of them.
"""

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

_STARTED, _STDOUT, _STDERR, _RESULT, SCREEN = range(5)
_INPUT, _RESIZE, _SIGNAL, _CLOSE_STDIN = range(16, 20)
CAP = 128


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">B3xI", kind, len(payload)) + payload


@dataclass(eq=False)
class FakeSession:
    id: str
    kind: str
    user: str
    argv: list[str]
    pty: bool
    cols: int
    rows: int
    output: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    signal: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    clients: set[asyncio.StreamWriter] = field(default_factory=set)
    received: bytearray = field(default_factory=bytearray)
    stdin_closed: bool = False
    printed: int = 0
    """Bytes that `flood` could send."""
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether it reads its input."""

    def described(self) -> bytes:
        return json.dumps(self.facts()).encode()

    def facts(self) -> dict[str, Any]:
        exited = self.ended.is_set()
        return {
            "id": self.id,
            "kind": self.kind,
            "user": self.user,
            "pid": 100,
            "argv": self.argv,
            "pty": self.pty,
            "cols": self.cols,
            "rows": self.rows,
            "title": "",
            "created_ms": 1_700_000_000_000,
            "exited_ms": int(time.time() * 1000) if exited else None,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "attached": len(self.clients),
            "offset": len(self.output),
            "start": 0,
        }

    def print(self, data: bytes) -> None:
        self.output += data
        for client in self.clients:
            client.write(frame(_STDOUT, data))

    def end(self, code: int | None, signal: str | None = None) -> None:
        if not self.ended.is_set():
            self.exit_code, self.signal = code, signal
            self.ended.set()

    def put(self, data: bytes) -> None:
        self.received += data
        if data.startswith(b"exit "):
            self.end(int(data[5:]))
        elif self.argv and self.argv[-1] == "cat":
            self.print(data)


class FakeSessions:
    """The session table of one guest, and its ports."""

    def __init__(self) -> None:
        self.table: dict[str, FakeSession] = {}
        self.ports: dict[int, tuple[str, int]] = {}
        """Where connections to a port of the guest lead to."""
        self._numbers = 0

    async def serve(
        self,
        head: str,
        headers: Mapping[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Answer one request; after an upgrade, return when that connection has ended."""
        method, target, _ = head.split()
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        user = headers.get("x-stead-user", "root")
        owner = "x-stead-user" not in headers
        parts = url.path.removeprefix("/v1/").split("/")
        if parts[0] == "connect":
            await self._connect(int(query["port"]), reader, writer)
            return
        if len(parts) == 1:
            if method == "POST":
                _reply(writer, *self._start(json.loads(body), user))
            else:
                seen = [each for each in self.table.values() if each.kind == query["kind"]]
                seen = [each for each in seen if owner or each.user == user]
                _reply(writer, 200, {"sessions": [each.facts() for each in seen]})
            return
        session = self.table.get(parts[1])
        if session is None:
            _reply(writer, 404, {"code": "not_found", "message": "no such session"})
        elif not owner and session.user != user:
            _reply(writer, 403, {"code": "permission_denied", "message": "not yours"})
        else:
            await self._act(session, [method, *parts[2:]], query, body, reader, writer)

    def _start(self, wanted: dict[str, Any], user: str) -> tuple[int, dict[str, Any]]:
        kind = wanted["kind"]
        if sum(each.kind == kind for each in self.table.values()) >= CAP:
            return 429, {"code": "session_cap", "message": f"too many sessions (max {CAP})", "limit": CAP}
        self._numbers += 1
        name = wanted.get("id") or f"{'pty' if kind == 'terminal' else 'proc'}-{self._numbers}"
        if name in self.table:
            return 409, {"code": "exists", "message": "taken"}
        argv = wanted.get("argv") or []
        made = FakeSession(name, kind, user, argv, wanted["pty"], wanted["cols"], wanted["rows"])
        made.reads.set()
        self.table[name] = made
        if argv and argv[-1].startswith("exit "):
            made.end(int(argv[-1][5:]))
        return 201, made.facts()

    async def _act(
        self,
        session: FakeSession,
        what: list[str],
        query: Mapping[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        match what:
            case ["DELETE"]:
                session.end(None, "SIGKILL")
                del self.table[session.id]
            case ["POST", "signal"]:
                session.end(None, json.loads(body)["signal"])
            case ["POST", "input"]:
                session.put(body)
                session.stdin_closed = query["close"] == "1"
            case ["GET", "wait"]:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(int(query["timeout_ms"]) / 1000):
                        await session.ended.wait()
            case ["GET", "output"]:
                start, limit = int(query["offset"]), int(query["limit"])
                frames = frame(_STARTED, session.described())
                if data := bytes(session.output[start : start + limit]):
                    frames += frame(_STDOUT, data)
                _reply_bytes(writer, 200, frames)
                return
            case ["GET", "attach"]:
                await self._attach(session, query, reader, writer)
                return
        _reply(writer, 200, session.facts())

    async def _attach(
        self,
        session: FakeSession,
        query: Mapping[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(_SWITCHING % b"stead-session")
        session.clients.add(writer)
        if "cols" in query:
            session.cols, session.rows = int(query["cols"]), int(query["rows"])
        writer.write(frame(_STARTED, session.described()))
        if session.kind == "terminal":
            writer.write(frame(SCREEN, b"screen:" + bytes(session.output)))
        else:
            writer.write(frame(_STDOUT, bytes(session.output[int(query.get("offset", "0")) :])))
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._take(session, reader))]
        tasks.append(asyncio.create_task(session.ended.wait()))
        if session.argv and session.argv[-1] == "flood":
            tasks.append(asyncio.create_task(self._flood(session, writer)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if session.ended.is_set():
                writer.write(frame(_RESULT, session.described()))
                await writer.drain()
        finally:
            session.clients.discard(writer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _flood(self, session: FakeSession, writer: asyncio.StreamWriter) -> None:
        data = frame(_STDOUT, b"y\n" * 32768)
        while True:
            writer.write(data)
            await writer.drain()
            session.printed += 65536
            await asyncio.sleep(0)

    async def _take(self, session: FakeSession, reader: asyncio.StreamReader) -> None:
        while True:
            kind, length = struct.unpack(">B3xI", await reader.readexactly(8))
            payload = await reader.readexactly(length)
            await session.reads.wait()
            match kind:
                case 16:
                    session.put(payload)
                case 17:
                    size = json.loads(payload)
                    session.cols, session.rows = size["cols"], size["rows"]
                case 18:
                    session.end(None, json.loads(payload)["signal"])
                case 19:
                    session.stdin_closed = True

    async def _connect(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if port not in self.ports:
            _reply(writer, 502, {"code": "connection_refused", "message": f"port {port} refused"})
            return
        there_reads, there_writes = await asyncio.open_connection(*self.ports[port])
        writer.write(_SWITCHING % b"stead-tcp")
        try:
            await asyncio.gather(_pipe(reader, there_writes), _pipe(there_reads, writer))
        finally:
            there_writes.close()


_SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n"


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _reply(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
    _reply_bytes(writer, status, json.dumps(answer).encode())


def _reply_bytes(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

"""Trial: SSH connections of several kinds, open over twenty suspends of a real VM."""

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

from stead.machines import Machine, Machines, State
from stead.machines.records import Properties
from support.installations import Server
from support.internals import inside
from support.scripted_server import free_port
from support.waiting import until

_SUSPENDS = 20
_IDLE = 3
"""Seconds without traffic after which every third suspend comes by itself."""
_WAIT = 300
_PIPE = asyncio.subprocess.PIPE
_CAPITALS = """\
import socketserver

class Answering(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line.upper())

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

Server(("127.0.0.1", 8000), Answering).serve_forever()
"""
_EDITOR_SERVER = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class Connection:
    """One connection to the gateway, with keepalives, that stays open."""

    options: list[str]
    login: str
    port: str
    folder: Path
    opened: contextlib.AsyncExitStack
    shared: list[str] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        return ["ssh", *self.options, *self.shared, "-p", self.port, self.login, *arguments]

    async def start(self, *command: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*command, stdin=_PIPE, stdout=_PIPE)

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        self.opened.push_async_callback(end)
        return process

    async def connect(self, name: str, *options: str) -> asyncio.subprocess.Process:
        self.shared = ["-o", f"ControlPath={self.folder}/{name}"]
        # Answers have the order of the requests: a keepalive waits for a wake that was asked for before.
        alive = ("-o", "ServerAliveInterval=1", "-o", f"ServerAliveCountMax={_WAIT}")
        master = await self.start(*self.command("-M", "-N", *alive, *options))
        await until((self.folder / name).exists, 60)
        return master

    async def run(self, *arguments: str, stdin: bytes = b"") -> str:
        process = await asyncio.create_subprocess_exec(
            *self.command(*arguments), stdin=_PIPE, stdout=_PIPE, stderr=_PIPE
        )
        out, errors = await asyncio.wait_for(process.communicate(stdin), _WAIT)
        assert process.returncode == 0, errors
        return out.decode()


async def _line(reader: asyncio.StreamReader | None, wanted: bytes) -> None:
    """Read lines up to the one that has `wanted`."""
    assert reader is not None
    async with asyncio.timeout(_WAIT):
        while line := await reader.readline():
            if wanted in line:
                return
    raise AssertionError(f"the connection has ended before {wanted!r}")


async def _capitals(link: Link, text: str) -> None:
    link[1].write(f"{text}\n".encode())
    await _line(link[0], text.upper().encode())


class Story(Protocol):
    async def begin(self, connection: Connection) -> None: ...

    async def answer(self, number: int) -> None:
        """Use the connection; returns once all of its parts have answered."""


class Tunnel:
    """`ssh -N -L`: a new connection, and one that stays open."""

    async def begin(self, connection: Connection) -> None:
        self.port = free_port()
        await connection.connect("tunnel", "-L", f"127.0.0.1:{self.port}:127.0.0.1:8000")
        await until(self._accepts, 60)
        self.kept = await asyncio.open_connection("127.0.0.1", self.port)
        connection.opened.callback(self.kept[1].close)

    async def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
            return True
        return False

    async def answer(self, number: int) -> None:
        link = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await _capitals(link, f"new {number}")
        finally:
            link[1].close()
        await _capitals(self.kept, f"kept {number}")


class Sessions:
    """ControlMaster: three sessions at once."""

    async def begin(self, connection: Connection) -> None:
        self._connection = connection
        await connection.connect("sessions")

    async def answer(self, number: int) -> None:
        run = self._connection.run
        doubled, echoed, terminal = await asyncio.gather(
            run(f"echo $(({number} * 2))"),
            run("cat", stdin=f"input {number}".encode()),
            run("-tt", "tty"),
        )
        assert (doubled, echoed) == (f"{number * 2}\n", f"input {number}") and "/dev/pts/" in terminal


class Remote:
    """`-R`: a port that stays, and one that is forwarded and cancelled each time."""

    async def begin(self, connection: Connection) -> None:
        self._connection = connection
        server = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        connection.opened.callback(server.close)
        self._target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await connection.connect("remote", "-R", f"127.0.0.1:7000:{self._target}")
        # ssh crashes when another port is forwarded before it has the answer to this.
        await until(self._forwarded, 60)

    async def _forwarded(self) -> bool:
        return bool(await self._connection.run("cat < /dev/tcp/127.0.0.1/7000 || true"))

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"from the client\n")
        writer.close()

    async def answer(self, number: int) -> None:
        run, port = self._connection.run, 7100 + number
        back = ("-R", f"127.0.0.1:{port}:{self._target}")
        await run("-O", "forward", *back)
        assert await run(f"cat < /dev/tcp/127.0.0.1/{port}") == "from the client\n"
        await run("-O", "cancel", *back)
        assert await run("cat < /dev/tcp/127.0.0.1/7000") == "from the client\n"


class Shell:
    """A key that is typed in an open shell."""

    async def begin(self, connection: Connection) -> None:
        self._shell = await connection.start(*connection.command("-tt", "bash"))
        await self.answer(0)

    async def answer(self, number: int) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"echo typed-$(({number} + 1000))\n".encode())
        await _line(self._shell.stdout, f"typed-{number + 1000}".encode())


class Editor:
    """A server that runs as long as the window, a tunnel to a port and files, all at once."""

    async def begin(self, connection: Connection) -> None:
        self._connection, self._proxy = connection, free_port()
        await connection.connect("editor", "-D", str(self._proxy))
        self._server = await connection.start(*connection.command("python3", "-uc", f"'{_EDITOR_SERVER}'"))
        batch = ["sftp", "-q", *connection.options, *connection.shared, "-P", connection.port, "-b", "-"]
        self._files = await connection.start(*batch, connection.login)
        self._content = os.urandom(50_000)
        self._file = connection.folder / "file"
        self._file.write_bytes(self._content)
        await self._served(0)

    async def _served(self, number: int) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"request {number}\n".encode())
        await _line(self._server.stdout, f"REQUEST {number}".encode())

    async def _tunnelled(self, number: int) -> None:
        link = await asyncio.open_connection("127.0.0.1", self._proxy)
        try:
            link[1].write(b"\x05\x01\x00")
            assert await link[0].readexactly(2) == b"\x05\x00"
            link[1].write(b"\x05\x01\x00\x01\x7f\x00\x00\x01" + (8000).to_bytes(2, "big"))
            assert (await asyncio.wait_for(link[0].readexactly(10), _WAIT))[:2] == b"\x05\x00"
            await _capitals(link, f"through {number}")
        finally:
            link[1].close()

    async def _copied(self, number: int) -> None:
        assert self._files.stdin is not None
        back = self._file.with_name(f"back-{number}")
        self._files.stdin.write(
            f"put {self._file} /tmp/copy\nget /tmp/copy {back}\n!echo done-{number}\n".encode()
        )
        await _line(self._files.stdout, f"done-{number}\n".encode())
        assert back.read_bytes() == self._content

    async def answer(self, number: int) -> None:
        await asyncio.gather(
            self._served(number), self._tunnelled(number), self._tunnelled(-number), self._copied(number)
        )


@contextlib.asynccontextmanager
async def _vm(server: Server) -> AsyncIterator[tuple[Machine, str]]:
    here, account = server.installation, server.account
    machine = await here.machines.create(Properties(account=account, idle_timeout=None))
    identity = await here.identities.create(account)
    await here.identities.grant(account, identity.id, machine.id)
    _, token = await here.identities.create_token(account, identity.id)
    await machine.files().write("/srv/capitals.py", _CAPITALS.encode())
    await machine.exec("systemd-run --unit capitals python3 /srv/capitals.py")
    try:
        yield machine, token
    finally:
        await machine.delete()


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_connections_of_every_kind_outlive_twenty_suspends(server: Server) -> None:
    """After each suspend another kind of connection is used first and wakes the VM; the others follow."""
    here = server.installation
    waits: dict[str, list[float]] = {}
    answered = 0
    async with contextlib.AsyncExitStack() as opened:
        machine, token = await opened.enter_async_context(_vm(server))
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (folder / "known").write_text(f"[127.0.0.1]:{here.ssh.port} {here.ssh.host_key}\n")
        options = ["-F", "none", "-o", f"UserKnownHostsFile={folder}/known", "-o", "BatchMode=yes"]
        stories: list[Story] = [Tunnel(), Sessions(), Remote(), Editor(), Shell()]
        for story in stories:
            login = f"{machine.id},{token}@127.0.0.1"
            await story.begin(Connection(options, login, str(here.ssh.port), folder, opened))
            await story.answer(0)
        for number in range(1, _SUSPENDS + 1):
            # Closed channels are closed in the VM too.
            await asyncio.sleep(2)
            await _sleep(here.machines, machine, by_itself=number % 3 == 0)
            order = stories[number % len(stories) :] + stories[: number % len(stories)]
            began = time.monotonic()
            for story in order:
                await asyncio.wait_for(story.answer(number), _WAIT)
                answered += 1
                if story is order[0]:
                    waits.setdefault(type(story).__name__, []).append(time.monotonic() - began)
                    assert (await machine.info()).state is State.RUNNING
    everything = [each for some in waits.values() for each in some]
    print(f"\n{answered} of {_SUSPENDS * len(stories)} answered over {_SUSPENDS} suspends")
    for name, some in {**waits, "all": everything}.items():
        print(
            f"{name}: first answer p50 {statistics.median(some):.2f} s, max {max(some):.2f} s ({len(some)})"
        )


async def _sleep(machines: Machines, machine: Machine, *, by_itself: bool) -> None:
    """Suspend the VM, on request or by its idle timeout, and assert that it sleeps on."""
    if by_itself:
        await machine.start(idle_timeout=_IDLE)

        async def suspended() -> bool:
            return (await machine.info()).state is State.SUSPENDED

        await until(suspended, 120)
        assert (await machine.info()).reason == f"suspended: idle for {_IDLE} s"
        await inside(machines).journal.set_idle(machine.id, None, 0)
    else:
        await machine.suspend()
    await asyncio.sleep(3)
    assert (await machine.info()).state is State.SUSPENDED and machines.observer(machine.id) is None

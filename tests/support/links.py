"""Network namespaces joined by links, which stand for VMs, the host and what is around it."""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from stead.addresses import GATEWAY
from stead.host.namespaces import NamespaceThread

CERTAIN = 60.0
"""Seconds that something may take that certainly happens: the host may be busy."""
PROBE = 2.0
"""Seconds after which something that should not happen counts as absent."""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Side:
    """A network namespace with a thread in it."""

    name: str
    thread: NamespaceThread

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.name

    def ip(self, *arguments: str) -> str:
        return ip("-n", self.name, *arguments)

    def load(self, rules: str) -> None:
        """Load nftables rules."""
        command = ["ip", "netns", "exec", self.name, "nft", "-f", "-"]
        subprocess.run(command, check=True, input=rules, text=True)

    async def sysctl(self, name: str, value: str) -> None:
        await self.thread.call(lambda: Path("/proc/sys", name).write_text(value))

    async def listener(self, address: str, port: int) -> socket.socket:
        return await self.thread.call(lambda: socket.create_server((address, port)))

    async def connect(
        self, address: str, port: int, source: str = "", wait: float = CERTAIN
    ) -> socket.socket:
        """A TCP connection; TimeoutError when nothing answers, ConnectionError or OSError on a refusal."""

        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            made.setblocking(False)
            if source:
                made.bind((source, 0))
            return made

        made = await self.thread.call(make)
        try:
            async with asyncio.timeout(wait):
                await asyncio.get_running_loop().sock_connect(made, (address, port))
        except BaseException:
            made.close()
            raise
        return made

    async def reaches(self, address: str, port: int, source: str = "", wait: float = PROBE) -> bool:
        """Whether a connection is made. With `wait=CERTAIN` where it should be."""
        try:
            (await self.connect(address, port, source, wait)).close()
        except (OSError, TimeoutError):
            return False
        return True

    async def reached(self, *targets: tuple[str, int], wait: float = PROBE) -> list[tuple[str, int]]:
        """Those of several addresses and ports to which a connection is made, tried at the same time."""
        found = await asyncio.gather(*(self.reaches(*target, wait=wait) for target in targets))
        return [target for target, reached in zip(targets, found, strict=True) if reached]


@contextlib.contextmanager
def namespace(role: str) -> Iterator[Side]:
    name = f"sttest{os.getpid()}{role}"
    ip("netns", "add", name)
    try:
        thread = NamespaceThread.named(Path("/run/netns") / name)
        try:
            ip("-n", name, "link", "set", "lo", "up")
            yield Side(name, thread)
        finally:
            thread.close()
    finally:
        ip("netns", "delete", name)


def link(here: Side, name: str, there: Side, other: str) -> None:
    """A link between two namespaces; both ends are up, without addresses."""
    here.ip("link", "add", name, "type", "veth", "peer", "name", other, "netns", there.name)
    for side, end in ((here, name), (there, other)):
        side.ip("link", "set", end, "up", "addrgenmode", "none")


def plug_in(taps: str, tap: str, guest: Side, address: str) -> None:
    """Make a namespace a VM behind a data tap: its address is routed to it, as `Network.attach` does."""
    ip("-n", taps, "link", "add", tap, "type", "veth", "peer", "name", "eth0", "netns", guest.name)
    ip("-n", taps, "link", "set", tap, "up", "addrgenmode", "none")
    ip("-n", taps, "route", "add", f"{address}/32", "dev", tap, "scope", "link")
    guest.ip("addr", "add", f"{address}/32", "dev", "eth0")
    guest.ip("link", "set", "eth0", "up", "addrgenmode", "none")
    guest.ip("route", "add", str(GATEWAY), "dev", "eth0")
    guest.ip("route", "add", "default", "via", str(GATEWAY), "dev", "eth0")


@contextlib.asynccontextmanager
async def echoing(listener: socket.socket) -> AsyncIterator[None]:
    """Answer every connection of a listener with what it sends."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, sock=listener):
        yield


async def echoed(connection: socket.socket, data: bytes) -> bytes:
    """What an echoing server answers; TimeoutError if nothing comes."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        await loop.sock_sendall(connection, data)
        return await loop.sock_recv(connection, 100)

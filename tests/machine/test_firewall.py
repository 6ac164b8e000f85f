"""The rules of the taps' namespace, on links that stand for those of VMs."""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from stead.addresses import AGENT_ADDRESS, AGENT_PORT, HOST_LINK_ADDRESS
from stead.host.commands import run
from stead.host.firewall import namespace_rules
from stead.host.namespaces import NamespaceThread

pytestmark = pytest.mark.root
_PORT = 40_000
_SLOW = b"slow"
_LINKS = ("sm0", "sm1")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Side:
    """A network namespace with a thread in it."""

    name: str
    thread: NamespaceThread

    async def bound(self, link: str, address: str, port: int) -> socket.socket:
        """A socket bound to a link-local address of this side."""

        def bind() -> socket.socket:
            made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port, 0, socket.if_nametoindex(link)))
            return made

        return await self.thread.call(bind)

    async def connected(self, link: str, source: tuple[str, int], target: tuple[str, int]) -> socket.socket:
        made = await self.bound(link, *source)
        index = await self.thread.call(lambda: socket.if_nametoindex(link))
        try:
            async with asyncio.timeout(2):
                await asyncio.get_running_loop().sock_connect(made, (*target, 0, index))
        except BaseException:
            made.close()
            raise
        return made


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[Side]:
    _ip("netns", "add", name)
    try:
        thread = NamespaceThread.named(Path("/run/netns") / name)
        try:
            yield Side(name, thread)
        finally:
            thread.close()
    finally:
        _ip("netns", "delete", name)


@dataclass(frozen=True)
class Network:
    host: Side
    guests: list[Side]


@pytest.fixture
def network() -> Iterator[Network]:
    """The host's namespace with its rules, and two guests behind management links with the same addresses."""
    with contextlib.ExitStack() as stack:
        names = [f"sttest{os.getpid()}{role}" for role in ("h", "a", "b")]
        host, *guests = [stack.enter_context(_namespace(name)) for name in names]
        for link, guest in zip(_LINKS, guests, strict=True):
            _ip(
                "-n",
                host.name,
                "link",
                "add",
                link,
                "type",
                "veth",
                "peer",
                "name",
                link,
                "netns",
                guest.name,
            )
            for side, address in ((host, HOST_LINK_ADDRESS), (guest, AGENT_ADDRESS)):
                _ip("-n", side.name, "link", "set", link, "up", "addrgenmode", "none")
                _ip("-n", side.name, "addr", "add", f"{address}/64", "dev", link, "nodad")
        yield Network(host, guests)


@dataclass(frozen=True)
class Slow:
    """An answer that waits."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def _echoing(side: Side, link: str, address: str, port: int) -> AsyncIterator[Slow]:
    slow = Slow()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            if data == _SLOW:
                slow.arrived.set()
                await slow.released.wait()
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, sock=await side.bound(link, address, port)):
        yield slow


async def _echoed(link: socket.socket, data: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        await loop.sock_sendall(link, data)
        return await loop.sock_recv(link, 100)


async def _load_rules(network: Network) -> None:
    rules = namespace_rules("up0", None, [], [])
    await run("ip", "netns", "exec", network.host.name, "nft", "-f", "-", stdin=rules.encode())


async def test_connections_to_two_vms_from_one_port_do_not_disturb_each_other(network: Network) -> None:
    """Their packets have the same addresses and ports, and differ in the interface only."""
    await _load_rules(network)
    for state in ("fin_wait", "last_ack", "time_wait", "close"):
        await network.host.thread.call(
            partial(Path(f"/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{state}").write_text, "1")
        )
    agent, here = (AGENT_ADDRESS, AGENT_PORT), (HOST_LINK_ADDRESS, _PORT)
    async with contextlib.AsyncExitStack() as stack:
        slow, _ = [
            await stack.enter_async_context(_echoing(guest, link, *agent))
            for link, guest in zip(_LINKS, network.guests, strict=True)
        ]
        with await network.host.connected("sm0", here, agent) as first:
            answer = asyncio.create_task(_echoed(first, _SLOW))
            async with asyncio.timeout(10):
                await slow.arrived.wait()
            with await network.host.connected("sm1", here, agent) as second:
                assert await _echoed(second, b"two") == b"two"
            await asyncio.sleep(2)  # conntrack, were it in use, would forget a closed connection
            slow.released.set()
            assert await answer == _SLOW


async def test_a_vm_opens_no_connection_to_its_host(network: Network) -> None:
    """Not even from the agent's port, from which its answers come."""
    guest, agent = network.guests[0], (AGENT_ADDRESS, AGENT_PORT)
    before, after = (HOST_LINK_ADDRESS, _PORT), (HOST_LINK_ADDRESS, _PORT + 1)
    async with _echoing(network.host, "sm0", *before), _echoing(network.host, "sm0", *after):
        with await guest.connected("sm0", agent, before) as without_rules:
            assert await _echoed(without_rules, b"in") == b"in"
        await _load_rules(network)
        with pytest.raises(TimeoutError):
            await guest.connected("sm0", agent, after)

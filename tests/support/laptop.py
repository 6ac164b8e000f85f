"""A computer outside: a network namespace with a link to the host, and the real `wg-quick`."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from stead.addresses import TUNNELS
from stead.host.interface import Peer, PrivateNetwork, WireGuardTunnel
from stead.networks.tunnels import TunnelSession, _new_id, _new_keys, _public
from support.links import Side, ip, namespace


@dataclass(frozen=True)
class Laptop:
    side: Side
    host: IPv4Address
    """The host's address on the link."""

    def command(self, *words: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.side.name, *map(str, words)]

    async def run(
        self,
        *command: str,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """The output of a program that runs there."""

        def run() -> subprocess.CompletedProcess[str]:
            inside = self.command(*command)
            return subprocess.run(inside, input=stdin, env=env, cwd=cwd, capture_output=True, text=True)

        ended = await asyncio.to_thread(run)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    @contextlib.asynccontextmanager
    async def joined(self, config: Path) -> AsyncIterator[None]:
        """With the tunnel of a configuration file."""
        await self.run("wg-quick", "up", str(config))
        try:
            yield
        finally:
            await self.run("wg-quick", "down", str(config))


def _end_processes(namespace: str) -> None:
    """Of a test that failed: `wireguard-go` outlives `wg-quick`, and its namespace."""
    for pid in ip("netns", "pids", namespace).split():
        if int(pid) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def link(number: int = 0) -> IPv4Network:
    """The range of a computer's link; the host has its first address."""
    return IPv4Network(f"10.{202 + number}.{os.getpid() % 256}.0/24")


@contextlib.contextmanager
def laptop(number: int = 0) -> Iterator[Laptop]:
    """A computer with a folder /etc/wireguard of its own; a test with several of them numbers them."""
    outer, inner, network = f"stw{os.getpid()}h{number}", f"stw{os.getpid()}n{number}", link(number)
    with namespace(f"l{number}") as side, contextlib.ExitStack() as stack:
        configuration = Path("/etc/netns") / side.name
        (configuration / "wireguard").mkdir(parents=True)
        stack.callback(shutil.rmtree, configuration)
        stack.callback(_end_processes, side.name)
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", side.name)
        stack.callback(ip, "link", "delete", outer)
        ip("addr", "add", f"{network[1]}/24", "dev", outer)
        ip("link", "set", outer, "up")
        side.ip("addr", "add", f"{network[2]}/24", "dev", inner)
        side.ip("link", "set", inner, "up")
        yield Laptop(side, network[1])


def session_into(
    vpc: PrivateNetwork, computer: Laptop, beside: WireGuardTunnel | None = None
) -> tuple[TunnelSession, WireGuardTunnel]:
    """A session for one computer, and the tunnel that the host has to make for it and those `beside` it."""
    private, public = _new_keys()
    if beside is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("0.0.0.0", 0))
            beside = WireGuardTunnel(vpc, int(probe.getsockname()[1]), _new_keys()[0], ())
    session = TunnelSession(
        id=_new_id(),
        vpc=vpc.id,
        cidr=vpc.cidr,
        endpoint=str(computer.host),
        port=beside.port,
        interface="",
        server_key=_public(beside.private_key),
        public_key=public,
        private_key=private,
        address=TUNNELS[2 + len(beside.peers)],
        expires_at=0,
    )
    return session, replace(beside, peers=(*beside.peers, Peer(public, session.address)))


def written(folder: Path, session: TunnelSession, config: str | None = None) -> Path:
    """The configuration file of a session, named as in the documentation of the npm package."""
    path = folder / f"wg-{session.id}.conf"
    path.touch(mode=0o600)
    path.write_text(config or session.config)
    return path

"""Another host: a network namespace with a link to this one, a resolver, and web servers if it needs any."""

import contextlib
import os
import random
import shutil
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Network
from pathlib import Path

from stead.host.authority import Authority
from support.links import Side, ip, namespace


@dataclass(frozen=True)
class RemoteHost:
    """The other host. Commands in it see the resolver and no network but the link."""

    side: Side
    network: IPv4Network

    @property
    def address(self) -> str:
        return str(self.network[2])

    @property
    def this_host(self) -> str:
        """The address of this host for the other one."""
        return str(self.network[1])

    def command(self, *words: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.side.name, *map(str, words)]

    async def serve(self, stack: contextlib.ExitStack, names: list[str], authority: Authority) -> Path:
        """Serve a folder over HTTPS, by these names, until the stack is closed; yields the folder."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp")))
        pair = authority.server_certificate(names)
        chain = folder / ".pem"
        chain.write_bytes(pair.certificate + pair.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        chain.unlink()
        handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
        server = ThreadingHTTPServer((self.address, 443), handler, bind_and_activate=False)
        server.socket.close()
        server.socket = context.wrap_socket(await self.side.listener(self.address, 443), server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        return folder


@contextlib.contextmanager
def remote_host(zones: Iterable[str]) -> Iterator[RemoteHost]:
    """Another host, for which all these names, and all below them, are names of this host."""
    network = IPv4Network(f"10.{random.randrange(90, 250)}.{random.randrange(250)}.0/24")
    with namespace("out") as side, contextlib.ExitStack() as stack:
        here = f"stt{os.getpid()}o"
        ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", side.name)
        # The kernel removes a namespace, and with it the link, some time after its last process.
        stack.callback(ip, "link", "delete", here)
        ip("addr", "add", f"{network[1]}/24", "dev", here)
        ip("link", "set", here, "up")
        side.ip("addr", "add", f"{network[2]}/24", "dev", "eth0")
        side.ip("link", "set", "eth0", "up")
        side.ip("route", "add", "default", "via", str(network[1]))
        configuration = Path("/etc/netns") / side.name
        configuration.mkdir(parents=True)
        stack.callback(shutil.rmtree, configuration)
        (configuration / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        made = RemoteHost(side, network)
        resolver = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root"]
        resolver += ["--no-resolv", "--no-hosts", "--bind-interfaces", "--listen-address=127.0.0.1"]
        resolver += [f"--address=/{zone}/{network[1]}" for zone in zones]
        process = subprocess.Popen(made.command(*resolver))
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield made

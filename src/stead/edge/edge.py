"""Opens the edge of an installation: the gate, the route files, and Caddy in front of them and of the API."""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from stead import addresses
from stead.deadlines import scaled
from stead.edge import connections, gate_server
from stead.edge.caddy import Caddy, CaddyPaths
from stead.edge.certificates import CertificatePermission, issued_in
from stead.edge.configuration import Descriptors, EdgePaths, caddy_configuration, local_names
from stead.edge.gate import Dial, Gate, Vms
from stead.edge.listeners import PublicSockets, bind_unix, listen_for_guests, listen_on_loopback
from stead.edge.routes import RouteFiles, RouteSource
from stead.files import give_tree_to, write_atomically
from stead.host.authority import Authority, KeyPair
from stead.host.namespaces import NamespaceThread
from stead.host.resolvers import changes_of_resolvers, resolv_conf
from stead.logs import get_logger
from stead.settings import Settings
from stead.tasks import TaskSet, in_thread

log = get_logger("stead.edge")

_DIAL_TIMEOUT = scaled(3.0)
_END_TIMEOUT = scaled(60.0)
_RENEWAL_CHECK = 86_400.0
_INTERMEDIATE, _INTERMEDIATE_KEY, _ROOT = "intermediate.crt", "intermediate.key", "root.crt"
_CERTIFICATE, _KEY = "local.crt", "local.key"


@dataclass(frozen=True)
class Edge:
    """The running edge."""

    https_port: int
    api: socket.socket
    """Where Caddy passes requests for the API and for Git to."""
    files: RouteFiles
    caddy: Caddy

    def mappings_changed(self) -> None:
        """Call it after each change of the mappings."""
        self.files.recheck()


def edge_folder(settings: Settings) -> Path:
    """Sockets and route files, outside the folder of VMs' runtime files."""
    return settings.runtime / "edge" / settings.instance


@contextlib.contextmanager
def _runtime(settings: Settings) -> Iterator[Path]:
    folder = edge_folder(settings)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for each in (folder.parent, folder):
        each.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


@contextlib.asynccontextmanager
async def open_edge(
    settings: Settings, vms: Vms, source: RouteSource, public: PublicSockets, namespace: Path
) -> AsyncIterator[Edge]:
    """The edge during a block. Only for the holder of the installation's lock."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(_runtime(settings))
        api = stack.enter_context(bind_unix(folder / "api.sock", settings.edge_uid))
        thread = NamespaceThread.named(namespace)
        stack.callback(thread.close)
        tasks = await stack.enter_async_context(TaskSet())
        cuts: dict[str, asyncio.Task[None]] = {}

        def ended(machine: str, address: IPv4Address) -> None:
            cut = _cut(vms, thread, machine, address)
            task = cuts[machine] = tasks.start(cut, f"close connections to VM {machine}")
            task.add_done_callback(lambda _: cuts.pop(machine) if cuts.get(machine) is task else None)

        async def connections_closed(machine: str) -> None:
            if machine in cuts:
                await asyncio.wait({cuts[machine]})

        files = RouteFiles(folder / "routes", source, ended)
        stack.callback(files.close)
        gate = Gate(vms, source, files, _dialling(thread), connections_closed)
        stack.push_async_callback(gate.close)
        listening = stack.enter_context(await thread.call(listen_on_loopback))
        storage = await in_thread(_storage, settings)
        certificates = storage / "certificates"
        permission = CertificatePermission(source, issued_in(certificates))
        await stack.enter_async_context(gate_server.serving(gate, permission, listening))
        guests = [
            stack.enter_context(await thread.call(partial(listen_for_guests, port))) for port in (443, 80)
        ]
        caddy_paths = CaddyPaths(folder / "caddy")
        caddy_paths.folder.mkdir(mode=0o700)
        os.chown(caddy_paths.folder, settings.edge_uid, settings.edge_uid)
        # Also without any: the host may get its name servers later.
        caddy_paths.resolvers.write_text(resolv_conf(addresses.resolvers()))
        caddy_paths.resolvers.chmod(0o644)
        tasks.start(_follow_resolvers(caddy_paths.resolvers), "follow the host's name servers")
        host, port = listening.getsockname()
        paths = EdgePaths(
            admin=caddy_paths.admin,
            storage=certificates,
            log=storage / "caddy.log",
            routes=folder / "routes",
            api=folder / "api.sock",
            gate=f"{host}:{port}",
            certificate=storage / _CERTIFICATE,
            key=storage / _KEY,
            root=storage / _ROOT,
            intermediate=storage / _INTERMEDIATE,
            intermediate_key=storage / _INTERMEDIATE_KEY,
        )
        descriptors = Descriptors(
            https=public.https.fileno(),
            quic=None if public.quic is None else public.quic.fileno(),
            http=None if public.http is None else public.http.fileno(),
            guests_https=guests[0].fileno(),
            guests_http=guests[1].fileno(),
        )
        if public.public:
            await connections.limit_connections(settings, public.ports)
            stack.push_async_callback(connections.remove_limits, settings)
        caddy = Caddy(
            namespace,
            settings.edge_uid,
            caddy_paths,
            caddy_configuration(settings, descriptors, paths, public.https_port),
            descriptors.all,
        )
        stack.push_async_callback(caddy.close)
        await caddy.start()
        tasks.start(_renew(settings, caddy), "renew the certificate of local names")
        yield Edge(public.https_port, api, files, caddy)


def _storage(settings: Settings) -> Path:
    """The folder of Caddy's user: certificates, ACME account, the intermediate of the installation's CA."""
    folder = settings.data / "edge"
    folder.mkdir(mode=0o700, exist_ok=True)
    authority = Authority.open(settings)
    if not authority.signed(folder / _INTERMEDIATE):
        _write(folder, _INTERMEDIATE, _INTERMEDIATE_KEY, authority.intermediate())
    names = local_names(settings)
    if not authority.signed(folder / _CERTIFICATE, names):
        _write(folder, _CERTIFICATE, _KEY, authority.server_certificate(names))
    write_atomically(folder / _ROOT, authority.certificate, 0o644)
    (folder / "certificates").mkdir(mode=0o700, exist_ok=True)
    # A data folder that was restored at another path has another user.
    give_tree_to(settings.edge_uid, folder)
    return folder


def _write(folder: Path, certificate: str, key: str, made: KeyPair) -> None:
    write_atomically(folder / key, made.key, 0o600)
    write_atomically(folder / certificate, made.certificate, 0o644)


async def _follow_resolvers(file: Path) -> None:
    async for servers in changes_of_resolvers():
        # Not by rename: this file is bind-mounted as /etc/resolv.conf of Caddy, which reads it again when it
        # changes.
        await in_thread(file.write_text, resolv_conf(servers))


async def _renew(settings: Settings, caddy: Caddy) -> None:
    """Renew what the installation's CA signed, long before its end. Only then is Caddy configured again."""
    certificate = settings.data / "edge" / _CERTIFICATE
    while True:
        await asyncio.sleep(_RENEWAL_CHECK)
        before = await in_thread(certificate.read_bytes)
        await in_thread(_storage, settings)
        if await in_thread(certificate.read_bytes) != before:
            await caddy.configure()


async def _cut(vms: Vms, thread: NamespaceThread, machine: str, address: IPv4Address) -> None:
    """Close the connections to a VM now, and those that a request opened while the VM was ending."""
    await connections.cut_connections(thread, address)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT):
            await vms.ended(machine)
        await connections.cut_connections(thread, address)


def _dialling(thread: NamespaceThread) -> Dial:
    async def dial(address: IPv4Address, port: int) -> None:
        async with asyncio.timeout(_DIAL_TIMEOUT):
            (await thread.dial(address, port)).close()

    return dial

"""Opens the edge of an installation: the gate, the route files, and Caddy in front of them and of the API."""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from stead import addresses
from stead.deadlines import scaled
from stead.edge import connections, gate_server
from stead.edge.caddy import Caddy, CaddyPaths
from stead.edge.certificates import CertificateLimits, CertificatePermission, issued_in
from stead.edge.configuration import (
    CertificateFiles,
    Descriptors,
    EdgePaths,
    Json,
    caddy_configuration,
    local_certificates,
)
from stead.edge.gate import Dial, Gate, Vms
from stead.edge.listeners import PublicSockets, bind_unix, listen_for_guests, listen_on_loopback
from stead.edge.routes import RouteFiles, RouteSource
from stead.edge.unmapped import UnmappedFiles
from stead.edge.wildcard import WildcardCertificate, keep_renewed
from stead.files import give_tree_to, write_atomically
from stead.host.authority import Authority, KeyPair, signed_names
from stead.host.namespaces import NamespaceThread
from stead.host.resolvers import changes_of_resolvers, resolv_conf
from stead.logs import get_logger
from stead.settings import Settings
from stead.supervision import Backoff, keep_running, repeat
from stead.tasks import TaskSet, in_thread

log = get_logger("stead.edge")

_DIAL_TIMEOUT = scaled(3.0)
_END_TIMEOUT = scaled(60.0)
_RENEWAL_CHECK = 86_400.0
_FOLLOW_AGAIN = Backoff(shortest=1.0, longest=60.0, healthy=60.0)
_NEW_NAMES = "certificate-names.jsonl"
_INTERMEDIATE, _INTERMEDIATE_KEY, _ROOT = "intermediate.crt", "intermediate.key", "root.crt"


@dataclass(frozen=True)
class Edge:
    """The running edge."""

    https_port: int
    api: socket.socket
    """Where Caddy passes requests for the API and for Git to."""
    files: RouteFiles
    unmapped: UnmappedFiles
    caddy: Caddy

    def mappings_changed(self, names: Collection[str] | None = None) -> None:
        """Call it after each change of the mappings, with the names and wildcards that changed."""
        self.files.recheck(names)
        self.unmapped.recheck(names)


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

        files = RouteFiles(folder / "routes", source, ended, settings.edge_uid)
        stack.callback(files.close)
        unmapped = UnmappedFiles(folder / "unmapped", source, settings.edge_uid)
        stack.callback(unmapped.close)
        gate = Gate(vms, source, files, unmapped, _dialling(thread), connections_closed)
        stack.push_async_callback(gate.close)
        listening = stack.enter_context(await thread.call(listen_on_loopback))
        storage = settings.data / "edge"
        await in_thread(_sign_certificates, settings, storage)
        certificates = storage / "certificates"
        permission = await in_thread(
            CertificatePermission,
            source,
            issued_in(certificates),
            CertificateLimits.of(settings),
            settings.data / _NEW_NAMES,
        )
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
        follow = partial(_follow_resolvers, caddy_paths.resolvers)
        tasks.start(
            keep_running("Caddy's resolv.conf", follow, _FOLLOW_AGAIN), "follow the host's name servers"
        )
        host, port = listening.getsockname()
        wildcard = WildcardCertificate.of(settings, storage)
        paths = EdgePaths(
            admin=caddy_paths.admin,
            storage=certificates,
            log=storage / "caddy.log",
            routes=folder / "routes",
            unmapped=folder / "unmapped",
            api=folder / "api.sock",
            gate=f"{host}:{port}",
            certificates=list(_local_files(settings, storage)),
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

        def configuration() -> Json:
            more = [wildcard.files] if wildcard is not None and wildcard.exists() else []
            found = replace(paths, certificates=[*paths.certificates, *more])
            return caddy_configuration(settings, descriptors, found, public.https_port)

        caddy = Caddy(namespace, settings.edge_uid, caddy_paths, configuration(), descriptors.all)
        stack.push_async_callback(caddy.close)
        await caddy.start()
        tasks.start(_renew(settings, caddy), "renew the certificate of local names")
        if wildcard is not None:

            async def issued() -> None:
                caddy.configuration = configuration()
                await caddy.configure()

            tasks.start(keep_renewed(wildcard, issued), "renew the certificate of the preview zone")
        yield Edge(public.https_port, api, files, unmapped, caddy)


def _local_files(settings: Settings, folder: Path) -> dict[CertificateFiles, list[str]]:
    """The certificates that the installation's CA signs, with their names."""
    return {
        CertificateFiles(folder / f"{file}.crt", folder / f"{file}.key"): names
        for file, names in local_certificates(settings).items()
    }


def _sign_certificates(settings: Settings, folder: Path) -> bool:
    """Sign what is missing or ends soon in the folder of Caddy's user; whether there was something.

    The folder also has what Caddy writes: certificates and the account of the ACME server.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    authority = Authority.open(settings)
    changed = False
    domains = signed_names(settings)
    intermediate = CertificateFiles(folder / _INTERMEDIATE, folder / _INTERMEDIATE_KEY)
    if not (_fit(intermediate) and authority.signed_intermediate(intermediate.certificate, domains)):
        _write(intermediate, authority.intermediate(domains))
        changed = True
    for files, names in _local_files(settings, folder).items():
        if not (_fit(files) and authority.signed(files.certificate, names)):
            _write(files, authority.server_certificate(names))
            changed = True
    write_atomically(folder / _ROOT, authority.certificate, 0o644)
    (folder / "certificates").mkdir(mode=0o700, exist_ok=True)
    # A data folder that was restored at another path has another user.
    give_tree_to(settings.edge_uid, folder)
    return changed


def _fit(files: CertificateFiles) -> bool:
    """Whether a key is that of its certificate: a crash may have left a new key with the old one."""
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    return key.public_key() == certificate.public_key()


def _write(files: CertificateFiles, made: KeyPair) -> None:
    write_atomically(files.key, made.key, 0o600)
    write_atomically(files.certificate, made.certificate, 0o644)


async def _follow_resolvers(file: Path, serving: Callable[[], None]) -> None:
    async for servers in changes_of_resolvers():
        serving()
        # Not by rename: this file is bind-mounted as /etc/resolv.conf of Caddy, which reads it again when it
        # changes.
        await in_thread(file.write_text, resolv_conf(servers))


async def _renew(settings: Settings, caddy: Caddy) -> None:
    """Renew what the installation's CA signed, long before its end. Only then is Caddy configured again."""
    renewed = False

    async def renew() -> None:
        nonlocal renewed
        renewed = await in_thread(_sign_certificates, settings, settings.data / "edge") or renewed
        if renewed:
            await caddy.configure()
            renewed = False

    await repeat("renewal of local certificates", renew, _RENEWAL_CHECK)


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

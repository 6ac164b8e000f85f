"""Composition root: opens the parts of an installation, connects and serves them.

The server, the tests and the benchmarks all open installations here. `open_machines` opens the VMs alone,
`open_installation` all parts; `serve` runs the API, HTTPS and SSH over them; `open_server` does both.
"""

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpcore2

from stead import landlock
from stead.api import metrics, server
from stead.api.background import failed
from stead.api.dependencies import limit_sockets
from stead.api.interrupted import InterruptedCreates
from stead.api.server import ApiServer
from stead.builds.builder import Builder
from stead.builds.git_access import GitAccess
from stead.creation.background import BackgroundRequests
from stead.creation.creation import Creation
from stead.creation.idempotency import IdempotencyKeys
from stead.creation.places import background_places, build_places, create_places
from stead.creation.results import CreatedVm
from stead.domains.domains import Domains
from stead.domains.names import Names
from stead.edge import edge
from stead.edge.edge import Edge
from stead.edge.listeners import PublicSockets, bind_public
from stead.edge.names import GuestResolver
from stead.edge.routes import AwakeVm
from stead.edge.ssh.gateway import GatewayLimits, SshGateway
from stead.errors import HostError, MachineNotFound
from stead.github.links import Links
from stead.guest.watchdog import watching_the_loop
from stead.host.authority import Authority
from stead.host.disk_reserve import DiskReserve
from stead.host.git_groups import GitGroups
from stead.host.interface import Host, narrowed
from stead.host.local import LocalHost, installation_locked
from stead.host.network import namespace_path
from stead.host.resources import measure
from stead.identity.accounts import Accounts
from stead.identity.callers import Callers
from stead.identity.errors import AccountNotFound
from stead.identity.identities import Identities
from stead.installation_parts import Installation, VmHosting
from stead.limits import Limits
from stead.logbook import CONSOLE, Logbook
from stead.logs import get_logger
from stead.machines import Machines
from stead.machines.events import EventKind, MachineEvent, Use
from stead.networks.names import PrivateNames
from stead.networks.networks import Networks
from stead.networks.tunnels import Tunnels
from stead.repos.access import RepoAccess
from stead.repos.confinement import Confinement
from stead.repos.repos import Repos
from stead.repos.search.search import Search
from stead.repos.ssrf import OwnServer, SsrfGuard
from stead.repos.transfer.bundles import Bundles
from stead.repos.transfer.imports import Imports
from stead.repos.transfer.serving import PackServer
from stead.repos.webhooks.signing import WebhookSigner
from stead.repos.webhooks.triggers import Triggers
from stead.repos.writer import RepoWriter
from stead.settings import Settings
from stead.store.builds import BuildStore
from stead.store.database import Database, seal_secrets
from stead.store.idempotency import IdempotencyStore
from stead.store.installation_id import DATABASE, open_database_of
from stead.store.logs import LogStore
from stead.store.machines import MachineStore
from stead.store.networks import VpcStore
from stead.store.requests import RequestStore
from stead.store.sealing import SealingError, SealingKeys
from stead.supervision import Backoff, keep_running
from stead.tasks import TaskSet, in_background, in_thread

log = get_logger("stead.serve")

_SSH_RESTART = Backoff(shortest=1.0, longest=30.0, healthy=60.0)
_PUBLISH_RESTART = Backoff(shortest=1.0, longest=30.0, healthy=60.0)
_PUBLISH_INTERVAL = 0.5
"""Seconds between two publications of mapped domains to VMs, at least."""

COMPATIBLE_NAMES = ("api.freestyle.sh", "git.freestyle.sh", "vm-ssh.freestyle.sh")
"""Names of the compatible service. In VMs they lead to this installation, so no account can have them."""


@dataclass(frozen=True)
class OpenedVms:
    """The VMs of an installation, and what they were opened over: its other parts use the same."""

    machines: Machines
    host: Host
    store: MachineStore


@contextlib.asynccontextmanager
async def open_machines(settings: Settings) -> AsyncIterator[Machines]:
    """Open the VMs of an installation under its lock, after crash recovery. Needs root.

    On leaving, VMs keep running; the pool is removed, and without any VM the network is too.
    """
    async with _open_vms(settings) as opened:
        yield opened.machines


@contextlib.asynccontextmanager
async def _open_vms(settings: Settings) -> AsyncIterator[OpenedVms]:
    async with installation_locked(settings), contextlib.AsyncExitStack() as stack:
        database = await open_database_of(settings.data, SealingKeys(settings.sealing_key_files))
        stack.push_async_callback(database.dispose)
        await in_thread(_seal_secrets, settings.data / DATABASE, database.keys)
        host = await LocalHost.open(settings)
        store = MachineStore(database)
        machines = Machines(settings, host, store)
        reserve = DiskReserve(settings.data)
        try:
            async with in_background(reserve.watch(), "disk reserve"), machines.recovered():
                yield OpenedVms(machines, host, store)
        finally:
            empty = not await machines.count()
            await host.close()
            if empty:
                await host.remove_from_host()


def _seal_secrets(path: Path, keys: SealingKeys) -> None:
    """Seal what an earlier release stored in clear. Without its key, only what needs a secret fails."""
    try:
        if count := seal_secrets(path, keys):
            log.info("sealed secrets that were stored in clear", values=count, key=keys.ids[0])
    except SealingError as error:
        log.error("secrets in the database cannot be used", error=str(error))


@contextlib.asynccontextmanager
async def open_installation(settings: Settings) -> AsyncIterator[Installation]:
    """Open an installation after crash recovery. Needs root."""
    zones = tuple(dict.fromkeys([*settings.zones, *settings.api_names, *settings.git_names]))
    with contextlib.closing(GitGroups(settings)) as groups:
        confined = Confinement(settings.git_uids, groups.enter, landlock.version())
        async with (
            _open_vms(settings) as opened,
            GuestResolver.running(
                settings, narrowed(opened.host, LocalHost).network, zones, PrivateNames(opened.store)
            ) as resolver,
            open_parts(settings, opened.store.database, opened, confined) as installation,
            TaskSet() as tasks,
        ):
            tasks.start(_publish_mapped(installation.domains, resolver), "publish mapped domains to VMs")
            yield installation


async def _publish_mapped(domains: Domains, resolver: GuestResolver) -> None:
    """Let mapped domains resolve to the gateway in VMs."""
    changed = asyncio.Event()
    domains.watch(lambda _: changed.set())

    async def publish(serving: Callable[[], None]) -> None:
        changed.set()
        while True:
            await changed.wait()
            changed.clear()
            await resolver.publish(domains.mapped_names())
            serving()
            # All names of all accounts are written each time.
            await asyncio.sleep(_PUBLISH_INTERVAL)

    await keep_running("publishing of mapped domains to VMs", publish, _PUBLISH_RESTART)


@contextlib.asynccontextmanager
async def open_without_vms(
    settings: Settings, database: Database, confined: Confinement | None = None
) -> AsyncIterator[Installation]:
    """Open all parts but VMs. Git runs as the current user unless it is confined."""
    async with open_parts(settings, database, None, confined) as installation:
        yield installation


@contextlib.asynccontextmanager
async def open_parts(
    settings: Settings, database: Database, opened: OpenedVms | None, confined: Confinement | None
) -> AsyncIterator[Installation]:
    """Open the parts of an installation over its database and its VMs, if it has any."""
    machines = None if opened is None else opened.machines
    async with contextlib.AsyncExitStack() as stack:
        logbook = Logbook(LogStore(database))
        logbook.start()
        stack.push_async_callback(logbook.close)
        default = settings.account_limits(measure(settings) if opened is None else opened.host.resources)
        accounts = Accounts(database, default)
        callers = Callers(database)
        stack.push_async_callback(callers.close)

        async def owns(account: str, machine_id: str) -> bool:
            try:
                info = None if machines is None else await machines.info(machine_id)
            except MachineNotFound:
                return False
            return info is not None and info.belongs_to(account)

        async def limits_of(account: str) -> Limits:
            try:
                return (await accounts.get(account)).limits
            except AccountNotFound:
                return default

        identities = Identities(database, owns, limits_of)
        own = (*COMPATIBLE_NAMES, *settings.api_names, *settings.git_names)
        names = Names.of(settings.zones, own, settings.reserved_labels)
        domains = await Domains.open(database, names, owns, limits_of)
        guard = SsrfGuard(settings.dial_private, own_names=domains)
        folder = settings.data / "repos"
        repos = await stack.enter_async_context(Repos.open(database, folder, limits_of, confined))
        access = RepoAccess(database, repos)
        signing = WebhookSigner.open(settings.data, settings.clone_root)
        triggers = await stack.enter_async_context(Triggers.open(database, repos, signing, guard))
        search = Search()
        writer = RepoWriter(repos, search)
        writer.subscribe(triggers)
        links = await stack.enter_async_context(Links(database, repos, writer, guard).running())
        writer.subscribe(links)
        await identities.recover()
        networks = Networks(
            VpcStore(database),
            MachineStore(database) if opened is None else opened.store,
            settings.allow_private,
            None if opened is None else opened.host.vpcs,
        )
        vms = None
        if opened is not None and machines is not None:
            bundles = Bundles(repos, access, settings.clone_root, f"https://{settings.git_name_in_vms}")
            builder = Builder(machines, BuildStore(database), logbook, bundles, places=build_places(settings))
            git_access = GitAccess(identities, repos, access, settings.git_names)
            tunnels = Tunnels(database, settings, opened.host.vpcs)
            await stack.enter_async_context(tunnels.running())
            places = create_places(settings)
            creation = Creation(settings, machines, builder, domains, networks, git_access, logbook, places)
            vms = VmHosting(machines, builder, creation, tunnels)
            machines.limit(limits_of)
            events = _MachineEvents(logbook, identities, domains, tunnels)
            stack.push_async_callback(events.close)
            machines.watch(events)
            await vms.builder.records.recover()
            stack.push_async_callback(vms.builder.close)

        async def made_for(request: str) -> CreatedVm | None:
            return None if vms is None else await vms.creation.made_for(request, running=True)

        background = BackgroundRequests(RequestStore(database), background_places(settings))
        await background.recover(made_for, failed())
        stack.push_async_callback(background.close)
        idempotency = IdempotencyKeys(IdempotencyStore(database))
        interrupted = InterruptedCreates(identities, repos, networks, None if vms is None else vms.creation)
        await idempotency.recover(interrupted.find)
        stack.push_async_callback(idempotency.close)
        yield Installation(
            settings=settings,
            logbook=logbook,
            accounts=accounts,
            callers=callers,
            identities=identities,
            domains=domains,
            networks=networks,
            background=background,
            idempotency=idempotency,
            sockets=limit_sockets(settings.max_sockets),
            repos=repos,
            access=access,
            writer=writer,
            serving=PackServer(repos, writer),
            imports=Imports(guard),
            search=search,
            signing=signing,
            triggers=triggers,
            guard=guard,
            links=links,
            vms=vms,
        )


@dataclass(frozen=True)
class Listeners:
    """The sockets of a server."""

    api: socket.socket
    public: PublicSockets
    ssh_address: tuple[str, int] | None
    """None for no SSH gateway."""
    ssh: socket.socket | None
    """None when the default port is in use: the gateway tries it again."""


@contextlib.contextmanager
def bind(settings: Settings) -> Iterator[Listeners]:
    """Bind the sockets of a server, before anything else is opened: a port in use fails at once."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(server.bind(settings))
        public = stack.enter_context(bind_public(settings))
        ssh = None
        if settings.ssh_address is not None:
            try:
                ssh = stack.enter_context(server.listen_on(*settings.ssh_address))
            except HostError as error:
                if settings.ssh_listen is not None:
                    raise
                log.warning("no SSH gateway until its port is free: set STEAD_SSH_LISTEN", error=str(error))
        yield Listeners(api, public, settings.ssh_address, ssh)


@dataclass(frozen=True)
class Served:
    """A running server."""

    installation: Installation
    api: ApiServer
    edge: Edge
    url: str
    """The API without TLS."""


@contextlib.asynccontextmanager
async def open_server(settings: Settings, listeners: Listeners) -> AsyncIterator[Served]:
    """An installation and its server, with a watchdog of the event loop. Needs root."""
    async with (
        watching_the_loop(metrics.loop_lag.observe),
        open_installation(settings) as installation,
        serve(installation, listeners) as served,
    ):
        # Exclude loaded modules from garbage collection: scanning them blocks calls for 0.1 s.
        gc.collect()
        gc.freeze()
        yield served


@contextlib.asynccontextmanager
async def serve(installation: Installation, listeners: Listeners) -> AsyncIterator[Served]:
    """Serve an open installation during a block: the API, HTTPS in front of it, and SSH."""
    async with (
        open_edge(installation, listeners.public) as edge,
        keep_ssh_gateway(installation, listeners.ssh_address, listeners.ssh),
        server.serving(installation, [listeners.api, edge.api]) as api,
    ):
        yield Served(installation, api, edge, server.url_of(listeners.api))


@contextlib.asynccontextmanager
async def open_edge(installation: Installation, public: PublicSockets) -> AsyncIterator[Edge]:
    """HTTPS in front of an open installation: the API must answer on the socket `api` of the edge."""
    settings = installation.settings
    domains = installation.domains
    vms = RoutedVms(installation.machines)
    async with edge.open_edge(settings, vms, domains, public, namespace_path(settings)) as opened:
        domains.https_port = opened.https_port
        domains.watch(opened.mappings_changed)
        tls = await in_thread(_trusting_own_names, settings)
        installation.guard.own_server = OwnServer(public.address, public.https_port, tls)
        try:
            yield opened
        finally:
            installation.guard.own_server = None


def _trusting_own_names(settings: Settings) -> ssl.SSLContext:
    """For connections to the edge: names have certificates of the installation's CA, or of an ACME server."""
    context = httpcore2.default_ssl_context()
    context.load_verify_locations(cadata=Authority.open(settings).certificate.decode())
    if settings.acme_roots is not None:
        context.load_verify_locations(settings.acme_roots)
    return context


class RoutedVms:
    """VMs as the edge needs them."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def is_up(self, machine: str) -> bool:
        return self._machines.observer(machine) is not None

    async def wake(self, machine: str) -> AwakeVm:
        attached = await self._machines.attached(machine, Use.DOMAIN)
        return AwakeVm((await self._machines.info(machine)).address, attached.eviction)

    async def ended(self, machine: str) -> None:
        with contextlib.suppress(MachineNotFound):
            await self._machines.wait_for_exit(machine)


@contextlib.asynccontextmanager
async def keep_ssh_gateway(
    installation: Installation, address: tuple[str, int] | None, bound: socket.socket | None = None
) -> AsyncIterator[None]:
    """Serve SSH during a block, if there is an address; what fails is tried again, first on `bound`.

    The block begins after the first attempt. `installation.ssh` has the state.
    """
    if address is None:
        yield
        return
    endpoint = installation.ssh
    attempted = asyncio.Event()

    async def attempt(serving: Callable[[], None]) -> None:
        nonlocal bound
        try:
            listening, bound = bound or server.listen_on(*address), None
            with listening:
                async with ssh_gateway(installation, listening):
                    host, port = listening.getsockname()[:2]
                    log.info("ssh gateway listening", address=f"{host}:{port}")
                    serving()
                    attempted.set()
                    await asyncio.Event().wait()
        except Exception:
            endpoint.state = "failed"
            raise
        finally:
            attempted.set()

    endpoint.state = "starting"
    try:
        async with in_background(keep_running("SSH gateway", attempt, _SSH_RESTART), "SSH gateway"):
            await attempted.wait()
            yield
    finally:
        endpoint.state = "off"


@contextlib.asynccontextmanager
async def ssh_gateway(installation: Installation, listening: socket.socket) -> AsyncIterator[SshGateway]:
    """Serve SSH to the VMs of an installation on a bound socket during the block."""
    settings, endpoint = installation.settings, installation.ssh

    def changed(serving: bool) -> None:
        endpoint.state = "serving" if serving else "failed"
        endpoint.port = listening.getsockname()[1] if serving else None

    gateway = SshGateway(
        settings,
        installation.callers,
        installation.identities,
        installation.machines,
        GatewayLimits(settings.max_ssh),
        changed,
    )
    endpoint.host_key = gateway.host_key
    endpoint.host = f"ssh.{settings.domain}" if settings.domain else None
    try:
        async with gateway.serving(listening):
            yield gateway
    finally:
        endpoint.state, endpoint.port = "off", None


class _MachineEvents:
    """Writes VMs' lifecycle events to the logbook, and drops permissions on deleted VMs and their domains."""

    def __init__(self, logbook: Logbook, identities: Identities, domains: Domains, tunnels: Tunnels) -> None:
        self._tunnels = tunnels
        self._logbook = logbook
        self._identities = identities
        self._domains = domains
        self._writes = TaskSet()

    def __call__(self, event: MachineEvent) -> None:
        if event.record.account is not None:
            self._writes.start(self._write(event, event.record.account), f"log event of VM {event.record.id}")

    async def close(self) -> None:
        """Wait for pending writes."""
        await self._writes.join()

    async def _write(self, event: MachineEvent, account: str) -> None:
        record = event.record
        if event.kind is EventKind.DELETED:
            await self._identities.delete_machine_identities(record.id)
        if event.row_removed:
            await self._domains.remove_machine(record.id)
            if record.properties.nic is not None:
                await self._tunnels.machine_deleted(record.properties.nic.vpc)
        await self._logbook.write(
            account,
            event.message,
            level="error" if event.failed else "info",
            source="vm",
            machine=record.id,
            build=record.properties.build,
            request=record.properties.request,
            instance=event.instance,
        )
        if event.console:
            await self._logbook.write(
                account,
                event.console,
                level="error",
                source=CONSOLE,
                machine=record.id,
                instance=event.instance,
            )
        if event.kind is EventKind.DELETED:
            await self._logbook.delete_consoles(account, record.id)
        if event.row_removed:
            await self._identities.delete_machine_permissions(record.id)

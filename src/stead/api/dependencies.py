"""The parts of an open installation, each a dependency: routes name the parts that they use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from stead.api.errors import ApiError
from stead.api.exited_sessions import ExitedSessions
from stead.builds.builder import Builder
from stead.creation.background import BackgroundRequests
from stead.creation.creation import Creation
from stead.creation.idempotency import IdempotencyKeys
from stead.domains.domains import Domains
from stead.errors import HostError
from stead.github.links import Links
from stead.identity.accounts import Accounts
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.identity.tickets import Tickets
from stead.logbook import Logbook
from stead.machines import Machines
from stead.networks.networks import Networks
from stead.networks.tunnels import Tunnels
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.search.search import Search
from stead.repos.ssrf import SsrfGuard
from stead.repos.transfer.imports import Imports
from stead.repos.transfer.serving import PackServer
from stead.repos.webhooks.signing import WebhookSigner
from stead.repos.webhooks.triggers import Triggers
from stead.repos.writer import RepoWriter
from stead.settings import Settings
from stead.tasks import KeyedLimit, KeyedLock


@dataclass(frozen=True)
class VmHosting:
    machines: Machines
    builder: Builder
    creation: Creation
    tunnels: Tunnels


@dataclass
class SshEndpoint:
    """Where the SSH gateway listens, while it does."""

    port: int | None = None
    host: str | None = None
    """Its public name; None for the host of the API."""
    host_key: str = ""


@dataclass(frozen=True)
class Installation:
    """The open parts of one installation; `stead/installation.py` opens them."""

    settings: Settings
    logbook: Logbook
    accounts: Accounts
    callers: Callers
    identities: Identities
    domains: Domains
    networks: Networks
    background: BackgroundRequests
    idempotency: IdempotencyKeys
    sockets: KeyedLimit
    """Open WebSockets."""
    repos: Repos
    access: RepoAccess
    writer: RepoWriter
    serving: PackServer
    imports: Imports
    search: Search
    signing: WebhookSigner
    triggers: Triggers
    guard: SsrfGuard
    links: Links
    vms: VmHosting | None
    ssh: SshEndpoint = field(default_factory=SshEndpoint)
    tickets: Tickets = field(default_factory=Tickets)
    exited: ExitedSessions = field(default_factory=ExitedSessions)
    created_names: KeyedLock = field(default_factory=KeyedLock)
    """Held during a create with `ifMissing`: concurrent ones of the same name create one thing."""

    @property
    def machines(self) -> Machines:
        return self._vms.machines

    @property
    def builder(self) -> Builder:
        return self._vms.builder

    @property
    def creation(self) -> Creation:
        return self._vms.creation

    @property
    def tunnels(self) -> Tunnels:
        return self._vms.tunnels

    @property
    def _vms(self) -> VmHosting:
        if self.vms is None:
            raise HostError("this installation is open without VMs")
        return self.vms


def limit_creations(most: int) -> KeyedLimit:
    def busy() -> ApiError:
        text = f"{most} VMs and snapshots are being created, which is the limit; try again in 5 s"
        return ApiError("SERVICE_UNAVAILABLE", text, headers={"Retry-After": "5"}, retryable=True)

    return KeyedLimit(most, max_wait=0, busy=busy)


def limit_sockets(most: int) -> KeyedLimit:
    """Places for open WebSockets. An account has at most half of them, so that it cannot take all."""
    share = max(1, most // 2)

    def busy() -> ApiError:
        text = f"too many open WebSockets: max {share} for an account, {most} in all (STEAD_MAX_SOCKETS)"
        return ApiError("LIMIT_EXCEEDED", text, 429, headers={"Retry-After": "5"}, limit=share)

    return KeyedLimit(most, share, max_wait=0, busy=busy)


def _part(find: Callable[[Installation], object]) -> Any:
    async def get(connection: HTTPConnection) -> object:
        return find(connection.app.state.installation)

    return Depends(get)


MachinesDep = Annotated[Machines, _part(lambda here: here.machines)]
BuilderDep = Annotated[Builder, _part(lambda here: here.builder)]
CreationDep = Annotated[Creation, _part(lambda here: here.creation)]
BackgroundDep = Annotated[BackgroundRequests, _part(lambda here: here.background)]
IdempotencyDep = Annotated[IdempotencyKeys, _part(lambda here: here.idempotency)]
CreatedNamesDep = Annotated[KeyedLock, _part(lambda here: here.created_names)]
LogbookDep = Annotated[Logbook, _part(lambda here: here.logbook)]
CallersDep = Annotated[Callers, _part(lambda here: here.callers)]
ExitedDep = Annotated[ExitedSessions, _part(lambda here: here.exited)]
TicketsDep = Annotated[Tickets, _part(lambda here: here.tickets)]
DomainsDep = Annotated[Domains, _part(lambda here: here.domains)]
TunnelsDep = Annotated[Tunnels, _part(lambda here: here.tunnels)]
NetworksDep = Annotated[Networks, _part(lambda here: here.networks)]
SshDep = Annotated[SshEndpoint, _part(lambda here: here.ssh)]
IdentitiesDep = Annotated[Identities, _part(lambda here: here.identities)]
ReposDep = Annotated[Repos, _part(lambda here: here.repos)]
AccessDep = Annotated[RepoAccess, _part(lambda here: here.access)]
WriterDep = Annotated[RepoWriter, _part(lambda here: here.writer)]
ImportsDep = Annotated[Imports, _part(lambda here: here.imports)]
SearchDep = Annotated[Search, _part(lambda here: here.search)]
SigningDep = Annotated[WebhookSigner, _part(lambda here: here.signing)]
TriggersDep = Annotated[Triggers, _part(lambda here: here.triggers)]
LinksDep = Annotated[Links, _part(lambda here: here.links)]

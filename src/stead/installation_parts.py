"""The parts of an open installation, as data. `installation.py` opens them; routes depend on single ones."""

from dataclasses import dataclass, field
from typing import Literal

from stead.builds.builder import Builder
from stead.creation.background import BackgroundRequests
from stead.creation.creation import Creation
from stead.creation.idempotency import IdempotencyKeys
from stead.domains.domains import Domains
from stead.errors import HostError
from stead.github.links import Links
from stead.guest.exited_sessions import ExitedSessions
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
from stead.shares import KeyedLimit, KeyedLock

SshState = Literal["off", "starting", "serving", "failed"]


@dataclass(frozen=True)
class VmHosting:
    machines: Machines
    builder: Builder
    creation: Creation
    tunnels: Tunnels


@dataclass
class SshEndpoint:
    """The SSH gateway: whether it serves, and where."""

    state: SshState = "off"
    """`failed`: its port is in use, or it could not start; it is tried again."""
    port: int | None = None
    """None unless it serves."""
    host: str | None = None
    """Its public name; None for the host of the API."""
    host_key: str = ""


@dataclass(frozen=True)
class Installation:
    """The open parts of one installation."""

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

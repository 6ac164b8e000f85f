"""The parts of an open installation as dependencies of routes: each route names the parts that it uses."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from stead.api.errors import ApiError
from stead.builds.builder import Builder
from stead.creation.background import BackgroundRequests
from stead.creation.creation import Creation
from stead.creation.idempotency import IdempotencyKeys
from stead.domains.domains import Domains
from stead.github.links import Links
from stead.guest.exited_sessions import ExitedSessions
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.identity.tickets import Tickets
from stead.installation_parts import Installation, SshEndpoint
from stead.logbook import Logbook
from stead.machines import Machines
from stead.networks.networks import Networks
from stead.networks.tunnels import Tunnels
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.search.search import Search
from stead.repos.transfer.imports import Imports
from stead.repos.webhooks.signing import WebhookSigner
from stead.repos.webhooks.triggers import Triggers
from stead.repos.writer import RepoWriter
from stead.shares import KeyedLimit, KeyedLock, share_of


def limit_sockets(most: int) -> KeyedLimit:
    """Places for open WebSockets. An account has at most a quarter of them, an identity half of that."""
    share = share_of(most)
    own = max(1, share // 2)

    def busy() -> ApiError:
        text = f"too many open WebSockets: max {share} for an account, {own} for an identity, {most} in all"
        text += " (STEAD_MAX_SOCKETS)"
        return ApiError("LIMIT_EXCEEDED", text, 429, headers={"Retry-After": "5"}, limit=share)

    return KeyedLimit(most, share, per_caller=own, max_wait=0, busy=busy)


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

"""The opened parts of one installation that the routes use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from stead.api.background import BackgroundRequests
from stead.api.wire.triggers import push_payload
from stead.builds.builder import Builder
from stead.errors import MachineNotFound
from stead.github.links import Links
from stead.identity.accounts import Accounts
from stead.identity.callers import Callers
from stead.identity.errors import AccountNotFound
from stead.identity.identities import Identities
from stead.limits import Limits
from stead.logbook import Logbook
from stead.machines import Machines, State
from stead.machines.events import MachineEvent
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.search.search import Search
from stead.repos.ssrf import SsrfGuard
from stead.repos.transfer.bundles import Bundles
from stead.repos.transfer.imports import Imports
from stead.repos.transfer.serving import PackServer
from stead.repos.webhooks.signing import WebhookSigner
from stead.repos.webhooks.triggers import Triggers
from stead.repos.writer import RepoWriter
from stead.settings import Settings
from stead.store.builds import BuildStore
from stead.store.logs import LogStore
from stead.store.requests import RequestStore
from stead.tasks import TaskSet


@dataclass(frozen=True)
class Services:
    settings: Settings
    machines: Machines
    accounts: Accounts
    callers: Callers
    identities: Identities
    builder: Builder
    logbook: Logbook
    background: BackgroundRequests
    creations: asyncio.Semaphore
    repos: Repos
    access: RepoAccess
    writer: RepoWriter
    serving: PackServer
    imports: Imports
    search: Search
    signing: WebhookSigner
    triggers: Triggers
    links: Links


@contextlib.asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open an installation with everything the API needs, after crash recovery."""
    async with Machines.open(settings) as machines, assemble(machines) as services:
        yield services


@contextlib.asynccontextmanager
async def assemble(machines: Machines) -> AsyncIterator[Services]:
    """Everything the API needs besides VMs, for an open installation."""
    async with contextlib.AsyncExitStack() as stack:
        settings = machines.settings
        database = machines.database
        logbook = Logbook(LogStore(database))
        logbook.start()
        stack.push_async_callback(logbook.close)
        accounts = Accounts(database, settings.limit)
        callers = Callers(database)
        stack.push_async_callback(callers.close)

        async def owns(account: str, machine_id: str) -> bool:
            try:
                info = await machines.info(machine_id)
            except MachineNotFound:
                return False
            return info.account == account and info.purpose == "use"

        async def limits_of(account: str) -> Limits:
            try:
                return (await accounts.get(account)).limits
            except AccountNotFound:
                return settings.limit

        async def made_for(request: str) -> dict[str, Any] | None:
            info = await machines.made_for(request)
            if info is None or info.state is not State.RUNNING or info.purpose != "use":
                return None
            return {"id": info.id, "domains": [], "consoleUrl": None, "snapshotId": info.snapshot}

        identities = Identities(database, owns)
        folder = settings.data / "repos"
        repos = await stack.enter_async_context(Repos.open(database, folder, limits_of, settings.git_uid))
        access = RepoAccess(database, repos)
        bundles = Bundles(repos, access, settings.clone_root)
        builder = Builder(machines, BuildStore(database), logbook, bundles)
        guard = SsrfGuard(settings.dial_private)
        signing = WebhookSigner.open(settings.data, settings.clone_root)
        triggers = await stack.enter_async_context(
            Triggers.open(database, repos, signing, guard, push_payload)
        )
        search = Search()
        writer = RepoWriter(repos, search)
        links = await stack.enter_async_context(Links(database, repos, writer, guard).running())
        writer.subscribe(triggers)
        writer.subscribe(links)
        background = BackgroundRequests(RequestStore(database))
        machines.limit(limits_of)
        events = _Events(logbook, identities)
        stack.push_async_callback(events.close)
        machines.watch(events)
        await identities.recover()
        await builder.recover()
        await background.recover(made_for)
        stack.push_async_callback(builder.close)
        stack.push_async_callback(background.close)
        yield Services(
            settings=settings,
            machines=machines,
            accounts=accounts,
            callers=callers,
            identities=identities,
            builder=builder,
            logbook=logbook,
            background=background,
            creations=asyncio.Semaphore(settings.max_creations),
            repos=repos,
            access=access,
            writer=writer,
            serving=PackServer(repos, writer),
            imports=Imports(guard),
            search=search,
            signing=signing,
            triggers=triggers,
            links=links,
        )


class _Events:
    """Writes VMs' lifecycle events to the logbook, and drops the permissions on deleted VMs."""

    def __init__(self, logbook: Logbook, identities: Identities) -> None:
        self._logbook = logbook
        self._identities = identities
        self._writes = TaskSet()

    def __call__(self, event: MachineEvent) -> None:
        if event.row.account is None:
            return
        self._writes.start(self._note(event, event.row.account), f"log event of VM {event.row.id}")

    async def close(self) -> None:
        """Wait for pending writes."""
        await self._writes.join()

    async def _note(self, event: MachineEvent, account: str) -> None:
        row = event.row
        await self._logbook.write(
            account,
            event.message,
            level="error" if event.failed else "info",
            source="vm",
            machine=row.id,
            build=row.build,
            request=row.request,
            instance=event.instance,
        )
        if event.row_removed:
            await self._identities.forget_machine(row.id)


async def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]

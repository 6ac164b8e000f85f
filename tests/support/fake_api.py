"""The API over VMs in memory, with callers of every kind: for tests of routes without VMs."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stead.api.server import running
from stead.installation import OpenedVms, open_parts
from stead.installation_parts import Installation
from stead.machines.records import Properties
from stead.settings import Settings, Size
from support.fake_server import FakeServer
from support.fake_sessions import FakeSession, FakeSessions
from support.fake_world import World

TOKEN = "X-Freestyle-Identity-Access-Token"
USER = "X-Freestyle-Vm-Linux-User-Id"


@dataclass(frozen=True)
class FakeApi:
    url: str
    installation: Installation
    world: World
    vm: str
    account: str
    callers: dict[str, dict[str, str]]
    """The headers of each caller."""
    keys: dict[str, str]
    """Ids of API keys and tokens by caller."""

    @property
    def sessions(self) -> FakeSessions:
        return self.world.of(self.vm).sessions

    def session(self, name: str) -> FakeSession:
        return self.sessions.table[name]

    def socket(self, path: str, caller: str = "owner", **options: Any) -> connect:
        headers = {**self.callers[caller], **options.pop("headers", {})}
        url = f"{self.url.replace('http', 'ws', 1)}/v1/vms/{options.pop('vm', self.vm)}{path}"
        return connect(url, additional_headers=headers, compression=None, max_size=None, **options)

    async def refusal(self, path: str, caller: str = "owner", **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer to a WebSocket that is refused before the upgrade."""
        try:
            async with self.socket(path, caller, **options) as socket:
                with contextlib.suppress(ConnectionClosed):
                    raise AssertionError(f"{path} was accepted: {await socket.recv()!r}")
                raise AssertionError(f"{path} was accepted")
        except InvalidStatus as error:
            body = json.loads(error.response.body)
            assert error.response.headers["x-freestyle-trace-id"]
            return error.response.status_code, body

    @contextlib.asynccontextmanager
    async def http(self, caller: str = "owner", **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
        every = {**self.callers[caller], **headers}
        base = f"{self.url}/v1/vms/{self.vm}"
        async with httpx2.AsyncClient(base_url=base, headers=every, timeout=30) as client:
            yield client


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """Code and reason of a WebSocket that the server closes; what comes before is dropped."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code or 0, socket.close_reason or ""


@contextlib.asynccontextmanager
async def fake_api(folder: Path, **changes: Any) -> AsyncIterator[FakeApi]:
    settings = Settings(
        data=folder, listen="127.0.0.1:0", default_size=Size(1, 512, 20), pool=0, idle_timeout=None
    ).replace(**changes)
    async with World() as world:
        engine = FakeServer(world, settings)
        await engine.start()
        try:
            vms = OpenedVms(engine.machines, engine.host, engine.store)
            async with (
                open_parts(settings, engine.database, vms, None) as opened,
                running(settings, opened) as url,
            ):
                yield await _populated(url, opened, world)
        finally:
            await engine.stop()


async def _populated(url: str, here: Installation, world: World) -> FakeApi:
    account, other = await here.accounts.create("ours"), await here.accounts.create("strangers")
    machine = await here.machines.create(
        Properties(account=account.id, idle_timeout=here.settings.idle_timeout)
    )
    info, key = await here.accounts.create_key(account.id)
    _, foreign = await here.accounts.create_key(other.id)
    gone, revoked = await here.accounts.create_key(account.id)
    await here.accounts.revoke_key(gone.id)
    friend, bystander = [await here.identities.create(account.id) for _ in range(2)]
    token, granted = await here.identities.create_token(account.id, friend.id)
    await here.identities.grant(account.id, friend.id, machine.id)
    _, ungranted = await here.identities.create_token(account.id, bystander.id)
    callers = {
        "nobody": {},
        "not a key": {"Authorization": "Bearer hello"},
        "revoked key": {"Authorization": f"Bearer {revoked}"},
        "owner": {"Authorization": f"Bearer {key}"},
        "stranger": {"Authorization": f"Bearer {foreign}"},
        "ungranted": {TOKEN: ungranted},
        "granted": {TOKEN: granted},
    }
    keys = {"owner": info.id, "granted": token.id, "identity": friend.id}
    return FakeApi(url, here, world, machine.id, account.id, callers, keys)


async def stands_still(session: FakeSession) -> None:
    """Wait until an endless output moves no more, because its client does not read."""
    assert session.printed > 0
    before = -1
    async with asyncio.timeout(60):
        while before != session.printed:
            before = session.printed
            await asyncio.sleep(0.5)

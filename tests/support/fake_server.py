"""The VM engine on a host in memory and a database, which outlive it."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from stead.machines import Machines
from stead.networks.names import PrivateNames
from stead.settings import Settings
from stead.store.database import Database
from stead.store.machines import MachineStore
from stead.store.sealing import SealingKeys
from support.databases import put_database
from support.fake_host import DATABASE, FakeHost, ServerCrashed
from support.fake_world import World
from support.internals import inside

T = TypeVar("T")


class CrashingDatabase(Database):
    """A database of a server that may crash before or after a write. Without threads, which is faster."""

    def __init__(self, path: Path, host: FakeHost, keys: SealingKeys) -> None:
        super().__init__(path, keys)
        self._host = host

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        with self._host.call(DATABASE):
            await asyncio.sleep(0)
            with self._engine.begin() as connection:
                return work(connection)

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        with self.look_up() as connection:
            return work(connection)

    def look_up(self) -> contextlib.AbstractContextManager[sa.Connection]:
        if self._host.dead:
            raise ServerCrashed
        return super().look_up()


class FakeServer:
    """The engine on a world and a database; both outlive it."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self._path = settings.data / "stead.db"
        self._exits = contextlib.AsyncExitStack()

    async def start(self) -> None:
        await put_database(self._path)
        self.host = FakeHost(self.world)
        self.database = CrashingDatabase(self._path, self.host, SealingKeys(self.settings.sealing_key_files))
        self.store = MachineStore(self.database)
        self.private_names = PrivateNames(self.store)
        self.machines = Machines(self.settings, self.host, self.store)
        self._exits = contextlib.AsyncExitStack()
        await self._exits.enter_async_context(self.machines.recovered())

    async def stop(self) -> None:
        try:
            await self._exits.aclose()
        finally:
            await self.host.disconnect()
            await self.database.dispose()

    async def crash(self) -> None:
        """End the server: nothing that it does on its way out reaches the host or the database."""
        self.host.dead = True
        with contextlib.suppress(ServerCrashed):
            await self.stop()

    async def quiet(self) -> None:
        """Wait for the background work of the engine."""
        await inside(self.machines).tasks.join()

    async def watched(self) -> None:
        """Wait until the engine has seen every process that has ended, and for its background work."""
        for live in list(inside(self.machines).processes._lives.values()):
            if live.vm.ended and live.watcher is not None:
                await asyncio.wait({live.watcher})
        await self.quiet()

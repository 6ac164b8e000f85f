"""The VM engine on a host in memory: VMs with known contents, and an audit of rows, processes and files."""

import contextlib
import tempfile
from collections import ChainMap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from stead.machines import Machine, State
from stead.machines.records import Properties, Record
from stead.machines.states import PASSING, Deleted, Prepared, Running, Suspended, next_top_of, top_of
from stead.settings import Settings, Size
from stead.store.layers import LayerStore
from support.fake_server import FakeServer
from support.fake_world import World
from support.internals import inside

SIZE = Size(1, 512, 20)
SETTINGS = Settings(default_size=SIZE, pool=0, idle_timeout=None)


@contextlib.asynccontextmanager
async def installation(parent: Path = Path("/dev/shm"), **changes: Any) -> AsyncIterator[FakeServer]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        async with World() as world:
            server = FakeServer(world, SETTINGS.replace(data=Path(folder), **changes))
            await server.start()
            try:
                yield server
            finally:
                await server.stop()
            assert world.violations == []


async def run(machine: Machine, command: str) -> str:
    result = await machine.exec(command)
    assert result.ok
    return result.stdout.decode()


async def state_of(machine: Machine) -> tuple[State, str | None]:
    info = await machine.info()
    return info.state, info.reason


async def used(server: FakeServer, **options: Any) -> Machine:
    """A VM with something in memory, something in its page cache and something on its disk."""
    machine = await server.machines.create(Properties(**options))
    for command in ("remember program running", "cache draft text", "write file saved"):
        await run(machine, command)
    return machine


async def contents(machine: Machine) -> tuple[str, str, str]:
    """What is in its memory, and what its file system shows of its page cache and its disk."""
    recalled, draft, file = [
        await run(machine, each) for each in ("recall program", "read draft", "read file")
    ]
    return recalled, draft, file


ALL = "running", "text", "saved"
DISK = "", "text", "saved"
"""After a shutdown or a sync."""
CUT = "", "", "saved"
"""After a power cut."""


async def disk_of(server: FakeServer, record: Record) -> dict[str, str]:
    """What a VM's disk holds, read from the files that its row names."""
    chain = [] if record.layer is None else await LayerStore(server.database).lineage(record.layer)
    folder = server.world.folders.get(record.id, {})
    # After an error, a frozen layer stays in the VM's folder until the next start.
    layers = [(server.world.files.get(row.file) or folder[row.id]).data for row in chain]
    tops = [next_top_of(record.state), top_of(record.state)]
    own = [folder[top].data for top in tops if top in folder]
    return dict(ChainMap(*own, *layers))


async def audit(server: FakeServer) -> None:
    """Rows are stable, and the host has exactly what they say: no process, layer or memory more or less."""
    await server.quiet()
    world, machines = server.world, server.machines
    records = await inside(machines).journal.list()
    assert [record for record in records if record.state.name in PASSING] == []
    processes = {each.vm_slot.machine: each for each in world.processes.values() if each.how is None}
    assert {machine: process.id for machine, process in processes.items()} == {
        record.id: record.run.process for record in records if record.run is not None
    }
    for record in records:
        if isinstance(record.state, Running | Prepared):
            assert processes[record.id].awake.is_set() == isinstance(record.state, Running)
            assert processes[record.id].layers[0].name == record.state.top
            assert processes[record.id].disk == await disk_of(server, record)
            # A crash during a resize leaves a disk larger than its row says.
            assert processes[record.id].layers[0].size_gib >= record.size.disk_gib
            assert processes[record.id].disk_gib >= record.size.disk_gib
            assert int(processes[record.id].disk.get("fs", Size.MIN_DISK_GIB)) == record.size.disk_gib
        if isinstance(record.state, Suspended):
            assert world.saved[record.state.checkpoint].disk == await disk_of(server, record)
    tops = {record.id: top_of(record.state) for record in records}
    assert {machine: set(layers) for machine, layers in world.folders.items()} == {
        record.id: {tops[record.id]} - {None} for record in records if not isinstance(record.state, Deleted)
    }
    assert world.runtime == set(processes)
    store = LayerStore(server.database)
    assert set(world.files) == {row.file for row in await store.list()}
    assert set(world.saved) == await store.checkpoints()
    assert world.violations == []
    assert [state for state in server.host.states if not state.closed] == []


async def restart(server: FakeServer, *, crash: bool = True) -> None:
    await (server.crash() if crash else server.stop())
    await server.start()
    await audit(server)

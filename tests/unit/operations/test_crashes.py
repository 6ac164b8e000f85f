"""A crash of the server or an error of the host at every call of an operation."""

import contextlib
from collections.abc import Awaitable, Callable

import pytest

from stead.errors import HostError, SteadError
from stead.machines import Machine, Machines
from stead.settings import Size
from support.engine import ALL, CUT, DISK, contents, restart, used
from support.fake_host import ServerCrashed
from support.fake_server import FakeServer

# Crashes and failures at every call
Operation = Callable[[Machine, Machines], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "create": lambda _, machines: machines.create(),
    "create_larger": lambda _, machines: machines.create(size=Size(1, 512, 30)),
    "stop": lambda machine, _: machine.stop(),
    "kill": lambda machine, _: machine.kill(),
    "suspend": lambda machine, _: machine.suspend(),
    "wake": lambda machine, _: machine.start(),
    "boot": lambda machine, _: machine.start(),
    "snapshot": lambda machine, _: machine.snapshot(),
    "fork": lambda machine, _: machine.fork(),
    "resize": lambda machine, _: machine.resize(disk_gib=30),
    "delete": lambda machine, _: machine.delete(),
    "recreate": lambda machine, _: machine.start(),
}
REMAINS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "stop": (ALL, DISK),
    "kill": (ALL, CUT),
    "boot": (DISK,),
    "resize": (ALL, DISK),
    "delete": (ALL, ("", "", "")),
    "recreate": (("", "", ""),),
}
"""What a VM may hold after an operation that was interrupted; after any other it is as before."""


async def prepared_for(server: FakeServer, operation: str) -> Machine:
    machine = await used(server, recreate=operation in ("delete", "recreate"))
    if operation == "wake":
        await machine.suspend()
    elif operation == "boot":
        await machine.stop()
    elif operation == "recreate":
        await machine.delete()
    await server.quiet()
    return machine


async def interrupted(server: FakeServer, operation: str, inject: Callable[[], None]) -> bool:
    """Run an operation with a fault, then restart the server and check all; whether the fault came."""
    machine = await prepared_for(server, operation)
    inject()
    with contextlib.suppress(SteadError, ServerCrashed):
        await OPERATIONS[operation](machine, server.machines)
    with contextlib.suppress(ServerCrashed):
        await server.watched()
    came = not server.host.has_faults
    await restart(server)
    left = await contents(await server.machines.get(machine.id))
    assert left in REMAINS.get(operation, (ALL,))
    for info in await server.machines.list():
        await server.machines.delete(info.id, forget=True)
    for snapshot in await server.machines.snapshots.list():
        await server.machines.snapshots.delete(snapshot.id)
    return came


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_crash_after_any_call_loses_nothing(server: FakeServer, operation: str, every: int) -> None:
    def crash() -> None:
        server.host.crash_after(calls)

    calls = 1
    while await interrupted(server, operation, crash):
        calls += every
    assert calls > 5


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_error_of_any_call_loses_nothing(server: FakeServer, operation: str) -> None:
    def fail() -> None:
        server.host.fail(None, HostError("no"), skip=calls)

    calls = 0
    while await interrupted(server, operation, fail):
        calls += 1
    assert calls > 1

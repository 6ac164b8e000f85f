"""Route files and the gate over the VM engine, on a host in memory."""

import asyncio
import os
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from stead.edge.gate import Gate, GateRequest
from stead.edge.pages import Refusal
from stead.edge.routes import RouteFiles
from stead.edge.unmapped import UnmappedFiles
from stead.installation import RoutedVms
from stead.machines import Machine, State
from stead.machines.events import EventKind, MachineEvent
from support.engine import audit, used
from support.fake_server import FakeServer
from support.waiting import until


@dataclass(frozen=True)
class Mapped:
    machine: str
    port: int = 80
    domain: str = "a.dev"
    account: str = "account"


class MappedVm:
    """One name that is mapped to a VM whose ports all listen."""

    def __init__(self, server: FakeServer, machine: Machine, folder: Path) -> None:
        self._route = Mapped(machine.id)
        self.ended: list[str] = []
        files = RouteFiles(folder, self, lambda vm, _: self.ended.append(vm), os.getgid())
        unmapped = UnmappedFiles(folder.parent / "unmapped", self, os.getgid())
        self.vms = RoutedVms(server.machines)
        self._gate = Gate(self.vms, self, files, unmapped, self._dial, self._connections_closed)
        self._folder = folder

    def route(self, hostname: str) -> Mapped | None:
        return self._route if hostname == "a.dev" else None

    async def _dial(self, address: IPv4Address, port: int) -> None: ...

    async def _connections_closed(self, machine: str) -> None: ...

    async def ask(self) -> str | int:
        decision = await self._gate.admit(GateRequest("a.dev"))
        return decision.status if isinstance(decision, Refusal) else decision

    @property
    def files(self) -> list[str]:
        return [path.name for path in self._folder.glob("a.dev/*")]


async def test_a_name_has_a_file_only_while_its_vm_runs(
    server: FakeServer, tmp_path: Path, events: list[MachineEvent]
) -> None:
    machine = await used(server)
    mapped_vm = MappedVm(server, machine, tmp_path / "routes")
    upstream = f"{(await machine.info()).address}:80"
    for end in (machine.suspend, machine.stop, machine.kill):
        assert await mapped_vm.ask() == upstream
        assert mapped_vm.files == [upstream]
        await end()
        await asyncio.sleep(0)
        assert mapped_vm.files == []
        assert not mapped_vm.vms.is_up(machine.id)
        await mapped_vm.vms.ended(machine.id)
    assert mapped_vm.ended == [machine.id] * 3
    assert {*await asyncio.gather(*(mapped_vm.ask() for _ in range(20)))} == {upstream}
    reasons = [event.reason for event in events if event.kind in (EventKind.WOKEN, EventKind.STARTED)]
    assert reasons == ["request for a mapped domain"] * 3
    await machine.delete()
    await until(lambda: not mapped_vm.files, 60)
    assert await mapped_vm.ask() == 404
    await mapped_vm.vms.ended(machine.id)
    await audit(server)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_vm_that_stays_awake_gets_its_file_by_the_next_request(
    server: FakeServer, tmp_path: Path, when: str
) -> None:
    machine = await used(server)
    mapped_vm = MappedVm(server, machine, tmp_path / "routes")
    upstream = await mapped_vm.ask()
    server.host.fail("vm.save_and_pause", OSError("no"), when=when)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no"):
        await machine.suspend()
    assert (await machine.info()).state is State.RUNNING
    assert await mapped_vm.ask() == upstream
    assert mapped_vm.files == [upstream]

"""Suspend, wake and leases, on a host in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stead.errors import CapacityExceeded, GuestRestarted, HostError, StartFailed, SteadError, WrongState
from stead.guest import sessions
from stead.guest.sessions import Session, SessionRequest
from stead.machines import Machine, State
from stead.machines.bring_up import BringUp
from stead.machines.events import Use
from stead.machines.persistence import Sticky
from stead.machines.processes import Eviction, EvictionKind
from support.engine import ALL, DISK, audit, contents, restart, run, state_of, used
from support.fake_server import FakeServer
from support.internals import inside

# Suspend and wake


async def test_a_suspended_vm_wakes_as_it_was(server: FakeServer) -> None:
    machine = await used(server)
    before = (await machine.info()).instance
    await machine.suspend()
    assert await state_of(machine) == (State.SUSPENDED, "suspended")
    await machine.suspend()
    await audit(server)
    assert await contents(machine) == ALL
    assert (await machine.info()).instance not in (None, before)
    await audit(server)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["vm.pause", "vm.save_and_pause", "disks.sync_layer"])
async def test_a_suspend_that_fails_leaves_the_vm_running(server: FakeServer, call: str, when: Any) -> None:
    machine = await used(server)
    server.host.fail(call, HostError("no"), when=when)
    with pytest.raises(HostError, match="no"):
        await machine.suspend()
    assert await state_of(machine) == (State.RUNNING, None)
    await audit(server)
    assert await contents(machine) == ALL
    await machine.suspend()
    assert await contents(machine) == ALL


async def test_a_suspend_is_finished_once_it_is_recorded(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("layers.adopt", HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.suspend()
    assert (await machine.info()).state is State.SUSPENDED
    assert not server.world.alive(machine.id)
    assert await contents(machine) == ALL
    await audit(server)


async def test_a_process_that_a_suspend_could_not_end_is_ended_before_the_wake(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("vm.kill", HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.suspend()
    assert (await machine.info()).state is State.SUSPENDED
    assert server.world.alive(machine.id)
    assert await contents(machine) == ALL
    await audit(server)


@pytest.mark.parametrize(
    "call", ["checkpoints.read", "disks.make_layer", "restore_state", "connect", "load", "vm.resume"]
)
async def test_a_wake_that_fails_leaves_the_vm_suspended(server: FakeServer, call: str) -> None:
    machine = await used(server)
    await machine.suspend()
    server.host.fail(call, HostError("no"))
    with pytest.raises(SteadError, match="no"):
        await machine.start()
    assert await state_of(machine) == (State.SUSPENDED, "suspended")
    await audit(server)
    assert await contents(machine) == ALL


async def test_a_wake_without_enough_memory_leaves_the_vm_suspended(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    server.world.free_memory = 1
    with pytest.raises(CapacityExceeded):
        await machine.start()
    server.world.free_memory = 1 << 30
    assert await contents(machine) == ALL


@pytest.mark.parametrize("found", ["when it is read", "when it is loaded"])
async def test_a_vm_boots_from_its_disk_when_its_memory_is_unusable(server: FakeServer, found: str) -> None:
    machine = await used(server)
    await machine.suspend()
    (checkpoint,) = server.world.saved
    if found == "when it is read":
        server.world.unusable.add(checkpoint)
    else:
        server.world.saved[checkpoint].corrupt = True
    assert await contents(machine) == DISK
    state, reason = await state_of(machine)
    assert state is State.RUNNING
    assert reason is not None and reason.startswith("saved memory was unusable, booted from disk")
    assert server.world.quarantine == [checkpoint]
    await audit(server)


async def test_stop_of_a_suspended_vm_flushes_what_its_guest_had_not_written(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    await machine.stop()
    assert await state_of(machine) == (State.STOPPED, "stopped")
    assert await contents(machine) == DISK


async def test_suspend_of_a_stopped_vm_is_refused(server: FakeServer) -> None:
    machine = await used(server)
    await machine.kill()
    with pytest.raises(WrongState, match=rf"^cannot suspend VM {machine.id}: it is stopped \(killed\)$"):
        await machine.suspend()


# Terminals


async def start_terminal(machine: Machine, name: str, command: str = "cat") -> Session:
    async with machine.using() as agent:
        return await sessions.start(agent, SessionRequest("terminal", name, [command], user="alice"))


async def test_terminals_of_a_suspended_vm_are_known_after_a_restart_of_the_server(
    server: FakeServer,
) -> None:
    machine = await used(server)
    begun = [await start_terminal(machine, name) for name in ("one", "two")]
    assert await server.machines.suspended_terminals(machine.id) is None
    await machine.suspend()
    await restart(server)
    assert await server.machines.suspended_terminals(machine.id) == begun
    assert not server.world.alive(machine.id)
    await server.machines.delete(machine.id)
    assert await server.machines.suspended_terminals(machine.id) is None


async def test_a_suspend_replaces_what_was_known_of_terminals(server: FakeServer) -> None:
    machine = await used(server)
    begun = await start_terminal(machine, "one")
    await machine.suspend()
    assert await server.machines.suspended_terminals(machine.id) == [begun]
    # A wake that fails leaves the VM suspended.
    server.host.fail("restore_state", HostError("no"))
    with pytest.raises(SteadError):
        await machine.start()
    assert await server.machines.suspended_terminals(machine.id) == [begun]
    # The guest in memory has no terminals after a wake.
    await machine.start()
    await machine.suspend()
    assert await server.machines.suspended_terminals(machine.id) == []


async def test_terminals_with_too_much_text_are_not_recorded(server: FakeServer) -> None:
    machine = await used(server)
    await start_terminal(machine, "one")
    await machine.suspend()
    assert await server.machines.suspended_terminals(machine.id)
    await start_terminal(machine, "long", "x" * (128 << 10))
    await machine.suspend()
    assert await server.machines.suspended_terminals(machine.id) is None


# Leases


async def test_a_lease_holds_off_the_idle_suspend(server: FakeServer) -> None:
    machine = await used(server, idle_timeout=1)
    suspend = inside(server.machines).suspend
    async with machine.using():
        await suspend.suspend_if_idle(machine.id)
        assert (await machine.info()).state is State.RUNNING
    await suspend.suspend_if_idle(machine.id)
    assert await state_of(machine) == (State.SUSPENDED, "suspended: idle for 1 s")
    await suspend.suspend_if_idle(machine.id)
    assert await contents(machine) == ALL


async def test_a_lease_taken_during_a_suspend_waits_for_it_and_wakes_the_vm(server: FakeServer) -> None:
    machine = await used(server)
    process = server.world.of(machine.id)
    uses: list[asyncio.Task[str]] = []

    def use() -> None:
        uses.append(asyncio.create_task(run(machine, "recall program")))

    server.host.fail("vm.save_and_pause", use)
    await inside(server.machines).suspend.suspend_if_idle(machine.id)
    assert process.how is not None
    assert [await each for each in uses] == ["running"]
    assert server.world.of(machine.id) is not process
    await audit(server)


# Clients that stay attached


async def test_a_client_attaches_again_to_the_guest_that_it_knew(server: FakeServer) -> None:
    machine, machines = await used(server), server.machines
    attached = await machine.attached(Use.SSH)
    for _ in range(2):
        await machine.suspend()
        assert attached.eviction.done() and machines.reattached(machine.id, attached) is None
        assert (await machine.info()).state is State.SUSPENDED, "looking does not wake it"
        attached = await machines.attached_again(machine.id, attached, Use.SSH)
        assert (await machine.info()).state is State.RUNNING and not attached.eviction.done()
        assert machines.reattached(machine.id, attached) == attached


async def test_a_client_does_not_attach_to_a_guest_that_has_booted_again(server: FakeServer) -> None:
    machine, machines = await used(server), server.machines
    attached = await machine.attached(Use.SSH)
    await machine.suspend()
    (checkpoint,) = server.world.saved
    server.world.saved[checkpoint].corrupt = True
    with pytest.raises(GuestRestarted, match=r"has booted again \(saved memory was unusable"):
        await machines.attached_again(machine.id, attached, Use.SSH)
    assert (await machine.info()).state is State.RUNNING
    attached = await machine.attached(Use.SSH)
    await machine.kill()
    with pytest.raises(WrongState, match=rf"^cannot wake VM {machine.id}: it is stopped \(killed\)$"):
        await machines.attached_again(machine.id, attached, Use.SSH)
    assert (await machine.info()).state is State.STOPPED, "it is not started"
    await machine.start()
    with pytest.raises(GuestRestarted):
        machines.reattached(machine.id, attached)


async def test_eviction_tells_a_suspend_from_the_end_of_the_guest(server: FakeServer) -> None:
    machine = await used(server)
    attached = await machine.attached(Use.SSH)
    await machine.suspend()
    assert attached.eviction.result() == Eviction(EvictionKind.SUSPENDED, "the VM was suspended")
    assert not attached.boot.ended.done()
    attached = await server.machines.attached_again(machine.id, attached, Use.SSH)
    await machine.kill()
    killed = Eviction(EvictionKind.ENDED, "the VM was killed")
    assert attached.eviction.result() == attached.boot.ended.result() == killed


async def crash(server: FakeServer, machine: Machine) -> None:
    server.world.of(machine.id).end("was killed by SIGKILL")
    await server.watched()


ENDS: dict[str, tuple[Callable[[FakeServer, Machine], Awaitable[object]], str]] = {
    "stop": (lambda _, machine: machine.stop(), "the VM was stopped"),
    "kill": (lambda _, machine: machine.kill(), "the VM was killed"),
    "delete": (lambda _, machine: machine.delete(), "the VM was deleted"),
    "crash": (crash, "the VM ended: QEMU was killed by SIGKILL"),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_end_of_a_guest_is_told_once(server: FakeServer, how: str) -> None:
    end, reason = ENDS[how]
    machine = await used(server)
    attached = await machine.attached(Use.SSH)
    await end(server, machine)
    assert attached.eviction.result() == attached.boot.ended.result() == Eviction(EvictionKind.ENDED, reason)


@pytest.mark.parametrize("how", ["kill", "delete", "boot", "lost", "evicted"])
async def test_the_end_of_a_suspended_guest_is_told(server: FakeServer, how: str) -> None:
    machine = await used(server, persistence=Sticky())
    boot = (await machine.attached(Use.SSH)).boot
    await machine.suspend()
    match how:
        case "kill":
            await machine.kill()
        case "delete":
            await machine.delete()
        case "boot":
            for state in server.world.saved.values():
                state.corrupt = True
            await machine.start()
        case "lost":
            server.world.files.clear()
            with pytest.raises(StartFailed):
                await machine.start()
        case "evicted":
            await inside(server.machines).eviction._delete_machine(machine.id)
    assert boot.ended.result().kind is EvictionKind.ENDED
    assert {
        "kill": "the VM was killed",
        "delete": "the VM was deleted",
        "boot": f"VM {machine.id} has booted again (saved memory was unusable",
        "lost": f"VM {machine.id} is lost: ",
        "evicted": "the VM was deleted: evicted to free disk space",
    }[how] in boot.ended.result().reason


async def _refused(*_: object) -> None:
    raise HostError("no")


@pytest.mark.parametrize("at", ["resume", "record"])
async def test_a_wake_that_fails_does_not_end_the_guest(
    server: FakeServer, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await used(server)
    attached = await machine.attached(Use.SSH)
    await machine.suspend()
    with monkeypatch.context() as patch:
        if at == "resume":
            server.host.fail("vm.resume", HostError("no"))
        else:
            # The guest is known to be the one that the client was attached to.
            patch.setattr(BringUp, "record_running", _refused)
        with pytest.raises(SteadError):
            await machine.start()
    assert not attached.boot.ended.done()
    attached = await server.machines.attached_again(machine.id, attached, Use.SSH)
    assert await contents(machine) == ALL


async def test_a_lease_of_an_attached_client_holds_off_the_idle_suspend(server: FakeServer) -> None:
    machine = await used(server, idle_timeout=1)
    attached = await machine.attached(Use.SSH)
    with attached.lease():
        await inside(server.machines).suspend.suspend_if_idle(machine.id)
        assert (await machine.info()).state is State.RUNNING
    await inside(server.machines).suspend.suspend_if_idle(machine.id)
    assert (await machine.info()).state is State.SUSPENDED

"""A machine's life as its user sees it: made, named, stopped, started, broken, removed."""

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest
from crash_driver import Hold, held_points, run_held
from installations import another_installation, delete_all, fill_up, leftovers, other_settings, small_disk
from waiting import until

from stead.errors import (
    CapacityExceeded,
    GuestError,
    GuestUnreachable,
    HostError,
    InvalidRequest,
    MachineNotFound,
    StartFailed,
    SteadError,
    WrongState,
)
from stead.host.processes import ProcessId
from stead.host.templates import Template
from stead.host.vm import running_machines
from stead.machines import Machine, MachineInfo, Machines, State
from stead.machines import lifecycle as lifecycle_module
from stead.machines.live import Live
from stead.settings import Settings
from stead.store.machines import MachineRow


async def sh(machine: Machine, command: str) -> str:
    """What a command that must succeed prints."""
    result = await machine.exec(command, timeout=60)
    assert result.ok, (command, result)
    return result.stdout.decode().strip()


async def stopped(machine: Machine, limit: float) -> MachineInfo:
    """Wait until a machine has stopped by itself."""

    async def look() -> MachineInfo | None:
        info = await machine.info()
        return info if info.state is State.STOPPED else None

    found = await until(look, limit)
    assert found is not None
    return found


def qemu_pid(settings: Settings, machine: Machine) -> int:
    pids = [pid for pid, name in running_machines(settings.instance).items() if name == machine.id]
    assert len(pids) == 1
    return pids[0]


async def rows(machines: Machines) -> dict[str, str]:
    """Everything that is recorded, also what no user can see."""
    return {row.id: row.state for row in await machines._lifecycle.store.list()}


# Made and found


async def test_a_new_machine_is_found_by_its_id(machines: Machines) -> None:
    began = time.time()
    machine = await machines.create(name="n" * 200)
    info = await machine.info()
    assert (info.id, info.name, info.state, info.reason) == (machine.id, "n" * 200, State.RUNNING, None)
    assert info.size == machines.settings.default_size
    assert began <= info.created_at <= time.time()
    assert await sh(machine, "hostname") == info.hostname
    assert info in await machines.list()
    assert (await machines.get(machine.id)).id == machine.id
    await machine.delete()
    assert info.id not in {each.id for each in await machines.list()}
    with pytest.raises(MachineNotFound):
        await machines.get(machine.id)


@pytest.mark.parametrize("name", ["", "   ", "n" * 201, "two\nlines", "\ud800"])
async def test_an_impossible_name_is_refused(machines: Machines, name: str) -> None:
    before = await rows(machines)
    with pytest.raises(InvalidRequest, match="1 to 200 printable characters"):
        await machines.create(name=name)
    assert await rows(machines) == before


async def test_an_unknown_machine_is_not_found(machines: Machines) -> None:
    nobody = Machine(machines, "x" * 20)
    asked: list[Callable[[], Awaitable[object]]] = [
        nobody.info,
        nobody.start,
        nobody.stop,
        nobody.kill,
        nobody.suspend,
        nobody.snapshot,
        nobody.fork,
        lambda: nobody.resize(disk_gib=30),
        nobody.wait_for_exit,
        nobody.delete,
        lambda: nobody.exec("true"),
        lambda: nobody.files().read("/etc/hostname"),
        lambda: machines.get(nobody.id),
    ]
    for ask in asked:
        with pytest.raises(MachineNotFound, match=f"no machine {nobody.id}"):
            await ask()


async def test_no_two_machines_are_alike(shared: Machine, machine: Machine) -> None:
    """Both woke from the same memory; neither has anything of the other's that should be unique."""
    show = """
cat /etc/machine-id; hostname; cat /etc/ssh/ssh_host_ed25519_key.pub; cat /etc/ssh/ssh_host_ecdsa_key.pub
cat /proc/sys/kernel/random/uuid; head -c 32 /dev/urandom | base64; ip -4 -o addr show dev eth0
"""
    one, other = [(await sh(each, show)).splitlines() for each in (shared, machine)]
    assert len(one) == len(other) == 7
    assert [(mine, theirs) for mine, theirs in zip(one, other, strict=True) if mine == theirs] == []


async def test_a_new_machine_knows_the_time(machines: Machines) -> None:
    """Its template stopped long ago; its clock did not."""
    template = await machines.template()
    assert time.time() - template.devices.stat().st_mtime > 1, "a clock that was not set would show"
    machine = await machines.create()
    before = time.time()
    shown = float(await sh(machine, "date +%s.%N"))
    assert before - 0.5 <= shown <= time.time() + 0.5
    await machine.delete()


# Stopped and started


async def test_a_stopped_machine_keeps_its_disk_and_its_name(settings: Settings, machine: Machine) -> None:
    """Stop and start are like switching a computer off and on; so is a reboot from the inside."""
    names = (
        "hostname; cat /etc/machine-id /etc/ssh/ssh_host_*_key.pub; ip -4 -o addr show dev eth0 | cut -c1-40"
    )
    boot = "cat /proc/sys/kernel/random/boot_id"
    before, first = await sh(machine, names), await sh(machine, boot)
    await sh(machine, "echo unsynced > /root/note")
    await machine.stop()
    info = await machine.info()
    assert (info.state, info.reason) == (State.STOPPED, "stopped")
    assert machine.id not in running_machines(settings.instance).values()
    with pytest.raises(WrongState, match=f"^cannot suspend machine {machine.id}: it is stopped: stopped$"):
        await machine.suspend()
    await machine.stop()
    await machine.kill()
    assert await machine.info() == info, "what is stopped stays so, with its reason"
    await machine.start()
    info = await machine.info()
    assert (info.state, info.reason) == (State.RUNNING, None)
    await machine.start()
    second = await sh(machine, boot)
    assert second != first
    assert await sh(machine, names) == before
    assert await sh(machine, "cat /root/note") == "unsynced"
    clock = time.time()
    assert clock - 0.5 <= float(await sh(machine, "date +%s.%N")) <= time.time() + 0.5

    with contextlib.suppress(GuestUnreachable):
        await machine.exec("systemctl reboot")

    async def rebooted() -> bool:
        with contextlib.suppress(GuestUnreachable, GuestError):
            seen = await machine.exec(boot)
            return seen.ok and seen.stdout.decode().strip() not in (first, second)
        return False

    await until(rebooted, 120)
    assert (await machine.info()).state is State.RUNNING
    assert await sh(machine, names) == before
    assert await sh(machine, "cat /root/note") == "unsynced"


async def test_a_stopped_machine_is_started_once_by_all_who_use_it(
    settings: Settings, machine: Machine
) -> None:
    """Commands, files and a start at the same time: one boot, and everybody is answered."""
    boot = "cat /proc/sys/kernel/random/boot_id"
    await machine.files().write("/root/note", b"kept")
    before = await sh(machine, boot)
    await machine.stop()
    boots, notes, started = await asyncio.gather(
        asyncio.gather(*(sh(machine, boot) for _ in range(12))),
        asyncio.gather(*(machine.files().read("/root/note") for _ in range(4))),
        machine.start(),
    )
    assert started is None
    assert len(set(boots)) == 1
    assert before not in boots
    assert notes == [b"kept"] * 4
    assert qemu_pid(settings, machine)
    info = await machine.info()
    assert (info.state, info.reason) == (State.RUNNING, None)
    assert await sh(machine, boot) == boots[0], "and it stays up"


async def test_a_killed_machine_says_so(settings: Settings, machine: Machine) -> None:
    running = asyncio.create_task(machine.exec("sleep 60"))
    await until(lambda: _sleeps(machine), 10)
    began = time.monotonic()
    await machine.kill()
    with pytest.raises(GuestUnreachable):
        await running
    assert time.monotonic() - began < 2
    info = await machine.info()
    assert (info.state, info.reason) == (State.STOPPED, "killed")
    assert machine.id not in running_machines(settings.instance).values()


async def _sleeps(machine: Machine) -> bool:
    return (await machine.exec("pgrep -x sleep")).ok


async def test_deleting_leaves_nothing(machines: Machines, settings: Settings) -> None:
    before = leftovers(settings)
    machine = await machines.create()
    assert leftovers(settings) != before
    await machine.delete()
    assert leftovers(settings) == before


# Ends that nobody asked for


async def test_a_guest_that_powers_off_is_stopped(machine: Machine) -> None:
    with contextlib.suppress(GuestUnreachable):
        await machine.exec("systemctl poweroff")
    assert (await stopped(machine, 60)).reason == "the guest shut itself down"


async def test_a_guest_whose_kernel_panics_says_so(machine: Machine) -> None:
    with pytest.raises(GuestUnreachable):
        await machine.exec("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger", timeout=30)
    assert (await stopped(machine, 10)).reason == "the guest's kernel panicked"


async def test_a_qemu_that_dies_is_noticed_at_once(settings: Settings, machine: Machine) -> None:
    """The host's OOM killer, say: a command under way fails now, not when its time is up.

    The next use starts the machine again, with all that had reached its disk.
    """
    await sh(machine, "echo kept > /root/note && sync")
    running = asyncio.create_task(machine.exec("sleep 60", timeout=60))
    await until(lambda: _sleeps(machine), 10)
    os.kill(qemu_pid(settings, machine), signal.SIGKILL)
    info = await stopped(machine, 1)
    assert info.reason == "QEMU ended by SIGKILL"
    with pytest.raises(GuestUnreachable, match="SIGKILL"):
        await asyncio.wait_for(running, 1)
    assert await sh(machine, "cat /root/note") == "kept"
    info = await machine.info()
    assert (info.state, info.reason) == (State.RUNNING, None)


async def test_a_boot_that_hangs_is_tried_once_more(
    machines: Machines, settings: Settings, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told with what the guest had said; one that hangs again is given up, and nothing of it runs."""
    adopt, hanging = machines._lifecycle.adopt, 1
    said: list[tuple[tuple[str, ...], dict[str, str]]] = []

    async def adopt_and_hang(row: MachineRow, process: ProcessId) -> Live:
        nonlocal hanging
        live = await adopt(row, process)
        if hanging:
            hanging -= 1
            await live.vm.pause()
        return live

    monkeypatch.setattr(machines._lifecycle, "adopt", adopt_and_hang)
    monkeypatch.setattr(lifecycle_module, "BOOT_TIMEOUTS", (3.0, 120.0))
    monkeypatch.setattr(lifecycle_module.log, "warning", lambda *words, **facts: said.append((words, facts)))
    await sh(machine, "echo kept > /root/note && sync")
    await machine.kill()
    assert await sh(machine, "cat /root/note") == "kept"
    assert [(words, facts["machine"]) for words, facts in said] == [(("guest does not come up",), machine.id)]
    assert isinstance(said[0][1]["console"], str)

    monkeypatch.setattr(lifecycle_module, "BOOT_TIMEOUTS", (3.0, 3.0, 120.0))
    hanging = 3
    await machine.kill()
    with pytest.raises(StartFailed, match="did not answer"):
        await machine.start()
    assert hanging == 1
    assert machine.id not in running_machines(settings.instance).values()
    hanging = 0
    monkeypatch.setattr(lifecycle_module, "BOOT_TIMEOUTS", (120.0,))
    assert await sh(machine, "cat /root/note") == "kept"


async def test_an_emulated_kernel_does_without_what_is_emulated_wrongly(
    machines: Machines, shared: Machine
) -> None:
    found = await sh(shared, "grep -c -w cx16 /proc/cpuinfo || true")
    platform = await machines.platform()
    assert (int(found) == 0) is (platform.accelerator == "tcg" and platform.version < (8, 0, 0))


async def test_a_new_guest_that_ends_at_once_is_made_once_more(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its kernel panics. One that does so again is given up, and nothing of it is left."""
    before = leftovers(settings)
    restore, ending = machines._lifecycle.restore, 1

    async def restore_and_end(row: MachineRow, template: Template) -> Live:
        nonlocal ending
        live = await restore(row, template)
        if ending:
            ending -= 1
            live.vm.process.kill()
        return live

    monkeypatch.setattr(machines._lifecycle, "restore", restore_and_end)
    machine = await machines.create()
    assert ending == 0
    assert await sh(machine, "hostname") == machine.id
    await machine.delete()

    ending = 2
    with pytest.raises(StartFailed, match="did not confirm its identity"):
        await machines.create()
    assert ending == 0
    assert leftovers(settings) == before


async def test_everything_at_once_ends_in_clear_words(machines: Machines, settings: Settings) -> None:
    """Stop, use and two deletes in the same instant: each gets a true answer and nothing hangs."""
    before = leftovers(settings)
    machine = await machines.create()
    work = (machine.stop(), machine.exec("sleep 60"), machine.delete(), machine.delete())
    async with asyncio.timeout(60):
        stop, used, *deletes = await asyncio.gather(*work, return_exceptions=True)
    assert isinstance(used, GuestUnreachable | WrongState | MachineNotFound), used
    assert isinstance(stop, MachineNotFound | None), stop
    assert sorted(map(type, deletes), key=str) == sorted((type(None), MachineNotFound), key=str), deletes
    with pytest.raises(MachineNotFound):
        await machine.info()
    assert leftovers(settings) == before


# Creates that fail


async def test_a_guest_that_does_not_confirm_is_not_handed_out(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock is this exact: the guest's answer is not what was asked of it."""
    before, recorded = leftovers(settings), await rows(machines)
    monkeypatch.setattr("stead.host.identity.CLOCK_TOLERANCE", -1.0)
    with pytest.raises(StartFailed, match="the guest did not confirm its clock"):
        await machines.create()
    assert leftovers(settings) == before
    assert await rows(machines) == recorded


@pytest.mark.parametrize("source", ["template", "pool", "snapshot"])
async def test_a_create_that_is_given_up_leaves_nothing(settings: Settings, source: str) -> None:
    """Cancelled at any of its writes and orders to QEMU, before it takes effect and after."""
    async with another_installation(settings) as machines:
        create: Callable[[], Awaitable[Machine]] = machines.create
        if source == "snapshot":
            original = await machines.create()
            snapshot = (await original.snapshot()).id
            await original.delete()
            create = functools.partial(machines.create, snapshot=snapshot)

        async def ready() -> dict[str, str]:
            if source == "pool" and not await machines.pool.prepared():
                await machines.pool._prepare(await machines.template())
            return await rows(machines)

        await ready()
        with held_points():
            whole = Hold()
            await asyncio.create_task(run_held(whole, create))
        await machines.delete(str(whole.machine))
        left = []
        for hold in (Hold(number, before) for number in range(1, whole.seen + 1) for before in (True, False)):
            before = await ready()
            with held_points():
                await _give_up(create, hold)
            for row in await machines._lifecycle.store.list():
                if before.get(row.id) != row.state:
                    left.append((hold.number, hold.before, row.state, row.step))
                    await machines._lifecycle.remove(row)
            known = await rows(machines)
            assert known.keys() <= before.keys()
            assert set(running_machines(machines.settings.instance).values()) == known.keys()
        assert left == []
        await create()


async def _give_up(create: Callable[[], Awaitable[Machine]], hold: Hold) -> None:
    creating = asyncio.create_task(run_held(hold, create))
    async with asyncio.timeout(30):
        await hold.reached.wait()
    creating.cancel()
    hold.released.set()
    with pytest.raises(asyncio.CancelledError):
        await creating


async def test_a_full_disk_is_said_before_anything_is_made(settings: Settings) -> None:
    with small_disk(1200) as disk:
        async with another_installation(settings, data=disk / "data") as machines:
            clean = leftovers(machines.settings)
            filler = fill_up(disk, 800 << 20)
            with pytest.raises(CapacityExceeded, match=r"^less than 1 GiB of disk is free under \S+$"):
                await machines.create()
            assert await rows(machines) == {}
            assert leftovers(machines.settings) == clean
            filler.unlink()
            assert await sh(await machines.create(), "echo room") == "room"


async def test_a_guest_waits_while_the_disk_of_the_host_is_full_and_loses_nothing(settings: Settings) -> None:
    with small_disk(1200) as disk:
        async with another_installation(settings, data=disk / "data") as machines:
            machine = await machines.create()
            vm = machines._lifecycle.lives[machine.id].vm
            filler = fill_up(disk, 24 << 20)
            write = "head -c 48M /dev/zero | tr '\\0' x >/var/tmp/big && sync && echo written"
            writing = asyncio.create_task(machine.exec(write, timeout=120))

            async def stopped() -> bool:
                return bool((await vm.execute("query-status"))["status"] == "io-error")

            await until(stopped, 60)
            assert not writing.done()
            filler.unlink()
            assert (await writing).stdout == b"written\n"
            check = "echo 3 >/proc/sys/vm/drop_caches; tr -d x </var/tmp/big | wc -c; stat -c %s /var/tmp/big"
            assert await sh(machine, check) == f"0\n{48 << 20}"
            assert "I/O error" not in await sh(machine, "dmesg")


async def test_a_second_stead_on_the_same_folder_is_refused(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stead.machines.machines._LOCK_TIMEOUT", 0.3)
    with pytest.raises(HostError, match=r"another process has held \S+/stead.lock"):
        async with Machines.open(settings):
            pass
    assert await rows(machines) is not None, "the first one does not notice"


# Made ahead


async def test_a_prepared_machine_is_handed_out_and_replaced(settings: Settings) -> None:
    with other_settings(settings, pool=1) as other:
        async with Machines.open(other) as machines:
            await machines.pool.filled(60)
            (prepared,) = await machines.pool.prepared()
            assert await machines.list() == [], "nobody's machine is nobody's to see"
            for ask in (machines.get, machines.stop, machines.delete):
                with pytest.raises(MachineNotFound):
                    await ask(prepared.id)
            with pytest.raises(MachineNotFound):
                await Machine(machines, prepared.id).exec("true")
            machine = await machines.create(name="mine")
            assert machine.id == prepared.id
            info = await machine.info()
            assert (info.name, info.state) == ("mine", State.RUNNING)
            assert await sh(machine, "hostname") == info.hostname
            before = time.time()
            assert before - 0.5 <= float(await sh(machine, "date +%s.%N")) <= time.time() + 0.5
            (successor,) = await until(machines.pool.prepared, 60)
            assert successor.id != prepared.id

            os.kill(qemu_pid(other, Machine(machines, successor.id)), signal.SIGKILL)

            async def replaced() -> bool:
                return [row.id for row in await machines.pool.prepared()] not in ([], [successor.id])

            await until(replaced, 60)
            await delete_all(machines)
        assert leftovers(other) == [], "what nobody took went with the pool"


async def test_a_prepared_machine_that_does_not_confirm_is_not_handed_out(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with another_installation(settings, pool=1) as machines:
        await machines.pool.filled(60)
        (prepared,) = await machines.pool.prepared()
        monkeypatch.setattr("stead.host.identity.CLOCK_TOLERANCE", -1.0)
        with pytest.raises(SteadError, match="the guest did not confirm its clock"):
            await machines.create()
        assert prepared.id not in await rows(machines)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
async def test_closing_while_a_machine_is_prepared_leaves_nothing(
    settings: Settings, machines: Machines, delay: float
) -> None:
    async with another_installation(settings, pool=1) as other:
        await asyncio.sleep(delay)
        await other.pool.close()
        assert list((other.settings.data / "machines").glob("*")) == []
        assert await other._lifecycle.store.list() == []

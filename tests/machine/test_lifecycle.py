"""Lifecycle of VMs: create, stop, start, kill, crash, delete, and the pool."""

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from stead.deadlines import scaled
from stead.errors import (
    CapacityExceeded,
    DiskSpaceExceeded,
    GuestError,
    GuestUnreachable,
    HostError,
    MachineNotFound,
    StartFailed,
    WrongState,
)
from stead.guest.execution import ExecRequest, ExecResult, collect
from stead.host.interface import narrowed
from stead.host.vm import QemuVm, running_machines
from stead.installation import open_machines
from stead.machines import Machine, MachineInfo, Machines, State
from stead.machines.events import MachineEvent
from stead.machines.records import Properties, record_of
from stead.settings import Settings
from support.crash_driver import Hold, held_points, run_held
from support.guests import sh
from support.installations import (
    another_installation,
    delete_all,
    fill_up,
    leftovers,
    local_template,
    other_settings,
    small_disk,
    small_ext4,
)
from support.internals import inside
from support.waiting import until


async def stopped(machine: Machine, limit: float) -> MachineInfo:
    """Wait until a VM has stopped by itself."""

    async def look() -> MachineInfo | None:
        info = await machine.info()
        return info if info.state is State.STOPPED else None

    found = await until(look, limit)
    assert found is not None
    return found


def qemu_pid(settings: Settings, machine: Machine) -> int:
    pids = [pid for pid, name in running_machines(settings).items() if name == machine.id]
    assert len(pids) == 1
    return pids[0]


async def rows(machines: Machines) -> dict[str, str]:
    """All rows with their state, pool VMs included."""
    return {row.id: row.state for row in await inside(machines).store.list()}


# Create and find


async def test_create_get_list_and_delete(machines: Machines) -> None:
    began = time.time()
    machine = await machines.create(Properties(name="n" * 200))
    info = await machine.info()
    assert (info.id, info.name, info.state, info.reason) == (machine.id, "n" * 200, State.RUNNING, None)
    assert info.size == inside(machines).settings.default_size
    assert began <= info.created_at <= time.time()
    assert await sh(machine, "hostname") == info.hostname
    assert info in await machines.list()
    assert (await machines.get(machine.id)).id == machine.id
    await machine.delete()
    assert info.id not in {each.id for each in await machines.list()}
    with pytest.raises(MachineNotFound):
        await machines.get(machine.id)


async def test_two_vms_share_no_identity_keys_or_random_numbers(shared: Machine, machine: Machine) -> None:
    """Both were restored from the same memory; everything that must be unique differs."""
    show = """
cat /etc/machine-id; hostname; cat /etc/ssh/ssh_host_ed25519_key.pub; cat /etc/ssh/ssh_host_ecdsa_key.pub
cat /proc/sys/kernel/random/uuid; head -c 32 /dev/urandom | base64; ip -4 -o addr show dev eth0
"""
    one, other = [(await sh(each, show)).splitlines() for each in (shared, machine)]
    assert len(one) == len(other) == 7
    assert [(mine, theirs) for mine, theirs in zip(one, other, strict=True) if mine == theirs] == []


async def test_create_sets_the_clock_of_the_guest(machines: Machines) -> None:
    """The template was saved long ago; the guest has the current time."""
    template = local_template(await machines.template())
    assert time.time() - template.devices.stat().st_mtime > 1, "a clock that was not set would show"
    machine = await machines.create()
    before = time.time()
    shown = float(await sh(machine, "date +%s.%N"))
    assert before - 0.5 <= shown <= time.time() + 0.5
    await machine.delete()


# Stop and start


async def test_stop_concurrent_uses_and_guest_reboot_keep_disk_and_identity(
    settings: Settings, machine: Machine, events: list[MachineEvent]
) -> None:
    """A stop and the next uses, or a reboot by the guest, is one new boot of the same disk and identity."""
    names = (
        "hostname; cat /etc/machine-id /etc/ssh/ssh_host_*_key.pub; ip -4 -o addr show dev eth0 | cut -c1-40"
    )
    boot = "cat /proc/sys/kernel/random/boot_id"
    before, first = await sh(machine, names), await sh(machine, boot)
    await sh(machine, "echo unsynced > /root/note")
    await machine.stop()
    info = await machine.info()
    assert (info.state, info.reason) == (State.STOPPED, "stopped")
    assert machine.id not in running_machines(settings).values()
    with pytest.raises(WrongState, match=f"^cannot suspend VM {machine.id}: it is stopped$"):
        await machine.suspend()
    await machine.stop()
    await machine.kill()
    assert await machine.info() == info, "what is stopped stays so, with its reason"
    # Commands, file reads and a start at the same time: one boot, and every call is answered.
    boots, notes, _ = await asyncio.gather(
        asyncio.gather(*(sh(machine, boot) for _ in range(12))),
        asyncio.gather(*(machine.files().read("/root/note") for _ in range(4))),
        machine.start(),
    )
    (second,) = set(boots)
    assert second != first
    assert notes == [b"unsynced\n"] * 4
    assert qemu_pid(settings, machine)
    info = await machine.info()
    assert (info.state, info.reason) == (State.RUNNING, None)
    await machine.start()
    assert await sh(machine, boot) == second, "and it stays up"
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
    messages = [event.message.removeprefix(f"VM {machine.id} ") for event in events]
    first_use = messages.pop(1)
    assert messages == ["stopped: requested", "stopped: guest rebooted", "started: guest rebooted"]
    assert first_use in ("started: start request", "started: command", "started: file access")
    assert (await machine.info()).state is State.RUNNING
    assert await sh(machine, names) == before
    assert await sh(machine, "cat /root/note") == "unsynced"


async def test_kill_ends_running_commands_and_records_the_reason(
    settings: Settings, machine: Machine
) -> None:
    running = asyncio.create_task(machine.exec("sleep 60"))
    await until(lambda: _sleeps(machine), 60)
    await machine.kill()
    with pytest.raises(GuestUnreachable):
        await running
    info = await machine.info()
    assert (info.state, info.reason) == (State.STOPPED, "killed")
    assert machine.id not in running_machines(settings).values()


async def _sleeps(machine: Machine) -> bool:
    return (await machine.exec("pgrep -x sleep")).ok


async def test_delete_leaves_no_process_file_or_group(machines: Machines, settings: Settings) -> None:
    before = leftovers(settings)
    machine = await machines.create()
    assert leftovers(settings) != before
    await machine.delete()
    assert leftovers(settings) == before


# Unexpected ends

_PANIC = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"


async def test_a_guest_power_off_is_recorded_as_stopped(machine: Machine) -> None:
    with contextlib.suppress(GuestUnreachable):
        await machine.exec("systemctl poweroff")
    assert (await stopped(machine, 60)).reason == "stopped: guest shut down"


async def test_a_guest_kernel_panic_is_recorded_as_a_crash(
    machine: Machine, events: list[MachineEvent]
) -> None:
    with pytest.raises(GuestUnreachable):
        await machine.exec(_PANIC, timeout=30)
    assert (await stopped(machine, 60)).reason == "crashed: guest kernel panicked"
    event = next(event for event in events if event.record.id == machine.id)
    assert (event.message, event.failed) == (f"VM {machine.id} crashed: guest kernel panicked", True)
    assert event.console is not None and "Kernel panic - not syncing: sysrq triggered crash" in event.console
    assert "Call Trace" in event.console and event.console.replace("\n", "").isprintable()


async def test_a_panic_while_the_server_is_down_is_recorded_at_its_next_start(
    machines: Machines, machine: Machine, events: list[MachineEvent]
) -> None:
    """The guest stays paused with its console until the server is back."""
    record = await inside(machines).journal.find(machine.id)
    assert record.run is not None
    await inside(machines).processes.forget(machine.id)
    agent = inside(machines).host.agent(record.vm_slot)
    panicking = asyncio.create_task(collect(agent, ExecRequest(_PANIC, timeout=60)))

    async def silent() -> bool:
        try:
            await agent.call("GET", "/v1/health", timeout=2)
        except GuestUnreachable:
            return True
        return False

    await until(silent, 60)
    panicking.cancel()
    await asyncio.wait({panicking})
    await agent.close()
    await inside(machines).recovery._adopt(record, record.run)
    assert (await machine.info()).reason == "crashed: guest kernel panicked"
    event = next(event for event in events if event.record.id == machine.id)
    assert event.console is not None and "Kernel panic - not syncing" in event.console


async def test_a_killed_qemu_fails_running_commands_and_is_recorded_as_a_crash(
    settings: Settings, machine: Machine
) -> None:
    """As by the host's OOM killer: a running command fails at once, not at its timeout.

    The next use boots the VM with everything that had reached its disk.
    """
    await sh(machine, "echo kept > /root/note && sync")
    running = asyncio.create_task(machine.exec("sleep 60", timeout=60))
    await until(lambda: _sleeps(machine), 60)
    os.kill(qemu_pid(settings, machine), signal.SIGKILL)
    info = await stopped(machine, 60)
    assert info.reason == "crashed: QEMU ended by SIGKILL"
    with pytest.raises(GuestUnreachable, match="SIGKILL"):
        await asyncio.wait_for(running, 30)
    assert await sh(machine, "cat /root/note") == "kept"
    info = await machine.info()
    assert (info.state, info.reason) == (State.RUNNING, None)


async def test_emulated_guests_have_no_cmpxchg16b_on_old_qemu(machines: Machines, shared: Machine) -> None:
    found = await sh(shared, "grep -c -w cx16 /proc/cpuinfo || true")
    platform = await inside(machines).host.platform()
    assert (int(found) == 0) is (platform.accelerator == "tcg" and platform.version < (8, 0, 0))


async def test_concurrent_operations_succeed_or_fail_with_a_stead_error(
    machines: Machines, settings: Settings
) -> None:
    """Stop, use and two deletes at the same time: each succeeds or fails with a Stead error."""
    before = leftovers(settings)
    machine = await machines.create()
    work = (machine.stop(), machine.exec("sleep 60"), machine.delete(), machine.delete())
    async with asyncio.timeout(scaled(60)):
        stop, used, *deletes = await asyncio.gather(*work, return_exceptions=True)
    if isinstance(used, ExecResult):
        # The guest ended the command when it shut down, and could still report it.
        assert used.signal == "SIGTERM", used
    else:
        assert isinstance(used, GuestUnreachable | WrongState | MachineNotFound), used
    assert isinstance(stop, MachineNotFound | None), stop
    assert sorted(map(type, deletes), key=str) == sorted((type(None), MachineNotFound), key=str), deletes
    with pytest.raises(MachineNotFound):
        await machine.info()
    assert leftovers(settings) == before


# Failing creates


async def test_create_fails_when_the_guest_does_not_confirm_its_identity(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tolerance of nearly zero, the clock of the guest never matches."""
    before, recorded = leftovers(settings), await rows(machines)
    monkeypatch.setattr("stead.guest.identity.CLOCK_TOLERANCE", -1.0)
    with pytest.raises(StartFailed, match="the guest did not confirm its clock"):
        await machines.create()
    assert leftovers(settings) == before
    assert await rows(machines) == recorded


@pytest.mark.parametrize("source", ["template", "larger", "pool", "snapshot"])
async def test_a_cancelled_create_leaves_nothing(settings: Settings, source: str) -> None:
    """Cancelled at each of its database writes and QEMU commands, before and after it takes effect."""
    async with another_installation(settings) as installation:
        machines = installation.machines
        create: Callable[[], Awaitable[Machine]] = machines.create
        if source == "larger":
            create = functools.partial(machines.create, size=replace(settings.default_size, disk_gib=30))
        if source == "snapshot":
            original = await machines.create()
            snapshot = (await original.snapshot()).id
            await original.delete()
            create = functools.partial(machines.create, Properties(snapshot=snapshot))

        async def ready() -> dict[str, str]:
            if source == "pool" and not await inside(machines).pool.prepared():
                await inside(machines).pool._prepare(await machines.template())
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
            for row in await inside(machines).store.list():
                if before.get(row.id) != row.state:
                    left.append((hold.number, hold.before, row.state, row.step))
                    await inside(machines).deletion.remove(record_of(row))
            known = await rows(machines)
            assert known.keys() <= before.keys()
            assert set(running_machines(inside(machines).settings).values()) == known.keys()
        assert left == []
        await create()


async def _give_up(create: Callable[[], Awaitable[Machine]], hold: Hold) -> None:
    creating = asyncio.create_task(run_held(hold, create))
    async with asyncio.timeout(scaled(30)):
        await hold.reached.wait()
    creating.cancel()
    hold.released.set()
    with pytest.raises(asyncio.CancelledError):
        await creating


async def test_create_is_refused_on_a_full_disk(settings: Settings) -> None:
    with small_disk(1200) as disk:
        async with another_installation(settings, data=disk / "data") as installation:
            machines = installation.machines
            clean = leftovers(inside(machines).settings)
            filler = fill_up(disk, 800 << 20)
            with pytest.raises(
                CapacityExceeded, match=r"^less than 1 GiB of disk space is free under \S+: delete VMs"
            ):
                await machines.create()
            assert await rows(machines) == {}
            assert leftovers(inside(machines).settings) == clean
            filler.unlink()
            assert await sh(await machines.create(), "echo room") == "room"


async def test_a_vm_that_fills_the_host_disk_is_paused_and_others_go_on(settings: Settings) -> None:
    """The disk has 800 MiB left, of which less than 614 are few; the reserve for the database stays."""
    with small_ext4(6144) as disk:
        async with another_installation(settings, data=disk / "data") as installation:
            machines = installation.machines
            large, small = [await machines.create(Properties(account=each)) for each in ("large", "small")]
            reserve = disk / "data" / "reserve"
            given = reserve.stat().st_ino
            filler = fill_up(disk, 800 << 20)
            write = "head -c 400M /dev/zero | tr '\\0' x >/var/tmp/big && sync && echo written"
            writing = asyncio.create_task(large.exec(write, timeout=600))

            async def paused() -> bool:
                return ((await large.info()).reason or "").startswith(
                    "paused: the disk of the host is nearly"
                )

            await until(paused, 300)
            vm = narrowed(inside(machines).processes._lives[large.id].vm, QemuVm)
            assert (await vm.execute("query-status"))["status"] == "paused"
            assert (await large.info()).state is State.RUNNING and not writing.done()
            free = shutil.disk_usage(disk).free
            assert await sh(small, "echo here >/var/tmp/file && sync && cat /var/tmp/file") == "here"
            assert shutil.disk_usage(disk).free > free - (32 << 20)
            assert reserve.stat().st_ino == given
            for use in (large.exec("true"), large.suspend(), large.snapshot(), large.stop()):
                with pytest.raises(DiskSpaceExceeded, match="paused: the disk of the host is nearly full"):
                    await use
            filler.unlink()
            assert (await writing).stdout == b"written\n"
            assert (
                await sh(large, "tr -d x </var/tmp/big | wc -c; stat -c %s /var/tmp/big") == f"0\n{400 << 20}"
            )
            assert (await large.info()).reason is None


async def test_a_paused_vm_of_a_full_disk_outlives_the_server(settings: Settings) -> None:
    with small_ext4(6144) as disk, other_settings(settings, data=disk / "data") as other:
        async with open_machines(other) as machines:
            machine = await machines.create()
            live = inside(machines).processes.running(machine.id)
            assert live is not None
            await sh(machine, "echo kept >/dev/shm/kept")
            await live.vm.hold()
            # An operation that resumes the guest at its end does not end the hold.
            await machine.snapshot()
            vm = narrowed(live.vm, QemuVm)
            assert (await vm.execute("query-status"))["status"] == "paused"
        async with open_machines(other) as machines:
            again = await machines.get(machine.id)
            assert await sh(again, "cat /dev/shm/kept") == "kept"
            await again.delete()
            for snapshot in await machines.snapshots.list():
                await machines.snapshots.delete(snapshot.id)
            await inside(machines).layers.collect()


async def test_a_guest_pauses_while_the_host_disk_is_full_and_loses_no_write(settings: Settings) -> None:
    with small_disk(1200) as disk:
        async with another_installation(settings, data=disk / "data") as installation:
            machines = installation.machines
            # As on a disk that fills faster than it is watched.
            await inside(machines).disk_watch.close()
            machine = await machines.create()
            vm = narrowed(inside(machines).processes._lives[machine.id].vm, QemuVm)
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


async def test_a_second_process_on_the_same_data_folder_is_refused(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stead.host.local._LOCK_TIMEOUT", 0.3)
    with pytest.raises(HostError, match=r"another process has held \S+/stead.lock"):
        async with open_machines(settings):
            pass
    assert await rows(machines) is not None, "the first one does not notice"


# Pool


async def test_create_takes_a_pool_vm_and_the_pool_refills(settings: Settings) -> None:
    with other_settings(settings, pool=1) as other:
        async with open_machines(other) as machines:
            await inside(machines).pool.filled(60)
            (prepared,) = await inside(machines).pool.prepared()
            assert await machines.list() == [], "pool VMs are not listed"
            for ask in (machines.get, machines.stop, machines.delete):
                with pytest.raises(MachineNotFound):
                    await ask(prepared.id)
            with pytest.raises(MachineNotFound):
                await Machine(machines, prepared.id).exec("true")
            machine = await machines.create(Properties(name="mine"))
            assert machine.id == prepared.id
            info = await machine.info()
            assert (info.name, info.state) == ("mine", State.RUNNING)
            assert await sh(machine, "hostname") == info.hostname
            before = time.time()
            assert before - 0.5 <= float(await sh(machine, "date +%s.%N")) <= time.time() + 0.5
            (successor,) = await until(inside(machines).pool.prepared, 60)
            assert successor.id != prepared.id

            os.kill(qemu_pid(other, Machine(machines, successor.id)), signal.SIGKILL)

            async def replaced() -> bool:
                return [row.id for row in await inside(machines).pool.prepared()] not in ([], [successor.id])

            await until(replaced, 60)
            await delete_all(machines)
        assert leftovers(other) == [], "unused pool VMs are removed"


@pytest.mark.parametrize("delay", [0.02, 0.3])
async def test_close_during_a_pool_refill_leaves_nothing(
    settings: Settings, machines: Machines, delay: float
) -> None:
    async with another_installation(settings, pool=1) as installation:
        other = installation.machines
        await asyncio.sleep(delay)
        await inside(other).pool.close()
        assert list((inside(other).settings.data / "machines").glob("*")) == []
        assert await inside(other).store.list() == []

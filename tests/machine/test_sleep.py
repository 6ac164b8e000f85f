"""Suspend and wake, idle timeouts, resize, and the order of eviction."""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stead.errors import GuestUnreachable, InvalidRequest, ReadyTimeout, StartFailed
from stead.host.vm import running_machines
from stead.machines import Ephemeral, Machine, Machines, State, Sticky
from stead.machines.events import MachineEvent
from stead.machines.idle import Activity
from stead.machines.persistence import Evictable, eviction_order
from stead.machines.records import Properties
from stead.machines.wake import WakeOperation
from stead.settings import Settings
from support.guests import sh
from support.installations import another_installation, local_host
from support.internals import inside
from support.waiting import until

LAST_SERVICE = b"""
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/sh -c "echo shut down > /root/shutdown"
"""
SLOW_SERVICE = b"""
[Service]
Type=notify
NotifyAccess=all
ExecStart=/bin/sh -c "sleep 3; systemd-notify --ready; exec sleep 1000"
[Install]
WantedBy=multi-user.target
"""


async def reported(events: list[MachineEvent], message: str) -> MachineEvent:
    """Wait for an event: it comes a little after the state that it reports."""

    await until(lambda: any(event.message == message for event in events), 60)
    return next(event for event in events if event.message == message)


async def state(machine: Machine) -> State:
    return (await machine.info()).state


@pytest_asyncio.fixture(scope="module")
async def sleeper(machines: Machines) -> AsyncIterator[Machine]:
    machine = await machines.create(Properties(name="sleeper"))
    await sh(machine, "setsid sleep 100000 >/dev/null 2>&1 & echo $! > /run/pid; echo memory > /run/marker")
    yield machine
    await machine.delete()


async def it_is_all_there(machine: Machine) -> None:
    assert await sh(machine, "cat /run/marker; tr '\\0' ' ' < /proc/$(cat /run/pid)/cmdline") == (
        "memory\nsleep 100000"
    )


# Suspend and wake


async def test_suspend_ends_the_process_and_the_next_use_wakes_the_vm(
    settings: Settings, sleeper: Machine
) -> None:
    await sleeper.suspend()
    assert await state(sleeper) is State.SUSPENDED
    assert sleeper.id not in running_machines(settings).values()
    await sleeper.suspend()
    assert await state(sleeper) is State.SUSPENDED, "it sleeps already"
    await it_is_all_there(sleeper)
    assert await state(sleeper) is State.RUNNING
    assert (await sleeper.info()).reason is None


async def test_every_kind_of_use_wakes_a_suspended_vm(sleeper: Machine) -> None:
    await sleeper.suspend()
    await sleeper.files().write("/root/written-asleep", b"x")
    assert await state(sleeper) is State.RUNNING
    await sleeper.suspend()
    assert [event async for event in sleeper.stream("true")]
    await sleeper.suspend()
    await sleeper.start()
    assert await state(sleeper) is State.RUNNING
    await it_is_all_there(sleeper)


async def test_concurrent_uses_wake_a_vm_once(sleeper: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = 0
    wake = WakeOperation.wake

    async def counted(*arguments: object) -> object:
        nonlocal wakes
        wakes += 1
        return await wake(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WakeOperation, "wake", counted)
    await sleeper.suspend()
    answers = await asyncio.gather(*(sh(sleeper, f"echo {number}") for number in range(50)))
    assert answers == [str(number) for number in range(50)]
    assert wakes == 1


@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.slow)])
async def test_repeated_suspends_lose_no_file(machines: Machines, sleeper: Machine, rounds: int) -> None:
    """Writes right before a suspend survive on disk and in memory without a sync."""
    for number in range(rounds):
        await sleeper.files().write(f"/root/round-{number}", str(number).encode())
        await sh(sleeper, f"echo {number} > /run/round-{number}")
        await sleeper.suspend()
        assert await sh(sleeper, f"cat /root/round-{number} /run/round-{number}") == f"{number}{number}"
    names = f"{{0..{rounds - 1}}}"
    found = await sh(sleeper, f"bash -c 'cat /root/round-{names}' && bash -c 'cat /run/round-{names}'")
    assert found == "".join(map(str, range(rounds))) + "\n".join(map(str, range(rounds)))
    await it_is_all_there(sleeper)
    row = await machines._row(sleeper.id)

    async def merged() -> bool:
        return len(await inside(machines).layers.chain(row.layer)) <= 9

    await until(merged, 60)
    assert "EXT4-fs error" not in await sh(sleeper, "dmesg")


def certificate() -> tuple[bytes, bytes]:
    """Certificates of an authority and of a server, both valid from the current second."""
    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "made while it slept")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private


async def test_wake_sets_the_clock_of_the_guest(sleeper: Machine) -> None:
    await sleeper.suspend()
    await asyncio.sleep(2)
    issued, _ = certificate()
    before = time.time()
    guest = float(await sh(sleeper, "date +%s.%N"))
    after = time.time()
    assert before - 1.5 <= guest <= after + 1.5
    await sleeper.files().write("/root/issued.pem", issued)
    assert "OK" in await sh(sleeper, "openssl verify -CAfile /root/issued.pem /root/issued.pem")


async def test_a_process_continues_after_suspend_and_wake(sleeper: Machine) -> None:
    command = "touch /run/begun; sleep 2; echo done > /root/outcome"
    running = asyncio.create_task(sleeper.exec(command, timeout=60))

    async def begun() -> bool:
        return (await sleeper.exec("test -e /run/begun")).ok

    await until(begun, 60)
    await sleeper.suspend()
    with pytest.raises(GuestUnreachable):  # a connected client gets the error
        await running

    async def outcome() -> bool:
        return await sh(sleeper, "cat /root/outcome 2>/dev/null || true") == "done"

    await until(outcome, 60)


async def test_a_vm_with_damaged_memory_boots_from_its_disk(machines: Machines, sleeper: Machine) -> None:
    await sh(sleeper, "echo kept > /root/kept")
    await sleeper.suspend()
    row = await machines._row(sleeper.id)
    assert row.checkpoint is not None
    memory = local_host(machines).checkpoints.folder(row.checkpoint) / "memory"
    content = bytearray(memory.read_bytes())
    content[len(content) // 2] ^= 1
    memory.write_bytes(content)
    assert await sh(sleeper, "cat /root/kept; cat /run/marker 2>/dev/null || echo gone") == "kept\ngone"
    told = (await sleeper.info()).reason
    assert told is not None and told.startswith(
        "saved memory was unusable, booted from disk: checksum mismatch"
    )
    # It was booted: it can be suspended and forked like any other VM.
    await sh(sleeper, "setsid sleep 100000 >/dev/null 2>&1 & echo $! > /run/pid; echo memory > /run/marker")
    await sleeper.suspend()
    await it_is_all_there(sleeper)
    (child,) = await sleeper.fork()
    await it_is_all_there(child)
    await child.delete()


async def test_a_failed_wake_leaves_the_vm_suspended(
    machines: Machines, settings: Settings, sleeper: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleeper.suspend()
    monkeypatch.setattr("stead.guest.identity._clock_error", lambda *_: 10.0)
    results = await asyncio.gather(*(sleeper.exec("true") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, StartFailed) for result in results), results
    assert await state(sleeper) is State.SUSPENDED
    assert sleeper.id not in running_machines(settings).values()
    monkeypatch.undo()
    await it_is_all_there(sleeper)


async def test_snapshot_and_fork_of_a_suspended_vm(machines: Machines, sleeper: Machine) -> None:
    await sleeper.suspend()
    info = await sleeper.snapshot()
    assert info.has_memory
    assert await state(sleeper) is State.SUSPENDED, "it need not wake for it"
    copy = await machines.create(Properties(snapshot=info.id))
    await it_is_all_there(copy)
    await machines.snapshots.delete(info.id)
    (child,) = await sleeper.fork()
    assert await state(sleeper) is State.RUNNING
    for each in (child, sleeper):
        await it_is_all_there(each)
    for each in (child, copy):
        await each.delete()


# Idle timeouts


def test_traffic_calls_and_commands_count_as_activity() -> None:
    activity = Activity(traffic=100, active_at=0.0)

    def look(now: float, traffic: int, threshold: int = 0) -> float:
        return activity.observe(now, traffic, threshold, busy=False, last_call=0.0)

    assert look(10, 100, 0) == 10
    assert look(20, 101, 0) == 0, "without a threshold every byte counts"
    assert look(30, 201, 101) == 10, "a hundred bytes are below the threshold"
    assert look(40, 302, 101) == 0
    assert activity.observe(50, 302, 0, busy=True, last_call=0.0) == 0, "a command holds it awake"
    assert activity.observe(60, 302, 0, busy=False, last_call=55.0) == 5
    assert look(70, 10, 0) == 0, "a new tap counts from nothing: it was started"


async def test_an_idle_vm_is_suspended_and_keeps_every_write(settings: Settings, machines: Machines) -> None:
    events: list[MachineEvent] = []
    async with another_installation(settings, idle_timeout=None, idle_check=0.2) as installation:
        other = installation.machines
        other.watch(events.append)
        machine = await other.create(Properties(idle_timeout=2))
        never = await other.create(Properties(idle_timeout=None))
        assert (await machine.info()).idle_timeout == 2
        instance = (await machine.info()).instance
        result = await machine.exec(
            "sleep 3; echo last words > /root/file; echo mine > /run/file", timeout=60
        )
        assert result.ok, "a running command counts as activity"
        assert await state(machine) is State.RUNNING

        async def asleep() -> bool:
            return await state(machine) is State.SUSPENDED

        await until(asleep, 60)
        assert (await machine.info()).reason == "suspended: idle for 2 s"
        event = await reported(events, f"VM {machine.id} suspended: idle for 2 s")
        assert (event.instance, event.failed) == (instance, False)
        assert await sh(machine, "cat /root/file /run/file") == "last words\nmine"
        assert events[-1].message == f"VM {machine.id} woken: command"
        # Traffic holds it awake; below the threshold it does not.
        await machine.start(idle_timeout=5)
        pings = "setsid ping -i 0.3 169.254.0.1 > /run/pings 2>&1 &"
        await machine.exec(f"{pings} until grep -q ttl= /run/pings; do sleep 0.1; done", timeout=60)
        await asyncio.sleep(7)
        assert await state(machine) is State.RUNNING
        await machine.start(activity_threshold=100_000)
        await until(asleep, 60)
        assert await state(never) is State.RUNNING
        await never.start(idle_timeout=1)
        await until(lambda: _is(never, State.SUSPENDED), 60)
        with pytest.raises(InvalidRequest, match="idle timeout must be at least 1 s, not 0"):
            await never.start(idle_timeout=0)


async def _is(machine: Machine, wanted: State) -> bool:
    return await state(machine) is wanted


async def test_a_use_during_an_idle_suspend_is_answered(settings: Settings, machines: Machines) -> None:
    async with another_installation(settings, idle_timeout=None) as installation:
        other = installation.machines
        machine = await other.create()
        for delay in (0.0, 0.005, 0.02, 0.1, 0.2):
            dozing = asyncio.create_task(inside(other).suspend.suspend_if_idle(machine.id))
            await asyncio.sleep(delay)
            assert await sh(machine, "echo here") == "here"
            await dozing


# Stop


async def test_stop_of_a_suspended_vm_shuts_its_services_down(machines: Machines) -> None:
    """A stop wakes a suspended VM and shuts it down; a kill does not."""
    machine = await machines.create(ready_timeout=60)
    await machine.start(ready_timeout=60)
    await machine.files().write("/etc/systemd/system/last.service", LAST_SERVICE)
    await machine.files().write("/etc/systemd/system/slow.service", SLOW_SERVICE)
    await sh(machine, "systemctl enable slow && systemctl start last")
    await machine.suspend()
    await machine.stop()
    info = await machine.info()
    assert (info.state, info.reason) == (State.STOPPED, "stopped")
    with pytest.raises(ReadyTimeout, match=r"was not ready within 0\.1 s"):
        await machine.start(ready_timeout=0.1)
    assert await state(machine) is State.RUNNING
    await machine.start(ready_timeout=120)
    assert await sh(machine, "systemctl is-active slow; cat /root/shutdown") == "active\nshut down"
    await machine.delete()


# Size


@pytest.mark.slow
async def test_resize_changes_cpu_memory_disk_and_file_system(
    machines: Machines, events: list[MachineEvent]
) -> None:
    machine = await machines.create()
    await sh(machine, "echo kept > /root/kept")
    before = int(await sh(machine, "df -B1 --output=size / | tail -1"))
    await machine.resize(vcpus=1, memory_mib=1024, disk_gib=22)
    assert await state(machine) is State.RUNNING
    assert [event.message for event in events][-2:] == [
        f"VM {machine.id} stopped: resize",
        f"VM {machine.id} started: resize to 1x1Gx22G",
    ]
    info = await machine.info()
    assert (info.size.vcpus, info.size.memory_mib, info.size.disk_gib) == (1, 1024, 22)
    assert await sh(machine, "nproc; cat /root/kept") == "1\nkept"
    assert int(await sh(machine, "awk '/MemTotal/ {print $2}' /proc/meminfo")) > 900_000
    after = int(await sh(machine, "df -B1 --output=size / | tail -1"))
    assert after - before > 1.8 * (1 << 30)
    # Of its new size it sleeps and forks as before.
    await sh(machine, "echo memory > /run/marker")
    await machine.suspend()
    assert await sh(machine, "cat /run/marker") == "memory"
    (child,) = await machine.fork()
    assert await sh(child, "cat /run/marker; nproc") == "memory\n1"
    assert int(await sh(child, "df -B1 --output=size / | tail -1")) == after
    for each in (child, machine):
        await each.delete()


# Eviction


def test_eviction_is_ordered_by_priority_then_last_use() -> None:
    async def delete(_: str) -> None: ...

    order = eviction_order(
        [
            Evictable("new", 5, 2, delete),
            Evictable("dear", 9, 0, delete),
            Evictable("old", 5, 1, delete),
            Evictable("cheap", 0, 3, delete),
        ]
    )
    assert [each.id for each in order] == ["cheap", "old", "new", "dear"]
    with pytest.raises(InvalidRequest):
        Sticky(11)
    with pytest.raises(InvalidRequest):
        Ephemeral("OnBoredom")  # type: ignore[arg-type]

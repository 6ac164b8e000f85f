"""Whatever a user does inside, the machine can still be commanded and its files reached."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from stead.errors import GuestError, GuestUnreachable
from stead.guest.execution import ExecResult
from stead.machines import Machine
from support.waiting import until

HOG = "hoard = []\nwhile True: hoard.append(b'x' * (8 << 20))"


async def survived(machine: Machine, limit: float = 20) -> None:
    """Commands and files answer as if nothing had happened, the first time they are asked."""
    async with asyncio.timeout(limit):
        result = await machine.exec(["echo", "alive"])
        assert (result.stdout, result.exit_code) == (b"alive\n", 0)
        assert b"PRETTY_NAME" in await machine.files().read("/etc/os-release")


async def done(machine: Machine, command: str, timeout: float = 60) -> ExecResult:
    result = await machine.exec(command, timeout=timeout)
    assert result.ok, (result.exit_code, result.signal, result.stderr)
    return result


async def tasks(machine: Machine) -> int:
    """How many processes and threads there are, without asking each of them as `ps` would."""
    return int((await machine.files().read("/proc/loadavg")).split()[3].split(b"/")[1])


async def test_a_fork_bomb_that_its_caller_waits_for(machine: Machine) -> None:
    before = await tasks(machine)
    result = await machine.exec(["bash", "-c", ":(){ :|:& };:; sleep 60"], timeout=2)
    assert result.timed_out
    await survived(machine)

    async def defused() -> bool:
        return await tasks(machine) < before + 20

    await until(defused, 60)


async def test_a_fork_bomb_in_the_background(machine: Machine) -> None:
    """It goes on exploding: the next commands run beside it, and can end it."""
    before = await tasks(machine)
    bomb = await machine.exec(["bash", "-c", "echo $$; :(){ :|:& };:"], timeout=20)
    assert bomb.exit_code == 0

    async def exploded() -> bool:
        return await tasks(machine) > before + 300

    async def defused() -> bool:
        return await tasks(machine) < before + 20

    await survived(machine)
    await until(exploded, 60)
    await survived(machine)
    assert (await machine.exec(["kill", "-KILL", "--", f"-{bomb.stdout.decode().strip()}"])).ok
    await until(defused, 60)


async def test_a_command_that_eats_all_memory_is_named(machine: Machine) -> None:
    eater = await machine.exec(["python3", "-c", HOG], timeout=60)
    assert (eater.signal, eater.timed_out) == ("SIGKILL", False)
    assert eater.out_of_memory is not None
    assert eater.out_of_memory.process == "python3"
    assert eater.out_of_memory.rss_kib > 100_000
    await survived(machine)

    child = await machine.exec(f'python3 -c "{HOG}"; echo the rest; exit 3', timeout=60)
    assert (child.exit_code, child.stdout) == (3, b"the rest\n"), "only the one that ate was ended"
    assert child.out_of_memory is not None
    assert child.out_of_memory.pid != eater.out_of_memory.pid
    assert await machine.out_of_memory() == [eater.out_of_memory, child.out_of_memory]

    innocent = await machine.exec("kill -KILL $$")
    assert (innocent.signal, innocent.out_of_memory) == ("SIGKILL", None)


async def test_a_service_that_eats_all_memory(machine: Machine) -> None:
    """It is held by no limit of ours: the whole machine runs out of memory, and the agent lives."""
    service = ["systemd-run", "--quiet", "--wait", "--unit=hog", "python3", "-c", HOG]
    await machine.exec(service, timeout=90)
    await survived(machine)
    assert b"Result=oom-kill" in (await done(machine, "systemctl show hog")).stdout
    events = await machine.out_of_memory()
    assert [event.process for event in events] == ["python3"]
    assert events[0].scope == "machine"


async def test_a_network_that_is_taken_apart(machine: Machine) -> None:
    await done(
        machine,
        "ip route flush table all; ip address flush dev eth0; ip link set eth0 down; ip link set lo down;"
        " sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1;"
        " ip rule flush; ip rule add prohibit; true",
    )
    assert not (await machine.exec(["ping", "-c", "1", "-w", "1", "169.254.0.1"], timeout=20)).ok
    await survived(machine)


async def test_a_machine_without_python(machine: Machine) -> None:
    await done(machine, "rm -r /usr/bin/python3* /usr/lib/python3*")
    assert (await machine.exec("python3 --version")).exit_code == 127
    await machine.files().write("/srv/file", b"written")
    await survived(machine)


async def test_a_full_disk(machine: Machine) -> None:
    await machine.files().write("/srv/kept", b"kept")
    await done(
        machine,
        """for size in 4G 256M 16M 1M 64K 4K; do
            while fallocate -l $size /fill.$size.$((n += 1)); do :; done
        done
        ! dd if=/dev/zero of=/fill.rest bs=4K count=100000""",
    )
    with pytest.raises(GuestError) as full:
        await machine.files().write("/srv/kept", bytes(1 << 20))
    assert full.value.code == "no_space"
    assert await machine.files().read("/srv/kept") == b"kept"
    await survived(machine)
    await done(machine, "rm /fill.*")
    assert await machine.files().write("/srv/kept", bytes(1 << 20)) == 1 << 20


async def test_an_agent_that_is_killed_comes_back(machine: Machine) -> None:
    """Commands under way are lost to their callers, but they run on."""
    await done(machine, "setsid sleep 1001 > /dev/null 2>&1 &")
    caller = asyncio.create_task(machine.exec("sleep 1002"))
    async with asyncio.timeout(60):
        while not (await machine.exec(["pgrep", "-x", "-f", "sleep 1002"])).ok:
            pass
        with pytest.raises(GuestUnreachable):
            await machine.exec(["pkill", "-KILL", "-f", "^/usr/lib/stead/agent"])
        with pytest.raises(GuestUnreachable):
            await caller
    await survived(machine, 10)
    assert (await done(machine, "pgrep -x -f 'sleep 100[12]'")).stdout.count(b"\n") == 2
    assert (await done(machine, "hostname")).stdout.decode().strip() == (await machine.info()).hostname


async def test_an_agent_killed_in_the_middle_of_an_upload(machine: Machine) -> None:
    """The old file is there, and the caller is told."""
    await machine.files().write("/srv/file", b"old")

    async def interrupted() -> AsyncIterator[bytes]:
        yield bytes(1 << 20)
        with pytest.raises(GuestUnreachable):
            await machine.exec(["pkill", "-KILL", "-f", "^/usr/lib/stead/agent"])
        for _ in range(100):
            yield bytes(1 << 20)

    with pytest.raises(GuestUnreachable):
        await machine.files().write("/srv/file", interrupted())
    assert await machine.files().read("/srv/file") == b"old"
    await survived(machine)


async def test_temporary_folders_swept_away(machine: Machine) -> None:
    await done(machine, "rm -rf /tmp/* /tmp/.[!.]* /var/tmp/* /run/user /run/lock /dev/shm; rmdir /tmp")
    await survived(machine)


async def test_a_shell_that_cannot_be_run(machine: Machine) -> None:
    await done(machine, "chmod 000 /bin/sh")
    result = await machine.exec("echo alive")
    assert (result.exit_code, result.stderr) == (126, b"stead: /bin/sh: permission denied\n")
    await survived(machine)
    assert (await machine.exec(["chmod", "755", "/bin/sh"])).ok
    await done(machine, "echo alive")

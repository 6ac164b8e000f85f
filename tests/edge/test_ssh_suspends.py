"""SSH connections over suspends, with OpenSSH's clients. VMs and their suspends are in memory."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from stead.edge.ssh import client, client_access
from stead.host.interface import narrowed
from stead.machines import State
from stead.machines.events import Use
from stead.machines.records import Properties
from support.fake_host import FakeHost
from support.fake_world import World
from support.internals import inside
from support.pseudo_terminal import in_terminal
from support.scripted_server import free_port
from support.ssh_gateway_with_sshd import WAIT, Ended, Process, SshGatewayWithSshd, ssh_gateway_with_sshd
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root", "network")

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class VmPort:
    """Port 22 of a VM: nothing passes while the VM does not run, or is frozen."""

    world: World
    vm: str
    to: tuple[str, int]
    frozen: bool = False
    sent_in_vain: int = 0
    """Bytes that came for the VM while it did not run."""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def _asleep(self) -> bool:
        return not self.world.alive(self.vm)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = await asyncio.open_connection(*self.to)
        self._writers += [writer, guest[1]]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(reader, guest[1], into=True), self._pass(guest[0], writer))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, into: bool = False
    ) -> None:
        while data := await reader.read(1 << 16):
            if into and self._asleep:
                self.sent_in_vain += len(data)
            await until(lambda: not (self._asleep or self.frozen), WAIT)
            writer.write(data)
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@dataclass(frozen=True)
class SuspendableVm:
    ssh_gateway: SshGatewayWithSshd
    port: VmPort
    folder: Path

    @property
    def vm(self) -> str:
        return self.ssh_gateway.api.vm

    async def state(self) -> State:
        return (await self.ssh_gateway.api.installation.machines.info(self.vm)).state

    async def suspend(self) -> None:
        await self.ssh_gateway.api.installation.machines.suspend(self.vm)
        assert await self.state() is State.SUSPENDED

    @property
    def wakes(self) -> int:
        host = narrowed(inside(self.ssh_gateway.api.installation.machines).host, FakeHost)
        return host.calls.count("restore_state")

    @property
    def shared(self) -> list[str]:
        return ["-o", f"ControlPath={self.folder}/control"]

    async def ssh(self, *arguments: str) -> Ended:
        """With the connection of `connected`."""
        return await self.ssh_gateway.ssh(*self.shared, *arguments)

    @contextlib.asynccontextmanager
    async def connected(self, *options: str) -> AsyncIterator[Process]:
        """`ssh -M -N`."""
        master = await self.ssh_gateway.start(
            *self.ssh_gateway.ssh_command("-M", "-N", *self.shared, *options)
        )
        try:
            await until((self.folder / "control").exists, WAIT)
            assert (await self.ssh("true")).code == 0, "the gateway has logged in to the VM"
            yield master
        finally:
            if master.returncode is None:
                master.kill()
            await master.wait()


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


@pytest_asyncio.fixture
async def suspendable(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[SuspendableVm]:
    monkeypatch.setattr(client_access, "_RECHECK", 0.2)
    world = ssh_gateway.api.world
    port = VmPort(world, ssh_gateway.api.vm, ssh_gateway.sshd.address)
    server = await asyncio.start_server(port.accept, "127.0.0.1", 0)
    monkeypatch.setitem(world.ports, 22, server.sockets[0].getsockname())
    await ssh_gateway.api.installation.machines.start(ssh_gateway.api.vm)
    yield SuspendableVm(ssh_gateway, port, tmp_path)
    server.close()
    port.cut()


async def _capitals(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
    writer.close()


@pytest_asyncio.fixture
async def capitals(tmp_path: Path) -> AsyncIterator[int]:
    """A port, and a Unix socket of the same name in `tmp_path`, that answer each line in capitals."""
    server = await asyncio.start_server(_capitals, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    unix = await asyncio.start_unix_server(_capitals, str(tmp_path / str(port)))
    yield port
    server.close()
    unix.close()


async def _answer(link: Link, line: bytes = b"hello\n") -> bytes:
    reader, writer = link
    writer.write(line)
    return await asyncio.wait_for(reader.readline(), WAIT)


@contextlib.asynccontextmanager
async def _opened(port: int) -> AsyncIterator[Link]:
    link = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield link
    finally:
        link[1].close()


async def test_every_kind_of_request_wakes_the_vm(suspendable: SuspendableVm, capitals: int) -> None:
    """Each is the first after a suspend; all are of one connection."""
    local, remote, near = free_port(), free_port(), suspendable.folder / "near.sock"
    back = ("-R", f"127.0.0.1:{remote}:127.0.0.1:{capitals}")

    async def session() -> None:
        ended = await suspendable.ssh("echo in; exit 3")
        assert (ended.code, ended.out) == (3, "in\n"), ended.err

    async def terminal() -> None:
        assert "not a tty" not in (await suspendable.ssh("-tt", "tty")).out

    async def forwarded_port() -> None:
        link = await asyncio.open_connection("127.0.0.1", local)
        assert await _answer(link) == b"HELLO\n"
        await _close(link)

    async def forwarded_socket() -> None:
        link = await asyncio.open_unix_connection(str(near))
        assert await _answer(link) == b"HELLO\n"
        await _close(link)

    async def remote_port() -> None:
        assert (await suspendable.ssh("-O", "forward", *back)).code == 0
        link = await asyncio.open_connection("127.0.0.1", remote)
        assert await _answer(link) == b"HELLO\n"
        await _close(link)

    async def cancelled_remote_port() -> None:
        assert (await suspendable.ssh("-O", "cancel", *back)).code == 0
        assert await until(lambda: _refused(remote), WAIT)

    options = (
        "-L",
        f"127.0.0.1:{local}:127.0.0.1:{capitals}",
        "-L",
        f"{near}:{suspendable.folder}/{capitals}",
    )
    async with suspendable.connected(*options) as master:
        kinds: list[Callable[[], Awaitable[None]]] = [
            *(session, terminal, forwarded_port, forwarded_socket, remote_port, cancelled_remote_port)
        ]
        for kind in kinds:
            await suspendable.suspend()
            await kind()
            assert await suspendable.state() is State.RUNNING, kind.__name__
        assert master.returncode is None
    assert suspendable.port.sent_in_vain == 0


async def _close(link: Link) -> None:
    """Close a forwarded connection and give both of its ends the time to do so."""
    link[1].close()
    await asyncio.sleep(0.3)


async def _refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


async def test_every_message_of_an_open_channel_wakes_the_vm(
    suspendable: SuspendableVm, capitals: int
) -> None:
    """Data, its end, a new size of the terminal, and a connection that is closed."""
    port = free_port()
    async with suspendable.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{capitals}"):
        link = await asyncio.open_connection("127.0.0.1", port)
        assert await _answer(link) == b"HELLO\n"
        await suspendable.suspend()
        assert await _answer(link, b"again\n") == b"AGAIN\n"
        await suspendable.suspend()
        link[1].write_eof()
        assert await asyncio.wait_for(link[0].read(), WAIT) == b""
        assert await suspendable.state() is State.RUNNING
        link[1].close()
        command = suspendable.ssh_gateway.ssh_command(*suspendable.shared, "-tt", "cat")
        async with in_terminal(command, os.environ) as window:
            await window.raw(WAIT)
            window.type(b"ready\n")
            await window.expect(b"ready\r\nready\r\n", WAIT)
            await suspendable.suspend()
            window.resize(120, 50)
            await until(_woken(suspendable), WAIT)
    assert suspendable.port.sent_in_vain == 0


def _woken(suspendable: SuspendableVm) -> Callable[[], Awaitable[bool]]:
    async def woken() -> bool:
        return await suspendable.state() is State.RUNNING

    return woken


async def test_keepalives_do_not_wake_a_vm_and_are_no_activity(suspendable: SuspendableVm) -> None:
    live = inside(suspendable.ssh_gateway.api.installation.machines).processes.running(suspendable.vm)
    async with suspendable.connected(
        "-vvv", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"
    ) as master:
        assert live is not None

        async def unused_for_two_seconds() -> bool:
            """The last messages of the login may still be on their way at first."""
            used = live.last_used
            await asyncio.sleep(2)
            return live.last_used == used

        await until(unused_for_two_seconds, WAIT)
        await suspendable.suspend()
        await asyncio.sleep(3)
        assert await suspendable.state() is State.SUSPENDED and master.returncode is None
        assert (await suspendable.ssh("echo in")).out == "in\n"
        master.kill()
        assert master.stderr is not None
        said = (await master.stderr.read()).decode()
        assert said.count("send packet: type 80") >= 3, "keepalives were sent"


async def test_many_channels_at_once_are_one_wake(suspendable: SuspendableVm, capitals: int) -> None:
    port = free_port()
    async with suspendable.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{capitals}"):
        await suspendable.suspend()
        before = suspendable.wakes

        async def forwarded() -> bytes:
            async with _opened(port) as link:
                return await _answer(link)

        answers = await asyncio.gather(*[forwarded() for _ in range(30)])
        assert answers == [b"HELLO\n"] * 30
        assert suspendable.wakes == before + 1
    assert suspendable.port.sent_in_vain == 0


async def test_a_wake_that_fails_refuses_the_channel_with_its_reason(
    suspendable: SuspendableVm, capitals: int
) -> None:
    """The connection stays; once there is memory again, it works."""
    port, world = free_port(), suspendable.ssh_gateway.api.world
    async with suspendable.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{capitals}") as master:
        await suspendable.suspend()
        memory, world.free_memory = world.free_memory, 0
        try:
            ended = await suspendable.ssh("echo in")
            assert (ended.code, ended.out) == (255, "") and "not enough memory (trace " in ended.err
            async with _opened(port) as link:
                assert await asyncio.wait_for(link[0].read(), WAIT) == b""
            assert (
                await suspendable.ssh("-O", "forward", "-R", f"{free_port()}:127.0.0.1:{capitals}")
            ).code == 255
        finally:
            world.free_memory = memory
        assert await suspendable.state() is State.SUSPENDED and master.returncode is None
        assert (await suspendable.ssh("echo in")).out == "in\n"
        async with _opened(port) as link:
            assert await _answer(link) == b"HELLO\n"
            await suspendable.suspend()
            world.free_memory = 0
            try:
                link[1].write(b"data that cannot be delivered\n")
                _, said = await asyncio.wait_for(master.communicate(), WAIT)
            finally:
                world.free_memory = memory
        assert b"not enough memory (trace " in said


async def test_a_wake_that_takes_too_long_refuses_the_channel(
    suspendable: SuspendableVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_WAKE_TIMEOUT", 0.5)
    machines = suspendable.ssh_gateway.api.installation.machines
    async with suspendable.connected():
        await suspendable.suspend()
        async with inside(machines).locks.hold(suspendable.vm):
            ended = await suspendable.ssh("echo in")
            assert ended.code == 255 and "did not wake within 0.5 s" in ended.err
        monkeypatch.undo()
        assert (await suspendable.ssh("echo in")).out == "in\n"


async def test_a_guest_that_has_booted_again_ends_the_connection(suspendable: SuspendableVm) -> None:
    world = suspendable.ssh_gateway.api.world
    async with suspendable.connected() as master:
        await suspendable.suspend()
        for state in world.saved.values():
            state.corrupt = True
        ended = await suspendable.ssh("echo in")
        assert ended.code == 255 and ended.out == ""
        _, said = await asyncio.wait_for(master.communicate(), WAIT)
        assert b"has booted again (saved memory was unusable" in said and b"(trace " in said
    (suspendable.folder / "control").unlink(missing_ok=True)
    async with suspendable.connected() as master:
        await suspendable.ssh_gateway.api.installation.machines.kill(suspendable.vm)
        await suspendable.ssh_gateway.api.installation.machines.start(suspendable.vm)
        _, said = await asyncio.wait_for(master.communicate(), WAIT)
        assert b"the VM was killed (trace " in said, said


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "not watched"])
@pytest.mark.parametrize("how", ["kill", "delete"])
async def test_a_vm_that_ended_while_it_was_suspended(
    suspendable: SuspendableVm, how: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told at once. If it was not yet, a new channel does not start the VM again."""
    monkeypatch.setattr(client_access, "_RECHECK", 60.0)
    if not watched:
        monkeypatch.setattr(client_access.ClientAccess, "_on_boot_end", lambda *_: None)
    machines = suspendable.ssh_gateway.api.installation.machines
    machine = await machines.create(Properties(account=suspendable.ssh_gateway.api.account))
    _, token = await suspendable.ssh_gateway.token_for(vm=machine.id)
    suspendable.port.vm = machine.id
    login = f"{machine.id},{token}"
    command = suspendable.ssh_gateway.ssh_command("-M", "-N", *suspendable.shared, login=login)
    master = await suspendable.ssh_gateway.start(*command)
    await until((suspendable.folder / "control").exists, WAIT)
    assert (await suspendable.ssh_gateway.ssh(*suspendable.shared, "true", login=login)).code == 0
    await machine.suspend()
    await asyncio.sleep(0.5)
    await (machine.kill() if how == "kill" else machine.delete())
    if watched:
        expected = "the VM was killed (trace " if how == "kill" else "the VM was deleted (trace "
    else:
        assert (await suspendable.ssh_gateway.ssh(*suspendable.shared, "echo in", login=login)).code == 255
        expected = "it is stopped (killed) (trace " if how == "kill" else f"VM {machine.id} not found (trace "
    _, said = await asyncio.wait_for(master.communicate(), WAIT)
    assert expected in said.decode(), said
    if how == "kill":
        assert (await machine.info()).state is State.STOPPED
        await machine.delete()


async def test_a_client_that_leaves_does_not_wake_the_vm(suspendable: SuspendableVm, capitals: int) -> None:
    port = free_port()
    async with suspendable.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{capitals}") as master:
        link = await asyncio.open_connection("127.0.0.1", port)
        assert await _answer(link) == b"HELLO\n"
        await suspendable.suspend()
        before = suspendable.wakes
        master.kill()
        await until(lambda: not suspendable.ssh_gateway.gateway._links.used, WAIT)
        await asyncio.sleep(0.5)
        assert await suspendable.state() is State.SUSPENDED and suspendable.wakes == before
        link[1].close()


async def test_a_suspend_before_the_answer_to_a_request(suspendable: SuspendableVm, capitals: int) -> None:
    """The request has left and the guest has not answered: the VM is woken to answer it."""
    port = free_port()
    async with (
        suspendable.connected("-L", f"127.0.0.1:{port}:127.0.0.1:{capitals}"),
        contextlib.AsyncExitStack() as opened,
    ):
        suspendable.port.frozen = True
        links = [await opened.enter_async_context(_opened(port)) for _ in range(3)]
        session = asyncio.create_task(suspendable.ssh("echo in"))
        await asyncio.sleep(1)
        await suspendable.suspend()
        await until(_woken(suspendable), WAIT)
        suspendable.port.frozen = False
        assert await asyncio.gather(*[_answer(link) for link in links]) == [b"HELLO\n"] * 3
        assert (await session).out == "in\n"


async def test_a_suspend_during_a_login(suspendable: SuspendableVm) -> None:
    suspendable.port.frozen = True
    login = asyncio.create_task(suspendable.ssh_gateway.ssh("echo in"))
    await until(lambda: suspendable.port._writers, WAIT)
    await suspendable.suspend()
    suspendable.port.frozen = False
    assert (await login).out == "in\n"


async def test_a_vm_that_another_use_has_woken(suspendable: SuspendableVm, capitals: int) -> None:
    """Connections of the guest to a port of `-R` pass, though the client has sent nothing."""
    port = free_port()
    async with suspendable.connected("-R", f"127.0.0.1:{port}:127.0.0.1:{capitals}"):
        await until(lambda: _accepts(port), WAIT)
        await suspendable.suspend()
        await suspendable.ssh_gateway.api.installation.machines.attached(suspendable.vm, Use.COMMAND)
        async with _opened(port) as link:
            assert await _answer(link) == b"HELLO\n"


async def _accepts(port: int) -> bool:
    return not await _refused(port)


async def test_ports_that_are_no_longer_forwarded_leave_room_for_others(
    suspendable: SuspendableVm, capitals: int
) -> None:
    async with suspendable.connected():
        for _ in range(client.MAX_LISTENERS + 2):
            forward = ("-R", f"127.0.0.1:{free_port()}:127.0.0.1:{capitals}")
            assert (await suspendable.ssh("-O", "forward", *forward)).code == 0
            assert (await suspendable.ssh("-O", "cancel", *forward)).code == 0

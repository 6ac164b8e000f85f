"""The process of the SSH gateway: its privileges, its end, and what the server lets it do."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from stead.edge.ssh import client_access, gateway, messages
from stead.edge.ssh.gateway import GatewayLimits, SshGateway
from stead.edge.ssh.messages import (
    Accepted,
    Authenticate,
    EndClient,
    Failed,
    Hold,
    LoggedIn,
    Message,
    NewLink,
    OfServer,
    Open,
    Opened,
    Refused,
    Serving,
    Sign,
    Signed,
    ToGateway,
    Touch,
    Wake,
)
from stead.edge.ssh.packets import packet_pair
from stead.processes import ProcessId
from support.internals import inside
from support.ssh_gateway_with_sshd import WAIT, SshGatewayWithSshd, ssh_gateway_with_sshd
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root", "network")

_TRACE = "0" * 32
_WRONG = "stid_" + "x" * 43


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


def _pid(ssh_gateway: SshGatewayWithSshd) -> int:
    assert ssh_gateway.gateway.pid is not None
    return ssh_gateway.gateway.pid


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_the_gateway_has_no_privileges(ssh_gateway: SshGatewayWithSshd) -> None:
    assert (await ssh_gateway.ssh("true")).code == 0
    pid, user = _pid(ssh_gateway), str(ssh_gateway.api.installation.settings.ssh_uid)
    status = _status(pid)
    assert status["Uid"].split() == status["Gid"].split() == [user] * 4
    assert status["Groups"] == ""
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert not list(Path(f"/proc/{pid}/root").iterdir()), "its root is an empty folder"
    assert Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    interfaces = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    assert [line.partition(":")[0].strip() for line in interfaces] == ["lo"]
    assert Path(f"/proc/{pid}/net/route").read_text().splitlines()[1:] == []
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PRIVATE KEY" not in arguments


async def test_a_killed_gateway_is_started_again(ssh_gateway: SshGatewayWithSshd) -> None:
    """Its connections end, and nothing is held for them any more."""
    endpoint = ssh_gateway.api.installation.ssh
    live = inside(ssh_gateway.api.installation.machines).processes.running(ssh_gateway.api.vm)
    async with ssh_gateway.connected() as process:
        assert live is not None and ssh_gateway.gateway._parts.connections.used == 1
        first = _pid(ssh_gateway)
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(process.communicate(), WAIT)
        assert process.returncode == 255
    await until(lambda: endpoint.state == "serving" and ssh_gateway.gateway.pid not in (None, first), WAIT)
    assert not Path(f"/proc/{first}").exists()
    assert ssh_gateway.gateway._parts.connections.used == ssh_gateway.gateway._links.used == live.leases == 0
    assert (await ssh_gateway.ssh("echo in")).out == "in\n"


async def test_a_gateway_that_hangs_is_started_again(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_PING_INTERVAL", 0.1)
    monkeypatch.setattr(gateway, "_PONG_TIMEOUT", 3.0)
    async with ssh_gateway.limited(GatewayLimits(10)) as limited:
        first = _pid(limited)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: limited.gateway.pid not in (None, first), WAIT)
        assert (await limited.ssh("echo in")).out == "in\n"


_SERVER = """
import asyncio, socket, sys
from stead.edge.ssh.gateway import GatewayLimits, SshGateway
from stead.settings import Settings
from pathlib import Path

async def main():
    gateway = SshGateway(Settings(data=Path(sys.argv[1])), None, None, None, GatewayLimits(10))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with gateway.serving(listening):
            print(gateway.pid, flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_server_takes_its_gateway_with_it(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    process = ProcessId.of(int(await asyncio.wait_for(server.stdout.readline(), WAIT)))
    assert process is not None
    server.kill()
    await server.wait()
    await until(lambda: not process.alive(), WAIT)


# A gateway that was broken into


@dataclass
class GivenLink:
    """The gateway's end of a link."""

    end: socket.socket

    def send(self, message: Message) -> None:
        self.end.send(msgspec.msgpack.encode(message))

    async def receive(self) -> tuple[OfServer | None, socket.socket | None]:
        """The next message; None after the server has closed the link."""
        message, passed = await _received(self.end, OfServer)
        return cast("OfServer | None", message), passed

    async def ask(self, message: Message) -> OfServer | None:
        self.send(message)
        return (await self.receive())[0]

    async def closed(self) -> bool:
        while (await self.receive())[0] is not None:
            pass
        return True


async def _received(link: socket.socket, kind: Any) -> tuple[object, socket.socket | None]:
    def read() -> tuple[bytes, list[int]] | None:
        try:
            data, passed, _, _ = socket.recv_fds(link, 1 << 18, 1)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b"", []
        return data, passed

    found = await until(read, WAIT)
    assert found is not None
    data, passed = found
    message = msgspec.msgpack.decode(data, type=kind) if data else None
    return message, socket.socket(fileno=passed[0]) if passed else None


@dataclass
class Broken:
    ssh_gateway: SshGatewayWithSshd
    control: socket.socket
    opened: contextlib.ExitStack

    async def link(self) -> GivenLink:
        passed = await self.try_link()
        assert passed is not None
        passed.setblocking(False)
        return GivenLink(self.opened.enter_context(passed))

    async def try_link(self) -> socket.socket | None:
        self.control.send(msgspec.msgpack.encode(NewLink()))
        while True:
            message, passed = await _received(self.control, ToGateway)
            if isinstance(message, messages.GivenLink):
                return passed

    def login(self, user: str | None = None, token: str | None = None) -> Authenticate:
        here = self.ssh_gateway
        return Authenticate(here.api.vm, user, token or here.token, "192.0.2.1", 5000, _TRACE)


@pytest_asyncio.fixture
async def broken(ssh_gateway: SshGatewayWithSshd) -> AsyncIterator[Broken]:
    here = ssh_gateway.api.installation
    attending = SshGateway(
        here.settings, here.callers, here.identities, here.machines, GatewayLimits(2, unauthenticated=2)
    )
    server, control = packet_pair()
    control.send(msgspec.msgpack.encode(Serving()))
    async with attending.attending(server):
        with control, contextlib.ExitStack() as opened:
            yield Broken(ssh_gateway, control, opened)


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _request(user: bytes, key: bytes) -> bytes:
    return (
        _string(b"s" * 32)
        + b"\x32"
        + b"".join(map(_string, (user, b"ssh-connection", b"publickey")))
        + b"\x01"
        + _string(b"ssh-ed25519")
        + _string(key)
    )


async def test_a_gateway_gets_nothing_without_a_valid_token(broken: Broken) -> None:
    for message in (Open(), Sign(b""), LoggedIn(), Wake(), Touch(), Hold(True)):
        link = await broken.link()
        link.send(message)
        assert await link.closed(), message
    link = await broken.link()
    assert isinstance(await link.ask(broken.login(token=_WRONG)), Refused)
    link.send(Open())
    assert await link.closed()
    for garbage in (b"\xc1", b"x" * 5000, msgspec.msgpack.encode({"type": "Open", "extra": 1})):
        link = await broken.link()
        link.end.send(garbage)
        assert await link.closed()


async def test_a_link_that_sends_without_end_is_closed(broken: Broken) -> None:
    link = await broken.link()
    assert isinstance(await link.ask(broken.login()), Accepted)
    link.send(Open())
    opened, connection = await link.receive()
    assert isinstance(opened, Opened) and connection is not None
    with connection, contextlib.suppress(ConnectionError):
        for _ in range(5000):
            with contextlib.suppress(BlockingIOError):
                link.send(Touch())
            await asyncio.sleep(0)
    assert await link.closed()


async def test_a_link_has_three_attempts(broken: Broken) -> None:
    link = await broken.link()
    for _ in range(3):
        assert isinstance(await link.ask(broken.login(token=_WRONG)), Refused)
    link.send(broken.login())
    assert await link.closed()


async def test_the_server_signs_only_the_login_of_the_linux_user(broken: Broken) -> None:
    _, token = await broken.ssh_gateway.token_for("dev")
    for user, signed in ((b"root", False), (b"dev", True)):
        link = await broken.link()
        assert await link.ask(broken.login(token=token)) == Accepted("dev")
        link.send(Open())
        opened, connection = await link.receive()
        assert isinstance(opened, Opened) and connection is not None
        answer = await link.ask(Sign(_request(user, opened.public_key)))
        assert isinstance(answer, Signed if signed else Failed)
        link.send(Sign(_request(b"dev", opened.public_key)))
        assert await link.closed(), "one signature for each connection"
        connection.close()


async def test_revocation_ends_the_connection_to_the_vm_without_the_gateway(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_access, "_RECHECK", 0.2)
    api = broken.ssh_gateway.api
    identity, token = await broken.ssh_gateway.token_for()
    link = await broken.link()
    assert isinstance(await link.ask(broken.login(token=token)), Accepted)
    link.send(Open())
    opened, connection = await link.receive()
    assert isinstance(opened, Opened) and connection is not None
    reader, writer = await asyncio.open_connection(sock=connection)
    assert (await asyncio.wait_for(reader.readline(), WAIT)).startswith(b"SSH-2.0-OpenSSH")
    await api.installation.identities.delete(api.account, identity)
    assert isinstance((await link.receive())[0], EndClient)
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(1 << 16), WAIT):
            pass
    writer.close()


async def test_links_are_bounded_and_shared_by_account(broken: Broken) -> None:
    links = [await broken.link() for _ in range(6)]
    assert await broken.try_link() is None, "too many"
    assert all([isinstance(await link.ask(broken.login()), Accepted) for link in links[:2]])
    links[0].send(Open())
    opened, connection = await links[0].receive()
    assert isinstance(opened, Opened) and connection is not None
    answer = await links[1].ask(Open())
    assert isinstance(answer, Failed) and "too many open SSH connections: max 1" in answer.reason
    assert isinstance(await links[1].ask(Open()), Failed), "asked again"
    connection.close()
    links[0].end.close()

    async def released() -> bool:
        passed = await broken.try_link()
        if passed is None:
            return False
        passed.setblocking(False)
        link = GivenLink(passed)
        await link.ask(broken.login())
        link.send(Open())
        answer, connection = await link.receive()
        if connection is not None:
            connection.close()
        link.end.close()
        return isinstance(answer, Opened)

    assert await until(released, WAIT)

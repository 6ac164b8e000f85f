"""Strangers at the SSH gateway: floods of key exchanges, logins that never finish, wrong tokens.

Owners log in with OpenSSH meanwhile, and the API answers.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import pytest_asyncio

from support.ssh_gateway_with_sshd import WAIT, SshGatewayWithSshd, ssh_gateway_with_sshd

pytestmark = pytest.mark.usefixtures("root", "network")

_WRONG = "stid_" + "x" * 43
_SOON = 30.0
"""Seconds for a login of the owner beside a flood; one that is locked out waits for ever."""
_API_LATENCY = 1.0


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


async def _owner_logs_in(ssh_gateway: SshGatewayWithSshd, source: str = "127.0.9.9") -> None:
    ended = await asyncio.wait_for(ssh_gateway.ssh("-b", source, "echo in"), _SOON)
    assert (ended.code, ended.out) == (0, "in\n"), ended.err


@contextlib.asynccontextmanager
async def _api_is_asked(ssh_gateway: SshGatewayWithSshd) -> AsyncIterator[list[float]]:
    """Calls the API during the block, and gathers how long each call took."""
    took: list[float] = []

    async def ask() -> None:
        async with ssh_gateway.api.http() as client:
            while True:
                began = time.perf_counter()
                answer = await client.get(f"{ssh_gateway.api.url}/v1/vms/{ssh_gateway.api.vm}")
                assert answer.status_code == 200
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.05)

    task = asyncio.create_task(ask())
    try:
        yield took
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Stranger(asyncssh.SSHClient):
    """Never answers the question for its password."""

    connection: Any = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self.connection = conn

    async def password_auth_requested(self) -> str:
        await asyncio.sleep(WAIT)
        return ""


async def test_new_keys_before_the_login_end_the_connection(ssh_gateway: SshGatewayWithSshd) -> None:
    stranger = _Stranger()

    async def log_in() -> None:
        await asyncssh.connect(
            "127.0.0.1",
            ssh_gateway.port,
            client_factory=lambda: stranger,
            known_hosts=None,
            config=None,
            username=ssh_gateway.api.vm,
            client_keys=None,
            agent_path=None,
        )

    login = asyncio.create_task(log_in())
    exchanges = 0
    async with asyncio.timeout(WAIT):
        while not login.done():
            connection = stranger.connection
            if connection is not None and connection._kex_complete and connection._kex is None:
                exchanges += 1
                connection._send_kexinit()
                connection._kexinit_sent = True
            await asyncio.sleep(0.001)
    with pytest.raises(asyncssh.DisconnectError, match="before the login"):
        await login
    assert exchanges == 1


async def test_only_key_exchanges_over_modern_curves_are_offered(ssh_gateway: SshGatewayWithSshd) -> None:
    ended = await ssh_gateway.ssh("-vv", "echo in")
    _, _, proposal = ended.err.partition("peer server KEXINIT proposal")
    offered = proposal.partition("KEX algorithms: ")[2].splitlines()[0].split(",")
    modern = {"mlkem768x25519-sha256", "curve25519-sha256", "curve25519-sha256@libssh.org"}
    markers = {"ext-info-s", "kex-strict-s-v00@openssh.com"}
    assert "curve25519-sha256" in offered and set(offered) <= modern | markers, ended.err


@pytest.mark.parametrize(
    "algorithm", ["diffie-hellman-group14-sha256", "diffie-hellman-group18-sha512", "ecdh-sha2-nistp521"]
)
async def test_expensive_key_exchanges_are_not_offered(
    ssh_gateway: SshGatewayWithSshd, algorithm: str
) -> None:
    ended = await ssh_gateway.ssh("-o", f"KexAlgorithms={algorithm}", "echo in")
    assert ended.code == 255 and "no matching key exchange method found" in ended.err


async def test_keys_are_renewed_by_volume_and_not_without_end(ssh_gateway: SshGatewayWithSshd) -> None:
    data = bytes(8 << 20)
    ended = await ssh_gateway.ssh("-v", "-o", "RekeyLimit=1M", "wc -c", stdin=data)
    assert (ended.code, ended.out.strip()) == (0, str(len(data))), ended.err
    assert 6 <= ended.err.count("SSH2_MSG_NEWKEYS received") <= 20
    ended = await ssh_gateway.ssh("-o", "RekeyLimit=16K", "wc -c", stdin=data)
    assert ended.code == 255 and "keys were exchanged too often" in ended.err
    await _owner_logs_in(ssh_gateway)


async def test_logins_that_never_finish_from_many_addresses(ssh_gateway: SshGatewayWithSshd) -> None:
    """More connections than there are places for, of more networks than could be told apart by a share."""
    opened: list[socket.socket] = []
    try:
        for number in range(300):
            address = f"127.1.{number % 60}.1"
            made = socket.create_connection(("127.0.0.1", ssh_gateway.port), source_address=(address, 0))
            made.sendall(b"SSH-2.0-stranger\r\n")
            opened.append(made)
            await asyncio.sleep(0)
        async with _api_is_asked(ssh_gateway) as took:
            for _ in range(3):
                await _owner_logs_in(ssh_gateway)
        assert max(took) < _API_LATENCY
    finally:
        for made in opened:
            made.close()


async def test_wrong_tokens_do_not_lock_the_owner_out(ssh_gateway: SshGatewayWithSshd) -> None:
    """Neither those of other addresses for its VM, nor those of its own address."""

    async def guess(source: str) -> None:
        with contextlib.suppress(asyncssh.Error, OSError):
            await asyncssh.connect(
                "127.0.0.1",
                ssh_gateway.port,
                local_addr=(source, 0),
                known_hosts=None,
                config=None,
                username=f"{ssh_gateway.api.vm},{_WRONG}",
                client_keys=None,
                agent_path=None,
            )

    for _ in range(6):
        own = [guess("127.0.9.9") for _ in range(10)]
        await asyncio.gather(*own, *[guess(f"127.2.0.{number}") for number in range(1, 21)])
    guesses = [asyncio.create_task(guess("127.0.9.9")) for _ in range(10)]
    for _ in range(3):
        await _owner_logs_in(ssh_gateway)
    await asyncio.gather(*guesses)


_FLOOD = """
import asyncio, sys, asyncssh

async def connect(port, source):
    while True:
        try:
            await asyncssh.connect("127.0.0.1", port, local_addr=(source, 0), known_hosts=None, config=None,
                username="stranger", client_keys=None, agent_path=None, preferred_auth="none")
        except (asyncssh.Error, OSError):
            pass

async def main():
    port = int(sys.argv[1])
    print("begun", flush=True)
    await asyncio.gather(*[connect(port, f"127.3.{number % 8}.1") for number in range(32)])

asyncio.run(main())
"""


async def test_a_flood_of_key_exchanges_leaves_the_api_its_time(ssh_gateway: SshGatewayWithSshd) -> None:
    flood = await ssh_gateway.start(sys.executable, "-c", _FLOOD, str(ssh_gateway.port))
    try:
        assert flood.stdout is not None
        await asyncio.wait_for(flood.stdout.readline(), WAIT)
        async with _api_is_asked(ssh_gateway) as took:
            await asyncio.sleep(2)
            await _owner_logs_in(ssh_gateway)
            await asyncio.sleep(2)
        assert flood.returncode is None
        assert sorted(took)[int(len(took) * 0.9)] < _API_LATENCY
    finally:
        flood.kill()
        await flood.communicate()

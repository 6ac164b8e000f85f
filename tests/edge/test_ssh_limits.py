"""Limits of the SSH gateway for failed logins and silent connections, its log, its host key: real clients."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncssh
import pytest
import pytest_asyncio

from stead.edge.ssh import client_access
from stead.edge.ssh.access import Access, Login
from stead.edge.ssh.gateway import GatewayLimits
from stead.guest.watchdog import watching_the_loop
from support.run_cli import Shell
from support.ssh_gateway_with_sshd import WAIT, Ended, SshGatewayWithSshd, ssh_gateway_with_sshd
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root", "network")

_WRONG = "stid_" + "x" * 43
_INTERVAL = 60.0
_PROMPTS = ("-o", "PreferredAuthentications=password", "-o", "NumberOfPasswordPrompts=9")


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


async def _login(
    ssh_gateway: SshGatewayWithSshd, source: str, token: str | None = None, vm: str | None = None
) -> Ended:
    return await ssh_gateway.ssh(
        *("-b", source, "echo in"), login=f"{vm or ssh_gateway.api.vm},{token or ssh_gateway.token}"
    )


async def test_failed_logins_of_a_network_become_slow_and_a_valid_token_does_not(
    ssh_gateway: SshGatewayWithSshd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = GatewayLimits(100, failures=2, failure_interval=_INTERVAL)
    async with ssh_gateway.limited(limits) as limited:
        caplog.set_level(logging.WARNING)
        for _ in range(4):
            ended = await _login(limited, "127.0.0.5", _WRONG)
            assert ended.code == 255 and "unknown VM or token" in ended.err
        refused = [each for each in caplog.records if 'event="ssh login refused"' in each.getMessage()]
        assert len(refused) == 2, "later ones are not logged"
        # Of the three attempts of a connection, only the first is answered then.
        ended = await limited.ssh_with_password(_WRONG, "-b", "127.0.0.5", *_PROMPTS)
        assert ended.code == 255 and ended.err.count("Permission denied, please try again") == 0, ended.err
        # A login that waited as long as a refusal would take longer than ssh may.
        monkeypatch.setattr(client_access, "_REFUSAL_DELAY", 2 * WAIT)
        assert (await _login(limited, "127.0.0.5")).out == "in\n"
        assert (await limited.ssh_with_password(ssh_gateway.token, "-b", "127.0.0.5")).out == "in\n"


async def test_a_connection_has_three_attempts(ssh_gateway: SshGatewayWithSshd) -> None:
    ended = await ssh_gateway.ssh_with_password(_WRONG, "-b", "127.0.0.5", *_PROMPTS)
    assert ended.code == 255 and ended.out == ""
    assert ended.err.count("Permission denied, please try again") == 2
    assert "unknown VM or token" in ended.err, "the gateway ends it"


async def test_another_client_library_logs_in(ssh_gateway: SshGatewayWithSshd) -> None:
    where = {"host": "127.0.0.1", "port": ssh_gateway.port, "known_hosts": None, "config": None}
    options = {**where, "username": ssh_gateway.api.vm, "client_keys": None, "agent_path": None}
    with pytest.raises(asyncssh.PermissionDenied):
        await asyncssh.connect(**options, password=_WRONG)
    async with asyncssh.connect(**options, password=ssh_gateway.token) as connection:
        assert (await connection.run("id -un")).stdout == "root\n"
        assert connection.get_extra_info("server_version") == "SSH-2.0-Stead"


async def test_silent_connections_are_closed_in_time(ssh_gateway: SshGatewayWithSshd) -> None:
    async with ssh_gateway.limited(GatewayLimits(100, login_timeout=3)) as limited:
        reader, writer = await asyncio.open_connection("127.0.0.1", limited.port)
        assert await asyncio.wait_for(reader.readline(), WAIT) == b"SSH-2.0-Stead\r\n"
        assert b"SSH-2.0" not in await asyncio.wait_for(reader.read(), WAIT)
        writer.close()


async def test_a_new_connection_gets_the_place_of_a_silent_one(ssh_gateway: SshGatewayWithSshd) -> None:
    limits = GatewayLimits(100, unauthenticated=4, unauthenticated_per_network=2)

    async def silent(source: str) -> asyncio.StreamReader:
        made = socket.create_connection(("127.0.0.1", limited.port), source_address=(source, 0))
        reader, writer = await asyncio.open_connection(sock=made)
        opened.append(writer)
        assert await asyncio.wait_for(reader.readline(), WAIT) == b"SSH-2.0-Stead\r\n"
        return reader

    async def open_ones() -> int:
        return sum(not reader.at_eof() for reader in readers)

    opened: list[asyncio.StreamWriter] = []
    async with ssh_gateway.limited(limits) as limited:
        readers = [await silent("127.0.0.7") for _ in range(3)]
        await until(lambda: _are(open_ones, 2), WAIT)
        readers += [await silent("127.0.0.8"), await silent("127.0.0.9")]
        assert await open_ones() == 4
        assert (await _login(limited, "127.0.0.10")).out == "in\n"
        await until(lambda: _are(open_ones, 3), WAIT)
        for writer in opened:
            writer.close()


async def test_an_account_cannot_take_all_connections_nor_an_identity_those_of_its_account(
    ssh_gateway: SshGatewayWithSshd,
) -> None:
    """A quarter of 16, and half of that."""
    _, token = await ssh_gateway.token_for()
    login = f"{ssh_gateway.api.vm},{token}"
    async with ssh_gateway.limited(GatewayLimits(16)) as limited:
        async with limited.connected(), limited.connected():
            ended = await limited.ssh("echo in")
            assert ended.code == 255 and "max 4 for an account, 2 for an identity" in ended.err
            assert (await limited.ssh("echo in", login=login)).out == "in\n"
        assert (await limited.ssh("echo in")).out == "in\n"


async def _are(count: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await count() == wanted


async def test_refusals_are_logged_with_the_trace_id_that_the_client_is_told(
    ssh_gateway: SshGatewayWithSshd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = ssh_gateway.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    for token, why in [(_WRONG, "unknown VM or token"), (key, "API keys are not accepted here")]:
        ended = await _login(ssh_gateway, "127.0.0.9", token)
        trace = re.search(r"\(trace ([0-9a-f]{32})\)", ended.err)
        assert why in ended.err and trace, ended.err
        (record,) = [
            each.__dict__["fields"]
            for each in caplog.records
            if each.name == "stead.ssh" and each.levelno == logging.WARNING and trace[1] in each.getMessage()
        ]
        assert (record["trace"], record["address"], record["vm"]) == (
            trace[1],
            "127.0.0.9",
            ssh_gateway.api.vm,
        )
        assert why in record["reason"]
    assert (await _login(ssh_gateway, "127.0.0.9")).out == "in\n"

    def ended_in_log() -> bool:
        return any(
            "ssh connection ended" in each.getMessage() and each.__dict__["fields"].get("identity")
            for each in caplog.records
            if each.name == "stead.ssh"
        )

    assert await until(ended_in_log, 60)
    logged = [each.getMessage() for each in caplog.records]
    assert not [line for line in logged for secret in (_WRONG, key, ssh_gateway.token) if secret in line]


async def test_a_login_that_holds_the_event_loop_is_named_in_the_log(
    ssh_gateway: SshGatewayWithSshd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Access.check

    async def hold(self: Access, vm: str, user: str | None, token: str) -> Login:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        return await check(self, vm, user, token)

    monkeypatch.setattr(Access, "check", hold)
    with caplog.at_level(logging.WARNING, "stead.watchdog"):
        async with watching_the_loop():
            assert (await ssh_gateway.ssh("echo in")).out == "in\n"

            def named() -> bool:
                held = [line for line in caplog.messages if "event loop was held" in line]
                return any('call="SSH connection from 127.0.0.1"' in line for line in held)

            await until(named, 60)


# The host key


async def test_the_host_key_outlives_a_restart(ssh_gateway: SshGatewayWithSshd) -> None:
    """A client that has pinned it is not asked, and only the owner of the data folder can read it."""
    assert (await ssh_gateway.ssh("echo in")).out == "in\n"
    pinned = (ssh_gateway.home / "known_hosts").read_text().split(maxsplit=1)[1]
    async with ssh_gateway.limited(GatewayLimits(100)) as restarted:
        (ssh_gateway.home / "pinned").write_text(f"[127.0.0.1]:{restarted.port} {pinned}")
        command = restarted.ssh_command("echo in")
        command = [each.replace("/known_hosts", "/pinned") for each in command]
        assert (await ssh_gateway.run(*command)).out == "in\n"
    key = ssh_gateway.api.installation.settings.data / "ssh-host-key"
    assert key.stat().st_mode & 0o777 == 0o600


async def test_vm_ssh_refuses_another_host_key_and_sends_no_token(
    ssh_gateway: SshGatewayWithSshd, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks nothing: the key comes from the API, and the known_hosts of the user is not read."""
    caplog.set_level(logging.INFO)
    shell, here = Shell(ssh_gateway.api.url, _key(ssh_gateway)), ssh_gateway.api.installation
    first = await shell.try_("vm", "ssh", ssh_gateway.api.vm, "echo in")
    assert (first.returncode, first.stdout, first.stderr) == (0, "in\n", "")
    before, real = (await here.identities.list(ssh_gateway.api.account)).total, here.ssh.host_key
    caplog.clear()
    here.ssh.host_key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
    try:
        refused = await shell.try_("vm", "ssh", ssh_gateway.api.vm, "echo in")
    finally:
        here.ssh.host_key = real
    assert refused.returncode == 255 and refused.stdout == ""
    assert "Host key verification failed" in refused.stderr
    assert not [each for each in caplog.records if each.getMessage().startswith('event="ssh login"')]
    assert (await here.identities.list(ssh_gateway.api.account)).total == before


def _key(ssh_gateway: SshGatewayWithSshd) -> str:
    return ssh_gateway.api.callers["owner"]["Authorization"].removeprefix("Bearer ")

"""Limits of the SSH gateway for guesses and silent connections, its log and its host key: real clients."""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest
import pytest_asyncio

from stead.edge.ssh import gateway
from stead.edge.ssh.client import GatewayLimits
from stead.edge.ssh.failures import ConnectionPlaces, FailureLimit
from stead.edge.ssh.gateway import default_limits
from stead.machines.records import Properties
from support.run_cli import Shell
from support.ssh_gateway_with_sshd import WAIT, Ended, SshGatewayWithSshd, ssh_gateway_with_sshd
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root", "network")

_WRONG = "stid_" + "x" * 43
_INTERVAL = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest_asyncio.fixture(scope="module")
async def ssh_gateway(root: None, network: None, cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    async with ssh_gateway_with_sshd(cache) as ssh_gateway:
        yield ssh_gateway


def _limits(clock: Clock, *, address: int = 100, vm: int = 100) -> GatewayLimits:
    return replace(
        default_limits(100),
        by_address=FailureLimit(address, _INTERVAL, clock=clock),
        by_vm=FailureLimit(vm, _INTERVAL, clock=clock),
    )


async def _login(
    ssh_gateway: SshGatewayWithSshd, source: str, token: str | None = None, vm: str | None = None
) -> Ended:
    return await ssh_gateway.ssh(
        *("-b", source, "echo in"), login=f"{vm or ssh_gateway.api.vm},{token or ssh_gateway.token}"
    )


async def test_guesses_of_an_address_are_limited(ssh_gateway: SshGatewayWithSshd) -> None:
    clock = Clock()
    async with ssh_gateway.limited(_limits(clock, address=3)) as limited:
        for _ in range(3):
            ended = await _login(limited, "127.0.0.5", _WRONG)
            assert ended.code == 255 and "unknown VM or token" in ended.err
        refused = await _login(limited, "127.0.0.5")
        assert refused.code == 255 and refused.out == "" and "trace" not in refused.err, "closed at once"
        assert (await _login(limited, "127.0.0.6")).out == "in\n"
        clock.now += _INTERVAL
        assert (await _login(limited, "127.0.0.5")).out == "in\n"


async def test_guesses_for_a_vm_are_limited_over_all_addresses(ssh_gateway: SshGatewayWithSshd) -> None:
    clock, machines = Clock(), ssh_gateway.api.installation.machines
    other = await machines.create(Properties(account=ssh_gateway.api.account))
    _, token = await ssh_gateway.token_for(vm=other.id)
    async with ssh_gateway.limited(_limits(clock, vm=3)) as limited:
        for number in range(3):
            assert (await _login(limited, f"127.0.1.{number}", _WRONG)).code == 255
        refused = await _login(limited, "127.0.1.9")
        assert refused.code == 255 and f"too many failed logins: try again in {_INTERVAL:g} s" in refused.err
        assert (await _login(limited, "127.0.1.9", token, other.id)).out == "in\n"
        clock.now += _INTERVAL
        assert (await _login(limited, "127.0.1.9")).out == "in\n"
    await other.delete()


async def test_passwords_that_are_guessed_in_one_connection_count_one_by_one(
    ssh_gateway: SshGatewayWithSshd,
) -> None:
    clock = Clock()
    async with ssh_gateway.limited(_limits(clock, address=4)) as limited:
        ended = await limited.ssh_with_password(_WRONG, "-b", "127.0.0.5", "-o", "NumberOfPasswordPrompts=9")
        assert ended.code == 255 and ended.out == ""
        assert "unknown VM or token" in ended.err, "the gateway ends it, after three attempts"
        assert (await _login(limited, "127.0.0.5")).out == "in\n", "one is left"
        assert (await _login(limited, "127.0.0.5", _WRONG)).code == 255
        assert (await _login(limited, "127.0.0.5")).out == ""


async def test_another_client_library_is_limited_too(ssh_gateway: SshGatewayWithSshd) -> None:
    async with ssh_gateway.limited(_limits(Clock(), address=2)) as limited:
        where = {"host": "127.0.0.1", "port": limited.port, "known_hosts": None, "config": None}
        options = {**where, "username": ssh_gateway.api.vm, "client_keys": None, "agent_path": None}
        async with asyncssh.connect(**options, password=ssh_gateway.token) as connection:
            assert (await connection.run("id -un")).stdout == "root\n"
            assert connection.get_extra_info("server_version") == "SSH-2.0-Stead"
        for _ in range(2):
            with pytest.raises(asyncssh.PermissionDenied):
                await asyncssh.connect(**options, password=_WRONG)
        with pytest.raises((asyncssh.ConnectionLost, ConnectionError)):
            await asyncssh.connect(**options, password=ssh_gateway.token)


async def test_silent_connections_leave_room_for_others(
    ssh_gateway: SshGatewayWithSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_LOGIN_TIMEOUT", 3)
    limits = replace(_limits(Clock()), unauthenticated=ConnectionPlaces(4, 2))

    async def silent(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = socket.create_connection(("127.0.0.1", limited.port), source_address=(source, 0))
        return await asyncio.open_connection(sock=made)

    async with ssh_gateway.limited(limits) as limited:
        opened = [await silent("127.0.0.7") for _ in range(3)]
        banners = [await asyncio.wait_for(reader.readline(), WAIT) for reader, _ in opened]
        assert banners == [b"SSH-2.0-Stead\r\n", b"SSH-2.0-Stead\r\n", b""]
        assert (await _login(limited, "127.0.0.8")).out == "in\n"
        ends = [await asyncio.wait_for(reader.read(), WAIT) for reader, _ in opened[:2]]
        assert all(end.count(b"\r\n") == 0 or b"SSH-2.0" not in end for end in ends), (
            "closed after the time-out"
        )
        for _, writer in opened:
            writer.close()
        assert (await _login(limited, "127.0.0.7")).out == "in\n"


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


# The host key


async def test_the_host_key_outlives_a_restart(ssh_gateway: SshGatewayWithSshd) -> None:
    """A client that has pinned it is not asked, and only the owner of the data folder can read it."""
    assert (await ssh_gateway.ssh("echo in")).out == "in\n"
    pinned = (ssh_gateway.home / "known_hosts").read_text().split(maxsplit=1)[1]
    async with ssh_gateway.limited(default_limits(100)) as restarted:
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

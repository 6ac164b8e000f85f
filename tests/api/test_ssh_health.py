"""An SSH gateway that cannot serve: the operator sees it, and it is tried again. VMs are in memory."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead import installation
from stead.edge.ssh.gateway import SshGateway
from stead.errors import HostError
from stead.host.examination import Finding, ssh_gateway
from stead.settings import Settings
from stead.supervision import Backoff, ProcessCommand
from support.fake_api import FakeApi, fake_api
from support.scripted_server import free_port
from support.waiting import until


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path) as api:
        yield api


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_SSH_RESTART", Backoff(0.05, 0.2, 60.0))


async def health(api: FakeApi) -> str:
    async with httpx2.AsyncClient() as client:
        answer = await client.get(f"{api.url}/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    return str(answer.json()["ssh"])


async def doctor(api: FakeApi, port: int) -> Finding:
    """What `stead doctor` says on the host of this server."""
    listen = api.url.removeprefix("http://")
    return await ssh_gateway(Settings(listen=listen, ssh_listen=f"127.0.0.1:{port}"))


async def greeting(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(reader.readline(), 30)
    finally:
        writer.close()


@pytest.mark.usefixtures("root")
async def test_a_port_in_use_is_reported_and_served_once_it_is_free(api: FakeApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        keeping = installation.keep_ssh_gateway(api.installation, ("127.0.0.1", port))
        await keeping.__aenter__()
        try:
            assert await health(api) == "failed"
            found = await doctor(api, port)
            assert found.status == "degraded" and f"failed on 127.0.0.1:{port}" in found.what
            async with api.http() as client:
                answer = await client.get(f"{api.url}/v1/ssh")
            assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
            assert "tried again" in answer.json()["message"]
            other.close()

            async def serving() -> bool:
                return await health(api) == "serving"

            await until(serving, 30)
            assert (await greeting(port)).startswith(b"SSH-2.0-Stead")
            assert (await doctor(api, port)).status == "ok"
            assert api.installation.ssh.port == port
        finally:
            await keeping.__aexit__(None, None, None)
    assert await health(api) == "off"


@pytest.mark.usefixtures("root")
async def test_a_gateway_that_crashes_at_its_start_is_started_again(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error is, and although the attempt has closed the socket that was bound for it."""
    real, attempts = SshGateway.command, 0

    def failing(gateway: SshGateway, *sockets: socket.socket) -> ProcessCommand:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            error = (RuntimeError("broken"), MemoryError(), OSError(24, "Too many open files"))[attempts - 1]
            raise error
        return ProcessCommand(["false"]) if attempts == 4 else real(gateway, *sockets)

    monkeypatch.setattr(SshGateway, "command", failing)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = bound.getsockname()
        async with installation.keep_ssh_gateway(api.installation, address, bound):
            assert await health(api) == "failed"
            await until(lambda: _is(api, "serving"), 30)
            assert attempts == 5
            assert (await greeting(address[1])).startswith(b"SSH-2.0-Stead")


async def _is(api: FakeApi, state: str) -> bool:
    return api.installation.ssh.state == state


async def test_a_server_without_an_ssh_gateway_says_so(api: FakeApi) -> None:
    async with installation.keep_ssh_gateway(api.installation, None):
        assert await health(api) == "off"
    assert (await ssh_gateway(Settings(ssh_listen=""))).status == "ok"


async def test_doctor_without_a_server_looks_at_the_port() -> None:
    listen = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        found = await ssh_gateway(Settings(listen=listen, ssh_listen=taken))
        assert found.status == "degraded" and "Address already in use" in found.what
    found = await ssh_gateway(Settings(listen=listen, ssh_listen=taken))
    assert found.status == "ok" and "no server is running" in found.what


def test_a_default_ssh_port_in_use_does_not_stop_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that the operator has chosen does."""
    local = "127.0.0.1:0"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[:2]
        chosen = Settings(
            listen=local, https_listen=local, http_listen=local, ssh_listen=f"127.0.0.1:{taken[1]}"
        )
        with pytest.raises(HostError, match="cannot listen"), installation.bind(chosen):
            pass
        monkeypatch.setattr(Settings, "ssh_address", taken)
        default = Settings(listen=local, https_listen=local, http_listen=local)
        with installation.bind(default) as listeners:
            assert (listeners.ssh, listeners.ssh_address) == (None, taken)

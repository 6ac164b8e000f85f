"""The API behind nginx, with the configuration that docs/operate.md has. VMs are in memory."""

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from stead.host.authority import Authority, create_root
from stead.settings import Settings
from support.debian_packages import unpacked
from support.documents import run_by
from support.fake_api import FakeApi, fake_api
from support.waiting import until

_NAME = "stead.example.com"


@dataclass(frozen=True)
class Proxied:
    fake_server: FakeApi
    port: int
    trusting: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> httpx2.AsyncClient:
        headers = self.fake_server.callers["owner"]
        return httpx2.AsyncClient(base_url=self.url, headers=headers, verify=self.trusting, timeout=60)


def _configuration(folder: Path, api: str, port: int) -> Path:
    """The part of the page, for a user without privileges."""
    (block,) = run_by(__file__, "docs/operate.md")
    fake_server = block.body.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    fake_server = fake_server.replace("http://127.0.0.1:8600", api).replace("/etc/ssl/", f"{folder}/")
    for name in ("client", "proxy", "fastcgi", "uwsgi", "scgi"):
        fake_server = f"{name}_{'body_' if name == 'client' else ''}temp_path {folder}/{name};\n{fake_server}"
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{fake_server}}}\n"
    )
    return path


@pytest_asyncio.fixture(scope="module")
async def proxied(
    network: None, root: None, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Proxied]:
    folder = tmp_path_factory.mktemp("proxy")
    create_root(folder / "ca", "CA of the proxy", ())
    authority = Authority.open(Settings(data=folder, ca=folder / "ca"))
    pair = authority.server_certificate([_NAME, "127.0.0.1"])
    (folder / f"{_NAME}.pem").write_bytes(pair.certificate)
    (folder / f"{_NAME}.key").write_bytes(pair.key)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    program = shutil.which("nginx", path="/usr/sbin") or unpacked(cache, "nginx") / "usr/sbin/nginx"
    (folder / "site").mkdir()
    async with fake_api(folder / "site") as fake_server:
        nginx = await asyncio.create_subprocess_exec(
            program, "-p", str(folder), "-c", str(_configuration(folder, fake_server.url, port))
        )
        try:

            async def listening() -> bool:
                assert nginx.returncode is None
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return True
                return False

            await until(listening, 60)
            trusting = ssl.create_default_context(cadata=authority.certificate.decode())
            yield Proxied(fake_server, port, trusting)
        finally:
            nginx.kill()
            await nginx.wait()


async def test_calls_pass_nginx_unchanged(proxied: Proxied) -> None:
    """Also those with percent-encoded slashes and large bodies; metrics stay inside."""
    large = b'{"command": 1, "x": "' + b"x" * (2 << 20) + b'"}'
    calls = (
        ("GET", "/v1/vms", b""),
        ("GET", f"/v1/vms/{proxied.fake_server.vm}%2Fother", b""),
        ("POST", f"/v1/vms/{proxied.fake_server.vm}/exec-await", large),
    )
    async with proxied.client() as outside, httpx2.AsyncClient(base_url=proxied.fake_server.url) as inside:
        for method, path, body in calls:
            direct = await inside.request(
                method, path, content=body, headers=proxied.fake_server.callers["owner"]
            )
            passed = await outside.request(method, path, content=body)
            assert passed.status_code == direct.status_code, passed.text
            assert passed.json() == direct.json()
        assert (await inside.get("/metrics")).status_code == 200
        assert (await outside.get("/metrics")).status_code == 404


async def test_terminals_pass_nginx(proxied: Proxied) -> None:
    url = f"wss://127.0.0.1:{proxied.port}/v1/vms/{proxied.fake_server.vm}/pty?sessionId=web"
    headers = proxied.fake_server.callers["owner"]
    async with connect(url, additional_headers=headers, ssl=proxied.trusting) as terminal:
        assert json.loads(await terminal.recv())["sessionId"] == "web"
        await terminal.send(b"ls\r")
        await until(lambda: proxied.fake_server.session("web").received == b"ls\r", 60)

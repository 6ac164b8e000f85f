"""A public installation, as docs/public-installation.md has it, seen from another host.

`STEAD_DOMAIN` is the one setting that matters; certificates come from an ACME server on the other host.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead.host.image import BaseImage
from stead.settings import Settings
from support.acme_server import AcmeServer
from support.documents import commands, run_by
from support.installations import other_settings
from support.npm import Ended
from support.remote_host import RemoteHost, remote_host
from support.run_cli import PROGRAM
from support.serve_process import client_of, serving
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
_DOMAIN = "stead.example.com"
_PORTS = {"HTTPS": 443, "HTTP": 80, "SSH": 22}
_PAGE = "systemd-run --quiet --unit=site --working-directory=/srv python3 -m http.server 8000"


@dataclass(frozen=True)
class Client:
    """A user on the other host, which trusts the CA of the ACME server and no other one."""

    host: RemoteHost
    home: Path
    environment: dict[str, str]
    said: dict[str, Any]
    """What `stead serve` printed."""

    async def run(self, *command: str, limit: float = 300) -> Ended:
        process = await asyncio.create_subprocess_exec(
            *self.host.command(*command),
            cwd=self.home,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(limit):
            stdout, stderr = await process.communicate()
        return Ended(process.returncode or 0, stdout.decode(), stderr.decode())

    async def succeeds(self, *command: str, limit: float = 300) -> str:
        ended = await self.run(*command, limit=limit)
        assert ended.status == 0, f"{command}: {ended.stdout}\n{ended.stderr}"
        return ended.stdout

    async def stead(self, *arguments: str) -> str:
        return (await self.succeeds(str(PROGRAM), *arguments)).strip()

    async def has_certificate(self, name: str) -> None:
        """Wait for the certificate of a name of the installation: each is ordered on its own."""

        async def connects() -> bool:
            ended = await self.run("curl", "-sS", "--max-time", "60", "-o", "/dev/null", f"https://{name}/")
            return ended.status == 0

        await until(connects, 180)


@pytest.fixture(scope="module")
def folder(root: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest_asyncio.fixture(scope="module")
async def client(settings: Settings, image: BaseImage, folder: Path) -> AsyncIterator[Client]:
    home = folder / "home"
    home.mkdir()
    records, start = run_by(__file__, "docs/public-installation.md")
    # The resolver of the other host has the records of the page: the name, and all names below it.
    assert [line.split()[0] for line in records.body.splitlines()] == [f"{_DOMAIN}.", f"*.{_DOMAIN}."]
    (command,) = commands(start.body)
    *variables_of_page, program, action = command.line.split()
    assert (program, action) == ("stead", "serve")
    with remote_host([_DOMAIN]) as host, other_settings(settings) as other:
        acme = AcmeServer(folder, address=host.address, found_at=host.this_host)
        async with acme.running(host.side) as found:
            listen = {f"STEAD_{name}_LISTEN": f"{host.this_host}:{port}" for name, port in _PORTS.items()}
            more = {
                **dict(each.split("=") for each in variables_of_page),
                "STEAD_ACME_DIRECTORY": found["acme_directory"],
                "STEAD_ACME_ROOTS": str(found["acme_roots"]),
                "STEAD_ALLOW_PRIVATE": str(host.network),
            }
            async with serving(other, **listen, **more) as (_, said):
                variables = {
                    "PATH": os.environ["PATH"],
                    "HOME": str(home),
                    "STEAD_API_URL": f"https://{_DOMAIN}",
                    "STEAD_API_KEY": said["key"],
                    "SSL_CERT_FILE": str(acme.roots),
                    "GIT_SSL_CAINFO": str(acme.roots),
                    "CURL_CA_BUNDLE": str(acme.roots),
                    "GIT_CONFIG_NOSYSTEM": "1",
                    "GIT_TERMINAL_PROMPT": "0",
                }
                yield Client(host, home, variables, said)
                async with client_of(said["url"], said["key"]) as http:
                    for vm in (await http.get("/v1/vms")).json()["vms"]:
                        await http.delete(f"/v1/vms/{vm['id']}")


async def test_api_git_previews_and_ssh_of_a_public_installation(client: Client) -> None:
    assert client.said["httpsUrl"] == f"https://{_DOMAIN}"
    for name in (_DOMAIN, f"api.{_DOMAIN}"):
        await client.has_certificate(name)
    curl = ("curl", "-sS", "--max-time", "60", "-o", "/dev/null", "-w", "%{http_code} %{redirect_url}")
    assert (await client.succeeds(*curl, f"https://{_DOMAIN}/healthz")).startswith("200")
    assert (await client.succeeds(*curl, f"https://api.{_DOMAIN}/healthz")).startswith("200")
    assert await client.succeeds(*curl, f"http://{_DOMAIN}/x") == f"308 https://{_DOMAIN}/x"

    vm = await client.stead("vm", "create")
    await client.stead("vm", "exec", vm, f"echo from the VM > /srv/page; {_PAGE}")
    await client.stead("vm", "exec", vm, "until curl -sf 127.0.0.1:8000/page; do sleep 0.2; done")
    url = await client.stead("vm", "url", vm, "8000")
    assert url.startswith("https://") and url.endswith(f".{_DOMAIN}"), url
    assert await client.succeeds("curl", "-sS", "--max-time", "60", f"{url}/page") == "from the VM\n"

    assert await client.stead("vm", "ssh", vm, "hostname") == vm
    gateway = await client.stead("vm", "ssh", vm, "-G")
    assert f"hostname ssh.{_DOMAIN}" in gateway.splitlines()

    # A VM knows the installation by the same names; it does not know the CA of the tests.
    inside = f"curl -sSk --max-time 60 https://{_DOMAIN}/healthz {url}/page"
    assert "from the VM" in await client.stead("vm", "exec", vm, inside)


async def test_git_of_a_public_installation(client: Client) -> None:
    repo = await client.stead("git", "create", "--name", "site")
    address = f"git.{_DOMAIN}/{repo}"
    await client.has_certificate(f"git.{_DOMAIN}")
    await client.succeeds("git", "clone", "-q", f"https://x:{client.said['key']}@{address}", "site")
    work = ("git", "-C", "site", "-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    (client.home / "site" / "page").write_text("hello\n")
    await client.succeeds(*work, "add", "page")
    await client.succeeds(*work, "commit", "-qm", "Add a page")
    await client.succeeds(*work, "push", "-q", "origin", "HEAD")
    await client.stead("git", "clone", repo, "again")
    assert (client.home / "again" / "page").read_text() == "hello\n"

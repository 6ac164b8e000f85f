"""Published guides with the npm package `freestyle` against `stead serve`: unchanged, by their real names.

`make trial-guides` runs them. `STEAD_GUIDES` is a folder with their text, which is not ours to copy.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stead.host.authority import Authority
from stead.host.commands import run
from stead.host.image import BaseImage
from stead.settings import Settings
from support import downloads
from support.guides import Guide, run_until_printed
from support.installations import other_settings
from support.npm import Npm
from support.remote_host import RemoteHost, remote_host
from support.run_cli import PROGRAM
from support.serve_process import client_of, environment, serving

_LIMIT = 7200.0
"""Seconds for one guide: without KVM, what it installs or compiles (Go's net/http) takes up to an hour."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * _LIMIT)]
GUIDES = [
    Guide(
        "run-python-in-a-sandbox",
        (
            r"^0$",
            r"^python 3\.\d+",
            r"^requests \d",
            r"^sum 45$",
            r"^hello 4$",
            r"^total: 12$",
            r"ValueError: boom",
            r"^A 222 / B 444$",
            r"^0$",
            r"^ready: true$",
            r"^200$",
            r"^Hello from a Python server",
            r"journalctl -u pyserver -f",
            r"systemd\[1\]: Started pyserver",
        ),
    ),
    Guide(
        "run-redis-in-a-sandbox",
        (r"^0$", r"^PONG$", r"^hello$", r"^1$", r"systemd\[1\]: Started redis-server"),
    ),
    Guide(
        "run-postgres-in-a-sandbox",
        (r"^ *1 \| apple$", r"^ *2 \| banana$", r"^\(2 rows\)$", r"systemd\[1\]: \S+ postgresql"),
    ),
    Guide(
        "run-nodejs-in-a-sandbox",
        (
            r"^v22\.",
            r"^\d+\.\d+\.\d+$",
            r"^0$",
            r"^node v22\.",
            r"^sum=15$",
            r"^HELLO$",
            r"^product=42$",
            r"^threw: node exited with status 3",
            r"^200$",
            r"^Hello from a Node.js server",
            r"listening on 0\.0\.0\.0:3000",
        ),
    ),
    Guide(
        "run-go-in-a-sandbox",
        (
            r"^go version go1\.",
            r"^0$",
            r"^sum= 15$",
            r"^HELLO$",
            r"^product=42$",
            r"^ONE\|TWO\|THREE$",
            r"^threw: go exited with status 1",
            r"'A= 100', 'B= 400', 'C= 900'",
            r"^200$",
            r"^Hello from a Go server",
            r"systemd\[1\]: Started go-server",
        ),
    ),
]


@dataclass(frozen=True)
class Reader:
    """A reader of the guides, on another host, for which the names that they use lead to Stead."""

    npm: Npm
    url: str
    """The API without TLS, for this host."""
    key: str
    root: Path
    host: RemoteHost

    async def follow(self, guide: Guide, program: str) -> None:
        module = self.npm.folder / f"{guide.name}.mts"
        module.write_text(program)
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.npm.folder),
            "FREESTYLE_API_KEY": self.key,
            "NODE_EXTRA_CA_CERTS": str(self.root),
        }
        command = self.host.command(self.npm.node22, "--no-warnings", module.name)
        await run_until_printed(command, self.npm.folder, variables, guide.prints, _LIMIT)

    async def clean_up(self) -> None:
        """Delete the VMs and snapshots that a guide leaves."""
        async with client_of(self.url, self.key) as http:
            for vm in (await http.get("/v1/vms")).json()["vms"]:
                await http.delete(f"/v1/vms/{vm['id']}")
            for snapshot in (await http.get("/v1/vms/snapshots")).json()["snapshots"]:
                await http.delete(f"/v1/vms/snapshots/{snapshot['snapshotId']}")


@pytest.fixture(scope="module")
def guides() -> Path:
    folder = os.environ.get("STEAD_GUIDES")
    if not folder:
        pytest.skip("needs the text of the guides: set STEAD_GUIDES to a folder with it")
    return Path(folder)


@pytest_asyncio.fixture(scope="module")
async def reader(guides: Path, settings: Settings, image: BaseImage, package: Npm) -> AsyncIterator[Reader]:
    with remote_host(["style.dev", "api.freestyle.sh"]) as host, other_settings(settings) as other:
        more = {
            "STEAD_HTTPS_LISTEN": f"{host.this_host}:443",
            "STEAD_HTTP_LISTEN": f"{host.this_host}:80",
            "STEAD_ALLOW_PRIVATE": str(host.network),
        }
        async with serving(other, **more) as (_, said):
            root = package.folder / "root.crt"
            root.write_bytes((await run(PROGRAM, "trust", "--print", env=environment(other))).stdout)
            # Where dnsmasq, which VMs ask, finds names of hosts.
            names = other.runtime / "names" / other.instance / "hosts" / "downloads"
            with contextlib.ExitStack() as stack:
                await _publish_downloads(stack, host, other, package, names)
                yield Reader(package, said["url"], said["key"], root, host)


async def _publish_downloads(
    stack: contextlib.ExitStack, host: RemoteHost, settings: Settings, npm: Npm, names: Path
) -> None:
    """Let VMs find what guides download on the other host, as far as it is not reachable."""
    missing = downloads.unreachable()
    if missing:
        folder = await host.serve(stack, missing, Authority.open(settings))
        downloads.publish_go(folder, "1.24.4")
        downloads.publish_node(folder, npm, "v0.40.3")
        names.write_text("".join(f"{host.address} {name}\n" for name in missing))
        stack.callback(names.unlink)


@pytest.mark.parametrize("guide", [pytest.param(guide, id=guide.name) for guide in GUIDES])
async def test_a_published_guide_runs_unchanged(reader: Reader, guides: Path, guide: Guide) -> None:
    program = guide.program(guides)
    if program is None:
        pytest.skip(f"{guides} has no guide {guide.name}")
    try:
        await reader.follow(guide, program)
    finally:
        await reader.clean_up()

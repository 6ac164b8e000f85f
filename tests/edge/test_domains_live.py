"""Domains of real VMs over HTTPS: create, move, suspend, unmap, delete; with the SDK and curl."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio

from stead import AsyncStead
from stead.edge.listeners import bind_public
from stead.host.authority import Authority
from stead.installation import open_edge
from stead.sdk import AsyncVm
from stead.settings import Settings
from support.api_calls import new_account
from support.installations import Server

_SERVE = "mkdir -p /srv/site && echo {text} > /srv/site/index.html && systemd-run --unit site \
python3 -m http.server 3000 --directory /srv/site"


@dataclass(frozen=True)
class Site:
    stead: AsyncStead
    root: Path
    port: int

    async def get(self, host: str, *options: str) -> tuple[int, str]:
        """Status and body of a GET by curl, which trusts the installation's CA alone."""
        done = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--cacert", str(self.root), "--max-time", "120", "-w", "\n%{http_code}"),
            *("--resolve", f"{host}:{self.port}:127.0.0.1", *options, f"https://{host}:{self.port}/"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await done.communicate()
        assert done.returncode == 0, stderr.decode()
        body, _, status = stdout.decode().rpartition("\n")
        return int(status), body.strip()


@pytest_asyncio.fixture
async def site(server: Server, settings: Settings, tmp_path: Path) -> AsyncIterator[Site]:
    _, key = await new_account(server, "domains-live")
    public_settings = settings.replace(https_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    root = tmp_path / "root.crt"
    async with contextlib.AsyncExitStack() as stack:
        public = stack.enter_context(bind_public(public_settings))
        edge = await stack.enter_async_context(open_edge(server.installation, public))
        root.write_bytes(Authority.open(settings).certificate)
        stead = await stack.enter_async_context(AsyncStead(key, base_url=server.url))
        yield Site(stead, root, edge.https_port)


async def serve(vm: AsyncVm, text: str) -> None:
    await vm.exec(_SERVE.format(text=text), check=True)


async def test_names_follow_their_vms(site: Site) -> None:
    stead = site.stead
    name = "live-domains.style.dev"
    async with await stead.vms.create(domains={name: 3000}) as blue, await stead.vms.create() as green:
        assert blue.domains == (name,)
        await asyncio.gather(serve(blue, "blue"), serve(green, "green"))
        assert await site.get(name) == (200, "blue")
        url = await blue.url(3000)
        preview = url.removeprefix("https://").removesuffix(f":{site.port}")
        assert url == f"https://{preview}:{site.port}" and preview.endswith(".stead.localhost")
        assert await site.get(preview) == (200, "blue")

        seen: list[tuple[int, str]] = []

        async def keep_asking() -> None:
            while True:
                seen.append(await site.get(name))

        asking = asyncio.create_task(keep_asking())
        for vm in (green, blue, green):
            count = len(seen)
            await stead.domains.mappings.create(name, vm=vm.id, port=3000)
            while len(seen) < count + 5:
                assert not asking.done(), asking.exception()
                await asyncio.sleep(0.05)
        asking.cancel()
        assert {status for status, _ in seen} == {200}
        assert {body for _, body in seen} == {"blue", "green"}
        assert await site.get(name) == (200, "green")
        assert await site.get(preview) == (200, "blue")

        await green.suspend()
        answers = await asyncio.gather(*(site.get(name) for _ in range(10)))
        assert answers == [(200, "green")] * 10
        assert (await green.info()).state == "running"

        await stead.domains.mappings.delete(name)
        status, _ = await site.get(name)
        assert status == 404
        await stead.domains.mappings.create(name, vm=green.id, port=3001)
        status, text = await site.get(name, "-H", "Accept: application/json")
        assert status == 502 and "3001" in text
        await stead.domains.mappings.create(name, vm=green.id, port=3000)
        assert await site.get(name) == (200, "green")
    status, _ = await site.get(name)
    assert status == 404

"""Domains with the npm package `freestyle` 0.1.63, its library and its command line. VMs are in memory."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from stead.domains.verification import Verifier
from support.fake_api import FakeApi, fake_api
from support.npm import Ended, Npm
from support.waiting import until


class Records(dict[str, list[str]]):
    """TXT records by name. Over HTTP, a PUT of `{name: [values]}` replaces all of them."""

    async def lookup(self, name: str) -> list[str]:
        return self.get(name, [])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        self.clear()
        self.update(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()


@dataclass
class User:
    """A user of the npm package, and the TXT records that the server sees."""

    npm: Npm
    api: FakeApi
    records: Records = field(default_factory=Records)

    def key(self, caller: str) -> str:
        return self.api.callers[caller]["Authorization"].removeprefix("Bearer ")

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "FREESTYLE_API_URL": self.api.url,
            "FREESTYLE_API_KEY": self.key("owner"),
            "ACCOUNT": self.api.account,
            "VM_ID": self.api.vm,
            **more,
        }

    async def cli(self, *arguments: str) -> Ended:
        return await self.npm.cli(*arguments, environment=self.environment())


@pytest_asyncio.fixture
async def user(package: Npm, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[User]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        user = User(package, api)
        api.installation.domains._verifier = Verifier(user.records.lookup)
        yield user


async def test_npm_domains(user: User) -> None:
    """The domain pages of the docs: verify, complete by domain and by id, list, cancel, map, move, unmap."""
    serving = await asyncio.start_server(user.records.serve, "127.0.0.1", 0)
    async with serving:
        port = serving.sockets[0].getsockname()[1]
        more = {"RECORDS": f"http://127.0.0.1:{port}/", "OTHER_KEY": user.key("stranger")}
        await user.npm.script("domains", user.environment(**more), 120)
    domains = user.api.installation.domains
    await until(lambda: domains.mapped_names() == [], 60)
    assert await domains.owned(user.api.account, implicit=True) == []


async def test_npm_cli_domains(user: User) -> None:
    """The page about the domains CLI, line by line, and `vm create --domain`."""
    pending = json.loads((await user.cli("domains", "verify", "example.com", "--json")).stdout)
    early = await user.cli("domains", "complete", "--domain", "example.com")
    assert early.status == 1 and early.stderr.startswith("Error: VERIFICATION_FAILED: ")
    assert pending["record"]["value"] in (await user.cli("domains", "verifications")).stdout
    user.records[pending["record"]["name"]] = [pending["record"]["value"]]
    completed = await user.cli("domains", "complete", "--verification-id", pending["verificationId"])
    assert completed.status == 0 and "example.com" in completed.stdout, completed
    assert re.search(r"^example\.com +yes", (await user.cli("domains", "list")).stdout, re.MULTILINE)
    rows = json.loads((await user.cli("domains", "list", "--json")).stdout)
    assert [row["domain"] for row in rows] == ["example.com"]

    vm = user.api.vm
    mapped = await user.cli("domains", "map", "app.example.com", "--vm-id", vm, "--vm-port", "3000")
    assert mapped.status == 0 and f"VM ID: {vm}" in mapped.stdout, mapped
    assert vm in (await user.cli("domains", "mappings")).stdout
    of_one = await user.cli("domains", "mappings", "--domain", "app.example.com", "--json")
    assert "app.example.com" in of_one.stdout
    assert (await user.cli("domains", "unmap", "app.example.com")).status == 0
    again = await user.cli("domains", "unmap", "app.example.com")
    assert again.status == 1 and again.stderr.startswith("Error: NOT_FOUND: "), again

    domains = user.api.installation.domains
    created = await user.cli("vm", "create", "--domain", "cli.style.dev", "--port", "8080")
    assert created.status == 0 and "https://cli.style.dev" in created.stdout, created
    route = domains.route("cli.style.dev")
    assert route is not None and route.port == 8080
    assert (await user.cli("vm", "delete", route.machine)).status == 0
    await until(lambda: domains.route("cli.style.dev") is None, 60)

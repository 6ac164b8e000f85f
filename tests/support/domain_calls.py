"""Calls of the domain endpoints, with TXT records in memory."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2

from stead.domains.errors import DnsUnavailable
from stead.domains.verification import LABEL
from support.fake_api import FakeApi

ROOT = "/domains/v1"
RECORDS: defaultdict[str, list[str]] = defaultdict(list)
"""TXT records by name."""


async def lookup(name: str) -> Sequence[str]:
    if name == f"{LABEL}.broken.example":
        raise DnsUnavailable(name, "no answer within 5 s")
    return RECORDS[name]


class Caller:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        options = {} if body is None else {"json": body}
        return await self.http.request(method, path if path.startswith("/v1") else ROOT + path, **options)

    async def succeed(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.send(method, path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def fail(self, status: int, code: str, method: str, path: str, body: Any = None) -> Any:
        answer = await self.send(method, path, body)
        found = answer.json()
        assert (answer.status_code, found["code"]) == (status, code), found
        assert found["error"] == code and found["message"] == found["description"] != ""
        assert answer.headers["x-freestyle-trace-id"]
        return found

    async def map(self, domain: str, vm: str, port: int = 3000) -> Any:
        body = {"domain": domain, "vmId": vm, "vmPort": port}
        return await self.succeed("POST", f"/mappings/{domain}", body)

    async def create(self, body: dict[str, Any]) -> Any:
        """Create a VM."""
        return await self.succeed("POST", "/v1/vms", body)

    async def verify(self, domain: str) -> None:
        made = await self.succeed("POST", "/verifications", {"domain": domain})
        RECORDS[f"{LABEL}.{domain}"].append(made["verificationCode"])
        assert await self.succeed("PUT", "/verifications", {"domain": domain}) == {"domain": domain}


@contextlib.asynccontextmanager
async def calling(api: FakeApi, caller: str = "owner") -> AsyncIterator[Caller]:
    headers = api.callers[caller]
    async with httpx2.AsyncClient(base_url=api.url, headers=headers, timeout=60) as http:
        yield Caller(http)

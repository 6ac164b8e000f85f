"""CORS: web pages of other origins may call the API, as the npm package does in a browser."""

from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from support.installations import Server

PAGE = "https://app.example.com"
SENT = (
    "authorization, content-type, user-agent, x-freestyle-identity-access-token, x-freestyle-sdk, "
    "x-freestyle-sdk-version, x-freestyle-vm-linux-user-id, x-freestyle-background-after-secs, "
    "x-freestyle-request-url"
)


@pytest.mark.parametrize("path", ["/v1/vms", "/v1/vms/x/exec-await", "/identity/v1/identities", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_cors_preflight_of_every_call(server: Server, method: str, path: str) -> None:
    """The preflight allows every method and the headers of the package."""
    asking = {
        "Origin": PAGE,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": SENT,
    }
    async with httpx2.AsyncClient(base_url=server.url) as client:
        answer = await client.options(path, headers=asking)
    assert answer.is_success
    assert _listed(answer.headers, "access-control-allow-origin") & {"*", PAGE}
    assert method.lower() in _listed(answer.headers, "access-control-allow-methods")
    assert _listed(answer.headers, "access-control-allow-headers") >= set(SENT.split(", "))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/vms", 200),
        ("POST", "/identity/v1/identities", 200),
        ("PUT", "/v1/vms/none/files/%2Ftmp%2Fpage", 404),
        ("PATCH", "/v1/vms/snapshots/none", 404),
        ("DELETE", "/v1/vms/none", 404),
        ("GET", "/nowhere", 404),
        ("DELETE", "/auth/v1/whoami", 405),
        ("POST", "/v1/vms", 400),
    ],
)
async def test_cors_headers_on_answers(server: Server, method: str, path: str, status: int) -> None:
    """Answers and errors alike expose the headers that the package reads."""
    headers = {"Origin": PAGE, "Authorization": f"Bearer {server.key}"}
    body: Any = {"name": 5} if path == "/v1/vms" and method == "POST" else None
    async with httpx2.AsyncClient(base_url=server.url, headers=headers) as client:
        answer = await client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    _readable(answer.headers)


async def test_cors_headers_on_unauthenticated_answers(server: Server) -> None:
    """A 401 is readable too: the package retries without end what it cannot read."""
    async with httpx2.AsyncClient(base_url=server.url, headers={"Origin": PAGE}) as client:
        answer = await client.post("/v1/vms", json={})
    assert answer.status_code == 401
    assert answer.json()["code"] == "UNAUTHORIZED_ERROR"
    _readable(answer.headers)


def _readable(headers: Mapping[str, str]) -> None:
    assert _listed(headers, "access-control-allow-origin") & {"*", PAGE}
    exposed = _listed(headers, "access-control-expose-headers")
    assert exposed >= {"x-freestyle-trace-id", "x-freestyle-background-request-id"}
    assert "x-freestyle-trace-id" in headers


def _listed(headers: Mapping[str, str], name: str) -> set[str]:
    return {each.strip().lower() for each in headers.get(name, "").split(",")} - {""}

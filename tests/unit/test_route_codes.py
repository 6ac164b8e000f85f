"""What routes declare, the code of an invalid request and streamed bodies: never read out of the URL."""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from stead.api.app import body_limit, create_app
from stead.api.callers import PUBLIC, current_caller
from stead.errors import InvalidRequest
from stead.identity.callers import Caller

CODES = {
    "POST /v1/vms": "CREATE_VM_BAD_REQUEST",
    "POST /v1/vms/snapshots": "CREATE_SNAPSHOT_BAD_REQUEST",
    "POST /v1/vms/{vm_id}/snapshot": "SNAPSHOT_VM_BAD_REQUEST",
    "GET /v1/vms/{vm_id}/files/{path}": "FILES_BAD_REQUEST",
    "PUT /v1/vms/{vm_id}/files/{path}": "FILES_BAD_REQUEST",
    "DELETE /v1/vms/{vm_id}/files/{path}": "FILES_BAD_REQUEST",
    "POST /v1/vms/{vm_id}/move": "FILES_BAD_REQUEST",
    "GET /observability/v1/logs": "INVALID_QUERY",
    "GET /v1/vpcs": "BAD_REQUEST",
    "POST /v1/vpcs": "BAD_REQUEST",
    "GET /v1/vpcs/{vpc_id}": "BAD_REQUEST",
    "DELETE /v1/vpcs/{vpc_id}": "BAD_REQUEST",
    "GET /v1/vpcs/{vpc_id}/wireguard": "BAD_REQUEST",
    "POST /v1/vpcs/{vpc_id}/wireguard/ephemeral": "BAD_REQUEST",
    "DELETE /v1/vpcs/{vpc_id}/wireguard/ephemeral": "BAD_REQUEST",
    "POST /v1/vpcs/{vpc_id}/wireguard/peers": "BAD_REQUEST",
    "DELETE /v1/vpcs/{vpc_id}/wireguard/peers": "BAD_REQUEST",
}
"""Every other route answers INVALID_REQUEST."""

NOUNS = (
    "srv/files/x",
    "%2Fsrv%2Ffiles%2Fx",
    "root/snapshot",
    "%2Froot%2Fsnapshot",
    "root/move",
    "root%2Fmove",
    "v1/vpcs",
    "archives/x",
    "plain",
)
"""Values of path parameters; some contain words that are routes elsewhere."""


class NoInstallation:
    """Stands for all parts: no request of these tests gets as far as to use one."""

    def __getattr__(self, name: str) -> None:
        return None


async def refuse() -> Caller:
    raise InvalidRequest("refused")


def application() -> FastAPI:
    app = create_app()
    app.state.installation = NoInstallation()
    app.dependency_overrides[current_caller] = refuse
    return app


APP = application()
OPERATIONS: dict[str, dict[str, Any]] = {
    f"{method.upper()} {path}": operation
    for path, operations in APP.openapi()["paths"].items()
    for method, operation in operations.items()
    if path not in PUBLIC
}
WITH_JSON = [
    name
    for name, operation in OPERATIONS.items()
    # A file's body is parsed by its route, after the authentication.
    if "application/json" in operation.get("requestBody", {}).get("content", {}) and "/files/" not in name
]
SPANNING = [name for name in OPERATIONS if re.search(r"\{(path|branch|tag)\}$", name)]
"""Routes whose last parameter is a path of its own."""


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(APP)


def code(client: TestClient, operation: str, value: str = "x", **options: Any) -> str:
    method, template = operation.split(" ")
    response = client.request(method, re.sub(r"\{\w+\}", value, template), **options)
    assert response.status_code == 400, response.text
    return str(response.json()["code"])


def expected(operation: str) -> str:
    return CODES.get(operation, "INVALID_REQUEST")


def test_recorded_routes_exist() -> None:
    assert CODES.keys() <= OPERATIONS.keys()
    assert len(SPANNING) >= 10
    assert len(WITH_JSON) >= 25


@pytest.mark.parametrize("operation", OPERATIONS)
def test_code_of_a_request_that_the_product_refuses(client: TestClient, operation: str) -> None:
    assert code(client, operation) == expected(operation)


@pytest.mark.parametrize("operation", WITH_JSON)
def test_code_of_a_request_with_malformed_json(client: TestClient, operation: str) -> None:
    headers = {"content-type": "application/json"}
    assert code(client, operation, content=b"{", headers=headers) == expected(operation)


@pytest.mark.parametrize("value", NOUNS)
@pytest.mark.parametrize("operation", SPANNING)
def test_code_does_not_depend_on_a_path_inside_the_guest_or_repository(
    client: TestClient, operation: str, value: str
) -> None:
    head, _, _ = operation.rpartition("{")
    assert code(client, re.sub(r"\{\w+\}", "x", head) + value) == expected(operation)


@pytest.mark.parametrize("value", ["snapshot", "move", "files"])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.endswith("}")])
def test_code_does_not_depend_on_a_name(client: TestClient, operation: str, value: str) -> None:
    assert code(client, operation, value) == expected(operation)


RAW, TAR, JSON = "application/octet-stream", "application/x-tar", "application/json"


@pytest.mark.parametrize(
    ("method", "path", "content_type", "streamed"),
    [
        ("PUT", "/v1/vms/x/files/srv/big", RAW, True),
        ("PUT", "/v1/vms/x/files//srv/archives/big", f"{RAW}; charset=binary", True),
        ("PUT", "/v1/vms/x/files/srv/big", JSON, False),
        ("PUT", "/v1/vms/x/files/srv/big", TAR, False),
        ("POST", "/v1/vms/x/files/srv/big", RAW, False),
        ("PUT", "/v1/vms/x/archives/srv", TAR, True),
        ("PUT", "/v1/vms/x/archives/srv", RAW, True),
        ("PUT", "/v1/vms/x/archives/srv", JSON, False),
        ("PUT", "/identity/v1/identities/files/permissions/vm/x", RAW, False),
        ("PUT", "/identity/v1/identities/x/permissions/git/archives/", RAW, False),
        ("PUT", "/git/v1/repo/files/default-branch", RAW, False),
        ("POST", "/v1/vms/x/processes/files/stdin", RAW, False),
    ],
)
def test_only_declared_bodies_are_streamed(method: str, path: str, content_type: str, streamed: bool) -> None:
    """All others are read into memory, and so have a limit."""
    headers = [(b"content-type", content_type.encode())]
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": headers}
    assert (body_limit(scope).size is None) is streamed

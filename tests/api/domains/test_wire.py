"""Verifications, domains and mappings over HTTP, by plain calls. VMs are in memory."""

import json
import re
from typing import Any

import pytest

from stead.domains.verification import LABEL
from stead.machines.records import Properties
from support.domain_calls import RECORDS, ROOT, Caller, calling
from support.fake_api import FakeApi

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
ENDPOINTS: list[tuple[str, str, Any]] = [
    ("POST", "/verifications", {"domain": "example.org"}),
    ("PUT", "/verifications", {"domain": "example.org"}),
    ("GET", "/verifications", None),
    ("DELETE", "/verifications", {"domain": "example.org", "verificationCode": "x"}),
    ("GET", "/domains", None),
    ("DELETE", "/domains/example.org", None),
    ("POST", "/certs/example.org/wildcard", None),
    ("POST", "/mappings/caller.style.dev", {"domain": "caller.style.dev", "vmId": "{vm}", "vmPort": 80}),
    ("DELETE", "/mappings/caller.style.dev", None),
    ("GET", "/mappings", None),
]


async def test_verification_is_created_listed_completed_and_cancelled(api: FakeApi, ours: Caller) -> None:
    made = await ours.succeed("POST", "/verifications", {"domain": "Example.com"})
    assert UUID4.fullmatch(made["id"]) and TIME.fullmatch(made["createdAt"])
    assert made == {
        "id": made["id"],
        "domain": "example.com",
        "verificationCode": made["verificationCode"],
        "recordName": f"{LABEL}.example.com",
        "accountId": api.account,
        "createdAt": made["createdAt"],
    }
    assert await ours.succeed("GET", "/verifications") == [made]
    assert await ours.succeed("GET", "/domains?offset=0") == []
    body = await ours.fail(400, "VERIFICATION_FAILED", "PUT", "/verifications", {"domain": "example.com"})
    assert body["domain"] == "example.com" and f"{LABEL}.example.com" in body["message"]
    RECORDS[f"{LABEL}.example.com"] = [made["verificationCode"]]
    assert await ours.succeed("PUT", "/verifications", {"id": made["id"]}) == {"domain": "example.com"}
    assert await ours.succeed("GET", "/verifications") == []
    (domain,) = await ours.succeed("GET", "/domains?limit=50&offset=0")
    assert domain == {
        "id": domain["id"],
        "domain": "example.com",
        "accountId": api.account,
        "createdAt": domain["createdAt"],
        "verifiedDns": True,
        "implicitlyOwned": False,
        "deployToDomain": True,
        "deployToSubdomains": True,
        "manageDns": False,
    }
    other = await ours.succeed("POST", "/verifications", {"domain": "example.org"})
    cancel = {"domain": "example.org", "verificationCode": other["verificationCode"]}
    await ours.fail(
        404, "VERIFICATION_NOT_FOUND", "DELETE", "/verifications", cancel | {"domain": "a.example"}
    )
    assert await ours.succeed("DELETE", "/verifications", cancel) == cancel
    body = await ours.fail(404, "VERIFICATION_NOT_FOUND", "DELETE", "/verifications", cancel)
    assert body["domain"] == "example.org"
    await ours.fail(404, "VERIFICATION_NOT_FOUND", "PUT", "/verifications", {"id": other["id"]})
    assert await ours.succeed("POST", "/certs/example.com/wildcard") == {"domain": "example.com"}
    await ours.fail(401, "DOMAIN_OWNERSHIP_NOT_VERIFIED", "POST", "/certs/example.org/wildcard")
    assert await ours.succeed("DELETE", "/domains/example.com") == {}
    await ours.fail(404, "NOT_FOUND", "DELETE", "/domains/example.com")


async def test_mapping_is_created_moved_listed_and_deleted(api: FakeApi, ours: Caller) -> None:
    made = await ours.map("app.style.dev", api.vm)
    assert UUID4.fullmatch(made["id"]) and TIME.fullmatch(made["createdAt"])
    assert made == {
        "id": made["id"],
        "domain": "app.style.dev",
        "deploymentId": None,
        "vmId": api.vm,
        "vmPort": 3000,
        "ownershipId": made["ownershipId"],
        "createdAt": made["createdAt"],
        "unmappedAt": None,
    }
    assert await ours.succeed("GET", "/mappings?limit=50&offset=0") == [made]
    assert await ours.succeed("GET", "/mappings?domain=APP.style.dev&offset=0") == [made]
    assert await ours.succeed("GET", f"/mappings?domainOwnership={made['ownershipId']}") == [made]
    assert await ours.succeed("GET", "/mappings?domain=other.style.dev") == []
    assert await ours.succeed("GET", "/domains") == []
    (implied,) = await ours.succeed("GET", "/domains?implicitlyOwned=true")
    assert (implied["id"], implied["implicitlyOwned"]) == (made["ownershipId"], True)
    assert implied["verifiedDns"] is False

    other = await api.installation.machines.create(Properties(account=api.account))
    moved = await ours.map("app.style.dev", other.id, 8080)
    assert (moved["vmId"], moved["vmPort"]) == (other.id, 8080)
    assert await ours.succeed("GET", "/mappings") == [moved]
    without_port = await ours.succeed("POST", "/mappings/app.style.dev", {"vmId": api.vm})
    assert without_port["vmPort"] == 443
    assert await ours.succeed("DELETE", "/mappings/APP.style.dev.") == {}
    body = await ours.fail(404, "NOT_FOUND", "DELETE", "/mappings/app.style.dev")
    assert body["domain"] == "app.style.dev"
    await other.delete()


async def test_a_verified_domain_allows_its_wildcards(api: FakeApi, ours: Caller) -> None:
    pattern, body = "*.example.com", {"vmId": api.vm, "vmPort": 80}
    refused = await ours.fail(401, "DOMAIN_OWNERSHIP_NOT_VERIFIED", "POST", f"/mappings/{pattern}", body)
    assert "verify example.com or a parent domain" in refused["message"]
    refused = await ours.fail(400, "INVALID_DOMAIN", "POST", "/verifications", {"domain": pattern})
    assert "verify 'example.com' instead" in refused["message"]
    await ours.verify("example.com")
    for name in (pattern, "*.deep.example.com"):
        assert (await ours.map(name, api.vm))["domain"] == name
    refused = await ours.fail(400, "INVALID_REQUEST", "DELETE", "/domains/example.com")
    assert "unmap its names first (2 mapped)" in refused["message"]


async def test_wildcard_mapping_and_international_names_in_paths(api: FakeApi, ours: Caller) -> None:
    await ours.verify("xn--bcher-kva.example")
    for path, name in (
        ("*.b%C3%BCcher.example", "*.xn--bcher-kva.example"),
        ("B%C3%9CCHER.example", "xn--bcher-kva.example"),
    ):
        made = await ours.succeed("POST", f"/mappings/{path}", {"vmId": api.vm, "vmPort": 80})
        assert made["domain"] == name
        assert await ours.succeed("DELETE", f"/mappings/{path}") == {}


async def test_refused_mappings_have_the_codes_of_the_contract(
    api: FakeApi, ours: Caller, theirs: Caller
) -> None:
    await ours.map("taken.style.dev", api.vm)
    await ours.verify("example.com")
    foreign = {"vmId": api.vm, "vmPort": 80}
    body = await theirs.fail(401, "VM_ACCESS_DENIED_FOR_MAPPING", "POST", "/mappings/app.style.dev", foreign)
    assert body["vmId"] == api.vm
    absent = {"vmId": "a" * 20, "vmPort": 80}
    same = await theirs.fail(401, "VM_ACCESS_DENIED_FOR_MAPPING", "POST", "/mappings/app.style.dev", absent)
    assert same["message"].replace("a" * 20, api.vm) == body["message"]
    for name, status, code in (
        ("taken.style.dev", 400, "DOMAIN_ALREADY_EXISTS"),
        ("below.taken.style.dev", 400, "DOMAIN_ALREADY_EXISTS"),
        ("app.example.com", 400, "DOMAIN_ALREADY_EXISTS"),
        ("app.example.net", 401, "DOMAIN_OWNERSHIP_NOT_VERIFIED"),
        ("git.stead.localhost", 400, "INVALID_DOMAIN"),
        ("style.dev", 400, "INVALID_DOMAIN"),
        ("10.0.0.1", 400, "INVALID_DOMAIN"),
        ("a_b.style.dev", 400, "INVALID_DOMAIN"),
    ):
        body = await theirs.fail(status, code, "POST", f"/mappings/{name}", foreign)
        assert body["domain"] == name
    await theirs.fail(400, "DOMAIN_ALREADY_EXISTS", "POST", "/verifications", {"domain": "example.com"})
    await theirs.fail(404, "NOT_FOUND", "DELETE", "/mappings/taken.style.dev")
    assert await theirs.succeed("GET", "/mappings") == []
    assert await theirs.succeed("GET", "/domains?implicitlyOwned=true") == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "INVALID_REQUEST"),
        ({"vmPort": 80}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "vmPort": 0}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "vmPort": 65536}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "vmPort": 1e300}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "vmPort": 80.5}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "vmPort": "http"}, 400, "INVALID_REQUEST"),
        ({"vmId": 7}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "domain": "other.style.dev"}, 400, "INVALID_REQUEST"),
        ({"vmId": "{vm}", "domain": "\ud800"}, 400, "INVALID_REQUEST"),
        ({"vmId": "\ud800"}, 400, "INVALID_REQUEST"),
        ({"deploymentId": "d", "domain": "app.style.dev"}, 404, "NOT_FOUND"),
    ],
)
async def test_invalid_mappings_are_refused(
    api: FakeApi, ours: Caller, body: dict[str, Any], status: int, code: str
) -> None:
    text = json.dumps(body).replace("{vm}", api.vm)
    answer = await ours.http.post(
        f"{ROOT}/mappings/app.style.dev", content=text, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert await ours.succeed("GET", "/mappings") == []


@pytest.mark.parametrize("body", [{}, {"domain": "a.example", "id": "x"}, {"domain": 1}, [], None])
async def test_invalid_completions_are_refused(ours: Caller, body: Any) -> None:
    await ours.fail(400, "INVALID_REQUEST", "PUT", "/verifications", body)


async def test_lookup_that_fails_is_a_bad_gateway(ours: Caller) -> None:
    await ours.succeed("POST", "/verifications", {"domain": "broken.example"})
    await ours.fail(502, "FAILED_TO_VERIFY_DOMAIN", "PUT", "/verifications", {"domain": "broken.example"})
    assert len(await ours.succeed("GET", "/verifications")) == 1


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "offset=-1", f"offset={10**30}"])
async def test_invalid_pages_are_refused(ours: Caller, query: str) -> None:
    for path in ("/domains", "/mappings"):
        await ours.fail(400, "INVALID_REQUEST", "GET", f"{path}?{query}")


@pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS)
async def test_only_the_accounts_own_key_may_manage_domains(
    api: FakeApi, method: str, path: str, body: Any
) -> None:
    filled = None if body is None else json.loads(json.dumps(body).replace("{vm}", api.vm))
    for caller, status, code in (
        ("nobody", 401, "UNAUTHORIZED_ERROR"),
        ("not a key", 401, "UNAUTHORIZED_ERROR"),
        ("revoked key", 401, "UNAUTHORIZED_ERROR"),
        ("granted", 403, "FORBIDDEN"),
        ("ungranted", 403, "FORBIDDEN"),
    ):
        async with calling(api, caller) as client:
            await client.fail(status, code, method, path, filled)
    async with calling(api) as ours:
        answer = await ours.send(method, path, filled)
        assert answer.json() == [] or answer.json().get("code") not in ("UNAUTHORIZED_ERROR", "FORBIDDEN")


async def test_dns_records_are_refused_with_a_known_code(ours: Caller) -> None:
    for method, query in (("POST", ""), ("GET", "?domain=a.example"), ("DELETE", "?domain=a.example")):
        answer = await ours.http.request(method, f"/dns/v1/records{query}")
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
        assert "DNS provider" in answer.json()["message"]

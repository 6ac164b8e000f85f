"""The domain endpoints over HTTP, by curl-like calls, the SDK and the command line. VMs are in memory."""

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from stead import AsyncStead
from stead.cli.main import app
from stead.domains.errors import DnsUnavailable
from stead.domains.verification import LABEL, Verifier
from stead.sdk import (
    DomainAlreadyExists,
    DomainNotVerified,
    InvalidDomain,
    Stead,
    VerificationFailed,
    VmNotFound,
    errors,
)
from support.fake_site import FakeSite, fake_site
from support.sdk_clients import done
from support.typed import Shell
from support.waiting import until

ROOT = "/domains/v1"
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

RECORDS: defaultdict[str, list[str]] = defaultdict(list)
"""TXT records by name."""


async def lookup(name: str) -> Sequence[str]:
    if name == f"{LABEL}.broken.example":
        raise DnsUnavailable(name, "no answer within 5 s")
    return RECORDS[name]


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeSite]:
    async with fake_site(tmp_path_factory.mktemp("site")) as site:
        site.installation.domains._verifier = Verifier(lookup)
        yield site


@pytest_asyncio.fixture(autouse=True)
async def nothing_mapped(site: FakeSite) -> AsyncIterator[None]:
    yield
    domains = site.installation.domains
    for row in list(domains._routes.mappings.values()):
        await domains.unmap(row.account, row.domain)
    for owned in list(domains._routes.owned.values()):
        await domains.release(owned.account, owned.domain)
    for account in await site.installation.accounts.list():
        for pending in await domains.verifications(account.id):
            await domains.cancel(account.id, pending.domain, pending.code)
    RECORDS.clear()


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

    async def verify(self, domain: str) -> None:
        made = await self.succeed("POST", "/verifications", {"domain": domain})
        RECORDS[f"{LABEL}.{domain}"].append(made["verificationCode"])
        assert await self.succeed("PUT", "/verifications", {"domain": domain}) == {"domain": domain}


@contextlib.asynccontextmanager
async def calling(site: FakeSite, caller: str = "owner") -> AsyncIterator[Caller]:
    headers = site.callers[caller]
    async with httpx2.AsyncClient(base_url=site.url, headers=headers, timeout=60) as http:
        yield Caller(http)


@pytest_asyncio.fixture
async def ours(site: FakeSite) -> AsyncIterator[Caller]:
    async with calling(site) as caller:
        yield caller


@pytest_asyncio.fixture
async def theirs(site: FakeSite) -> AsyncIterator[Caller]:
    async with calling(site, "stranger") as caller:
        yield caller


# Wire format


async def test_verification_is_created_listed_completed_and_cancelled(site: FakeSite, ours: Caller) -> None:
    made = await ours.succeed("POST", "/verifications", {"domain": "Example.com"})
    assert UUID4.fullmatch(made["id"]) and TIME.fullmatch(made["createdAt"])
    assert made == {
        "id": made["id"],
        "domain": "example.com",
        "verificationCode": made["verificationCode"],
        "recordName": f"{LABEL}.example.com",
        "accountId": site.account,
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
        "accountId": site.account,
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


async def test_mapping_is_created_moved_listed_and_deleted(site: FakeSite, ours: Caller) -> None:
    made = await ours.map("app.style.dev", site.vm)
    assert UUID4.fullmatch(made["id"]) and TIME.fullmatch(made["createdAt"])
    assert made == {
        "id": made["id"],
        "domain": "app.style.dev",
        "deploymentId": None,
        "vmId": site.vm,
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

    other = await site.installation.machines.create(account=site.account)
    moved = await ours.map("app.style.dev", other.id, 8080)
    assert (moved["vmId"], moved["vmPort"]) == (other.id, 8080)
    assert await ours.succeed("GET", "/mappings") == [moved]
    without_port = await ours.succeed("POST", "/mappings/app.style.dev", {"vmId": site.vm})
    assert without_port["vmPort"] == 443
    assert await ours.succeed("DELETE", "/mappings/APP.style.dev.") == {}
    body = await ours.fail(404, "NOT_FOUND", "DELETE", "/mappings/app.style.dev")
    assert body["domain"] == "app.style.dev"
    await other.delete()


async def test_wildcard_mapping_and_international_names_in_paths(site: FakeSite, ours: Caller) -> None:
    await ours.verify("xn--bcher-kva.example")
    for path, name in (
        ("*.b%C3%BCcher.example", "*.xn--bcher-kva.example"),
        ("B%C3%9CCHER.example", "xn--bcher-kva.example"),
    ):
        made = await ours.succeed("POST", f"/mappings/{path}", {"vmId": site.vm, "vmPort": 80})
        assert made["domain"] == name
        assert await ours.succeed("DELETE", f"/mappings/{path}") == {}


# Refusals


async def test_refused_mappings_have_the_codes_of_the_contract(
    site: FakeSite, ours: Caller, theirs: Caller
) -> None:
    await ours.map("taken.style.dev", site.vm)
    await ours.verify("example.com")
    foreign = {"vmId": site.vm, "vmPort": 80}
    body = await theirs.fail(401, "VM_ACCESS_DENIED_FOR_MAPPING", "POST", "/mappings/app.style.dev", foreign)
    assert body["vmId"] == site.vm
    absent = {"vmId": "a" * 20, "vmPort": 80}
    same = await theirs.fail(401, "VM_ACCESS_DENIED_FOR_MAPPING", "POST", "/mappings/app.style.dev", absent)
    assert same["message"].replace("a" * 20, site.vm) == body["message"]
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
    site: FakeSite, ours: Caller, body: dict[str, Any], status: int, code: str
) -> None:
    text = json.dumps(body).replace("{vm}", site.vm)
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
    site: FakeSite, method: str, path: str, body: Any
) -> None:
    filled = None if body is None else json.loads(json.dumps(body).replace("{vm}", site.vm))
    for caller, status, code in (
        ("nobody", 401, "UNAUTHORIZED_ERROR"),
        ("not a key", 401, "UNAUTHORIZED_ERROR"),
        ("revoked key", 401, "UNAUTHORIZED_ERROR"),
        ("granted", 403, "FORBIDDEN"),
        ("ungranted", 403, "FORBIDDEN"),
    ):
        async with calling(site, caller) as client:
            await client.fail(status, code, method, path, filled)
    async with calling(site) as ours:
        answer = await ours.send(method, path, filled)
        assert answer.json() == [] or answer.json().get("code") not in ("UNAUTHORIZED_ERROR", "FORBIDDEN")


async def test_dns_records_are_refused_with_a_known_code(ours: Caller) -> None:
    for method, query in (("POST", ""), ("GET", "?domain=a.example"), ("DELETE", "?domain=a.example")):
        answer = await ours.http.request(method, f"/dns/v1/records{query}")
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
        assert "DNS provider" in answer.json()["message"]


# Create, start and delete of VMs


async def create(ours: Caller, body: dict[str, Any]) -> Any:
    return await ours.succeed("POST", "/v1/vms", body)


@pytest.mark.parametrize(
    ("more", "port"),
    [
        ({}, 3000),
        ({"ports": [{"port": 443, "targetPort": 8080}]}, 8080),
        ({"ports": []}, 443),
        ({"ports": None}, 3000),
        ({"spec": {"name": None, "ports": [{"port": 443, "targetPort": 5173, "protocol": "tcp"}]}}, 5173),
    ],
)
async def test_domains_of_a_create_are_mapped(
    site: FakeSite, ours: Caller, more: dict[str, Any], port: int
) -> None:
    wanted = [{"domain": "One.style.dev", "vmPort": 8000}, {"domain": "two.style.dev", "vmPort": None}]
    made = await create(ours, {"domains": wanted, **more})
    assert made["domains"] == ["one.style.dev", "two.style.dev"]
    rows = await ours.succeed("GET", "/mappings")
    assert {row["domain"]: (row["vmId"], row["vmPort"]) for row in rows} == {
        "one.style.dev": (made["id"], 8000),
        "two.style.dev": (made["id"], port),
    }
    assert (await ours.succeed("POST", f"/v1/vms/{made['id']}/start", {}))["domains"] == made["domains"]
    await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    await until(lambda: site.installation.domains.mapped_names() == [], 10)
    assert await ours.succeed("GET", "/domains?implicitlyOwned=true") == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"domains": [{"domain": "app.example.com", "vmPort": 80}]}, 401, "DOMAIN_OWNERSHIP_NOT_VERIFIED"),
        ({"domains": [{"domain": "taken.style.dev"}]}, 400, "DOMAIN_ALREADY_EXISTS"),
        ({"domains": [{"domain": "a..style.dev"}]}, 400, "INVALID_DOMAIN"),
        ({"domains": [{"domain": "a.style.dev"}, {"domain": "A.style.dev"}]}, 400, "INVALID_DOMAIN"),
        ({"domains": [{"domain": "a.style.dev", "vmPort": 0}]}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"domains": [{"vmPort": 80}]}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"domains": "a.style.dev"}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"domains": [{"domain": f"a{n}.style.dev"} for n in range(101)]}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"ports": [{"port": 8081, "targetPort": 80}]}, 400, "VALIDATION_ERROR"),
        ({"ports": [{"port": 443, "targetPort": 80, "protocol": "udp"}]}, 400, "VALIDATION_ERROR"),
        ({"ports": [{"port": 443, "targetPort": 0}]}, 400, "VALIDATION_ERROR"),
        ({"ports": [{"port": 443, "targetPort": n} for n in (1, 2)]}, 400, "VALIDATION_ERROR"),
    ],
)
async def test_create_with_domains_that_cannot_be_mapped_makes_no_vm(
    site: FakeSite, ours: Caller, theirs: Caller, body: dict[str, Any], status: int, code: str
) -> None:
    foreign = await create(theirs, {"domains": [{"domain": "taken.style.dev"}]})
    before = await site.installation.machines.count()
    await ours.fail(status, code, "POST", "/v1/vms", body)
    assert await site.installation.machines.count() == before
    await theirs.succeed("DELETE", f"/v1/vms/{foreign['id']}")


async def test_name_taken_during_a_create_removes_the_new_vm(
    site: FakeSite, ours: Caller, theirs: Caller
) -> None:
    """Two creates pass the check before either has mapped the name: one of them fails and leaves nothing."""
    body = {"domains": [{"domain": "race.style.dev"}]}
    before = sum((await site.installation.machines.count()).values())
    answers = await asyncio.gather(*(caller.send("POST", "/v1/vms", body) for caller in (ours, theirs)))
    assert sorted(answer.status_code for answer in answers) == [200, 400]
    (lost,) = [answer.json() for answer in answers if answer.status_code == 400]
    assert lost["code"] == "DOMAIN_ALREADY_EXISTS"
    (won,) = [(at, answer.json()["id"]) for at, answer in enumerate(answers) if answer.status_code == 200]
    assert sum((await site.installation.machines.count()).values()) == before + 1
    await (ours, theirs)[won[0]].succeed("DELETE", f"/v1/vms/{won[1]}")


async def test_create_in_the_background_answers_with_its_domains(site: FakeSite, ours: Caller) -> None:
    headers = {"x-freestyle-background-after-secs": "0"}
    body = {"domains": [{"domain": "later.style.dev"}]}
    answer = await ours.http.post("/v1/vms", json=body, headers=headers)
    if answer.status_code == 202:
        request = answer.headers["x-freestyle-background-request-id"]

        async def poll() -> httpx2.Response:
            return await ours.http.get(f"/auth/v1/background-requests/{request}")

        async def finished() -> bool:
            return (await poll()).status_code == 200

        await until(finished, 30)
        answer = await poll()
    assert answer.json()["domains"] == ["later.style.dev"]
    await ours.succeed("DELETE", f"/v1/vms/{answer.json()['id']}")


async def test_vm_with_recreate_keeps_its_domains_until_it_is_forgotten(
    site: FakeSite, ours: Caller, theirs: Caller
) -> None:
    made = await create(ours, {"recreate": True, "domains": [{"domain": "again.style.dev"}]})
    await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    assert (await ours.succeed("POST", f"/v1/vms/{made['id']}/start"))["domains"] == ["again.style.dev"]
    for _ in range(2):
        await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    await until(lambda: site.installation.domains.mapped_names() == [], 10)


async def test_url_of_a_port(site: FakeSite, ours: Caller, theirs: Caller) -> None:
    made = await ours.succeed("PUT", f"/v1/vms/{site.vm}/urls/3000")
    assert re.fullmatch(r"[a-z0-9]{16}\.stead\.localhost", made["domain"])
    assert made == {"url": f"https://{made['domain']}", "domain": made["domain"], "port": 3000}
    assert await ours.succeed("PUT", f"/v1/vms/{site.vm}/urls/3000") == made
    for port in ("0", "65536", "x"):
        await ours.fail(400, "INVALID_REQUEST", "PUT", f"/v1/vms/{site.vm}/urls/{port}")
    await theirs.fail(404, "VM_NOT_FOUND", "PUT", f"/v1/vms/{site.vm}/urls/3000")
    async with calling(site, "granted") as granted:
        await granted.fail(403, "FORBIDDEN", "PUT", f"/v1/vms/{site.vm}/urls/3000")


async def test_names_of_a_public_installation_are_its_own(tmp_path: Path) -> None:
    async with fake_site(tmp_path, domain="stead.example.com") as site, calling(site) as ours:
        made = await ours.succeed("PUT", f"/v1/vms/{site.vm}/urls/3000")
        assert made["domain"].endswith(".stead.example.com")
        await ours.map("app.stead.example.com", site.vm)
        body = {"vmId": site.vm, "vmPort": 80}
        for name in (
            "stead.example.com",
            "api.stead.example.com",
            "git.stead.example.com",
            "git.freestyle.sh",
        ):
            await ours.fail(400, "INVALID_DOMAIN", "POST", f"/mappings/{name}", body)


# The SDK


@pytest.mark.parametrize("kind", [Stead, AsyncStead])
async def test_sdk_verifies_maps_and_lists(site: FakeSite, kind: type[Any]) -> None:
    key = site.callers["owner"]["Authorization"].removeprefix("Bearer ")
    if kind is Stead:
        await asyncio.to_thread(_use_sdk_blocking, site.url, key, site.vm)
    else:
        async with AsyncStead(key, base_url=site.url) as stead:
            await _use_sdk(stead, site.vm)


def _use_sdk_blocking(url: str, key: str, vm: str) -> None:
    with Stead(key, base_url=url, max_retries=0) as stead:
        asyncio.run(_use_sdk(stead, vm))


async def _use_sdk(stead: Any, vm: str) -> None:
    pending = await done(stead.domains.verifications.create("example.com"))
    assert (pending.domain, pending.record_name) == ("example.com", f"{LABEL}.example.com")
    assert await done(stead.domains.verifications.list()) == [pending]
    with pytest.raises(VerificationFailed) as failed:
        await done(stead.domains.verifications.complete("example.com"))
    assert failed.value.domain == "example.com"
    with pytest.raises(ValueError, match="either domain or verification_id"):
        await done(stead.domains.verifications.complete())
    RECORDS[pending.record_name] = [pending.verification_code]
    assert await done(stead.domains.verifications.complete(verification_id=pending.id)) == "example.com"
    (domain,) = await done(stead.domains.list(limit=5))
    assert (domain.domain, domain.verified_dns, domain.implicitly_owned) == ("example.com", True, False)

    made = await done(stead.domains.mappings.create("app.example.com", vm=vm[:8], port=3000))
    assert (made.vm_id, made.vm_port, made.ownership_id) == (vm, 3000, domain.id)
    url = await done(stead.vms.ref(vm).url(8000))
    assert re.fullmatch(r"https://[a-z0-9]{16}\.stead\.localhost", url)
    mappings = await done(stead.domains.mappings.list(limit=100))
    assert [each.domain for each in mappings] == ["app.example.com", url.removeprefix("https://")]
    assert await done(stead.domains.mappings.list(domain_id=domain.id)) == [made]
    assert len(await done(stead.domains.list(include_previews=True))) == 2

    refused: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: stead.domains.mappings.create("a.example.net", vm=vm, port=80), DomainNotVerified),
        (lambda: stead.domains.mappings.create("a_b.style.dev", vm=vm, port=80), InvalidDomain),
        (lambda: stead.domains.mappings.create("a.style.dev", vm="z" * 20, port=80), VmNotFound),
        (lambda: stead.domains.mappings.delete("nothing.style.dev"), errors.NotFound),
        (lambda: stead.domains.verifications.cancel("a.example", "x"), errors.VerificationNotFound),
        (lambda: stead.domains.release("example.com"), errors.InvalidRequest),
    ]
    for call, error in refused:
        with pytest.raises(error):
            await done(call())
    for mapping in mappings:
        await done(stead.domains.mappings.delete(mapping.domain))
    await done(stead.domains.release("example.com"))
    assert await done(stead.domains.list()) == []
    async with contextlib.AsyncExitStack() as stack:
        vm_made = await done(stead.vms.create(domains={"sdk.style.dev": 8080}))
        stack.push_async_callback(lambda: done(vm_made.delete()))
        assert vm_made.domains == ("sdk.style.dev",)


async def test_sdk_reports_a_name_of_another_account(site: FakeSite, theirs: Caller) -> None:
    vm = (await create(theirs, {"domains": [{"domain": "taken.style.dev"}]}))["id"]
    key = site.callers["owner"]["Authorization"].removeprefix("Bearer ")
    async with AsyncStead(key, base_url=site.url) as stead:
        with pytest.raises(DomainAlreadyExists) as error:
            await stead.domains.mappings.create("taken.style.dev", vm=site.vm, port=80)
        assert error.value.domain == "taken.style.dev"
    await theirs.succeed("DELETE", f"/v1/vms/{vm}")


# The command line


async def test_command_line_verifies_and_maps(site: FakeSite) -> None:
    key = site.callers["owner"]["Authorization"].removeprefix("Bearer ")
    environment = {"STEAD_API_URL": site.url, "STEAD_API_KEY": key}

    async def stead(*arguments: str, status: int = 0) -> str:
        ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
        assert ended.exit_code == status, ended.stderr
        return ended.stdout if status == 0 else ended.stderr

    pending = json.loads(await stead("domains", "verify", "example.com", "--json"))
    shown = await stead("domains", "verify", "example.com")
    assert f"{LABEL}.example.com TXT" in shown and pending["verification_code"] in shown
    assert pending["verification_code"] in await stead("domains", "verifications")
    failed = json.loads(await stead("domains", "complete", "example.com", "--json", status=1))
    assert failed["error"]["code"] == "VERIFICATION_FAILED"
    await stead("domains", "complete", status=2)
    RECORDS[f"{LABEL}.example.com"] = [pending["verification_code"]]
    assert await stead("domains", "complete", "--verification-id", pending["id"]) == "verified example.com\n"
    assert json.loads(await stead("domains", "verifications", "--json")) == {"verifications": []}
    assert "example.com" in await stead("domains", "list")

    vm = site.vm
    said = await stead("domains", "map", "app.example.com", vm[:6], "3000")
    assert said == f"app.example.com leads to port 3000 of {vm}\n"
    assert json.loads(await stead("domains", "map", "app.example.com", vm, "80", "--json"))["vm_port"] == 80
    url = (await stead("vm", "url", vm, "8000")).strip()
    assert json.loads(await stead("vm", "url", vm, "8000", "--json"))["url"] == url
    listed = json.loads(await stead("domains", "mappings", "--json"))["mappings"]
    assert [each["domain"] for each in listed] == ["app.example.com", url.removeprefix("https://")]
    assert "app.example.com" in await stead("domains", "mappings", "--domain", "app.example.com")
    assert "preview zone" in await stead("domains", "list", "--all")
    refused = await stead("domains", "map", "app.example.net", vm, "80", status=1)
    assert "DOMAIN_OWNERSHIP_NOT_VERIFIED" in refused and "stead keys create" not in refused
    for each in listed:
        assert await stead("domains", "unmap", each["domain"]) == f"unmapped {each['domain']}\n"
    assert await stead("domains", "release", "example.com") == "released example.com\n"
    await stead("domains", "verify", "other.example")
    assert (
        await stead("domains", "cancel", "Other.example.") == "cancelled the verification of other.example\n"
    )
    assert "no pending verification" in await stead("domains", "cancel", "other.example", status=1)
    assert json.loads(await stead("domains", "list", "--json")) == {"domains": []}


async def test_command_line_creates_a_vm_with_domains(site: FakeSite) -> None:
    shell = Shell(site.url, site.callers["owner"]["Authorization"].removeprefix("Bearer "))
    made = await shell.ask("vm", "create", "--domain", "one.style.dev:80", "-d", "two.style.dev")
    assert made["domains"] == ["one.style.dev", "two.style.dev"]
    mapped = site.installation.domains.of_machine(made["id"])
    assert [mapping.port for mapping in mapped] == [80, 3000]
    await site.installation.machines.delete(made["id"])
    refused = await shell.refused("vm", "create", "--domain", "a.style.dev:0", code=2)
    assert "invalid port in 'a.style.dev:0'" in refused

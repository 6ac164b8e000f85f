"""Domains of VMs: in create, start and delete, and URLs of ports. VMs are in memory."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.domain_calls import Caller, calling
from support.fake_api import FakeApi, fake_api
from support.waiting import until


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
    api: FakeApi, ours: Caller, more: dict[str, Any], port: int
) -> None:
    wanted = [{"domain": "One.style.dev", "vmPort": 8000}, {"domain": "two.style.dev", "vmPort": None}]
    made = await ours.create({"domains": wanted, **more})
    assert made["domains"] == ["one.style.dev", "two.style.dev"]
    rows = await ours.succeed("GET", "/mappings")
    assert {row["domain"]: (row["vmId"], row["vmPort"]) for row in rows} == {
        "one.style.dev": (made["id"], 8000),
        "two.style.dev": (made["id"], port),
    }
    assert (await ours.succeed("POST", f"/v1/vms/{made['id']}/start", {}))["domains"] == made["domains"]
    await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    await until(lambda: api.installation.domains.mapped_names() == [], 60)
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
    api: FakeApi, ours: Caller, theirs: Caller, body: dict[str, Any], status: int, code: str
) -> None:
    foreign = await theirs.create({"domains": [{"domain": "taken.style.dev"}]})
    before = await api.installation.machines.count()
    await ours.fail(status, code, "POST", "/v1/vms", body)
    assert await api.installation.machines.count() == before
    await theirs.succeed("DELETE", f"/v1/vms/{foreign['id']}")


async def test_name_taken_during_a_create_removes_the_new_vm(
    api: FakeApi, ours: Caller, theirs: Caller
) -> None:
    """Two creates pass the check before either has mapped the name: one of them fails and leaves nothing."""
    body = {"domains": [{"domain": "race.style.dev"}]}
    before = sum((await api.installation.machines.count()).values())
    answers = await asyncio.gather(*(caller.send("POST", "/v1/vms", body) for caller in (ours, theirs)))
    assert sorted(answer.status_code for answer in answers) == [200, 400]
    (lost,) = [answer.json() for answer in answers if answer.status_code == 400]
    assert lost["code"] == "DOMAIN_ALREADY_EXISTS"
    (won,) = [(at, answer.json()["id"]) for at, answer in enumerate(answers) if answer.status_code == 200]
    assert sum((await api.installation.machines.count()).values()) == before + 1
    await (ours, theirs)[won[0]].succeed("DELETE", f"/v1/vms/{won[1]}")


async def test_create_in_the_background_answers_with_its_domains(api: FakeApi, ours: Caller) -> None:
    headers = {"x-freestyle-background-after-secs": "0"}
    body = {"domains": [{"domain": "later.style.dev"}]}
    answer = await ours.http.post("/v1/vms", json=body, headers=headers)
    if answer.status_code == 202:
        request = answer.headers["x-freestyle-background-request-id"]

        async def poll() -> httpx2.Response:
            return await ours.http.get(f"/auth/v1/background-requests/{request}")

        async def finished() -> bool:
            return (await poll()).status_code == 200

        await until(finished, 60)
        answer = await poll()
    assert answer.json()["domains"] == ["later.style.dev"]
    await ours.succeed("DELETE", f"/v1/vms/{answer.json()['id']}")


async def test_vm_with_recreate_keeps_its_domains_until_it_is_forgotten(
    api: FakeApi, ours: Caller, theirs: Caller
) -> None:
    made = await ours.create({"recreate": True, "domains": [{"domain": "again.style.dev"}]})
    await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    assert (await ours.succeed("POST", f"/v1/vms/{made['id']}/start"))["domains"] == ["again.style.dev"]
    for _ in range(2):
        await ours.succeed("DELETE", f"/v1/vms/{made['id']}")
    await until(lambda: api.installation.domains.mapped_names() == [], 60)


async def test_url_of_a_port(api: FakeApi, ours: Caller, theirs: Caller) -> None:
    made = await ours.succeed("PUT", f"/v1/vms/{api.vm}/urls/3000")
    assert re.fullmatch(r"[a-z0-9]{16}\.stead\.localhost", made["domain"])
    assert made == {"url": f"https://{made['domain']}", "domain": made["domain"], "port": 3000}
    assert await ours.succeed("PUT", f"/v1/vms/{api.vm}/urls/3000") == made
    for port in ("0", "65536", "x"):
        await ours.fail(400, "INVALID_REQUEST", "PUT", f"/v1/vms/{api.vm}/urls/{port}")
    await theirs.fail(404, "VM_NOT_FOUND", "PUT", f"/v1/vms/{api.vm}/urls/3000")
    async with calling(api, "granted") as granted:
        await granted.fail(403, "FORBIDDEN", "PUT", f"/v1/vms/{api.vm}/urls/3000")


async def test_names_of_a_public_installation_are_its_own(tmp_path: Path) -> None:
    async with fake_api(tmp_path, domain="stead.example.com") as api, calling(api) as ours:
        made = await ours.succeed("PUT", f"/v1/vms/{api.vm}/urls/3000")
        assert made["domain"].endswith(".stead.example.com")
        await ours.map("app.stead.example.com", api.vm)
        body = {"vmId": api.vm, "vmPort": 80}
        for name in (
            "stead.example.com",
            "api.stead.example.com",
            "git.stead.example.com",
            "git.freestyle.sh",
        ):
            await ours.fail(400, "INVALID_DOMAIN", "POST", f"/mappings/{name}", body)

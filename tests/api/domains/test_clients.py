"""Domains by the SDK and the command line. VMs are in memory."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from stead import AsyncStead
from stead.cli.main import app
from stead.domains.verification import LABEL
from stead.sdk import (
    DomainAlreadyExists,
    DomainNotVerified,
    InvalidDomain,
    Stead,
    VerificationFailed,
    VmNotFound,
    errors,
)
from support.domain_calls import RECORDS, Caller
from support.fake_api import FakeApi
from support.run_cli import Shell
from support.sdk_clients import done


@pytest.mark.parametrize("kind", [Stead, AsyncStead])
async def test_sdk_verifies_maps_and_lists(api: FakeApi, kind: type[Any]) -> None:
    key = api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    if kind is Stead:
        await asyncio.to_thread(_use_sdk_blocking, api.url, key, api.vm)
    else:
        async with AsyncStead(key, base_url=api.url) as stead:
            await _use_sdk(stead, api.vm)


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


async def test_sdk_reports_a_name_of_another_account(api: FakeApi, theirs: Caller) -> None:
    vm = (await theirs.create({"domains": [{"domain": "taken.style.dev"}]}))["id"]
    key = api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    async with AsyncStead(key, base_url=api.url) as stead:
        with pytest.raises(DomainAlreadyExists) as error:
            await stead.domains.mappings.create("taken.style.dev", vm=api.vm, port=80)
        assert error.value.domain == "taken.style.dev"
    await theirs.succeed("DELETE", f"/v1/vms/{vm}")


async def test_command_line_verifies_and_maps(api: FakeApi) -> None:
    key = api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    environment = {"STEAD_API_URL": api.url, "STEAD_API_KEY": key}

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

    vm = api.vm
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


async def test_command_line_creates_a_vm_with_domains(api: FakeApi) -> None:
    shell = Shell(api.url, api.callers["owner"]["Authorization"].removeprefix("Bearer "))
    made = await shell.ask("vm", "create", "--domain", "one.style.dev:80", "-d", "two.style.dev")
    assert made["domains"] == ["one.style.dev", "two.style.dev"]
    mapped = api.installation.domains.of_machine(made["id"])
    assert [mapping.port for mapping in mapped] == [80, 3000]
    await api.installation.machines.delete(made["id"])
    refused = await shell.refused("vm", "create", "--domain", "a.style.dev:0", code=2)
    assert "invalid port in 'a.style.dev:0'" in refused
